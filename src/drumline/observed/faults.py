"""What went wrong with a call or a request: its kind and its scope."""

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """Why something did not succeed."""

    STOCKOUT = "stockout"
    QUOTA = "quota"
    RATE = "rate"
    DENIED = "denied"
    """The project has no access to this zone, or no access at all."""
    LOGIN = "login"
    """Credentials expired or are missing."""
    PREEMPTED = "preempted"
    CONFLICT = "conflict"
    """Another operation is under way there: try again."""
    INVALID = "invalid"
    """Our request is wrong."""
    NOT_FOUND = "not found"
    TRANSIENT = "transient"
    """The cloud did not answer, or had an error of its own."""
    UNKNOWN = "unknown"


class Scope(StrEnum):
    """What a fault affects."""

    ZONE = "zone"
    REGION = "region"
    PROJECT = "project"
    REQUEST = "request"


@dataclass(frozen=True)
class Fault:
    """What went wrong and what it affects."""

    kind: FaultKind
    scope: Scope


@dataclass(frozen=True)
class Refusal:
    """Why a cloud did not do what it was asked."""

    fault: Fault
    said: str
    """The reason as a sentence for the user."""
