"""The collectives of a compiled program: what each sends, along which axes, how often, and whether
anything is computed meanwhile.

`sent` is what one device sends in one execution by the ring algorithm, which is also the least that
any algorithm on a ring can do: an all-gather n−1 times its shard, a reduce-scatter (n−1)/n of its
input, an all-reduce twice that, a permute its operand, an all-to-all (n−1)/n of its operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from drumline.inspect.hlo.groups import axes_of, read_groups, read_pairs
from drumline.inspect.hlo.loops import Found, walk
from drumline.inspect.hlo.source import SourcePlace
from drumline.inspect.hlo.text import BITS, Computation, Instruction, Module, Shape, dtype_name

KINDS = {
    "all-gather": "all-gather",
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "collective-broadcast",
}
"""HLO's instructions, and how a report names them."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of the compiled program."""

    kind: str
    axes: tuple[str, ...]
    """Names of mesh axes, in the mesh's order."""
    dtype: str
    """The type of the values, as the program means it; several with a plus."""
    sent: int
    """Bytes that one device sends in one execution, by the ring algorithm."""
    count: int
    """Executions in one call."""
    at_least: bool = False
    """Whether a loop around it runs an unknown number of times, counted once here."""
    conditional: bool = False
    """Whether it stands in one branch of a condition, and may not run at all."""
    source: str = ""
    scope: str = ""
    asynchronous: bool = False
    between: tuple[str, ...] = ()
    """What is computed between its start and its end, where it is asynchronous."""
    group: int = 1
    """How many devices take part in one of its groups."""
    name: str = ""
    """The instruction's name in the compiled program."""

    @property
    def total(self) -> int:
        """Bytes that one device sends in one call."""
        return self.sent * self.count

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
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


def collectives_of(
    module: Module,
    mesh: Mapping[str, int],
    *,
    groups: Mapping[str, int] | None = None,
    others: Sequence[Mapping[str, int]] = (),
    widened: bool = False,
) -> list[Collective]:
    """Every collective that runs, in the order of the schedule.

    Args:
        module: the compiled program.
        mesh: the mesh's axes and their sizes, in the order that devices are numbered in.
        groups: the mesh by which its groups are numbered, where that is a smaller one.
        others: more meshes that the program names, of the same devices.
        widened: whether its compiler computes bfloat16 in float32, as the CPU's does: the types are
            then what the conversions around a collective say.
    """
    found = []
    meshes = _Meshes(mesh, groups or mesh, tuple(others))
    under_way: set[str] = set()
    for place in walk(module):
        kind = KINDS.get(_base(place.instruction.opcode))
        if kind is None or place.instruction.opcode.endswith(("-done", "-update")):
            continue
        channel = place.instruction.attributes.get("channel_id", "")
        if place.fused and channel:
            # One that is fused with others' work stands in each fusion that it is under way in.
            if channel in under_way:
                continue
            under_way.add(channel)
        if kind == "all-reduce" and place.fused and is_scattered(place.instruction, place.within):
            kind = "reduce-scatter"  # as the TPU's compiler writes one
        collective = _collective(kind, place, module, meshes, widened)
        if collective is not None:
            found.append(collective)
    return found


@dataclass(frozen=True)
class _Meshes:
    """The mesh that a program is for, and that by which its groups are numbered."""

    wanted: Mapping[str, int]
    numbered: Mapping[str, int]
    others: tuple[Mapping[str, int], ...] = ()

    def axes(self, instruction: Instruction, devices: int) -> tuple[str, ...]:
        """The axes that a collective runs along, by the mesh whose axes it runs along whole."""
        size = group_size(instruction, devices)
        for mesh in (self.numbered, *self.others):
            over = axes(instruction, mesh, devices)
            if "source_target_pairs" in instruction.attributes and len(over) == 1:
                return over
            if prod(mesh[name] for name in over) == size:
                return over
        return axes(instruction, self.numbered, devices)

    def members(self, group: int, over: tuple[str, ...]) -> int:
        """How many devices a group has that has so many along these axes of the numbered mesh."""
        if any(name not in self.wanted for name in over):
            return group
        whole = prod(self.numbered[name] for name in over)
        return prod(self.wanted[name] for name in over) if group == whole else group


