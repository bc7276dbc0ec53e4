"""The Drumline package in a job's archive, for programs that import it.

A fresh host does not have Drumline, and a package index may not have this version. If the code
imports drumline, the package of this very version is added to the archive of the code, and
`PYTHONPATH` points to it in every kind of environment. If Drumline creates the environment, it also
installs the requirements of training (JAX, optax, …). A container or the host's own Python must
have them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import drumline
from drumline.hosts.packing.listing import list_files
from drumline.hosts.protocol import Use

PACKAGE = Path(drumline.__file__).parent

_IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+drumline\b", re.MULTILINE)
_TRAINING = re.compile(
    rb"\bdrumline\.(?:train|models|parallel|distributed)\b"
    rb"|^[ \t]*from[ \t]+drumline[ \t]+import\b.*\b(?:train|models|parallel|distributed)\b",
    re.MULTILINE,
)
_IMPORT_IN_SCRIPT = re.compile(r"-m[ \t]*drumline\b|\b(?:from|import)[ \t]+drumline\b")
_REQUIREMENT = re.compile(r"\s*drumline\s*(?:[\[=<>!~@;#]|$)", re.IGNORECASE)
_MAX_SOURCE_BYTES = 1_000_000
"""The maximum size of a source file. A larger file is data, even if its name ends in .py."""


@dataclass(frozen=True)
class BundledPackage:
    """The decision to add Drumline to a job's archive."""

    use: Use
    """The part of Drumline that the hosts get."""
    warning: str = ""
    """A sentence for the user if an import would fail on the hosts, else empty."""

    @property
    def package(self) -> Path | None:
        """The folder of the package to add, if any."""
        return None if self.use == "none" else PACKAGE


def choose_package(
    folder: Path | None, scripts: Iterable[str], python: Mapping[str, Any], *, local: bool
) -> BundledPackage:
    """Decide if Drumline is added to the code in a folder, from the job's `python` key.

    `scripts` are the shell lines of the job. The hosts of the emulator run this Python, so with
    `system` they have Drumline already.
    """
    setting, environment = python.get("drumline", "auto"), python["kind"]
    names = list_files(folder) if folder else []
    use = find_use(folder, names, scripts)
    installed = _installs_drumline(folder, names, python.get("requirements")) or (
        local and environment == "system"
    )
    if setting is False:
        missing = use != "none" and not installed
        return BundledPackage("none", _EXCLUDED if missing else "")
    if setting == "auto" and (use == "none" or installed):
        return BundledPackage("none")
    bundled: Use = "training" if setting is True else use
    warn = (
        use == "training"
        and not local
        and environment in _MUST_HAVE_JAX
        and not python.get("requirements")
    )
    return BundledPackage(bundled, _MUST_HAVE_JAX[environment] if warn else "")


def find_use(folder: Path | None, names: Iterable[str], scripts: Iterable[str]) -> Use:
    """Return the part of Drumline that the code imports."""
    use: Use = "none"
    for script in scripts:
        if _IMPORT_IN_SCRIPT.search(script):
            use = "package"
            if _TRAINING.search(script.encode()):
                return "training"
    for name in names:
        path = (folder or Path()) / name
        if (
            not name.endswith(".py")
            or not path.is_file()
            or path.stat().st_size > _MAX_SOURCE_BYTES
        ):
            continue
        text = path.read_bytes()
        if b"drumline" in text and _IMPORT.search(text):
            if _TRAINING.search(text):
                return "training"
            use = "package"
    return use


@cache
def training_requirements() -> tuple[str, ...]:
    """Return the requirements of `drumline.train`, from the metadata of this version."""
    try:
        entries = requires("drumline") or []
    except PackageNotFoundError:
        return ()
    requirements = []
    for entry in entries:
        requirement, _, marker = (text.strip() for text in entry.partition(";"))
        if re.fullmatch(r"""extra\s*==\s*["']jax["']""", marker) or requirement.startswith("rich"):
            requirements.append(requirement)
    return tuple(sorted(requirements))


def _installs_drumline(folder: Path | None, names: list[str], requirements: object) -> bool:
    """Return True if the code contains Drumline or its requirements install it."""
    if {"drumline/__init__.py", "src/drumline/__init__.py"} & set(names):
        return True
    if isinstance(requirements, str) and folder:
        file = folder / requirements
        lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    else:
        lines = list(requirements) if isinstance(requirements, list | tuple) else []
    return any(_REQUIREMENT.match(line) for line in lines)


_EXCLUDED = (
    "the code imports drumline, and python.drumline: false keeps it off the hosts; remove that "
    "key, or add drumline to the requirements"
)
_MUST_HAVE_JAX = {
    "docker": "the code trains with drumline, which is sent along; jax, optax, orbax-checkpoint, "
    "grain and rich must be in the image",
    "system": "the code trains with drumline, which is sent along; the hosts' own Python must be "
    "3.11 or newer and have jax, optax, orbax-checkpoint, grain and rich; use uv to install them",
}
