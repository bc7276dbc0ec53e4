"""What a program prints when its host is bad, and what only looks like it. Pure.

The words are those of the driver, of libtpu, of JAX, and of Drumline's own burn-in and training.
"""

import re
from typing import NamedTuple

from drumline.health.fault_report import FaultReport, parse_fault_report


class Sign(NamedTuple):
    """Words in the output of a failed program, and whether they accuse its host."""

    pattern: str
    accuses: bool
    because: str


SIGNS = (
    Sign(r"Couldn't open iommu group", True, "the driver has lost the chip"),
    Sign(r"open\(/dev/vfio", True, "no process of ours holds the chip, and it cannot be opened"),
    Sign(r"Failed to initialize TPU system", True, "the chips do not come up"),
    Sign(r"TPU initialization failed", True, "the chips do not come up"),
    Sign(r"No accelerator found", True, "the chips are not there"),
    Sign(r"CHIP_DRIVER_ERROR", True, "the driver reports the chip"),
    Sign(r"index_on_host\(\) == i", True, "the host counts its chips wrongly, after every sweep"),
    Sign(r"Mesh build was incomplete, unassigned nodes", True, "chips are missing from the mesh"),
    Sign(r"Physical location: \S+", True, "libtpu names the very chip"),
    Sign(r"missed \d+ health checks", True, "the runtime lost the chip's own controller"),
    Sign(r"libtpu\.so already in use", False, "a process holds the chips, which the agent ends"),
    Sign(r"libtpu_lockfile", False, "as above"),
    Sign(r"TPU is already in use by process", False, "as above"),
    Sign(r"SW_INJECT_ERROR", False, "the reporter is only the witness of another's failure"),
    Sign(r"different launch id", False, "the hosts run different programs"),
    Sign(r"RESOURCE_EXHAUSTED", False, "the program wants more memory than there is"),
)
"""A sign that does not accuse outweighs those that do: what follows it is its consequence."""

CRASHED_AT_START = 60.0
"""Seconds after its start within which a segmentation fault is held against the host: libtpu ends
like that on chips that do not answer."""

_ACCUSING = re.compile("|".join(sign.pattern for sign in SIGNS if sign.accuses), re.IGNORECASE)
_EXCUSING = re.compile("|".join(sign.pattern for sign in SIGNS if not sign.accuses), re.IGNORECASE)
_TRACEBACK = "Traceback (most recent call last)"
_BACKEND = re.compile(r"Unable to initialize backend 'tpu'", re.IGNORECASE)
_LAST_OF_A_LOG = 200_000
_SEGMENTATION_FAULTS = (139, -11)


def computes_wrong(text: str) -> FaultReport | None:
    """The first accusation in the output of a program; one that names a host goes before others."""
    found = [
        accusation
        for line in text.splitlines()
        if (accusation := parse_fault_report(line)) is not None
    ]
    named = next((each for each in found if each.host is not None), None)
    return named or (found[0] if found else None)


def blames_host(exit_code: int | None, text: str, ran_for: float | None = None) -> bool:
    """Whether a program ended because its host is bad, by what it last printed.

    A phrase in the log of a program that exited 0, or still runs, means nothing. A phrase before a
    traceback about something else means nothing either: the program went on after it. A stale
    process that holds the chips is not a bad host; the agent ends it.
    """
    if exit_code is None or exit_code == 0:
        return False
    text = text[-_LAST_OF_A_LOG:]
    start = text.find(_TRACEBACK)
    if start >= 0 and not _BACKEND.search(text, start):
        text = text[start:]
    if _EXCUSING.search(text):
        return False
    at_start = ran_for is not None and 0 <= ran_for <= CRASHED_AT_START
    crashed = exit_code in _SEGMENTATION_FAULTS and at_start
    return crashed or bool(_ACCUSING.search(text))


def chips_unusable(error: str) -> bool:
    """Whether the host could not be prepared because its chips cannot be opened."""
    return bool(_ACCUSING.search(error)) and not _EXCUSING.search(error)
