"""What went wrong with a call or a request: its kind, and how far it reaches."""

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """Why something did not succeed."""

    STOCKOUT = "stockout"
    QUOTA = "quota"
    RATE = "rate"
    DENIED = "denied"
    """This zone, or this project altogether, is not granted."""
    LOGIN = "login"
    """Credentials that expired or are missing."""
    PREEMPTED = "preempted"
    CONFLICT = "conflict"
    """Something else is under way there: try again."""
    INVALID = "invalid"
    """Our request is wrong."""
    NOT_FOUND = "not found"
    TRANSIENT = "transient"
    """No answer, or the cloud's own error."""
    UNKNOWN = "unknown"


class Scope(StrEnum):
    """How far a fault reaches."""

    ZONE = "zone"
    REGION = "region"
    PROJECT = "project"
    REQUEST = "request"


@dataclass(frozen=True)
class Fault:
    """What went wrong and how far it reaches."""

    kind: FaultKind
    scope: Scope


@dataclass(frozen=True)
class Refusal:
    """Why a cloud did not do what it was asked."""

    fault: Fault
    said: str
    """One sentence for the user."""
