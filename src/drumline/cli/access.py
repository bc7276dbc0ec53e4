"""Commands on the hosts of a job: logs, exec, and ssh and cp with the user's own OpenSSH."""

import os
import re
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from drumline.cli.connect import connect, echo_json, interruptible, on_terminal
from drumline.cli.options import AsJson, HostOrAll, JobId
from drumline.cli.rendering.text import Sanitizer, sanitize
from drumline.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

MAX_LINE_BYTES = 1 << 20
Raw = Annotated[
    bool, typer.Option("--raw", help="Print every byte, including colours and escapes.")
]
# Options of ssh that take a value: the word after one of them is not the command.
_SSH_OPTIONS_WITH_VALUE = frozenset("BbcDEeFIiJLlmOoPpQRSWw")
# A local path with a colon contains a slash, or exists.
_REMOTE_PATH = re.compile(r"([^/:]+):(.*)", re.DOTALL)


# --- logs -------------------------------------------------------------------------------------


def logs(
    job_id: JobId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new output until the job ends.")
    ] = False,
    host: HostOrAll = None,
    attempt: Annotated[
        str | None,
        typer.Option(
            "--attempt", metavar="K|all", help="An attempt [default: the last with output]."
        ),
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="The last N lines.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="10m|TIME", help="Lines since then, in any attempt."),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Start each line with its time.")
    ] = False,
    raw: Raw = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print each line as JSON: attempt, host, time, text."),
    ] = False,
) -> None:
    """Print the output of the program, on one host or all."""
    from drumline.cli.rendering.text import parse_time
    from drumline.jobs.client import Refused

    if attempt not in {None, "all"} and not (_is_index(attempt) and int(attempt or 0) > 0):
        raise Refused(f"--attempt {attempt}: expected a number from 1, or all")
    try:
        start = None if since is None else parse_time(since, time.time())
    except ValueError:
        raise Refused(
            f"--since {since}: expected a duration, such as 10m, or a time, such as 14:02"
        ) from None
    query: dict[str, Any] = {"tail": tail, "since": start, "times": timestamps, "as_json": as_json}
    client = connect()
    [full_id] = client.ids(job_id)
    chunks = client.logs(full_id, _parse_host(host), attempt, follow, **query)
    message = f"{full_id} keeps running; follow it with: drumline logs {full_id} --follow"
    with interruptible(message):
        _print(chunks, raw)


def _print(chunks: "Iterable[bytes]", raw: bool) -> None:
    """Print output of a host. On a terminal, remove control sequences."""
    if raw or not on_terminal():
        for chunk in chunks:
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        return
    sanitizer = Sanitizer()
    for chunk in chunks:
        sys.stdout.write(sanitizer.feed(chunk))
        sys.stdout.flush()
    sys.stdout.write(sanitizer.feed(b"", last=True))
    sys.stdout.flush()


# --- exec -------------------------------------------------------------------------------------


def run_command(
    job_id: JobId,
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- CMD...", help="A single word is run by the host's shell."),
    ],
    host: HostOrAll = None,
    no_stdin: Annotated[
        bool, typer.Option("--no-stdin", "-n", help="Do not pass on piped input.")
    ] = False,
    raw: Raw = False,
    as_json: AsJson = False,
) -> None:
    """Run a command on one host of the job's slice, or on all."""
    line = command[0] if len(command) == 1 else command
    arguments = (job_id, line, _parse_host(host) or 0, None if no_stdin else _piped_input())
    if as_json:
        results = connect().exec(*arguments)
        echo_json(results)
    else:
        results = _print_frames(connect().exec_frames(*arguments), raw)
    codes = [result["exit_code"] for result in results if result["exit_code"] != 0]
    if codes:
        # None: the outcome is unknown. Negative: a signal, which shells count from 128.
        code = codes[0]
        raise typer.Exit(255 if code is None else 128 - code if code < 0 else code)


