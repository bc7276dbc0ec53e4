"""The collectives of a compiled program: bytes, mesh axes, executions and overlap.

`sent` counts the bytes that a device sends per execution with the ring algorithm, which is also
the minimum for any algorithm on a ring: (n−1) shards for an all-gather, (n−1)/n of the input for a
reduce-scatter, twice that for an all-reduce, the operand for a permute, and (n−1)/n of the operand
for an all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from drumline.inspect.hlo.groups import parse_permute_pairs, parse_replica_groups, varying_axes
from drumline.inspect.hlo.loops import ExecutedInstruction, executed_instructions
from drumline.inspect.hlo.source import SourceLocation
from drumline.inspect.hlo.text import BITS, Computation, Instruction, Module, Shape, dtype_name

COLLECTIVE_KINDS = {
    "all-gather": "all-gather",
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "collective-broadcast",
}
"""The printed names of the collective opcodes of HLO."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a compiled program."""

    kind: str
    axes: tuple[str, ...]
    """Names of mesh axes, in mesh order."""
    dtype: str
    """The dtype in the user's program. Multiple dtypes are joined with a plus."""
    sent: int
    """Bytes that a device sends per execution with the ring algorithm."""
    count: int
    """The number of executions per call."""
    at_least: bool = False
    """True if a loop with an unknown trip count, counted as 1, contains it."""
    conditional: bool = False
    """True for a collective in a branch, which may not run."""
    source: str = ""
    scope: str = ""
    asynchronous: bool = False
    between: tuple[str, ...] = ()
    """The computations between the start and the end of an asynchronous collective."""
    group: int = 1
    """The number of devices in a replica group."""
    name: str = ""
    """The name of the instruction."""

    @property
    def total(self) -> int:
        """Bytes that a device sends per call."""
        return self.sent * self.count

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "dtype": self.dtype,
            "sent": self.sent,
            "count": self.count,
            "at_least": self.at_least,
            "conditional": self.conditional,
            "source": self.source,
            "scope": self.scope,
            "asynchronous": self.asynchronous,
            "between": list(self.between),
            "group": self.group,
            "name": self.name,
        }


def find_collectives(
    module: Module,
    mesh: Mapping[str, int],
    *,
    numbering_mesh: Mapping[str, int] | None = None,
    other_meshes: Sequence[Mapping[str, int]] = (),
    widened: bool = False,
) -> list[Collective]:
    """Return the collectives that run, in schedule order.

    Args:
        module: the compiled program.
        mesh: the sizes of the mesh axes, in the order in which devices are numbered.
        numbering_mesh: the smaller mesh that the replica groups refer to, if the program was
            compiled for fewer devices.
        other_meshes: further meshes of the same devices that the program names.
        widened: True if the compiler computes bfloat16 in float32, as the CPU's does. The dtypes
            are then inferred from the conversions around a collective.
    """
    collectives = []
    meshes = _Meshes(mesh, numbering_mesh or mesh, tuple(other_meshes))
    open_channels: set[str] = set()
    for executed in executed_instructions(module):
        instruction = executed.instruction
        kind = COLLECTIVE_KINDS.get(base_opcode(instruction.opcode))
        if kind is None or instruction.opcode.endswith(("-done", "-update")):
            continue
        channel = instruction.attributes.get("channel_id", "")
        if executed.fusion is not None and channel:
            # A collective in fusions is repeated in the fusions that run during it.
            if channel in open_channels:
                continue
            open_channels.add(channel)
        if (
            kind == "all-reduce"
            and executed.fusion is not None
            and becomes_reduce_scatter(instruction, executed.computation)
        ):
            kind = "reduce-scatter"  # the TPU compiler's form of a reduce-scatter
        collective = _describe_collective(kind, executed, module, meshes, widened)
        if collective is not None:
            collectives.append(collective)
    return collectives


@dataclass(frozen=True)
class _Meshes:
    target: Mapping[str, int]
    """The mesh of the report."""
    numbering: Mapping[str, int]
    """The mesh of the replica groups."""
    others: tuple[Mapping[str, int], ...] = ()

    def axes(self, instruction: Instruction, device_count: int) -> tuple[str, ...]:
        """Return the axes of a collective, from the first mesh with whole axes for it."""
        size = group_size(instruction, device_count)
        for mesh in (self.numbering, *self.others):
            axes = collective_axes(instruction, mesh, device_count)
            if "source_target_pairs" in instruction.attributes and len(axes) == 1:
                return axes
            if prod(mesh[name] for name in axes) == size:
                return axes
        return collective_axes(instruction, self.numbering, device_count)

    def target_group_size(self, size: int, axes: tuple[str, ...]) -> int:
        """Convert a group size from the numbering mesh to the target mesh."""
        if any(name not in self.target for name in axes):
            return size
        if size != prod(self.numbering[name] for name in axes):
            return size
        return prod(self.target[name] for name in axes)


