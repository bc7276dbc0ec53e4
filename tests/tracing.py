"""What spares a test the tracing of branches that no device here will run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from drumline.parallel.experts import exchange, routing
from drumline.parallel.grouped import matmul, rows


@contextmanager
def traced_for_cpu_alone() -> Iterator[None]:
    """Leave the branches for other devices out of programs with experts: half of their tracing.

    That they trace and lower is `tests.parallel.experts.test_other_devices`' to show, and of whole
    models `tests.inspect.test_examples`'.
    """

    def by_platform(*operands: Any, default: Any, cpu: Any = None, **_: Any) -> Any:
        return (cpu or default)(*operands)

    with ExitStack() as stack:
        for module in (exchange, routing, matmul, rows):
            stack.enter_context(patch.object(module, "by_platform", by_platform))
        yield
