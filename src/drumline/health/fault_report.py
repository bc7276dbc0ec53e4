"""Fault reports: lines of text about hardware that computes wrong results.

A program that finds a bad chip raises `HardwareFault` and ends. The job manager finds the line in
the program's output and learns which host to avoid. Both sides use this module, so it imports only
the standard library.
"""

import re
from dataclasses import dataclass

from drumline.deprecated import renamed_attribute, renamed_keywords

BURN_IN_FAILED = 86
"""The exit code of a job's burn-in that found a bad chip. Neither Python nor a shell uses it."""

# More digits than any slice can have are not a report.
_NUMBER = r"[0-9]{1,6}"
_HARDWARE = (
    rf"chip (?P<chip>[0-9]{{1,9}}) of host (?P<chip_host>{_NUMBER})|host (?P<host>{_NUMBER})"
    r"|a chip of this slice"
)
_SENTENCE = re.compile(rf"drumline: (?:{_HARDWARE}) computes wrong: (?P<reason>.+)")


@renamed_keywords(why="reason")
@dataclass(frozen=True)
class FaultReport:
    """The hardware that computes wrong results, as far as it is known, and the evidence."""

    reason: str
    host: int | None = None
    """The process index of the host, or None if it is unknown."""
    chip: int | None = None
    """The id of the JAX device, or None if it is unknown."""

    why = renamed_attribute("why", "reason")

    def __post_init__(self) -> None:
        """Reject a chip without a host."""
        if self.chip is not None and self.host is None:
            raise ValueError(f"chip {self.chip} is reported without its host: name the host too")

    @property
    def sentence(self) -> str:
        """The report as a line of text. Line breaks in the reason become spaces."""
        if self.chip is not None:
            hardware = f"chip {self.chip} of host {self.host}"
        elif self.host is not None:
            hardware = f"host {self.host}"
        else:
            hardware = "a chip of this slice"
        return f"drumline: {hardware} computes wrong: {' '.join(self.reason.split())}"


def parse_fault_report(line: str) -> FaultReport | None:
    """Return the fault report in a line of output, or None if the line has none."""
    match = _SENTENCE.search(line)
    if match is None:
        return None
    host = match["chip_host"] or match["host"]
    return FaultReport(
        match["reason"].strip(),
        None if host is None else int(host),
        None if match["chip"] is None else int(match["chip"]),
    )


class HardwareFault(Exception):
    """Hardware computes wrong results. The text is the fault report; programs let it end them."""

    @renamed_keywords(why="reason")
    def __init__(self, reason: str, *, host: int | None = None, chip: int | None = None) -> None:
        """`reason` is the evidence, as in `loss differs on replay: 2 of 3 runs agree`."""
        super().__init__(FaultReport(reason, host, chip).sentence)
        self.reason, self.host, self.chip = reason, host, chip

    why = renamed_attribute("why", "reason")