def base_opcode(opcode: str) -> str:
    """Remove the suffix of an asynchronous instruction from its opcode."""
    return opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")


def group_size(instruction: Instruction, device_count: int) -> int:
    """Return the maximum size of a replica group. For a permute, 2, or 1 without transfers."""
    if base_opcode(instruction.opcode) == "collective-permute":
        pairs = parse_permute_pairs(instruction.attributes.get("source_target_pairs", ""))
        return 2 if any(source != target for source, target in pairs) else 1
    return max(
        len(group) for group in parse_replica_groups(_groups_text(instruction), device_count)
    )


def _groups_text(instruction: Instruction) -> str:
    """Return the replica groups with the device order, which is a separate attribute."""
    text = instruction.attributes.get("replica_groups", "{}")
    device_ids = instruction.attributes.get("device_ids")
    return text if device_ids is None else f"{text}, device_ids={device_ids}"


def collective_axes(
    instruction: Instruction, mesh: Mapping[str, int], device_count: int
) -> tuple[str, ...]:
    """Return the mesh axes of a collective."""
    pairs = instruction.attributes.get("source_target_pairs")
    if pairs is not None:
        return varying_axes(parse_permute_pairs(pairs), mesh)
    return varying_axes(parse_replica_groups(_groups_text(instruction), device_count), mesh)


def operand_shapes(instruction: Instruction, computation: Computation) -> list[Shape]:
    """Return the shapes of the arrays that a collective sends."""
    operands = [
        computation.by_name[name] for name in instruction.operands if name in computation.by_name
    ]
    arrays = [
        array for operand in operands for array in operand.shape.arrays() if array.dtype != "token"
    ]
    if base_opcode(instruction.opcode) == "ragged-all-to-all":
        return arrays[:1]  # the other operands are the output buffer, offsets and sizes
    if base_opcode(instruction.opcode) == "collective-permute":
        return [array for array in arrays if array.dims] or arrays[:1]
    return arrays


def becomes_reduce_scatter(instruction: Instruction, computation: Computation) -> bool:
    """Return True if devices keep only a slice of an all-reduce's result."""
    users = computation.users.get(instruction.name, ())
    for _ in range(4):
        if not users:
            return False
        if all(user.opcode == "dynamic-slice" for user in users):
            return all(user.shape.elements < instruction.shape.elements for user in users)
        if len(users) != 1 or users[0].opcode not in ("bitcast", "copy", "convert", "reshape"):
            return False
        users = computation.users.get(users[0].name, ())
    return False


def sent_bytes(kind: str, operand_bytes: int, group_size: int) -> int:
    """Return the bytes that a device sends with the ring algorithm."""
    if group_size <= 1:
        return 0
    match kind:
        case "all-gather":
            return operand_bytes * (group_size - 1)
        case "reduce-scatter" | "all-to-all":
            return operand_bytes * (group_size - 1) // group_size
        case "all-reduce":
            return 2 * operand_bytes * (group_size - 1) // group_size
        case _:
            return operand_bytes


