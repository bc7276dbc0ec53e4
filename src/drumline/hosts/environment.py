"""The set-up steps of a job, and the command prefix of its run. Pure functions that return text.

bash runs the scripts (-eo pipefail) in the working copy, on a TPU VM or an emulated host. All
values in them are quoted. $HOME is expanded on the host.
"""

import re
import shlex
from collections.abc import Mapping

from drumline.errors import UserError
from drumline.hosts.agent.wire import PythonRecipe
from drumline.hosts.bundled_package import training_requirements
from drumline.hosts.packing.listing import PACKAGE_FOLDER
from drumline.hosts.protocol import Program, PythonEnvironment
from drumline.hosts.values import ShellProgram, Step

SERVICE_ACCOUNT = "service-account"
"""The login to a registry with the account of the host."""

ENVIRONMENT = '"$DRUMLINE_ENVIRONMENT"'
"""The folder of the environment, which the agent chooses (agent/environment_cache.py)."""


def shell_program(program: Program) -> ShellProgram:
    """Return a program with the scripts that make its environment on a host."""
    python, setup = program.python, program.setup
    own = changes_environment(setup, program.run)
    steps = python_steps(python, f"{program.owner}-{program.job_id}", own)
    setup_steps = (setup_step(python, setup),) if setup else ()
    # A set-up may log in to the registry of the image. All others run in the environment.
    steps = (*setup_steps, *steps) if python.kind == "docker" else (*steps, *setup_steps)
    return ShellProgram(
        **vars(program),
        steps=(*mount_steps(program.mounts), *steps),
        wrap=run_wrap(python, program.mounts),
    )


def python_steps(python: PythonEnvironment, job: str, own: bool = False) -> tuple[Step, ...]:
    """Return the steps that make the environment on a host, or use one that it has.

    `job` identifies the job. `own` says that it changes the environment.
    """
    if python.kind == "docker":
        if not python.image:
            raise UserError("environment: docker needs an image")
        return (Step("docker", _pull_script(python.image, python.login)),)
    install = _install_command(python)
    if python.kind == "system":
        return (Step("requirements", _SYSTEM_CHECK + install),) if install else ()
    recipe = PythonRecipe(
        kind=python.kind,
        version=python.version or "",
        requirements=_packages(python),
        requirements_file=python.requirements_file or "",
        job=job,
        own=own,
    )
    version = shlex.quote(python.version) if python.version else ""
    if python.kind == "uv":
        interpreter = f"--python {version} " if version else ""
        create = f"uv venv --allow-existing {interpreter}{ENVIRONMENT}\n"
        if not (python.requirements_file or python.requirements):
            install = _UV_PROJECT + install
        return (Step("uv", _GET_UV + create + install, recipe),)
    if python.kind == "venv":
        interpreter = f"python{version}" if version else "python3"
        create = f"test -x {ENVIRONMENT}/bin/python || {interpreter} -m venv {ENVIRONMENT}\n"
        return (Step("venv", create + install, recipe),)
    version = version or "3.11"
    create = (
        f"test -x {ENVIRONMENT}/bin/python || "
        f'"$HOME"/.drumline/conda/bin/conda create --yes --quiet --prefix {ENVIRONMENT} '
        f"python={version}\n"
    )
    return (Step("conda", _GET_CONDA + create + install, recipe),)


