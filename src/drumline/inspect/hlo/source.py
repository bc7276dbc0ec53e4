"""Where in the user's program an instruction comes from: the source line, and its name scopes.

XLA writes it in two ways: the file and the line beside each instruction, or the number of a stack
frame, whose table stands at the head of the module.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FILE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"source_line=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# What a user calls and has not written: JAX, what is built on it, and our own rings and products.
_A_LIBRARY = re.compile(
    r"[/\\](?:jax|jaxlib|equinox|optax|drumline[/\\]parallel)[/\\](?!.*(?:tests|examples)[/\\])"
)
_OURS = re.compile(r"[/\\]drumline[/\\]inspect[/\\]compiling[/\\]")


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Where an instruction comes from."""

    source: str = ""
    """File and line, as in `model.py:88`; empty where it is not known."""
    op_name: str = ""
    """The path of transformations and name scopes that JAX writes."""

    @property
    def scope(self) -> str:
        """The name scopes alone, without the function, the transformations and the primitive."""
        return "/".join(_scopes(self.op_name))

    @property
    def short(self) -> str:
        """File and line without the folders."""
        return self.source.rpartition("/")[2]


NOWHERE = SourcePlace()

# What JAX writes into the path beside a user's own scopes.
_MACHINERY = re.compile(
    r"^(?:jit|pjit|xla_call|shard_map|while|body|cond|scan|closed_call|checkpoint|remat\d*|branch_\d"
    r"+_fun|rematted_computation|custom_vjp_call.*|custom_jvp_call.*|core_call|pmap|vmap|map)$"
)
_WRAPPED = re.compile(r"^(?:jvp|transpose|vmap|jit|pjit|pmap|shard_map|remat|checkpoint)\((.*)\)$")


def _scopes(op_name: str) -> list[str]:
    found = []
    for part in _parts(op_name)[:-1]:
        transformed = part
        while (inner := _WRAPPED.match(transformed)) is not None:
            # jit(f) names a function, jvp(attention) a scope.
            transformed = "" if part.startswith(("jit(", "pjit(")) else inner[1]
        if transformed and not _MACHINERY.match(transformed):
            found.append(transformed)
    return found


def _parts(op_name: str) -> list[str]:
    """The path's parts: a slash within brackets separates nothing."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(op_name):
        depth += (letter in "([") - (letter in ")]")
        if letter == "/" and depth == 0:
            parts.append(op_name[begin:at])
            begin = at + 1
    return [*parts, op_name[begin:]]


@dataclass(frozen=True)
class Places:
    """The tables of a module."""

    frames: dict[int, tuple[str, int]]
    """File and line of each stack frame, of the innermost line that is no library's."""

    def of(self, attributes: str) -> SourcePlace:
        """The place that an instruction's attributes tell of."""
        at = attributes.find("metadata={")
        if at < 0:
            return NOWHERE
        named = _OP_NAME.search(attributes, at)
        op_name = named[1].replace("\\'", "'") if named else ""
        frame = _FRAME.search(attributes, at)
        if frame and int(frame[1]) in self.frames:
            file, line = self.frames[int(frame[1])]
            return SourcePlace(f"{_shown(file)}:{line}" if file else "", op_name)
        file_found, line_found = _FILE.search(attributes, at), _LINE.search(attributes, at)
        if file_found and line_found:
            return SourcePlace(f"{_shown(file_found[1])}:{line_found[1]}", op_name)
        return SourcePlace("", op_name)


def _shown(file: str) -> str:
    """Relative to the current folder where the file lies in it."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)


def read_places(text: str) -> Places:
    """The tables at the head of a module's text; none where it has none."""
    head = text[: text.find("\n%")] if "\n%" in text else text
    rows: dict[str, dict[int, str]] = {table: {} for table in _TABLES}
    table = ""
    for line in head.splitlines():
        if line.strip() in rows:
            table = line.strip()
        elif table and (found := re.match(r"^(\d+) (.*)$", line)):
            rows[table][int(found[1])] = found[2]
        elif line.strip():
            table = ""
    files = {number: name.strip('"') for number, name in rows["FileNames"].items()}
    lines: dict[int, tuple[str, int]] = {}
    for number, row in rows["FileLocations"].items():
        lines[number] = (files.get(_value(row, "file_name_id"), ""), _value(row, "line"))
    parents = {
        # A parent is written one too high, so that a frame without one can say 1.
        number: (_value(row, "file_location_id"), _value(row, "parent_frame_id") - 1)
        for number, row in rows["StackFrames"].items()
    }
    return Places({number: _outside_libraries(number, parents, lines) for number in parents})


def _value(row: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", row)
    return int(found[1]) if found else 0


def _outside_libraries(
    number: int, parents: dict[int, tuple[int, int]], lines: dict[int, tuple[str, int]]
) -> tuple[str, int]:
    innermost = lines.get(parents[number][0], ("", 0))
    innermost = ("", 0) if _OURS.search(innermost[0]) else innermost
    seen = set()
    while number in parents and number not in seen:
        seen.add(number)
        location, parent = parents[number]
        file, line = lines.get(location, ("", 0))
        if _OURS.search(file):
            break  # what called the function that is looked at
        if file and not _A_LIBRARY.search(file):
            return file, line
        number = parent
    return innermost
