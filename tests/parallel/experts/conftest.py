"""What makes many small programs cheap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import tracing


@pytest.fixture
def traced_for_cpu_alone() -> Iterator[None]:
    """Spare programs the branches for other devices, which are half of their tracing."""
    with tracing.traced_for_cpu_alone():
        yield
