"""Rows without a slip of the pen, and a program that does what they say."""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from drumline.chips import slice_of
from published import decoder, models, rows
from published.attention import Flash, Kernel, attention, visited_fraction
from published.experts import masks
from tests.cases import rare

EVERY_ROW = pytest.mark.parametrize("row", rows.ROWS.values(), ids=rows.ROWS)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (models.LLAMA_8B, 8.03),
        (models.LLAMA_70B, 70.6),
        (models.LLAMA_405B, 405.9),
        (models.MISTRAL_7B, 7.24),
        (models.MIXTRAL_8X7B, 46.7),
        (models.MIXTRAL_8X22B, 140.6),
        (models.GPT3_175B, 174.8),
        (models.GEMMA3_12B, 11.77),
    ],
    ids=lambda value: value.name if isinstance(value, models.Model) else "",
)
def test_a_model_has_the_parameters_its_name_promises(model: models.Model, billions: float) -> None:
    assert model.parameters() / 1e9 == pytest.approx(billions, rel=2e-3)
    leaves = jax.tree.leaves(
        decoder.weights_of(model), is_leaf=lambda leaf: isinstance(leaf, decoder.Weight)
    )
    assert sum(math.prod(weight.shape) for weight in leaves) == model.parameters()


@EVERY_ROW
def test_seconds_and_printed_tflops_of_a_row_agree(row: rows.PublishedStep) -> None:
    chips = slice_of(row.slice).chips * row.slices
    flops = row.model.flops(row.tokens, row.length, causal=row.half_attention)
    assert flops / chips / row.seconds / 1e12 == pytest.approx(row.tflops, rel=2e-3)


@EVERY_ROW
def test_a_row_trains_the_tokens_it_printed_on_all_of_its_slices(row: rows.PublishedStep) -> None:
    assert row.printed_tokens in (row.tokens, None)
    whole = slice_of(row.slice)
    assert row.devices == whole.chips * row.slices * (2 if whole.generation == "7x" else 1)


def test_a_typo_in_the_batch_would_be_found() -> None:
    row = rows.ROWS["llama3.1-8b v6e-8"]
    flops = row.model.flops(row.tokens * 4 // 3, row.length, causal=False)
    assert flops / 8 / row.seconds / 1e12 != pytest.approx(row.tflops, rel=2e-3)


@pytest.mark.parametrize("window", [None, 5, 16])
@pytest.mark.parametrize("blocks", [(8, 8), (16, 4), (4, 16)])
def test_a_kernel_visits_the_blocks_that_hold_something_to_see(
    blocks: tuple[int, int], window: int | None
) -> None:
    query, key = np.mgrid[:32, :32]
    seen = (query >= key) & (query - key < (window or 32))
    tiles = seen.reshape(32 // blocks[0], blocks[0], 32 // blocks[1], blocks[1])
    assert visited_fraction(blocks, 32, window) == tiles.any(axis=(1, 3)).mean()


def test_two_backward_kernels_do_seven_products_where_one_does_five() -> None:
    one, two = Flash((8, 8), (8, 8)), Flash((8, 8), (8, 8), (8, 8))
    assert two.backward_work(32, None) == pytest.approx(7 / 5 * one.backward_work(32, None))


@pytest.mark.parametrize("window", [None, 3])
def test_attention_and_its_gradients_are_those_of_softmax(window: int | None) -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 8, 2, 3, 4)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 8, 2, 4)).astype(np.float32)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        ahead = jnp.subtract.outer(jnp.arange(8), jnp.arange(8))
        seen = (ahead >= 0) & (ahead < (window or 8))
        scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k) / 2
        return jnp.einsum("bkgqs,bskh->bqkgh", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, Kernel(window, 1.0, 1.0))

    def with_gradients(function: Callable[..., jax.Array]) -> list[jax.Array]:
        def run(*operands: jax.Array) -> list[jax.Array]:
            out, vjp_function = jax.vjp(function, *operands)
            return [out, *vjp_function(jnp.cos(out))]

        results: list[jax.Array] = jax.jit(run)(q, k, v)
        return results

    for actual, expected in zip(with_gradients(kernel), with_gradients(plain), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_experts_take_their_capacity_and_each_place_one_token() -> None:
    sizes = models.Experts(count=4, chosen=2, capacity_factor=1.25)
    scores = np.random.default_rng(1).normal(size=(3, 16, 4)).astype(np.float32)
    run = jax.jit(masks, static_argnums=1)
    combine = run(scores, sizes)
    assert combine.shape == (3, 16, 4, 10)
    assert (combine > 0).sum(axis=1).max() == 1
    whole = models.Experts(count=4, chosen=2, capacity_factor=4.0)
    kept = run(scores, whole)
    np.testing.assert_allclose(kept.sum(axis=(2, 3)), 1, atol=1e-6)
    assert ((kept > 0).sum(axis=(2, 3)) == 2).all()


@pytest.mark.parametrize(
    "name",
    [
        "mixtral-8x22b v6e-256",
        *rare("llama3.1-405b 2x v6e-256", "gpt3-175b v6e-256", "gemma3-12b v6e-256"),
    ],
)
def test_a_step_lowers_for_all_devices_from_shapes_alone(name: str) -> None:
    row = rows.ROWS[name]
    fn, args = decoder.step(row.training, row.abstract_mesh())
    traced = jax.jit(fn, donate_argnums=0).trace(*args)
    text = traced.lower(lowering_platforms=("cpu",)).as_text(debug_info=True)
    assert f"mhlo.num_partitions = {row.devices}" in text
    assert "kernel[flash_attention work=" in text
    state, loss = traced.out_info
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), args[0]
    )
    assert loss.shape == ()


def test_the_forward_kernel_runs_once_where_the_policy_saves_the_context() -> None:
    def products(*saved: str) -> int:
        tiny = models.Model("tiny", 2, 16, 4, 2, 4, 32, 64)
        remat = decoder.Remat(saved=saved)
        training = decoder.Training(tiny, 2, 8, remat, Flash((8, 8), (8, 8)))
        fn, args = decoder.step(training, AbstractMesh((2,), ("fsdp",), (AxisType.Auto,)))
        text: str = jax.jit(fn).trace(*args).lower(lowering_platforms=("cpu",)).as_text()
        return text.count("stablehlo.dot_general")

    # Its scores and their product with the values.
    assert products() - products("context") == 2
