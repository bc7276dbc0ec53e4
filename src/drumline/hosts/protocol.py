"""The interface between the job manager and the hosts of a placement.

A cloud (`drumline.cloud.protocol`) makes placements, and a runner runs programs on their hosts. The
calls return values of `drumline.observed`, so another way to reach hosts only has to implement
these protocols. The only implementation is `ssh.SshRunner`, for virtual machines.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from drumline.errors import CloudError
from drumline.hosts.agent.wire import RESERVED_METRICS as RESERVED_METRICS  # of heartbeats
from drumline.observed import HostReport, ListedPlacement, Refusal

if TYPE_CHECKING:
    import asyncio


class AddressesUnreadableError(CloudError):
    """What the cloud publishes of the hosts of a slice cannot be read now."""

    def __init__(self, refusal: Refusal) -> None:
        """`refusal` has the fault and the sentence for the user."""
        super().__init__(refusal.text)
        self.refusal = refusal


@dataclass(frozen=True)
class SshLogin:
    """A login to hosts with an SSH key."""

    user: str
    public_key: str


@dataclass(frozen=True)
class HostAccess:
    """The user's settings for reaching hosts. A runner reads those that concern it."""

    proxy_command: str | None = None
    """The command that SSH connects through; None connects directly."""


DEFAULT_SHM_SIZE = "16g"
"""The size of /dev/shm in containers. Data loaders need more than the 64 MB of docker."""
Use = Literal["none", "package", "training"]
"""The part of Drumline that a program uses: nothing; the package alone, as for `heartbeat`; or
training, which needs JAX."""
PythonKind = Literal["system", "uv", "venv", "conda", "docker"]


@dataclass(frozen=True)
class PythonEnvironment:
    """The Python environment that a job runs in."""

    kind: PythonKind
    version: str | None = None
    """The version, such as `3.11`; None means the version of the host."""
    requirements: tuple[str, ...] | None = None
    requirements_file: str | None = None
    """A file in the code. With uv and no requirements, the lock file of the project is used."""
    image: str | None = None
    """The container image; for docker only."""
    drumline: Use = "none"
    """The part of Drumline that is bundled with the code."""
    login: str | None = None
    """The login to the registry of the image: `service-account`, or the name of a secret."""
    shm_size: str = DEFAULT_SHM_SIZE
    """The size of /dev/shm in the container."""


@dataclass(frozen=True)
class Program:
    """The program of one attempt."""

    job_id: str
    name: str
    attempt: int
    accelerator: str
    archive: Path | None
    """The code as tar.gz."""
    archive_sha: str | None
    mounts: Mapping[str, str]
    """The buckets to mount: `gs://bucket/prefix` by the path on the host."""
    python: PythonEnvironment
    setup: str | None
    """The user's script that runs once on every fresh host before the program."""
    run: str
    environment: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    hosts: tuple[int, ...] | None
    """The hosts that run it; None means all. The others are prepared and count as done."""
    checkpoint: str | None
    owner: str = ""
    """The id of the job database."""
    fence: int = 0
    """The fencing number of the attempt, for its claim on the checkpoint folder."""
    slice_lifetime: float | None = None
    """The mean lifetime in seconds of slices of this zone and accelerator; None if unknown."""
    large_files: tuple[str, ...] = ()
    """The hashes of the large files of the code, which are beside the archive."""
    interpreter: Path | None = None
    """The Python of the client, for hosts that are on the same machine."""


@dataclass(frozen=True)
class Admission:
    """The decision about a host from its history."""

    refused: str = ""
    """The reason why the host may not be used; empty if it may."""
    burnin: float = 0.0
    """The seconds of burn-in that the host needs before the program; 0 for none."""


Admit = Callable[[int, Mapping[str, str]], Admission]
"""A function that decides about a host from its index and its identity."""


def admit_all(index: int, identity: Mapping[str, str]) -> Admission:
    """Admit every host without a burn-in."""
    del index, identity
    return Admission()


Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], Awaitable[None]]
"""A callback for each piece of a command's output."""


