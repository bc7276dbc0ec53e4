"""What a run carries from step to step, and on which device each piece of it lies."""

# mypy: allow-untyped-calls

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from drumline.train.mistakes import Mistake
from drumline.train.recipe import Recipe


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a step changes."""

    params: Any
    opt_state: Any
    step: jax.Array
    """How many steps have been taken."""
    key: jax.Array
    """The run's random key, as plain words; the key of a step is this one with its number in."""


def begin(recipe: Recipe) -> State:
    """The first state. Pure: the same recipe gives the same bits on any mesh."""
    draw, run = jax.random.split(jax.random.key(recipe.settings.seed))
    params = recipe.model.init(draw)
    return State(
        params=params,
        opt_state=recipe.optimizer.init(params),
        step=jnp.zeros((), jnp.int32),
        key=jax.random.key_data(run),
    )


def layout(recipe: Recipe, mesh: Mesh | AbstractMesh) -> State:
    """A state of shapes, each with its place: parameters as the model says, their moments beside.

    Whatever in the optimizer's state has the name and the shape of a parameter lies like it; the
    rest is small and everywhere.
    """
    shapes = jax.eval_shape(lambda: begin(recipe))
    specs = _like(recipe.model.specs(), shapes.params)
    by_name = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_flatten_with_path(shapes.params)[0],
            jax.tree.leaves(specs, is_leaf=_is_spec),
            strict=True,
        )
    }

    def beside(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        ends = (path[start:] for start in range(len(path)))
        named = (by_name[end] for end in ends if end in by_name)
        spec = next((spec for shape, spec in named if shape == leaf.shape), PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    for path, (shape, spec) in by_name.items():
        _check(dotted(path), shape, spec, mesh)
    placed: State = jax.tree_util.tree_map_with_path(beside, shapes)
    return placed


def steps_taken(state: State) -> int:
    """Its number, as the devices know it: this waits for them."""
    return int(state.step.addressable_data(0))


def dotted(path: tuple[Any, ...]) -> str:
    """The place of a leaf in a tree, as a user writes it: `params.layer0.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def on_all(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The place of what every device has whole."""
    return NamedSharding(mesh, PartitionSpec())


def everywhere(mesh: Mesh, value: np.ndarray) -> jax.Array:
    """The same value on every device of every host."""
    return jax.make_array_from_callback(value.shape, on_all(mesh), lambda _: value)


def shardings(placed: Any) -> Any:
    """The places alone, in a tree like the shapes'."""
    return jax.tree.map(lambda leaf: leaf.sharding, placed)


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _like(specs: Any, shapes: Any) -> Any:
    """Specs for every leaf, from a tree of them or a prefix of one."""
    try:
        return jax.tree.map(
            lambda spec, below: jax.tree.map(lambda _: spec, below), specs, shapes, is_leaf=_is_spec
        )
    except ValueError as error:
        said = str(error).splitlines()[0]
        raise Mistake(f"specs: not a tree like the parameters: {said}") from None


def _check(
    name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> None:
    if len(spec) > len(shape):
        raise Mistake(f"specs: {name} has shape {shape} and {spec} names more dimensions")
    for dimension, axes in enumerate(spec):
        over = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        unknown = [axis for axis in over if axis not in mesh.shape]
        if unknown:
            there = ", ".join(mesh.shape)
            raise Mistake(f"specs: {name} lies over axis {unknown[0]!r}, the mesh has {there}")
        parts = prod(mesh.shape[axis] for axis in over)
        if shape[dimension] % parts:
            raise Mistake(
                f"specs: dimension {dimension} of {name} {shape} does not divide by {parts} devices"
            )
