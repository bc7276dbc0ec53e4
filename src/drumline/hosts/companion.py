"""Drumline itself on the hosts, for programs that import it.

A fresh host has no Drumline, and it need not be on a package index. If the code imports it, the
package of this very version is sent in the archive of the code, and `PYTHONPATH` points to it, in
every kind of environment. What training needs besides (JAX, optax, …) is installed where Drumline
makes the environment itself; a container or the host's own Python must have it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any, Literal

import drumline
from drumline.hosts.code import names_of

Use = Literal["none", "package", "training"]
"""How much of Drumline a program uses: nothing; the package alone, as for `heartbeat`; or training,
which needs JAX."""

PACKAGE = Path(drumline.__file__).parent

_IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+drumline\b", re.MULTILINE)
_TRAINING = re.compile(
    rb"\bdrumline\.(?:train|models|parallel|distributed)\b"
    rb"|^[ \t]*from[ \t]+drumline[ \t]+import\b.*\b(?:train|models|parallel|distributed)\b",
    re.MULTILINE,
)
_IN_A_SCRIPT = re.compile(r"-m[ \t]*drumline\b|\b(?:from|import)[ \t]+drumline\b")
_REQUIREMENT = re.compile(r"\s*drumline\s*(?:[\[=<>!~@;#]|$)", re.IGNORECASE)
_LARGEST = 1_000_000
"""The most bytes of a source file: a larger one is data, whatever its name."""


@dataclass(frozen=True)
class Companion:
    """Whether Drumline goes along with a job's code."""

    use: Use
    """How much of Drumline the hosts get."""
    warning: str = ""
    """A sentence that says why an import would fail there; empty where none would."""

    @property
    def package(self) -> Path | None:
        """The folder of the package to send, if any."""
        return None if self.use == "none" else PACKAGE


def companion(
    folder: Path | None, scripts: Iterable[str], python: Mapping[str, Any], *, local: bool
) -> Companion:
    """How much of Drumline is sent with the code in this folder, for a job's `python`.

    `scripts` are the job's own shell lines. The emulator's hosts run this very Python, so with
    `system` they have Drumline already.
    """
    asked, kind = python.get("drumline", "auto"), python["kind"]
    names = names_of(folder) if folder else []
    used = use_of(folder, names, scripts)
    brought = _brought(folder, names, python.get("requirements"))
    there = brought or (local and kind == "system")
    if asked is False:
        missing = used != "none" and not there
        return Companion("none", _KEPT_OFF if missing else "")
    if asked == "auto" and (used == "none" or there):
        return Companion("none")
    sent: Use = "training" if asked is True else used
    lacking = used == "training" and not local and kind in _BRINGS
    return Companion(sent, _BRINGS[kind] if lacking and not python.get("requirements") else "")


def use_of(folder: Path | None, names: Iterable[str], scripts: Iterable[str]) -> Use:
    """How much of Drumline the code imports."""
    found: Use = "none"
    for script in scripts:
        if _IN_A_SCRIPT.search(script):
            found = "package"
            if _TRAINING.search(script.encode()):
                return "training"
    for name in names:
        path = (folder or Path()) / name
        if not name.endswith(".py") or not path.is_file() or path.stat().st_size > _LARGEST:
            continue
        text = path.read_bytes()
        if b"drumline" in text and _IMPORT.search(text):
            if _TRAINING.search(text):
                return "training"
            found = "package"
    return found


@cache
def training_requirements() -> tuple[str, ...]:
    """What `drumline.train` imports, as this version of Drumline requires it."""
    try:
        declared = requires("drumline") or []
    except PackageNotFoundError:
        return ()
    wanted = []
    for entry in declared:
        requirement, _, marker = (part.strip() for part in entry.partition(";"))
        if re.fullmatch(r"""extra\s*==\s*["']jax["']""", marker) or requirement.startswith("rich"):
            wanted.append(requirement)
    return tuple(sorted(wanted))


def _brought(folder: Path | None, names: list[str], requirements: object) -> bool:
    """Whether the code contains Drumline, or its requirements install it."""
    if {"drumline/__init__.py", "src/drumline/__init__.py"} & set(names):
        return True
    if isinstance(requirements, str) and folder:
        file = folder / requirements
        lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    else:
        lines = list(requirements) if isinstance(requirements, list | tuple) else []
    return any(_REQUIREMENT.match(line) for line in lines)


_KEPT_OFF = (
    "the code imports drumline, and python.drumline: false keeps it off the hosts; leave that out, "
    "or add it to the requirements"
)
_BRINGS = {
    "docker": "the code trains with drumline, which is sent along; jax, optax, orbax-checkpoint, "
    "grain and rich must be in the image",
    "system": "the code trains with drumline, which is sent along; the hosts' own Python must be "
    "3.11 or newer and have jax, optax, orbax-checkpoint, grain and rich; use uv to install them",
}
