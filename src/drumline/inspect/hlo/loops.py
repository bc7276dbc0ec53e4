"""How often a loop runs: as XLA has written it down, or read from the loop's own arithmetic.

A counted loop compares a number that the body increases with a bound that nothing changes. The TPU
compiler leaves no note of the count, so that arithmetic is all there is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline.inspect.hlo.text import Computation, Instruction, Module

_KNOWN = re.compile(r'"?known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
_THROUGH = {"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "opt-barrier"}


def trips(loop: Instruction, within: Computation, module: Module) -> int | None:
    """How often the body of a `while` runs; None where that depends on the data."""
    known = _KNOWN.search(loop.rest)
    if known is not None:
        return int(known[1])
    called = loop.called()
    if not called.get("condition") or not called.get("body"):
        return None
    counter = _Counter(loop, within, module, called["condition"][0], called["body"][0])
    return counter.trips()


@dataclass(frozen=True)
class _Counter:
    loop: Instruction
    within: Computation
    module: Module
    condition: str
    body: str

    def trips(self) -> int | None:
        condition = self.module.computations.get(self.condition)
        if condition is None:
            return None
        for compare, inside in self._comparisons(condition):
            direction = compare.attributes.get("direction", "")
            left = self._term(compare.operands[0], inside)
            right = self._term(compare.operands[1], inside)
            found = self._count(left, right, direction)
            if found is None:
                found = self._count(right, left, _MIRRORED.get(direction, ""))
            if found is not None:
                return found
        return None

    def _comparisons(
        self, condition: Computation
    ) -> list[tuple[Instruction, tuple[Computation, Instruction | None, Computation]]]:
        """The comparison that the condition gives, with where its operands are to be looked up."""
        root = _through(condition.root, condition)
        if root.opcode == "compare":
            return [(root, (condition, None, condition))]
        if root.opcode == "fusion":
            fused = self.module.computations.get((root.called().get("calls") or ("",))[0])
            inner = None if fused is None else _through(fused.root, fused)
            if fused is not None and inner is not None and inner.opcode == "compare":
                return [(inner, (fused, root, condition))]
        return []

    def _term(
        self, name: str, inside: tuple[Computation, Instruction | None, Computation]
    ) -> int | tuple[str, int] | None:
        """A number, or the place in the loop's tuple that a value comes from."""
        computation, fusion, outer = inside
        found = computation.by_name.get(name)
        if found is None:
            return None
        found = _through(found, computation)
        if found.opcode == "constant":
            return _integer(found)
        if found.opcode == "parameter" and fusion is not None:
            return self._term(fusion.operands[int(found.literal)], (outer, None, outer))
        if found.opcode == "get-tuple-element" and fusion is None:
            return ("carried", found.numbers("index")[0])
        return None

    def _count(
        self,
        counter: int | tuple[str, int] | None,
        bound: int | tuple[str, int] | None,
        direction: str,
    ) -> int | None:
        if not isinstance(counter, tuple) or bound is None:
            return None
        start, step = self._start(counter[1]), self._step(counter[1])
        end = bound if isinstance(bound, int) else self._unchanged(bound[1])
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

    def _start(self, place: int) -> int | None:
        """What the carried value is when the loop begins."""
        if not self.loop.operands:
            return None
        begins = self.within.by_name.get(self.loop.operands[0])
        if begins is None or begins.opcode != "tuple" or place >= len(begins.operands):
            return None
        first = self.within.by_name.get(begins.operands[place])
        first = None if first is None else _through(first, self.within)
        return _integer(first) if first is not None and first.opcode == "constant" else None

    def _unchanged(self, place: int) -> int | None:
        """The carried value, if the body hands it on as it is."""
        return self._start(place) if self._step(place) == 0 else None

    def _step(self, place: int) -> int | None:
        """What the body adds to the carried value in each turn."""
        body = self.module.computations.get(self.body)
        if body is None or body.root.opcode != "tuple" or place >= len(body.root.operands):
            return None
        value = body.by_name.get(body.root.operands[place])
        return None if value is None else self._added(_through(value, body), body, place, None)

    def _added(
        self, value: Instruction, inside: Computation, place: int, fusion: Instruction | None
    ) -> int | None:
        body = self.module.computations[self.body]
        if value.opcode == "fusion" and fusion is None:
            fused = self.module.computations.get((value.called().get("calls") or ("",))[0])
            if fused is None:
                return None
            return self._added(_through(fused.root, fused), fused, place, value)
        if self._is_carried(value, inside, place, fusion):
            return 0
        if value.opcode != "add":
            return None
        total, carried = 0, False
        for operand in value.operands:
            found = inside.by_name.get(operand)
            if found is None:
                return None
            found = _through(found, inside)
            if self._is_carried(found, inside, place, fusion):
                carried = True
                continue
            if found.opcode == "parameter" and fusion is not None:
                outer = body.by_name.get(fusion.operands[int(found.literal)])
                found = found if outer is None else _through(outer, body)
            number = _integer(found) if found.opcode == "constant" else None
            if number is None:
                return None
            total += number
        return total if carried else None

    def _is_carried(
        self, value: Instruction, inside: Computation, place: int, fusion: Instruction | None
    ) -> bool:
        if value.opcode == "parameter" and fusion is not None:
            body = self.module.computations[self.body]
            outer = body.by_name.get(fusion.operands[int(value.literal)])
            return outer is not None and self._is_carried(_through(outer, body), body, place, None)
        del inside
        return value.opcode == "get-tuple-element" and value.numbers("index") == (place,)


