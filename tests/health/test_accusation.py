"""An accusation says what is known, and can be read back from a log."""

import pytest

from drumline.health import Accusation, HardwareFault
from drumline.health.accusation import read, sentence


@pytest.mark.parametrize(
    ("host", "chip", "line"),
    [
        (1, 5, "drumline: chip 5 of host 1 computes wrong: 2 + 2 = 5"),
        (1, None, "drumline: host 1 computes wrong: 2 + 2 = 5"),
        (None, None, "drumline: a chip of this slice computes wrong: 2 + 2 = 5"),
    ],
)
def test_as_much_as_is_known_is_said_and_read(
    host: int | None, chip: int | None, line: str
) -> None:
    assert sentence("2 + 2 = 5", host=host, chip=chip) == line
    assert read(f"drumline.health.HardwareFault: {line}\n") == Accusation("2 + 2 = 5", host, chip)


def test_it_is_one_line_whatever_the_reason() -> None:
    assert read(sentence("one\n  two", host=0)) == Accusation("one two", 0)


def test_other_lines_accuse_nobody() -> None:
    assert read("chip 5 of host 1 computes wrong: says who?") is None
    assert read("drumline: host 1 is slow: 2 s a step") is None


def test_a_chip_is_somewhere() -> None:
    with pytest.raises(ValueError, match="name the host too"):
        sentence("lies", chip=3)


def test_the_exception_says_it_and_keeps_the_parts() -> None:
    fault = HardwareFault("2 + 2 = 5", host=1, chip=5)
    assert str(fault) == sentence("2 + 2 = 5", host=1, chip=5)
    assert (fault.why, fault.host, fault.chip) == ("2 + 2 = 5", 1, 5)
