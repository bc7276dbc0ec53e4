"""The state of a training run, and the sharding of its arrays."""

# mypy: allow-untyped-calls

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from drumline.errors import UserError
from drumline.train.recipe import Recipe


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that a step changes."""

    params: Any
    opt_state: Any
    step: jax.Array
    """The number of steps taken."""
    key: jax.Array
    """The random key of the run, as raw data. A step folds its number into this key."""


def initial_state(recipe: Recipe, params: Any = None) -> State:
    """Return the initial state of a recipe. Its bits do not depend on the mesh.

    `params` replaces the parameters that the model draws.
    """
    init_key, run_key = jax.random.split(jax.random.key(recipe.settings.seed))
    params = _without_weak_types(recipe.model.init(init_key) if params is None else params)
    return State(
        params=params,
        opt_state=_without_weak_types(recipe.optimizer.init(params)),
        step=jnp.zeros((), jnp.int32),
        key=jax.random.key_data(run_key),
    )


def pretrained_params(recipe: Recipe, mesh: Mesh, shapes: Any) -> Any:
    """Return the parameters of `init_from` with these types and shardings, None without it."""
    if recipe.init_from is None:
        return None

    def place(path: tuple[Any, ...], shape: Any, array: Any) -> jax.Array:
        if np.shape(array) != shape.shape:
            name = path_name(path) or "params"
            raise UserError(
                f"init_from: {name} is {np.shape(array)}, but the model has {shape.shape}"
            )
        if isinstance(array, jax.Array):
            return jnp.asarray(jax.device_put(array, shape.sharding), shape.dtype)
        return jax.make_array_from_callback(
            shape.shape, shape.sharding, lambda index: np.array(array[index], shape.dtype)
        )

    try:
        return jax.tree_util.tree_map_with_path(place, shapes, recipe.init_from(mesh))
    except ValueError as error:
        message = str(error).partition("\n")[0]
        raise UserError(f"init_from: the parameters do not fit the model: {message}") from None


def _without_weak_types(tree: Any) -> Any:
    """Return the arrays of a tree with types that take part in promotion, as in a checkpoint.

    `jnp.full(8, 0.3)` has a weak type. A step that starts with it is another program than a step
    that starts with a restored array, and may compute in another precision.
    """
    arrays = jax.tree.map(jnp.asarray, tree)
    return jax.tree.map(lambda array: lax.convert_element_type(array, array.dtype), arrays)


def abstract_state(recipe: Recipe, mesh: Mesh | AbstractMesh) -> State:
    """Return the state as shapes with their shardings.

    An array of the optimizer with the name and the shape of a parameter is sharded like it. If the
    parameters are a single array, it has no name, and only the shape counts. All other arrays of
    the optimizer are small, and replicated.
    """
    shapes = jax.eval_shape(lambda: initial_state(recipe))
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes.params)
    specs = jax.tree.leaves(_expand_prefix(recipe.model.specs(), shapes.params), is_leaf=_is_spec)
    by_path = {path: (leaf.shape, spec) for (path, leaf), spec in zip(leaves, specs, strict=True)}
    for path, (shape, spec) in by_path.items():
        _check_spec(path_name(path) or "params", shape, spec, mesh)

    def shard(leaf: Any, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def shard_moment(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
        suffixes = (path[start:] for start in range(len(path) + 1))
        candidates = (by_path[suffix] for suffix in suffixes if suffix in by_path)
        specs = (spec for shape, spec in candidates if shape == leaf.shape)
        return shard(leaf, next(specs, PartitionSpec()))

    return State(
        params=jax.tree.unflatten(tree, map(shard, (leaf for _, leaf in leaves), specs)),
        opt_state=jax.tree_util.tree_map_with_path(shard_moment, shapes.opt_state),
        step=shard(shapes.step, PartitionSpec()),
        key=shard(shapes.key, PartitionSpec()),
    )


def step_number(state: State) -> int:
    """Return the number of steps taken. This waits for the devices."""
    return int(state.step.addressable_data(0))


def describe_weights(params: Any, mesh: Mesh) -> str:
    """Return the norm of the initial weights, and their smallest and largest deviation."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]

    def measure(leaf: jax.Array) -> jax.Array:
        square = jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32)))
        real = jnp.real(leaf).astype(jnp.float32)
        # Without its minimum, a constant array has a deviation of exactly zero.
        return jnp.stack([square, jnp.std(real - jnp.min(real))])

    def measure_all(params: Any) -> jax.Array:
        return jnp.stack([measure(leaf) for leaf in jax.tree.leaves(params)])

    compiled = jax.jit(measure_all, out_shardings=replicated(mesh))
    squares, deviations = np.asarray(compiled(params).addressable_data(0), np.float64).T
    extremes = " to ".join(
        f"{deviations[index]:.3g} ({path_name(leaves[index][0]) or 'params'})"
        for index in (deviations.argmin(), deviations.argmax())
    )
    norm = np.sqrt(squares.sum())
    return f"initial weights: norm {norm:.4g}, standard deviation of an array from {extremes}"


def path_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf in a tree, as in `params.layer0.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of an array that every device has in full."""
    return NamedSharding(mesh, PartitionSpec())


def replicate(mesh: Mesh, value: np.ndarray) -> jax.Array:
    """Put a value on every device of every host."""
    return jax.make_array_from_callback(value.shape, replicated(mesh), lambda _: value)


def shardings(abstract: Any) -> Any:
    """Return the shardings of a tree of shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _expand_prefix(specs: Any, shapes: Any) -> Any:
    """Return a spec for every leaf, from a tree of specs or its prefix."""
    try:
        return jax.tree.map(
            lambda spec, subtree: jax.tree.map(lambda _: spec, subtree),
            specs,
            shapes,
            is_leaf=_is_spec,
        )
    except ValueError as error:
        message = str(error).splitlines()[0]
        raise UserError(f"specs: the tree does not match the parameters: {message}") from None


def _check_spec(
    name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> None:
    if len(spec) > len(shape):
        raise UserError(f"specs: {name} has shape {shape}, but {spec} has more dimensions")
    for dimension, entry in enumerate(spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        unknown = [axis for axis in axes if axis not in mesh.shape]
        if unknown:
            names = ", ".join(mesh.shape)
            raise UserError(
                f"specs: {name} is sharded over axis {unknown[0]!r}, but the mesh has {names}"
            )
        shards = prod(mesh.shape[axis] for axis in axes)
        if shape[dimension] % shards:
            raise UserError(
                f"specs: dimension {dimension} of {name} {shape} is not divisible by {shards} "
                "devices"
            )
