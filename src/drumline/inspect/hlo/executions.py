"""Every instruction that runs in one call of a program, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drumline.inspect.hlo.loops import trips
from drumline.inspect.hlo.text import Computation, Instruction, Module


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
