"""The agent alone: each command as a process, in a temporary home."""

import ast
import contextlib
import importlib.util
import io
import os
import signal
import sys
import threading
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drumline.hosts.agent.processes import is_alive
from drumline.hosts.environment import run_wrap
from drumline.hosts.host_files import (
    AGENT,
    AGENT_SOURCES,
    zip_agent,
    zip_texts,
)
from drumline.hosts.protocol import PythonEnvironment
from tests.hosts.agent.machine import Machine, parent_of, wait_for
from tests.hosts.installed_agent import installed, installed_agent


def test_the_agent_needs_only_python_3_8() -> None:
    with zipfile.ZipFile(io.BytesIO(AGENT)) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert len(files) == len(list(AGENT_SOURCES.rglob("*.py"))) + 1
    for name, text in files.items():
        for node in ast.walk(ast.parse(text, feature_version=(3, 8))):
            if isinstance(node, ast.Import):
                needed = {module.name for module in node.names}
            elif isinstance(node, ast.ImportFrom):
                needed = {node.module or ""}
                if node.level or node.module == "agent.main":
                    room = "agent/system/" if name.startswith("agent/system/") else "agent/"
                    inside = needed.pop().removeprefix("agent.").replace(".", "/")
                    assert f"{room}{inside}.py" in files, name
            else:
                continue
            assert {module.split(".")[0] for module in needed} <= sys.stdlib_module_names, name


def test_the_same_sources_give_the_same_zip_file() -> None:
    assert zip_agent() == AGENT


@pytest.mark.parametrize("same_python", [True, False])
def test_an_installed_agent_has_bytecode_that_another_python_ignores(
    machine: Machine, same_python: bool
) -> None:
    source, magic = b"raise SystemExit(3)\n", importlib.util.MAGIC_NUMBER
    with (
        zipfile.ZipFile(io.BytesIO(installed_agent())) as installed,
        zipfile.ZipFile(machine.agent, "w") as agent,
    ):
        for name in installed.namelist():
            content = installed.read(name)
            if name.endswith(".py"):
                agent.writestr(name, source if same_python else content)
            else:
                assert content.startswith(magic)
                agent.writestr(name, content if same_python else b"\0\0\r\n" + content[4:])
    assert machine.call("free-port")["port"] > 0


def test_a_module_for_a_newer_python_is_installed_without_bytecode() -> None:
    content = zip_texts({"old.py": "x = 1\n", "new.py": "syntax of 2040\n"})
    with zipfile.ZipFile(io.BytesIO(installed("some.pyz", content))) as archive:
        assert archive.namelist() == ["old.py", "new.py", "old.pyc"]


def test_repeated_starts_start_the_program_once(machine: Machine) -> None:
    machine.put("echo one >> count; sleep 30")
    answers: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(machine.start())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer["state"] for answer in answers} == {"running"}
    assert len({answer["started_at"] for answer in answers}) == 1
    wait_for(machine.file("count").exists, "the program ran")
    assert machine.start()["state"] == "running"
    assert machine.file("count").read_text() == "one\n"
    machine.attempt("stop", "0")
    assert machine.start()["state"] == "exited"
    assert machine.file("count").read_text() == "one\n"


@pytest.mark.parametrize(
    ("run", "code"),
    [
        ("true", 0),
        ("echo a\nfalse\necho b", 1),
        ("exit 7", 7),
        ("sh -c 'exit 3' | cat\necho never", 3),
        ("echo 'ERROR: Traceback (most recent call last)'; exit 0", 0),
        ("no-such-command", 127),
    ],
)
def test_the_exit_code_is_that_of_the_script(machine: Machine, run: str, code: int) -> None:
    ended = machine.finish(run)
    assert ended["exit_code"] == code
    assert bool(ended["error"]) == (code != 0)
    assert "never" not in machine.log()


def test_stop_ends_grandchildren_that_ignore_sigterm(machine: Machine) -> None:
    machine.put(
        "bash -c 'trap \"\" TERM; echo $$ > stubborn; while :; do sleep 0.1; done' &\n"
        "setsid bash -c 'echo $$ > escaped; sleep 60' &\n"
        "sleep 60"
    )
    machine.start()
    wait_for(lambda: machine.written("stubborn"), "the child runs")
    wait_for(lambda: machine.written("escaped"), "the escaped child runs")
    pids = [int(machine.file(name).read_text()) for name in ("stubborn", "escaped")]
    before = time.monotonic()
    ended = machine.attempt("stop", "0.3")
    assert time.monotonic() - before < 30
    assert [is_alive(pid) for pid in (*pids, machine.leader())] == [False, False, False]
    assert (ended["state"], ended["error"]) == ("exited", "stopped")


