"""The block on rings, the block on plain jit shardings and the block in float64 agree."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.parallel.block.transformer import BlockAxes, TransformerBlock
from drumline.parallel.block.weights import BlockShape
from tests.cases import rare
from tests.parallel.block import reference
from tests.parallel.einsum.products import compiled_text

SHAPE = BlockShape(width=32, heads=16, kv_heads=8, head_dim=4, hidden=48)
SHAPES = {
    "causal and gated": SHAPE,
    "full and plain": replace(SHAPE, causal=False, gated=False),
}
MESHES = ((1, 1), (2, 4), (1, 8))
BATCH, LENGTH = 2, 24
# The bounds for the accumulated rounding errors, in units of the last place of the largest entry.
# Some sixteen arrays are rounded in the forward pass and four times as many in the backward pass to
# a weight. Independent errors grow with the square root of their number.
FORWARD_ULPS, GRADIENT_ULPS = 4, 8


@cache
def random_block(shape: BlockShape, dtype: str) -> tuple[TransformerBlock, Any, Any]:
    """Return a block, activations and a cotangent, all in numpy and of unit size."""
    rng = np.random.default_rng(1)

    def draw(*size: int) -> Any:
        return np.asarray(rng.normal(size=size), jnp.dtype(dtype))

    abstract_block = eqx.filter_eval_shape(
        TransformerBlock, shape, key=jax.random.key(0), dtype=dtype
    )

    def weight(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        name, size = path[-1].name, leaf.shape
        if "norm" in name:
            # Random scales test the gradients on more than one scale.
            return np.asarray(rng.uniform(0.5, 1.5, size), leaf.dtype)
        fan_in = prod(size[:-1]) if name in ("output", "down") else size[0]
        return np.asarray(rng.normal(size=size) * fan_in**-0.5, leaf.dtype)

    block = jax.tree_util.tree_map_with_path(weight, abstract_block)
    size = (BATCH, LENGTH, shape.width)
    return block, draw(*size), draw(*size)


def float64_operands(shape: BlockShape, dtype: str) -> tuple[Any, Any, Any]:
    """Return the weights, the activations and the cotangent of `random_block` in float64."""
    block, x, g = random_block(shape, dtype)
    weights = {name: np.asarray(w, np.float64) for name, w in weights_by_name(block).items()}
    return weights, np.asarray(x, np.float64), np.asarray(g, np.float64)


@cache
def float64_output(shape: BlockShape, dtype: str) -> npt.NDArray[np.float64]:
    """Return the output in numpy's float64."""
    weights, x, _ = float64_operands(shape, dtype)
    output: npt.NDArray[np.float64] = reference.block(np, shape, weights, x)
    return output


@cache
def float64_gradients(shape: BlockShape, dtype: str) -> dict[str, Any]:
    """Return the gradients of x and all weights in float64."""

    def gradients_of(weights: Any, x: jax.Array, g: jax.Array) -> Any:
        return jax.vjp(lambda w, x: reference.block(jnp, shape, w, x), weights, x)[1](g)

    with jax.enable_x64(True):
        weights, dx = jax.device_get(jax.jit(gradients_of)(*float64_operands(shape, dtype)))
    return {**weights, "x": dx}


def weights_by_name(block: TransformerBlock) -> dict[str, jax.Array]:
    """Return the weights by the names of their fields."""
    leaves = jax.tree_util.tree_leaves_with_path(block)
    return {path[-1].name: leaf for path, leaf in leaves}


def ulps(result: Any, expected: npt.NDArray[np.float64], dtype: str) -> float:
    """Return the largest error in units of the last place of the largest entry."""
    error = np.abs(np.asarray(result, np.float64) - expected).max()
    return float(error / (float(jnp.finfo(dtype).eps) * np.abs(expected).max()))


def put_on_mesh(block: TransformerBlock, mesh: Mesh, *arrays: Any) -> Any:
    """Return a block and activations on the devices of a mesh."""
    sharding = NamedSharding(mesh, P("X", "Y"))
    return block.placed(mesh), *(jax.device_put(array, sharding) for array in arrays)


# With the rare cases, every mesh has both types, and several devices have each type and shape.
@pytest.mark.parametrize(
    ("sizes", "dtype", "name"),
    [
        ((2, 4), "float32", "causal and gated"),
        ((1, 8), "bfloat16", "full and plain"),
        *rare(
            ((1, 1), "bfloat16", "full and plain"),
            ((1, 1), "float32", "causal and gated"),
            ((2, 4), "bfloat16", "full and plain"),
            ((1, 8), "float32", "full and plain"),
            ((1, 8), "bfloat16", "causal and gated"),
        ),
    ],
)
def test_result_and_gradients_agree_with_float64(
    sizes: tuple[int, int], dtype: str, name: str
) -> None:
    shape = SHAPES[name]
    out, gradients = float64_output(shape, dtype), float64_gradients(shape, dtype)
    mesh = jax.make_mesh(sizes, ("X", "Y"))
    block, x, g = put_on_mesh(
        *random_block(shape, dtype)[:1], mesh, *random_block(shape, dtype)[1:]
    )
    with jax.set_mesh(mesh):
        for overlap in (True, False):

            def run(
                block: TransformerBlock, x: jax.Array, g: jax.Array, overlap: bool = overlap
            ) -> Any:
                y, pull = jax.vjp(lambda block, x: block(x, overlap=overlap), block, x)
                return y, *pull(g)

            y, d_block, dx = jax.jit(run)(block, x, g)
            assert (y.dtype, y.shape) == (x.dtype, x.shape)
            assert y.sharding.is_equivalent_to(x.sharding, 3)
            assert ulps(y, out, dtype) <= FORWARD_ULPS
            actual_gradients = {**weights_by_name(d_block), "x": dx}
            assert actual_gradients.keys() == gradients.keys()
            errors = {n: ulps(actual_gradients[n], gradients[n], dtype) for n in actual_gradients}
            assert max(errors.values()) <= GRADIENT_ULPS, errors


