"""The wire format stays compatible, because an attempt may outlive the version that began it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from drumline.hosts.agent.wire import (
    MAX_NESTING,
    AttemptStatus,
    Command,
    FreePort,
    Message,
    PrepareResult,
    ReceiveResult,
    SetUpStep,
    Start,
    StepResult,
    WatchLine,
    decode,
    encode,
    parse,
)
from drumline.hosts.host_files import AGENT, AGENT_FILE
from drumline.hosts.remote import validate
from drumline.hosts.values import Address, HostAssignment, program_message
from tests.hosts.stand_in import program

ENDED = (
    '{"state": "exited", "prepared": true, "stopped": false, "going_down": "", "heartbeat": '
    '{"step": 3, "loss": NaN}, "started_at": 5.0, "coordinator": "10.0.0.1:8476", "exit_code": 3, '
    '"ended_at": 9.5, "error": "train.py:4  ValueError: x", "error_at": 9.0, "tail": ["a", "b"], '
    '"log_size": 128}'
)
STEP = (
    '{"exit_code": 1, "error": "setup:2  false  exit code 1", "tail": ["a"], '
    '"for": "/home/x/.drumline/jobs/j/1", "boot": "2f52a013", "at": 9.5, "ran": true}'
)


def test_messages_to_older_agents_have_known_fields() -> None:
    place = HostAssignment(1, Address("", 0, "10.0.0.1"), 1, 2)
    what = program(run="true", environment={"A": "b"}, secrets={"S": "t"}, wrap=("env",))
    sent = json.loads(encode(program_message(what, place)))
    assert sent.keys() == {"program", "secrets", "archive", "large_files"}
    assert sent["secrets"] == {"S": "t"}
    described = sent["program"]
    assert described.keys() == {"run", "environment", "variables", "checkpoint", "work", "wrap"}
    assert (described["run"], described["environment"]) == ("true", {"A": "b"})
    assert described["variables"]["DRUMLINE_HOST"] == "1"
    assert described["wrap"] == ["env"]
    assert encode(Start(coordinator="h:1")) == '{"coordinator": "h:1"}'
    assert encode(SetUpStep(name="n", script="s")) == '{"name": "n", "script": "s"}'
    command = Command(command="ls", timeout=None, stdin=False)
    assert encode(command) == '{"command": "ls", "timeout": null, "stdin": false}'


def test_answers_are_read_field_by_field() -> None:
    status = validate(AttemptStatus, decode(ENDED))
    assert (status.state, status.exit_code, status.tail) == ("exited", 3, ("a", "b"))
    assert status.heartbeat == {"step": 3, "loss": "NaN"}
    step = validate(StepResult, decode(STEP))
    assert (step.exit_code, step.error, step.tail) == (1, "setup:2  false  exit code 1", ("a",))
    line = validate(WatchLine, decode(f'{{"status": {ENDED}}}'))
    assert (line.status, line.log, line.offset) == (status, None, 0)
    assert validate(WatchLine, decode('{"log": "YQ==", "offset": 7, "at": 5.5}')).offset == 7
    assert validate(WatchLine, decode('{"beat": 5.5}')).status is None
    assert validate(PrepareResult, decode('{"have_code": true}')).trouble == ""
    assert validate(ReceiveResult, decode('{"received": true}')).received


def test_unknown_fields_are_ignored_and_missing_ones_have_defaults() -> None:
    status = validate(AttemptStatus, decode('{"state": "none", "of_a_later_version": [1]}'))
    assert status == AttemptStatus(state="none")
    assert (status.stopped, status.tail, status.log_size) == (False, (), None)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (AttemptStatus, '{"state": "asleep"}'),
        (AttemptStatus, "{}"),
        (AttemptStatus, '{"state": "none", "heartbeat": 3}'),
        (WatchLine, '{"log": "YQ==", "offset": -1}'),
        (WatchLine, '{"log": "YQ==", "at": 1e12}'),
        (WatchLine, '{"log": "YQ==", "at": NaN}'),
        (WatchLine, '{"status": {"state": "asleep"}}'),
        (WatchLine, '{"status": "none"}'),
        (FreePort, '{"port": 0}'),
        (FreePort, '{"port": 65536}'),
        (PrepareResult, '{"trouble": ""}'),
    ],
)
def test_an_invalid_answer_is_rejected(kind: type[Message], line: str) -> None:
    with pytest.raises(ValidationError):
        validate(kind, decode(line))


@pytest.mark.parametrize("line", ["[1]", "3", "null", "no JSON", ""])
def test_a_message_must_be_a_json_object(line: str) -> None:
    with pytest.raises(ValueError, match=r"expected an object|Expecting value"):
        decode(line)


def test_the_agent_reports_an_exit_that_an_older_agent_recorded(tmp_path: Path) -> None:
    folder = tmp_path / ".drumline" / "jobs" / "j" / "1"
    folder.mkdir(parents=True)
    left: dict[str, dict[str, Any]] = {
        "program.json": {
            "run": "python train.py",
            "environment": {},
            "variables": {"DRUMLINE_JOB_ID": "j"},
            "checkpoint": None,
            "work": "work/j/0123456789ab",
            "wrap": [],
        },
        "started.json": {"at": 5.0, "boot": "b", "coordinator": "10.0.0.1:8476", "log_from": 0},
        "pid.json": {"pid": 2**22 + 1, "ticks": 1},
        "exit.json": {
            "exit_code": 3,
            "ended_at": 9.5,
            "error": "train.py:4  ValueError: x",
            "error_at": 9.0,
            "tail": ["a", "b"],
        },
    }
    for name, value in left.items():
        (folder / name).write_text(json.dumps(value))
    agent = tmp_path / AGENT_FILE
    agent.write_bytes(AGENT)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(agent), "status", "jobs/j/1"],
        env={"HOME": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    status = validate(AttemptStatus, decode(done.stdout))
    assert (status.state, status.exit_code, status.started_at) == ("exited", 3, 5.0)
    assert (status.error, status.error_at) == ("train.py:4  ValueError: x", 9.0)
    assert (status.coordinator, status.tail) == ("10.0.0.1:8476", ("a", "b"))


def test_lone_surrogates_are_replaced() -> None:
    assert decode(b'{"error": "bad \\ud800"}') == {"error": "bad ?"}
    assert decode('{"error": "\\ud83d\\ude00"}') == {"error": "\U0001f600"}


@pytest.mark.parametrize(
    ("start", "end"), [('{"a":', "}"), ("[", "]"), ('[{"b": 1, "a":', "}]"), ('{"a \\ud800":', "}")]
)
def test_deep_nesting_is_rejected_by_every_version_of_python(start: str, end: str) -> None:
    depth = MAX_NESTING // len(end)
    deepest = start * depth + "1" + end * depth
    assert parse(deepest)
    for text in (start + deepest + end, start * 700 + "1" + end * 700, start * 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse(text)


def test_many_values_side_by_side_are_not_nested() -> None:
    assert parse("[" + "[{}]," * 1000 + "[]]") == [[{}]] * 1000 + [[]]
