"""Fusions taken apart again, so that what is read is what the program does, and not how a CPU's
compiler grouped it.
"""

from __future__ import annotations

from dataclasses import replace

from drumline.inspect.hlo.text import Computation, Instruction, Module


def without_fusions(module: Module) -> Module:
    """The same program with the instructions of every fusion in the fusion's place."""
    if not any(
        one.opcode == "fusion" for c in module.computations.values() for one in c.instructions
    ):
        return module
    done: dict[str, Computation] = {}
    for name in module.computations:
        _inline(name, module, done)
    return replace(module, computations=done, entry=done[module.entry.name])


def _inline(name: str, module: Module, done: dict[str, Computation]) -> Computation:
    if name in done:
        return done[name]
    given = module.computations[name]
    instructions: list[Instruction] = []
    for one in given.instructions:
        called = (one.called().get("calls") or ("",))[0] if one.opcode == "fusion" else ""
        if called in module.computations:
            instructions += _in_place(one, _inline(called, module, done))
        else:
            instructions.append(one)
    done[name] = Computation(name, tuple(instructions))
    return done[name]


def _in_place(fusion: Instruction, inner: Computation) -> list[Instruction]:
    """The fusion's instructions under names of their own; its root has the fusion's name."""
    names = {
        one.name: fusion.operands[int(one.literal)]
        if one.opcode == "parameter"
        else f"{fusion.name}/{one.name}"
        for one in inner.instructions
    }
    root = inner.root
    if root.opcode == "parameter":
        return [replace(fusion, opcode="bitcast", operands=(names[root.name],))]
    names[root.name] = fusion.name
    return [
        replace(
            one,
            name=names[one.name],
            operands=tuple(names.get(operand, operand) for operand in one.operands),
            is_root=one is root and fusion.is_root,
            place=one.place if one.place.op_name else fusion.place,
        )
        for one in inner.instructions
        if one.opcode != "parameter"
    ]
