"""The agent by itself: each verb as a process of its own, against a home of its own."""

import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.hosts.agent.system.files import read_json
from drumline.hosts.agent_file import AGENT, AGENT_FILE, SOURCES, zipped
from drumline.hosts.environment import PythonEnvironment, run_wrap
from drumline.hosts.messages import HostRank, attempt_folder, program_message, work_folder
from drumline.hosts.values import Address

from .stand_in import program


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return value


class Machine:
    """A host reached without SSH."""

    prepared: dict[str, Any]

    def __init__(self, home: Path) -> None:
        self.home = home
        self.agent = home.with_name(AGENT_FILE)
        self.agent.write_bytes(AGENT)
        self.environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
        self.what = program()
        self.folder = home / ".drumline" / attempt_folder(self.what)

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-I", str(self.agent), *words]

    def call(self, *words: str, sent: object = None) -> dict[str, Any]:
        done = subprocess.run(
            self.words(*words),
            input=json.dumps(sent).encode(),
            capture_output=True,
            env=self.environment,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        answer = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(answer, dict)
        return answer

    def attempt(self, verb: str, *words: str, sent: object = None) -> dict[str, Any]:
        return self.call(verb, attempt_folder(self.what), *words, sent=sent)

    def put(self, run: str, **parts: Any) -> None:
        self.what = program(run=run, **parts)
        self.folder = self.home / ".drumline" / attempt_folder(self.what)
        place = HostRank(0, Address("", 0, "10.0.0.1"), 0, 2)
        self.prepared = self.attempt("prepare", "0.2", sent=vars(program_message(self.what, place)))

    def start(self) -> dict[str, Any]:
        return self.attempt("start", sent={"coordinator": "10.0.0.1:8476"})

    def finish(self, run: str, **parts: Any) -> dict[str, Any]:
        self.put(run, **parts)
        self.start()
        return self.ended()

    def ended(self) -> dict[str, Any]:
        wait_for(lambda: self.attempt("status")["state"] == "exited", "the program ended")
        return self.attempt("status")

    def log(self) -> str:
        """What there is of it; the program writes before or after its start was answered."""
        file = self.folder / "log"
        return file.read_text() if file.exists() else ""

    def leader(self) -> int:
        file = self.folder / "pid.json"
        wait_for(file.exists, "the leader is written down")
        return int(json.loads(file.read_text())["pid"])

    def written(self, name: str) -> str:
        file = self.file(name)
        return file.read_text() if file.exists() else ""

    def file(self, name: str) -> Path:
        return self.home / ".drumline" / work_folder(self.what) / name


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    home = tmp_path / "home"
    home.mkdir()
    one = Machine(home)
    yield one
    for pid in marked(f"HOME={home}"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(variable: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def parents_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_old_python_reads_it_and_it_needs_nothing_else() -> None:
    with zipfile.ZipFile(io.BytesIO(AGENT)) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert len(files) == len(list(SOURCES.rglob("*.py"))) + 1
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


def test_the_same_sources_are_the_same_file() -> None:
    assert zipped() == AGENT


def test_a_program_starts_once_however_often_it_is_asked_for(machine: Machine) -> None:
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
def test_the_exit_code_is_the_scripts_own(machine: Machine, run: str, code: int) -> None:
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
    assert [runs(pid) for pid in (*pids, machine.leader())] == [False, False, False]
    assert (ended["state"], ended["error"]) == ("exited", "stopped")


def test_stop_gives_the_program_its_grace(machine: Machine) -> None:
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


@pytest.mark.parametrize(("code", "told"), [(75, 75), (3, -15)])
def test_a_host_that_shuts_down_hears_of_a_program_that_saved_its_work(
    machine: Machine, code: int, told: int
) -> None:
    """All of a session is told to end, the shell that waits for the program among them."""
    machine.put(f"python3 -c '{SAVES.format(code=code)}'\ntouch after")
    machine.start()
    wait_for(lambda: machine.written("up"), "the program runs")
    os.killpg(machine.leader(), signal.SIGTERM)
    assert machine.ended()["exit_code"] == told
    assert machine.written("saved") == "yes"
    assert not machine.file("after").exists(), "nothing else is begun"


def test_stop_works_when_nobody_waits_for_the_program(machine: Machine) -> None:
    machine.put("echo up; sleep 60")
    machine.start()
    wait_for(lambda: "up" in machine.log(), "the program is up")
    waiting = parents_of(machine.leader())
    os.kill(waiting, signal.SIGKILL)
    wait_for(lambda: not runs(waiting), "it is dead")
    assert machine.attempt("status")["state"] == "running"
    machine.attempt("stop", "5")
    assert not runs(machine.leader())


def test_a_program_goes_on_when_the_agent_is_killed(machine: Machine) -> None:
    machine.put("echo up\nwhile [ ! -e go ]; do sleep 0.05; done\necho after\nexit 4")
    machine.start()
    wait_for(lambda: "up" in machine.log(), "the program is up")
    os.kill(parents_of(machine.leader()), signal.SIGKILL)
    machine.file("go").touch()
    ended = machine.ended()
    assert "after" in machine.log()
    assert ended["exit_code"] == -9
    assert ended["error"].startswith("exit code unknown")


def test_what_a_run_leaves_behind_is_ended(machine: Machine) -> None:
    machine.finish("sleep 60 & echo $! > left; exit 0")
    left = int(machine.file("left").read_text())
    wait_for(lambda: not runs(left), "nothing is left")


def test_out_of_memory_is_named(machine: Machine) -> None:
    assert machine.finish("kill -9 $$")["exit_code"] == -9
    assert machine.attempt("status")["error"] == "killed (SIGKILL), most likely out of memory"
    ended = machine.finish("bash -c 'kill -9 $$'", attempt=2)
    assert (ended["exit_code"], ended["error"]) == (
        137,
        "killed (SIGKILL), most likely out of memory",
    )


def test_the_environment_is_what_the_job_says(machine: Machine) -> None:
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
    said = machine.log().splitlines()
    folder = machine.home / "buckets" / "lab" / "runs" / "7"
    assert said[:8] == [
        "JOB_ID=000012",
        "ATTEMPT=1",
        "HOST=0",
        "HOSTS=2",
        "COORDINATOR=10.0.0.1:8476",
        "ACCELERATOR=v4-16",
        f"CHECKPOINT={folder}",
        f"HEARTBEAT={machine.folder / 'heartbeat.json'}",
    ]
    assert said[8:] == ["stale= own=mine", "buffered=0"]
    assert folder.is_dir()
    assert machine.file("nasty").read_text() == nasty
    assert not machine.file("ran").exists()


def test_secrets_reach_the_program_and_nobody_else(machine: Machine) -> None:
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
    # Whoever waits for the program removes it a moment after the program has begun.
    wait_for(lambda: not kept.exists(), "the secrets are gone from the disk")
    for file in machine.home.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes(), file


def test_a_container_gets_secrets_by_name_and_is_ended_by_name(machine: Machine) -> None:
    tools, said = machine.home / "bin", machine.home / "docker-said"
    tools.mkdir()
    (tools / "docker").write_text(
        f"""#!/bin/bash
        printf '%q ' "$@" >> {said}; echo >> {said}
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
    wrap = run_wrap(PythonEnvironment("docker", image="lab/train"), "000012")
    machine.put(
        'echo "$TOKEN"; echo "$DRUMLINE_HOSTS $PLAIN"; sleep 60',
        wrap=wrap,
        secrets={"TOKEN": "hunter2\nline two"},
        environment={"PLAIN": "a b"},
    )
    machine.start()
    wait_for(lambda: machine.log() == "hunter2\nline two\n2 a b\n", "it runs in the container")
    machine.attempt("stop", "5")
    calls = said.read_text().splitlines()
    assert "hunter2" not in said.read_text()
    assert [call.split()[0] for call in calls] == ["run", "exec", "rm"]
    assert calls[2].strip() == "rm --force drumline-000012-1"


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


def test_a_failed_step_says_why_and_the_next_attempt_tries_again(machine: Machine) -> None:
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


def test_watch_tells_growth_soon_and_from_any_offset(machine: Machine) -> None:
    machine.put("printf 'abc'; while [ ! -e go ]; do sleep 0.02; done; printf 'def'; exit 3")
    machine.start()
    wait_for(lambda: machine.log() == "abc", "the first part")
    words = machine.words("watch", attempt_folder(machine.what), "1")
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=machine.environment) as watch:
        assert watch.stdout is not None
        seen, text = [], b""
        for line in watch.stdout:
            news = json.loads(line)
            seen.append(news)
            if "log" in news:
                assert news["offset"] == 1 + len(text)
                text += base64.b64decode(news["log"])
                if text == b"bc":
                    touched = time.monotonic()
                    machine.file("go").touch()
            if news.get("status", {}).get("state") == "exited":
                break
        assert time.monotonic() - touched < 20
        watch.kill()
    assert text == b"bcdef"
    assert seen[-1]["status"]["exit_code"] == 3


def test_a_log_that_is_read_late_still_tells_when_it_was_written(machine: Machine) -> None:
    began = time.time()
    machine.finish("echo first; sleep 1.5; echo second")
    ended = time.time()
    wait_for(lambda: time.time() > ended + 0.5, "later")
    words = machine.words("watch", attempt_folder(machine.what), "0")
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=machine.environment) as watching:
        assert watching.stdout is not None
        at: dict[bytes, float] = {}
        while b"second" not in b"".join(at):
            line = json.loads(watching.stdout.readline())
            if "log" in line:
                at[base64.b64decode(line["log"])] = line["at"]
        watching.kill()
    (first, then), (second, later) = at.items()
    assert (first, second) == (b"first\n", b"second\n")
    assert began <= then + 0.01
    assert then + 1 < later <= ended


def test_clear_ends_an_earlier_attempt_and_frees_the_chip(machine: Machine) -> None:
    devices = machine.home / "dev"
    (devices / "vfio").mkdir(parents=True)
    (devices / "vfio" / "0").touch()
    (devices / "libtpu_lockfile").touch()
    machine.environment["DRUMLINE_DEV"] = str(devices)
    machine.put("exec 5<>$DRUMLINE_DEV/vfio/0; echo up; sleep 60")
    machine.start()
    wait_for(lambda: "up" in machine.log(), "it holds the chip")
    leader = machine.leader()
    machine.put("true", attempt=2)
    assert machine.prepared == {"trouble": "", "have_code": True}
    assert not runs(leader)
    assert not (devices / "libtpu_lockfile").exists()


def test_clear_reports_a_chip_that_stays_busy(machine: Machine) -> None:
    devices = machine.home / "dev"
    (devices / "vfio" / "0").mkdir(parents=True)
    machine.environment["DRUMLINE_DEV"] = str(devices)
    machine.put("true")
    assert machine.prepared["trouble"].startswith("open(/dev/vfio/0): ")


def test_a_program_from_before_a_restart_is_lost(machine: Machine) -> None:
    machine.put("sleep 60")
    machine.start()
    os.kill(parents_of(machine.leader()), signal.SIGKILL)
    os.kill(machine.leader(), signal.SIGKILL)
    started = machine.folder / "started.json"
    started.write_text(json.dumps({**json.loads(started.read_text()), "boot": "another"}))
    wait_for(lambda: not runs(machine.leader()), "it is gone")
    assert machine.attempt("status")["state"] == "lost"


@pytest.mark.parametrize("name", ["../../etc", "/etc", "jobs/../../x"])
def test_no_name_leads_out_of_the_agents_folder(machine: Machine, name: str) -> None:
    done = subprocess.run(
        machine.words("status", name),
        capture_output=True,
        env=machine.environment,
        check=False,
    )
    assert done.returncode != 0


def archive_of(folder: Path, *members: tarfile.TarInfo) -> tuple[bytes, str]:
    file = folder / "made.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    data = file.read_bytes()
    return data, hashlib.sha256(data).hexdigest()


def receive(machine: Machine, data: bytes, sha: str) -> int:
    return subprocess.run(
        machine.words("receive", sha),
        input=data,
        env=machine.environment,
        capture_output=True,
        check=False,
    ).returncode


def test_code_that_is_cut_short_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    member = tarfile.TarInfo("train.py")
    member.size = 1000
    data, sha = archive_of(tmp_path, member)
    assert receive(machine, data[:-10], sha) != 0
    assert machine.call("unpack", sha, "work/j/s") == {"have_code": False}
    assert not list(machine.home.rglob("*.draft"))
    assert receive(machine, data, sha) == 0
    assert machine.call("unpack", sha, "work/j/s")["have_code"]
    assert (machine.home / ".drumline/work/j/s/train.py").stat().st_size == 1000


@pytest.mark.parametrize(("name", "link"), [("../evil", ""), ("/evil", ""), ("a", "../../evil")])
def test_code_that_leads_out_of_the_working_copy_is_refused(
    machine: Machine, tmp_path: Path, name: str, link: str
) -> None:
    member = tarfile.TarInfo(name)
    if link:
        member.type, member.linkname = tarfile.SYMTYPE, link
    data, sha = archive_of(tmp_path, member)
    assert receive(machine, data, sha) == 0
    with pytest.raises(AssertionError, match="leads out of the working copy"):
        machine.call("unpack", sha, "work/j/s")
    assert not list(machine.home.rglob("evil"))
    assert not list(machine.home.rglob("*.draft"))


def test_a_pipe_in_place_of_a_heartbeat_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "heartbeat.json")
    assert read_json(str(tmp_path), "heartbeat.json") is None
    (tmp_path / "folder.json").mkdir()
    assert read_json(str(tmp_path), "folder.json") is None
