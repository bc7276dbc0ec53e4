"""What is known of the hosts that run a program."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class HostPhase(StrEnum):
    """The state of a host. A lost connection does not change it: only `heard` grows old."""

    CONNECTING = "CONNECTING"
    PREPARING = "PREPARING"
    READY = "READY"
    RUNNING = "RUNNING"
    EXITED = "EXITED"
    FAILED = "FAILED"
    """The host could not be prepared: a set-up step failed, or its chips are in use."""
    MISSING = "MISSING"
    """The host answers but does not know the program we started: it was rebooted or replaced."""


@dataclass(frozen=True)
class HostReport:
    """What is known of one host."""

    index: int
    phase: HostPhase
    heard: float | None
    """When its agent last said something that made sense, by our clock."""
    detail: str = ""
    """What the host is doing, or why it cannot: `code`, `setup: uv`, `connection refused`."""
    exit_code: int | None = None
    """The exit code of the program; a negative one is a signal."""
    error_at: float | None = None
    """When the program's first error appeared, by the host's clock."""
    error: str = ""
    tail: tuple[str, ...] = ()
    started_at: float | None = None
    going_down: str = ""
    """Why the host will be gone in a moment, if it reports that: `preempted`, `shutting down`."""
    reported_at: float | None = None
    """When it last said what its program does, by our clock. A host that came back is heard
    before it has said that."""
    heartbeat: Mapping[str, object] | None = None
    rank: int | None = None
    """Its number among the hosts that run the program; None where it runs nothing."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """What the host says it is: `physical_host`, `instance_id`; empty until it has said so."""
    refused: str = ""
    """Why this host is not to be used, if so much is known against it."""
    examined: str = ""
    """How its burn-in went: `running`, `pass`, `warn`, `fail`; empty where there was none."""
    examined_said: str = ""
    examined_seconds: float = 0.0
