"""The terminal output of logs and commands on hosts, and their requests."""

import base64
import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.subprocess_cli import run_subprocess

Run = Callable[..., int]


Make = Callable[..., dict[str, Any]]


Printed = pytest.CaptureFixture[str]


# logs, exec, ssh


EVIL = b"\x1b]52;c;cm0gLXJmIH4=\x07\x1b]0;title\x07\x1b[31mred\x1b[0m \xff\r\n"


def on_a_terminal(*words: str) -> bytes:
    """Return the terminal output of a command."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", "from drumline.cli import main; main()", *words]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as child:
        os.close(terminal)
        written = b""
        with contextlib.suppress(OSError):  # the end of a pty's output
            while piece := os.read(controller, 1 << 16):
                written += piece
        os.close(controller)
        assert child.wait() == 0, written
    return written


def test_logs_are_sanitized_on_a_terminal_unless_raw(server: Any) -> None:
    server.answers["GET /jobs/000004/logs"] = EVIL
    assert on_a_terminal("logs", "4") == "red \ufffd\r\n".encode()
    assert EVIL.rstrip() in on_a_terminal("logs", "4", "--raw")


def test_output_of_exec_is_sanitized_on_a_terminal(server: Any) -> None:
    server.answers["POST /jobs/000004/exec"] = frames(wrote(0, EVIL), wrote(0, EVIL, "stderr"))
    assert on_a_terminal("exec", "4", "--", "ls") == "red \ufffd\r\n".encode() * 2
    assert b"\x1b]52" in on_a_terminal("exec", "4", "--raw", "--", "ls")


def test_answers_and_errors_are_sanitized(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    evil = EVIL.decode("utf-8", "replace").rstrip()
    server.holds(a_job())
    server.answers["POST /jobs/000004/cancel"] = {"job": {}, "text": evil}
    assert drumline("cancel", "4") == 0
    server.answers["POST /jobs/000004/cancel"] = (409, {"error": evil})
    assert drumline("cancel", "4") == 2
    server.answers["GET /jobs/000004"] = (404, {"error": evil})
    assert drumline("show", "4") == 2
    output = capsys.readouterr()
    assert output.out.splitlines() == ["red \ufffd"]
    assert output.err.splitlines() == ["red \ufffd"] * 2


def test_json_escapes_control_characters(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    name = "\x1b[2J\x9b2J\u202eevil"
    server.holds(a_job(name=name))
    assert drumline("list", "--json") == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert json.loads(out)[0]["name"] == name


def test_logs_pass_through_raw(server: Any, drumline: Run, capfdbinary: Any) -> None:
    raw = b"\x1b[31mred\x1b[0m \xff\r\n"
    server.answers["GET /jobs/000004/logs"] = raw
    assert drumline("logs", "4", "--host", "all", "--attempt", "2", "--follow") == 0
    assert capfdbinary.readouterr().out == raw
    assert server.requests[0][1] == "/jobs/000004/logs?host=all&attempt=2&follow=1"


def test_logs_pass_on_their_options(
    server: Any, drumline: Run, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    server.answers["GET /jobs/000004/logs"] = b""
    monkeypatch.setattr("drumline.cli.access.time.time", lambda: 1000.0)
    assert drumline("logs", "4", "--tail", "5", "--since", "10m", "-t", "--attempt", "all") == 0
    assert server.requests[0][1] == "/jobs/000004/logs?attempt=all&tail=5&since=400.0&times=1"
    assert drumline("logs", "4", "--since", "soon") == 2
    assert drumline("logs", "4", "--attempt", "0") == 2
    assert capsys.readouterr().err.splitlines() == [
        "--since soon: expected a duration, such as 10m, or a time, such as 14:02",
        "--attempt 0: expected a number from 1, or all",
    ]


def test_a_host_is_a_number_or_all(server: Any, drumline: Run, capsys: Printed) -> None:
    assert drumline("logs", "4", "--host", "first") == 2
    assert capsys.readouterr().err == "--host first: expected a host index, or all\n"
    assert server.requests == []


def wrote(host: int, data: bytes, stream: str = "stdout") -> dict[str, Any]:
    return {"host": host, "stream": stream, "data": base64.b64encode(data).decode()}


def ended(host: int, code: int | None) -> dict[str, Any]:
    return {"host": host, "exit_code": code}


def frames(*output: dict[str, Any]) -> bytes:
    """Return the server's answer for a command, with a header of hosts and the exit codes at the
    end.
    """
    hosts = sorted({int(one["host"]) for one in output})
    known = {one["host"] for one in output if "exit_code" in one}
    lines = [{"hosts": hosts}, *output, *(ended(host, 0) for host in hosts if host not in known)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_exec_prefixes_several_hosts_and_returns_the_first_failure(
    server: Any, drumline: Run, capsys: Printed
) -> None:
    server.answers["POST /jobs/000004/exec"] = frames(
        wrote(1, b"n", "stderr"), wrote(0, b"a\nb"), wrote(1, b"o", "stderr"), wrote(0, b"\n"),
        ended(1, 3), ended(0, 0),
    )  # fmt: skip
    assert drumline("exec", "4", "--host", "all", "--", "ls", "-l", "a b") == 3
    captured = capsys.readouterr()
    assert captured.out == "[host 0] a\n[host 0] b\n"
    assert captured.err == "[host 1] no\n"
    assert server.requests[0][2] == {"host": "all", "command": ["ls", "-l", "a b"]}


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (-9, 137), (None, 255)])
def test_exec_on_one_host(
    server: Any, drumline: Run, capsys: Printed, code: int | None, exit_code: int
) -> None:
    server.answers["POST /jobs/000004/exec"] = frames(wrote(2, b"hi"), ended(2, code))
    assert drumline("exec", "4", "--host", "2", "--", "echo $HOME | wc") == exit_code
    assert capsys.readouterr().out == "hi"
    assert server.requests[0][2] == {"host": 2, "command": "echo $HOME | wc"}


def test_exec_passes_on_every_byte(server: Any, drumline: Run, capfdbinary: Any) -> None:
    every = bytes(range(256)) * 300
    server.answers["POST /jobs/000004/exec"] = frames(wrote(0, every), wrote(0, b"\xff", "stderr"))
    assert drumline("exec", "4", "--", "cat file") == 0
    assert capfdbinary.readouterr() == (every, b"\xff")


def test_exec_reports_a_lost_host(server: Any, drumline: Run, capsys: Printed) -> None:
    lost = ended(0, None) | {"error": "connection lost"}
    server.answers["POST /jobs/000004/exec"] = frames(lost)
    assert drumline("exec", "4", "--", "ls") == 255
    output = "host 0: connection lost; the exit code is unknown\n"
    assert capsys.readouterr().err == output


def test_exec_reports_a_lost_server(server: Any, drumline: Run, capsys: Printed) -> None:
    server.answers["POST /jobs/000004/exec"] = b'{"hosts": [0]}\n'
    assert drumline("exec", "4", "--", "ls") == 2
    assert capsys.readouterr().err == "the server exited before the end of the command\n"


def test_exec_as_json(server: Any, drumline: Run, capsys: Printed) -> None:
    output = frames(wrote(0, b"a\xff"), wrote(0, b"\n"), wrote(0, b"b\n", "stderr"), ended(0, 3))
    server.answers["POST /jobs/000004/exec"] = output
    assert drumline("exec", "4", "--json", "--", "ls") == 3
    assert json.loads(capsys.readouterr().out) == [
        {"host": 0, "exit_code": 3, "stdout": "a\ufffd\n", "stderr": "b\n"}
    ]


VERBS_THAT_PRINT = [("list",), ("show", "4", "--json"), ("logs", "4"), ("exec", "4", "--", "ls")]


@pytest.mark.parametrize("words", VERBS_THAT_PRINT, ids=lambda words: words[0])
def test_output_errors_are_one_message(server: Any, a_job: Make, words: tuple[str, ...]) -> None:
    server.holds(a_job())
    server.answers["GET /jobs/000004/logs"] = b"a line\n"
    server.answers["POST /jobs/000004/exec"] = frames(wrote(0, b"a line\n"))
    with open("/dev/full", "w") as full:
        output = "the output cannot be written: No space left on device\n"
        assert run_subprocess(*words, stdout=full, stdin=subprocess.DEVNULL) == (1, output)
    reader, writer = os.pipe()
    os.close(reader)
    assert run_subprocess(*words, stdout=writer, stdin=subprocess.DEVNULL) == (1, "")
    os.close(writer)
