"""What an example is.

An example is built from an `AbstractMesh` and gives a function and the shapes of its arguments, so
that a program for 256 devices can be looked at where there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from drumline.errors import UserError
from drumline.inspect.compiling.axes import Axes, shown
from drumline.inspect.compiling.meshes import MeshLike, axes_of_mesh

Built = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and its arguments as `jax.ShapeDtypeStruct`s with their shardings."""
Build = Callable[[AbstractMesh], Built]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A program to inspect, and where it is at home."""

    name: str
    what: str
    """One line about what it computes and what to see in it."""
    mesh: Mapping[str, int]
    """Names and sizes of the mesh axes; another mesh has to have the same names."""
    on: str
    """A slice of as many devices as the mesh has."""
    build: Build
    axis_type: AxisType = AxisType.Explicit
    """Explicit, as `jax.make_mesh` makes axes, or Auto, where XLA is to find the shardings."""

    def program(self, mesh: MeshLike | None = None) -> Built:
        """The function and its arguments, on the example's own mesh or on another.

        Raises:
            UserError: the other mesh has other axes or sizes that do not divide the example.
        """
        axes: Axes = dict(self.mesh) if mesh is None else axes_of_mesh(mesh)
        if axes.keys() != self.mesh.keys():
            raise UserError(
                f"the example {self.name} is written for the axes {', '.join(self.mesh)}, and the "
                f"mesh is {shown(axes)}: give it those names, such as {shown(dict(self.mesh))}"
            )
        kinds = (self.axis_type,) * len(axes)
        try:
            return self.build(AbstractMesh(tuple(axes.values()), tuple(axes), kinds))
        except Exception as wrong:  # whatever JAX or a model says of sizes that do not divide
            said = (str(wrong).splitlines() or [""])[0]
            raise UserError(
                f"the example {self.name} does not fit {shown(axes)}: {said}; its own mesh is "
                f"{shown(dict(self.mesh))}"
            ) from wrong
