"""The peak memory of a program on a device, and the largest buffers at the peak.

A buffer is live from the operation that creates it to the last that uses it, in program order.
Values inside one kernel, views, updates in place and values carried by a loop need no buffer of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from drumline.deprecated import renamed_attribute
from drumline.inspect.cost.kernels import Kernel, fuse
from drumline.inspect.hlo.text import Computation, Instruction, Module, Shape, closing_bracket

_VIEWS = {"bitcast", "copy", "opt-barrier", "reshape", "domain", "add-dependency"}
LARGEST_COUNT = 8
"""The number of buffers that a report lists."""


@dataclass(frozen=True)
class LiveBuffer:
    """A buffer that is live at the peak."""

    name: str
    bytes: int

    what = renamed_attribute("what", "name")


@dataclass(frozen=True)
class Memory:
    """The memory of a device, in bytes."""

    arguments: int
    outputs: int
    """Outputs that do not reuse the memory of donated arguments."""
    temporaries: int
    largest: tuple[LiveBuffer, ...] = ()
    """The largest buffers at the peak."""

    @property
    def total(self) -> int:
        """The peak."""
        return self.arguments + self.outputs + self.temporaries


@dataclass
class _Buffer:
    name: str
    size: int


@dataclass
class _Peak:
    size: int = 0
    buffers: list[LiveBuffer] = field(default_factory=list)


def compiler_memory(module: Module, statistics: Mapping[str, int]) -> Memory:
    """Return the memory that the compiler reports."""
    outputs = max(0, statistics["outputs"] - statistics["aliased"])
    largest = _largest(_argument_buffers(module))
    return Memory(statistics["arguments"], outputs, statistics["temporaries"], largest)


def estimate_memory(module: Module) -> Memory:
    """Estimate the memory of an unfused program from the lifetimes of its values."""
    arguments = _argument_buffers(module)
    donated = _donated_outputs(module)
    peak = _Liveness(module, donated).peak(module.entry)
    arrays = list(module.entry.root.shape.arrays())
    outputs = sum(array.bytes for index, array in enumerate(arrays) if index not in donated)
    # At the end the peak includes the outputs, which are reported separately.
    temporaries = max(0, peak.size - outputs)
    largest = _largest([*arguments, *peak.buffers])
    return Memory(sum(buffer.bytes for buffer in arguments), outputs, temporaries, largest)


def _largest(buffers: list[LiveBuffer]) -> tuple[LiveBuffer, ...]:
    return tuple(sorted(buffers, key=lambda buffer: -buffer.bytes)[:LARGEST_COUNT])


def _argument_buffers(module: Module) -> list[LiveBuffer]:
    return [
        LiveBuffer(f"argument {parameter.location.op_name or index}", parameter.shape.bytes)
        for index, parameter in module.entry.parameters.items()
    ]


def _donated_outputs(module: Module) -> set[int]:
    """Return the indices of the outputs that reuse the memory of arguments."""
    key = "input_output_alias={"
    start = module.header.find(key)
    if start < 0:
        return set()
    aliases = module.header[start : closing_bracket(module.header, start + len(key))]
    return {int(index or 0) for index in re.findall(r"\{(\d*)[\d,\s]*\}:\s*\(", aliases)}


class _Liveness:
    def __init__(self, module: Module, donated: set[int]) -> None:
        self.module = module
        self.donated = donated
        self.peaks: dict[str, _Peak] = {}

    def peak(self, computation: Computation) -> _Peak:
        if computation.name not in self.peaks:
            self.peaks[computation.name] = self._compute_peak(computation)
        return self.peaks[computation.name]

    def _compute_peak(self, computation: Computation) -> _Peak:
        kernels = fuse(computation, self.module)
        internal = _internal_values(kernels)
        buffers: dict[str, list[_Buffer]] = {}
        for instruction in computation.instructions:
            buffers[instruction.name] = self._buffers(instruction, computation, buffers, internal)
        order: dict[str, int] = {}
        last_use: dict[int, int] = {}
        for index, instruction in enumerate(computation.instructions):
            order[instruction.name] = index
            for name in (instruction.name, *instruction.operands):
                for buffer in buffers.get(name, ()):
                    last_use[id(buffer)] = index
        for kernel in kernels:
            end = max(order[instruction.name] for instruction in kernel.instructions)
            for name in kernel.inputs:  # all inputs stay live while the kernel runs
                for buffer in buffers.get(name, ()):
                    last_use[id(buffer)] = max(last_use[id(buffer)], end)
        for index, buffer in enumerate(buffers[computation.root.name]):
            last_use[id(buffer)] = len(computation.instructions)
            if computation is self.module.entry and index in self.donated:
                buffer.size = 0
        return self._sweep(computation, buffers, last_use)

    def _sweep(
        self,
        computation: Computation,
        buffers: dict[str, list[_Buffer]],
        last_use: dict[int, int],
    ) -> _Peak:
        """Allocate and free buffers in program order and return the peak."""
        frees: dict[int, list[_Buffer]] = {}
        live: dict[int, _Buffer] = {}
        size, peak = 0, _Peak()
        for index, instruction in enumerate(computation.instructions):
            for buffer in buffers[instruction.name]:
                if id(buffer) not in live and buffer.size:
                    live[id(buffer)] = buffer
                    size += buffer.size
                    frees.setdefault(last_use[id(buffer)], []).append(buffer)
            callee = self._callee_peak(instruction)
            if size + callee.size > peak.size:
                live_buffers = [LiveBuffer(buffer.name, buffer.size) for buffer in live.values()]
                peak = _Peak(size + callee.size, [*_largest(live_buffers), *callee.buffers])
            for buffer in frees.pop(index, ()):
                if live.pop(id(buffer), None) is not None:
                    size -= buffer.size
        return peak

    def _callee_peak(self, instruction: Instruction) -> _Peak:
        if instruction.opcode not in ("while", "call", "conditional"):
            return _Peak()
        computations = self.module.computations
        peaks = [
            self.peak(computations[name])
            for names in instruction.called_computations().values()
            for name in names
            if name in computations
        ]
        return max(peaks, key=lambda peak: peak.size, default=_Peak())

    def _buffers(
        self,
        instruction: Instruction,
        computation: Computation,
        buffers: dict[str, list[_Buffer]],
        internal: set[str],
    ) -> list[_Buffer]:
        """Return the buffer of each array of a value: a new one, or one of an operand."""
        operands = [buffers.get(name, []) for name in instruction.operands]
        if instruction.opcode in ("parameter", "constant", "iota", "partition-id"):
            return [_Buffer("", 0) for _ in instruction.shape.arrays()]
        if instruction.opcode == "tuple":
            return [buffer for operand in operands for buffer in operand]
        if instruction.opcode == "get-tuple-element" and operands:
            index = instruction.integers("index")[0]
            shapes = computation.by_name[instruction.operands[0]].shape.components
            start = sum(map(_array_count, shapes[:index]))
            return operands[0][start : start + _array_count(shapes[index])]
        if instruction.opcode in _VIEWS | {"while", "dynamic-update-slice"} and operands:
            return operands[0]
        if instruction.name in internal:
            return [_Buffer("", 0) for _ in instruction.shape.arrays()]
        location = instruction.location
        name = location.scope or location.op_name.rpartition("/")[2] or instruction.opcode
        line = f" at {location.short}" if location.source else ""
        return [_Buffer(f"{name}{line}", array.bytes) for array in instruction.shape.arrays()]


def _internal_values(kernels: list[Kernel]) -> set[str]:
    """Return the values that no kernel writes to memory."""
    values = {instruction.name for kernel in kernels for instruction in kernel.instructions}
    return values - {name for kernel in kernels for name in kernel.outputs}


def _array_count(shape: Shape) -> int:
    return sum(1 for _ in shape.arrays())
