"""The operations that a device would run, made of a program that is not fused yet.

The CPU's compiler is asked not to fuse, as it fuses for CPUs. What stands here fuses as
accelerators do: chains of elementwise operations run as one; a sum takes in what it sums; a product
takes in the conversions of its operands and what is done with each of its results. A value goes
through memory only from one operation to another. Where a program says `kernel[…]` in a name scope,
all operations under it are one kernel that somebody wrote, and what passes between them stays on
the chip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from drumline.inspect.cost.machines import Machine
from drumline.inspect.cost.work import (
    ELEMENTWISE,
    MOVES,
    NOTHING,
    Work,
    arithmetic,
    traffic,
)
from drumline.inspect.hlo.text import Computation, Instruction, Module

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency", "bitcast", "domain", "iota",
}  # fmt: skip
_LIGHT = ELEMENTWISE | MOVES | {"reduce", "map"}
_CHEAP = (MOVES | {"convert", "compare", "and", "or", "not"}) - {"concatenate", "pad"}
_NAMELESS = _CHEAP | ELEMENTWISE | {"iota", "constant", "dot", "reduce"}
_SCOPE = re.compile(r"kernel\[(?P<name>[^\]\s]+)(?:\s+work=(?P<work>[\d.]+))?\]")


@dataclass
class Kernel:
    """One operation of the device, of one instruction or several."""

    name: str
    instructions: list[Instruction]
    work: Work = NOTHING
    takes: set[str] = field(default_factory=set)
    """Instructions of other kernels whose values it takes."""
    writes: set[str] = field(default_factory=set)
    """Instructions whose values leave the kernel, and need room somewhere."""
    written_in: str = ""
    """The name of the written kernel that it is a part of, if any."""

    @property
    def lead(self) -> Instruction:
        """The instruction that tells what the kernel is about: a product before anything else."""
        weight = dict.fromkeys(MOVES, -1) | {"dot": 2, "convolution": 2, "reduce": 1}
        return max(reversed(self.instructions), key=lambda one: weight.get(one.opcode, 0))


def written_kernel(instruction: Instruction) -> tuple[str, float] | None:
    """The kernel that a name scope says an instruction is a part of, and how much of it is done."""
    found = _SCOPE.search(instruction.place.op_name)
    return None if found is None else (found["name"], float(found["work"] or 1.0))


def fused(computation: Computation, module: Module, on_chip: float = 0.0) -> list[Kernel]:
    """The kernels of a computation that is not fused, in an order in which they can run.

    Values of up to `on_chip` bytes pass from one to another without going through memory.
    """
    return _Grouping(computation, module, on_chip).kernels()


class _Grouping:
    def __init__(self, computation: Computation, module: Module, on_chip: float) -> None:
        self.computation = computation
        self.module = module
        self.on_chip = on_chip
        self.written = self._adopt()
        self.member: dict[str, frozenset[str]] = {}
        """The kernels that an instruction is in, each named after the instruction it ends with."""
        for instruction in reversed(computation.instructions):
            self.member[instruction.name] = self._place(instruction)
        self._take_in_epilogues()

    def _adopt(self) -> dict[str, tuple[str, float]]:
        """The written kernel of each instruction, and of what exists for such a kernel alone.

        A compiler leaves no name on what it adds by itself, or writes in another way.
        """
        found: dict[str, tuple[str, float]] = {}
        for instruction in reversed(self.computation.instructions):
            scope = written_kernel(instruction)
            users = self.computation.users[instruction.name]
            if scope is None and users and instruction.opcode in _NAMELESS:
                takers = {found.get(user.name) for user in users}
                made = instruction.opcode in ("broadcast", "iota", "constant", "compare", "and")
                if len(takers) == 1 and (made or not instruction.place.op_name):
                    scope = takers.pop()
            if scope is not None:
                found[instruction.name] = scope
        for instruction in self.computation.instructions:
            if instruction.place.op_name or instruction.name in found:
                continue
            if instruction.opcode in _NAMELESS - {"iota", "constant", "broadcast"}:
                kernels = {found[name] for name in instruction.operands if name in found}
                if len(kernels) == 1:
                    found[instruction.name] = kernels.pop()
        return found

    def _place(self, instruction: Instruction) -> frozenset[str]:
        alone = frozenset((instruction.name,))
        users = self.computation.users[instruction.name]
        if instruction.opcode in FREE and instruction.opcode != "bitcast":
            return alone
        if instruction.opcode not in _LIGHT or instruction.opcode == "reduce":
            return alone
        if instruction.is_root or not users or instruction.name in self.written:
            return alone
        if self._sums_product(instruction) and any(self._sums_product(user) for user in users):
            return alone  # a running sum of products: each product adds itself to the sum so far
        kernels: frozenset[str] = frozenset()
        for user in users:
            if not self._takes_in(user, instruction):
                return alone
            kernels |= self.member[user.name]
        if len(kernels) == 1 or instruction.opcode in _CHEAP:
            return kernels
        # A value that two kernels need is computed twice only where that is nearly free.
        return kernels if len(kernels) == 2 and instruction.opcode in ("multiply", "add") else alone

    def _sums_product(self, one: Instruction) -> bool:
        """Whether it adds a product, which nothing else takes, to something."""
        if one.opcode != "add":
            return False
        for name in one.operands:
            value = self.computation.by_name.get(name)
            while value is not None and value.opcode in ("bitcast", "copy", "convert"):
                value = self.computation.by_name.get(value.operands[0])
            if value is not None and value.opcode == "dot":
                return len(self.computation.users[value.name]) == 1
        return False

    def _takes_in(self, user: Instruction, producer: Instruction) -> bool:
        if user.name in self.written:
            return producer.opcode in ("bitcast", "copy")
        if user.opcode in ("dot", "convolution"):
            return producer.opcode in _CHEAP
        if user.opcode == "dynamic-update-slice":
            return user.operands[1] == producer.name
        return user.opcode in _LIGHT

    def _take_in_epilogues(self) -> None:
        """What is done with each result of a product, and with nothing else, belongs to it."""
        members: dict[str, list[Instruction]] = {}
        for instruction in self.computation.instructions:
            for kernel in self.member[instruction.name]:
                members.setdefault(kernel, []).append(instruction)
        # The last product of a sum is the one that ends with it: the others can begin before.
        for instruction in reversed(self.computation.instructions):
            if instruction.opcode not in ("dot", "convolution"):
                continue
            if instruction.name in self.written:
                continue
            users = self.computation.users[instruction.name]
            kernels: frozenset[str] = frozenset().union(*(self.member[u.name] for u in users))
            if len(kernels) != 1:
                continue
            (kernel,) = kernels
            others = members.get(kernel, [])
            plain = all(
                one.opcode in ELEMENTWISE | MOVES
                and one.shape.elements <= instruction.shape.elements
                for one in others
            )
            if others and plain and not any(one.name in self.written for one in others):
                own = self.member[instruction.name]
                for one in members.pop(next(iter(own)), []):
                    self.member[one.name] = (self.member[one.name] - own) | {kernel}
                    members[kernel].append(one)

    def kernels(self) -> list[Kernel]:
        found: dict[str, Kernel] = {}
        for instruction in self.computation.instructions:
            for name in self.member[instruction.name]:
                kernel = found.setdefault(name, Kernel(name, []))
                kernel.instructions.append(instruction)
        # In the order of the instructions that they end with, each stands behind what it takes.
        order = {one.name: at for at, one in enumerate(self.computation.instructions)}
        kernels = sorted(found.values(), key=lambda kernel: order[kernel.instructions[-1].name])
        for kernel in kernels:
            self._measure(kernel)
        return kernels

    def _measure(self, kernel: Kernel) -> None:
        inside = {one.name for one in kernel.instructions}
        for one in kernel.instructions:
            kernel.takes.update(name for name in one.operands if name not in inside)
            if self._leaves(one, inside):
                kernel.writes.add(one.name)
        if len(kernel.instructions) == 1 and kernel.instructions[0].opcode in FREE:
            return
        work = NOTHING
        for one in kernel.instructions:
            work += arithmetic(one, self.computation, self.module)
        written = self.written.get(kernel.lead.name)
        if written is not None:
            kernel.written_in = written[0]
            work = work.scaled(written[1])
        kernel.work = work + self._bytes(kernel, inside)

    def _bytes(self, kernel: Kernel, inside: set[str]) -> Work:
        if len(kernel.instructions) == 1 and kernel.instructions[0].opcode not in _LIGHT | {
            "dot", "convolution",
        }:  # fmt: skip
            return traffic(kernel.instructions[0], self.computation, self.module)
        is_result = self.computation is self.module.entry and kernel.instructions[-1].is_root
        if not is_result and all(o.opcode in ("bitcast", "copy") for o in kernel.instructions):
            return NOTHING  # copies that the CPU's layouts and loops ask for
        read: dict[str, float] = {}
        written = 0.0
        for one in kernel.instructions:
            for operand in one.operands:
                value = self.computation.by_name.get(operand)
                if operand in inside or value is None or self._stays(one, value):
                    continue
                if self._small(value):
                    continue
                # Its other operands are the numbers where it begins.
                sliced = one.opcode in ("dynamic-slice", "slice") and operand == one.operands[0]
                part = float(one.shape.bytes) if sliced else None
                if one.opcode == "dynamic-update-slice" and one.operands[0] == operand:
                    part = 0.0
                whole = float(value.shape.bytes) if not value.shape.is_tuple else 0.0
                read[operand] = max(read.get(operand, 0.0), whole if part is None else part)
            written += self._written(one, inside)
        return Work(read=sum(read.values()), written=written)

    def _leaves(self, one: Instruction, inside: set[str]) -> bool:
        # What is computed again in each kernel that needs it leaves none.
        if len(self.member[one.name]) > 1:
            return False
        users = self.computation.users[one.name]
        outside = [user for user in users if user.name not in inside]
        if one.name in self.written:
            outside = [user for user in outside if not self._stays(user, one)]
        return bool(outside) or one.is_root

    def _written(self, one: Instruction, inside: set[str]) -> float:
        if not self._leaves(one, inside) or self._small(one):
            return 0.0
        if one.opcode == "dynamic-update-slice":
            return float(self.computation.by_name[one.operands[1]].shape.bytes)
        moved = one.opcode in ("bitcast", "copy") and not (one.opcode == "copy" and one.is_root)
        if moved and one.operands and one.operands[0] not in inside:
            return 0.0
        return float(one.shape.bytes)

    def _small(self, value: Instruction) -> bool:
        """Whether a value is made here, for use here, and has room on the chip meanwhile."""
        if value.shape.bytes > self.on_chip or value.opcode in ("parameter", "get-tuple-element"):
            return False
        while value.opcode in ("bitcast", "copy") and value.operands[0] in self.computation.by_name:
            value = self.computation.by_name[value.operands[0]]
            if value.opcode in ("parameter", "get-tuple-element"):
                return False
        users = self.computation.users[value.name]
        return bool(users) and not any(user.opcode in ("tuple", "while") for user in users)

    def _stays(self, user: Instruction, value: Instruction) -> bool:
        """Whether a value passes within one written kernel."""
        here, there = self.written.get(user.name), self.written.get(value.name)
        return here is not None and there is not None and here[0] == there[0]


def as_compiled(computation: Computation, module: Module) -> list[Kernel]:
    """The kernels of a computation that its own compiler has fused: each instruction is one."""
    kernels = []
    for instruction in computation.instructions:
        kernel = Kernel(instruction.name, [instruction], takes=set(instruction.operands))
        if instruction.opcode not in FREE:
            kernel.work = arithmetic(instruction, computation, module) + traffic(
                instruction, computation, module
            )
        kernels.append(kernel)
    return kernels


TRIFLE = 1024
"""Bytes and operations of what runs beside everything else: offsets, counters, a scalar."""
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


@dataclass(frozen=True)
class Cost:
    """What one operation costs, and what it is bound by."""

    kind: str = ""
    seconds: float = 0.0
    bound: str = ""
    """`compute`, `memory` or `overhead`."""
    flops: float = 0.0
    at_peak: float = 0.0
    """Seconds that its products would take at the peak of their type."""
    bytes: float = 0.0
    recomputed: bool = False
    """Whether it is done again, for a backward pass that did not keep the first result."""
    cycles: float | None = None
    """Seconds by the TPU compiler's own estimate, where there is one."""


