"""The values that others know of hosts: where they are, and what they run."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Address:
    """Where a host is."""

    ssh_ip: str
    ssh_port: int
    internal_ip: str
    """Where its siblings reach it."""
    host_key: str | None = None
    """`ssh-ed25519 AAAA…` where the cloud publishes it; None pins whatever it shows first."""


@dataclass(frozen=True)
class Step:
    """One set-up step, run by bash on every fresh host, once."""

    name: str
    script: str


@dataclass(frozen=True)
class Program:
    """What one attempt runs on its slice."""

    job_id: str
    name: str
    attempt: int
    accelerator: str
    archive: Path | None
    """The code as tar.gz."""
    archive_sha: str | None
    steps: tuple[Step, ...]
    run: str
    environment: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    hosts: tuple[int, ...] | None
    """Which hosts run it; None is all. The others are prepared, run nothing, and count as done."""
    checkpoint: str | None
    wrap: tuple[str, ...] = ()
    """Words put before `bash`, such as a container or an activated environment."""


@dataclass(frozen=True)
class Timing:
    """How long to wait for what, in seconds."""

    connect_timeout: float = 10.0
    keepalive_interval: float = 2.0
    keepalive_count: int = 2
    """Two unanswered ones end a connection: a dead host is noticed within six seconds."""
    reconnect_first: float = 0.3
    reconnect_most: float = 10.0
    """The pause between two tries grows to this; hosts that boot take a minute."""
    device_wait: float = 60.0
    """A chip stays busy for seconds after its holder ended."""
    stop_margin: float = 10.0
    """How much longer than the grace `stop` waits for a host that does not answer."""


@dataclass(frozen=True)
class CompletedCommand:
    """A command that ran on a host."""

    exit_code: int
    """Negative is a signal."""
    stdout: str
    stderr: str


Stream = Literal["stdout", "stderr"]
Output = Callable[[Stream, bytes], Awaitable[None]]
"""Takes what a command writes, piece by piece."""