def run_wrap(python: PythonEnvironment, mounts: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the arguments before `bash` that run the program in the environment."""
    if python.kind == "docker":
        if not python.image:
            raise UserError("environment: docker needs an image")
        folders = "".join(f" -v {_quote_path(path)}:{_quote_path(path)}" for path in mounts or {})
        # The env-file has only names. docker takes the values from its own environment, so that
        # no secret is in a list of processes. The home is the same, so all paths stay valid.
        script = (
            'exec docker run --rm --privileged --net=host --name "$DRUMLINE_CONTAINER"'
            f" --shm-size={shlex.quote(python.shm_size)} --ulimit memlock=-1:-1"
            ' --env-file "$DRUMLINE_ENV_FILE" -v "$HOME":"$HOME" -w "$PWD"'
            f'{folders} {shlex.quote(python.image)} {_container_prefix(python)}"$@"'
        )
        return ("bash", "-c", script, "drumline-docker")
    lines = activation(python)
    if not lines:
        return ()
    return ("bash", "-c", f'{lines}exec "$@"', f"drumline-{python.kind}")


def activation(python: PythonEnvironment) -> str:
    """Return shell lines that activate the environment, for the user's set-up."""
    if python.kind == "docker":
        return ""
    python_path = _PYTHON_PATH if python.drumline != "none" else ""
    if python.kind == "system":
        return python_path
    name = "CONDA_PREFIX" if python.kind == "conda" else "VIRTUAL_ENV"
    exports = f'export {name}={ENVIRONMENT} PATH={ENVIRONMENT}/bin:"$PATH"\n'
    return f"{exports}unset PYTHONHOME\n{python_path}"


_PYTHON_PATH = f'export PYTHONPATH="$PWD/{PACKAGE_FOLDER}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
"""A shell line that puts the bundled package first in PYTHONPATH."""


def _container_prefix(python: PythonEnvironment) -> str:
    """Return the arguments before `bash` inside a container."""
    if python.drumline == "none":
        return ""
    return f"""bash -c {shlex.quote(_PYTHON_PATH + 'exec "$@"')} drumline """


def setup_step(python: PythonEnvironment, script: str) -> Step:
    """Return the user's set-up step, which runs in the environment (with docker, on the host)."""
    # Activated on the first line, so that the user's line numbers stay correct.
    return Step("setup", activation(python).replace("\n", "; ") + script)


def changes_environment(setup: str | None, run: str) -> bool:
    """Return True if a job probably installs packages into its environment by itself."""
    return setup is not None or _PACKAGE_TOOL.search(run) is not None


_PACKAGE_TOOL = re.compile(r"\b(pip3?|uv|conda|mamba|poetry|pdm)\b")


def _packages(python: PythonEnvironment) -> list[str]:
    """Return the requirements that are not in a file."""
    packages = [*(python.requirements or ())]
    if python.drumline == "training" and python.kind != "system":
        packages += training_requirements()
    return packages


def _install_command(python: PythonEnvironment) -> str:
    file = ["-r", python.requirements_file] if python.requirements_file else []
    arguments = [*file, *_packages(python)]
    if not arguments:
        return ""
    quoted = shlex.join(arguments)
    if python.kind == "uv":
        return f"uv pip install --python {ENVIRONMENT}/bin/python {quoted}\n"
    if python.kind == "system":
        return f"python3 -m pip install --quiet $user_flags {quoted}\n"
    return f"{ENVIRONMENT}/bin/python -m pip install --quiet {quoted}\n"


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
  UV_PROJECT_ENVIRONMENT="$DRUMLINE_ENVIRONMENT" uv sync --locked
elif [ -f pyproject.toml ]; then
  UV_PROJECT_ENVIRONMENT="$DRUMLINE_ENVIRONMENT" uv sync
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


# Containers --------------------------------------------------------------------------------------


def registry_of(image_name: str) -> str:
    """Return the registry of an image; empty for Docker Hub."""
    host, slash, _ = image_name.partition("/")
    return host if slash and (set(".:") & set(host) or host == "localhost") else ""


_GOOGLE_REGISTRY = re.compile(
    r"([a-z0-9-]+\.)?gcr\.io|[a-z0-9-]+-docker\.pkg\.dev|docker\.pkg\.dev"
)


def is_google_registry(registry: str) -> bool:
    """Return True if the account of a virtual machine at Google can log in to a registry."""
    return _GOOGLE_REGISTRY.fullmatch(registry) is not None


def _pull_script(image: str, login: str | None) -> str:
    """Return a script that pulls an image, after a login to its registry if it needs one.

    An image of Google's that neither is public nor opens with a login of the user's set-up is
    pulled with the account of the host.
    """
    pull = f"docker pull {shlex.quote(image)}\n"
    if login is None and not is_google_registry(registry_of(image)):
        return pull
    if login is None:
        return _PULL_OR_LOGIN.format(pull=pull.rstrip()) + _pull_script(image, SERVICE_ACCOUNT)
    credentials = _ACCOUNT_LOGIN if login == SERVICE_ACCOUNT else _VARIABLE_LOGIN.format(name=login)
    # Without a registry, docker logs in to Docker Hub.
    registry = shlex.quote(registry_of(image)) if registry_of(image) else ""
    return credentials + _LOGIN_AND_PULL.format(registry=registry, pull=pull)


_PULL_OR_LOGIN = """\
pull_code=0
{pull} || pull_code=$?
if [ "$pull_code" = 0 ]; then exit 0; fi
if ! getent hosts metadata.google.internal >/dev/null; then exit "$pull_code"; fi
echo "logging in to the registry with the account of this host"
"""

_ACCOUNT_LOGIN = """\
metadata=http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token
docker_user=oauth2accesstoken
docker_password=$(
  curl --fail --silent --show-error --retry 3 --header 'Metadata-Flavor: Google' "$metadata" \\
    | python3 -c 'import json, sys; print(json.load(sys.stdin)["access_token"])'
)
"""

_VARIABLE_LOGIN = """\
case "${name}" in
  '{{'*) docker_user=_json_key docker_password="${name}" ;;
  *:*) docker_user="${{{name}%%:*}}" docker_password="${{{name}#*:}}" ;;
  *)
    echo "docker.login: the secret {name} is neither USER:PASSWORD nor a JSON key" >&2
    exit 1
    ;;
esac
"""

# The login is deleted: the program must not find it in the home folder.
_LOGIN_AND_PULL = """\
DOCKER_CONFIG=$(mktemp -d)
export DOCKER_CONFIG
pull_code=0
{{
  printf %s "$docker_password" \\
    | docker login --username "$docker_user" --password-stdin {registry} >/dev/null \\
    && {pull}}} || pull_code=$?
rm -rf "$DOCKER_CONFIG"
exit "$pull_code"
"""


# Mounts ------------------------------------------------------------------------------------------


def mount_steps(mounts: Mapping[str, str]) -> tuple[Step, ...]:
    """Return steps that mount buckets as folders. `mounts` maps a path to gs://bucket/prefix."""
    return tuple(_mount_step(path, source) for path, source in mounts.items())


def _mount_step(path: str, source: str) -> Step:
    match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(.*))?", source, re.DOTALL)
    if not match:
        raise UserError(f"mounts {path}: {source!r} is not gs://bucket or gs://bucket/prefix")
    bucket, prefix = match.group(1), (match.group(2) or "").strip("/")
    if ".." in prefix.split("/") or ".." in path.split("/"):
        raise UserError(f"mounts {path}: '..' leads out of the bucket or of the home folder")
    values = {
        "path": _quote_path(path),
        "quoted": shlex.quote(path),
        "bucket": shlex.quote(bucket),
        "source": shlex.quote(f"{bucket}/{prefix}".rstrip("/")),
        "options": f"--only-dir {shlex.quote(prefix)} " if prefix else "",
    }
    return Step(f"mount {path}", _MOUNT.format(**values))


def _quote_path(path: str) -> str:
    """Quote a path for bash, where `~` means the home folder on the host."""
    if path == "~":
        return '"$HOME"'
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    if path.startswith("/"):
        return shlex.quote(path)
    raise UserError(f"mounts {path}: write an absolute path, or one that begins with ~/")


_MOUNT = """\
path={path}
if [ -n "${{DRUMLINE_BUCKETS:-}}" ]; then
  case "$path" in
    "$HOME"/*) ;;
    *) echo "mounts" {quoted}": an emulated host mounts only below its home; use ~/…" >&2; exit 1 ;;
  esac
  mkdir -p "$DRUMLINE_BUCKETS"/{source} "$(dirname "$path")"
  ln -sfn "$DRUMLINE_BUCKETS"/{source} "$path"
  exit 0
fi
if mountpoint -q "$path"; then
  # gcsfuse shows the bucket's name as the source of the mount.
  if [ "$(findmnt -n -o SOURCE --target "$path")" = {bucket} ]; then exit 0; fi
  echo "mounts" {quoted}": something else is mounted there" >&2; exit 1
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
gcsfuse --implicit-dirs {options}{bucket} "$path"
"""
