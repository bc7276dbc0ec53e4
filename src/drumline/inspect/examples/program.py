"""The type of an example program.

An example is built for an `AbstractMesh` and consists of a function and the shapes of its
arguments. So a program for 256 devices can be inspected without any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from drumline.errors import UserError
from drumline.inspect.compiling.axes import MeshAxes, format_mesh
from drumline.inspect.compiling.meshes import MeshLike, mesh_axes

Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and its arguments as `jax.ShapeDtypeStruct`s with shardings."""
ProgramBuilder = Callable[[AbstractMesh], Program]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A program to inspect, with its mesh and slice."""

    name: str
    description: str
    """One line about the computation and its communication."""
    mesh: Mapping[str, int]
    """Names and sizes of the mesh axes. Another mesh must have the same names."""
    on: str
    """A slice with as many devices as the mesh."""
    build: ProgramBuilder
    axis_type: AxisType = AxisType.Explicit
    """Explicit, as from `jax.make_mesh`, or Auto, where XLA propagates shardings."""

    def program(self, mesh: MeshLike | None = None) -> Program:
        """Return the function and its arguments, on the example's own mesh or on another.

        Raises:
            UserError: the other mesh has other axes or sizes that do not divide the example.
        """
        axes: MeshAxes = dict(self.mesh) if mesh is None else mesh_axes(mesh)
        own_mesh = format_mesh(dict(self.mesh))
        if axes.keys() != self.mesh.keys():
            raise UserError(
                f"the example {self.name} is written for the axes {', '.join(self.mesh)}, and the "
                f"mesh is {format_mesh(axes)}: give it those names, such as {own_mesh}"
            )
        axis_types = (self.axis_type,) * len(axes)
        try:
            return self.build(AbstractMesh(tuple(axes.values()), tuple(axes), axis_types))
        except Exception as error:  # whatever JAX or a model raises for sizes that do not divide
            reason = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"the example {self.name} does not fit {format_mesh(axes)}: {reason}; its own mesh "
                f"is {own_mesh}"
            ) from error
