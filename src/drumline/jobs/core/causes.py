"""The cause of a failed attempt: the host that failed first, and whether the host is bad. Pure.

The patterns match the output of the driver, of libtpu, of JAX, and of Drumline's own burn-in and
training.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from drumline.health.fault_report import BURN_IN_FAILED, FaultReport, parse_fault_report
from drumline.hosts.agent.transient import find_transient_error
from drumline.jobs.core.host_history import EvidenceType
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Cause,
)
from drumline.observed import HostPhase, HostReport

EXIT_FOR_RESTART = 75
"""The exit code (EX_TEMPFAIL) of a program that saved its work and asks for a restart."""
CLOCK_SKEW = 0.25
"""Seconds by which the clocks of two hosts may differ. Errors this close have no order."""


# --- The state of one host --------------------------------------------------------------------


def has_failed(report: HostReport) -> bool:
    """Return True if a host has failed, for any reason."""
    if report.phase is HostPhase.EXITED:
        return report.exit_code != 0
    return report.phase in {HostPhase.FAILED, HostPhase.MISSING}


def killed_by_signal(report: HostReport) -> bool:
    """Return True if SIGTERM or SIGKILL terminated the program, as Python or a shell reports it."""
    return report.exit_code in {-9, -15, 128 + 9, 128 + 15}


def requested_restart(report: HostReport) -> bool:
    """Return True if the program saved its work and asks for a restart."""
    return report.phase is HostPhase.EXITED and report.exit_code == EXIT_FOR_RESTART


def ended_by_sigterm(report: HostReport) -> bool:
    """Return True if a SIGTERM from outside Drumline terminated the program.

    Attempts that Drumline stops are not diagnosed. So either the host is shutting down, or somebody
    on it sent the signal. Programs without a handler (a shell script, plain Python) exit like this.
    """
    return report.phase is HostPhase.EXITED and report.exit_code in {-15, 128 + 15}


# --- The output of a program ------------------------------------------------------------------


class Meaning(StrEnum):
    """The cause of a failure, as far as the last output of a program or a set-up shows it."""

    NONE = "no failure"
    PROGRAM = "program"
    BAD_HOST = "bad host"
    AMBIGUOUS_START = "ambiguous start"
    """The chips did not start because of the host or the program. A second host shows which."""
    TRANSIENT = "transient"
    """A set-up failed because of something that passes, such as a lock of apt."""
    PREEMPTED = "preempted"
    STOPPED = "stopped"
    """A SIGTERM from outside Drumline terminated the program, often before a preemption."""
    OTHER_HOST = "another host"
    """The program was disconnected from a different host, where the cause is."""
    RESTART = "restart"
    """The program saved its work and asks for a restart."""


class ErrorPattern(NamedTuple):
    """A pattern in the output of a failed program, and its meaning."""

    pattern: str
    meaning: Meaning
    reason: str


_BACKEND_TEXT = r"Unable to initialize backend '?tpu'?"
ERROR_PATTERNS = (
    # The program or its environment.
    ErrorPattern(
        r"libtpu\.so (?:is )?already in use|libtpu_lockfile", Meaning.PROGRAM,
        "another process of the program uses the chips; the agent ends those of others",
    ),
    ErrorPattern(
        r"TPU is already in use by (?:a |another )?process", Meaning.PROGRAM,
        "another process of the program uses the chips; the agent ends those of others",
    ),
    ErrorPattern(r"SW_INJECT_ERROR", Meaning.PROGRAM, "another host failed"),
    ErrorPattern(r"different launch id", Meaning.PROGRAM, "the hosts run different programs"),
    ErrorPattern(r"RESOURCE_EXHAUSTED", Meaning.PROGRAM, "the program needs more memory"),
    ErrorPattern(
        r"libtpu\.so: cannot open shared object|Failed to open libtpu|No module named '?libtpu"
        r"|Could not find registered platform|not in the list of known backends"
        r"|no platforms that are instances of tpu|LoadPjrtPlugin is not implemented"
        r"|PJRT API (?:minor |major )?version", Meaning.PROGRAM,
        "the environment has no libtpu, or one that does not fit its JAX",
    ),
    # Host or program.
    ErrorPattern(
        r"No ba16c7433 device found", Meaning.AMBIGUOUS_START,
        "libtpu finds no chip: its version may not fit the chip, or the chip is missing",
    ),
    ErrorPattern(
        r"Failed to get global TPU topology", Meaning.AMBIGUOUS_START,
        "the hosts did not agree on their chips: an image without the driver, or a bad host",
    ),
    ErrorPattern(
        r"(?:/dev/vfio|/dev/accel|iommu group)[^\n]{0,80}Device or resource busy"
        r"|Device or resource busy[^\n]{0,80}(?:/dev/vfio|/dev/accel|iommu group)",
        Meaning.AMBIGUOUS_START, "a process that has ended by now, or the driver, held the chip",
    ),
    ErrorPattern(
        r"(?:/dev/vfio|/dev/accel)[^\n]{0,80}(?:Permission denied|Operation not permitted)",
        Meaning.AMBIGUOUS_START, "the program may not open the chip",
    ),
    ErrorPattern(
        r"slice_builder_worker_addresses|No TPU Platform available|No TPU devices? (?:were )?found"
        r"|TPU backend setup/compile error", Meaning.AMBIGUOUS_START, "the TPU does not start",
    ),
    # The host.
    ErrorPattern(r"Couldn't open iommu group", Meaning.BAD_HOST, "the driver has lost the chip"),
    ErrorPattern(
        r"open\(/dev/(?:vfio|accel)", Meaning.BAD_HOST, "the chip cannot be opened"
    ),
    ErrorPattern(
        r"(?:/dev/vfio|/dev/accel)[^\n]{0,80}Input/output error"
        r"|Input/output error[^\n]{0,80}(?:/dev/vfio|/dev/accel)", Meaning.BAD_HOST,
        "the chip does not answer",
    ),
    ErrorPattern(
        r"uncorrectable (?:(?:ECC|memory|HBM) )+error", Meaning.BAD_HOST,
        "the memory of the chip has an error",
    ),
    ErrorPattern(r"Failed to initialize TPU system", Meaning.BAD_HOST, "the chips do not start"),
    ErrorPattern(r"TPU initialization failed", Meaning.BAD_HOST, "the chips do not start"),
    ErrorPattern(r"No accelerator found", Meaning.BAD_HOST, "the chips are missing"),
    ErrorPattern(
        r"CHIP_DRIVER_ERROR", Meaning.BAD_HOST, "the driver reports an error of the chip"
    ),
    ErrorPattern(
        r"index_on_host\(\) == i", Meaning.BAD_HOST,
        "the host counts its chips wrongly, each time",
    ),
    ErrorPattern(
        r"Mesh build was incomplete, unassigned nodes", Meaning.BAD_HOST, "the mesh misses chips"
    ),
    ErrorPattern(
        r"(?m:^[EF]\d{4}\b[^\n]*Physical location: \S+)|hit a bad TPU hardware", Meaning.BAD_HOST,
        "libtpu names the chip",
    ),
    ErrorPattern(
        r"missed \d+ health checks", Meaning.BAD_HOST, "the runtime lost the chip's controller"
    ),
    # Any other error of the TPU's backend.
    ErrorPattern(_BACKEND_TEXT, Meaning.AMBIGUOUS_START, "the TPU does not start"),
    # A different host, or the cloud.
    ErrorPattern(
        r"PollForError|Polled an error from coordination service|another task died"
        r"|task:\d+ heartbeat timeout|Barrier timed out|barrier[^\n]{0,80}timed out"
        r"|Failed to send RPC to coordination service|coordination service[^\n]{0,40}fatal error"
        r"|RegisterTask|cluster registration failed|tried to connect with a different incarnation"
        r"|tasks are unhealthy \(stopped sending heartbeats\)|ncclRemoteError"
        r"|gloo[^\n]{0,200}(?:Connect timeout|Timed out waiting)"
        r"|RuntimeError: UNAVAILABLE: failed to connect to all addresses"
        r"|SLICE_FAILURE_WORKER_UNAVAILABLE", Meaning.OTHER_HOST,
        "the program lost its connection to another host",
    ),
    ErrorPattern(
        r"\b(?:was|been|being|is) preempted|preemption (?:notice|event)|ACPI G2 Soft Off"
        r"|TERMINATE_ON_HOST_MAINTENANCE", Meaning.PREEMPTED, "the cloud took the host back",
    ),
)  # fmt: skip
"""The first pattern that matches decides: an excuse of the host outweighs the errors that follow
from it, and an error that names its cause outweighs one that does not."""

CRASH_AT_START_SECONDS = 60.0
"""Seconds after the start within which a segmentation fault means a bad host. libtpu crashes like
this on chips that do not answer."""

_PATTERNS = [(re.compile(e.pattern, re.IGNORECASE), e) for e in ERROR_PATTERNS]
_TRACEBACK = "Traceback (most recent call last)"
_BACKEND = re.compile(_BACKEND_TEXT, re.IGNORECASE)
_PACKAGE_MANAGER = re.compile(r"/pip/_(?:internal|vendor)/|/conda/|/apt_pkg|/snap/google-cloud")
_LOST_CONNECTION = re.compile(
    r"connection (?:was )?(?:reset|closed) by (?:remote )?peer|socket closed", re.IGNORECASE
)
_MAX_CHARACTERS = 200_000
_SEGMENTATION_FAULTS = (139, -11)


def find_fault_report(text: str) -> FaultReport | None:
    """Return the first fault report in a program's output, preferably with the name of a host."""
    fault_reports = [
        report for line in text.splitlines() if (report := parse_fault_report(line)) is not None
    ]
    naming_host = [fault_report for fault_report in fault_reports if fault_report.host is not None]
    return next(iter([*naming_host, *fault_reports]), None)


