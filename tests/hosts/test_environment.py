"""From the parts of a job to scripts; the scripts are run where that needs no network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.errors import UserError
from drumline.hosts.environment import (
    PythonEnvironment,
    activation,
    mount_steps,
    python_steps,
    run_wrap,
    setup_step,
)
from drumline.hosts.values import Step

BASH = shutil.which("bash") or "bash"


def bash(
    script: str, home: Path, wrap: tuple[str, ...] = (), **environment: str
) -> "subprocess.CompletedProcess[str]":
    file = home / "script.sh"
    file.write_text(script)
    return subprocess.run(
        [*wrap, BASH, "-eo", "pipefail", str(file)],
        cwd=home,
        env={
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )


EVERY = [
    PythonEnvironment("system"),
    PythonEnvironment("system", requirements=("numpy>=2",)),
    PythonEnvironment("uv"),
    PythonEnvironment("uv", "3.11", ("jax[tpu]==0.10.2", "it's; touch ran")),
    PythonEnvironment("venv", requirements_file="my requirements.txt"),
    PythonEnvironment("conda", "3.12", ("jax",)),
    PythonEnvironment("docker", image="ghcr.io/lab/train:1; touch ran"),
]


@pytest.mark.parametrize("python", EVERY, ids=lambda python: python.kind)
def test_every_script_is_bash(python: PythonEnvironment) -> None:
    scripts = [step.script for step in python_steps(python, "000001")]
    wrap = run_wrap(python, "000001", {"~/my data": "gs://lab"})
    scripts += [wrap[2]] if wrap else []
    for script in scripts:
        done = subprocess.run([BASH, "-n"], input=script, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_values_are_quoted_in_every_script() -> None:
    (step,) = python_steps(EVERY[3], "000001")
    assert """'jax[tpu]==0.10.2' 'it'"'"'s; touch ran'""" in step.script
    (step,) = python_steps(EVERY[4], "000001")
    assert "-r 'my requirements.txt'" in step.script
    assert "'ghcr.io/lab/train:1; touch ran' \"$@\"" in run_wrap(EVERY[6], "000001")[2]


def test_the_hosts_own_python_needs_nothing() -> None:
    python = PythonEnvironment("system")
    assert python_steps(python, "1") == ()
    assert run_wrap(python, "1") == ()
    assert activation(python, "1") == ""


def test_the_run_uses_the_venv_of_the_set_up(tmp_path: Path) -> None:
    python = PythonEnvironment("venv")
    (step,) = python_steps(python, "000001")
    # Without pip it is made in a tenth of the time.
    (tmp_path / "python3").write_text(
        f'#!/bin/bash\n[ "$2" = venv ] && exec {sys.executable} -m venv --without-pip "${{@:3}}"\n'
    )
    (tmp_path / "python3").chmod(0o755)
    first = bash(step.script, tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert first.returncode == 0, first.stderr
    assert bash(step.script, tmp_path).returncode == 0
    seen = "python -c 'import sys; print(sys.prefix)'; exit 7"
    ran = bash(seen, tmp_path, run_wrap(python, "000001"))
    assert ran.returncode == 7
    assert ran.stdout.startswith(str(tmp_path / ".drumline" / "environments" / "venv-"))
    own = setup_step(python, "000001", "python -c 'import sys; print(sys.prefix)'")
    assert bash(own.script, tmp_path).stdout == ran.stdout


def test_requirements_are_never_installed_into_the_emulators_python(tmp_path: Path) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("needs to run in a virtual environment")
    (step,) = python_steps(EVERY[1], "000001")
    done = bash(step.script, tmp_path)
    assert done.returncode == 1
    assert "use uv or venv" in done.stderr


def test_a_container_gets_the_names_of_variables_without_values() -> None:
    wrap = run_wrap(PythonEnvironment("docker", image="lab/train"), "1", {"/data": "gs://lab"})
    words = " ".join(wrap)
    assert "--env-file" in words
    assert "--privileged --net=host" in words
    assert "-v /data:/data" in words
    assert " -e " not in words
    with pytest.raises(UserError, match="docker needs an image"):
        run_wrap(PythonEnvironment("docker"), "1")


def mounted(path: str, source: str) -> Step:
    return mount_steps({path: source})[0]


def test_an_emulated_host_mounts_a_bucket_as_a_folder(tmp_path: Path) -> None:
    home, buckets = tmp_path / "home", tmp_path / "buckets"
    home.mkdir()
    step = mounted("~/my data/$(touch ran)", "gs://lab-data/imagenet/it's")
    for _ in range(2):
        done = bash(step.script, home, DRUMLINE_BUCKETS=str(buckets))
        assert done.returncode == 0, done.stderr
    (home / "my data" / "$(touch ran)" / "x").write_text("hello")
    assert (buckets / "lab-data" / "imagenet" / "it's" / "x").read_text() == "hello"
    assert not list(tmp_path.rglob("ran"))


def test_an_emulated_host_mounts_nothing_outside_its_home(tmp_path: Path) -> None:
    done = bash(mounted("/data", "gs://lab").script, tmp_path, DRUMLINE_BUCKETS=str(tmp_path))
    assert done.returncode == 1
    assert "mounts /data: an emulated host mounts only below its home" in done.stderr


def test_a_tpu_vm_mounts_with_gcsfuse_once(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    calls = tmp_path / "calls"
    stubs = {
        "gcsfuse": f'echo "$@" >> {calls}',
        "mountpoint": f"test -e {calls}",
        "findmnt": "echo lab",
    }
    for name, script in stubs.items():
        (tools / name).write_text(f"#!/bin/bash\n{script}\n")
        (tools / name).chmod(0o755)
    step = mounted("~/data", "gs://lab/a b")
    path = f"{tools}:{os.environ['PATH']}"
    for _ in range(2):
        assert bash(step.script, tmp_path, PATH=path).returncode == 0
    assert calls.read_text() == f"--implicit-dirs --only-dir a b lab {tmp_path}/data\n"
    other = mounted("~/data", "gs://other")
    done = bash(other.script, tmp_path, PATH=path)
    assert (done.returncode, "something else is mounted" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("data", "gs://lab", "write an absolute path"),
        ("/data", "lab", "is not gs://bucket"),
        ("/data", "gs://", "is not gs://bucket"),
        ("/data", "gs://lab/../other", "leads out"),
        ("~/../x", "gs://lab", "leads out"),
    ],
)
def test_an_invalid_mount_is_a_user_error(path: str, source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mount_steps({path: source})
