"""Scripts for the environments of jobs; those that need no network are executed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.errors import UserError
from drumline.hosts.environment import (
    activation,
    mount_steps,
    python_steps,
    run_wrap,
    setup_step,
)
from drumline.hosts.protocol import PythonEnvironment
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
            "DRUMLINE_ENVIRONMENT": str(home / "environment"),
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
    PythonEnvironment("docker", image="us-docker.pkg.dev/p/r/i", login="service-account"),
    PythonEnvironment("docker", image="ghcr.io/lab/train", login="GHCR"),
]


@pytest.mark.parametrize("python", EVERY, ids=lambda python: python.kind)
def test_every_script_is_bash(python: PythonEnvironment) -> None:
    scripts = [step.script for step in python_steps(python, "000001")]
    wrap = run_wrap(python, {"~/my data": "gs://lab"})
    scripts += [wrap[2]] if wrap else []
    for script in scripts:
        done = subprocess.run([BASH, "-n"], input=script, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_values_are_quoted_in_every_script() -> None:
    (step,) = python_steps(EVERY[3], "000001")
    assert """'jax[tpu]==0.10.2' 'it'"'"'s; touch ran'""" in step.script
    (step,) = python_steps(EVERY[4], "000001")
    assert "-r 'my requirements.txt'" in step.script
    assert "'ghcr.io/lab/train:1; touch ran' \"$@\"" in run_wrap(EVERY[6])[2]


def test_the_hosts_own_python_needs_no_installation() -> None:
    python = PythonEnvironment("system")
    assert python_steps(python, "1") == ()
    assert run_wrap(python) == ()
    assert activation(python) == ""


def test_the_run_uses_the_venv_of_the_set_up(tmp_path: Path) -> None:
    python = PythonEnvironment("venv")
    (step,) = python_steps(python, "000001")
    # Creating it without pip takes a tenth of the time.
    (tmp_path / "python3").write_text(
        f'#!/bin/bash\n[ "$2" = venv ] && exec {sys.executable} -m venv --without-pip "${{@:3}}"\n'
    )
    (tmp_path / "python3").chmod(0o755)
    first = bash(step.script, tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert first.returncode == 0, first.stderr
    assert bash(step.script, tmp_path).returncode == 0
    seen = "python -c 'import sys; print(sys.prefix)'; exit 7"
    ran = bash(seen, tmp_path, run_wrap(python))
    assert ran.returncode == 7
    assert ran.stdout == f"{tmp_path / 'environment'}\n"
    own = setup_step(python, "python -c 'import sys; print(sys.prefix)'")
    assert bash(own.script, tmp_path).stdout == ran.stdout


def test_requirements_are_never_installed_into_the_emulators_python(tmp_path: Path) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("needs to run in a virtual environment")
    (step,) = python_steps(EVERY[1], "000001")
    done = bash(step.script, tmp_path)
    assert done.returncode == 1
    assert "use uv or venv" in done.stderr


def test_a_container_gets_the_names_of_variables_without_values() -> None:
    wrap = run_wrap(PythonEnvironment("docker", image="lab/train"), {"/data": "gs://lab"})
    words = " ".join(wrap)
    assert "--env-file" in words
    assert "--privileged --net=host" in words
    assert "-v /data:/data" in words
    assert " -e " not in words
    with pytest.raises(UserError, match="docker needs an image"):
        run_wrap(PythonEnvironment("docker"))


def test_a_container_has_shared_memory_for_data_loaders() -> None:
    wrap = run_wrap(PythonEnvironment("docker", image="lab/train"))
    assert "--shm-size=16g --ulimit memlock=-1:-1" in wrap[2]
    wrap = run_wrap(PythonEnvironment("docker", image="lab/train", shm_size="64g"))
    assert "--shm-size=64g" in wrap[2]


DOCKER = """#!/bin/bash
echo "$# $@" >> "$LOG"
case "$1" in
  login) cat > "$LOG.password"; touch "$DOCKER_CONFIG/config.json" ;;
  pull) test -e "$DOCKER_CONFIG/config.json" && exit "${PULL_CODE:-0}" ;;