MAX_PROBLEMS = 20
"""The number of files of one host that are reported with the reason why they were not copied."""


@dataclass
class HostCopy:
    """The result of a copy of outputs from one host."""

    files: int = 0
    """The number of files that were copied, because they were new or had changed."""
    bytes: int = 0
    error: str = ""
    """The reason why not all files could be copied; empty if the host sent what it has."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Files that were not copied, each with the reason."""
    left_out: int = 0
    """The number of files that were not copied."""

    def leave_out(self, name: str, reason: str) -> None:
        """Record a file that was not copied."""
        self.left_out += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append((_printable(name), _printable(reason)))


@dataclass(frozen=True)
class OutputTarget:
    """The folder on this machine that gets the outputs of a job."""

    folder: Path
    """The folder, with a folder for each host."""
    drafts: Path
    """The folder of incomplete files, on the same file system."""
    max_bytes: int
    """The most bytes that the folder may have."""


@dataclass(frozen=True)
class CopiedOutputs:
    """The result of a copy of outputs."""

    hosts: Mapping[int, HostCopy]
    """The result of each host that runs the program."""
    files: int
    """The number of files in the target, of all hosts and attempts."""
    bytes: int


def _printable(text: str) -> str:
    """Limit a text of a host to a short one of printable characters."""
    return "".join(character if character.isprintable() else "?" for character in text[:300])


Hosts = Sequence[Any]
"""The hosts of a placement as their runner reaches them. Only that runner reads its items."""


class Session(Protocol):
    """One attempt on the hosts of one placement.

    It has no state of its own beyond files in the folder of its logs, so a new server continues
    with a new session.
    """

    changed: "asyncio.Event"
    """Set when a report has changed."""

    def start(self) -> None:
        """Prepare all hosts, run the program on them together, and watch it."""

    def reports(self) -> tuple[HostReport, ...]:
        """Return the current report of each host."""

    async def stop(self, grace: float) -> tuple[int, ...]:
        """Stop the program for good, and kill it after `grace` seconds.

        Return the hosts that did not confirm in time that nothing of it runs. A repeated call stops
        only those. No session of this attempt starts the program afterwards.
        """

    async def run(
        self,
        host: int,
        command: str,
        output: OnOutput,
        timeout: float | None = None,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> int:
        """Run a shell command in the job's working copy on one host and return its exit code.

        Its output goes to `output` at once. The command is killed after `timeout`. Raises HostError
        with the reason if the exit code is unknown.
        """

    async def copy_outputs(
        self, paths: Sequence[str], target: OutputTarget, seconds: float
    ) -> CopiedOutputs:
        """Copy the outputs of every host that runs the program, in about `seconds` at most."""

    async def close(self) -> None:
        """Close the connections. The program continues."""


class Runner(Protocol):
    """Runs programs on the hosts of placements."""

    @property
    def login(self) -> SshLogin | None:
        """The login that hosts must accept for this runner; None if it does not use SSH."""

    async def find_hosts(self, listed: ListedPlacement, access: HostAccess) -> Hosts:
        """Return the hosts of a listed placement. Raises AddressesUnreadableError."""

    def session(
        self,
        program: Program,
        placement: str,
        hosts: Hosts,
        *,
        logs: Path,
        log_limit: int,
        clock: Callable[[], float],
        admit: Admit,
    ) -> Session:
        """Return the session of an attempt on a placement, which `start` begins.

        The session writes the log of each host to `host-N.log` in `logs`, with a `LogWriter` of
        `drumline.hosts.log_segments`, which keeps `log_limit` bytes. `clock` is that of its
        reports. `admit` decides if a host may be used.
        """

    def was_contacted(self, placement: str) -> bool:
        """Return True if a host of a placement was ever reached. No data was sent before that."""

    async def logins(
        self, listed: ListedPlacement, access: HostAccess, job_id: str, archive_sha: str | None
    ) -> list[dict[str, Any]]:
        """Return the login to each host, as `drumline ssh` and `cp` read it. Raises CloudError."""

    def forget(self, placement: str) -> None:
        """Delete the data about the hosts of a placement that no longer exists."""
