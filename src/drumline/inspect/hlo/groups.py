"""The replica groups of a collective and the mesh axes that they run along.

XLA writes replica groups in four forms: lists, a reshaped and transposed range of numbers, axes of
a mesh of its own, and, for permutes, pairs. Devices are numbered in mesh order, so the coordinates
of the devices in a group show its axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import prod

import numpy as np

ReplicaGroups = tuple[tuple[int, ...], ...]

_RANGE = re.compile(
    r"\[(?P<shape>[\d,]+)\]<=\[(?P<reshape>[\d,]+)\](?:T\((?P<permutation>[\d,]+)\))?"
)
_MESH = re.compile(r"\w*\[(?P<axes>'[^\]]*)\]")
_DEVICE_IDS = re.compile(
    r"device_ids=\((?:\[(?P<shape>[\d,]+)\](?:<=\[[\d,]+\])?(?:T\((?P<permutation>[\d,]+)\))?"
    r"|(?P<list>[\d,\s]+))\)"
)
_AXIS = re.compile(r"'(?P<name>[^']*)'\s*=\s*(?P<size>\d+)")
_SUB_AXIS = re.compile(r"'(?P<name>[^']*)'(?::\((?P<stride>\d+)\)(?P<size>\d+))?")


def parse_replica_groups(text: str, device_count: int) -> ReplicaGroups:
    """Parse a `replica_groups` attribute. An empty one means one group of all devices."""
    text = text.strip()
    if text.startswith("{"):
        lists = re.findall(r"\{([\d,\s]+)\}", text)
        return tuple(map(_integers, lists)) or (tuple(range(device_count)),)
    mesh = _MESH.match(text)
    if mesh is not None:
        return _mesh_groups(text, mesh)
    device_range = _RANGE.match(text)
    if device_range is None:
        return (tuple(range(device_count)),)
    return _rows(_expand_range(device_range))


def _expand_range(match: re.Match[str]) -> np.ndarray:
    """Expand `[4,2]<=[2,4]T(1,0)`: count up, reshape, transpose, reshape."""
    shape, reshape = _integers(match["shape"]), _integers(match["reshape"])
    devices = np.arange(prod(reshape)).reshape(reshape)
    if match["permutation"]:
        devices = devices.transpose(_integers(match["permutation"]))
    return devices.reshape(shape)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _rows(devices: np.ndarray) -> ReplicaGroups:
    return tuple(tuple(int(n) for n in row) for row in devices.reshape(-1, devices.shape[-1]))


def _mesh_groups(text: str, mesh: re.Match[str]) -> ReplicaGroups:
    """Expand `mesh['a'=2,'b'=4] {'b'}`. `'b':(2)2` is the factor of size 2 after the first 2."""
    sizes = {match["name"]: int(match["size"]) for match in _AXIS.finditer(mesh["axes"])}
    devices = np.arange(prod(sizes.values()))
    after_mesh = text[mesh.end() :]
    device_ids = _DEVICE_IDS.search(after_mesh)
    if device_ids is not None and device_ids["list"]:
        devices = np.array(_integers(device_ids["list"]))
    elif device_ids is not None:
        shape = _integers(device_ids["shape"])
        permutation = _integers(device_ids["permutation"] or "") or tuple(range(len(shape)))
        devices = np.arange(prod(shape)).reshape(shape).transpose(permutation).reshape(-1)
    braces = re.search(r"\{([^}]*)\}", after_mesh)
    sub_axes = list(_SUB_AXIS.finditer(braces[1] if braces else ""))
    # Split each axis into factors at the borders of the sub-axes.
    factors: list[tuple[str, int, int]] = []
    for name, size in sizes.items():
        borders = {1, size}
        for sub_axis in sub_axes:
            if sub_axis["name"] == name and sub_axis["size"]:
                stride = int(sub_axis["stride"])
                borders |= {stride, stride * int(sub_axis["size"])}
        ordered = sorted(borders)
        factors += [(name, low, high // low) for low, high in pairwise(ordered)] or [(name, 1, 1)]
    grouped: list[int] = []
    for sub_axis in sub_axes:
        low = int(sub_axis["stride"] or 1)
        high = low * int(sub_axis["size"]) if sub_axis["size"] else sizes.get(sub_axis["name"], 1)
        grouped += [
            index
            for index, (name, stride, size) in enumerate(factors)
            if name == sub_axis["name"] and low <= stride and stride * size <= high
        ]
    grouped = list(dict.fromkeys(grouped))
    ungrouped = [index for index in range(len(factors)) if index not in grouped]
    grid = devices.reshape([size for _, _, size in factors]).transpose([*ungrouped, *grouped])
    return _rows(grid.reshape(-1, prod(factors[index][2] for index in grouped)))


def parse_permute_pairs(text: str) -> ReplicaGroups:
    """Parse the `source_target_pairs` of a permute."""
    return tuple(
        (int(source), int(target)) for source, target in re.findall(r"\{(\d+),(\d+)\}", text)
    )


def varying_axes(groups: Iterable[tuple[int, ...]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ, in mesh order."""
    sizes = tuple(mesh.values())
    device_groups = [np.array(group) for group in groups if len(group) > 1]
    if not device_groups or prod(sizes) <= max(int(group.max()) for group in device_groups):
        return ()
    varies = np.zeros(len(sizes), dtype=bool)
    for group in device_groups:
        coordinates = np.stack(np.unravel_index(group, sizes))
        varies |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(name for name, axis_varies in zip(mesh, varies, strict=True) if axis_varies)
