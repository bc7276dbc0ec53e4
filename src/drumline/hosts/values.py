"""Values that other packages use: where hosts are, and what they run."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Address:
    """The addresses of a host, and its key."""

    ssh_ip: str
    ssh_port: int
    internal_ip: str
    """The address for the other hosts of the slice."""
    host_key: str | None = None
    """The key `ssh-ed25519 AAAA…` if the cloud publishes it; None pins the key it shows first."""


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
    """The hosts that run it; None is all. Others are prepared, run nothing, and count as done."""
    checkpoint: str | None
    owner: str = ""
    """The id of the job database."""
    fence: int = 0
    """The fencing number of the attempt, for its claim on the checkpoint folder."""
    wrap: tuple[str, ...] = ()
    """Arguments before `bash`, such as those that run a container or activate an environment."""


@dataclass(frozen=True)
class Admission:
    """Whether a host may be used, by what is known of it."""

    refused: str = ""
    """Why it may not; empty where it may."""
    burnin: float = 0.0
    """Seconds of the burn-in that has to come before the program; 0 for none."""


Admit = Callable[[int, Mapping[str, str]], Admission]
"""A host's number and what it says it is → whether it may be used."""


def admit_all(index: int, told: Mapping[str, str]) -> Admission:
    """Nothing is known of any host."""
    del index, told
    return Admission()


@dataclass(frozen=True)
class Timing:
    """Timeouts and intervals in seconds."""

    connect_timeout: float = 10.0
    keepalive_interval: float = 2.0
    keepalive_count: int = 2
    """Unanswered keepalives that end a connection: a dead host is noticed within six seconds."""
    reconnect_first: float = 0.3
    reconnect_most: float = 10.0
    """The longest backoff between two connection attempts; a host takes a minute to boot."""
    device_wait: float = 60.0
    """Wait for a busy chip: it stays busy for seconds after its process ended."""
    stop_margin: float = 10.0
    """Time beyond the grace that `stop` waits for a host that does not answer."""


@dataclass(frozen=True)
class CompletedCommand:
    """A command that ran on a host."""

    exit_code: int
    """The exit code; a negative one is a signal."""
    stdout: str
    stderr: str


Stream = Literal["stdout", "stderr"]
Output = Callable[[Stream, bytes], Awaitable[None]]
"""A callback for the output of a command, piece by piece."""
