"""Which devices talk to each other in a collective, and along which axes of the mesh.

XLA spells groups in four ways: as lists, as a reshaped and transposed range of numbers, as axes of
a mesh of its own, and, for permutes, as pairs. Devices are numbered in the order of the mesh, so
that the coordinates of a number tell which axes a group runs along.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import prod

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_RANGE = re.compile(
    r"\[(?P<shape>[\d,]+)\]<=\[(?P<reshape>[\d,]+)\](?:T\((?P<permutation>[\d,]+)\))?"
)
_MESH = re.compile(r"\w*\[(?P<axes>'[^\]]*)\]")
_ORDER = re.compile(
    r"device_ids=\((?:\[(?P<shape>[\d,]+)\](?:<=\[[\d,]+\])?(?:T\((?P<permutation>[\d,]+)\))?"
    r"|(?P<list>[\d,\s]+))\)"
)
_AXIS = re.compile(r"'(?P<name>[^']*)'\s*=\s*(?P<size>\d+)")
_USED = re.compile(r"'(?P<name>[^']*)'(?::\((?P<before>\d+)\)(?P<size>\d+))?")


def read_groups(text: str, devices: int) -> Groups:
    """The groups of a `replica_groups` attribute; an empty one means all devices together."""
    text = text.strip()
    if text.startswith("{"):
        lists = re.findall(r"\{([\d,\s]+)\}", text)
        found = tuple(tuple(int(n) for n in re.findall(r"\d+", part)) for part in lists)
        return found or (tuple(range(devices)),)
    mesh = _MESH.match(text)
    if mesh is not None:
        return _along_axes(text, mesh)
    found_range = _RANGE.match(text)
    if found_range is None:
        return (tuple(range(devices)),)
    return _rows(_range(found_range))


def _range(found: re.Match[str]) -> np.ndarray:
    """`[4,2]<=[2,4]T(1,0)`: numbers counted up, reshaped, transposed, reshaped."""
    shape, reshape = _numbers(found["shape"]), _numbers(found["reshape"])
    numbers = np.arange(prod(reshape)).reshape(reshape)
    if found["permutation"]:
        numbers = numbers.transpose(_numbers(found["permutation"]))
    return numbers.reshape(shape)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in numbers.reshape(-1, numbers.shape[-1]))


def _along_axes(text: str, mesh: re.Match[str]) -> Groups:
    """`mesh['a'=2,'b'=4] {'b'}`, where `'b':(2)2` is the part of b after its first factor 2."""
    sizes = {found["name"]: int(found["size"]) for found in _AXIS.finditer(mesh["axes"])}
    numbers = np.arange(prod(sizes.values()))
    after = text[mesh.end() :]
    order = _ORDER.search(after)
    if order is not None and order["list"]:
        numbers = np.array(_numbers(order["list"]))
    elif order is not None:
        shape = _numbers(order["shape"])
        permutation = _numbers(order["permutation"] or "") or tuple(range(len(shape)))
        numbers = np.arange(prod(shape)).reshape(shape).transpose(permutation).reshape(-1)
    used = re.search(r"\{([^}]*)\}", after)
    parts = list(_USED.finditer(used[1] if used else ""))
    # Each axis is split at every border that a used part of it has.
    factors: list[tuple[str, int, int]] = []
    for name, size in sizes.items():
        borders = {1, size}
        for part in parts:
            if part["name"] == name and part["size"]:
                borders |= {int(part["before"]), int(part["before"]) * int(part["size"])}
        ordered = sorted(borders)
        factors += [(name, low, high // low) for low, high in pairwise(ordered)] or [(name, 1, 1)]
    taken = []
    for part in parts:
        low = int(part["before"] or 1)
        high = low * int(part["size"]) if part["size"] else sizes.get(part["name"], 1)
        taken += [
            at
            for at, (name, before, size) in enumerate(factors)
            if name == part["name"] and low <= before and before * size <= high
        ]
    taken = list(dict.fromkeys(taken))
    others = [at for at in range(len(factors)) if at not in taken]
    grid = numbers.reshape([size for _, _, size in factors]).transpose([*others, *taken])
    return _rows(grid.reshape(-1, prod(factors[at][2] for at in taken)))


def read_pairs(text: str) -> Groups:
    """The pairs of a permute's `source_target_pairs`."""
    return tuple(
        (int(source), int(target)) for source, target in re.findall(r"\{(\d+),(\d+)\}", text)
    )


def axes_of(groups: Iterable[tuple[int, ...]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of the mesh along which the members of a group differ, in the mesh's order."""
    sizes = tuple(mesh.values())
    members = [np.array(group) for group in groups if len(group) > 1]
    if not members or prod(sizes) <= max(int(group.max()) for group in members):
        return ()
    differs = np.zeros(len(sizes), dtype=bool)
    for group in members:
        coordinates = np.stack(np.unravel_index(group, sizes))
        differs |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(name for name, along in zip(mesh, differs, strict=True) if along)