class Judgement(NamedTuple):
    """The meaning of a program's last output."""

    meaning: Meaning
    reason: str
    words: str = ""
    """The error without its numbers and addresses, to compare it across machines."""


def judge_output(exit_code: int | None, output: str, run_seconds: float | None = None) -> Judgement:
    """Return the meaning of the last output of a program or a set-up, by its exit code.

    Output of a program that exited with 0, or still runs, is no evidence. Neither is a pattern
    before an unrelated traceback, because the program continued after it. Output shows a suspicion
    at most: the host history excludes no host because of it alone.
    """
    if exit_code is None or exit_code == 0:
        return Judgement(Meaning.NONE, "the program did not fail")
    if exit_code == EXIT_FOR_RESTART:
        return Judgement(Meaning.RESTART, "the program saved its work and asks for a restart")
    output = output[-_MAX_CHARACTERS:]
    traceback = output.find(_TRACEBACK)
    if traceback >= 0 and not _BACKEND.search(output, traceback):
        output = output[traceback:]
    for pattern, entry in _PATTERNS:
        match = pattern.search(output)
        if match is not None:
            return Judgement(entry.meaning, entry.reason, _words(output, match))
    at_start = run_seconds is not None and 0 <= run_seconds <= CRASH_AT_START_SECONDS
    if exit_code in _SEGMENTATION_FAULTS and at_start:
        return Judgement(Meaning.BAD_HOST, "libtpu crashes like this on chips that do not answer")
    if exit_code in {-15, 128 + 15}:
        return Judgement(Meaning.STOPPED, "a SIGTERM from outside Drumline ended the program")
    # A traceback is the program's, except for that of a package manager.
    of_program = traceback >= 0 and not _PACKAGE_MANAGER.search(output)
    passing = "" if of_program else find_transient_error(output)
    if passing:
        return Judgement(Meaning.TRANSIENT, passing)
    if _LOST_CONNECTION.search(output):
        return Judgement(Meaning.OTHER_HOST, "the program lost its connection to another host")
    if exit_code in {-9, 128 + 9}:
        return Judgement(Meaning.PROGRAM, "killed, most likely because memory ran out")
    return Judgement(Meaning.PROGRAM, "no known error of hosts or of the cloud")


