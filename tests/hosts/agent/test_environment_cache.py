"""Environments of Python that jobs and attempts on one host share."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drumline.hosts.agent.processes import send_signal
from drumline.hosts.agent.wire import PythonRecipe
from drumline.hosts.environment import (
    changes_environment,
    python_steps,
    run_wrap,
)
from drumline.hosts.protocol import PythonEnvironment
from drumline.hosts.values import Step, attempt_folder
from tests.cases import rare
from tests.hosts.agent.machine import Machine, processes_with, wait_for
from tests.hosts.wheels import wheel

# An installation without a network, in a tenth of the time of a real one.
INSTALL = """\
packages="$DRUMLINE_ENVIRONMENT/lib/python3/site-packages"
mkdir -p "$DRUMLINE_ENVIRONMENT/bin" "$packages/pkg-1.dist-info"
echo made >> "$HOME/installations"
while [ -e "$HOME/gate" ]; do sleep 0.05; done
echo x > "$packages/pkg-1.dist-info/RECORD"
ln -sf "$(command -v python3)" "$DRUMLINE_ENVIRONMENT/bin/python"
"""


class Host:
    """A host on which jobs are set up one after another, or at once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.folder = machine.home / ".drumline" / "python"

    def attempt(self, job: str = "000012", attempt: int = 1, **parts: Any) -> str:
        """Prepare an attempt with this code and these variables. Return its folder's name."""
        code = parts.pop("code", {})
        parts.setdefault("archive_sha", "0" * 64)
        self.machine.put("true", job_id=job, attempt=attempt, **parts)
        for name, text in code.items():
            file = self.machine.file(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        self.machine.file(".").mkdir(parents=True, exist_ok=True)
        return attempt_folder(self.machine.what)

    def step(self, folder: str, step: Step | None = None, **recipe: Any) -> dict[str, Any]:
        """Make the environment of an attempt."""
        return self.machine.call("step", folder, sent=self._message(folder, step, recipe))

    def begin_step(self, folder: str, **recipe: Any) -> "subprocess.Popen[bytes]":
        """Begin to make the environment of an attempt."""
        message = self.machine.home / "message.json"
        message.write_text(json.dumps(self._message(folder, None, recipe)))
        with message.open("rb") as file:
            return subprocess.Popen(
                self.machine.words("step", folder),
                stdin=file,
                stdout=subprocess.PIPE,
                env=self.machine.environment,
            )

    def _message(self, folder: str, step: Step | None, recipe: Any) -> dict[str, Any]:
        job = folder.split("/")[1]
        made = PythonRecipe(**{"kind": "venv", "requirements": ["pkg"], "job": job} | recipe)
        step = step or Step("venv", INSTALL, made)
        recipe = step.recipe and vars(step.recipe)
        return {"name": step.name, "script": step.script, "recipe": recipe}

    def environment(self, folder: str) -> Path:
        record = json.loads(
            (self.machine.home / ".drumline" / folder / "environment.json").read_text()
        )
        return Path(record["path"])

    def digest(self, folder: str) -> str:
        return self.environment(folder).name.split("-")[1]

    def log(self, folder: str) -> str:
        file = self.machine.home / ".drumline" / folder / "log"
        return file.read_text() if file.exists() else ""

    def installations(self) -> int:
        file = self.machine.home / "installations"
        return len(file.read_text().split()) if file.exists() else 0

    def folders(self) -> set[str]:
        return {path.name for path in self.folder.iterdir() if path.is_dir()}

    def used_at(self, folder: str, seconds_ago: float) -> None:
        """Set the time of the last set-up with an attempt's environment."""
        path = self.environment(folder)
        record = path.with_name(path.name + ".json")
        moment = record.stat().st_mtime - seconds_ago
        os.utime(record, (moment, moment))


@pytest.fixture
def host(machine: Machine) -> Host:
    return Host(machine)


def test_a_second_job_with_the_same_requirements_installs_nothing(host: Host) -> None:
    first = host.attempt("000012")
    assert host.step(first)["exit_code"] == 0
    second = host.attempt("000013")
    assert host.step(second)["exit_code"] == 0
    assert host.installations() == 1
    assert host.environment(first) == host.environment(second)
    digest = host.digest(first)
    assert re.search(rf"environment: made {digest} in \d+ s\n", host.log(first))
    header, line = host.log(second).splitlines()
    assert header == "--- set-up: venv"
    assert line.startswith(f"environment: reused {digest} (made ")
    restarted = host.attempt("000013", attempt=2)
    assert host.step(restarted)["exit_code"] == 0
    assert host.environment(restarted) == host.environment(first)
    assert host.installations() == 1


@pytest.mark.every_case
def test_a_real_environment_is_installed_once_without_a_network(host: Host) -> None:
    wheel(host.machine.home / "wheels", "drumline_try", "VALUE = 7\n")
    options = ("--no-index", "--find-links", str(host.machine.home / "wheels"), "drumline_try")
    python = PythonEnvironment("venv", requirements=options)
    run = "python -c 'import drumline_try, sys; print(drumline_try.VALUE, sys.prefix)'"
    outputs = []
    for job in ("000012", "000013"):
        folder = host.attempt(job)
        [step] = python_steps(python, job)
        result = host.step(folder, step)
        assert result["exit_code"] == 0, host.log(folder)
        ended = host.machine.finish(run, job_id=job, archive_sha="0" * 64, wrap=run_wrap(python))
        assert ended["exit_code"] == 0, host.machine.log()
        outputs.append(host.log(folder).splitlines()[-1])
    assert outputs == [f"7 {host.environment(folder)}"] * 2
    assert "environment: reused " in host.log(folder)
    # Another wheel of the same name in the folder.
    wheel(host.machine.home / "wheels", "drumline_try", "VALUE = 8; MORE = 1\n")
    folder = host.attempt("000014")
    [step] = python_steps(python, "000014")
    host.step(folder, step)
    assert "environment: made " in host.log(folder)


def neighbour(host: Host) -> Host:
    """Return an emulated host that shares its environments with this one."""
    other = Host(Machine(host.machine.home.with_name("other")))
    other.machine.home.mkdir()
    other.machine.environment["DRUMLINE_CACHE"] = str(host.machine.home / ".drumline")
    return other


def test_two_jobs_at_the_same_moment_install_once(host: Host) -> None:
    gate = host.machine.home / "gate"
    gate.touch()
    first = host.attempt("000012")
    making = host.begin_step(first)
    wait_for(lambda: host.installations() == 1, "the installation has begun")
    other = neighbour(host)
    second = other.attempt("000013")
    waiting = other.begin_step(second)
    wait_for(lambda: "environment: another job is making" in other.log(second), "it waits")
    gate.unlink()
    making.communicate(timeout=60)
    waiting.communicate(timeout=60)
    assert "environment: made " in host.log(first)
    assert "environment: reused " in other.log(second)
    assert host.environment(first) == other.environment(second)
    assert (host.installations(), other.installations()) == (1, 0)


def test_a_job_that_is_stopped_stops_waiting_for_an_installation(host: Host) -> None:
    gate = host.machine.home / "gate"
    gate.touch()
    making = host.begin_step(host.attempt("000012"))
    wait_for(lambda: host.installations() == 1, "the installation has begun")
    other = neighbour(host)
    second = other.attempt("000013")
    waiting = other.begin_step(second)
    wait_for(lambda: "environment: another job is making" in other.log(second), "it waits")
    other.machine.call("stop", second, "0")
    answer, _ = waiting.communicate(timeout=60)
    assert json.loads(answer.splitlines()[-1])["error"] == "stopped"
    gate.unlink()
    making.communicate(timeout=60)


def test_an_installation_that_was_killed_is_never_used(host: Host) -> None:
    gate = host.machine.home / "gate"
    gate.touch()
    first = host.attempt("000012")
    call = host.begin_step(first)
    wait_for(lambda: host.installations() == 1, "the installation has begun")
    left = host.environment(first)
    # All at once, with those that are being forked: no process cleans up after another one.
    stopped: set[int] = set()
    while new := {*processes_with(f"HOME={host.machine.home}")} - stopped:
        send_signal(new, signal.SIGSTOP)
        stopped |= new
    send_signal(stopped, signal.SIGKILL)
    call.communicate(timeout=60)
    assert left.is_dir()
    gate.unlink()
    second = host.attempt("000013")
    assert host.step(second)["exit_code"] == 0
    assert host.environment(second) != left
    assert host.folders() == {host.environment(second).name}


@pytest.mark.parametrize("record", ["{}", '{"digest": 5}', "[]", "no JSON"])
def test_an_invalid_record_of_an_environment_is_ignored(host: Host, record: str) -> None:
    host.step(host.attempt())
    (host.folder / "zz.json").write_text(record)
    second = host.attempt("000013")
    host.step(second)
    assert "environment: reused" in host.log(second)


def test_a_failed_installation_is_removed_and_tried_again(host: Host) -> None:
    first = host.attempt("000012")
    recipe = PythonRecipe(kind="venv", requirements=["pkg"], job="000012")
    result = host.step(first, Step("venv", INSTALL + "exit 3\n", recipe))
    assert result["exit_code"] == 3
    assert host.folders() == set()
    second = host.attempt("000012", attempt=2)
    assert host.step(second)["exit_code"] == 0
    assert host.installations() == 2


def test_an_environment_that_a_program_changed_is_used_by_its_job_only(host: Host) -> None:
    first = host.attempt("000012")
    host.step(first)
    packages = host.environment(first) / "lib" / "python3" / "site-packages"
    (packages / "__pycache__").mkdir()  # no change
    (packages / "extra-2.dist-info").mkdir()
    again = host.attempt("000012", attempt=2)
    host.step(again)
    assert ", changed by this job)" in host.log(again)
    assert host.environment(again) == host.environment(first)
    other = host.attempt("000013")
    host.step(other)
    assert "environment: changed by a program and not reused" in host.log(other)
    assert host.environment(other) != host.environment(first)
    third = host.attempt("000014")
    host.step(third)
    assert host.environment(third) == host.environment(other)
    assert host.installations() == 2


def test_a_set_up_runs_again_in_a_new_environment(host: Host) -> None:
    own: dict[str, Any] = {"own": True}
    setup = Step("setup", 'echo ran in "$DRUMLINE_ENVIRONMENT"')
    first = host.attempt("000012")
    host.step(first, **own)
    assert host.step(first, setup)["ran"]
    second = host.attempt("000012", attempt=2)
    host.step(second, **own)
    assert not host.step(second, setup)["ran"]
    third = host.attempt("000012", attempt=3)
    host.step(third, **own, requirements=["pkg", "another"])
    assert host.step(third, setup)["ran"]
    assert f"ran in {host.environment(third)}" in host.log(third)
    other = host.attempt("000013")
    host.step(other, **own)
    assert host.environment(other) != host.environment(first), "it changes its own"


def test_old_environments_are_removed_unless_a_program_uses_them(host: Host) -> None:
    old, recent = host.attempt("000012"), host.attempt("000013")
    host.step(old, requirements=["pkg==1"])
    host.step(recent, requirements=["pkg==2"])
    other = neighbour(host)
    used = other.attempt("000014")
    other.step(used, requirements=["pkg==3"])
    other.machine.put("sleep 600", job_id="000014", archive_sha="0" * 64)
    other.machine.start()
    try:
        host.used_at(old, 8 * 86400)
        other.used_at(used, 8 * 86400)
        remains = host.folder / f"venv-{'0' * 12}-1"
        remains.mkdir()
        last = host.attempt("000015")
        host.step(last, requirements=["pkg==4"])
        kept = {host.environment(recent), other.environment(used), host.environment(last)}
        assert host.folders() == {path.name for path in kept}
        assert not list(host.folder.glob(f"{host.environment(old).name}*"))
    finally:
        other.machine.attempt("stop", "0")
    again = host.attempt("000016")
    host.step(again, requirements=["pkg==5"])
    assert not other.environment(used).exists()
    assert host.environment(recent).exists()


CODE = {"requirements.txt": "jax\n", "pyproject.toml": "[project]\nname = 'x'\n"}


@pytest.mark.parametrize(
    ("changed", "parts", "recipe"),
    [
        ("a package", {}, {"requirements": ["pkg==2"]}),
        ("the version of Python", {}, {"version": f"3.{sys.version_info.minor}"}),
        ("a constraint", {"code": {"c.txt": "jax<1"}, "environment": {"PIP_CONSTRAINT": "c.txt"}},
         {}),
        *rare(
            ("the kind", {}, {"kind": "uv"}),
            ("the file", {"code": {"requirements.txt": "optax\n"}},
             {"requirements_file": "requirements.txt"}),
            ("an option of pip", {"environment": {"PIP_PRE": "1"}}, {}),
            ("a compiler flag", {"environment": {"CFLAGS": "-O0"}}, {}),
        ),
    ],
)  # fmt: skip
def test_whatever_decides_the_packages_is_in_the_digest(
    host: Host, changed: str, parts: dict[str, Any], recipe: dict[str, Any]
) -> None:
    first = host.attempt(code=CODE)
    host.step(first)
    second = host.attempt("000013", **parts)
    host.step(second, **recipe)
    assert host.digest(first) != host.digest(second), changed


@pytest.mark.parametrize(
    ("same", "parts"),
    [
        ("a variable of the program", {"environment": {"LEARNING_RATE": "1e-4"}}),
        ("the code", {"archive_sha": "1" * 64}),
        ("a comment", {"code": {"requirements.txt": "# for training\n\njax  # fast\n"}}),
    ],
)
def test_what_does_not_decide_the_packages_is_not_in_the_digest(
    host: Host, same: str, parts: dict[str, Any]
) -> None:
    recipe: dict[str, Any] = {"requirements": [], "requirements_file": "requirements.txt"}
    first = host.attempt(code=CODE)
    host.step(first, **recipe)
    second = host.attempt("000013", **({"code": CODE} | parts))
    host.step(second, **recipe)
    assert host.digest(first) == host.digest(second), same


NESTED = {"requirements.txt": "-r deps/more.txt\n", "deps/more.txt": "-c limits.txt\njax\n"}


@pytest.mark.parametrize("limit", ["jax<1\n", "jax<2\n"])
def test_files_that_a_requirements_file_names_count(host: Host, limit: str) -> None:
    recipe: dict[str, Any] = {"requirements": [], "requirements_file": "requirements.txt"}
    first = host.attempt(code=NESTED | {"deps/limits.txt": "jax<1\n"})
    host.step(first, **recipe)
    second = host.attempt("000013", code=NESTED | {"deps/limits.txt": limit})
    host.step(second, **recipe)
    assert (host.digest(first) == host.digest(second)) == (limit == "jax<1\n")


@pytest.mark.parametrize(
    ("requirements", "shared_by_jobs"),
    [
        (["./pkg"], True), (["-e", "."], False),
        *rare(
            (["pkg @ ./pkg"], True), (["--find-links", "wheels", "pkg"], True),
            (["pkg-1.0-py3-none-any.whl"], True), (["-e ./pkg[dev]"], False),
        ),
    ],
)  # fmt: skip
def test_packages_in_the_code_depend_on_the_code(
    host: Host, requirements: list[str], shared_by_jobs: bool
) -> None:
    def digest(job: str, sha: str) -> str:
        folder = host.attempt(job, archive_sha=sha)
        host.step(folder, requirements=requirements)
        return host.digest(folder)

    first = digest("000012", "0" * 64)
    assert digest("000012", "1" * 64) != first
    assert (digest("000013", "0" * 64) == first) == shared_by_jobs


def test_no_secret_is_in_the_digest_or_in_a_file_of_the_cache(host: Host) -> None:
    digests = set()
    for number, password in enumerate(("hunter2", "other3")):
        address = f"https://ann:{password}@pypi.example.org/simple"
        folder = host.attempt(
            f"00001{number}",
            code={"requirements.txt": f"--extra-index-url {address}\njax\n"},
            secrets={"PIP_INDEX_URL": address, "UV_INDEX_LAB_PASSWORD": password},
        )
        host.step(folder, requirements=[address], requirements_file="requirements.txt")
        digests.add(host.digest(folder))
    assert len(digests) == 1
    assert host.installations() == 1
    for path in host.folder.iterdir():
        assert "hunter2" not in path.name
        assert path.is_dir() or "hunter2" not in path.read_text()


def test_a_job_that_calls_a_package_tool_does_not_share_its_environment() -> None:
    assert changes_environment("sudo apt-get install -y libsndfile1", "python train.py")
    assert changes_environment(None, "pip install wandb && python train.py")
    assert changes_environment(None, "uv run train.py")
    assert not changes_environment(None, "python train.py --name pipeline")
    for own in (True, False):
        [step] = python_steps(PythonEnvironment("venv"), "000012", own)
        assert step.recipe is not None
        assert step.recipe.own == own