def _print_frames(
    frames: "Generator[dict[str, Any], None, None]", raw: bool
) -> list[dict[str, Any]]:
    """Print the output of a command as it arrives. Return the exit code of each host."""
    results: list[dict[str, Any]] = []
    several_hosts = False
    outputs: dict[tuple[int, str], _HostOutput] = {}
    with closing(frames):
        for frame in frames:
            if "hosts" in frame:
                several_hosts = len(frame["hosts"]) > 1
            elif "data" in frame:
                key = (frame["host"], frame["stream"])
                if key not in outputs:
                    outputs[key] = _HostOutput(*key, several_hosts, raw)
                outputs[key].write(frame["data"])
            elif "exit_code" in frame:
                for key, output in outputs.items():
                    if key[0] == frame["host"]:
                        output.end()
                if frame.get("error"):
                    message = f"host {frame['host']}: {frame['error']}; the exit code is unknown"
                    typer.echo(sanitize(message), err=True)
                results.append(frame)
    return sorted(results, key=lambda result: int(result["host"]))


class _HostOutput:
    """Prints one output stream of a command on one host."""

    def __init__(self, host: int, stream: str, several_hosts: bool, raw: bool) -> None:
        self._file = sys.stdout if stream == "stdout" else sys.stderr
        self._sanitizer = None if raw or not self._file.isatty() else Sanitizer()
        self._prefix = f"[host {host}] ".encode() if several_hosts else b""
        self._unfinished = b""

    def write(self, data: bytes) -> None:
        """Print the bytes, or with several hosts complete lines with the host before each."""
        if self._prefix:
            # The output of hosts alternates by lines. A very long line is printed in parts.
            *lines, self._unfinished = (self._unfinished + data).split(b"\n")
            if len(self._unfinished) > MAX_LINE_BYTES:
                lines, self._unfinished = [*lines, self._unfinished], b""
            data = b"".join(self._prefix + line + b"\n" for line in lines)
        self._print(data)

    def end(self) -> None:
        """Print the remaining bytes."""
        if self._unfinished:
            self._print(self._prefix + self._unfinished + b"\n")
        if self._sanitizer:
            self._file.write(self._sanitizer.feed(b"", last=True))
            self._file.flush()

    def _print(self, data: bytes) -> None:
        if self._sanitizer:
            self._file.write(self._sanitizer.feed(data))
        else:
            self._file.buffer.write(data)
        self._file.flush()


def _piped_input() -> BinaryIO | None:
    """Return stdin if it is a pipe or a file, and None for a terminal or /dev/null."""
    import stat

    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return None  # closed, or not a file
    return None if stat.S_ISCHR(mode) else sys.stdin.buffer


def _is_index(text: str | None) -> bool:
    return text is not None and text.isascii() and text.isdigit()


def _parse_host(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    if _is_index(text):
        return int(text)
    from drumline.jobs.client import Refused

    raise Refused(f"--host {text}: expected a host index, or all")


# --- ssh and cp -------------------------------------------------------------------------------


class _NotConnectedError(UserError):
    """A new host has not shown its key to the server yet."""


def ssh(
    job_id: JobId,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPTION OF ssh]... [-- CMD...]", help="Such as -L 6006:localhost:6006."
        ),
    ] = None,
    host: Annotated[int, typer.Option("--host", metavar="N", min=0, help="A host index.")] = 0,
) -> None:
    """Log in to a host of the job's slice, or forward ports."""
    options, command = _split_words(arguments or [])
    [login] = _hosts(job_id, host)
    _become(["ssh", *_ssh_options(login), *options, "--", str(login["ssh_ip"]), *command])


