"""The set-up steps of a job, and the command prefix of its run. Pure: text only.

The scripts run by bash (-eo pipefail) in the working copy, on a TPU VM and on an emulated host. All
values in them are quoted; what depends on the host ($HOME) is expanded there.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from drumline.hosts.code import COMPANION
from drumline.hosts.companion import Use, training_requirements
from drumline.hosts.values import Step

Kind = Literal["system", "uv", "venv", "conda", "docker"]


@dataclass(frozen=True)
class PythonEnvironment:
    """The Python environment that a job runs in."""

    kind: Kind
    version: str | None = None
    """The version, such as `3.11`; None takes that of the host."""
    requirements: tuple[str, ...] | None = None
    requirements_file: str | None = None
    """A file in the code. With uv and no requirements, the project's own lock file is used."""
    image: str | None = None
    """The container image; for docker only."""
    drumline: Use = "none"
    """How much of Drumline was sent along with the code."""


class BadEnvironment(ValueError):
    """The settings contradict each other; the text is a sentence for the user."""


def python_steps(python: PythonEnvironment, job_id: str) -> tuple[Step, ...]:
    """The steps that make the environment on a fresh host."""
    if python.kind == "docker":
        if not python.image:
            raise BadEnvironment("environment: docker needs an image")
        return (Step("docker", f"docker pull {shlex.quote(python.image)}"),)
    folder = _folder(python, job_id)
    install = _install(python, folder)
    if python.kind == "system":
        return (Step("requirements", _SYSTEM_CHECK + install),) if install else ()
    version = shlex.quote(python.version) if python.version else ""
    if python.kind == "uv":
        made = f"uv venv --allow-existing {f'--python {version} ' if version else ''}{folder}\n"
        if not _asked_for(python):
            install = _UV_PROJECT.format(folder=folder) + install
        return (Step("uv", _GET_UV + made + install),)
    if python.kind == "venv":
        name = f"python{version}" if version else "python3"
        made = f"test -x {folder}/bin/python || {name} -m venv {folder}\n"
        return (Step("venv", made + install),)
    version = version or "3.11"
    made = (
        f"test -x {folder}/bin/python || "
        f'"$HOME"/.drumline/conda/bin/conda create --yes --quiet --prefix {folder} '
        f"python={version}\n"
    )
    return (Step("conda", _GET_CONDA + made + install),)


