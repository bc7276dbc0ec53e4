"""A fixture that makes many small programs cheaper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import tracing


@pytest.fixture
def traced_for_cpu_alone() -> Iterator[None]:
    """Skip the branches for other devices, which take half of the tracing time."""
    with tracing.traced_for_cpu_alone():
        yield
