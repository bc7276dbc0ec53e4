"""The installed commands `drumline` and `jobman`, as typed in a shell."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drumline.cloud.emulator import launch
from tests.cases import rare
from tests.jobs.installation import Installation

BIN = Path(sys.executable).parent
SUMMARY = {"id", "user", "name", "accelerator", "zone", "host0_ip", "status", "reason"}


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """A shell without a terminal."""

    def __init__(self, installation: Installation) -> None:
        self.installation = installation

    def __call__(self, *words: str, command: str = "drumline", typed: str = "") -> Said:
        done = subprocess.run(
            [BIN / command, *words],
            env=os.environ | {"DRUMLINE_HOME": str(self.installation.home)},
            input=typed,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert "Traceback" not in done.stderr
        return Said(done.returncode, done.stdout, done.stderr)

    def create(self, run: str, **keys: Any) -> str:
        path = self.installation.write_job(run, **({"accelerator": "v4-8"} | keys))
        new = self("create", str(path), "--json")
        assert new.code == 0, new.err
        return str(new.json["id"])


@pytest.fixture(scope="module")
def shell(shared: Installation) -> Shell:
    return Shell(shared)


def wait_for_line(shell: Shell, job: str, text: str, host: int = 0) -> None:
    """Wait until the log of a host contains a text."""
    client = shell.installation.client
    shell.installation.until(
        lambda: text in b"".join(client.logs(job, host=host)).decode(), what=f"{text!r} in the log"
    )


@pytest.fixture(scope="module")
def running(shell: Shell) -> str:
    """A job of two hosts that runs until it is cancelled."""
    job = shell.create("echo host $DRUMLINE_HOST is up; sleep 600", accelerator="v4-16")
    shell.installation.reaches(job, "RUNNING")
    return job


def holds_nothing(shell: Shell, job: str) -> bool:
    """Return True if the cloud has no resource of a job."""
    resources = shell.installation.emulator("resources")
    return not [one for one in [*resources["requests"], *resources["nodes"]] if one["job"] == job]


def test_create_list_and_show_speak_json_with_the_keys_users_rely_on(shell: Shell) -> None:
    path = shell.installation.write_job("echo hello", accelerator="v4-8", name="greeting")
    new = shell("create", str(path), "--json", "--set", "retry.failures=1")
    assert new.code == 0
    job = new.json["id"]
    assert len(job) == 6
    assert job.isdigit()
    assert new.json["spec"]["retry"]["failures"] == 1
    assert shell("wait", job).code == 0
    [listed] = [one for one in shell("list", "--json").json if one["id"] == job]
    assert set(listed) >= SUMMARY
    assert (listed["name"], listed["status"]) == ("greeting", "SUCCEEDED")
    shown = shell("show", str(int(job)), "--json").json
    assert set(shown) >= SUMMARY | {"attempts", "events"}
    [attempt] = shown["attempts"]
    assert (attempt["number"], attempt["outcome"]) == (1, "succeeded")
    assert attempt["zone"].startswith("local-")
    assert [host["index"] for host in attempt["hosts"]] == [0]
    times = [event["time"] for event in shown["events"]]
    assert times == sorted(times)
    assert shell("logs", job).out.splitlines()[-1] == "hello"


@pytest.mark.every_case
def test_list_finds_jobs_by_status_name_and_user(shell: Shell, running: str) -> None:
    path = shell.installation.write_job("exit 3", accelerator="v4-8", name="odd [1]")
    job = shell("create", str(path), "--json", "--set", "retry.failures=0").json["id"]
    assert shell("wait", job).code == 1

    def listed(*words: str) -> set[str]:
        return {one["id"] for one in shell("list", "--json", *words).json}

    assert job in listed("--status", "failed")
    assert running not in listed("--status", "failed")
    assert {running, job} <= listed("--status", "failed,running")
    assert listed("--name", "d [1") == listed("--name", "odd*") == {job}
    assert listed("--user", "nobody-at-all") == set()
    assert listed("--limit", "1") == {max(listed())}
    wrong = shell("list", "--status", "lost")
    assert (wrong.code, wrong.out) == (2, "")
    assert "status: 'LOST' is not a status; use one of QUEUED, WAITING" in wrong.err


def test_wait_ends_with_0_1_or_124_and_show_names_the_fault_and_the_next_step(
    shell: Shell, running: str
) -> None:
    good = shell.create("true")
    bad = shell.create("exit 3", retry={"failures": 0})
    assert shell("wait", good).code == 0
    result = shell("wait", good, bad)
    assert result.code == 1
    assert result.out.splitlines() == [f"{good} SUCCEEDED", f"{bad} FAILED"]
    late = shell("wait", good, running, "--timeout", "0.5")
    assert late.code == 124
    assert f"timed out after 0.5 s; still running: {running}" in late.err
    shown = shell("show", bad).out
    assert f"{bad} " in shown
    assert "FAILED" in shown
    assert f"drumline resume {bad}" in shown
    assert f"drumline logs {bad}" in shown


def test_logs_of_one_host_or_of_all(shell: Shell, running: str) -> None:
    wait_for_line(shell, running, "host 0 is up")
    wait_for_line(shell, running, "host 1 is up", host=1)
    assert "host 1 is up" in shell("logs", running, "--host", "1").out
    assert "host 0 is up" in shell("logs", running).out
    together = shell("logs", running, "--host", "all").out.splitlines()
    assert {"[host 0] host 0 is up", "[host 1] host 1 is up"} <= set(together)
    wrong = shell("logs", running, "--host", "7")
    assert (wrong.code, wrong.out) == (2, "")
    assert "has no host 7" in wrong.err


def test_exec_on_one_host_and_on_all(shell: Shell, running: str) -> None:
    one = shell("exec", running, "--", "echo", "a  b")
    assert (one.code, one.out) == (0, "a  b\n")
    both = shell("exec", running, "--host", "all", "--", "hostname")
    assert both.code == 0
    assert sorted(line.split("]")[0] for line in both.out.splitlines()) == ["[host 0", "[host 1"]
    has_failed = shell("exec", running, "--host", "1", "--", "echo oops >&2; exit 7")
    assert (has_failed.code, has_failed.err) == (7, "oops\n")
    assert shell("exec", running, "--host", "9", "--", "true").code == 2


def test_exec_passes_on_piped_input_and_waits_for_no_more(shell: Shell, running: str) -> None:
    text = "line\n" * 100_000
    both = shell("exec", running, "--host", "all", "--", "wc -c", typed=text)
    assert sorted(both.out.splitlines()) == [f"[host {n}] {len(text)}" for n in (0, 1)]
    # A command that never reads from an endless pipe.
    words = [str(BIN / "drumline"), "exec", running, "--", "echo", "done"]
    environ = os.environ | {"DRUMLINE_HOME": str(shell.installation.home)}
    with subprocess.Popen(
        words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as open_end:
        assert open_end.stdout is not None
        assert open_end.stdout.read() == b"done\n"
        assert open_end.wait(30) == 0


def test_exec_passes_every_byte_both_ways(shell: Shell, running: str, tmp_path: Path) -> None:
    every = os.urandom(3 << 20)
    (tmp_path / "sent").write_bytes(every)
    with (tmp_path / "sent").open("rb") as sent, (tmp_path / "got").open("wb") as got:
        subprocess.run(
            [BIN / "drumline", "exec", running, "--", "cat"],
            env=os.environ | {"DRUMLINE_HOME": str(shell.installation.home)},
            stdin=sent,
            stdout=got,
            check=True,
            timeout=60,
        )
    assert (tmp_path / "got").read_bytes() == every


@pytest.mark.parametrize("fed", [False, True])
def test_a_command_ends_with_its_caller(shell: Shell, running: str, fed: bool) -> None:
    # An emulated host lists all processes of the machine, also those of other tests.
    marker = f"up-{os.getpid()}-{fed}"
    # The input is larger than the buffers, and the command reads none of it.
    words = [str(BIN / "drumline"), "exec", running, "--", f"yes {marker}"]
    environ = os.environ | {"DRUMLINE_HOME": str(shell.installation.home)}
    with (
        open("/dev/zero", "rb") as endless,
        subprocess.Popen(["/bin/cat"], stdin=endless, stdout=subprocess.PIPE) as source,
        subprocess.Popen(
            words,
            env=environ,
            stdin=source.stdout if fed else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        ) as asking,
    ):
        assert asking.stdout is not None
        assert source.stdout is not None
        source.stdout.close()
        # The error is reported at once, although the input never ends.
        assert asking.stdout.readline() == f"{marker}\n".encode()
        assert shell("exec", running, "--", f"pgrep -f '^[y]es {marker}'").code == 0
        asking.kill()
        source.kill()
    words = ["pgrep", "-f", f"^[y]es {marker}"]
    shell.installation.until(
        lambda: shell.installation.client.exec(running, words)[0]["exit_code"] == 1
    )


@pytest.mark.skipif(shutil.which("scp") is None, reason="there is no scp command here")
def test_cp_moves_files_to_and_from_a_host(shell: Shell, running: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.txt").write_text("hello")
    assert shell("cp", str(tmp_path / "in"), f"{running}:given", "--host", "1").code == 0
    seen = shell("exec", running, "--host", "1", "--", "cat given/*.txt; echo made > out")
    assert seen.out == "hello"
    back = shell("cp", f"{running}:out", str(tmp_path / "back"), "--host", "1")
    assert back.code == 0, back.err
    assert (tmp_path / "back").read_text() == "made\n"
    assert shell("cp", f"{running}:not there", str(tmp_path)).code != 0


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh command here")
def test_ssh_runs_a_command(shell: Shell, running: str) -> None:
    result = shell("ssh", running, "-o", "LogLevel=ERROR", "--", "echo", "hello")
    assert (result.code, result.out) == (0, "hello\n")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh command here")
def test_ssh_logs_in_to_the_host_that_was_named(shell: Shell, running: str) -> None:
    result = shell("ssh", running, "--host", "1", typed="echo at $HOME; exit\n")
    assert result.code == 0, result.err
    [greeting] = [line for line in result.out.splitlines() if line.startswith("at ")]
    name = shell.installation.client.show(running)["slice"]["name"]
    assert greeting.endswith("/1")
    assert name in greeting
    assert shell("ssh", running, "--host", "5").code == 2


def test_cancel_keeps_the_slice_resume_uses_it_and_delete_releases_it(
    shell: Shell,
) -> None:
    job = shell.create("echo on attempt $DRUMLINE_ATTEMPT; sleep 600", zones=["us-central2-b"])
    shell.installation.reaches(job, "RUNNING")
    name = shell.installation.client.show(job)["slice"]["name"]
    dry = shell("cancel", job, "--dry-run")
    assert "would stop the program" in dry.out
    assert shell.installation.status(job) == "RUNNING"
    result = shell("cancel", job)
    assert result.code == 0
    assert "is kept for 60 min for a resume, would be about $" in result.out
    assert f"drumline delete {job}" in result.out
    assert shell("wait", job).code == 1
    assert not holds_nothing(shell, job)
    resumed = shell("resume", job)
    assert resumed.code == 0
    assert "on the slice kept in us-central2-b" in resumed.out
    wait_for_line(shell, job, "on attempt 2")
    assert shell.installation.client.show(job)["slice"]["name"] == name

    refused = shell("delete", job)
    assert refused.code == 2
    assert "add --yes" in refused.err
    assert shell.installation.status(job) == "RUNNING"
    assert shell("delete", job, "--yes").code == 0
    assert shell("wait", job).code == 1
    shell.installation.until(lambda: holds_nothing(shell, job))
    assert "on attempt 2" in shell("logs", job).out


@pytest.mark.every_case
def test_resume_reads_the_job_file_again_and_lists_the_changes(shell: Shell) -> None:
    path = shell.installation.write_job("exit 3", accelerator="v4-8", retry={"failures": 0})
    new = shell("create", str(path), "--json", "--set", "stop_grace=2")
    job = new.json["id"]
    assert shell("wait", job).code == 1
    path.write_text(path.read_text().replace("exit 3", "echo mended $GREETING"))
    planned = shell("resume", job, "--dry-run", "--set", "environment.GREETING=hello")
    assert planned.code == 0
    assert "run: exit 3 → echo mended $GREETING" in planned.out
    assert shell.installation.status(job) == "FAILED"
    path.write_text(path.read_text() + "chekpoint: gs://x/y\n")
    refused = shell("resume", job)
    assert refused.code == 2
    assert refused.err.splitlines()[-1] == "nothing was resumed"
    assert shell.installation.status(job) == "FAILED"
    path.write_text(path.read_text().replace("chekpoint: gs://x/y\n", ""))
    result = shell("resume", job, "--set", "environment.GREETING=hello")
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()[1:]) == [
        "  changed  environment.GREETING: none → hello",
        "  changed  run: exit 3 → echo mended $GREETING",
    ], "what --set said at create stands"
    assert shell("wait", job).code == 0
    assert shell("logs", job).out.splitlines()[-1] == "mended hello"


def test_a_new_job_begins_with_the_checkpoints_of_another(shell: Shell) -> None:
    step = (
        'mkdir -p "$DRUMLINE_CHECKPOINT"; cd "$DRUMLINE_CHECKPOINT"; echo x >> steps; wc -l < steps'
    )
    path = shell.installation.write_job(
        f"{step}; exit 3", accelerator="v4-8", checkpoint="gs://counts/runs", retry={"failures": 0}
    )
    first = shell("create", str(path), "--json").json["id"]
    assert shell("wait", first).code == 1
    path.write_text(path.read_text().replace("exit 3", "exit 0"))
    plan = shell("create", str(path), "--from", first, "--dry-run")
    folder = shell("show", first, "--json").json["checkpoint"]
    assert f"would start from the checkpoints of {first} in {folder}" in plan.out
    second = shell("create", str(path), "--from", first, "--json").json["id"]
    assert second != first
    assert shell("wait", second).code == 0
    assert shell("logs", second).out.split()[-1] == "2"
    apart = shell("create", str(path), "--json").json["id"]
    assert shell("wait", apart).code == 0
    assert shell("logs", apart).out.split()[-1] == "1"


def test_clean_removes_logs_and_record(shell: Shell) -> None:
    job = shell.create("echo to be forgotten; sleep 600")
    wait_for_line(shell, job, "to be forgotten")
    assert shell("clean", job).code == 2
    done = shell("clean", job, "--yes")
    assert done.code == 0
    assert done.out.startswith(f"{job} and its logs are removed")
    assert not (shell.installation.home / "logs" / job).exists()
    assert job not in {one["id"] for one in shell("list", "--all", "--json").json}
    assert shell("show", job).code == 2
    shell.installation.until(lambda: holds_nothing(shell, job))
    assert int(shell.create("true")) > int(job), "its number is not given out again"


def test_an_invalid_job_file_leaves_no_trace(shell: Shell) -> None:
    before = {one["id"] for one in shell("list", "--all", "--json").json}
    path = shell.installation.write_job("true", zones=["us-central2"], chekpoint="gs://counts/x")
    result = shell("create", str(path))
    assert result.code == 2
    *problems, last = result.err.splitlines()
    assert last == "nothing was created"
    assert len(problems) == 2
    assert any("did you mean checkpoint?" in line for line in problems)
    assert any("is a region" in line for line in problems)
    assert {one["id"] for one in shell("list", "--all", "--json").json} == before
    requests = shell.installation.emulator("resources")["requests"]
    assert {one["job"] for one in requests} <= before
    assert shell("create", str(path.parent / "missing.yaml")).code == 2


@pytest.mark.parametrize(
    "command",
    [
        "logs 999999", "delete 999999 --yes", "show twelve",
        *rare("show 999999", "wait 999999", "resume 999999", "cancel 999999",
              "clean 999999 --yes", "exec 999999 -- true", "ssh 999999", "show 0"),
    ],
)  # fmt: skip
def test_an_id_that_is_none_is_one_sentence_and_2(shell: Shell, command: str) -> None:
    result = shell(*command.split())
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1
    assert "drumline list" in result.err


@pytest.mark.every_case
def test_jobman_knows_the_six_commands_of_the_slides(shell: Shell) -> None:
    path = shell.installation.write_job("sleep 600", accelerator="v4-8", name="slides")
    new = shell("create", str(path), command="jobman")
    assert new.code == 0
    assert "slides" in new.out
    job = shell("list", "--json", command="jobman").json[-1]["id"]
    shell.installation.reaches(job, "RUNNING")
    head = shell("list", command="jobman").out.splitlines()[0]
    for column in ("JOB ID", "USER", "NAME", "ACCELERATOR", "ZONE", "HOST0 IP", "STATUS"):
        assert column in head
    assert shell("cancel", job, command="jobman").code == 0
    shell("wait", job)
    assert shell("resume", job, command="jobman").code == 0
    shell.installation.reaches(job, "RUNNING")
    assert shell("delete", job, "--yes", command="jobman").code == 0
    shell("wait", job)
    assert shell("clean", job, "--yes", command="jobman").code == 0
    assert job not in {one["id"] for one in shell("list", "--json", command="jobman").json}


def test_the_server_is_stopped_and_started_by_the_next_command(shell: Shell, running: str) -> None:
    status = shell("server", "status", "--json").json
    assert status["home"] == str(shell.installation.home)
    assert shell("server", "stop").code == 0
    none = shell("server", "status")
    assert none.code == 1
    assert "no server is running" in none.out
    assert shell("server", "stop").code == 0
    shell("list")
    assert shell("server", "status", "--json").json["pid"] != status["pid"]
    shell.installation.until(lambda: shell("exec", running, "--", "echo still there").code == 0)
    assert shell("show", running, "--json").json["attempts_made"] == 1


def test_a_failed_set_up_shows_its_line_and_has_its_own_time(shell: Shell) -> None:
    path = shell.installation.write_job(
        "echo ran", accelerator="v4-8", setup="sleep 1\n", retry={"failures": 0}
    )
    result = shell("create", str(path), "--follow")
    assert result.code == 0
    [setup] = [line.split()[-2] for line in result.out.splitlines() if " setup " in line]
    assert float(setup) >= 0.9
    path = shell.installation.write_job(
        "echo ran", accelerator="v4-8", setup="true\nls /nowhere\n", retry={"failures": 0}
    )
    failed = shell("create", str(path), "--follow")
    assert failed.code == 1
    assert "setup:2  ls /nowhere  exit code 2: ls: cannot access" in failed.out
    assert "failed after 1 failure of the set-up" in failed.out
    assert "program" not in failed.out


def test_the_hosts_run_the_python_of_the_client_that_created_the_job(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation, environment = shell.installation, tmp_path / "my env"
    venv.create(environment)
    where = f"import sys; open({str(tmp_path / 'prefixes')!r}, 'a').write(sys.prefix + '\\n')"
    program = installation.write_job(
        f'python -c "{where}"\npython3 -c "{where}"\nsleep 600', accelerator="v4-8"
    )
    with monkeypatch.context() as client_in_another_environment:
        client_in_another_environment.setattr(sys, "executable", str(environment / "bin/python3"))
        job = str(installation.client.create(program)["id"])
    seen = tmp_path / "prefixes"
    installation.until(lambda: seen.exists() and seen.read_text().count("\n") == 2, what="both")
    assert set(seen.read_text().splitlines()) == {str(environment)}
    (result,) = installation.client.exec(job, "python -c 'import sys; print(sys.prefix)'")
    assert result["stdout"] == f"{environment}\n"

    shutil.rmtree(environment)
    installation.emulator("preempt", target=job)
    ended = installation.end(job)
    assert ended["status"] == "FAILED"
    assert f"{environment}/bin/python3, is no longer on this machine" in ended["reason"]
    assert ended["chips_held"] == 0
    seen.unlink()
    assert shell("resume", job).code == 0
    installation.until(lambda: seen.exists() and seen.read_text().count("\n") == 2, what="both")
    assert set(seen.read_text().splitlines()) == {sys.prefix}
    assert shell("delete", job, "--yes").code == 0


def test_everything_of_a_home_is_stopped_and_deleted(installation: Installation) -> None:
    shell = Shell(installation)
    job = shell.create("sleep 600")
    installation.reaches(job, "RUNNING")
    pids = [host["pid"] for host in installation.emulator("resources")["hosts"]]
    refused = shell("clean", "--home", "--yes")
    assert refused.code == 2
    assert "a server and an emulator run" in refused.err
    stopped = shell("server", "stop", "--all")
    assert stopped.code == 0
    assert "stopped the server, process " in stopped.out
    assert "stopped the emulator, process " in stopped.out
    assert f"and its {len(pids)} host" in stopped.out
    assert "1 unfinished job will continue" in stopped.out
    pids += map(int, re.findall(r"process (\d+)", stopped.out))
    assert [pid for pid in pids if not launch.has_exited(pid)] == []
    assert shell("clean", "--home", "--yes").code == 0
    assert not installation.home.exists()
