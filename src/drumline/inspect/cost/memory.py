"""How much memory a device needs, and what fills it when it is fullest.

Values live from the operation that makes them to the last that takes them, in the order of the
program. Values that stay within one operation, views, updates in place and what a loop carries on
take no room of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from drumline.inspect.cost.kernels import Kernel, fused
from drumline.inspect.hlo.text import Computation, Instruction, Module, Shape, closing

_VIEWS = {"bitcast", "copy", "opt-barrier", "reshape", "domain", "add-dependency"}


@dataclass(frozen=True)
class Held:
    """Something that takes room."""

    what: str
    bytes: int


@dataclass(frozen=True)
class Memory:
    """What one device needs."""

    arguments: int
    outputs: int
    """Beside those that take the place of donated arguments."""
    temporaries: int
    largest: tuple[Held, ...] = ()
    """The largest of all, when memory is fullest."""

    @property
    def total(self) -> int:
        """Everything."""
        return self.arguments + self.outputs + self.temporaries


@dataclass
class _Buffer:
    size: int
    what: str


@dataclass
class _Peak:
    size: int = 0
    held: list[Held] = field(default_factory=list)


def as_told(module: Module, told: Mapping[str, int]) -> Memory:
    """By the compiler's own account."""
    outputs = max(0, told["outputs"] - told["aliased"])
    largest = tuple(sorted(_arguments(module), key=lambda held: -held.bytes)[:8])
    return Memory(told["arguments"], outputs, told["temporaries"], largest)


def needed(module: Module) -> Memory:
    """By the lives of the values of a program that is not fused."""
    arguments = _arguments(module)
    donated = _donated(module)
    peak = _Lives(module, donated).peak(module.entry)
    arrays = list(module.entry.root.shape.arrays())
    outputs = sum(array.bytes for at, array in enumerate(arrays) if at not in donated)
    # The outputs are alive at the end, among the temporaries: they are told apart.
    temporaries = max(0, peak.size - outputs)
    largest = sorted([*arguments, *peak.held], key=lambda held: -held.bytes)[:8]
    return Memory(sum(held.bytes for held in arguments), outputs, temporaries, tuple(largest))


def _arguments(module: Module) -> list[Held]:
    return [
        Held(f"argument {one.place.op_name or number}", one.shape.bytes)
        for number, one in module.entry.parameters.items()
    ]


def _donated(module: Module) -> set[int]:
    """The results, by number, that take the place of arguments."""
    at = module.head.find("input_output_alias={")
    if at < 0:
        return set()
    listed = module.head[at : closing(module.head, at + len("input_output_alias={"))]
    return {int(number or 0) for number in re.findall(r"\{(\d*)[\d,\s]*\}:\s*\(", listed)}


class _Lives:
    def __init__(self, module: Module, donated: set[int]) -> None:
        self.module = module
        self.donated = donated
        self.known: dict[str, _Peak] = {}

    def peak(self, computation: Computation) -> _Peak:
        if computation.name not in self.known:
            self.known[computation.name] = self._peak(computation)
        return self.known[computation.name]

    def _peak(self, computation: Computation) -> _Peak:
        kernels = fused(computation, self.module)
        unseen = _within(kernels)
        buffers: dict[str, list[_Buffer]] = {}
        for one in computation.instructions:
            buffers[one.name] = self._buffers(one, computation, buffers, unseen)
        last = {}
        for at, one in enumerate(computation.instructions):
            for name in (one.name, *one.operands):
                for buffer in buffers.get(name, ()):
                    last[id(buffer)] = at
        order = {one.name: at for at, one in enumerate(computation.instructions)}
        for kernel in kernels:
            ends = max(order[one.name] for one in kernel.instructions)
            for name in kernel.takes:  # all of it is there while the kernel runs
                for buffer in buffers.get(name, ()):
                    last[id(buffer)] = max(last[id(buffer)], ends)
        end = len(computation.instructions)
        for number, buffer in enumerate(buffers[computation.root.name]):
            last[id(buffer)] = end
            if computation is self.module.entry and number in self.donated:
                buffer.size = 0
        return self._sweep(computation, buffers, last)

    def _sweep(
        self, computation: Computation, buffers: dict[str, list[_Buffer]], last: dict[int, int]
    ) -> _Peak:
        ending: dict[int, list[_Buffer]] = {}
        alive: dict[int, _Buffer] = {}
        size, peak = 0, _Peak()
        for at, one in enumerate(computation.instructions):
            for buffer in buffers[one.name]:
                if id(buffer) not in alive and buffer.size:
                    alive[id(buffer)] = buffer
                    size += buffer.size
                    ending.setdefault(last[id(buffer)], []).append(buffer)
            inner = self._called(one)
            if size + inner.size > peak.size:
                held = [Held(buffer.what, buffer.size) for buffer in alive.values()]
                held.sort(key=lambda item: -item.bytes)
                peak = _Peak(size + inner.size, [*held[:8], *inner.held])
            for buffer in ending.pop(at, ()):
                if alive.pop(id(buffer), None) is not None:
                    size -= buffer.size
        return peak

    def _called(self, one: Instruction) -> _Peak:
        if one.opcode not in ("while", "call", "conditional"):
            return _Peak()
        names = [name for some in one.called().values() for name in some]
        peaks = [
            self.peak(self.module.computations[n]) for n in names if n in self.module.computations
        ]
        return max(peaks, key=lambda peak: peak.size, default=_Peak())

    def _buffers(
        self,
        one: Instruction,
        computation: Computation,
        known: dict[str, list[_Buffer]],
        unseen: set[str],
    ) -> list[_Buffer]:
        """The room that each array of a value takes: its own, or that of what it is made of."""
        taken = [known.get(name, []) for name in one.operands]
        if one.opcode in ("parameter", "constant", "iota", "partition-id"):
            return [_Buffer(0, "") for _ in one.shape.arrays()]
        if one.opcode == "tuple":
            return [buffer for some in taken for buffer in some]
        if one.opcode == "get-tuple-element" and taken:
            at = one.numbers("index")[0]
            parts = computation.by_name[one.operands[0]].shape.parts
            before = sum(_count(part) for part in parts[:at])
            return taken[0][before : before + _count(parts[at])]
        if one.opcode in _VIEWS | {"while", "dynamic-update-slice"} and taken:
            return taken[0]
        if one.name in unseen:
            return [_Buffer(0, "") for _ in one.shape.arrays()]
        where = one.place.scope or one.place.op_name.rpartition("/")[2] or one.opcode
        at_line = f" at {one.place.short}" if one.place.source else ""
        return [_Buffer(array.bytes, f"{where}{at_line}") for array in one.shape.arrays()]


def _within(kernels: list[Kernel]) -> set[str]:
    """Values that no kernel writes to memory."""
    every = {one.name for kernel in kernels for one in kernel.instructions}
    return every - {name for kernel in kernels for name in kernel.writes}


def _count(shape: Shape) -> int:
    return sum(1 for _ in shape.arrays())
