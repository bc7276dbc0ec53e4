"""The verbs that print what came from a job's hosts: logs and exec."""

import os
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from drumline.cli.connect import connect, echo_json, interruptible, on_terminal
from drumline.cli.jobs import AsJson, Id
from drumline.cli.rendering.text import HarmlessStream, harmless

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

LONGEST_LINE = 1 << 20
Raw = Annotated[
    bool, typer.Option("--raw", help="Every byte, on a terminal too: colours and escapes.")
]
HostOrAll = Annotated[
    str | None, typer.Option("--host", metavar="N|all", help="A host's number, or all.")
]


def logs(
    job_id: Id,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends.")
    ] = False,
    host: HostOrAll = None,
    attempt: Annotated[
        str | None,
        typer.Option("--attempt", metavar="K|all", help="An attempt; without it, the last."),
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="The last N lines.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="10m|TIME", help="What was written since, by any attempt."),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Begin each line with its time.")
    ] = False,
    raw: Raw = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Each line as an object: attempt, host, time, text.")
    ] = False,
) -> None:
    """Print what the program wrote, on one host or all."""
    from drumline.cli.rendering.text import moment
    from drumline.jobs.client import Refused
    from drumline.jobs.client import job_id as six_digits

    number = six_digits(job_id)
    if attempt not in {None, "all"} and not (_number(attempt) and int(attempt or 0) > 0):
        raise Refused(f"--attempt {attempt}: give a number from 1 on, or all")
    try:
        begin = None if since is None else moment(since, time.time())
    except ValueError:
        raise Refused(
            f"--since {since}: give how long ago, such as 10m, or a time, such as 14:02"
        ) from None
    part: dict[str, Any] = {"tail": tail, "since": begin, "times": timestamps, "as_json": as_json}
    pieces = connect().logs(number, _host(host), attempt, follow, **part)
    with interruptible(f"{number} goes on; drumline logs {number} --follow comes back to it"):
        _print(pieces, raw)


def _print(pieces: "Iterable[bytes]", raw: bool) -> None:
    """Print what came from a host; on a terminal, without control sequences."""
    if raw or not on_terminal():
        for piece in pieces:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        return
    stream = HarmlessStream()
    for piece in pieces:
        sys.stdout.write(stream.feed(piece))
        sys.stdout.flush()
    sys.stdout.write(stream.feed(b"", last=True))
    sys.stdout.flush()


def run_command(
    job_id: Id,
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- CMD...", help="One word is run by the host's shell."),
    ],
    host: HostOrAll = None,
    no_stdin: Annotated[
        bool, typer.Option("--no-stdin", "-n", help="Leave what is piped in to others.")
    ] = False,
    raw: Raw = False,
    as_json: AsJson = False,
) -> None:
    """Run a command on a host of the job's slice, or on all."""
    asked = command[0] if len(command) == 1 else command
    given = (job_id, asked, _host(host) or 0, None if no_stdin else _piped_in())
    if as_json:
        ends = connect().exec(*given)
        echo_json(ends)
    else:
        ends = _print_command(connect().exec_frames(*given), raw)
    codes = [end["exit_code"] for end in ends if end["exit_code"] != 0]
    if codes:
        # None: the outcome is unknown. Negative: a signal, which shells count from 128.
        code = codes[0]
        raise typer.Exit(255 if code is None else 128 - code if code < 0 else code)


def _print_command(
    frames: "Generator[dict[str, Any], None, None]", raw: bool
) -> list[dict[str, Any]]:
    """Print the output of a command as it comes; returns how it ended on each host."""
    ends: list[dict[str, Any]] = []
    several = False
    outputs: dict[tuple[int, str], _HostOutput] = {}
    with closing(frames):
        for frame in frames:
            if "hosts" in frame:
                several = len(frame["hosts"]) > 1
            elif "data" in frame:
                key = (frame["host"], frame["stream"])
                if key not in outputs:
                    outputs[key] = _HostOutput(*key, several, raw)
                outputs[key].write(frame["data"])
            elif "exit_code" in frame:
                for key, output in outputs.items():
                    if key[0] == frame["host"]:
                        output.end()
                if frame.get("error"):
                    where, why = frame["host"], frame["error"]
                    lost = f"host {where}: {why}; how the command ended is unknown"
                    typer.echo(harmless(lost), err=True)
                ends.append(frame)
    return sorted(ends, key=lambda end: int(end["host"]))


class _HostOutput:
    """One output of a command on one host, printed to ours."""

    def __init__(self, host: int, stream: str, several: bool, raw: bool) -> None:
        self._file = sys.stdout if stream == "stdout" else sys.stderr
        self._harmless = None if raw or not self._file.isatty() else HarmlessStream()
        self._prefix = f"[host {host}] ".encode() if several else b""
        self._begun = b""

    def write(self, data: bytes) -> None:
        """Print bytes as they are, or lines that name the host where there are several."""
        if self._prefix:
            # Output of hosts alternates by lines; a very long line is printed in parts.
            *whole, self._begun = (self._begun + data).split(b"\n")
            if len(self._begun) > LONGEST_LINE:
                whole, self._begun = [*whole, self._begun], b""
            data = b"".join(self._prefix + line + b"\n" for line in whole)
        self._print(data)

    def end(self) -> None:
        """Print what is left."""
        if self._begun:
            self._print(self._prefix + self._begun + b"\n")
        if self._harmless:
            self._file.write(self._harmless.feed(b"", last=True))
            self._file.flush()

    def _print(self, data: bytes) -> None:
        if self._harmless:
            self._file.write(self._harmless.feed(data))
        else:
            self._file.buffer.write(data)
        self._file.flush()


def _piped_in() -> BinaryIO | None:
    """The piped or redirected input, if any; not a terminal, nor /dev/null."""
    import stat

    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return None  # closed, or not a file
    return None if stat.S_ISCHR(kind) else sys.stdin.buffer


def _number(typed: str | None) -> bool:
    return typed is not None and typed.isascii() and typed.isdigit()


def _host(typed: str | None) -> int | str | None:
    if typed is None or typed == "all":
        return typed
    if _number(typed):
        return int(typed)
    from drumline.jobs.client import Refused

    raise Refused(f"--host {typed}: give a host's number, or all")
