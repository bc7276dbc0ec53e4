"""The verbs that run the user's own OpenSSH: ssh and cp, to a host of a job's slice."""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drumline.cli.connect import connect
from drumline.cli.jobs import Id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Options of ssh that take a value: a word after one of them is not the command.
_WITH_VALUE = frozenset("BbcDEeFIiJLlmOoPpQRSWw")
_PLACE = re.compile(r"0*(\d{1,12}):(.*)", re.DOTALL)


def ssh(
    job_id: Id,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPTION OF ssh]... [-- CMD...]", help="Such as -L 6006:localhost:6006."
        ),
    ] = None,
    host: Annotated[int, typer.Option("--host", metavar="N", min=0, help="The host.")] = 0,
) -> None:
    """Log in to a host of the job's slice, or forward its ports."""
    options, command = split(words or [])
    [wanted] = _hosts(job_id, host)
    _become(["ssh", *check_options(wanted), *options, "--", str(wanted["ssh_ip"]), *command])


def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A file or folder.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Where to; one of both is ID:PATH.")],
    host: Annotated[
        str, typer.Option("--host", metavar="N|all", help="A host's number, or all.")
    ] = "0",
) -> None:
    """Copy files to or from a host: drumline cp 12:out.txt ."""
    import subprocess

    from drumline.jobs.client import Refused

    there, here = _PLACE.fullmatch(source), _PLACE.fullmatch(target)
    if (there is None) == (here is None):
        raise Refused("one of FROM and TO is on a host: write it as ID:PATH, such as 12:out.txt")
    place = there or here
    assert place is not None
    if not place[2]:
        raise Refused(f"{place[0]} names no file; {place[1]}:. is the folder the program runs in")
    if not (host == "all" or (host.isascii() and host.isdigit())):
        raise Refused(f"--host {host}: give a host's number, or all")
    if there is None and not os.path.lexists(source):
        raise Refused(f"{source} is not there; nothing was copied")
    hosts = _hosts(place[1], None if host == "all" else int(host))
    commands = []
    for access in hosts:
        remote = f"{access['user']}@{access['ssh_ip']}:{on_host(place[2], str(access['folder']))}"
        if there is None:
            commands.append(_scp(access, _local(source), remote))
            continue
        into = target
        if len(hosts) > 1:
            # Each host has a file of the same name, so each gets a folder of its own.
            into = str(Path(target) / f"host-{access['index']}")
            os.makedirs(into, exist_ok=True)
        commands.append(_scp(access, remote, _local(into)))
    if len(commands) == 1:
        _become(commands[0])
        return
    codes = [subprocess.run(command, check=False).returncode for command in commands]
    raise typer.Exit(next((code for code in codes if code), 0))


def split(words: "Sequence[str]") -> tuple[list[str], list[str]]:
    """Options of ssh, and the command after them."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in {"-", "--"}:
        # `-NL 1:a:1` is two options, and `-L1:a:1` one with its value.
        takes = next((n for n, letter in enumerate(words[at]) if n and letter in _WITH_VALUE), None)
        at += 2 if takes == len(words[at]) - 1 else 1
    rest = words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]
    return list(words[:at]), list(rest)


def check_options(host: "Mapping[str, Any]") -> list[str]:
    """Options for the login; they come first, so later ones cannot weaken the host key check."""
    return [
        *("-i", str(Path(str(host["key"])))),
        *("-o", f"Port={host['ssh_port']}"),
        *("-o", f"User={host['user']}"),
        *("-o", f"UserKnownHostsFile={_quoted(str(host['known_hosts']))}"),
        *("-o", "StrictHostKeyChecking=yes"),
        *("-o", "IdentitiesOnly=yes"),
    ]


def on_host(path: str, folder: str) -> str:
    """A path for scp: relative to the program's folder, unless it is absolute or in ~."""
    if path.startswith("/"):
        return path
    if path == "~" or path.startswith("~/"):
        return path[2:] or "."
    return f"{folder}/{path}"


def _scp(host: "Mapping[str, Any]", source: str, target: str) -> list[str]:
    return ["scp", "-r", *check_options(host), "--", source, target]


def _local(path: str) -> str:
    """A path that scp cannot mistake for a remote one."""
    return path if path.startswith(("/", ".")) else f"./{path}"


def _hosts(job_id: str, wanted: int | None) -> "list[Mapping[str, Any]]":
    """The host with that number, or all."""
    from drumline.jobs.client import Refused

    hosts = {int(host["index"]): host for host in connect().hosts(job_id)}
    if wanted is None:
        return list(hosts.values())
    if wanted not in hosts:
        raise Refused(f"--host {wanted}: the slice has hosts {_range(sorted(hosts))}")
    return [hosts[wanted]]


def _become(arguments: list[str]) -> None:
    from drumline.jobs.client import Refused

    sys.stdout.flush()
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606 - the user's own ssh takes over from here
    except FileNotFoundError:
        raise Refused(
            f"there is no {arguments[0]} command on this machine; install OpenSSH's client"
        ) from None


def _quoted(path: str) -> str:
    """The path quoted: OpenSSH splits this option at spaces, and % begins a token."""
    return '"' + path.replace("%", "%%") + '"'


def _range(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none yet"
