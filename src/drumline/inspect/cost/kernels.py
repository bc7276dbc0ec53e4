"""Group the instructions of a program into kernels, and compute the cost of each kernel.

The CPU's compiler is run without fusion, because it fuses for CPUs. This module fuses as
accelerators do. Chains of elementwise operations run as a single kernel. A reduction includes the
computation of its input. A matmul includes the conversions of its operands and elementwise
operations on its result. A value passes through memory only between kernels. All operations in a
name scope `kernel[…]` form one handwritten kernel, and values inside it stay on the chip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from drumline.inspect.cost.machines import Machine
from drumline.inspect.cost.work import (
    DATA_MOVEMENT,
    ELEMENTWISE,
    NO_WORK,
    Work,
    arithmetic_work,
    memory_traffic,
)
from drumline.inspect.hlo.text import Computation, Instruction, Module

FREE_OPCODES = {
    "parameter", "constant", "tuple", "get-tuple-element", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency", "bitcast", "domain", "iota",
}  # fmt: skip
_FUSIBLE = ELEMENTWISE | DATA_MOVEMENT | {"reduce", "map"}
_CHEAP = (DATA_MOVEMENT | {"convert", "compare", "and", "or", "not"}) - {"concatenate", "pad"}
_COMPILER_MADE = _CHEAP | ELEMENTWISE | {"iota", "constant", "dot", "reduce"}
"""Opcodes that a compiler emits without the name scope of the operation that they belong to."""
_SCOPE = re.compile(r"kernel\[(?P<name>[^\]\s]+)(?:\s+work=(?P<work>[\d.]+))?\]")


@dataclass
class Kernel:
    """An operation of the device, made of one or more instructions."""

    name: str
    instructions: list[Instruction]
    work: Work = NO_WORK
    inputs: set[str] = field(default_factory=set)
    """Values of other kernels that it uses."""
    outputs: set[str] = field(default_factory=set)
    """Values that it writes to memory."""
    scope: str = ""
    """The name in its `kernel[…]` name scope, if it has one."""

    @property
    def primary(self) -> Instruction:
        """The instruction that characterizes the kernel: a matmul if there is one."""
        weights = dict.fromkeys(DATA_MOVEMENT, -1) | {"dot": 2, "convolution": 2, "reduce": 1}
        return max(
            reversed(self.instructions), key=lambda instruction: weights.get(instruction.opcode, 0)
        )


def fuse(computation: Computation, module: Module, on_chip_bytes: float = 0.0) -> list[Kernel]:
    """Group an unfused computation into kernels, in an order in which they can run.

    Values of up to `on_chip_bytes` pass between kernels without going through memory.
    """
    return _Fusion(computation, module, on_chip_bytes).kernels()


def compiled_kernels(computation: Computation, module: Module) -> list[Kernel]:
    """Make one kernel of each instruction of a computation that its compiler has fused."""
    kernels = []
    for instruction in computation.instructions:
        kernel = Kernel(instruction.name, [instruction], inputs=set(instruction.operands))
        if instruction.opcode not in FREE_OPCODES:
            arithmetic = arithmetic_work(instruction, computation, module)
            kernel.work = arithmetic + memory_traffic(instruction, computation, module)
        kernels.append(kernel)
    return kernels


def _read_scope(instruction: Instruction) -> tuple[str, float] | None:
    """Return the name and the `work` fraction of an instruction's `kernel[…]` scope."""
    match = _SCOPE.search(instruction.location.op_name)
    return None if match is None else (match["name"], float(match["work"] or 1.0))


