"""The weights of a decoder's blocks work in `TransformerBlock` and `MoEBlock`."""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drumline.models import LM
from drumline.parallel import BlockAxes, BlockShape, MoEBlock, TransformerBlock
from drumline.parallel.block.layers import rms_norm
from tests.models.training import KEY, Tree, random_weights

DENSE = LM(
    width=16,
    depth=1,
    heads=4,
    head_dim=4,
    kv_heads=2,
    hidden=24,
    vocab=32,
    compute_dtype="float32",
)
MIXED = replace(DENSE, experts=4, balance_weight=0.0, z_weight=0.0)
SHAPE = BlockShape(width=16, heads=4, kv_heads=2, head_dim=4, hidden=24)
AXES = BlockAxes(batch=None, model="Y")
ONE = Mesh(np.array(jax.devices()[:1]), ("Y",))
ATTENTION = ("attention_norm", "query", "key", "value", "output")


def random_params(model: LM) -> tuple[Tree, dict[str, np.ndarray]]:
    """Return the weights of a decoder, and those of its only block."""
    params = random_weights(model)
    return params, {name: weight[0] for name, weight in params["blocks"].items()}


def block_of(weights: dict[str, np.ndarray]) -> TransformerBlock:
    block: TransformerBlock = eqx.tree_at(
        lambda block: [getattr(block, name) for name in weights],
        eqx.filter_eval_shape(TransformerBlock, SHAPE, key=KEY, axes=AXES),
        list(weights.values()),
    )
    return block


def cross_entropy(params: Tree, x: jax.Array, targets: np.ndarray) -> jax.Array:
    logits = rms_norm(x, params["norm"]) @ params["head"]
    target_logits = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -jnp.mean(target_logits)


def batch() -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(0).integers(0, 32, (2, 9)).astype(np.int32)}


def test_the_weights_of_a_decoder_work_in_a_transformer_block() -> None:
    params, weights = random_params(DENSE)
    tokens = batch()["tokens"]

    @jax.jit
    def loss_of_blocks(params: Tree, block: TransformerBlock) -> jax.Array:
        x = block(params["table"][tokens[:, :-1]], mesh=ONE)
        return cross_entropy(params, x, tokens[:, 1:])

    actual = loss_of_blocks(params, block_of(weights))
    expected = jax.jit(DENSE.loss)(params, batch(), KEY)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_the_experts_of_a_decoder_work_in_a_moe_block() -> None:
    params, weights = random_params(MIXED)
    dense = random_params(DENSE)[1]
    # With zero last weights, the dense feed-forward layer adds nothing.
    first = {**dense, **{name: weights[name] for name in ATTENTION}}
    first["down"] = np.zeros_like(first["down"])
    second = eqx.tree_at(
        lambda block: [block.scale, block.router, block.w_in, block.w_out],
        eqx.filter_eval_shape(MoEBlock, 16, 24, 4, k=2, key=KEY),
        [weights[name] for name in ("feedforward_norm", "router", "experts_in", "experts_out")],
    )
    tokens = batch()["tokens"]

    @jax.jit
    def loss_of_blocks(params: Tree, first: TransformerBlock, second: MoEBlock) -> jax.Array:
        x = first(params["table"][tokens[:, :-1]], mesh=ONE)
        return cross_entropy(params, second(x).out, tokens[:, 1:])

    actual = loss_of_blocks(params, block_of(first), second)
    expected = jax.jit(MIXED.loss)(params, batch(), KEY)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
