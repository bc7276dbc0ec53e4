"""Why an attempt failed. Pure: finds the host that failed first from the reports of all hosts."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from drumline.health.accusation import BURN_IN_FAILED, Accusation, read
from drumline.jobs.core.host_history import Proof
from drumline.jobs.core.state import Cause
from drumline.observed import HostPhase, HostReport

GO_ON_LATER = 75
"""Exit code (EX_TEMPFAIL) of a program that saved its work and wants to be started again."""


def failing(report: HostReport) -> bool:
    """Whether a host has failed, for whatever reason."""
    if report.phase is HostPhase.EXITED:
        return report.exit_code != 0
    return report.phase in {HostPhase.FAILED, HostPhase.MISSING}


def by_signal(report: HostReport) -> bool:
    """Whether its program was ended by SIGTERM or SIGKILL, counted as in Python or in shells."""
    return report.exit_code in {-9, -15, 128 + 9, 128 + 15}


def leaving(report: HostReport) -> bool:
    """Whether its program saved its work and wants to be started again."""
    return report.phase is HostPhase.EXITED and report.exit_code == GO_ON_LATER


def ended_by_sigterm(report: HostReport) -> bool:
    """Whether its program died of a SIGTERM. Not ours: an attempt that we stop is not judged.

    So the host is shutting down, or somebody on it sent the signal. Programs without a handler (a
    shell script, plain Python) always end like this.
    """
    return report.phase is HostPhase.EXITED and report.exit_code in {-15, 128 + 15}


def find_cause(reports: Sequence[HostReport], everybody: Sequence[HostReport]) -> Cause:
    """The first failing host, by its earliest error; its siblings only follow, and louder.

    `reports` are those of the hosts that failed, among `everybody`.

    But where a burn-in or a training says whose chip computes wrong, that is the host to blame,
    whoever was the first to say so.
    """
    hosts = len(everybody)
    wrong = _accusation(reports)
    if wrong is not None:
        return _lying(*wrong, everybody)
    by_time = sorted(
        reports,
        key=lambda r: (
            r.phase is not HostPhase.MISSING,
            r.error_at is None,
            r.error_at or 0.0,
            r.index,
        ),
    )
    first = _saved_and_left(by_time) or _not_a_symptom(by_time)
    by_time = [first, *(report for report in by_time if report is not first)]
    ahead = None
    if len(by_time) > 1 and first.error_at is not None and by_time[1].error_at is not None:
        ahead = round(by_time[1].error_at - first.error_at, 3)
    text = "\n".join((first.error, *first.tail))
    proof = ""
    if first.phase is HostPhase.MISSING:
        kind, error = "bad host", first.error or "rebooted, the program is gone"
        proof = Proof.START
    elif blames_host(first.exit_code, text, _ran_for(first)) or (
        first.phase is HostPhase.FAILED and chips_unusable(first.error)
    ):
        kind, error, proof = "bad host", first.error, Proof.START
    elif first.phase is HostPhase.FAILED:
        kind, error = "set-up failed", first.error
    elif leaving(first):
        kind, error = "go on later", first.error
    elif ended_by_sigterm(first):
        kind, error = "told to end", "ended by SIGTERM, which Drumline did not send"
    else:
        kind, error = "program failed", first.error or f"exit code {first.exit_code}"
    return Cause(kind, first.index, hosts, error, first.tail, ahead, proof)


def _accusation(reports: Sequence[HostReport]) -> tuple[HostReport, Accusation] | None:
    """What a failed host says about who computes wrong; one that names a host goes first."""
    found = [
        (report, accused)
        for report in reports
        if report.exit_code not in {None, 0}
        if (accused := computes_wrong("\n".join((report.error, *report.tail)))) is not None
    ]
    named = next((each for each in found if each[1].host is not None), None)
    return named or (found[0] if found else None)


def _lying(reporter: HostReport, accused: Accusation, everybody: Sequence[HostReport]) -> Cause:
    by_rank = {report.rank: report.index for report in everybody if report.rank is not None}
    guilty = None if accused.host is None else by_rank.get(accused.host)
    said = accused.sentence.removeprefix("drumline: ")
    if guilty is None:
        # Nobody is remembered for it: the reporter is only the witness.
        return Cause("bad host", reporter.index, len(everybody), said, reporter.tail)
    burnt = reporter.exit_code == BURN_IN_FAILED
    proof = Proof.BURN_IN if burnt else Proof.REPLAY
    return Cause("bad host", guilty, len(everybody), said, reporter.tail, proof=proof)


def _ran_for(report: HostReport) -> float | None:
    if report.started_at is None or report.error_at is None:
        return None
    return report.error_at - report.started_at


def _saved_and_left(reports: Sequence[HostReport]) -> HostReport | None:
    """A host that saved its work, if every other host did too or was ended by a signal."""
    if not all(leaving(report) or by_signal(report) for report in reports):
        return None
    return next((report for report in reports if leaving(report)), None)


CLOCK_SKEW = 0.25
"""Seconds by which the clocks of two hosts may differ; errors this close have no order."""
_SYMPTOM = re.compile(
    r"closed by peer|connection (was )?(reset|refused|closed)|broken pipe|heartbeat"
    r"|coordination service|barrier|DEADLINE_EXCEEDED|UNAVAILABLE|gloo",
    re.IGNORECASE,
)


def _not_a_symptom(by_time: Sequence[HostReport]) -> HostReport:
    """The first host, or one as early as it whose error is more than the loss of a sibling."""
    first = by_time[0]
    if first.phase is HostPhase.MISSING or first.error_at is None:
        return first
    as_early = [r for r in by_time if (r.error_at or 0.0) - first.error_at <= CLOCK_SKEW]
    return next((r for r in as_early if r.error and not _SYMPTOM.search(r.error)), first)


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


def computes_wrong(text: str) -> Accusation | None:
    """The first accusation in the output of a program; one that names a host goes before others."""
    found = [accusation for line in text.splitlines() if (accusation := read(line)) is not None]
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
