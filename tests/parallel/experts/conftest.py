"""What makes many small programs cheap."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.parallel.experts import exchange as experts_exchange
from drumline.parallel.grouped import matmul as grouped_matmul
from drumline.parallel.grouped import rows as grouped_rows


@pytest.fixture
def traced_for_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare programs the branches for other devices, which are half of their tracing."""

    def by_platform(*operands: Any, default: Any, cpu: Any = None, **_: Any) -> Any:
        return (cpu or default)(*operands)

    for module in (experts_exchange, grouped_matmul, grouped_rows):
        monkeypatch.setattr(module, "by_platform", by_platform)
