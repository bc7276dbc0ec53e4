"""The verbs that reach into a job's slice: logs, exec, ssh."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.connect import connect, interruptible, on_terminal
from drumline.cli.jobs import Id

if TYPE_CHECKING:
    from collections.abc import Iterable

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
) -> None:
    """Print what the program wrote, on one host or all."""
    from drumline.cli.text import moment
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
    pieces = connect().logs(
        number, _host(host), attempt, follow, tail=tail, since=begin, times=timestamps
    )
    with interruptible(f"{number} goes on; drumline logs {number} --follow comes back to it"):
        _print(pieces, raw)


def _print(pieces: "Iterable[bytes]", raw: bool) -> None:
    """Print what came from a host: to a terminal only what it does not act on."""
    from drumline.cli.text import HarmlessStream

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
    raw: Raw = False,
) -> None:
    """Run a command on a host of the job's slice, or on all."""
    from drumline.cli.text import harmless_lines

    asked = command[0] if len(command) == 1 else command
    results = connect().exec(job_id, asked, _host(host) or 0)
    for result in results:
        prefix = f"[host {result['host']}] " if len(results) > 1 else ""
        for text, stream in ((result["stdout"], sys.stdout), (result["stderr"], sys.stderr)):
            shown = str(text) if raw or not stream.isatty() else harmless_lines(str(text))
            for line in shown.splitlines(keepends=True):
                stream.write(prefix + line)
            stream.flush()
    codes = [result["exit_code"] for result in results if result["exit_code"] != 0]
    if codes:
        # None: it never ran. Below zero: a signal, which shells count from 128.
        code = codes[0]
        raise typer.Exit(255 if code is None else 128 - code if code < 0 else code)


def ssh(
    job_id: Id,
    host: Annotated[int, typer.Option("--host", metavar="N", min=0, help="The host.")] = 0,
) -> None:
    """Log in to a host of the job's slice, with the key and the host key the server knows."""
    from drumline.jobs.client import Refused

    hosts = {int(one["index"]): one for one in connect().hosts(job_id)}
    if host not in hosts:
        raise Refused(f"--host {host}: the slice has hosts {_range(sorted(hosts))}")
    arguments = ssh_arguments(hosts[host])
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606 - the user's own ssh takes over from here
    except FileNotFoundError:
        raise Refused("there is no ssh command on this machine; install OpenSSH's client") from None


def ssh_arguments(host: dict[str, object]) -> list[str]:
    """The command that logs in; nothing of the user's own SSH settings can weaken the check."""
    return [
        "ssh",
        *("-i", str(Path(str(host["key"])))),
        *("-p", str(host["ssh_port"])),
        *("-o", f"UserKnownHostsFile={_quoted(str(host['known_hosts']))}"),
        *("-o", "StrictHostKeyChecking=yes"),
        *("-o", "IdentitiesOnly=yes"),
        *("-l", str(host["user"])),
        *("--", str(host["ssh_ip"])),
    ]


def _quoted(path: str) -> str:
    """OpenSSH takes a space in this option for the gap between two files, and % for a token."""
    return '"' + path.replace("%", "%%") + '"'


def _range(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none yet"


def _number(typed: str | None) -> bool:
    return typed is not None and typed.isascii() and typed.isdigit()


def _host(typed: str | None) -> int | str | None:
    if typed is None or typed == "all":
        return typed
    if _number(typed):
        return int(typed)
    from drumline.jobs.client import Refused

    raise Refused(f"--host {typed}: give a host's number, or all")
