"""What an event of a trace is: a collective, a computation, a copy to the host, or a loop.

A TPU names an event by the instruction's text (`%all-gather-start.3 = (…) all-gather-start(…)`), a
CPU by the instruction's name, which JAX takes from its primitive (`all_gather.3`, `psum.7`), and a
GPU by the kernel (`ncclDevKernel_AllGather_RING_LL(…)`), with the instruction beside it.
"""

import re
from dataclasses import dataclass
from enum import Enum

from drumline.inspect.profiles.programs import CompiledProgram, EventFacts


class Role(Enum):
    """What an operation does with the device's time."""

    COMPUTATION = "computation"
    COMMUNICATION = "communication"
    TRANSFER = "transfer"
    """To or from the host: the device is busy, and computes nothing."""
    ENCLOSING = "enclosing"
    """A loop or a branch, which takes as long as what runs inside of it."""


COLLECTIVES = (
    # The longer names first: all-reduce-scatter is what a TPU calls a fused reduce-scatter.
    ("reduce-scatter", ("all-reduce-scatter", "reduce-scatter", "reducescatter", "psum-scatter")),
    ("all-gather", ("all-gather", "allgather", "pgather")),
    ("all-to-all", ("ragged-all-to-all", "all-to-all", "alltoall")),
    ("collective-permute", ("collective-permute", "ppermute", "pshuffle")),
    ("collective-broadcast", ("collective-broadcast", "pbroadcast")),
    ("all-reduce", ("all-reduce", "allreduce", "psum", "pmax", "pmin", "pmean")),
    ("send-recv", ("sendrecv", "send", "recv")),
)
"""Each kind as a report names it, and the beginnings by which traces name it."""
LOOPS = ("while", "conditional", "call")
TRANSFERS = ("MemcpyH2D", "MemcpyD2H")
WRAPPERS = ("async-start", "async-update", "async-done", "custom-call", "")
"""Opcodes that do not tell what is inside; the name may."""
TPU_WRAPPERS = (*WRAPPERS, "fusion")
"""Only a TPU fuses collectives."""


@dataclass(frozen=True)
class TraceOperation:
    """An operation of the traced program."""

    name: str
    kind: str
    """The collective's kind, or else the category or opcode that the trace gives."""
    role: Role
    source: str
    module: str
    in_entry: bool = False
    starts: str = ""
    """Of the end of an asynchronous operation: the name of its start."""

    @property
    def is_end(self) -> bool:
        """Whether it waits for what another operation began."""
        return bool(self.starts)


def collective_kind(name: str) -> str | None:
    """The kind of collective that an opcode, an instruction or a kernel is, if it is one."""
    plain = name.lower().replace("_", "-")
    plain, nccl = re.subn(r"^nccl[a-z]*kernel-", "", plain)
    if nccl and plain.startswith("broadcast"):
        return "collective-broadcast"
    for kind, beginnings in COLLECTIVES:
        for beginning in beginnings:
            if plain.startswith(beginning) and not plain[len(beginning) :][:1].isalpha():
                return kind
    return None


def base_name(name: str) -> str:
    """An instruction's name without its number: `fusion` for `fusion.12`."""
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", name)


def tpu_operation(
    text: str, facts: EventFacts | None, program: CompiledProgram | None
) -> TraceOperation:
    """What an event on a TPU is, by the instruction's text and what else the trace says."""
    name, _, definition = text.partition(" = ")
    name = name.strip().lstrip("%")
    opcode = found.group(1) if (found := re.search(r"\s([a-z][a-z0-9-]*)\(", definition)) else ""
    known = program.find(name) if program else None
    if known and not opcode:
        opcode = known.opcode
    category = facts.category if facts else ""
    collective = collective_kind(opcode) or collective_kind(category)
    if collective is None and opcode in TPU_WRAPPERS:
        collective = collective_kind(name)
    begun = ""
    if (opcode or name).partition(".")[0].endswith("-done"):
        named = re.search(r"%([\w.-]*start[\w.-]*)", definition)
        begun = named.group(1) if named else name.replace("-done", "-start", 1)
    return TraceOperation(
        name=name,
        kind=collective or category or opcode or base_name(name),
        role=_role(collective, opcode or base_name(name)),
        source=(facts.source if facts else "") or (known.source if known else ""),
        module=program.name if program else "",
        in_entry=known.in_entry if known else False,
        starts=begun,
    )


def named_operation(
    event: str, instruction: str, module: str, program: CompiledProgram | None
) -> TraceOperation:
    """What an event on a CPU or a GPU is, by its name and the instruction that it belongs to.

    A GPU runs several instructions as one command buffer, whose kernels bear their own names.
    """
    known = program.find(instruction, event) if program else None
    opcode = known.opcode if known else ""
    collective = collective_kind(opcode)
    if collective is None and opcode in WRAPPERS:
        collective = collective_kind(instruction) or collective_kind(event)
    source = known.source if known else ""
    if collective and not source and program:
        source = _only_source(collective, program)
    whole = instruction.startswith("command_buffer") or not instruction
    name = event if whole else instruction
    transfer = event.startswith(TRANSFERS)
    if transfer and collective is None:
        return TraceOperation(name, event, Role.TRANSFER, source, module)
    return TraceOperation(
        name=name,
        kind=collective or opcode or base_name(name),
        role=_role(collective, opcode or base_name(name)),
        source=source,
        module=module,
        in_entry=known.in_entry if known else False,
    )


def _role(collective: str | None, opcode: str) -> Role:
    if collective:
        return Role.COMMUNICATION
    return Role.ENCLOSING if opcode in LOOPS else Role.COMPUTATION


def _only_source(kind: str, program: CompiledProgram) -> str:
    """The line of the program's collectives of a kind, where they all stand on the same one."""
    lines = {
        known.source
        for known in program.instructions.values()
        if known.source and collective_kind(known.opcode) == kind
    }
    return lines.pop() if len(lines) == 1 else ""
