"""A function and its arguments as StableHLO, which any process can compile.

Nothing has to be there: shapes with shardings on an `AbstractMesh` stand for arrays on devices.
"""

from __future__ import annotations

import contextlib
import io
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from drumline.inspect.compiling.axes import Axes
from drumline.inspect.compiling.meshes import (
    MeshLike,
    as_jax_meshes,
    axes_of_mesh,
    check_divides,
    check_mesh,
    meshes_in,
    place,
    same_mesh,
)
from drumline.inspect.mistakes import Mistake
from drumline.parallel.target import trace_for


@dataclass(frozen=True)
class LoweredProgram:
    """A program that is not compiled yet."""

    name: str
    code: bytes
    """StableHLO, with the source lines."""
    partitions: int
    meshes: tuple[Axes, ...]
    """The meshes that it names, the most telling first."""
    propagate_in: tuple[bool, ...]
    """Which arguments XLA may shard as it likes."""
    propagate_out: tuple[bool, ...]
    shardy: bool
    options: Mapping[str, Any]
    """Of the compiler, where the function brings them: `jax.jit(f, compiler_options=…)`."""
    lowered: Any
    """JAX's own value, to compile for the devices of this process."""


def lower(
    function: Any,
    arguments: tuple[Any, ...],
    *,
    mesh: MeshLike | None,
    platform: str | None,
    kind: str | None = None,
) -> LoweredProgram:
    """Trace a function and lower it, or take what is lowered already.

    Args:
        function: jitted or not, or a `jax.stages.Lowered`.
        arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        mesh: the mesh to trace under; without one, that of the context.
        platform: what to lower for; None for the devices of this process.
        kind: which TPU, where the platform is that: rings are written, and chosen, for the chip.

    Raises:
        Mistake: it does not trace, or the mesh does not divide an argument.
    """
    given = () if mesh is None else (axes_of_mesh(mesh),)
    if isinstance(function, jax.stages.Traced):
        function = function.lower(lowering_platforms=(platform,) if platform else None)
    if isinstance(function, jax.stages.Lowered):
        program = _read("the lowered program", function, ())
        same_mesh(list(program.meshes), given, "the lowered program is")
        return replace(program, meshes=_unique((*given, *program.meshes)))
    if not callable(function):
        raise Mistake(f"{function!r} is no function; give one, jitted or not, or a lowered program")
    name = getattr(function, "__name__", type(function).__name__)
    meshes = [None] if mesh is None else as_jax_meshes(mesh)
    refusals = []
    for candidate in meshes:
        context = contextlib.nullcontext() if candidate is None else _under(candidate)
        try:
            placed = arguments if candidate is None else place(arguments, candidate)
            check_divides(placed)
            check_mesh(placed, given)
            with context, trace_for("tpu" if platform == "tpu" else "other", kind):
                traced = _jitted(function).trace(*placed)
                lowered = traced.lower(lowering_platforms=platform and (platform,))
        except Mistake:
            raise
        except (Exception, SystemExit) as wrong:  # whatever the user's code or JAX raises
            refusals.append(wrong)
            continue
        return _read(name, lowered, (*given, *meshes_in(placed)))
    raise Mistake(f"{name} does not trace: {told(refusals[0])}") from refusals[0]


def _jitted(function: Callable[..., Any]) -> Any:
    return function if hasattr(function, "trace") else jax.jit(function)


def _under(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    if isinstance(mesh, Mesh):
        return jax.set_mesh(mesh)
    return jax.sharding.use_abstract_mesh(mesh)


def _read(name: str, lowered: jax.stages.Lowered, known: tuple[Axes, ...]) -> LoweredProgram:
    module: Any = lowered.compiler_ir("stablehlo")
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    head = _head(module)
    shardings = lowered._lowering.compile_args
    return LoweredProgram(
        name=name,
        code=bytecode.getvalue(),
        partitions=_partitions(module),
        meshes=_unique((*known, *_meshes(head))),
        propagate_in=tuple(_unspecified(s) for s in shardings["in_shardings"]),
        propagate_out=tuple(_unspecified(s) for s in shardings["out_shardings"]),
        shardy="sdy.mesh" in head or "mhlo.sharding" not in lowered.as_text(),
        options=dict(getattr(lowered._lowering, "_compiler_options_kvs", ())),
        lowered=lowered,
    )


def _unspecified(sharding: Any) -> bool:
    return type(sharding).__name__ in ("UnspecifiedValue", "AUTO")


def _partitions(module: Any) -> int:
    attributes = module.operation.attributes
    sizes = [
        int(re.findall(r"\d+", str(attributes[name]))[0])
        for name in ("mhlo.num_partitions", "mhlo.num_replicas")
        if name in attributes
    ]
    return max(sizes, default=1)


def _head(module: Any) -> str:
    """The meshes that the module begins with."""
    operations = (str(operation) for operation in _mesh_operations(module))
    return "\n".join(operations)


def _mesh_operations(module: Any) -> list[Any]:
    return [op for op in module.body.operations if op.operation.name == "sdy.mesh"]


def _meshes(head: str) -> list[Axes]:
    found = []
    for listed in re.findall(r"sdy\.mesh @\w+ = <\[([^\]]*)\]", head):
        axes = {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', listed)}
        if axes:
            found.append(axes)
    return found


def _unique(meshes: tuple[Axes, ...]) -> tuple[Axes, ...]:
    found: list[Axes] = []
    for axes in meshes:
        if axes and axes not in found:
            found.append(axes)
    return tuple(found)


_NOT_THE_USERS = ("/jax/", "/drumline/inspect/")


def told(wrong: BaseException) -> str:
    """An exception in one line, with the line of the user's code that it comes from."""
    frames = traceback.extract_tb(wrong.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _NOT_THE_USERS)]
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    lines = [line.strip() for line in str(wrong).splitlines() if line.strip()]
    return f"{type(wrong).__name__}: {lines[0][:300] if lines else ''}{place}"