_VARYING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def _words(output: str, match: re.Match[str]) -> str:
    """Return the rest of the line from a match on, without numbers."""
    end = output.find("\n", match.start())
    line = output[match.start() : end if end >= 0 else None]
    return _VARYING.sub("#", line)[:200]


def indicates_bad_host(
    exit_code: int | None, output: str, run_seconds: float | None = None
) -> bool:
    """Return True if the last output of a program shows that it failed because of its host."""
    return judge_output(exit_code, output, run_seconds).meaning is Meaning.BAD_HOST


def is_chip_error(error: str) -> bool:
    """Return True if a host could not be prepared because its chips cannot be opened.

    The agent has stopped all previous programs by then, so a busy chip is an error of the host.
    """
    meaning = judge_output(1, error).meaning
    return meaning in {Meaning.BAD_HOST, Meaning.AMBIGUOUS_START}


# --- The first host that failed ---------------------------------------------------------------


def find_cause(
    failed: Sequence[HostReport], reports: Sequence[HostReport], starting: bool = True
) -> Cause:
    """Return the cause of a failure: the earliest error among the `failed` hosts of all `reports`.

    The other hosts fail as a consequence. An exception is a burn-in or a training that names the
    host whose chip computes wrong results. Then that host is the cause, whichever host reports it.
    `starting` says that the program has made no step yet. Then a host that still runs may be the
    one that the failed hosts waited for.
    """
    hosts = len(reports)
    fault_report = _find_fault_report_by_host(failed)
    if fault_report is not None:
        return _cause_of_fault_report(*fault_report, reports)
    hanging = _host_that_others_waited_for(failed, reports) if starting else None
    if hanging is not None:
        return hanging
    first, second = _first_two(failed)
    ahead_seconds = None
    if second is not None and first.error_at is not None and second.error_at is not None:
        ahead_seconds = round(second.error_at - first.error_at, 3)
    kind, error, judgement = _judge_host(first)
    if kind is EndReason.AMBIGUOUS_START and not starting:
        kind = EndReason.PROGRAM_FAILED
    bad_host = kind is EndReason.BAD_HOST
    return Cause(
        kind,
        first.index,
        hosts,
        error,
        first.tail,
        ahead_seconds,
        proof=EvidenceType.START if bad_host else "",
        claimed=bad_host and judgement is not None and not first.location,
        location=first.location if bad_host else "",
        words=judgement.words if judgement and kind is EndReason.AMBIGUOUS_START else "",
    )


