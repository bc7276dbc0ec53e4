"""The cause of a failed attempt: the host that failed first, and whether the host is bad. Pure.

The patterns match the output of the driver, of libtpu, of JAX, and of Drumline's own burn-in and
training.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from drumline.health.fault_report import BURN_IN_FAILED, FaultReport, parse_fault_report
from drumline.jobs.core.host_history import EvidenceKind
from drumline.jobs.core.state import Cause, CauseKind
from drumline.observed import HostPhase, HostReport

EXIT_FOR_RESTART = 75
"""The exit code (EX_TEMPFAIL) of a program that saved its work and asks to be started again."""
CLOCK_SKEW = 0.25
"""Seconds by which the clocks of two hosts may differ. Errors this close have no order."""


# --- The state of one host --------------------------------------------------------------------


def has_failed(report: HostReport) -> bool:
    """Return True if a host has failed, for any reason."""
    if report.phase is HostPhase.EXITED:
        return report.exit_code != 0
    return report.phase in {HostPhase.FAILED, HostPhase.MISSING}


def killed_by_signal(report: HostReport) -> bool:
    """Return True if SIGTERM or SIGKILL ended the program, as Python or a shell reports it."""
    return report.exit_code in {-9, -15, 128 + 9, 128 + 15}


def requested_restart(report: HostReport) -> bool:
    """Return True if the program saved its work and asks to be started again."""
    return report.phase is HostPhase.EXITED and report.exit_code == EXIT_FOR_RESTART


def ended_by_sigterm(report: HostReport) -> bool:
    """Return True if a SIGTERM from outside Drumline ended the program.

    Attempts that Drumline stops are not diagnosed. So either the host is shutting down, or somebody
    on it sent the signal. Programs without a handler (a shell script, plain Python) end like this.
    """
    return report.phase is HostPhase.EXITED and report.exit_code in {-15, 128 + 15}


# --- The first host that failed ---------------------------------------------------------------


def find_cause(failed: Sequence[HostReport], reports: Sequence[HostReport]) -> Cause:
    """Return the cause of a failure: the earliest error among the `failed` hosts of all `reports`.

    The other hosts fail as a consequence. An exception is a burn-in or a training that names the
    host whose chip computes wrong results. Then that host is the cause, whichever host reports it.
    """
    hosts = len(reports)
    fault_report = _find_fault_report_by_host(failed)
    if fault_report is not None:
        return _cause_of_fault_report(*fault_report, reports)
    first, second = _first_two(failed)
    ahead_seconds = None
    if second is not None and first.error_at is not None and second.error_at is not None:
        ahead_seconds = round(second.error_at - first.error_at, 3)
    output = "\n".join((first.error, *first.tail))
    error, evidence = first.error, ""
    if first.phase is HostPhase.MISSING:
        kind, evidence = CauseKind.BAD_HOST, EvidenceKind.START
        error = first.error or "rebooted, the program is gone"
    elif indicates_bad_host(first.exit_code, output, _run_seconds(first)) or (
        first.phase is HostPhase.FAILED and is_chip_error(first.error)
    ):
        kind, evidence = CauseKind.BAD_HOST, EvidenceKind.START
    elif first.phase is HostPhase.FAILED:
        kind = CauseKind.SETUP_FAILED
    elif requested_restart(first):
        kind = CauseKind.RESTART_REQUESTED
    elif ended_by_sigterm(first):
        kind, error = CauseKind.SIGTERM, "stopped by SIGTERM from outside Drumline"
    else:
        kind, error = CauseKind.PROGRAM_FAILED, first.error or f"exit code {first.exit_code}"
    return Cause(kind, first.index, hosts, error, first.tail, ahead_seconds, evidence)


def _first_two(failed: Sequence[HostReport]) -> tuple[HostReport, HostReport | None]:
    """Return the host that failed first, and the next one."""
    by_time = sorted(
        failed,
        key=lambda r: (
            r.phase is not HostPhase.MISSING,
            r.error_at is None,
            r.error_at or 0.0,
            r.index,
        ),
    )
    first = _restart_request(by_time) or _without_symptoms(by_time)
    return first, next((report for report in by_time if report is not first), None)


def _find_fault_report_by_host(
    failed: Sequence[HostReport],
) -> tuple[HostReport, FaultReport] | None:
    """Return a failed host whose program names a wrong chip; first one that names its host."""
    fault_reports = [
        (report, fault_report)
        for report in failed
        if report.exit_code not in {None, 0}
        if (fault_report := find_fault_report("\n".join((report.error, *report.tail)))) is not None
    ]
    naming_host = [pair for pair in fault_reports if pair[1].host is not None]
    return next(iter([*naming_host, *fault_reports]), None)


def _cause_of_fault_report(
    reporter: HostReport, fault_report: FaultReport, reports: Sequence[HostReport]
) -> Cause:
    index_of_rank = {report.rank: report.index for report in reports if report.rank is not None}
    bad_host = None if fault_report.host is None else index_of_rank.get(fault_report.host)
    message = fault_report.sentence.removeprefix("drumline: ")
    if bad_host is None:
        # No evidence is recorded, because the reporting host may be fine.
        return Cause(CauseKind.BAD_HOST, reporter.index, len(reports), message, reporter.tail)
    in_burn_in = reporter.exit_code == BURN_IN_FAILED
    evidence = EvidenceKind.BURN_IN if in_burn_in else EvidenceKind.REPLAY
    return Cause(CauseKind.BAD_HOST, bad_host, len(reports), message, reporter.tail, proof=evidence)


def _run_seconds(report: HostReport) -> float | None:
    if report.started_at is None or report.error_at is None:
        return None
    return report.error_at - report.started_at


def _restart_request(failed: Sequence[HostReport]) -> HostReport | None:
    """Return a host that asks for a restart, if all others do too or were ended by a signal."""
    if not all(requested_restart(report) or killed_by_signal(report) for report in failed):
        return None
    return next((report for report in failed if requested_restart(report)), None)


_SYMPTOM = re.compile(
    r"closed by peer|connection (was )?(reset|refused|closed)|broken pipe|heartbeat"
    r"|coordination service|barrier|DEADLINE_EXCEEDED|UNAVAILABLE|gloo",
    re.IGNORECASE,
)
"""Errors of a program that lost the connection to another host."""


def _without_symptoms(by_time: Sequence[HostReport]) -> HostReport:
    """Return the first host, or one as early whose error is more than a lost connection."""
    first = by_time[0]
    if first.phase is HostPhase.MISSING or first.error_at is None:
        return first
    as_early = [r for r in by_time if (r.error_at or 0.0) - first.error_at <= CLOCK_SKEW]
    return next((r for r in as_early if r.error and not _SYMPTOM.search(r.error)), first)


# --- Bad hosts --------------------------------------------------------------------------------


class ErrorPattern(NamedTuple):
    """A pattern in the output of a failed program, and its meaning for the host."""

    pattern: str
    bad_host: bool
    reason: str


ERROR_PATTERNS = (
    ErrorPattern(r"Couldn't open iommu group", True, "the driver has lost the chip"),
    ErrorPattern(r"open\(/dev/vfio", True, "the chip cannot be opened although no process uses it"),
    ErrorPattern(r"Failed to initialize TPU system", True, "the chips do not start"),
    ErrorPattern(r"TPU initialization failed", True, "the chips do not start"),
    ErrorPattern(r"No accelerator found", True, "the chips are missing"),
    ErrorPattern(r"CHIP_DRIVER_ERROR", True, "the driver reports an error of the chip"),
    ErrorPattern(r"index_on_host\(\) == i", True, "the host counts its chips wrongly, each time"),
    ErrorPattern(r"Mesh build was incomplete, unassigned nodes", True, "the mesh misses chips"),
    ErrorPattern(r"Physical location: \S+", True, "libtpu names the chip"),
    ErrorPattern(r"missed \d+ health checks", True, "the runtime lost the chip's controller"),
    ErrorPattern(
        r"libtpu\.so already in use", False, "a process uses the chips; the agent ends it"
    ),
    ErrorPattern(r"libtpu_lockfile", False, "a process uses the chips; the agent ends it"),
    ErrorPattern(r"TPU is already in use by process", False, "as above"),
    ErrorPattern(r"SW_INJECT_ERROR", False, "another host failed, and this one reports it"),
    ErrorPattern(r"different launch id", False, "the hosts run different programs"),
    ErrorPattern(r"RESOURCE_EXHAUSTED", False, "the program needs more memory than there is"),
)
"""A pattern that excuses the host outweighs the others, which follow from it."""

CRASH_AT_START_SECONDS = 60.0
"""Seconds after the start within which a segmentation fault means a bad host. libtpu crashes like
this on chips that do not answer."""

_BAD_HOST = re.compile("|".join(e.pattern for e in ERROR_PATTERNS if e.bad_host), re.IGNORECASE)
_EXCUSE = re.compile("|".join(e.pattern for e in ERROR_PATTERNS if not e.bad_host), re.IGNORECASE)
_TRACEBACK = "Traceback (most recent call last)"
_BACKEND = re.compile(r"Unable to initialize backend 'tpu'", re.IGNORECASE)
_MAX_CHARACTERS = 200_000
_SEGMENTATION_FAULTS = (139, -11)


def find_fault_report(text: str) -> FaultReport | None:
    """Return the first fault_report in a program's output, first one that names a host."""
    fault_reports = [
        report for line in text.splitlines() if (report := parse_fault_report(line)) is not None
    ]
    naming_host = [fault_report for fault_report in fault_reports if fault_report.host is not None]
    return next(iter([*naming_host, *fault_reports]), None)


def indicates_bad_host(
    exit_code: int | None, output: str, run_seconds: float | None = None
) -> bool:
    """Return True if the last output of a program shows that it failed because of its host.

    Output of a program that exited with 0, or still runs, proves nothing. Neither does a pattern
    before a traceback about something else, because the program continued after it. A leftover
    process that uses the chips does not make a host bad, because the agent ends it.
    """
    if exit_code is None or exit_code == 0:
        return False
    output = output[-_MAX_CHARACTERS:]
    traceback = output.find(_TRACEBACK)
    if traceback >= 0 and not _BACKEND.search(output, traceback):
        output = output[traceback:]
    if _EXCUSE.search(output):
        return False
    at_start = run_seconds is not None and 0 <= run_seconds <= CRASH_AT_START_SECONDS
    crashed = exit_code in _SEGMENTATION_FAULTS and at_start
    return crashed or bool(_BAD_HOST.search(output))


def is_chip_error(error: str) -> bool:
    """Return True if a host could not be prepared because its chips cannot be opened."""
    return bool(_BAD_HOST.search(error)) and not _EXCUSE.search(error)
