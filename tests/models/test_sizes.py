"""Parameter counts, shardings, FLOPs and types of the models."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.models import LM, MLP, ViT, llama_1b3, llama_350m, vit_b16, vit_l16, vit_s16
from drumline.models import lm as lm_module
from drumline.models import mlp as mlp_module
from drumline.models import vit as vit_module
from drumline.models.losses import cross_entropy
from tests.models.training import KEY, LITTLE_LM, MODELS, batch_for, mesh_of, weights_of

TABLES = {
    "MLP": mlp_module.LAYOUTS,
    "ViT": vit_module.LAYOUTS,
    "LM": lm_module.LAYOUTS,
    "MoE": lm_module.LAYOUTS,
}


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (MLP(), 784 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 10 + 10),
        (vit_s16(), 22_050_664),
        (vit_b16(), 86_567_656),
        (vit_l16(), 304_326_632),
        (llama_350m(), 373_867_520),
        (llama_1b3(), 1_345_423_360),
    ],
)
def test_parameter_counts(model: MLP | ViT | LM, count: int) -> None:
    shapes = jax.tree.leaves(jax.eval_shape(model.init, KEY))
    assert sum(leaf.size for leaf in shapes) == count
    assert {leaf.dtype for leaf in shapes} == {np.dtype("float32")}


def test_the_options_of_a_named_model_can_be_changed() -> None:
    changed = vit_b16(classes=10, layout="fsdp", attention="cudnn")
    assert (changed.width, changed.classes, changed.layout) == (768, 10, "fsdp")
    assert llama_350m(kv_heads=4).kv_heads == 4


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_has_a_spec_for_every_weight(name: str) -> None:
    shapes = jax.eval_shape(MODELS[name].init, KEY)
    for layout, axes in TABLES[name].items():
        model = replace(MODELS[name], layout=layout)
        specs = model.specs()
        assert jax.tree.all(jax.tree.map(lambda s, w: len(s) == w.ndim, specs, shapes))
        mentioned = {axis for spec in jax.tree.leaves(specs) for axis in _flat(spec)}
        assert mentioned <= {axis for mesh_axes in axes.values() for axis in _flat((mesh_axes,))}
        assert model.batch_spec() == P(axes["batch"])
        model.check(mesh_of(2, 2, 2))


@pytest.mark.parametrize("name", MODELS)
def test_the_initial_weights_do_not_depend_on_the_layout(name: str) -> None:
    programs = {
        str(jax.make_jaxpr(replace(MODELS[name], layout=layout).init)(KEY))
        for layout in TABLES[name]
    }
    assert len(programs) == 1


def test_sharded_initialization_draws_the_same_weights() -> None:
    model = replace(MODELS["MLP"], layout="fsdp+tensor")
    mesh = mesh_of(4, 2)
    shardings = jax.tree.map(partial(NamedSharding, mesh), model.specs())
    full = jax.jit(model.init)(KEY)
    sharded = jax.jit(model.init, out_shardings=shardings)(KEY)
    assert not sharded["layer0"]["weight"].is_fully_replicated
    assert jax.tree.all(jax.tree.map(np.array_equal, full, sharded))


@pytest.mark.parametrize("name", ["LM", "MoE", "ViT", "MLP"])
def test_flops_are_six_per_weight_and_token_plus_attention(name: str) -> None:
    model, batch = MODELS[name], batch_for(MODELS[name])
    sizes = jax.tree.map(lambda w: w.size, weights_of(name))
    if isinstance(model, MLP):
        used = sum(layer["weight"] for layer in sizes.values())
        assert model.items(batch) == 16
        assert model.flops(batch) == 6 * 16 * used
        return
    blocks = sum(n for key, n in sizes["blocks"].items() if not re.search("norm|shift|bias", key))
    if isinstance(model, ViT):
        images, tokens, patches = 16, 10, 9
        scores = 2 * 2 * tokens * tokens * model.width  # two matmuls, forward
        used = patches * sizes["patch"] + tokens * blocks + sizes["head"]
        assert model.items(batch) == images
        assert model.flops(batch) == images * (6 * used + 3 * scores * model.depth)
        return
    if model.experts:
        experts = sizes["blocks"]["experts_in"] + sizes["blocks"]["experts_out"]
        blocks -= experts * (model.experts - model.experts_per_token) // model.experts
    tokens, length = 16 * 8, 8
    scores = 2 * length * model.heads * model.head_dim  # per token; causal masking skips half
    assert model.items(batch) == tokens
    assert model.flops(batch) == tokens * (6 * (blocks + sizes["head"]) + 3 * scores * model.depth)


@pytest.mark.parametrize("name", ["LM", "ViT"])
def test_matmuls_are_bfloat16_and_results_float32(name: str) -> None:
    model: Any = replace(MODELS[name], compute_dtype="bfloat16")
    lowered = jax.jit(model.loss).lower(weights_of(name), batch_for(model), KEY)
    operand_types = re.findall(r"dot_general .*: \((.*)\) ->", lowered.as_text())
    assert len(operand_types) >= 9
    assert all(types.count("bf16") == 2 for types in operand_types)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(lowered.out_info)} == {"float32"}


def test_cross_entropy_of_large_logits_is_exact_and_has_a_gradient() -> None:
    targets = jnp.array([1, 2])

    def losses_and_gradient(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, pullback = jax.vjp(lambda x: cross_entropy(x, targets), logits)
        return losses, pullback(jnp.ones(2))[0]

    losses, gradient = jax.jit(losses_and_gradient)(jnp.array([[1e4, 0, -1e4], [3.0, 3.0, 3.0]]))
    np.testing.assert_allclose(losses, np.array([1e4, np.log(3)]), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.array([[3, -3, 0], [1, 1, -2]]) / 3, atol=1e-6)


def test_mesh_axes_shard_experts_before_their_matrices() -> None:
    model = replace(LITTLE_LM, experts=4, layout="fsdp+expert")
    blocks = model.specs()["blocks"]
    assert blocks["experts_in"] == P(None, ("expert",), ("data",), None, None)
    assert blocks["query"] == P(None, ("data", "expert"), None, None)


def _flat(spec: Any) -> list[str]:
    return [
        axis for axes in spec for axis in ([axes] if isinstance(axes, str) else list(axes or ()))
    ]