_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def _through(value: Instruction, inside: Computation) -> Instruction:
    """The value behind operations that only hand it on."""
    while value.opcode in _THROUGH and value.operands:
        behind = inside.by_name.get(value.operands[0])
        if behind is None:
            break
        value = behind
    return value


def _integer(constant: Instruction) -> int | None:
    found = re.fullmatch(r"\{?(-?\d+)\}?", constant.literal.strip())
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Executions:
    """How often an instruction runs in one call of the program."""

    count: int = 1
    at_least: bool = False
    conditional: bool = False

    def looped(self, turns: int | None) -> Executions:
        """Within a loop; None is an unknown number of turns."""
        return Executions(
            self.count * (1 if turns is None else turns),
            self.at_least or turns is None,
            self.conditional,
        )

    def maybe(self) -> Executions:
        """Within a branch."""
        return Executions(self.count, self.at_least, True)


@dataclass(frozen=True)
class Found:
    """An instruction, where it stands, and how often it runs."""

    instruction: Instruction
    within: Computation
    executions: Executions
    start: tuple[Instruction, Computation] | None = None
    """The `async-start` that starts it, where it stands in a computation of its own."""
    caller: tuple[Instruction, Computation] | None = None
    """The fusion that it stands within."""

    @property
    def fused(self) -> bool:
        """Whether it stands within a fusion."""
        return self.caller is not None


def walk(module: Module) -> Iterator[Found]:
    """Every instruction that runs, in order, with how often it does."""
    yield from _walk(module, module.entry, Executions(), None)


def _walk(
    module: Module,
    computation: Computation,
    executions: Executions,
    start: tuple[Instruction, Computation] | None,
    caller: tuple[Instruction, Computation] | None = None,
) -> Iterator[Found]:
    for instruction in computation.instructions:
        yield Found(instruction, computation, executions, start, caller)
        called = instruction.called()
        match instruction.opcode:
            case "while":
                turns = trips(instruction, computation, module)
                inside, names = executions.looped(turns), called.get("body", ())
                # The condition is asked once more than the body runs.
                asked = executions.looped(None if turns is None else turns + 1)
                for name in called.get("condition", ()):
                    if name in module.computations:
                        yield from _walk(module, module.computations[name], asked, start)
            case "conditional":
                inside = executions.maybe()
                names = tuple(name for some in called.values() for name in some)
            case "call" | "fusion" | "async-start" | "custom-call":
                inside, names = executions, called.get("calls", ()) + called.get("to_apply", ())
            case _:
                continue
        begun = (instruction, computation) if instruction.opcode == "async-start" else start
        fusion = (instruction, computation) if instruction.opcode == "fusion" else caller
        for name in names:
            if name in module.computations:
                yield from _walk(module, module.computations[name], inside, begun, fusion)
