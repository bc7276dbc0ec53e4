"""`ssh` and `cp` run the user's own tools, with Drumline's key and the pinned host keys."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.access import _ssh_options

Run = Callable[..., int]


Make = Callable[..., dict[str, Any]]


Printed = pytest.CaptureFixture[str]


FILES = {"key": "/h/my home/id", "known_hosts": "/h/my home/100%"}


CHECKED = (
    '-o IdentityFile="/h/my home/id" -o Port=2201 -o User=drumline '
    '-o UserKnownHostsFile="/h/my home/100%%" '
    "-o StrictHostKeyChecking=yes -o IdentitiesOnly=yes"
)


def a_host(index: int = 1) -> dict[str, Any]:
    where = {"ssh_ip": "127.0.0.1", "ssh_port": 2201, "user": "drumline", **FILES}
    return {"index": index, "folder": ".drumline/work/000004/abc", **where}


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command lines that replaced this process."""
    lines: list[str] = []
    monkeypatch.setattr("os.execvp", lambda _, arguments: lines.append(" ".join(arguments)))
    return lines


def test_ssh_runs_openssh_with_the_key_and_the_pinned_host_key(
    server: Any, drumline: Run, capsys: Printed, became: list[str]
) -> None:
    server.answers["GET /jobs/000004/hosts"] = [a_host()]
    assert drumline("ssh", "4", "--host", "1") == 0
    assert became == [f"ssh {CHECKED} -- 127.0.0.1"]
    assert drumline("ssh", "4") == 2
    assert capsys.readouterr().err == "--host 0: the slice has only host 1\n"


def test_ssh_and_cp_wait_for_the_host_key_of_a_new_host(
    server: Any, a_job: Make, drumline: Run, capsys: Printed, became: list[str]
) -> None:
    server.holds(a_job())
    hosts = [a_host(0) | {"has_host_key": True}, a_host(1) | {"has_host_key": False}]
    server.answers["GET /jobs/000004/hosts"] = hosts
    for words in (["ssh", "4"], ["cp", "4:out.txt", "."], ["cp", str(Path(__file__)), "4:x"]):
        assert drumline(*words, "--host", "1") == 2
        assert capsys.readouterr().err == "host 1 is not connected yet\n"
        assert became == []
    assert drumline("ssh", "4") == 0
    assert len(became) == 1


def test_ssh_and_cp_connect_through_the_proxy_of_the_server(
    server: Any, drumline: Run, became: list[str]
) -> None:
    proxy = {"proxy_command": ["iap", "the host", "100%"]}
    server.answers["GET /jobs/000004/hosts"] = [a_host(0) | proxy]
    assert drumline("ssh", "4") == 0
    assert drumline("cp", "4:out.txt", ".") == 0
    option = "-o ProxyCommand=iap 'the host' 100%%"
    assert became[0] == f"ssh {CHECKED} {option} -- 127.0.0.1"
    assert became[1].startswith(f"scp -r {CHECKED} {option} -- ")


@pytest.mark.parametrize(
    ("words", "options", "command"),
    [
        ("-L 6006:localhost:6006", "-L 6006:localhost:6006", ""),
        ("-NL6006:localhost:6006", "-NL6006:localhost:6006", ""),
        ("-N -L 1:a:1 -D 1080", "-N -L 1:a:1 -D 1080", ""),
        ("-t htop", "-t", "htop"),
        ("-o ServerAliveInterval=5 -- ls -l", "-o ServerAliveInterval=5", "ls -l"),
        ("-- ls -l", "", "ls -l"),
        ("nvidia-smi -L", "", "nvidia-smi -L"),
    ],
)
def test_ssh_passes_on_its_own_options_and_a_command(
    server: Any, drumline: Run, became: list[str], words: str, options: str, command: str
) -> None:
    server.answers["GET /jobs/000004/hosts"] = [a_host(0), a_host(1)]
    assert drumline("ssh", "4", "--host", "1", *words.split()) == 0
    [line] = became
    before, _, behind = line.partition(" -- 127.0.0.1")
    assert before == f"ssh {CHECKED} {options}".rstrip()
    assert behind.strip() == command


@pytest.mark.parametrize(
    ("words", "copied"),
    [
        ("4:out.txt .", "drumline@127.0.0.1:.drumline/work/000004/abc/out.txt ."),
        ("000004:/tmp/x y/", "drumline@127.0.0.1:/tmp/x ./y/"),
        ("4:~/notes n", "drumline@127.0.0.1:notes ./n"),
        ("a:b.txt 4:~", "./a:b.txt drumline@127.0.0.1:."),
        ("/usr 4:in", "/usr drumline@127.0.0.1:.drumline/work/000004/abc/in"),
    ],
)
def test_cp_copies_from_and_to_a_host(
    server: Any,
    drumline: Run,
    became: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    copied: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b.txt").touch()
    server.answers["GET /jobs/000004/hosts"] = [a_host(0), a_host(1)]
    assert drumline("cp", *words.split()) == 0
    assert became == [f"scp -r {CHECKED} -- {copied}"]


def test_cp_to_and_from_all_hosts(
    server: Any, drumline: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["GET /jobs/000004/hosts"] = [a_host(0), a_host(1)]
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        assert not check
        ran.append(command)
        return subprocess.CompletedProcess(command, 0 if len(ran) == 1 else 3)

    monkeypatch.setattr("subprocess.run", run)
    assert drumline("cp", "4:log", str(tmp_path / "logs"), "--host", "all") == 3
    assert [command[-1] for command in ran] == [str(tmp_path / f"logs/host-{n}") for n in (0, 1)]
    assert (tmp_path / "logs" / "host-1").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "b"), "one of FROM and TO must be on a host: write ID:PATH, such as 12:out.txt"),
        (("4:a", "5:b"), "one of FROM and TO must be on a host"),
        (("no file", "4:a"), "no file does not exist; nothing was copied"),
        (("4:", "b"), "4: has no path; write 4:. for the program's folder"),
        (("4:a", "b", "--host", "x"), "--host x: expected a host index, or all"),
        (("4:a", "b", "--host", "7"), "--host 7: the slice has hosts 0 to 1"),
    ],
)
def test_invalid_arguments_of_cp_are_one_message(
    server: Any,
    drumline: Run,
    capsys: Printed,
    became: list[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    server.answers["GET /jobs/000004/hosts"] = [a_host(0), a_host(1)]
    assert drumline("cp", *words) == 2
    assert capsys.readouterr().err.startswith(message)
    assert became == []


@pytest.mark.parametrize("name", ["100%", "a b", 'a "b" c', "it's", "a\\b", "%h %d %%", "#x", "ü"])
def test_openssh_reads_the_path_of_any_home(name: str) -> None:
    folder = f"/h/{name}"
    login = a_host() | {"key": f"{folder}/id", "known_hosts": f"{folder}/known"}
    command = ["ssh", "-F", "none", "-G", *_ssh_options(login), "--", "127.0.0.1"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    options = dict(line.split(" ", 1) for line in listed.splitlines() if " " in line)
    # `ssh -G` prints one of the paths before it replaces the tokens.
    assert options["identityfile"].strip('"') in {f"{folder}/id", f"{folder}/id".replace("%", "%%")}
    assert options["userknownhostsfile"].strip('"') == f"{folder}/known"
