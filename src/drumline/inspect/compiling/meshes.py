"""Meshes as a user gives them: JAX's own, a mapping, or `X=2,Y=4`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from drumline.chips import Slice, lay_mesh
from drumline.errors import UserError
from drumline.inspect.compiling.axes import Axes, checked, read_mesh, shown
from drumline.inspect.hlo.text import dtype_name

MeshLike = Mesh | AbstractMesh | Mapping[str, int] | str


def axes_of_mesh(mesh: MeshLike) -> Axes:
    """The names and sizes of a mesh."""
    if isinstance(mesh, str):
        return read_mesh(mesh)
    if isinstance(mesh, Mesh | AbstractMesh):
        return {str(name): int(size) for name, size in mesh.shape.items()}
    if not isinstance(mesh, Mapping):
        raise UserError(f"the mesh is {mesh!r}; give a jax Mesh, or a text such as 'X=2,Y=4'")
    return checked(mesh)


def as_jax_meshes(mesh: MeshLike) -> list[Mesh | AbstractMesh]:
    """The mesh as JAX has it, in the order to try.

    A mesh that is given by its sizes has Explicit axes, as `jax.make_mesh` makes them; where the
    function will not have those, Auto ones, whose shardings XLA propagates.
    """
    if isinstance(mesh, Mesh | AbstractMesh):
        return [mesh]
    axes = axes_of_mesh(mesh)
    return [
        AbstractMesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes))
        for kind in (AxisType.Explicit, AxisType.Auto)
    ]


def places_on(on: Slice, axes: Axes) -> list[list[int]]:
    """The chip, x, y and z, and the core of it, for each device of a mesh, as a run lays it.

    Raises:
        UserError: the slice has more or fewer devices.
    """
    devices = prod(axes.values())
    cores = 1 if devices <= on.chips else on.chip.cores or 1
    try:
        laid = lay_mesh(on.topology, on.wraps, tuple(axes.values()), cores)
    except ValueError as wrong:
        raise UserError(f"{on.name}: {wrong}") from wrong
    return [[*chip, *(0,) * (3 - len(chip)), core] for chip, core in laid]


def meshes_in(arguments: Any) -> list[Axes]:
    """The meshes that arguments are placed on."""
    found: list[Axes] = []
    for leaf in jax.tree.leaves(arguments):
        sharding = _sharding(leaf)
        if isinstance(sharding, NamedSharding) and sharding.mesh.shape:
            axes = axes_of_mesh(sharding.mesh)
            if axes not in found:
                found.append(axes)
    return found


def _sharding(leaf: Any) -> Any:
    try:
        return getattr(leaf, "sharding", None)
    except TypeError:  # a PartitionSpec alone, and no mesh around it yet
        return None


def place(arguments: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Shapes that name a `PartitionSpec` alone, on the mesh."""

    def placed(leaf: Any) -> Any:
        spec = getattr(leaf, "_sharding", None)
        if not isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(spec, PartitionSpec):
            return leaf
        struct: Any = jax.ShapeDtypeStruct
        return struct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, arguments)


def check_mesh(arguments: Any, given: tuple[Axes, ...]) -> None:
    """Refuse arguments that lie on another mesh than the one that is given.

    Raises:
        UserError: with both meshes.
    """
    same_mesh(meshes_in(arguments), given, "the arguments lie")


def same_mesh(found: list[Axes], given: tuple[Axes, ...], what: str) -> None:
    """Refuse a given mesh that is none of those that were found, if any were.

    Raises:
        UserError: with both.
    """
    for axes in given:
        if found and axes not in found:
            raise UserError(
                f"mesh={shown(axes)}, but {what} on {' and '.join(shown(one) for one in found)}"
            )


def check_divides(arguments: tuple[Any, ...]) -> None:
    """Refuse arguments whose dimensions their mesh does not divide.

    Raises:
        UserError: with the argument, the dimension and the axes.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        sharding = _sharding(leaf)
        if not isinstance(sharding, NamedSharding):
            continue
        sizes = axes_of_mesh(sharding.mesh)
        for number, names in enumerate(sharding.spec):
            used = names if isinstance(names, tuple) else (names,)
            parts = prod(sizes.get(name, 1) for name in used if isinstance(name, str))
            size = leaf.shape[number] if number < len(leaf.shape) else 1
            if size % parts:
                where = jax.tree_util.keystr(path[1:])
                raise UserError(
                    f"argument {path[0].idx + 1}{where} of shape {tuple(leaf.shape)}: dimension "
                    f"{number} of {size} does not divide by the {parts} devices along "
                    f"{' and '.join(str(name) for name in used)}"
                )


_WRITTEN = re.compile(r"\s*(?P<dtype>\w+)\[(?P<sizes>[\d,\s]*)\]\s*(?:@\s*(?P<axes>[\w,+\-\s]*))?")


def read_shapes(written: list[str], mesh: Axes | None) -> tuple[Any, ...]:
    """The arguments of a function.

    Raises:
        UserError: one is written otherwise, or names an axis that the mesh has not.
    """
    return tuple(_read(text, mesh) for text in written)


def _read(text: str, mesh: Axes | None) -> Any:
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise UserError(
            f"--shapes {text!r}: write it as TYPE[SIZES]@AXES, as in bf16[1024,2048]@X,Y"
        )
    sizes = tuple(int(size) for size in re.findall(r"\d+", found["sizes"]))
    try:
        dtype = jnp.dtype(dtype_name(found["dtype"]))
    except TypeError:
        raise UserError(f"--shapes {text!r}: {found['dtype']} is no type of arrays") from None
    spec = _spec(text, found["axes"] or "", mesh)
    if len(spec) > len(sizes):
        raise UserError(f"--shapes {text!r} names {len(spec)} axes for {len(sizes)} dimensions")
    struct: Any = jax.ShapeDtypeStruct
    return struct(sizes, dtype, sharding=spec) if mesh is not None else struct(sizes, dtype)


def _spec(text: str, axes: str, mesh: Axes | None) -> PartitionSpec:
    parts: list[Any] = []
    for part in axes.split(",") if axes.strip() else []:
        names = tuple(name.strip() for name in part.split("+") if name.strip() not in ("", "-"))
        for name in names:
            if mesh is None:
                raise UserError(
                    f"--shapes {text!r} names the axis {name}: give the mesh with --mesh"
                )
            if name not in mesh:
                raise UserError(f"--shapes {text!r}: the mesh {shown(mesh)} has no axis {name}")
        parts.append(names if len(names) > 1 else (names[0] if names else None))
    spec: Any = PartitionSpec
    return spec(*parts)  # type: ignore[no-any-return]
