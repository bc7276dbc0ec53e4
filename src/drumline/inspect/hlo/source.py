"""The source location of an instruction: its file and line, and its name scopes.

XLA prints locations in two forms: file and line in the metadata of each instruction, or the number
of a stack frame, with a table of all frames at the head of the module.
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
# Code that users call but do not write: JAX, libraries based on it, and drumline.parallel.
_LIBRARY_FILE = re.compile(
    r"[/\\](?:jax|jaxlib|equinox|optax|drumline[/\\]parallel)[/\\](?!.*(?:tests|examples)[/\\])"
)
_COMPILING_FILE = re.compile(r"[/\\]drumline[/\\]inspect[/\\]compiling[/\\]")


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The origin of an instruction in the user's program."""

    source: str = ""
    """The file and line, such as `model.py:88`. Empty if unknown."""
    op_name: str = ""
    """The path of transformations and name scopes that JAX records."""

    @property
    def scope(self) -> str:
        """The name scopes alone, without the function, the transformations and the primitive."""
        return "/".join(_name_scopes(self.op_name))

    @property
    def short(self) -> str:
        """The file and line without the folders."""
        return self.source.rpartition("/")[2]


UNKNOWN_LOCATION = SourceLocation()

# Names that JAX adds to the path of a user's own scopes.
_JAX_SCOPE = re.compile(
    r"^(?:jit|pjit|xla_call|shard_map|while|body|cond|scan|closed_call|checkpoint|remat\d*|branch_\d"
    r"+_fun|rematted_computation|custom_vjp_call.*|custom_jvp_call.*|core_call|pmap|vmap|map)$"
)
_WRAPPED = re.compile(r"^(?:jvp|transpose|vmap|jit|pjit|pmap|shard_map|remat|checkpoint)\((.*)\)$")


def _name_scopes(op_name: str) -> list[str]:
    scopes = []
    for component in _split_path(op_name)[:-1]:
        scope = component
        while (wrapped := _WRAPPED.match(scope)) is not None:
            # `jit(f)` wraps a function, `jvp(attention)` a scope.
            scope = "" if component.startswith(("jit(", "pjit(")) else wrapped[1]
        if scope and not _JAX_SCOPE.match(scope):
            scopes.append(scope)
    return scopes


def _split_path(op_name: str) -> list[str]:
    """Split a path at its slashes, except at slashes in brackets."""
    components, depth, start = [], 0, 0
    for index, char in enumerate(op_name):
        depth += (char in "([") - (char in ")]")
        if char == "/" and depth == 0:
            components.append(op_name[start:index])
            start = index + 1
    return [*components, op_name[start:]]


@dataclass(frozen=True)
class SourceTable:
    """The stack frames of a module."""

    frames: dict[int, tuple[str, int]]
    """The file and line of each frame, taken from its innermost caller outside libraries."""

    def locate(self, attribute_text: str) -> SourceLocation:
        """Return the source location that an instruction's attributes contain."""
        start = attribute_text.find("metadata={")
        if start < 0:
            return UNKNOWN_LOCATION
        op_name_match = _OP_NAME.search(attribute_text, start)
        op_name = op_name_match[1].replace("\\'", "'") if op_name_match else ""
        frame = _FRAME.search(attribute_text, start)
        if frame and int(frame[1]) in self.frames:
            file, line = self.frames[int(frame[1])]
            return SourceLocation(f"{_relative_path(file)}:{line}" if file else "", op_name)
        file_match = _FILE.search(attribute_text, start)
        line_match = _LINE.search(attribute_text, start)
        if file_match and line_match:
            return SourceLocation(f"{_relative_path(file_match[1])}:{line_match[1]}", op_name)
        return SourceLocation("", op_name)


def _relative_path(file: str) -> str:
    """Return the path relative to the current folder if the file is below it."""
    return file.removeprefix(os.getcwd() + os.sep)


def read_source_table(text: str) -> SourceTable:
    """Read the table at the head of a module's text. It is empty if the text has none."""
    header = text[: text.find("\n%")] if "\n%" in text else text
    rows: dict[str, dict[int, str]] = {table: {} for table in _TABLES}
    table = ""
    for line in header.splitlines():
        if line.strip() in rows:
            table = line.strip()
        elif table and (match := re.match(r"^(\d+) (.*)$", line)):
            rows[table][int(match[1])] = match[2]
        elif line.strip():
            table = ""
    files = {key: name.strip('"') for key, name in rows["FileNames"].items()}
    locations: dict[int, tuple[str, int]] = {}
    for key, row in rows["FileLocations"].items():
        locations[key] = (files.get(_field(row, "file_name_id"), ""), _field(row, "line"))
    frames = {
        # XLA writes parent ids increased by one, so that a frame without a parent has 1.
        key: (_field(row, "file_location_id"), _field(row, "parent_frame_id") - 1)
        for key, row in rows["StackFrames"].items()
    }
    return SourceTable({key: _user_line(key, frames, locations) for key in frames})


def _field(row: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", row)
    return int(match[1]) if match else 0


def _user_line(
    frame: int, frames: dict[int, tuple[int, int]], locations: dict[int, tuple[str, int]]
) -> tuple[str, int]:
    """Return the innermost line outside libraries, or the innermost of all if there is none."""
    innermost = locations.get(frames[frame][0], ("", 0))
    innermost = ("", 0) if _COMPILING_FILE.search(innermost[0]) else innermost
    visited = set()
    while frame in frames and frame not in visited:
        visited.add(frame)
        location, parent = frames[frame]
        file, line = locations.get(location, ("", 0))
        if _COMPILING_FILE.search(file):
            break  # the caller of the inspected function
        if file and not _LIBRARY_FILE.search(file):
            return file, line
        frame = parent
    return innermost