def _base(opcode: str) -> str:
    return opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")


def group_size(instruction: Instruction, devices: int) -> int:
    """How many devices take part in one group; for a permute, whether any takes part."""
    if _base(instruction.opcode) == "collective-permute":
        pairs = read_pairs(instruction.attributes.get("source_target_pairs", ""))
        return 2 if any(source != target for source, target in pairs) else 1
    return max(len(group) for group in read_groups(_groups(instruction), devices))


def _groups(instruction: Instruction) -> str:
    """How the groups are written; a mesh's own order of devices stands behind a comma."""
    text = instruction.attributes.get("replica_groups", "{}")
    order = instruction.attributes.get("device_ids")
    return text if order is None else f"{text}, device_ids={order}"


def axes(instruction: Instruction, mesh: Mapping[str, int], devices: int) -> tuple[str, ...]:
    """The mesh axes that a collective runs along."""
    pairs = instruction.attributes.get("source_target_pairs")
    if pairs is not None:
        return axes_of(read_pairs(pairs), mesh)
    return axes_of(read_groups(_groups(instruction), devices), mesh)


def operand_shapes(instruction: Instruction, within: Computation) -> list[Shape]:
    """The arrays that a collective takes."""
    taken = (within.by_name[name].shape for name in instruction.operands if name in within.by_name)
    arrays = [array for shape in taken for array in shape.arrays() if array.dtype != "token"]
    if _base(instruction.opcode) == "ragged-all-to-all":
        return arrays[:1]  # the others are the result's buffer, offsets and sizes
    if _base(instruction.opcode) == "collective-permute":
        return [array for array in arrays if array.dims] or arrays[:1]
    return arrays


def is_scattered(lead: Instruction, within: Computation) -> bool:
    """Whether every device keeps only a part of an all-reduce's result of its own."""
    users = within.users.get(lead.name, ())
    seen = 0
    while users and seen < 4:
        if all(user.opcode == "dynamic-slice" for user in users):
            return all(user.shape.elements < lead.shape.elements for user in users)
        if len(users) != 1 or users[0].opcode not in ("bitcast", "copy", "convert", "reshape"):
            return False
        users = within.users.get(users[0].name, ())
        seen += 1
    return False


def sent_bytes(kind: str, taken: int, group: int) -> int:
    """What one device sends of the bytes it takes in, by the ring algorithm."""
    if group <= 1:
        return 0
    match kind:
        case "all-gather":
            return taken * (group - 1)
        case "reduce-scatter" | "all-to-all":
            return taken * (group - 1) // group
        case "all-reduce":
            return 2 * taken * (group - 1) // group
        case _:
            return taken