def test_rings_compile_to_permutes_and_plain_jit_to_collectives() -> None:
    mesh = jax.make_mesh((2, 4), ("X", "Y"))
    block, x = put_on_mesh(
        random_block(SHAPE, "float32")[0], mesh, random_block(SHAPE, "float32")[1]
    )
    collective = r" (all-gather|all-reduce|reduce-scatter|all-to-all)\("
    with jax.set_mesh(mesh):
        rings = compiled_text(lambda block, x: block(x), block, x)
        plain = compiled_text(lambda block, x: block(x, overlap=False), block, x)
    assert re.findall(collective, rings) == []
    # Each of the four projections is a loop with permutes in both directions.
    assert len(re.findall(r" collective-permute\(", rings)) == 4 * 2
    assert set(re.findall(collective, plain)) >= {"all-gather", "all-reduce"}
    assert "collective-permute" not in plain


def test_a_mesh_of_auto_axes_is_passed_as_an_argument() -> None:
    explicit = jax.make_mesh((2, 4), ("X", "Y"))
    mesh = Mesh(explicit.devices, explicit.axis_names)
    shape, dtype = SHAPES["full and plain"], "float32"
    block, x = put_on_mesh(random_block(shape, dtype)[0], mesh, random_block(shape, dtype)[1])
    for overlap in (True, False):
        run = jax.jit(
            lambda block, x, overlap=overlap: block(x, mesh=mesh, overlap=overlap),
        )
        assert ulps(run(block, x), float64_output(shape, dtype), dtype) <= FORWARD_ULPS


def test_a_new_block_preserves_the_scale_of_its_activations() -> None:
    mesh = jax.make_mesh((1, 1), ("X", "Y"))
    make = jax.jit(lambda key: TransformerBlock(SHAPE, key=key))
    block, x = put_on_mesh(make(jax.random.key(0)), mesh, random_block(SHAPE, "float32")[1])
    with jax.set_mesh(mesh):
        y = jax.jit(lambda block, x: block(x))(block, x)
    assert 1 < float(jnp.std(y)) < 2


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        (replace(SHAPE, kv_heads=2), (2, 24, 32), "kv_heads 2 cannot be divided between the 4"),
        (replace(SHAPE, hidden=50), (2, 24, 32), "hidden 50 cannot be divided between the 4"),
        (SHAPE, (2, 25, 32), "sequence length 25 cannot be divided between the 4"),
        (SHAPE, (3, 24, 32), "batch 3 cannot be divided between the 2 devices of axis 'X'"),
        (SHAPE, (2, 24, 31), "x must be [batch, sequence, 32], not (2, 24, 31)"),
    ],
)
def test_sizes_that_do_not_fit_the_mesh_are_rejected(
    shape: BlockShape, size: tuple[int, ...], message: str
) -> None:
    block = eqx.filter_eval_shape(TransformerBlock, shape, key=jax.random.key(0))
    mesh = jax.make_mesh((2, 4), ("X", "Y"))
    with pytest.raises(ValueError, match=re.escape(f"TransformerBlock: {message}")):
        block(jnp.zeros(size), mesh=mesh)


def test_a_mesh_without_the_axes_is_rejected() -> None:
    axes = BlockAxes(batch=None, model="model")
    block = eqx.filter_eval_shape(TransformerBlock, SHAPE, key=jax.random.key(0), axes=axes)
    with pytest.raises(ValueError, match=r"axis 'model' is not among the mesh's \('X', 'Y'\)"):
        block(jnp.zeros((2, 24, 32)), mesh=jax.make_mesh((2, 4), ("X", "Y")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "heads: 16 queries cannot share 3 kv_heads evenly"),
        ({"head_dim": 5}, "head_dim: 5 is odd"),
    ],
)
def test_invalid_heads_are_rejected(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SHAPE, **change)  # type: ignore[arg-type]


def test_without_rotary_positions_heads_need_no_pairs() -> None:
    shape = replace(SHAPE, head_dim=5, rotary_base=None)
    block = eqx.filter_eval_shape(TransformerBlock, shape, key=jax.random.key(0))
    assert block.query.shape == (32, 16, 5)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("X", "Y"))
    x = jax.ShapeDtypeStruct((2, 24, 32), jnp.float32)
    out = jax.eval_shape(lambda block, x: block(x, mesh=mesh), block, x)
    assert out.shape == x.shape