def test_stop_gives_the_program_its_grace_period(machine: Machine) -> None:
    code = "import signal,sys,time\n" + (
        "def save(*_): time.sleep(0.5); print('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    machine.put(f"cat > p.py <<'END'\n{code}END\n{sys.executable} p.py\necho went on")
    machine.start()
    wait_for(lambda: "up" in machine.log(), "the program is up")
    machine.attempt("stop", "10")
    assert "saved" in machine.log()
    assert "went on" not in machine.log()


SAVES = """
import signal, sys, time
def leave(*_):
    time.sleep(0.3)
    open("saved", "w").write("yes")
    sys.exit({code})
signal.signal(signal.SIGTERM, leave)
open("up", "w").write("yes")
time.sleep(60)
"""


@pytest.mark.parametrize(("code", "exit_code"), [(75, 75), (3, -15)])
def test_a_program_that_saves_its_work_at_shutdown_has_its_exit_code(
    machine: Machine, code: int, exit_code: int
) -> None:
    """The stop signals the whole session, including the shell that waits for the program."""
    machine.put(f"python3 -c '{SAVES.format(code=code)}'\ntouch after")
    machine.start()
    wait_for(lambda: machine.written("up"), "the program runs")
    os.killpg(machine.leader(), signal.SIGTERM)
    assert machine.ended()["exit_code"] == exit_code
    assert machine.written("saved") == "yes"
    assert not machine.file("after").exists(), "nothing else is begun"


def test_stop_works_without_a_waiter(machine: Machine) -> None:
    machine.put("echo up; sleep 60")
    machine.start()
    wait_for(lambda: "up" in machine.log(), "the program is up")
    waiting = parent_of(machine.leader())
    os.kill(waiting, signal.SIGKILL)
    wait_for(lambda: not is_alive(waiting), "it is dead")
    assert machine.attempt("status")["state"] == "running"
    machine.attempt("stop", "5")
    assert not is_alive(machine.leader())


def test_a_program_continues_when_the_agent_is_killed(machine: Machine) -> None:
    machine.put("echo up\nwhile [ ! -e go ]; do sleep 0.05; done\necho after\nexit 4")
    machine.start()
    wait_for(lambda: "up" in machine.log(), "the program is up")
    os.kill(parent_of(machine.leader()), signal.SIGKILL)
    machine.file("go").touch()
    ended = machine.ended()
    assert "after" in machine.log()
    assert ended["exit_code"] == -9
    assert ended["error"].startswith("exit code unknown")


def test_processes_that_outlive_the_run_are_ended(machine: Machine) -> None:
    machine.finish("sleep 60 & echo $! > left; exit 0")
    left = int(machine.file("left").read_text())
    wait_for(lambda: not is_alive(left), "nothing is left")


# Leaves the session, gives up its environment and is forked twice, as a daemon does.
DAEMON = """
import os, signal, sys, time
if os.fork():
    time.sleep({parent_seconds})
    sys.exit(0)
os.setsid()
if os.fork():
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \\
       "open('daemon', 'w').write(str(os.getpid())); time.sleep(600)"
os.execve(sys.executable, [sys.executable, "-c", code], {{}})
"""


def start_daemon(machine: Machine, parent_seconds: int) -> int:
    """Run a program that leaves a daemon, and return the daemon's process id."""
    code = DAEMON.format(parent_seconds=parent_seconds)
    machine.put(f"cat > p.py <<'END'\n{code}END\n{sys.executable} p.py")
    machine.start()
    wait_for(lambda: machine.written("daemon"), "the daemon runs")
    return int(machine.written("daemon"))


def test_stop_ends_a_daemon_without_session_and_environment(machine: Machine) -> None:
    daemon = start_daemon(machine, parent_seconds=600)
    try:
        ended = machine.attempt("stop", "0.3")
        assert not is_alive(daemon)
        assert ended["state"] == "exited"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGKILL)


def test_an_attempt_has_ended_only_when_its_daemons_have(machine: Machine) -> None:
    daemon = start_daemon(machine, parent_seconds=0)
    try:
        assert machine.ended()["exit_code"] == 0
        assert not is_alive(daemon)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGKILL)


@pytest.mark.parametrize("verb", ["stop", "prepare the next attempt"])
def test_a_daemon_ends_although_the_agent_that_waited_was_killed(
    machine: Machine, verb: str
) -> None:
    daemon = start_daemon(machine, parent_seconds=600)
    try:
        wait_for((machine.folder / "adopted.json").exists, "the daemon is recorded")
        os.kill(parent_of(machine.leader()), signal.SIGKILL)
        if verb == "stop":
            machine.attempt("stop", "0.3")
        else:
            machine.put("true", attempt=2)
        wait_for(lambda: not is_alive(daemon), "the daemon has ended", 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGKILL)


def is_reaped(pid: str) -> bool:
    return not Path("/proc", pid).exists()


def test_orphans_of_a_program_do_not_stay_as_zombies(machine: Machine) -> None:
    machine.put("for i in 1 2 3; do (sleep 0.1 & echo $! >> gone); done; sleep 60")
    machine.start()
    wait_for(lambda: len(machine.written("gone").split()) == 3, "the children were started")
    for pid in machine.written("gone").split():
        wait_for(partial(is_reaped, pid), "the orphan was reaped")
    machine.attempt("stop", "0.3")


