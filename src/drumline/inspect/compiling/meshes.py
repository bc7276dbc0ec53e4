"""Meshes as a user gives them: JAX's own, a mapping, or `X=2,Y=4`."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from drumline.chips import Slice, mesh_order
from drumline.inspect.compiling.axes import Axes, checked, read_mesh, shown
from drumline.inspect.mistakes import Mistake

MeshLike = Mesh | AbstractMesh | Mapping[str, int] | str


def axes_of_mesh(mesh: MeshLike) -> Axes:
    """The names and sizes of a mesh."""
    if isinstance(mesh, str):
        return read_mesh(mesh)
    if isinstance(mesh, Mesh | AbstractMesh):
        return {str(name): int(size) for name, size in mesh.shape.items()}
    if not isinstance(mesh, Mapping):
        raise Mistake(f"the mesh is {mesh!r}; give a jax Mesh, or a text such as 'X=2,Y=4'")
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
        Mistake: the slice has more or fewer devices.
    """
    devices = prod(axes.values())
    cores = 1 if devices <= on.chips else on.chip.cores or 1
    try:
        laid = mesh_order(on.topology, on.wraps, tuple(axes.values()), cores)
    except ValueError as wrong:
        raise Mistake(f"{on.name}: {wrong}") from wrong
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
        Mistake: with both meshes.
    """
    same_mesh(meshes_in(arguments), given, "the arguments lie")


def same_mesh(found: list[Axes], given: tuple[Axes, ...], what: str) -> None:
    """Refuse a given mesh that is none of those that were found, if any were.

    Raises:
        Mistake: with both.
    """
    for axes in given:
        if found and axes not in found:
            raise Mistake(
                f"mesh={shown(axes)}, but {what} on {' and '.join(shown(one) for one in found)}"
            )


def check_divides(arguments: tuple[Any, ...]) -> None:
    """Refuse arguments whose dimensions their mesh does not divide.

    Raises:
        Mistake: with the argument, the dimension and the axes.
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
                raise Mistake(
                    f"argument {path[0].idx + 1}{where} of shape {tuple(leaf.shape)}: dimension "
                    f"{number} of {size} does not divide by the {parts} devices along "
                    f"{' and '.join(str(name) for name in used)}"
                )
