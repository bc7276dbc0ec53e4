"""Attention kernels agree with XLA's attention, and each platform uses its own kernel."""

# mypy: allow-untyped-calls

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from drumline.parallel.block.attention import attend, attend_splash


@pytest.mark.parametrize(
    ("length", "kv_heads", "causal", "tokens"),
    [(128, 1, True, None), (140, 2, False, 133)],
    ids=["causal, grouped queries", "full, padded"],
)
def test_splash_agrees_with_xla_attention_and_its_gradients(
    length: int, kv_heads: int, causal: bool, tokens: int | None
) -> None:
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, length, 2, 8)).astype(np.float32)
    # The values are the same on both devices, so their gradient is a sum over the devices.
    key = rng.normal(size=(2, length, kv_heads, 8)).astype(np.float32)
    value = rng.normal(size=(1, length, kv_heads, 8)).astype(np.float32)
    visible = length if tokens is None else tokens

    def loss(attention: Any, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + attention(x, key, jnp.broadcast_to(value, key.shape)), None

        output, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), query, None, length=2)
        return jnp.sum(jnp.square(output[:, :visible]))

    def sharded_loss(*arrays: jax.Array) -> jax.Array:
        kernel_attention = partial(attend_splash, causal=causal, length=tokens, interpret=True)
        total = lax.psum(loss(kernel_attention, *arrays), "X")
        return jnp.asarray(total)

    mesh = Mesh(np.array(jax.devices()[:2]), ("X",))
    sharded = jax.shard_map(sharded_loss, mesh=mesh, in_specs=(P("X"), P("X"), P()), out_specs=P())
    xla_loss = partial(loss, partial(attend, causal=causal, kernel="xla", length=tokens))
    results, references = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(query, key, value)
        for f in (sharded, xla_loss)
    )
    for result, reference in zip(
        jax.tree.leaves(results), jax.tree.leaves(references), strict=True
    ):
        np.testing.assert_allclose(result, reference, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("platform", "length", "kernel_attention"),
    [("tpu", 512, True), ("tpu", 197, False), ("cpu", 512, False)],
)
def test_each_platform_uses_its_kernel(platform: str, length: int, kernel_attention: bool) -> None:
    heads = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
    attention = jax.jit(partial(attend, causal=True, kernel="auto"))
    text = attention.trace(heads, heads, heads).lower(lowering_platforms=(platform,)).as_text()
    assert ("tpu_custom_call" in text) == kernel_attention


def test_arrays_that_xla_shards_use_xla_attention() -> None:
    heads = jax.ShapeDtypeStruct((2, 512, 2, 64), jnp.bfloat16)
    attention = jax.jit(partial(attend, causal=True, kernel="auto"))
    with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("X",))):
        text = attention.trace(heads, heads, heads).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in text