def test_out_of_memory_is_named(machine: Machine) -> None:
    assert machine.finish("kill -9 $$")["exit_code"] == -9
    assert machine.attempt("status")["error"] == "killed (SIGKILL), most likely out of memory"
    ended = machine.finish("bash -c 'kill -9 $$'", attempt=2)
    assert (ended["exit_code"], ended["error"]) == (
        137,
        "killed (SIGKILL), most likely out of memory",
    )


def test_the_environment_is_that_of_the_job(machine: Machine) -> None:
    machine.environment.update(
        MEGASCALE_COORDINATOR_ADDRESS="stale", DRUMLINE_BUCKETS=str(machine.home / "buckets")
    )
    names = "JOB_ID ATTEMPT HOST HOSTS COORDINATOR ACCELERATOR CHECKPOINT HEARTBEAT"
    nasty = 'it\'s "$(touch ran)" `touch ran`\nand $HOME; touch ran'
    machine.finish(
        f"for n in {names}; do v=DRUMLINE_$n; echo $n=${{!v}}; done\n"
        'echo "stale=${MEGASCALE_COORDINATOR_ADDRESS:-}" "own=$MEGASCALE_OWN"\n'
        'echo "buffered=$PYTHONUNBUFFERED"; printf %s "$NASTY" > nasty',
        environment={"NASTY": nasty, "MEGASCALE_OWN": "mine", "PYTHONUNBUFFERED": "0"},
        checkpoint="gs://lab/runs/7",
    )
    lines = machine.log().splitlines()
    folder = machine.home / "buckets" / "lab" / "runs" / "7"
    assert lines[:8] == [
        "JOB_ID=000012",
        "ATTEMPT=1",
        "HOST=0",
        "HOSTS=2",
        "COORDINATOR=10.0.0.1:8476",
        "ACCELERATOR=v4-16",
        f"CHECKPOINT={folder}",
        f"HEARTBEAT={machine.folder / 'heartbeat.json'}",
    ]
    assert lines[8:] == ["stale= own=mine", "buffered=0"]
    assert folder.is_dir()
    assert machine.file("nasty").read_text() == nasty
    assert not machine.file("ran").exists()


def test_secrets_reach_only_the_program(machine: Machine) -> None:
    secret = "hunter2-" + "x" * 20
    machine.put('test -n "$TOKEN"; echo up; sleep 60', secrets={"TOKEN": secret})
    kept = machine.folder / "secrets.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    machine.start()
    wait_for(lambda: "up" in machine.log(), "the program has it")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                assert secret.encode() not in (entry / "cmdline").read_bytes()
            except OSError:
                continue
    # The process that waits for the program removes it shortly after the program's start.
    wait_for(lambda: not kept.exists(), "the secrets are gone from the disk")
    for file in machine.home.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes(), file


def test_a_container_gets_secrets_by_name_and_is_ended_by_name(machine: Machine) -> None:
    tools, calls_file = machine.home / "bin", machine.home / "docker-said"
    tools.mkdir()
    (tools / "docker").write_text(
        f"""#!/bin/bash
        printf '%q ' "$@" >> {calls_file}; echo >> {calls_file}
        [ "$1" = run ] || exit 0
        while [ "$1" != lab/train ]; do
            if [ "$1" = --env-file ]; then names=$2; fi
            shift
        done
        shift
        given=()
        while read -r name; do given+=("$name=${{!name}}"); done < "$names"
        exec env -i PATH="$PATH" "${{given[@]}}" "$@"
        """
    )
    (tools / "docker").chmod(0o755)
    machine.environment["PATH"] = f"{tools}:{machine.environment['PATH']}"
    wrap = run_wrap(PythonEnvironment("docker", image="lab/train"))
    machine.put(
        'echo "$TOKEN"; echo "$DRUMLINE_HOSTS $PLAIN"; sleep 60',
        wrap=wrap,
        secrets={"TOKEN": "hunter2\nline two"},
        environment={"PLAIN": "a b"},
    )
    machine.start()
    wait_for(lambda: machine.log() == "hunter2\nline two\n2 a b\n", "it runs in the container")
    machine.attempt("stop", "5")
    calls = calls_file.read_text().splitlines()
    assert "hunter2" not in calls_file.read_text()
    assert [call.split()[0] for call in calls] == ["run", "exec", "rm", "rm"]
    assert calls[2].strip() == "rm --force drumline-000012-1"


def test_the_container_of_an_earlier_attempt_is_ended_before_the_next(machine: Machine) -> None:
    tools, calls_file = machine.home / "bin", machine.home / "docker-said"
    tools.mkdir()
    (tools / "docker").write_text(
        f'#!/bin/bash\necho "$@" >> {calls_file}\n[ $1 = ps ] && echo 4711\nexit 0\n'
    )
    (tools / "docker").chmod(0o755)
    machine.environment["PATH"] = f"{tools}:{machine.environment['PATH']}"
    machine.put("true", wrap=run_wrap(PythonEnvironment("docker", image="lab/train")))
    machine.put("true", attempt=2)
    calls = [line.split()[0] for line in calls_file.read_text().splitlines()]
    assert calls[:2] == ["ps", "exec"]
    assert calls[-1] == "rm"
    assert "rm --force drumline-000012-1" in calls_file.read_text()
