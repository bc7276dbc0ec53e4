"""The rings need far less temporary memory than gathering first, forward and backward."""

from __future__ import annotations

import pytest

from tests.parallel.memory import temporary_mebibytes


@pytest.mark.parametrize("direction", ["one", "both"])
@pytest.mark.parametrize(
    ("size", "loop", "share"),
    [(8, "auto", 1 / 2), (4, "rolled", 3 / 4)],
)
def test_value_and_gradient_need_less_memory(
    size: int, loop: str, share: float, direction: str
) -> None:
    plain = temporary_mebibytes(size)
    ring = temporary_mebibytes(size, direction=direction, loop=loop)
    assert ring < share * plain