esac
"""
CURL = """#!/bin/bash
echo '{"access_token": "ya29.secret", "expires_in": 3599}'
"""


@pytest.mark.parametrize(
    ("image", "login", "secret", "called", "password"),
    [
        ("ghcr.io/lab/i", "GHCR", "ann:s3cret:x", "--username ann --password-stdin ghcr.io",
         "s3cret:x"),
        ("lab/i", "HUB", "ann:s3cret", "--username ann --password-stdin ", "s3cret"),
        ("us-docker.pkg.dev/p/r/i", "KEY", '{"type": "service_account"}',
         "--username _json_key --password-stdin us-docker.pkg.dev", '{"type": "service_account"}'),
        ("us-docker.pkg.dev/p/r/i", "service-account", "",
         "--username oauth2accesstoken --password-stdin us-docker.pkg.dev", "ya29.secret"),
    ],
)  # fmt: skip
def test_an_image_is_pulled_after_a_login_that_is_not_kept(
    tmp_path: Path, image: str, login: str, secret: str, called: str, password: str
) -> None:
    for name, text in (("docker", DOCKER), ("curl", CURL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), login: secret}
    variables = {name: value for name, value in variables.items() if name != "service-account"}
    variables["TMPDIR"] = str(tmp_path)
    (step,) = python_steps(PythonEnvironment("docker", image=image, login=login), "1")
    done = bash(step.script, tmp_path, (), **variables)
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in log.read_text().splitlines()] == [
        f"{len(called.split()) + 1} login {called}".strip(), f"2 pull {image}",
    ]  # fmt: skip
    assert (tmp_path / "log.password").read_text() == password
    assert list(tmp_path.glob("tmp.*")) == [], "no login is left"
    failed = bash(step.script, tmp_path, (), **variables, PULL_CODE="3")
    assert failed.returncode == 3
    assert list(tmp_path.glob("tmp.*")) == []


PUBLIC_OR_PRIVATE = """#!/bin/bash
echo "$1" >> "$LOG"
[ "$1" != pull ] || [ -n "$PUBLIC" ] || [ -e "$DOCKER_CONFIG/config.json" ] || exit 1
[ "$1" != login ] || cat > "$DOCKER_CONFIG/config.json"
"""


@pytest.mark.parametrize(
    ("image", "public", "metadata", "calls", "code"),
    [
        ("us-docker.pkg.dev/p/r/i", "yes", "exit 0", ["pull"], 0),
        ("us-docker.pkg.dev/p/r/i", "", "exit 0", ["pull", "login", "pull"], 0),
        ("gcr.io/p/i", "", "exit 0", ["pull", "login", "pull"], 0),
        ("eu.gcr.io/p/i", "", "exit 2", ["pull"], 1),
        ("ghcr.io/p/i", "", "exit 0", ["pull"], 1),
    ],
)
def test_the_account_of_the_host_opens_private_images_of_google(
    tmp_path: Path, image: str, public: str, metadata: str, calls: list[str], code: int
) -> None:
    getent = f"#!/bin/bash\n{metadata}\n"
    for name, text in (("docker", PUBLIC_OR_PRIVATE), ("curl", CURL), ("getent", getent)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    (step,) = python_steps(PythonEnvironment("docker", image=image), "1")
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = bash(step.script, tmp_path, (), PATH=path, LOG=str(log), PUBLIC=public)
    assert (done.returncode, log.read_text().split()) == (code, calls), done.stderr


def test_a_secret_that_is_no_login_is_an_error(tmp_path: Path) -> None:
    (step,) = python_steps(PythonEnvironment("docker", image="ghcr.io/a/b", login="GHCR"), "1")
    done = bash(step.script, tmp_path, GHCR="s3cret")
    assert done.returncode == 1
    assert "the secret GHCR is neither USER:PASSWORD nor a JSON key" in done.stderr
    assert "s3cret" not in done.stderr


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


def test_an_emulated_host_mounts_no_folder_outside_its_home(tmp_path: Path) -> None:
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
