"""Derive a program for more devices than can be compiled for from programs for fewer.

The CPU backend supports 2,048 devices. A v5p pod has 8,960. The global shapes of a program stay the
same, and the longest axis of its mesh is shortened, which is one line of StableHLO. If the program
is compiled at several lengths n of that axis, every dimension of every instruction is constant, or
proportional to 1/n (a sharded dimension) or to n (a table of all devices). The program for the full
length follows from that. It is compiled at three lengths. All of them must have the same
instructions, and the rule from the first two must predict the third exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import prod

from drumline.errors import UserError
from drumline.inspect.compiling.axes import MeshAxes, format_mesh
from drumline.inspect.hlo.text import Computation, Instruction, Module, Shape

LENGTH_COUNT = 3
"""The number of lengths to compile: two for the rule, one to check it."""


def shorter_meshes(axes: MeshAxes, max_devices: int) -> list[MeshAxes]:
    """Return the mesh with three shorter lengths of its longest axis, the shortest first.

    Raises:
        UserError: the mesh has no three such lengths with at most `max_devices` devices.
    """
    longest = max(axes, key=lambda name: axes[name])
    other_devices = prod(axes.values()) // axes[longest]
    lengths = [
        length
        for length in range(2, axes[longest])
        if axes[longest] % length == 0 and length * other_devices <= max_devices
    ]
    if len(lengths) < LENGTH_COUNT:
        raise UserError(
            f"the mesh {format_mesh(axes)} has {prod(axes.values()):,} devices, more than the "
            f"{max_devices:,} that can be compiled for, and no axis that can be shortened enough; "
            "install the TPU's own compiler, or split the longest axis in two"
        )
    return [axes | {longest: length} for length in lengths[-LENGTH_COUNT:]]


def resize_mesh(text: str, axes: MeshAxes) -> str:
    """Change the sizes of the mesh with these axis names in StableHLO text.

    Raises:
        UserError: the program fixes the shapes on one device, as `shard_map` does.
    """
    device_count = prod(axes.values())
    if "sdy.manual_computation" in text or "mhlo.num_replicas = 1" not in text:
        raise UserError(
            f"for {device_count:,} devices and more a program must be sharded by jit alone: "
            "shard_map fixes what each device has; install the TPU's own compiler for it"
        )

    def resize(match: re.Match[str]) -> str:
        names = re.findall(r'"([^"]+)"=\d+', match[0])
        if names != list(axes):
            return match[0]
        return "<[" + ", ".join(f'"{name}"={size}' for name, size in axes.items()) + "]"

    text = re.sub(r'<\["[^\]]*\]', resize, text)
    for name, size in axes.items():
        text = re.sub(rf'(\{{name = "{re.escape(name)}", size = )\d+', rf"\g<1>{size}", text)
    return re.sub(r"mhlo.num_partitions = \d+", f"mhlo.num_partitions = {device_count}", text)


def extrapolate(modules: list[Module], meshes: list[MeshAxes], axes: MeshAxes) -> Module:
    """Derive the program on the mesh `axes` from the same program on three shorter meshes.

    Raises:
        UserError: the programs differ in more than their sizes.
    """
    longest = next(name for name in axes if meshes[0][name] != axes[name])
    lengths = [mesh[longest] for mesh in meshes]
    names = [format_mesh(mesh) for mesh in meshes]
    subject = f"{names[0]} and {names[-1]}"
    predicted = _extrapolate_pair(modules[:2], lengths[:2], lengths[2], subject)
    if not _same_instructions(predicted, modules[2], lambda instruction: instruction.shape):
        raise UserError(
            f"XLA shards the program at {names[2]} in a way that its sizes at {names[0]} and "
            f"{names[1]} do not predict, so the program on {format_mesh(axes)} cannot be derived"
        )
    return _extrapolate_pair(modules[1:], lengths[1:], axes[longest], subject)


def _same_instructions(first: Module, second: Module, key: Callable[[Instruction], object]) -> bool:
    """Return True if the instructions of two modules have the same keys."""
    first_list, second_list = list(first.computations.values()), list(second.computations.values())
    return len(first_list) == len(second_list) and all(
        [*map(key, a.instructions)] == [*map(key, b.instructions)]
        for a, b in zip(first_list, second_list, strict=True)
    )


def _extrapolate_pair(
    modules: list[Module], lengths: list[int], target: int, subject: str
) -> Module:
    small, large = modules
    small_length, large_length = lengths
    if not _same_instructions(
        small, large, lambda instruction: (instruction.opcode, len(instruction.operands))
    ):
        raise UserError(
            f"XLA makes different programs for {subject}, so a larger one cannot be derived from "
            "them; install the TPU's own compiler"
        )

    def shape(first: Shape, second: Shape) -> Shape:
        components = tuple(
            shape(a, b) for a, b in zip(first.components, second.components, strict=True)
        )
        dims = tuple(
            _extrapolate_dimension(a, b, small_length, large_length, target)
            for a, b in zip(first.dims, second.dims, strict=True)
        )
        return replace(second, dims=dims, components=components)

    def computation(first: Computation, second: Computation) -> Computation:
        pairs = zip(first.instructions, second.instructions, strict=True)
        return Computation(
            second.name, tuple(replace(b, shape=shape(a.shape, b.shape)) for a, b in pairs)
        )

    computations = {
        second.name: computation(first, second)
        for first, second in zip(
            small.computations.values(), large.computations.values(), strict=True
        )
    }
    return replace(large, computations=computations, entry=computations[large.entry.name])


def _extrapolate_dimension(
    small: int, large: int, small_length: int, large_length: int, target: int
) -> int:
    if small == large:
        return small
    if abs(small * small_length - large * large_length) < max(small_length, large_length):
        return -(-large * large_length // target)  # sharded, with padding on the last device
    if small * large_length == large * small_length:
        return large * target // large_length
    raise UserError(
        f"a dimension has size {small} at {small_length} devices along the longest axis and "
        f"{large} at {large_length}; no rule gives its size at {target}"
    )