def run_wrap(
    python: PythonEnvironment, job_id: str, mounts: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The arguments before the run's `bash`, which make it run in the environment."""
    if python.kind == "docker":
        if not python.image:
            raise BadEnvironment("environment: docker needs an image")
        folders = "".join(f" -v {_path(path)}:{_path(path)}" for path in mounts or {})
        # The env-file holds names; docker takes the values from its own environment, so that no
        # secret is in a process list. The home is the same inside, so all paths stay valid.
        script = (
            'exec docker run --rm --privileged --net=host --name "$DRUMLINE_CONTAINER"'
            ' --env-file "$DRUMLINE_ENV_FILE" -v "$HOME":"$HOME" -w "$PWD"'
            f'{folders} {shlex.quote(python.image)} {_inside(python)}"$@"'
        )
        return ("bash", "-c", script, "drumline-docker")
    lines = activation(python, job_id)
    if not lines:
        return ()
    return ("bash", "-c", f'{lines}exec "$@"', f"drumline-{python.kind}")


def activation(python: PythonEnvironment, job_id: str) -> str:
    """Shell lines that activate the environment, before the user's own set-up."""
    if python.kind == "docker":
        return ""
    found = _FIND_DRUMLINE if python.drumline != "none" else ""
    if python.kind == "system":
        return found
    folder = _folder(python, job_id)
    name = "CONDA_PREFIX" if python.kind == "conda" else "VIRTUAL_ENV"
    return f'export {name}={folder} PATH={folder}/bin:"$PATH"\nunset PYTHONHOME\n{found}'


_FIND_DRUMLINE = f'export PYTHONPATH="$PWD/{COMPANION}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
"""A shell line that puts Drumline before the PYTHONPATH of the user or the image."""


def _inside(python: PythonEnvironment) -> str:
    """Arguments before the run's `bash` inside a container."""
    if python.drumline == "none":
        return ""
    return f"""bash -c {shlex.quote(_FIND_DRUMLINE + 'exec "$@"')} drumline """


def setup_step(python: PythonEnvironment, job_id: str, script: str) -> Step:
    """The user's own set-up lines, in the environment (for docker: on the host, before it)."""
    # On the first line, so that the user's line numbers stay right.
    return Step("setup", activation(python, job_id).replace("\n", "; ") + script)


def _folder(python: PythonEnvironment, job_id: str) -> str:
    """The folder of the environment, quoted for bash: one for each job and its settings."""
    mark = hashlib.sha256(repr((job_id, python)).encode()).hexdigest()[:12]
    return f'"$HOME"/.drumline/environments/{python.kind}-{mark}'


def _asked_for(python: PythonEnvironment) -> list[str]:
    """What the user wants installed, as arguments for pip."""
    file = ["-r", python.requirements_file] if python.requirements_file else []
    return [*file, *(python.requirements or ())]


def _install(python: PythonEnvironment, folder: str) -> str:
    arguments = _asked_for(python)
    if python.drumline == "training" and python.kind != "system":
        arguments += training_requirements()
    if not arguments:
        return ""
    quoted = shlex.join(arguments)
    if python.kind == "uv":
        return f"uv pip install --python {folder}/bin/python {quoted}\n"
    if python.kind == "system":
        return f"python3 -m pip install --quiet $user_flags {quoted}\n"
    return f"{folder}/bin/python -m pip install --quiet {quoted}\n"


_SYSTEM_CHECK = """\
if python3 -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
  echo "environment: system cannot take requirements where python3 is itself a virtual" \\
    "environment; use uv or venv" >&2
  exit 1
fi
user_flags=--user
if python3 -m pip install --help | grep -q break-system-packages; then
  user_flags="$user_flags --break-system-packages"
fi
"""

_GET_UV = """\
export PATH="$HOME/.local/bin:$PATH"
if ! command -v uv >/dev/null; then
  curl --fail --silent --show-error --location --retry 3 https://astral.sh/uv/install.sh | sh
fi
"""

_UV_PROJECT = """\
if [ -f uv.lock ]; then
  UV_PROJECT_ENVIRONMENT={folder} uv sync --locked
elif [ -f pyproject.toml ]; then
  UV_PROJECT_ENVIRONMENT={folder} uv sync
fi
"""

_GET_CONDA = """\
if [ ! -x "$HOME"/.drumline/conda/bin/conda ]; then
  installer=$(mktemp)
  releases=https://github.com/conda-forge/miniforge/releases
  curl --fail --silent --show-error --location --retry 3 --output "$installer" \\
    "$releases/latest/download/Miniforge3-Linux-$(uname -m).sh"
  bash "$installer" -b -u -p "$HOME"/.drumline/conda
  rm -f "$installer"
fi
"""


# Mounts ------------------------------------------------------------------------------------------


def mount_steps(mounts: Mapping[str, str]) -> tuple[Step, ...]:
    """Steps that mount buckets as folders; `mounts` maps a path to gs://bucket/prefix."""
    return tuple(_mount(path, source) for path, source in mounts.items())


def _mount(path: str, source: str) -> Step:
    found = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(.*))?", source, re.DOTALL)
    if not found:
        raise BadEnvironment(f"mounts {path}: {source!r} is not gs://bucket or gs://bucket/prefix")
    bucket, prefix = found.group(1), (found.group(2) or "").strip("/")
    if ".." in prefix.split("/") or ".." in path.split("/"):
        raise BadEnvironment(f"mounts {path}: '..' leads out of the bucket or of the home folder")
    values = {
        "path": _path(path),
        "shown": shlex.quote(path),
        "bucket": shlex.quote(bucket),
        "below": shlex.quote(f"{bucket}/{prefix}".rstrip("/")),
        "only": f"--only-dir {shlex.quote(prefix)} " if prefix else "",
    }
    return Step(f"mount {path}", _MOUNT.format(**values))


def _path(path: str) -> str:
    """A path for bash: `~` is the host's home, all else is literal."""
    if path == "~":
        return '"$HOME"'
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    if path.startswith("/"):
        return shlex.quote(path)
    raise BadEnvironment(f"mounts {path}: write an absolute path, or one that begins with ~/")


_MOUNT = """\
path={path}
if [ -n "${{DRUMLINE_BUCKETS:-}}" ]; then
  case "$path" in
    "$HOME"/*) ;;
    *) echo "mounts" {shown}": an emulated host mounts only below its home; use ~/…" >&2; exit 1 ;;
  esac
  mkdir -p "$DRUMLINE_BUCKETS"/{below} "$(dirname "$path")"
  ln -sfn "$DRUMLINE_BUCKETS"/{below} "$path"
  exit 0
fi
if mountpoint -q "$path"; then
  # gcsfuse shows the bucket's name as the source of the mount.
  if [ "$(findmnt -n -o SOURCE --target "$path")" = {bucket} ]; then exit 0; fi
  echo "mounts" {shown}": something else is mounted there" >&2; exit 1
fi
if ! command -v gcsfuse >/dev/null; then
  release="gcsfuse-$(lsb_release -c -s)"
  key=/usr/share/keyrings/cloud.google.asc
  curl --fail --silent --show-error https://packages.cloud.google.com/apt/doc/apt-key.gpg \\
    | sudo tee "$key" >/dev/null
  echo "deb [signed-by=$key] https://packages.cloud.google.com/apt $release main" \\
    | sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  sudo apt-get -o DPkg::Lock::Timeout=300 update -q
  sudo apt-get -o DPkg::Lock::Timeout=300 install -q -y gcsfuse
fi
if [ ! -d "$path" ]; then
  mkdir -p "$path" 2>/dev/null || sudo install -d -o "$(id -u)" -g "$(id -g)" "$path"
fi
gcsfuse --implicit-dirs {only}{bucket} "$path"
"""
