"""Server commands, help, completion, and errors of the output."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.subprocess_cli import run_subprocess

Run = Callable[..., int]


Make = Callable[..., dict[str, Any]]


Printed = pytest.CaptureFixture[str]


# the server, and the complete output


def test_server_status_and_stop_start_no_server(home: Path, drumline: Run, capsys: Printed) -> None:
    assert drumline("server", "status") == 1
    assert capsys.readouterr().out.startswith(f"no server is running in {home}")
    assert drumline("server", "status", "--json") == 1
    assert json.loads(capsys.readouterr().out) is None
    assert drumline("server", "stop") == 0
    assert not list(home.iterdir())


def test_server_status_describes_the_running_server(
    server: Any, drumline: Run, capsys: Printed
) -> None:
    assert drumline("server", "status") == 0
    out = capsys.readouterr().out
    assert "pid 4242" in out
    assert str(server.home) in out
    assert "the emulator on this machine" in out


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"leaves_in": 1500.0, "stays": False}, "exits    in 25 min without calls"),
        ({"leaves_in": None, "stays": True}, "exits    not while there are active jobs or slices"),
        ({"leaves_in": None, "stays": False}, "exits    never"),
    ],
)
def test_server_status_shows_when_the_server_exits(
    server: Any, drumline: Run, capsys: Printed, facts: dict[str, Any], message: str
) -> None:
    server.answers["GET /status"] |= facts
    assert drumline("server", "status") == 0
    assert message in capsys.readouterr().out


def test_a_call_to_an_exiting_server_is_sent_to_the_next(
    server: Any, drumline: Run, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    answers = [(503, {"error": "leaving"}), (200, {"job": {}, "text": "done"})]
    server.answers["POST /jobs/000004/cancel"] = lambda *_: answers.pop(0)
    started: list[bool] = []
    monkeypatch.setattr(
        "drumline.jobs.connection.ServerConnection.start", lambda _: started.append(True)
    )
    assert drumline("cancel", "4") == 0
    assert capsys.readouterr().out == "done\n"
    assert started == [True]


def test_a_different_version_of_the_server_is_reported_once(
    server: Any, drumline: Run, capsys: Printed
) -> None:
    server.holds()
    server.version = "0.0.7"
    assert drumline("list") == 0
    captured = capsys.readouterr()
    assert captured.err.count("version 0.0.7") == 1
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["list", "--json"], 0),
        (["show", "4", "--json"], 0),
        (["server", "status", "--json"], 0),
        (["cancel", "4", "--json"], 2),  # an older server may lack a route
    ],
)
def test_every_answer_of_another_version_names_it_and_the_restart_on_stderr(
    server: Any, drumline: Run, a_job: Make, capsys: Printed, arguments: list[str], code: int
) -> None:
    server.holds(a_job("000004"))
    server.version = "0.0.7"
    assert drumline(*arguments) == code
    captured = capsys.readouterr()
    assert captured.err.count("the running server is version 0.0.7") == 1
    assert captured.err.count("drumline server stop") == 1
    assert "0.0.7" not in captured.out
    if code == 0:
        json.loads(captured.out)


def test_a_server_of_another_version_is_stopped_without_a_warning(
    server: Any, drumline: Run, capsys: Printed
) -> None:
    server.version = "0.0.7"
    server.answers["POST /stop"] = (500, {"error": "no"})
    assert drumline("server", "stop") == 2
    assert capsys.readouterr().err == "no\n"


def test_an_error_of_the_server_is_one_message(server: Any, drumline: Run, capsys: Printed) -> None:
    server.answers["GET /jobs"] = (500, b"Internal Server Error")
    assert drumline("list") == 2
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert "server.log" in message


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from drumline.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'httpx', 'asyncssh', 'google', 'rich', 'pydantic', 'starlette', 'yaml'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    shown = {line.split()[0] for line in ended.stdout.splitlines() if line.startswith("  ")}
    assert shown >= {"create", "list", "show", "plot", "logs", "wait", "resume", "cancel", "delete",
                     "clean", "ssh", "cp", "exec", "server", "init", "emulator",
                     "chips"}  # fmt: skip


@pytest.mark.parametrize("group", [(), ("server",), ("emulator",), ("inspect",), ("numerics",)])
def test_help_truncates_no_summary(drumline: Run, capsys: Printed, group: tuple[str, ...]) -> None:
    assert drumline(*group, "--help") == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert not [line for line in lines if line.endswith("...")]


def complete(monkeypatch: pytest.MonkeyPatch, drumline: Run, *words: str) -> None:
    """Ask for candidates as the script for bash does. The last word is the incomplete one."""
    monkeypatch.setenv("_DRUMLINE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["drumline", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert drumline() == 0


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (["ca"], ["cancel"]),
        (["server", "sto"], ["stop"]),
        (["list", "--sta"], ["--status"]),
        (["show", ""], [*(f"{number:06}" for number in range(10, 3, -1)), "vit-b"]),
        (["show", "000004", ""], []),
        (["logs", "v"], ["vit-b"]),
        (["cancel", "000010", "00001"], []),
        (["cancel", "000010", "000005", "00000"], [f"{n:06}" for n in (9, 8, 7, 6, 4)]),
    ],
)
def test_completion_offers_commands_options_and_jobs(
    server: Any,
    a_job: Make,
    drumline: Run,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    candidates: list[str],
) -> None:
    names = ("twice", "twice", "vit-b", "2024", "a b", "$(id)", "-x")
    server.holds(*(a_job(f"{number:06}", name=name) for number, name in enumerate(names, 4)))
    complete(monkeypatch, drumline, *words)
    assert capsys.readouterr().out.split() == candidates


def test_completion_starts_no_server(
    home: Path, drumline: Run, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(monkeypatch, drumline, "show", "")
    assert capsys.readouterr().out.split() == []
    assert not list(home.iterdir())


def test_bash_completes(server: Any, a_job: Make) -> None:
    server.holds(a_job())
    script = """
    PATH="$(dirname "$1"):$PATH"
    eval "$(drumline completion bash)"
    COMP_WORDS=(drumline logs 0) COMP_CWORD=2
    _drumline_completion drumline 0 logs
    echo "${COMPREPLY[@]}"
    """
    command = ["bash", "-c", script, "bash", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "000004\n"


def test_an_unknown_shell_is_one_message(home: Path) -> None:
    message = "completion: 'tcsh' is not one of bash, zsh, fish\n"
    assert run_subprocess("completion", "tcsh") == (2, message)
    assert not list(home.iterdir())


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300"])
def test_an_invalid_timeout_is_rejected(
    server: Any, drumline: Run, capsys: Printed, seconds: str
) -> None:
    assert drumline("wait", "1", "--timeout", seconds) == 2
    assert capsys.readouterr().err.startswith(f"--timeout {float(seconds):g}: expected seconds, at")
    assert server.requests == []


def test_a_closed_stdout_is_one_message(server: Any) -> None:
    line = f"{sys.executable} -c 'from drumline.cli import main; main([\"list\"])' >&-"
    ended = subprocess.run(["/bin/bash", "-c", line], stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (
        1, "stdout is closed; there is no place to print to\n"
    )  # fmt: skip
    assert server.requests == []


def test_completion_supports_three_shells(drumline: Run, capsys: Printed) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert drumline("completion", shell) == 0
        assert "_DRUMLINE_COMPLETE=complete_" in capsys.readouterr().out
    assert drumline("completion", "tcsh") == 2


def test_every_command_that_prints_takes_json() -> None:
    """ssh and cp become OpenSSH, `server run` becomes the server: they print nothing."""
    from drumline.cli import COMMANDS, app

    def without(command: Any, name: str) -> list[str]:
        if hasattr(command, "list_commands"):
            parts = command.list_commands(None)
            return [
                one
                for part in parts
                for one in without(command.get_command(None, part), f"{name} {part}".strip())
            ]
        options = {option for parameter in command.params for option in parameter.opts}
        return [] if "--json" in options else [name]

    whole: Any = typer.main.get_command(app)
    assert set(whole.list_commands(None)) == set(COMMANDS)
    assert set(without(whole, "")) == {"ssh", "cp", "server run"}


def test_an_unknown_command_gets_a_suggestion(drumline: Run, capsys: Printed) -> None:
    assert drumline("cancle") == 2
    assert "'cancel'" in capsys.readouterr().err
