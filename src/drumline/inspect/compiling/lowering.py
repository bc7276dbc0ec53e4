"""Lower a function and its arguments to StableHLO, which any process can compile.

No devices are needed: shapes with shardings on an `AbstractMesh` stand for arrays.
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

from drumline.errors import UserError
from drumline.inspect.compiling.axes import MeshAxes
from drumline.inspect.compiling.meshes import (
    MeshLike,
    argument_meshes,
    check_divides,
    check_same_mesh,
    jax_meshes,
    mesh_axes,
    shard_arguments,
)
from drumline.parallel.target import trace_for


@dataclass(frozen=True)
class LoweredProgram:
    """A lowered program that is not compiled yet."""

    name: str
    code: bytes
    """StableHLO with source lines."""
    partitions: int
    meshes: tuple[MeshAxes, ...]
    """The meshes of the program. The requested mesh comes first."""
    propagate_in: tuple[bool, ...]
    """True for each argument whose sharding XLA may choose."""
    propagate_out: tuple[bool, ...]
    """True for each result whose sharding XLA may choose."""
    shardy: bool
    options: Mapping[str, Any]
    """The function's own compiler options: `jax.jit(f, compiler_options=…)`."""
    lowered: Any
    """The `jax.stages.Lowered`, to compile for the devices of this process."""


def lower(
    function: Any,
    arguments: tuple[Any, ...],
    *,
    mesh: MeshLike | None,
    platform: str | None,
    device_kind: str | None = None,
) -> LoweredProgram:
    """Trace and lower a function, or read one that is lowered already.

    Args:
        function: a function, jitted or not, or a `jax.stages.Lowered`.
        arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        mesh: the mesh to trace under. The default is that of the context.
        platform: the platform to lower for. The default is that of this process.
        device_kind: the kind of TPU, which selects the implementation of rings.

    Raises:
        UserError: the function does not trace, or the mesh does not divide an argument.
    """
    requested = () if mesh is None else (mesh_axes(mesh),)
    if isinstance(function, jax.stages.Traced):
        function = function.lower(lowering_platforms=(platform,) if platform else None)
    if isinstance(function, jax.stages.Lowered):
        program = _read_lowered("the lowered program", function, ())
        check_same_mesh(list(program.meshes), requested, "the lowered program is")
        return replace(program, meshes=_distinct((*requested, *program.meshes)))
    if not callable(function):
        raise UserError(
            f"{function!r} is not a function; give a function, jitted or not, or a lowered program"
        )
    name = getattr(function, "__name__", type(function).__name__)
    errors: list[BaseException] = []
    for jax_mesh in [None] if mesh is None else jax_meshes(mesh):
        try:
            sharded = arguments if jax_mesh is None else shard_arguments(arguments, jax_mesh)
            check_divides(sharded)
            check_same_mesh(argument_meshes(sharded), requested, "the arguments lie")
        except UserError:
            raise
        except Exception as error:  # JAX rejects the mesh
            errors.append(error)
            continue
        context = contextlib.nullcontext() if jax_mesh is None else _mesh_context(jax_mesh)
        try:
            with context, trace_for("tpu" if platform == "tpu" else "other", device_kind):
                traced = _jitted(function).trace(*sharded)
                lowered = traced.lower(lowering_platforms=platform and (platform,))
        except (Exception, SystemExit) as error:  # whatever the user's code or JAX raises
            errors.append(error)
            continue
        return _read_lowered(name, lowered, (*requested, *argument_meshes(sharded)))
    raise UserError(f"{name} does not trace: {describe_error(errors[0])}") from errors[0]


def _jitted(function: Callable[..., Any]) -> Any:
    return function if hasattr(function, "trace") else jax.jit(function)


def _mesh_context(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    if isinstance(mesh, Mesh):
        return jax.set_mesh(mesh)
    return jax.sharding.use_abstract_mesh(mesh)


def _read_lowered(
    name: str, lowered: jax.stages.Lowered, meshes: tuple[MeshAxes, ...]
) -> LoweredProgram:
    module: Any = lowered.compiler_ir("stablehlo")
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    mesh_text = "\n".join(
        str(operation)
        for operation in module.body.operations
        if operation.operation.name == "sdy.mesh"
    )
    compile_args = lowered._lowering.compile_args
    return LoweredProgram(
        name=name,
        code=bytecode.getvalue(),
        partitions=_partition_count(module),
        meshes=_distinct((*meshes, *_parse_meshes(mesh_text))),
        propagate_in=tuple(map(_is_unspecified, compile_args["in_shardings"])),
        propagate_out=tuple(map(_is_unspecified, compile_args["out_shardings"])),
        shardy="sdy.mesh" in mesh_text or "mhlo.sharding" not in lowered.as_text(),
        options=dict(getattr(lowered._lowering, "_compiler_options_kvs", ())),
        lowered=lowered,
    )


def _is_unspecified(sharding: Any) -> bool:
    return type(sharding).__name__ in ("UnspecifiedValue", "AUTO")


def _partition_count(module: Any) -> int:
    attributes = module.operation.attributes
    sizes = [
        int(re.findall(r"\d+", str(attributes[name]))[0])
        for name in ("mhlo.num_partitions", "mhlo.num_replicas")
        if name in attributes
    ]
    return max(sizes, default=1)


def _parse_meshes(mesh_text: str) -> list[MeshAxes]:
    meshes = []
    for axes_text in re.findall(r"sdy\.mesh @\w+ = <\[([^\]]*)\]", mesh_text):
        axes = {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', axes_text)}
        if axes:
            meshes.append(axes)
    return meshes


def _distinct(meshes: tuple[MeshAxes, ...]) -> tuple[MeshAxes, ...]:
    distinct: list[MeshAxes] = []
    for axes in meshes:
        if axes and axes not in distinct:
            distinct.append(axes)
    return tuple(distinct)


_LIBRARY_PATHS = ("/jax/", "/drumline/inspect/")


def describe_error(error: BaseException) -> str:
    """Describe an exception in a single line, with the line of the user's code that caused it."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame for frame in frames if not any(path in frame.filename for path in _LIBRARY_PATHS)
    ]
    source = f" at {user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}{source}"
