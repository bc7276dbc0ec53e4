"""The values of a slice session: the hosts, the program that they run, and its folders there."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from drumline.hosts.agent.wire import HostProgram, Prepare, PythonRecipe, large_file_name
from drumline.hosts.protocol import Program

USER = "drumline"
"""The user on the hosts."""


@dataclass(frozen=True)
class Address:
    """The addresses of a host and its SSH key."""

    ssh_ip: str
    ssh_port: int
    internal_ip: str
    """The address for the other hosts of the slice."""
    host_key: str | None = None
    """The key `ssh-ed25519 AAAA…` if the cloud publishes it. None pins the first key shown."""
    proxy_command: tuple[str, ...] = ()
    """The program and arguments to connect through; empty to connect directly."""


@dataclass(frozen=True)
class Step:
    """A set-up step, run by bash once on every fresh host."""

    name: str
    script: str
    recipe: PythonRecipe | None = None
    """The Python environment that the step makes, if any."""


@dataclass(frozen=True)
class ShellProgram(Program):
    """A program with the scripts that make its environment on a host."""

    steps: tuple[Step, ...] = ()
    wrap: tuple[str, ...] = ()
    """Arguments before `bash` that run a container or activate an environment."""


@dataclass(frozen=True)
class HostAssignment:
    """The part of one host in a program: its index on the slice and its rank."""

    index: int
    address: Address
    rank: int | None
    """The rank among the hosts that run the program; None if this host does not run it."""
    ranks: int


@dataclass(frozen=True)
class Timing:
    """Timeouts and intervals in seconds."""

    connect_timeout: float = 10.0
    keepalive_interval: float = 2.0
    keepalive_count: int = 2
    """Unanswered keepalives that end a connection: a dead host is noticed within six seconds."""
    watch_silence: float = 180.0
    """Seconds without a line of `watch` after which the connection is replaced. The agent sends one
    every two seconds, but a host may answer commands while its `watch` is stopped."""
    reconnect_first: float = 0.3
    reconnect_most: float = 10.0
    """The longest delay between two connections; a host takes a minute to boot."""
    device_wait: float = 60.0
    """The wait for a busy chip, which stays busy for seconds after the exit of its process."""
    setup_retries: int = 20
    """The number of times that a set-up step is repeated after an error that passes by itself."""
    setup_pause: float = 15.0
    """Seconds before each repetition. A fresh VM updates itself for minutes."""
    stop_margin: float = 10.0
    """The time beyond the grace that `stop` waits for a host that does not answer."""


@dataclass(frozen=True)
class CompletedCommand:
    """A command that has exited on a host."""

    exit_code: int
    """The exit code; a negative one is a signal."""
    stdout: str
    stderr: str


# Folders and messages for the agent --------------------------------------------------------------


def attempt_folder(program: ShellProgram) -> str:
    """Return the attempt's folder on a host, relative to ~/.drumline."""
    return f"jobs/{_file_name(program.job_id)}/{program.attempt}"


def work_folder(program: ShellProgram) -> str:
    """Return the folder of the program's code on a host, relative to ~/.drumline."""
    return working_copy(program.job_id, program.archive_sha)


def working_copy(job_id: str, sha: str | None) -> str:
    """Return the folder where a job's archive is unpacked on a host, relative to ~/.drumline."""
    return f"work/{_file_name(job_id)}/{(sha or 'empty')[:12]}"


def code_files(archive: Path, large_files: Iterable[str]) -> list[Path]:
    """Return the files of packed code: the archive, and the large files beside it."""
    return [archive, *(archive.with_name(large_file_name(sha)) for sha in large_files)]


def known_hosts_name(slice_name: str) -> str:
    """Return the name of the file with the host keys of a slice."""
    return _file_name(slice_name)


def _file_name(text: str) -> str:
    """Escape any text so that it is a single component of a path."""
    return quote(text, safe="").replace(".", "%2E")


def program_message(program: ShellProgram, assignment: HostAssignment) -> Prepare:
    """Return the program as a message for the agent, with the secrets in a separate field."""
    container = f"drumline-{_file_name(program.job_id)}-{program.attempt}".replace("%", "_")
    variables = {
        "DRUMLINE_JOB_ID": program.job_id,
        "DRUMLINE_ATTEMPT": str(program.attempt),
        "DRUMLINE_OWNER": program.owner,
        "DRUMLINE_FENCE": str(program.fence),
        "DRUMLINE_HOST": str(assignment.rank or 0),
        "DRUMLINE_HOSTS": str(assignment.ranks),
        "DRUMLINE_ACCELERATOR": program.accelerator,
        "DRUMLINE_CONTAINER": container,
    }
    if program.slice_lifetime is not None:
        variables["DRUMLINE_SLICE_LIFETIME"] = f"{program.slice_lifetime:.1f}"
    host_program = HostProgram(
        run=program.run,
        environment=dict(program.environment),
        variables=variables,
        checkpoint=program.checkpoint,
        work=work_folder(program),
        wrap=list(program.wrap),
        **({"interpreter": str(program.interpreter)} if program.interpreter else {}),
    )
    return Prepare(
        program=vars(host_program),
        secrets=dict(program.secrets),
        archive=program.archive_sha if program.archive is not None else None,
        large_files=list(program.large_files),
    )
