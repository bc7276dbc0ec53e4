"""Why attempts end and what follows, and the kinds of events of a job: data, read by everyone.

The values are saved in the job database and printed as JSON, so they do not change.
"""

from dataclasses import dataclass
from enum import StrEnum


class EndReason(StrEnum):
    """The reason for the end of an attempt. `END_RULES` has the consequence of each reason."""

    SUCCEEDED = "succeeded"
    PROGRAM_FAILED = "program failed"
    SETUP_FAILED = "set-up failed"
    STUCK = "stuck"
    RESTART_REQUESTED = "go on later"
    SIGTERM = "told to end"
    PREEMPTED = "preempted"
    BAD_HOST = "bad host"
    AMBIGUOUS_START = "ambiguous start"
    UNREACHABLE = "unreachable"
    MOVED = "moved"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    INTERNAL_ERROR = "internal error"

    @property
    def outcome(self) -> str:
        """The outcome of the attempt, as it is saved and printed."""
        return "left" if self in _EXITS_WITHOUT_FAILURE else self.value

    @property
    def clause(self) -> str:
        """What happened, as a clause for the middle of a sentence."""
        cause = END_RULES[self].cause
        return cause[0].lower() + cause[1:].removesuffix(".")


class Next(StrEnum):
    """What a job does after the end of an attempt, if its allowance is not used up."""

    SAME_SLICE = "restarts on the same slice"
    OTHER_SLICE = "restarts on another slice"
    END = "ends"


@dataclass(frozen=True)
class EndRule:
    """The consequence of the reason for which an attempt is over."""

    cause: str
    """What happened, as a sentence."""
    next: Next
    counts: str | None = None
    """The count that grows, which `retry` in the job file limits; None if no count grows."""


_EXITS_WITHOUT_FAILURE = frozenset({EndReason.RESTART_REQUESTED, EndReason.SIGTERM})

END_RULES: dict[EndReason, EndRule] = {
    EndReason.SUCCEEDED: EndRule("The program exited with 0 on every host.", Next.END),
    EndReason.PROGRAM_FAILED: EndRule(
        "The program failed on a host.", Next.SAME_SLICE, counts="failures"
    ),
    EndReason.SETUP_FAILED: EndRule(
        "The set-up failed on a host.", Next.SAME_SLICE, counts="failures"
    ),
    EndReason.STUCK: EndRule(
        "No step was reported for longer than `stuck_after`.", Next.SAME_SLICE, counts="failures"
    ),
    EndReason.RESTART_REQUESTED: EndRule(
        "The program saved its work and asked for a restart.", Next.SAME_SLICE
    ),
    EndReason.SIGTERM: EndRule(
        "The program was stopped by SIGTERM from outside Drumline.", Next.SAME_SLICE
    ),
    EndReason.PREEMPTED: EndRule(
        "The slice was lost: preempted, deleted, or in maintenance.",
        Next.OTHER_SLICE,
        counts="preemptions",
    ),
    EndReason.BAD_HOST: EndRule(
        "A host is bad: its chips do not work, it rebooted, or it does not report.",
        Next.OTHER_SLICE,
        counts="bad_hosts",
    ),
    EndReason.AMBIGUOUS_START: EndRule(
        "The chips did not start, because of the host or of the program.", Next.OTHER_SLICE
    ),
    EndReason.UNREACHABLE: EndRule(
        "No host could be reached, because of the network or the login.", Next.OTHER_SLICE
    ),
    EndReason.MOVED: EndRule(
        "A cheaper slice was ready, and `migrate: cheaper` allows to move there.", Next.OTHER_SLICE
    ),
    EndReason.CANCELLED: EndRule("The user stopped the job.", Next.END),
    EndReason.REFUSED: EndRule("The cloud rejected the request as invalid.", Next.END),
    EndReason.INTERNAL_ERROR: EndRule("Drumline itself failed.", Next.END),
}


class EventType(StrEnum):
    """The kind of a line of a job's history."""

    CREATED = "created"
    """The job was created."""
    ASKED = "asked"
    """A slice was requested."""
    WAITING = "waiting"
    """A request was refused, failed, or was given up."""
    SLICE = "slice"
    """A slice is ready, and the server connects to its hosts."""
    REFUSED = "refused"
    """A slice was rejected, because one of its hosts is excluded."""
    PARKED = "parked"
    """A slice with a bad host is held back."""
    CODE = "code"
    """Every host has received the code."""
    SETUP = "setup"
    """The set-up has finished on every host."""
    BURNIN = "burnin"
    """The hosts passed the burn-in."""
    RUN = "run"
    """The program runs on every host."""
    PREEMPTED = "preempted"
    """A slice was preempted, deleted or taken for maintenance."""
    BADHOST = "badhost"
    """A host is bad, and its slice is replaced."""
    UNCLEAR = "unclear"
    """The chips did not start, and the job tries a different slice."""
    UNREACHABLE = "unreachable"
    """No host of a slice could be reached."""
    FAILED = "failed"
    """The program or the set-up failed, or the job is FAILED."""
    STUCK = "stuck"
    """No step was reported for too long."""
    LEFT = "left"
    """The program exited without a failure and restarts."""
    RELEASED = "released"
    """Slices are being deleted."""
    MOVED = "moved"
    """The program is stopped, to continue on a cheaper slice."""
    OUTPUTS = "outputs"
    """The outputs were copied."""
    RESUMED = "resumed"
    """The user resumed the job."""
    NOTE = "note"
    """A remark, such as a command of the user."""
    WARNING = "warning"
    """A problem that does not stop the job."""
    SUCCEEDED = "succeeded"
    """The job is SUCCEEDED."""
    CANCELLED = "cancelled"
    """The job is CANCELLED."""