def _collective(
    kind: str, place: Found, module: Module, meshes: _Meshes, widened: bool
) -> Collective | None:
    instruction, within = place.instruction, place.within
    over = meshes.axes(instruction, module.partitions)
    group = meshes.members(group_size(instruction, module.partitions), over)
    shapes = operand_shapes(instruction, within)
    if group <= 1 or not shapes or not place.executions.count:
        return None
    types = _types(instruction, within, shapes, widened)
    taken = sum(
        -(-shape.elements * bits // 8) for shape, (_, bits) in zip(shapes, types, strict=True)
    )
    start = place.start or (
        (instruction, within) if instruction.opcode.endswith("-start") else None
    )
    if start is None and place.caller is not None:
        part = async_part(place.caller[0], module)
        start = place.caller if part is not None and part.part == "start" else None
    origin = start[0].place if start and not instruction.place.source else instruction.place
    if not origin.source:
        origin = _asked_for_by(instruction, within) or origin
    return Collective(
        kind=kind,
        axes=over,
        dtype="+".join(dict.fromkeys(dtype_name(name) for name, _ in types)),
        sent=sent_bytes(kind, taken, group),
        count=place.executions.count,
        at_least=place.executions.at_least,
        conditional=place.executions.conditional,
        source=origin.source,
        scope=origin.scope,
        asynchronous=start is not None,
        between=() if start is None else tuple(_between(*start, module)),
        group=group,
        name=instruction.name,
    )


NEAR = 4
"""How far from a collective without a line of its own its reason is looked for."""


def _asked_for_by(instruction: Instruction, within: Computation) -> SourcePlace | None:
    """Where what takes the result comes from, or else what makes it: XLA may name neither."""
    for near in (_users, _makers):
        here = [instruction]
        for _ in range(NEAR):
            here = [other for one in here for other in near(one, within)]
            found = next((one.place for one in here if one.place.source), None)
            if found is not None:
                return found
    return None


def _users(one: Instruction, within: Computation) -> Sequence[Instruction]:
    return within.users.get(one.name, ())


def _makers(one: Instruction, within: Computation) -> Sequence[Instruction]:
    return [within.by_name[name] for name in one.operands if name in within.by_name]


def _types(
    instruction: Instruction, within: Computation, shapes: list[Shape], widened: bool
) -> list[tuple[str, int]]:
    """HLO's name and the bits of each operand's type, as the program means it."""
    narrow = _narrowed(instruction, within) if widened else ""
    names = [narrow if narrow and shape.dtype == "f32" else shape.dtype for shape in shapes]
    return [(name, BITS.get(name, 32)) for name in names]


def _narrowed(instruction: Instruction, within: Computation) -> str:
    """`bf16` where the CPU compiler has widened a collective of that type to f32.

    It leaves a mark in the name of an all-reduce's sum. Around the others stand conversions: from
    bf16 before, and to bf16 behind, so that no digit of what was between can matter.
    """
    applied = instruction.called().get("to_apply", ("",))[0]
    if applied:
        return "bf16" if applied.endswith("_promoted") else ""
    taken = [within.by_name.get(name) for name in instruction.operands]
    if not taken or not all(value is not None and _widens(value) for value in taken):
        return ""
    users = within.users.get(instruction.name, ())
    return "bf16" if users and all(_narrows(user) for user in users) else ""


def _widens(value: Instruction) -> bool:
    return value.shape.dtype == "f32" and "convert" in _steps(value)


def _narrows(value: Instruction) -> bool:
    return "convert" in _steps(value)


def _steps(value: Instruction) -> str:
    """The operations of a fusion, which XLA names after them."""
    return value.name if value.opcode == "fusion" else value.opcode


def _between(start: Instruction, within: Computation, module: Module) -> Iterator[str]:
    """What is computed between a start and its end, by name and source line."""
    ends = {start.name}
    fused = async_part(start, module)
    end = None if fused is None else AsyncPart("done", fused.channel)
    after = False
    for instruction in within.instructions:
        if instruction is start:
            after = True
            continue
        if not after:
            continue
        if end is not None and async_part(instruction, module) == end:
            return
        if ends & set(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return
            if instruction.opcode.endswith("-update"):
                ends.add(instruction.name)
                continue
        if computes(instruction):
            at = f" at {instruction.place.short}" if instruction.place.source else ""
            yield f"{instruction.name}{at}"


@dataclass(frozen=True)
class AsyncPart:
    """The start or the end of a collective that the TPU's compiler has fused with others' work."""

    part: Literal["start", "done"]
    channel: str


def async_part(lead: Instruction, module: Module) -> AsyncPart | None:
    """What of an asynchronous collective a fusion is; None for what computes meanwhile, too."""
    called = module.computations.get((lead.called().get("calls") or ("",))[0])
    if lead.opcode != "fusion" or called is None:
        return None
    marks = {one.attributes.get("custom_call_target", "").strip('"') for one in called.instructions}
    channels = [
        one.attributes.get("channel_id") for one in called.instructions if one.opcode in KINDS
    ]
    if not channels:
        return None
    channel = f"channel {channels[0]}"
    if "AsyncCollectiveStart" in marks:
        return AsyncPart("start", channel)
    return AsyncPart("done", channel) if "AsyncCollectiveDone" in marks else None


_NO_WORK = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "iota", "opt-barrier", "add-dependency",
}  # fmt: skip


def computes(instruction: Instruction) -> bool:
    """Whether an instruction does work that takes time on the device, communication apart."""
    if instruction.opcode in _NO_WORK or _base(instruction.opcode) in KINDS:
        return False
    if instruction.opcode.endswith(("-start", "-done", "-update")):
        return False
    # A handful of numbers, such as an offset, takes no time worth telling.
    return instruction.shape.is_tuple or instruction.shape.elements > 128
