"""The imports between packages, their sizes, and unique class names."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "drumline"
MAX_LINES = 700
MAX_FILES = 20
ALLOWED_IMPORTS = {
    "drumline.chips": ("drumline.deprecated", "drumline.errors"),
    "drumline.parallel": (),
    "drumline.cloud.model": ("drumline.chips",),
    "drumline.cloud.google": ("drumline.chips", "drumline.cloud.protocol", "drumline.observed"),
    "drumline.cloud.protocol": (
        "drumline.errors",
        "drumline.hosts.protocol",
        "drumline.observed",
    ),
    "drumline.hosts": (
        "drumline.cancellation",
        "drumline.errors",
        "drumline.files",
        "drumline.health.fault_report",
        "drumline.observed",
    ),
    "drumline.hosts.protocol": (
        "drumline.errors",
        "drumline.hosts.agent.wire",
        "drumline.observed",
    ),
    "drumline.observed": (),
    "drumline.jobs.core": (
        "drumline.chips",
        "drumline.observed",
        "drumline.health.fault_report",
        "drumline.hosts.agent.transient",
    ),
    "drumline.models": ("drumline.parallel",),
    "drumline.cli.rendering": (),
    "drumline.health": (
        "drumline.chips",
        "drumline.deprecated",
        "drumline.distributed",
        "drumline.heartbeat",
    ),
}
"""The only packages that these packages import, beside themselves."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(name: str, path: Path) -> set[str]:
    """Return the Drumline modules that a file imports anywhere, for types as well."""
    names = {module for module, _ in modules()}
    imports = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drumline"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                imports.add(full if full in names else str(node.module))
        elif isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names if alias.name in names}
    return imports - {name}


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in packages)


@pytest.mark.parametrize("package", ALLOWED_IMPORTS)
def test_packages_import_only_what_is_allowed(package: str) -> None:
    allowed = (package, *ALLOWED_IMPORTS[package])
    forbidden = {
        f"{module} imports {other}"
        for module, path in modules()
        if within(module, (package,))
        for other in imported(module, path)
        if other != "drumline" and not within(other, allowed)
    }
    assert not forbidden


LOCAL_FILES_AND_TEXTS = (
    "drumline.hosts.agent.transient",
    "drumline.hosts.code",
    "drumline.hosts.log_segments",
    "drumline.hosts.packing",
)
"""The modules of `hosts` that reach no host: packed code, kept logs, and texts of errors."""
WAYS_TO_A_HOST = re.compile(
    r"ssh|known.?hosts|host.?keys?\b|proxy|metadata|guest.?attribute|instance.?name|emulat",
    re.IGNORECASE,
)


def test_the_controller_and_the_core_know_clouds_and_hosts_by_their_protocols() -> None:
    """So another cloud, or another way to run programs on hosts, changes neither of them."""
    packages = ("drumline.jobs.controller", "drumline.jobs.core")
    allowed = ("drumline.cloud.protocol", "drumline.hosts.protocol", *LOCAL_FILES_AND_TEXTS)
    forbidden = {
        f"{module} imports {other}"
        for module, path in modules()
        if within(module, packages)
        for other in imported(module, path)
        if within(other, ("drumline.cloud", "drumline.hosts")) and not within(other, allowed)
    }
    assert not forbidden


def test_the_controller_names_no_way_to_reach_a_host() -> None:
    for module, path in modules():
        if within(module, ("drumline.jobs.controller",)):
            match = WAYS_TO_A_HOST.search(path.read_text())
            assert match is None, f"{module} names {match}"


def test_packages_of_jobs_import_in_one_direction() -> None:
    """Each package of `jobs` imports only packages before it in this order."""
    order = ["core", "spec", "store", "controller", "server"]
    for module, path in modules():
        parts = module.split(".")
        if parts[:2] != ["drumline", "jobs"] or len(parts) < 3 or parts[2] not in order:
            continue
        later = {f"drumline.jobs.{name}" for name in order[order.index(parts[2]) + 1 :]}
        for other in imported(module, path):
            assert not within(other, tuple(later)), f"{module} imports {other}"


def test_files_and_packages_are_not_too_large() -> None:
    long = {module for module, path in modules() if path.read_text().count("\n") > MAX_LINES}
    assert not long
    folders = {path.parent for _, path in modules()}
    large = {folder.name for folder in folders if len(list(folder.glob("*.py"))) > MAX_FILES}
    assert not large


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for _, path in modules()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} <= {"Mistake"}