def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A file or folder.")],
    target: Annotated[
        str,
        typer.Argument(metavar="TO", help="The destination. FROM or TO is ID:PATH or NAME:PATH."),
    ],
    host: Annotated[
        str, typer.Option("--host", metavar="N|all", help="A host index, or all.")
    ] = "0",
) -> None:
    """Copy files to or from a host: drumline cp 12:out.txt .

    Without a slice, from the outputs of the job.
    """
    import subprocess

    from drumline.jobs.client import Refused

    remote_source = None if os.path.lexists(source) else _REMOTE_PATH.fullmatch(source)
    remote_target = None if os.path.lexists(target) else _REMOTE_PATH.fullmatch(target)
    remote = remote_source or remote_target
    if remote is None or (remote_source and remote_target):
        raise Refused(
            "one of FROM and TO must be on a host: write ID:PATH, such as 12:out.txt, or NAME:PATH"
        )
    if not remote[2]:
        raise Refused(f"{remote[0]} has no path; write {remote[1]}:. for the program's folder")
    if not (host == "all" or _is_index(host)):
        raise Refused(f"--host {host}: expected a host index, or all")
    if remote_source is None and not os.path.lexists(source):
        raise Refused(f"{source} does not exist; nothing was copied")
    index = None if host == "all" else int(host)
    if remote_source is not None:
        _check_target(target)
    client = connect()
    try:
        hosts = client.hosts(remote[1])
    except Refused:
        job = client.show(remote[1])
        tpu_slice = job.get("slice")
        is_to_come = tpu_slice and not tpu_slice.get("held_since") and _has_kept(job)
        if remote_source is None or (tpu_slice and not is_to_come):
            raise
        _copy_kept(job, remote[2], target, index, "holds no slice")
        return
    try:
        logins = _choose(hosts, index)
    except _NotConnectedError:
        if remote_source is None or not _has_kept(job := client.show(remote[1])):
            raise
        _copy_kept(job, remote[2], target, index, "its hosts are not connected yet")
        return
    commands = []
    for login in logins:
        path = _remote_path(remote[2], str(login["folder"]))
        address = f"{login['user']}@{login['ssh_ip']}:{path}"
        if remote_source is None:
            commands.append(_scp(login, _local_path(source), address))
            continue
        folder = target
        if len(logins) > 1:
            # Each host has a file of the same name, so each gets its own folder.
            folder = str(Path(target) / f"host-{login['index']}")
            os.makedirs(folder, exist_ok=True)
        commands.append(_scp(login, address, _local_path(folder)))
    kept_job: dict[str, Any] | None = None
    if remote_source is not None:
        with suppress(Refused):
            job = client.show(remote[1])
            kept_job = job if _has_kept(job) else None
    if len(commands) == 1 and kept_job is None:
        _become(commands[0])
        return
    codes = [subprocess.run(command, check=False).returncode for command in commands]
    if kept_job is not None:
        # After a preemption, the files of the earlier attempt are only in the outputs.
        failed = [login for login, code in zip(logins, codes, strict=True) if code]
        _name_kept(kept_job, remote[2], [int(login["index"]) for login in failed])
    raise typer.Exit(next((code for code in codes if code), 0))


def _split_words(arguments: "Sequence[str]") -> tuple[list[str], list[str]]:
    """Split the arguments into options of ssh and the command after them."""
    at = 0
    while (
        at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in {"-", "--"}
    ):
        # `-NL 1:a:1` is two options, and `-L1:a:1` is one with its value.
        letters = enumerate(arguments[at])
        with_value = next((i for i, c in letters if i and c in _SSH_OPTIONS_WITH_VALUE), None)
        at += 2 if with_value == len(arguments[at]) - 1 else 1
    command = arguments[at + 1 :] if arguments[at : at + 1] == ["--"] else arguments[at:]
    return list(arguments[:at]), list(command)


def _ssh_options(login: "Mapping[str, Any]") -> list[str]:
    """Return the options of a login. They come first, so later ones cannot weaken the checks."""
    return [
        # Not -i, which reads % as a token and cannot escape it.
        *("-o", f"IdentityFile={_quote_option(str(login['key']))}"),
        *("-o", f"Port={login['ssh_port']}"),
        *("-o", f"User={login['user']}"),
        *("-o", f"UserKnownHostsFile={_quote_option(str(login['known_hosts']))}"),
        *("-o", "StrictHostKeyChecking=yes"),
        *("-o", "IdentitiesOnly=yes"),
        *_proxy_options(login.get("proxy_command") or ()),
    ]


