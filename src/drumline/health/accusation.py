"""What is said of hardware that computes wrong, in one line that a machine can read back.

A program that finds a bad chip raises `HardwareFault` and ends with it; the job manager finds the
line in the program's last words and learns which host to stay away from. Standard library only:
both sides of that conversation take what they say and read from here.
"""

import re
from dataclasses import dataclass

BURN_IN_FAILED = 86
"""The exit code of a burn-in on a job's hosts that found a bad chip: unlike any of Python or a
shell, so that the job manager knows who says it."""

# No slice has a million hosts; more digits are nonsense that somebody printed.
_NUMBER = r"[0-9]{1,6}"
_WHO = (
    rf"chip (?P<chip>[0-9]{{1,9}}) of host (?P<by>{_NUMBER})|host (?P<host>{_NUMBER})"
    r"|a chip of this slice"
)
_SENTENCE = re.compile(rf"drumline: (?:{_WHO}) computes wrong: (?P<why>.+)")


@dataclass(frozen=True)
class Accusation:
    """Which hardware computes wrong, as far as it is known, and what shows it."""

    why: str
    host: int | None = None
    """The process index of the host; None where it cannot be told."""
    chip: int | None = None
    """The id of the JAX device; None where it cannot be told."""

    def __post_init__(self) -> None:
        """Refuse a chip that is nowhere."""
        if self.chip is not None and self.host is None:
            raise ValueError(f"chip {self.chip} is accused without its host: name the host too")

    @property
    def sentence(self) -> str:
        """The line, whatever the reason looks like: a line break in it would cut it off."""
        if self.chip is not None:
            who = f"chip {self.chip} of host {self.host}"
        elif self.host is not None:
            who = f"host {self.host}"
        else:
            who = "a chip of this slice"
        return f"drumline: {who} computes wrong: {' '.join(self.why.split())}"


def sentence(why: str, *, host: int | None = None, chip: int | None = None) -> str:
    """`drumline: chip 5 of host 1 computes wrong: <why>`, or less where less is known."""
    return Accusation(why, host, chip).sentence


def read(line: str) -> Accusation | None:
    """What a line accuses, wherever in the line that begins; None for every other line."""
    found = _SENTENCE.search(line)
    if found is None:
        return None
    host = found["by"] or found["host"]
    return Accusation(
        found["why"].strip(),
        None if host is None else int(host),
        None if found["chip"] is None else int(found["chip"]),
    )


class HardwareFault(Exception):
    """Hardware computes wrong; the text is the accusation. Programs end with it, uncaught."""

    def __init__(self, why: str, *, host: int | None = None, chip: int | None = None) -> None:
        """`why` is the evidence, as in `loss differs on replay: 2 of 3 runs agree`."""
        accusation = Accusation(why, host, chip)
        super().__init__(accusation.sentence)
        self.why, self.host, self.chip = why, host, chip