def _describe_collective(
    kind: str, executed: ExecutedInstruction, module: Module, meshes: _Meshes, widened: bool
) -> Collective | None:
    instruction, computation = executed.instruction, executed.computation
    axes = meshes.axes(instruction, module.partitions)
    size = meshes.target_group_size(group_size(instruction, module.partitions), axes)
    shapes = operand_shapes(instruction, computation)
    if size <= 1 or not shapes or not executed.executions.count:
        return None
    dtypes = _program_dtypes(instruction, computation, shapes, widened)
    operand_bytes = sum(
        -(-shape.elements * BITS.get(dtype, 32) // 8)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    start = executed.async_start or (
        (instruction, computation) if instruction.opcode.endswith("-start") else None
    )
    if start is None and executed.fusion is not None:
        phase = async_phase(executed.fusion[0], module)
        start = executed.fusion if phase is not None and phase.name == "start" else None
    location = instruction.location
    if start and not location.source:
        location = start[0].location
    if not location.source:
        location = _nearest_location(instruction, computation) or location
    return Collective(
        kind=kind,
        axes=axes,
        dtype="+".join(dict.fromkeys(map(dtype_name, dtypes))),
        sent=sent_bytes(kind, operand_bytes, size),
        count=executed.executions.count,
        at_least=executed.executions.at_least,
        conditional=executed.executions.conditional,
        source=location.source,
        scope=location.scope,
        asynchronous=start is not None,
        between=() if start is None else tuple(_overlapped_work(*start, module)),
        group=size,
        name=instruction.name,
    )


SEARCH_DEPTH = 4
"""The maximum distance to an instruction that provides the source line of a collective."""


def _nearest_location(instruction: Instruction, computation: Computation) -> SourceLocation | None:
    """Return the location of the nearest user or operand."""
    for neighbours in (_users, _operands):
        frontier = [instruction]
        for _ in range(SEARCH_DEPTH):
            frontier = [near for node in frontier for near in neighbours(node, computation)]
            location = next((node.location for node in frontier if node.location.source), None)
            if location is not None:
                return location
    return None


def _users(instruction: Instruction, computation: Computation) -> Sequence[Instruction]:
    return computation.users.get(instruction.name, ())


def _operands(instruction: Instruction, computation: Computation) -> Sequence[Instruction]:
    by_name = computation.by_name
    return [by_name[name] for name in instruction.operands if name in by_name]


def _program_dtypes(
    instruction: Instruction, computation: Computation, shapes: list[Shape], widened: bool
) -> list[str]:
    """Return the HLO dtypes of the operands in the user's program."""
    narrow = _original_dtype(instruction, computation) if widened else ""
    return [narrow if narrow and shape.dtype == "f32" else shape.dtype for shape in shapes]


def _original_dtype(instruction: Instruction, computation: Computation) -> str:
    """Return `bf16` if the CPU's compiler has widened a bf16 collective to f32, else "".

    It marks the reduction of a widened all-reduce by its name. Other collectives are surrounded by
    conversions from bf16 and back to bf16.
    """
    reduction = instruction.called_computations().get("to_apply", ("",))[0]
    if reduction:
        return "bf16" if reduction.endswith("_promoted") else ""
    operands = [computation.by_name.get(name) for name in instruction.operands]
    if not operands or not all(
        value is not None and value.shape.dtype == "f32" and _converts(value) for value in operands
    ):
        return ""
    users = computation.users.get(instruction.name, ())
    return "bf16" if users and all(map(_converts, users)) else ""


def _converts(value: Instruction) -> bool:
    """Return True for a conversion, alone or in a fusion. XLA names fusions by content."""
    return "convert" in (value.name if value.opcode == "fusion" else value.opcode)


def _overlapped_work(start: Instruction, computation: Computation, module: Module) -> Iterator[str]:
    """Yield the computations between a start and its end, by name and source line."""
    pending = {start.name}
    phase = async_phase(start, module)
    end = None if phase is None else AsyncPhase("done", phase.channel)
    started = False
    for instruction in computation.instructions:
        if instruction is start:
            started = True
            continue
        if not started:
            continue
        if end is not None and async_phase(instruction, module) == end:
            return
        if pending & set(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return
            if instruction.opcode.endswith("-update"):
                pending.add(instruction.name)
                continue
        if is_computation(instruction):
            location = instruction.location
            line = f" at {location.short}" if location.source else ""
            yield f"{instruction.name}{line}"


@dataclass(frozen=True)
class AsyncPhase:
    """The start or end of a collective in a fusion of the TPU compiler."""

    name: Literal["start", "done"]
    channel: str


def async_phase(instruction: Instruction, module: Module) -> AsyncPhase | None:
    """Return the phase of an asynchronous collective that a fusion contains.

    Return None for other instructions and for fusions that run between the two phases.
    """
    fused = module.fused_computation(instruction)
    if instruction.opcode != "fusion" or fused is None:
        return None
    targets = {
        inner.attributes.get("custom_call_target", "").strip('"') for inner in fused.instructions
    }
    channels = [
        inner.attributes.get("channel_id")
        for inner in fused.instructions
        if inner.opcode in COLLECTIVE_KINDS
    ]
    if not channels:
        return None
    channel = f"channel {channels[0]}"
    if "AsyncCollectiveStart" in targets:
        return AsyncPhase("start", channel)
    return AsyncPhase("done", channel) if "AsyncCollectiveDone" in targets else None


_NO_WORK = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "iota", "opt-barrier", "add-dependency",
}  # fmt: skip


def is_computation(instruction: Instruction) -> bool:
    """Return True if an instruction computes."""
    if instruction.opcode in _NO_WORK or base_opcode(instruction.opcode) in COLLECTIVE_KINDS:
        return False
    if instruction.opcode.endswith(("-start", "-done", "-update")):
        return False
    # Scalars and short vectors, such as offsets, take negligible time.
    return instruction.shape.is_tuple or instruction.shape.elements > 128