def _proxy_options(command: "Sequence[str]") -> list[str]:
    """Return the option of ssh for a proxy command, whose escapes are already replaced."""
    import shlex

    return ["-o", f"ProxyCommand={shlex.join(command).replace('%', '%%')}"] if command else []


def _remote_path(path: str, folder: str) -> str:
    """Return a path for scp: relative to the program's folder, unless it is absolute or in ~."""
    if path.startswith("/"):
        return path
    if path == "~" or path.startswith("~/"):
        return path[2:] or "."
    return f"{folder}/{path}"


def _scp(login: "Mapping[str, Any]", source: str, target: str) -> list[str]:
    return ["scp", "-r", *_ssh_options(login), "--", source, target]


def _local_path(path: str) -> str:
    """Return a path that scp cannot mistake for a remote one."""
    return path if path.startswith(("/", ".")) else f"./{path}"


def _hosts(job_id: str, index: int | None) -> "list[Mapping[str, Any]]":
    """Return the login of one host, or of all hosts."""
    return _choose(connect().hosts(job_id), index)


def _choose(hosts: "Sequence[Mapping[str, Any]]", index: int | None) -> "list[Mapping[str, Any]]":
    """Return the login of one host, or of all hosts."""
    from drumline.jobs.client import Refused

    logins = {int(login["index"]): login for login in hosts}
    if not logins:
        raise _NotConnectedError("no host of the slice is ready yet")
    if index is not None and index not in logins:
        raise Refused(f"--host {index}: the slice has {_describe_hosts(sorted(logins))}")
    chosen = [*logins.values()] if index is None else [logins[index]]
    for login in chosen:
        if not login.get("has_host_key", True):  # a server of an earlier version does not say so
            raise _NotConnectedError(f"host {login['index']} is not connected yet")
    return chosen


def _become(command: list[str]) -> None:
    """Replace this process by the command."""
    from drumline.jobs.client import Refused

    sys.stdout.flush()
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own ssh takes over from here
    except FileNotFoundError:
        raise Refused(
            f"the command {command[0]} does not exist on this machine; install an OpenSSH client"
        ) from None


def _quote_option(path: str) -> str:
    """Quote a path for an option of OpenSSH, which splits at spaces and expands %."""
    for character in ("\\", '"'):
        path = path.replace(character, f"\\{character}")
    return '"' + path.replace("%", "%%") + '"'


def _describe_hosts(indices: list[int]) -> str:
    if len(indices) > 1 and indices == list(range(indices[0], indices[-1] + 1)):
        return f"hosts {indices[0]} to {indices[-1]}"
    if len(indices) == 1:
        return f"only host {indices[0]}"
    return f"hosts {', '.join(map(str, indices))}"


# --- cp without a slice ------------------------------------------------------------------------


def _has_kept(job: "Mapping[str, Any]") -> bool:
    """Return True if files of the job were copied from its hosts."""
    return bool((job.get("outputs") or {}).get("files"))


def _name_kept(job: "Mapping[str, Any]", path: str, hosts: "Sequence[int]") -> None:
    """Print where the outputs have files that could not be copied from hosts."""
    folder = Path(job["outputs"]["folder"])
    for kept in (kept for host in hosts for kept in _find_kept(folder / f"host-{host}", path)):
        message = f"the outputs of {job['id']} have it, from an earlier copy: {kept}"
        typer.echo(sanitize(message), err=True)