def _judge_host(report: HostReport) -> tuple[EndReason, str, Judgement | None]:
    """Return the kind of a host's failure, its error, and the judgement of the program's output.

    The judgement is None if the host itself reports its fault.
    """
    error = report.error
    if report.phase is HostPhase.MISSING:
        return EndReason.BAD_HOST, error or "rebooted, the program is gone", None
    if report.phase is HostPhase.FAILED and is_chip_error(error):
        return EndReason.BAD_HOST, error, None
    if report.phase is HostPhase.FAILED:
        return EndReason.SETUP_FAILED, error, None
    if report.chip_error:
        return EndReason.BAD_HOST, f"{error}; {report.chip_error}".removeprefix("; "), None
    if report.chip_holder:
        return EndReason.PROGRAM_FAILED, f"{error}; the chip is held by {report.chip_holder}", None
    judgement = judge_output(
        report.exit_code, "\n".join((error, *report.tail)), _run_seconds(report)
    )
    match judgement.meaning:
        case Meaning.BAD_HOST:
            return EndReason.BAD_HOST, error, judgement
        case Meaning.AMBIGUOUS_START:
            return EndReason.AMBIGUOUS_START, error, judgement
    if requested_restart(report):
        return EndReason.RESTART_REQUESTED, error, judgement
    if ended_by_sigterm(report):
        return EndReason.SIGTERM, "stopped by SIGTERM from outside Drumline", judgement
    return EndReason.PROGRAM_FAILED, error or f"exit code {report.exit_code}", judgement


