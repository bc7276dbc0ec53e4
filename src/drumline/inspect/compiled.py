"""A function compiled for the machine that a report is about, by the best compiler there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.errors import UserError
from drumline.inspect.compiling.meshes import MeshLike
from drumline.inspect.compiling.programs import Compiler, InspectedProgram, compiled_program
from drumline.inspect.cost.machines import Machine


def compiled_for(
    target: Machine | None,
    fn: Any,
    args: tuple[Any, ...],
    *,
    mesh: MeshLike | None,
    compiler: Compiler,
    options: Mapping[str, Any] | None = None,
) -> InspectedProgram:
    """The program that a compiler makes of a function for a machine.

    A GPU's compiler is that of this process, if it has one. The TPU's knows one slice alone: for
    several, and where there is neither, emulated CPU devices stand in.

    Args:
        target: the machine, None for what is here.
        fn: the function, or what was lowered or compiled of it.
        args: its arguments, or their shapes.
        mesh: the mesh, where the arguments do not bring it.
        compiler: whose.
        options: the TPU compiler's own, by name, as `compile(compiler_options=…)` takes them.

    Raises:
        UserError: as `compiled_program`, and where a compiler is asked for what it cannot do.
    """
    one_slice = None if target is None or target.slices > 1 else target.slice
    if compiler == "tpu" and target is not None and one_slice is None:
        raise UserError(f"the TPU's compiler knows single slices of TPUs, and not {target.name}")
    if compiler == "auto" and target is not None and target.slice is not None and not one_slice:
        compiler = "cpu"
    return compiled_program(fn, args, mesh=mesh, on=one_slice, compiler=compiler, options=options)
