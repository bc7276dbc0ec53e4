"""What is known of the hosts that run a program."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class HostPhase(StrEnum):
    """How far a host is. A lost connection changes nothing here: only `heard` grows old."""

    CONNECTING = "CONNECTING"
    PREPARING = "PREPARING"
    READY = "READY"
    RUNNING = "RUNNING"
    EXITED = "EXITED"
    FAILED = "FAILED"
    """It could not be prepared: a set-up step failed, or its chips are held."""
    MISSING = "MISSING"
    """It answers but knows nothing of a program we started: it was restarted or replaced."""


@dataclass(frozen=True)
class HostReport:
    """What is known of one host."""

    index: int
    phase: HostPhase
    heard: float | None
    """When it last gave a sign of life, by our clock."""
    detail: str = ""
    """What it is doing, or why it cannot: `code`, `setup: uv`, `connection refused`."""
    exit_code: int | None = None
    """Negative is a signal."""
    error_at: float | None = None
    """When its first error showed, by its own clock."""
    error: str = ""
    tail: tuple[str, ...] = ()
    started_at: float | None = None
    going_down: str = ""
    """Why the host will be gone in a moment, where it says so: `preempted`, `shutting down`."""
    heartbeat: Mapping[str, object] | None = None
