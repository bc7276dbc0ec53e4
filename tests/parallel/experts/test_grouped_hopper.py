"""Tests of the Hopper path that need no Hopper GPU: padding and lowering."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.parallel.experts.matmul import expert_matmul
from drumline.parallel.grouped import hopper as grouped_hopper
from drumline.parallel.grouped import matmul as grouped_matmul
from drumline.parallel.grouped import rows as grouped_rows
from drumline.parallel.grouped.rows import group_rows
from tests.cases import rare

from .tokens import abstract_mesh


def test_padded_groups_have_every_pair_once_and_zeros_between() -> None:
    keys = np.array([2, 0, 2, 3, 2, 0], np.int32)  # 3 means no group
    rows = np.arange(1.0, 7.0, dtype=np.float32)[:, None]

    def round_trip(keys: jax.Array, rows: jax.Array) -> Any:
        groups = group_rows(keys, 3, 4)
        to_rows = groups.to_rows(rows)
        return groups.sizes, groups.counts, to_rows[:, 0], groups.to_pairs(to_rows)

    sizes, counts, to_rows, restored = jax.jit(round_trip)(keys, rows)
    np.testing.assert_array_equal(sizes, [4, 0, 4])
    np.testing.assert_array_equal(counts, [2, 0, 3])
    np.testing.assert_array_equal(to_rows, [2, 6, 0, 0, 1, 3, 5, 0, 0, 0, 0, 0])
    rows[3] = 0  # has no group, so its row is zero
    np.testing.assert_array_equal(restored, rows)


@pytest.mark.parametrize("groups", [255, 256, 70000])
def test_keys_are_sorted_for_any_number_of_groups(groups: int) -> None:
    """Test around the sizes that need a wider key type. The key `groups` means no group."""
    keys = np.array([groups - 1, 3, groups, 3, groups - 1, 0], np.int32)
    run = jax.jit(lambda keys: group_rows(keys, groups).pair)
    np.testing.assert_array_equal(run(keys), [5, 1, 3, 0, 4, len(keys)])


@pytest.mark.parametrize("weighted", [True, *rare(False)])
def test_the_scatter_of_tokens_equals_the_gather(weighted: bool) -> None:
    rng = np.random.default_rng(0)
    tokens, k, experts, width = 37, 3, 5, 384
    keys = rng.integers(0, experts + 1, (tokens, k), np.int32)  # some keys have no group
    keys[keys == 2] = 3  # one group has no token
    a = rng.normal(size=(tokens, width)).astype(jnp.bfloat16)
    gates = rng.normal(size=(tokens, k)).astype(np.float32)

    def scatter_and_gather(keys: jax.Array, a: jax.Array, gates: jax.Array | None) -> Any:
        groups = group_rows(keys.reshape(-1), experts, 16)
        ends = jnp.cumsum(groups.sizes)
        scattered = grouped_rows.scatter_tokens(
            a,
            gates,
            groups.row.reshape(tokens, k),
            jnp.stack([ends - groups.sizes + groups.counts, ends]),
            rows=len(groups.pair),
            interpret=True,
        )
        return scattered, groups.to_rows(a, k, gates), ends[-1]

    compiled = jax.jit(scatter_and_gather)
    scattered, expected, end = compiled(keys, a, gates if weighted else None)
    np.testing.assert_array_equal(scattered[:end], expected[:end])


@pytest.mark.parametrize(("d", "f"), [(256, 384), *rare((384, 512))])
def test_value_and_gradients_lower_for_a_hopper_gpu(
    monkeypatch: pytest.MonkeyPatch, d: int, f: int
) -> None:
    monkeypatch.setattr(grouped_matmul, "_on_hopper", lambda: True)

    def run(a: Any, w: Any, b: Any, gates: Any, dout: Any) -> Any:
        out, vjp_function = jax.vjp(lambda a, w, g: expert_matmul(a, w, b, g), a, w, gates)
        return out, vjp_function(dout)

    def shape_struct(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]

    bf16 = jnp.bfloat16
    operands = (
        shape_struct((512, d), bf16),
        shape_struct((8, d, f), bf16),
        shape_struct((512, 2), jnp.int32),
        shape_struct((512, 2), jnp.float32),
        shape_struct((512, f), bf16),
    )
    with jax.sharding.use_abstract_mesh(abstract_mesh((1,), "X")):
        text = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3  # x @ w, dy @ wᵀ, xᵀ dy
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 3  # x, dy, x times gates


def test_shapes_that_do_not_fit_the_tiles_use_the_loops() -> None:
    bf16 = jnp.dtype(jnp.bfloat16)
    assert grouped_hopper.supports(bf16, 2048, 1408)
    assert not grouped_hopper.supports(bf16, 128, 384)
    assert not grouped_hopper.supports(bf16, 256, 100)
    assert not grouped_hopper.supports(jnp.dtype(jnp.float32), 256, 256)


@pytest.mark.parametrize(("d", "f"), [(4096, 14336), (2048, 1408), (384, 512)])
def test_tiles_divide_the_supported_shapes(d: int, f: int) -> None:
    assert grouped_hopper.supports(jnp.dtype(jnp.bfloat16), d, f)
    for columns, depth in ((f, d), (d, f)):
        tiles = grouped_hopper.matmul_tiles(columns)
        remainders = (
            grouped_hopper.ROWS % tiles.rows,
            columns % tiles.columns,
            depth % tiles.depth,
        )
        assert remainders == (0, 0, 0)
    tiles = grouped_hopper.outer_tiles(f)
    remainders = (grouped_hopper.ROWS % tiles.depth, d % tiles.rows, f % tiles.columns)
    assert remainders == (0, 0, 0)