class _Fusion:
    def __init__(self, computation: Computation, module: Module, on_chip_bytes: float) -> None:
        self.computation = computation
        self.module = module
        self.on_chip_bytes = on_chip_bytes
        self.scopes = self._assign_scopes()
        self.owners: dict[str, frozenset[str]] = {}
        """The kernels that contain an instruction, each named after its last instruction."""
        for instruction in reversed(computation.instructions):
            self.owners[instruction.name] = self._choose_owners(instruction)
        self._fuse_epilogues()

    def _assign_scopes(self) -> dict[str, tuple[str, float]]:
        """Return the `kernel[…]` scope of each instruction, inferred where it has no metadata.

        A compiler adds and rewrites instructions without copying their metadata. An instruction
        that only one handwritten kernel uses belongs to that kernel.
        """
        scopes: dict[str, tuple[str, float]] = {}
        for instruction in reversed(self.computation.instructions):
            scope = _read_scope(instruction)
            users = self.computation.users[instruction.name]
            if scope is None and users and instruction.opcode in _COMPILER_MADE:
                user_scopes = {scopes.get(user.name) for user in users}
                generated = instruction.opcode in (
                    "broadcast", "iota", "constant", "compare", "and",
                )  # fmt: skip
                if len(user_scopes) == 1 and (generated or not instruction.location.op_name):
                    scope = user_scopes.pop()
            if scope is not None:
                scopes[instruction.name] = scope
        for instruction in self.computation.instructions:
            if instruction.location.op_name or instruction.name in scopes:
                continue
            if instruction.opcode in _COMPILER_MADE - {"iota", "constant", "broadcast"}:
                operand_scopes = {scopes[name] for name in instruction.operands if name in scopes}
                if len(operand_scopes) == 1:
                    scopes[instruction.name] = operand_scopes.pop()
        return scopes

    def _choose_owners(self, instruction: Instruction) -> frozenset[str]:
        """Return the kernels of all users if they can include the instruction, else a new one."""
        new_kernel = frozenset((instruction.name,))
        users = self.computation.users[instruction.name]
        if instruction.opcode in FREE_OPCODES and instruction.opcode != "bitcast":
            return new_kernel
        if instruction.opcode not in _FUSIBLE or instruction.opcode == "reduce":
            return new_kernel
        if instruction.is_root or not users or instruction.name in self.scopes:
            return new_kernel
        if self._adds_matmul(instruction) and any(self._adds_matmul(user) for user in users):
            return new_kernel  # a running sum: each matmul adds its result to the sum so far
        owners: frozenset[str] = frozenset()
        for user in users:
            if not self._can_fuse_operand(user, instruction):
                return new_kernel
            owners |= self.owners[user.name]
        if len(owners) == 1 or instruction.opcode in _CHEAP:
            return owners
        # Two kernels both compute a shared value only if that is nearly free.
        return (
            owners if len(owners) == 2 and instruction.opcode in ("multiply", "add") else new_kernel
        )

    def _adds_matmul(self, instruction: Instruction) -> bool:
        """Return True for an add whose operand is a matmul with no other user."""
        if instruction.opcode != "add":
            return False
        by_name = self.computation.by_name
        for name in instruction.operands:
            value = by_name.get(name)
            while value is not None and value.opcode in ("bitcast", "copy", "convert"):
                value = by_name.get(value.operands[0])
            if value is not None and value.opcode == "dot":
                return len(self.computation.users[value.name]) == 1
        return False

    def _can_fuse_operand(self, user: Instruction, operand: Instruction) -> bool:
        if user.name in self.scopes:
            return operand.opcode in ("bitcast", "copy")
        if user.opcode in ("dot", "convolution"):
            return operand.opcode in _CHEAP
        if user.opcode == "dynamic-update-slice":
            return user.operands[1] == operand.name
        return user.opcode in _FUSIBLE

    def _fuse_epilogues(self) -> None:
        """Move each matmul into the kernel of its users if that only works on its result."""
        by_owner: dict[str, list[Instruction]] = {}
        for instruction in self.computation.instructions:
            for owner in self.owners[instruction.name]:
                by_owner.setdefault(owner, []).append(instruction)
        # Of several matmuls in a sum, only the last ends with it. The others can start earlier.
        for matmul in reversed(self.computation.instructions):
            if matmul.opcode not in ("dot", "convolution") or matmul.name in self.scopes:
                continue
            users = self.computation.users[matmul.name]
            owners: frozenset[str] = frozenset().union(*(self.owners[user.name] for user in users))
            if len(owners) != 1:
                continue
            (owner,) = owners
            epilogue = by_owner.get(owner, [])
            fusible = all(
                instruction.opcode in ELEMENTWISE | DATA_MOVEMENT
                and instruction.shape.elements <= matmul.shape.elements
                and instruction.name not in self.scopes
                for instruction in epilogue
            )
            if epilogue and fusible:
                matmul_owners = self.owners[matmul.name]
                for instruction in by_owner.pop(next(iter(matmul_owners)), []):
                    self.owners[instruction.name] = (
                        self.owners[instruction.name] - matmul_owners
                    ) | {owner}
                    by_owner[owner].append(instruction)

    def kernels(self) -> list[Kernel]:
        kernels: dict[str, Kernel] = {}
        for instruction in self.computation.instructions:
            for name in self.owners[instruction.name]:
                kernel = kernels.setdefault(name, Kernel(name, []))
                kernel.instructions.append(instruction)
        # Sorted by their last instructions, all kernels come after their inputs.
        order = {
            instruction.name: index
            for index, instruction in enumerate(self.computation.instructions)
        }
        ordered = sorted(kernels.values(), key=lambda kernel: order[kernel.instructions[-1].name])
        for kernel in ordered:
            self._measure(kernel)
        return ordered

    def _measure(self, kernel: Kernel) -> None:
        """Fill in inputs, outputs and work."""
        fused_names = {instruction.name for instruction in kernel.instructions}
        for instruction in kernel.instructions:
            kernel.inputs.update(name for name in instruction.operands if name not in fused_names)
            if self._is_output(instruction, fused_names):
                kernel.outputs.add(instruction.name)
        if len(kernel.instructions) == 1 and kernel.instructions[0].opcode in FREE_OPCODES:
            return
        work = NO_WORK
        for instruction in kernel.instructions:
            work += arithmetic_work(instruction, self.computation, self.module)
        scope = self.scopes.get(kernel.primary.name)
        if scope is not None:
            kernel.scope, fraction = scope
            work = work.scale_compute(fraction)
        kernel.work = work + self._memory_traffic(kernel, fused_names)

    def _memory_traffic(self, kernel: Kernel, fused_names: set[str]) -> Work:
        first = kernel.instructions[0]
        if len(kernel.instructions) == 1 and first.opcode not in _FUSIBLE | {"dot", "convolution"}:
            return memory_traffic(first, self.computation, self.module)
        is_result = self.computation is self.module.entry and kernel.instructions[-1].is_root
        if not is_result and all(
            instruction.opcode in ("bitcast", "copy") for instruction in kernel.instructions
        ):
            return NO_WORK  # copies for the memory layouts and loops of the CPU
        bytes_read: dict[str, float] = {}
        bytes_written = 0.0
        for instruction in kernel.instructions:
            for operand in instruction.operands:
                value = self.computation.by_name.get(operand)
                if operand in fused_names or value is None or self._same_scope(instruction, value):
                    continue
                if self._stays_on_chip(value):
                    continue
                size = float(value.shape.bytes) if not value.shape.is_tuple else 0.0
                if operand == instruction.operands[0]:  # the other operands of slices are indices
                    if instruction.opcode in ("dynamic-slice", "slice"):
                        size = float(instruction.shape.bytes)
                    elif instruction.opcode == "dynamic-update-slice":
                        size = 0.0
                bytes_read[operand] = max(bytes_read.get(operand, 0.0), size)
            bytes_written += self._written_bytes(instruction, fused_names)
        return Work(bytes_read=sum(bytes_read.values()), bytes_written=bytes_written)

    def _is_output(self, instruction: Instruction, fused_names: set[str]) -> bool:
        """Return True if a value of a kernel is used outside it."""
        if len(self.owners[instruction.name]) > 1:
            return False  # every kernel that needs the value computes it
        outside = [
            user
            for user in self.computation.users[instruction.name]
            if user.name not in fused_names and not self._same_scope(user, instruction)
        ]
        return bool(outside) or instruction.is_root

    def _written_bytes(self, instruction: Instruction, fused_names: set[str]) -> float:
        if not self._is_output(instruction, fused_names) or self._stays_on_chip(instruction):
            return 0.0
        if instruction.opcode == "dynamic-update-slice":
            return float(self.computation.by_name[instruction.operands[1]].shape.bytes)
        is_view = instruction.opcode == "bitcast" or (
            instruction.opcode == "copy" and not instruction.is_root
        )
        if is_view and instruction.operands and instruction.operands[0] not in fused_names:
            return 0.0
        return float(instruction.shape.bytes)

    def _stays_on_chip(self, value: Instruction) -> bool:
        """Return True for a small value that is computed and used in this computation."""
        external = ("parameter", "get-tuple-element")
        if value.shape.bytes > self.on_chip_bytes or value.opcode in external:
            return False
        by_name = self.computation.by_name
        while value.opcode in ("bitcast", "copy") and value.operands[0] in by_name:
            value = by_name[value.operands[0]]
            if value.opcode in external:
                return False
        users = self.computation.users[value.name]
        return bool(users) and not any(user.opcode in ("tuple", "while") for user in users)

    def _same_scope(self, user: Instruction, value: Instruction) -> bool:
        """Return True if a value stays within one handwritten kernel."""
        user_scope, value_scope = self.scopes.get(user.name), self.scopes.get(value.name)
        return (
            user_scope is not None and value_scope is not None and user_scope[0] == value_scope[0]
        )


