"""Meshes and argument shapes in the forms that users write them.

A mesh is a JAX mesh, a mapping, or a text such as `X=2,Y=4`. An argument on the command line is a
text such as `bf16[1024,2048]@X,Y`: a dtype, dimensions, and after the @ the mesh axes of each
dimension (`X`, `X+Y` for both, `-` for none).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from drumline.chips import Slice, mesh_order
from drumline.errors import UserError
from drumline.inspect.compiling.axes import MeshAxes, checked_axes, format_mesh, parse_mesh
from drumline.inspect.hlo.text import dtype_name

MeshLike = Mesh | AbstractMesh | Mapping[str, int] | str


def mesh_axes(mesh: MeshLike) -> MeshAxes:
    """Return the names and sizes of a mesh's axes."""
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    if isinstance(mesh, Mesh | AbstractMesh):
        return {str(name): int(size) for name, size in mesh.shape.items()}
    if not isinstance(mesh, Mapping):
        raise UserError(f"the mesh is {mesh!r}; give a JAX mesh, or a text such as 'X=2,Y=4'")
    return checked_axes(mesh)


def jax_meshes(mesh: MeshLike) -> list[Mesh | AbstractMesh]:
    """Return the JAX meshes to try, in order.

    A mesh given by its sizes has Explicit axes, as from `jax.make_mesh`. If the function rejects
    those, Auto axes follow, whose shardings XLA propagates.
    """
    if isinstance(mesh, Mesh | AbstractMesh):
        return [mesh]
    axes = mesh_axes(mesh)
    return [
        AbstractMesh(tuple(axes.values()), tuple(axes), (axis_type,) * len(axes))
        for axis_type in (AxisType.Explicit, AxisType.Auto)
    ]


def device_coordinates(slice_type: Slice, axes: MeshAxes) -> list[list[int]]:
    """Return x, y, z and the core of each device of a mesh, in the device order of a training run.

    Raises:
        UserError: the slice has more or fewer devices.
    """
    device_count = prod(axes.values())
    cores = 1 if device_count <= slice_type.chips else slice_type.chip.cores or 1
    try:
        devices = mesh_order(slice_type.topology, slice_type.wraps, tuple(axes.values()), cores)
    except ValueError as error:
        raise UserError(f"{slice_type.name}: {error}") from error
    return [[*chip, *(0,) * (3 - len(chip)), core] for chip, core in devices]


def argument_meshes(arguments: Any) -> list[MeshAxes]:
    """Return the distinct meshes of the arguments' shardings."""
    meshes: list[MeshAxes] = []
    for leaf in jax.tree.leaves(arguments):
        sharding = _leaf_sharding(leaf)
        if isinstance(sharding, NamedSharding) and sharding.mesh.shape:
            axes = mesh_axes(sharding.mesh)
            if axes not in meshes:
                meshes.append(axes)
    return meshes


def _leaf_sharding(leaf: Any) -> Any:
    try:
        return getattr(leaf, "sharding", None)
    except TypeError:  # a PartitionSpec outside any mesh
        return None


def shard_arguments(arguments: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Put the shapes that have only a `PartitionSpec` on the mesh."""

    def shard(leaf: Any) -> Any:
        spec = getattr(leaf, "_sharding", None)
        if not isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(spec, PartitionSpec):
            return leaf
        struct: Any = jax.ShapeDtypeStruct
        return struct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shard, arguments)


def check_same_mesh(meshes: list[MeshAxes], requested: tuple[MeshAxes, ...], subject: str) -> None:
    """Check that a requested mesh is one of the meshes in use, if there are any.

    Raises:
        UserError: it is not.
    """
    for axes in requested:
        if meshes and axes not in meshes:
            actual = " and ".join(map(format_mesh, meshes))
            raise UserError(f"mesh={format_mesh(axes)}, but {subject} on {actual}")


def check_divides(arguments: tuple[Any, ...]) -> None:
    """Check that the mesh divides the sharded dimensions of all arguments.

    Raises:
        UserError: it does not.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        sharding = _leaf_sharding(leaf)
        if not isinstance(sharding, NamedSharding):
            continue
        sizes = mesh_axes(sharding.mesh)
        for dimension, entry in enumerate(sharding.spec):
            names = entry if isinstance(entry, tuple) else (entry,)
            shards = prod(sizes.get(name, 1) for name in names if isinstance(name, str))
            size = leaf.shape[dimension] if dimension < len(leaf.shape) else 1
            if size % shards:
                key = jax.tree_util.keystr(path[1:])
                raise UserError(
                    f"argument {path[0].idx + 1}{key} of shape {tuple(leaf.shape)}: dimension "
                    f"{dimension} of {size} does not divide by the {shards} devices along "
                    f"{' and '.join(str(name) for name in names)}"
                )


# Shapes on the command line ---------------------------------------------------------------------

_SHAPE = re.compile(r"\s*(?P<dtype>\w+)\[(?P<sizes>[\d,\s]*)\]\s*(?:@\s*(?P<axes>[\w,+\-\s]*))?")


def parse_shapes(texts: list[str], mesh: MeshAxes | None) -> tuple[Any, ...]:
    """Parse the arguments of a function.

    Raises:
        UserError: a text is malformed, or names an axis that the mesh does not have.
    """
    return tuple(_parse_shape(text, mesh) for text in texts)


def _parse_shape(text: str, mesh: MeshAxes | None) -> Any:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise UserError(
            f"--shapes {text!r}: write it as TYPE[SIZES]@AXES, as in bf16[1024,2048]@X,Y"
        )
    sizes = tuple(int(size) for size in re.findall(r"\d+", match["sizes"]))
    try:
        dtype = jnp.dtype(dtype_name(match["dtype"]))
    except TypeError:
        raise UserError(f"--shapes {text!r}: {match['dtype']} is not a type of arrays") from None
    spec = _parse_spec(text, match["axes"] or "", mesh)
    if len(spec) > len(sizes):
        raise UserError(f"--shapes {text!r} names {len(spec)} axes for {len(sizes)} dimensions")
    struct: Any = jax.ShapeDtypeStruct
    return struct(sizes, dtype, sharding=spec) if mesh is not None else struct(sizes, dtype)


def _parse_spec(text: str, axes: str, mesh: MeshAxes | None) -> PartitionSpec:
    entries: list[Any] = []
    for axis_names in axes.split(",") if axes.strip() else []:
        names = tuple(
            name.strip() for name in axis_names.split("+") if name.strip() not in ("", "-")
        )
        for name in names:
            if mesh is None:
                raise UserError(
                    f"--shapes {text!r} names the axis {name}: give the mesh with --mesh"
                )
            if name not in mesh:
                raise UserError(
                    f"--shapes {text!r}: the mesh {format_mesh(mesh)} has no axis {name}"
                )
        entries.append(names if len(names) > 1 else (names[0] if names else None))
    spec: Any = PartitionSpec
    return spec(*entries)  # type: ignore[no-any-return]
