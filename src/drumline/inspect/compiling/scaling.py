"""Programs for more devices than any compiler here takes, from what it makes for fewer.

The CPU backend ends at 2,048 devices; a v5p pod has 8,960. A program's global shapes stay as they
are and the longest axis of its mesh is made shorter, which in StableHLO is one line. Compiled at
several such lengths n, every dimension of every instruction is the same, or goes with 1/n, as what
is sharded does, or with n, as a table of all devices does. So it can be carried on to the length
that is wanted. All lengths that were compiled must tell the same program, and the rule, taken from
two of them, must give the third exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import prod

from drumline.errors import UserError
from drumline.inspect.compiling.axes import Axes, shown
from drumline.inspect.hlo.text import Computation, Instruction, Module, Shape

SIZES = 3
"""How many lengths are compiled: two to take the rule from, one to check it."""


def shorter_meshes(axes: Axes, most: int) -> list[Axes]:
    """The mesh with its longest axis made shorter, in as many ways as are needed, shortest first.

    Raises:
        UserError: the mesh cannot be made small enough.
    """
    longest = max(axes, key=lambda name: axes[name])
    others = prod(axes.values()) // axes[longest]
    lengths = [n for n in range(2, axes[longest]) if axes[longest] % n == 0 and n * others <= most]
    if len(lengths) < SIZES:
        raise UserError(
            f"the mesh {shown(axes)} has {prod(axes.values()):,} devices, more than the {most:,} "
            "that can be compiled for, and no axis that can be shortened enough; install the TPU's "
            "own compiler, or split the longest axis in two"
        )
    return [axes | {longest: length} for length in lengths[-SIZES:]]


def on_mesh(text: str, axes: Axes) -> str:
    """StableHLO with the mesh of these names made this large.

    Raises:
        UserError: the program fixes what one device has, as `shard_map` does.
    """
    if "sdy.manual_computation" in text or "mhlo.num_replicas = 1" not in text:
        raise UserError(
            f"for {prod(axes.values()):,} devices and more a program must be sharded by jit alone: "
            "shard_map fixes what each device has; install the TPU's own compiler for it"
        )

    def shrunk(found: re.Match[str]) -> str:
        sizes = {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', found[0])}
        if list(sizes) != list(axes):
            return found[0]
        return "<[" + ", ".join(f'"{name}"={size}' for name, size in axes.items()) + "]"

    text = re.sub(r'<\["[^\]]*\]', shrunk, text)
    for name, size in axes.items():
        text = re.sub(rf'(\{{name = "{re.escape(name)}", size = )\d+', rf"\g<1>{size}", text)
    return re.sub(
        r"mhlo.num_partitions = \d+", f"mhlo.num_partitions = {prod(axes.values())}", text
    )


def carried_on(modules: list[Module], meshes: list[Axes], axes: Axes) -> Module:
    """The program on the mesh `axes`, from the same program on shorter ones.

    Raises:
        UserError: the programs differ in more than their sizes.
    """
    longest = next(name for name in axes if meshes[0][name] != axes[name])
    lengths = [mesh[longest] for mesh in meshes]
    told = f"{shown(meshes[0])} and {shown(meshes[-1])}"
    checked = _carry(modules[0], modules[1], lengths[0], lengths[1], lengths[2], told)
    if not _alike(checked, modules[2], lambda one: one.shape):
        raise UserError(
            f"XLA shards the program in another way at {shown(meshes[-1])} than its sizes at "
            f"{shown(meshes[0])} and {shown(meshes[1])} tell, so that {shown(axes)} cannot be told"
        )
    return _carry(modules[1], modules[2], lengths[1], lengths[2], axes[longest], told)


def _alike(first: Module, second: Module, of: Callable[[Instruction], object]) -> bool:
    """Whether two programs have the same instructions, by what is told of each."""
    ours, theirs = list(first.computations.values()), list(second.computations.values())
    return len(ours) == len(theirs) and all(
        len(a.instructions) == len(b.instructions)
        and all(of(x) == of(y) for x, y in zip(a.instructions, b.instructions, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def _carry(
    small: Module, large: Module, length: int, longer: int, wanted: int, told: str
) -> Module:
    if not _alike(small, large, lambda one: (one.opcode, len(one.operands))):
        raise UserError(
            f"XLA makes different programs for {told}, so that a larger one cannot be told from "
            "them; install the TPU's own compiler"
        )

    def shape(first: Shape, second: Shape) -> Shape:
        parts = tuple(shape(a, b) for a, b in zip(first.parts, second.parts, strict=True))
        dims = tuple(
            _dimension(a, b, length, longer, wanted)
            for a, b in zip(first.dims, second.dims, strict=True)
        )
        return replace(second, dims=dims, parts=parts)

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


def _dimension(small: int, large: int, length: int, longer: int, wanted: int) -> int:
    if small == large:
        return small
    if abs(small * length - large * longer) < max(length, longer):
        return -(-large * longer // wanted)  # sharded; the last device's part may be padded
    if small * longer == large * length:
        return large * wanted // longer
    raise UserError(
        f"a dimension of {small} at {length} devices along the longest axis and {large} at "
        f"{longer} follows no rule that tells it at {wanted}"
    )
