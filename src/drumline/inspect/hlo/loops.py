"""Trip counts of loops, and the executions of each instruction.

XLA sometimes records a trip count. Otherwise it is derived from the loop itself: a counted loop
compares a counter, which the body increments, with a constant bound. The TPU's compiler records
nothing, so there the arithmetic is the only source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline.inspect.hlo.text import Computation, Instruction, Module

_RECORDED = re.compile(r'"?known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
_TRANSPARENT = {"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "opt-barrier"}
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def trip_count(loop: Instruction, computation: Computation, module: Module) -> int | None:
    """Return the number of iterations of a `while`, or None if it depends on the data."""
    recorded = _RECORDED.search(loop.attribute_text)
    if recorded is not None:
        return int(recorded[1])
    called = loop.called_computations()
    if not called.get("condition") or not called.get("body"):
        return None
    condition = module.computations.get(called["condition"][0])
    body = module.computations.get(called["body"][0])
    return _CountedLoop(loop, computation, module, condition, body).trip_count()


@dataclass(frozen=True)
class _Carried:
    """An element of the tuple that the loop carries."""

    index: int


@dataclass(frozen=True)
class _CountedLoop:
    loop: Instruction
    computation: Computation
    module: Module
    condition: Computation | None
    body: Computation | None

    def trip_count(self) -> int | None:
        if self.condition is None:
            return None
        root = _skip_transparent(self.condition.root, self.condition)
        compare, fusion = root, None
        if root.opcode == "fusion":
            fused = self.module.fused_computation(root)
            if fused is None:
                return None
            compare, fusion = _skip_transparent(fused.root, fused), root
        if compare.opcode != "compare":
            return None
        left = self._compared_value(compare.operands[0], fusion)
        right = self._compared_value(compare.operands[1], fusion)
        direction = compare.attributes.get("direction", "")
        count = self._count(left, right, direction)
        if count is None:
            count = self._count(right, left, _MIRRORED.get(direction, ""))
        return count

    def _compared_value(self, name: str, fusion: Instruction | None) -> int | _Carried | None:
        """Return a constant, or the loop-carried element that an operand of the compare reads."""
        assert self.condition is not None
        fused = None if fusion is None else self.module.fused_computation(fusion)
        computation = self.condition if fused is None else fused
        value = computation.by_name.get(name)
        if value is None:
            return None
        value = _skip_transparent(value, computation)
        if value.opcode == "constant":
            return _integer(value)
        if value.opcode == "parameter" and fusion is not None:
            return self._compared_value(fusion.operands[int(value.literal)], None)
        if value.opcode == "get-tuple-element" and fusion is None:
            return _Carried(value.integers("index")[0])
        return None

    def _count(
        self, counter: int | _Carried | None, bound: int | _Carried | None, direction: str
    ) -> int | None:
        if not isinstance(counter, _Carried) or bound is None:
            return None
        start, step = self._initial_value(counter.index), self._step(counter.index)
        end = bound if isinstance(bound, int) else self._invariant_value(bound.index)
        if start is None or not step or end is None:
            return None
        if direction == "LE":
            end, direction = end + 1, "LT"
        if direction == "GE":
            end, direction = end - 1, "GT"
        if direction == "NE":
            direction = "LT" if step > 0 else "GT"
        if (direction == "LT" and step > 0) or (direction == "GT" and step < 0):
            return max(0, -(-(end - start) // step))
        return None

    def _initial_value(self, index: int) -> int | None:
        """Return the constant that a carried element starts with."""
        if not self.loop.operands:
            return None
        initial = self.computation.by_name.get(self.loop.operands[0])
        if initial is None or initial.opcode != "tuple" or index >= len(initial.operands):
            return None
        value = self.computation.by_name.get(initial.operands[index])
        value = None if value is None else _skip_transparent(value, self.computation)
        return _integer(value) if value is not None and value.opcode == "constant" else None

    def _invariant_value(self, index: int) -> int | None:
        """Return the constant value of a carried element that the body does not change."""
        return self._initial_value(index) if self._step(index) == 0 else None

    def _step(self, index: int) -> int | None:
        """Return the constant that the body adds to a carried element per iteration."""
        body = self.body
        if body is None or body.root.opcode != "tuple" or index >= len(body.root.operands):
            return None
        value = body.by_name.get(body.root.operands[index])
        return None if value is None else self._increment(value, body, index, None)

    def _increment(
        self, value: Instruction, computation: Computation, index: int, fusion: Instruction | None
    ) -> int | None:
        assert self.body is not None
        value = _skip_transparent(value, computation)
        if value.opcode == "fusion" and fusion is None:
            fused = self.module.fused_computation(value)
            return None if fused is None else self._increment(fused.root, fused, index, value)
        if self._is_carried(value, index, fusion):
            return 0
        if value.opcode != "add":
            return None
        total, has_carried = 0, False
        for name in value.operands:
            operand = computation.by_name.get(name)
            if operand is None:
                return None
            operand = _skip_transparent(operand, computation)
            if self._is_carried(operand, index, fusion):
                has_carried = True
                continue
            if operand.opcode == "parameter" and fusion is not None:
                argument = self.body.by_name.get(fusion.operands[int(operand.literal)])
                operand = operand if argument is None else _skip_transparent(argument, self.body)
            constant = _integer(operand) if operand.opcode == "constant" else None
            if constant is None:
                return None
            total += constant
        return total if has_carried else None

    def _is_carried(self, value: Instruction, index: int, fusion: Instruction | None) -> bool:
        """Return True if a value of the body is the carried element of this index."""
        if value.opcode == "parameter" and fusion is not None:
            assert self.body is not None
            argument = self.body.by_name.get(fusion.operands[int(value.literal)])
            return argument is not None and self._is_carried(
                _skip_transparent(argument, self.body), index, None
            )
        return value.opcode == "get-tuple-element" and value.integers("index") == (index,)


def _skip_transparent(value: Instruction, computation: Computation) -> Instruction:
    """Follow copies, conversions and the like back to the value that they pass on."""
    while value.opcode in _TRANSPARENT and value.operands:
        operand = computation.by_name.get(value.operands[0])
        if operand is None:
            break
        value = operand
    return value


def _integer(constant: Instruction) -> int | None:
    match = re.fullmatch(r"\{?(-?\d+)\}?", constant.literal.strip())
    return int(match[1]) if match else None


# Executions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Executions:
    """The number of executions of an instruction in a call of the program."""

    count: int = 1
    at_least: bool = False
    """True if a loop with an unknown trip count contains the instruction."""
    conditional: bool = False
    """True if a branch contains the instruction."""

    def in_loop(self, trip_count: int | None) -> Executions:
        """Return the executions inside a loop. An unknown trip count (None) counts as 1."""
        return Executions(
            self.count * (1 if trip_count is None else trip_count),
            self.at_least or trip_count is None,
            self.conditional,
        )

    def in_branch(self) -> Executions:
        """Return the executions inside a branch."""
        return Executions(self.count, self.at_least, True)


@dataclass(frozen=True)
class ExecutedInstruction:
    """An instruction, its computation, and its number of executions."""

    instruction: Instruction
    computation: Computation
    executions: Executions
    async_start: tuple[Instruction, Computation] | None = None
    """The `async-start` that runs the instruction, if it is in a computation of its own."""
    fusion: tuple[Instruction, Computation] | None = None
    """The fusion that contains the instruction, if any."""


def executed_instructions(module: Module) -> Iterator[ExecutedInstruction]:
    """Yield every instruction that runs, in program order."""
    yield from _walk(module, module.entry, Executions(), None, None)


def _walk(
    module: Module,
    computation: Computation,
    executions: Executions,
    async_start: tuple[Instruction, Computation] | None,
    fusion: tuple[Instruction, Computation] | None,
) -> Iterator[ExecutedInstruction]:
    for instruction in computation.instructions:
        yield ExecutedInstruction(instruction, computation, executions, async_start, fusion)
        called = instruction.called_computations()
        match instruction.opcode:
            case "while":
                count = trip_count(instruction, computation, module)
                inner, names = executions.in_loop(count), called.get("body", ())
                # The condition runs once more than the body.
                checks = executions.in_loop(None if count is None else count + 1)
                for name in called.get("condition", ()):
                    if name in module.computations:
                        condition = module.computations[name]
                        yield from _walk(module, condition, checks, async_start, None)
            case "conditional":
                inner = executions.in_branch()
                names = tuple(name for branches in called.values() for name in branches)
            case "call" | "fusion" | "async-start" | "custom-call":
                inner, names = executions, called.get("calls", ()) + called.get("to_apply", ())
            case _:
                continue
        here = (instruction, computation)
        start = here if instruction.opcode == "async-start" else async_start
        enclosing = here if instruction.opcode == "fusion" else fusion
        for name in names:
            if name in module.computations:
                yield from _walk(module, module.computations[name], inner, start, enclosing)