def _copy_kept(
    job: "Mapping[str, Any]", path: str, target: str, host: int | None, slice_state: str
) -> None:
    """Copy outputs of one host, or of all hosts into a folder each. Raise Refused.

    `slice_state` is the reason why the files cannot come from the hosts.
    """
    from drumline.cli.rendering.text import plural
    from drumline.jobs.client import Refused

    outputs = job.get("outputs") or {}
    state = f"{job['id']} is {job['status']} and {slice_state}"
    if not outputs.get("files"):
        if outputs.get("paths"):
            raise Refused(f"{state}; no file of its outputs was copied: {_outputs_text(outputs)}")
        raise Refused(
            f"{state}, so the files of its hosts are gone; outputs: [{path}] in the job file keeps"
            " them"
        )
    folder = Path(outputs["folder"])
    hosts = [
        int(entry.name.removeprefix("host-"))
        for entry in folder.glob("host-*")
        if entry.name.removeprefix("host-").isdecimal()
    ]
    chosen = sorted(hosts) if host is None else [host]
    copies: list[tuple[int, Path, str]] = []
    for index in chosen:
        destination = target if len(chosen) == 1 else str(Path(target) / f"host-{index}")
        copies += [
            (index, source, destination) for source in _find_kept(folder / f"host-{index}", path)
        ]
    if not copies:
        which = "any host" if host is None else f"host {host}"
        raise Refused(
            f"{state}, and {sanitize(path)} of {which} was never copied;"
            f" {_outputs_text(outputs)} kept {plural(outputs['files'], 'file')} in {folder}"
        )
    if len(chosen) > 1:
        for _, _, destination in copies:
            os.makedirs(destination, exist_ok=True)
    for index, source, destination in copies:
        count = _copy_files(source, destination, source.parent == folder)
        typer.echo(sanitize(_copied_text(job, outputs, index, source, count)))


def _check_target(target: str) -> None:
    """Create a folder that ends with `/`. Raise Refused if the folder of a target is missing."""
    from drumline.jobs.client import Refused

    if target.endswith("/"):
        try:
            os.makedirs(target, exist_ok=True)
        except OSError as error:
            raise Refused(
                f"the folder {target} cannot be created: {(error.strerror or '').lower()};"
                " nothing was copied"
            ) from None
        return
    parent = os.path.dirname(target) or "."
    if not os.path.isdir(parent):
        raise Refused(
            f"the folder {parent} does not exist; nothing was copied; a target that ends with /"
            " is created"
        )


def _outputs_text(outputs: "Mapping[str, Any]") -> str:
    return f"outputs: [{sanitize(', '.join(outputs['paths']))}]"


def _find_kept(folder: Path, path: str) -> "Sequence[Path]":
    """Return the kept files that a path or a pattern names, relative to the program's folder."""
    import glob
    import posixpath

    name = posixpath.normpath(path)
    if name.startswith(("/", "~", "../")) or name == "..":
        return []
    if os.path.lexists(folder / name):
        return [folder / name]
    return [folder / match for match in sorted(glob.glob(name, root_dir=folder))]


def _copy_files(source: Path, target: str, everything: bool) -> int:
    """Copy a file or a folder like `cp -r`, or all in a folder. Return the number of files."""
    import shutil

    from drumline.jobs.client import Refused

    destination = Path(target)
    if destination.is_dir() and not everything:
        destination /= source.name
    try:
        if not source.is_dir():
            shutil.copy2(source, destination)
            return 1
        shutil.copytree(source, destination, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Refused(f"{destination} cannot be written: {reason.lower()}") from None
    return sum(len(names) for _, _, names in os.walk(source))


def _copied_text(
    job: "Mapping[str, Any]", outputs: "Mapping[str, Any]", index: int, source: Path, count: int
) -> str:
    """Return what was copied, and from when it is."""
    from drumline.cli.rendering.text import format_time, plural

    host = next((entry for entry in outputs["hosts"] if entry["index"] == index), None)
    copied_at = host["copied_at"] if host else None
    since = f" at {format_time(copied_at, time.time(), seconds=True)}" if copied_at else ""
    error = f"; the last copy is not complete: {host['error']}" if host and host["error"] else ""
    name = source.relative_to(Path(outputs["folder"]) / f"host-{index}").as_posix()
    what = plural(count, "file") if name == "." else f"{name} ({plural(count, 'file')})"
    text = f"copied {what} from the outputs of {job['id']}"
    return f"{text}, which came from host {index}{since}{error}"