_NAMED_TASK = re.compile(r"/task:(\d{1,6})|\btask[ _](?:id[ =:]*)?(\d{1,6})")


def _host_that_others_waited_for(
    failed: Sequence[HostReport], reports: Sequence[HostReport]
) -> Cause | None:
    """Return the cause if all failed hosts waited for a host that still runs and made no step.

    Such a host hangs in the start of libtpu. Its siblings give up, and their program is not the
    cause. If multiple hosts still run and no error names a host, none is suspect.
    """
    running = [r for r in reports if r.phase is HostPhase.RUNNING and r.rank is not None]
    if not running or not all(_waited_for_another(report) for report in failed):
        return None
    if any(report.error or _TRACEBACK in "\n".join(report.tail) for report in running):
        return None  # its program failed, and JAX waits for the other hosts at the exit
    texts = " ".join(text for report in failed for text in (report.error, *report.tail))
    named = {int(a or b) for a, b in _NAMED_TASK.findall(texts)}
    suspects = [report for report in running if report.rank in named] or running
    first = min(failed, key=lambda report: (report.error_at or 0.0, report.index))
    error = f"hangs at the start, while host {first.index} gave up waiting for it: {first.error}"
    single = len(suspects) == 1
    return Cause(
        EndReason.BAD_HOST,
        suspects[0].index,
        len(reports),
        error,
        suspects[0].tail,
        proof=EvidenceType.START if single else "",
        claimed=single,
    )


def _waited_for_another(report: HostReport) -> bool:
    """Return True if the program exited only because a different host did not answer it."""
    if report.phase is not HostPhase.EXITED or requested_restart(report):
        return False
    output = "\n".join((report.error, *report.tail))
    return judge_output(report.exit_code, output).meaning is Meaning.OTHER_HOST


def _first_two(failed: Sequence[HostReport]) -> tuple[HostReport, HostReport | None]:
    """Return the first and the second host that failed."""
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
    """Return a failed host whose program names a wrong chip, preferably with the chip's host."""
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
        return Cause(EndReason.BAD_HOST, reporter.index, len(reports), message, reporter.tail)
    in_burn_in = reporter.exit_code == BURN_IN_FAILED
    evidence = EvidenceType.BURN_IN if in_burn_in else EvidenceType.REPLAY
    return Cause(EndReason.BAD_HOST, bad_host, len(reports), message, reporter.tail, proof=evidence)


def _run_seconds(report: HostReport) -> float | None:
    if report.started_at is None or report.error_at is None:
        return None
    return report.error_at - report.started_at


def _restart_request(failed: Sequence[HostReport]) -> HostReport | None:
    """Return a host that asks for a restart, if all others do too or were killed by a signal."""
    if not all(requested_restart(report) or killed_by_signal(report) for report in failed):
        return None
    return next((report for report in failed if requested_restart(report)), None)


_SYMPTOM = re.compile(
    r"closed by peer|connection (was )?(reset|refused|closed)|broken pipe|heartbeat"
    r"|coordination service|barrier|DEADLINE_EXCEEDED|UNAVAILABLE|gloo",
    re.IGNORECASE,
)
"""Errors of a program that was disconnected from a different host."""


def _without_symptoms(by_time: Sequence[HostReport]) -> HostReport:
    """Return the earliest host, or an equally early host with an error beyond a disconnection."""
    first = by_time[0]
    if first.phase is HostPhase.MISSING or first.error_at is None:
        return first
    as_early = [r for r in by_time if (r.error_at or 0.0) - first.error_at <= CLOCK_SKEW]
    return next((r for r in as_early if r.error and not _SYMPTOM.search(r.error)), first)
