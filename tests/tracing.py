"""Skip the tracing of branches for other devices, which no device here runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from drumline.parallel.experts import exchange, routing
from drumline.parallel.grouped import matmul, rows


@contextmanager
def traced_for_cpu_alone() -> Iterator[None]:
    """Trace programs with experts for the CPU only, which halves their tracing time.

    `tests.parallel.experts.test_other_devices` tests that the other branches trace and lower, and
    `tests.inspect.test_examples` tests it for whole models.
    """

    def by_platform(*operands: Any, default: Any, cpu: Any = None, **_: Any) -> Any:
        return (cpu or default)(*operands)

    with ExitStack() as stack:
        for module in (exchange, routing, matmul, rows):
            stack.enter_context(patch.object(module, "by_platform", by_platform))
        yield