def kernel_cost(kernel: Kernel, machine: Machine, scheduled: bool) -> Cost:
    """What a kernel costs on a machine.

    The longest of multiplying, elementwise work and loading hides most of the others. Of products,
    the TPU's compiler has an estimate of its own, which counts; its figures for moving data are
    several times the bandwidth's, which counts instead.
    """
    work, constants = kernel.work, machine.constants
    if not work.products and max(work.moved, work.vector) <= TRIFLE:
        return Cost(kind=_kind(kernel))
    peak = machine.peak_flops * constants.matmul
    multiplying = sum(
        p.padded_flops(constants) / (peak * p.speed(constants)) for p in work.products
    )
    computing = work.vector * machine.per_chip / constants.vector_flops
    loading = work.moved / (machine.memory_bandwidth * constants.hbm)
    longest = max(multiplying, computing, loading)
    rest = multiplying + computing + loading - longest
    seconds = longest + constants.unhidden * rest
    cycles = _cycles(kernel, machine) if scheduled else None
    if cycles is not None and work.products:
        seconds = max(cycles, loading)
    if longest > 0 and not kernel.written_in:
        seconds += constants.operation
    bound = "memory" if longest == loading else "compute"
    if longest < constants.operation:
        bound = "overhead"
    return Cost(
        kind=_kind(kernel),
        seconds=seconds,
        bound=bound,
        flops=work.flops,
        at_peak=sum(p.flops / p.peak_of_type() for p in work.products) / machine.peak_flops,
        bytes=work.moved,
        recomputed="rematted_computation" in kernel.lead.place.op_name,
        cycles=cycles,
    )


def _cycles(kernel: Kernel, machine: Machine) -> float | None:
    found = _CYCLES.search(kernel.lead.rest)
    clock = machine.constants.clock
    return int(found[1]) / clock if found and clock else None


def _kind(kernel: Kernel) -> str:
    if kernel.written_in:
        return kernel.written_in
    if kernel.work.products:
        return "matmul"
    opcode = kernel.lead.opcode
    if opcode == "fusion" or opcode in ELEMENTWISE:
        return "elementwise"
    return opcode
