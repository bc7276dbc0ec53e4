"""The rooms of the package: which may know which, and how much fits into one."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "drumline"
LONGEST_FILE = 700
FULLEST_ROOM = 20
ALONE = {
    "drumline.chips": ("drumline.deprecated", "drumline.errors"),
    "drumline.parallel": (),
    "drumline.cloud.model": ("drumline.chips",),
    "drumline.cloud.google": ("drumline.chips", "drumline.cloud.protocol", "drumline.observed"),
    "drumline.observed": (),
    "drumline.jobs.core": ("drumline.chips", "drumline.observed", "drumline.health.fault_report"),
    "drumline.models": ("drumline.parallel",),
    "drumline.cli.rendering": (),
    "drumline.health": (
        "drumline.chips",
        "drumline.deprecated",
        "drumline.distributed",
        "drumline.heartbeat",
    ),
}
"""Rooms that know little: beside themselves only these."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(name: str, path: Path) -> set[str]:
    """Modules of ours that are imported, wherever in the file, types alone included."""
    known = {module for module, _ in modules()}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drumline"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
    return found - {name}


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


@pytest.mark.parametrize("room", ALONE)
def test_what_stands_alone_knows_nothing_of_the_rest(room: str) -> None:
    may = (room, *ALONE[room])
    strangers = {
        f"{module} imports {other}"
        for module, path in modules()
        if within(module, (room,))
        for other in imported(module, path)
        if other != "drumline" and not within(other, may)
    }
    assert not strangers


def test_rooms_know_each_other_one_way() -> None:
    """The core, the store, the controller, the server: each knows those before it, none after."""
    order = ["core", "spec", "store", "controller", "server"]
    for module, path in modules():
        parts = module.split(".")
        if parts[:2] != ["drumline", "jobs"] or len(parts) < 3 or parts[2] not in order:
            continue
        later = {f"drumline.jobs.{room}" for room in order[order.index(parts[2]) + 1 :]}
        for other in imported(module, path):
            assert not within(other, tuple(later)), f"{module} imports {other}"


def test_no_file_and_no_room_is_too_full() -> None:
    long = {module for module, path in modules() if path.read_text().count("\n") > LONGEST_FILE}
    assert not long
    rooms = {path.parent for _, path in modules()}
    full = {room.name for room in rooms if len(list(room.glob("*.py"))) > FULLEST_ROOM}
    assert not full


def test_no_two_classes_share_a_name_unless_they_mean_the_same() -> None:
    names = Counter(
        node.name
        for _, path in modules()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, times in names.items() if times > 1} <= {"Mistake"}