# Cost -----------------------------------------------------------------------------------------

NEGLIGIBLE = 1024
"""Kernels of at most this many bytes and operations (offsets, counters, scalars) take no time."""
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


@dataclass(frozen=True)
class Cost:
    """The cost of an operation on a device."""

    kind: str = ""
    seconds: float = 0.0
    bound: str = ""
    """`compute`, `memory` or `overhead`."""
    flops: float = 0.0
    peak_seconds: float = 0.0
    """The duration of its matmuls at the peak of their dtypes."""
    bytes: float = 0.0
    recomputed: bool = False
    """True if the backward pass computes it again instead of keeping the first result."""
    compiler_seconds: float | None = None
    """The TPU compiler's own estimate, if it made one."""
    operation: str = ""
    """The kind of its largest operation, as in `coverage.MEASURED`."""


def kernel_cost(kernel: Kernel, machine: Machine, scheduled: bool) -> Cost:
    """Return the cost of a kernel.

    The longest of matmuls, elementwise work and loads hides most of the other two. For matmuls, an
    estimate of the TPU's compiler takes precedence. Its estimates of data movement are several
    times the time at full bandwidth and are ignored.
    """
    work, constants = kernel.work, machine.constants
    if not work.matmuls and max(work.bytes, work.vector_ops) <= NEGLIGIBLE:
        return Cost(kind=_kind(kernel))
    peak = machine.peak_flops * constants.matmul_efficiency
    matmul_seconds = sum(
        matmul.padded_flops(constants) / (peak * matmul.speed(machine)) for matmul in work.matmuls
    )
    vector_seconds = work.vector_ops * machine.devices_per_chip / constants.vector_flops
    load_seconds = work.bytes / (machine.memory_bandwidth * constants.hbm_efficiency)
    longest = max(matmul_seconds, vector_seconds, load_seconds)
    shorter = matmul_seconds + vector_seconds + load_seconds - longest
    seconds = longest + constants.unhidden_fraction * shorter
    compiler_seconds = _compiler_seconds(kernel, machine) if scheduled else None
    if compiler_seconds is not None and work.matmuls:
        seconds = max(compiler_seconds, load_seconds)
    if longest > 0 and not kernel.scope:
        seconds += constants.operation_seconds
    bound = "memory" if longest == load_seconds else "compute"
    if longest < constants.operation_seconds:
        bound = "overhead"
    peak_flops = sum(matmul.flops / matmul.relative_peak(machine.chip) for matmul in work.matmuls)
    return Cost(
        kind=_kind(kernel),
        seconds=seconds,
        bound=bound,
        flops=work.flops,
        peak_seconds=peak_flops / machine.peak_flops,
        bytes=work.bytes,
        recomputed="rematted_computation" in kernel.primary.location.op_name,
        compiler_seconds=compiler_seconds,
    )


def _compiler_seconds(kernel: Kernel, machine: Machine) -> float | None:
    match = _CYCLES.search(kernel.primary.attribute_text)
    clock_hz = machine.constants.clock_hz
    return int(match[1]) / clock_hz if match and clock_hz else None


def _kind(kernel: Kernel) -> str:
    if kernel.scope:
        return kernel.scope
    if kernel.work.matmuls:
        return "matmul"
    opcode = kernel.primary.opcode
    if opcode == "fusion" or opcode in ELEMENTWISE:
        return "elementwise"
    return opcode
