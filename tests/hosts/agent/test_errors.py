"""The agent's reports of failures: the first error, and set-up steps that fail."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from drumline.hosts.values import attempt_folder
from tests.hosts.agent.machine import Machine, wait_for

FAILING = """
import time
def inner(n):
    raise ValueError(f"batch {n} does not divide by 8 devices")
def step():
    try:
        inner(250)
    except ValueError as error:
        raise RuntimeError("step failed\\nwith more to say") from error
step()
"""


def test_the_first_error_is_the_line_in_the_users_code(machine: Machine) -> None:
    before = time.time()
    ended = machine.finish(
        f"cat > train.py <<'END'\n{FAILING}\nEND\n{sys.executable} train.py || "
        "(echo done; sleep 3; exit 134)"
    )
    assert ended["exit_code"] == 134
    assert ended["error"] == "train.py:9  RuntimeError: step failed"
    assert before <= ended["error_at"] <= ended["ended_at"] - 0.5
    assert ended["tail"][-1] == "done"


def test_an_error_in_a_library_names_the_users_line(machine: Machine) -> None:
    ended = machine.finish(
        "mkdir -p site-packages\n"
        "echo 'def f(): raise KeyError(\"x\")' > site-packages/library.py\n"
        "printf 'import library\\nlibrary.f()\\n' > train.py\n"
        f"PYTHONPATH=site-packages {sys.executable} train.py"
    )
    assert ended["error"] == "train.py:2  KeyError: 'x'"


def test_an_exception_that_was_caught_is_not_the_cause(machine: Machine) -> None:
    ended = machine.finish(
        "echo 'Traceback (most recent call last):'\necho 'OSError: handled'\n"
        "sleep 0.9; echo '{\"step\": 3}' > $DRUMLINE_HEARTBEAT; sleep 0.3\n"
        "echo 'cannot go on'; exit 5"
    )
    assert ended["error"] == "cannot go on"
    assert ended["heartbeat"] == {"step": 3}


def test_an_error_the_program_reports_counts_at_once(machine: Machine) -> None:
    machine.put(
        'echo \'{"at": 12.5, "error": "train.py:1  ValueError: no"}\' > '
        '"$(dirname $DRUMLINE_HEARTBEAT)"/error.json; echo up; sleep 60'
    )
    machine.start()
    wait_for(lambda: "up" in machine.log(), "it was reported")
    status = machine.attempt("status")
    assert (status["state"], status["error_at"]) == ("running", 12.5)
    os.kill(machine.leader(), signal.SIGABRT)
    ended = machine.ended()
    assert (ended["error"], ended["error_at"]) == ("train.py:1  ValueError: no", 12.5)


def test_a_set_up_step_runs_once_on_a_host(machine: Machine) -> None:
    machine.put("true", secrets={"TOKEN": "abc"})
    step = {"name": 'it\'s "one"', "script": 'echo "$TOKEN" >> ran; echo said'}
    assert machine.attempt("step", sent=step)["exit_code"] == 0
    machine.put("true", attempt=2)
    again = machine.attempt("step", sent=step)
    assert (again["exit_code"], again["ran"]) == (0, False)
    assert machine.file("ran").read_text() == "abc\n"
    other = {**step, "script": "echo other >> ran"}
    assert machine.attempt("step", sent=other)["ran"]


def test_a_set_up_step_outlives_its_caller_and_is_not_repeated(machine: Machine) -> None:
    machine.put("true")
    step = {"name": "slow", "script": "echo x >> ran; while [ ! -e go ]; do sleep 0.05; done"}
    words = machine.words("step", attempt_folder(machine.what))
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=machine.environment
    ) as caller:
        assert caller.stdin is not None
        caller.stdin.write(json.dumps(step).encode())
        caller.stdin.close()
        wait_for(machine.file("ran").exists, "the step runs")
        caller.kill()
    threading.Timer(0.3, machine.file("go").touch).start()
    assert machine.attempt("step", sent=step)["exit_code"] == 0
    assert machine.file("ran").read_text() == "x\n"


def test_bash_names_the_script_without_its_path(machine: Machine) -> None:
    assert machine.finish("no-such-thing")["error"] == (
        "run.sh: line 1: no-such-thing: command not found"
    )


LOCKED = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 9 (unattended)"


def test_a_step_that_fails_because_of_something_that_passes_is_repeated(machine: Machine) -> None:
    machine.put("true")
    script = f"echo x >> ran; [ $(wc -l < ran) = 3 ] || {{ echo '{LOCKED}' >&2; exit 100; }}"
    step = {"name": "setup", "script": script, "retries": 5, "pause": 0.01}
    done = machine.attempt("step", sent=step)
    assert (done["exit_code"], done["error"]) == (0, "")
    assert machine.written("ran") == "x\n" * 3
    assert "holds the lock of apt; retry 1 of 5 in 0.01 s" in machine.log()
    assert "repeating" not in machine.attempt("status")


def test_a_step_that_never_passes_fails_after_its_retries(machine: Machine) -> None:
    machine.put("true")
    script = f"echo x >> ran; echo '{LOCKED}' >&2; exit 100"
    step = {"name": "setup", "script": script, "retries": 2, "pause": 0.01}
    done = machine.attempt("step", sent=step)
    assert done["exit_code"] == 100
    assert "unattended" in done["error"]
    assert machine.written("ran") == "x\n" * 3


def test_an_error_that_stays_is_not_repeated(machine: Machine) -> None:
    machine.put("true")
    earlier = {"name": "apt", "script": f"echo '{LOCKED}'"}
    assert machine.attempt("step", sent=earlier)["exit_code"] == 0
    script = "echo x >> ran; echo 'ERROR: No matching distribution found for nope' >&2; exit 1"
    step = {"name": "setup", "script": script, "retries": 5, "pause": 60.0}
    assert machine.attempt("step", sent=step)["exit_code"] == 1
    assert machine.written("ran") == "x\n"


def test_a_stop_ends_the_wait_for_the_next_try(machine: Machine) -> None:
    machine.put("true")
    step = {"name": "setup", "script": f"echo '{LOCKED}'; exit 1", "retries": 5, "pause": 600.0}
    words = machine.words("step", attempt_folder(machine.what))
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=machine.environment
    ) as caller:
        assert caller.stdin is not None
        caller.stdin.write(json.dumps(step).encode())
        caller.stdin.close()
        wait_for(lambda: "retry 1 of 5" in machine.log(), "the wait")
        assert machine.attempt("status")["repeating"] == (
            "another process, usually the VM's own update, holds the lock of apt; retry 1 of 5"
        )
        machine.attempt("stop", "1")
        assert caller.wait(60) == 0


def test_a_failed_step_reports_its_error_and_the_next_attempt_repeats_it(machine: Machine) -> None:
    machine.put("true")
    step = {"name": "pip", "script": "echo one\ntest -e fixed || { echo no such package; exit 9; }"}
    failed = machine.attempt("step", sent=step)
    assert (failed["exit_code"], failed["tail"][-1]) == (9, "no such package")
    assert failed["error"].endswith("exit code 9: no such package")
    machine.file("fixed").touch()
    assert machine.attempt("step", sent=step)["exit_code"] == 9
    machine.put("true", attempt=2)
    assert machine.attempt("step", sent=step)["exit_code"] == 0


@pytest.mark.parametrize(
    ("name", "script", "error"),
    [
        ("setup", "true\nls /nowhere", "setup:2  ls /nowhere  exit code 2: ls: cannot access"),
        ("setup", "false", "setup:1  false  exit code 1"),
        ("setup", "x=$(false) || true\n( exit 3 )\n", "setup:2  ( exit 3 )  exit code 3"),
        ("setup", "echo no\ntest -e y || exit 4", "setup:2  exit 4  exit code 4: no"),
        ("setup", "false \\\n  a", "setup:1  false a  exit code 1"),
        ("setup", "ls /nowhere | wc -l > n", "setup:1  wc -l > n  exit code 2: ls: cannot access"),
        ("setup", "kill -9 $$", "setup  killed by SIGKILL"),
        ("setup", "fi", "setup  exit code 2: "),
        ("uv", "true\nfalse", "set-up of uv  false  exit code 1"),
    ],
)
def test_a_failed_step_names_the_command_its_line_and_its_exit_code(
    machine: Machine, name: str, script: str, error: str
) -> None:
    machine.put("true")
    failed = machine.attempt("step", sent={"name": name, "script": script})
    assert failed["error"].startswith(error)
    assert not [line for line in failed["tail"] if line.startswith("--- set-up")]
    place = error.partition("  exit code")[0].partition("  killed")[0]
    assert f"--- set-up: {name} failed at {place}, " in machine.log()


def test_a_failing_command_shows_no_secret(machine: Machine) -> None:
    machine.put("true", secrets={"TOKEN": "s3cret"})
    failed = machine.attempt("step", sent={"name": "setup", "script": "true\ntest $TOKEN = x"})
    assert failed["error"] == "setup:2  test $TOKEN = x  exit code 1"
    assert "s3cret" not in machine.log()
