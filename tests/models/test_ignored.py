"""Ignored targets have no effect; invalid labels raise an error or make the loss NaN."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.models import MLP
from drumline.models.losses import IGNORE_INDEX, cross_entropy
from tests.models.training import KEY, LITTLE_LM, MODELS, batch_for, mesh_of, weights_of

TINY_LM = replace(LITTLE_LM, depth=1)
TINY_VIT = MODELS["ViT"]
TINY_MLP = MODELS["MLP"]


@cache
def value_and_grad(model: Any, *sizes: int) -> Any:
    """Return a compiled function of weights and batch on a mesh: loss, metrics and gradients."""
    program = jax.jit(
        jax.value_and_grad(lambda w, batch: model.loss(w, batch, KEY), has_aux=True),
    )

    def run(weights: Any, batch: Any) -> Any:
        with jax.set_mesh(mesh_of(*sizes)):
            return program(weights, batch)

    return run


def assert_close(actual: Any, expected: Any) -> None:
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for actual_leaf, expected_leaf in leaves:
        np.testing.assert_allclose(actual_leaf, expected_leaf, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(1,), (4, 2)])
def test_ignored_labels_count_neither_for_loss_nor_accuracy_nor_gradient(
    sizes: tuple[int, ...],
) -> None:
    assert isinstance(TINY_MLP, MLP)
    model = replace(TINY_MLP, layout="fsdp+tensor")
    batch = batch_for(model, 16)
    # The first device has only ignored examples, the last one has none.
    ignored = np.array([0, 1, 2, 3, 5, 8])
    batch["label"][ignored] = model.ignore_index
    actual = value_and_grad(model, *sizes)(weights_of("MLP"), batch)
    rest = {name: np.delete(values, ignored, axis=0) for name, values in batch.items()}
    assert_close(actual, value_and_grad(replace(model, layout="data"), 1)(weights_of("MLP"), rest))
    all_ignored = {**batch, "label": np.full(16, model.ignore_index)}
    (loss, metrics), gradients = value_and_grad(model, *sizes)(weights_of("MLP"), all_ignored)
    assert (float(loss), float(metrics["accuracy"])) == (0, 0)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients))


def lm_weights() -> Any:
    weights = weights_of("LM")
    return {**weights, "blocks": {name: w[:1] for name, w in weights["blocks"].items()}}


def test_padding_does_not_change_the_loss() -> None:
    text = batch_for(TINY_LM, 4)["tokens"][:, :6]
    padded = np.pad(text, ((0, 0), (0, 3)), constant_values=TINY_LM.ignore_index)
    actual, expected = (
        value_and_grad(TINY_LM, 1)(lm_weights(), {"tokens": tokens}) for tokens in (padded, text)
    )
    assert_close(actual, expected)


def test_targets_replace_the_next_tokens() -> None:
    tokens = batch_for(TINY_LM, 4)["tokens"]
    targets = tokens[:, 1:].copy()
    explicit = value_and_grad(TINY_LM, 1)(lm_weights(), {"tokens": tokens, "targets": targets})
    assert_close(explicit, value_and_grad(TINY_LM, 1)(lm_weights(), {"tokens": tokens}))
    # With one target per text, the loss is the mean of the single losses.
    targets[:, :-1] = TINY_LM.ignore_index
    (loss, _), _ = value_and_grad(TINY_LM, 1)(lm_weights(), {"tokens": tokens, "targets": targets})
    single = []
    for row in range(4):
        single_target = np.full_like(targets, TINY_LM.ignore_index)
        single_target[row, -1] = targets[row, -1]
        batch = {"tokens": tokens, "targets": single_target}
        single.append(float(value_and_grad(TINY_LM, 1)(lm_weights(), batch)[0][0]))
    assert float(loss) == pytest.approx(np.mean(single), rel=1e-6)


@pytest.mark.parametrize("axes", [(), ("model",)])
def test_an_invalid_target_is_nan_and_an_ignored_one_zero(
    axes: tuple[str, ...],
) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    targets = jnp.array([2, IGNORE_INDEX, 6, -1])
    spec = jax.P(None, axes[0]) if axes else jax.P()

    def losses_and_gradient(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        function = jax.shard_map(
            lambda x: cross_entropy(x, targets, axes),
            mesh=mesh_of(1, 2),
            in_specs=spec,
            out_specs=jax.P(),
        )
        losses, pullback = jax.vjp(function, logits)
        return losses, pullback(jnp.ones(4))[0]

    losses, gradient = map(np.asarray, jax.jit(losses_and_gradient)(logits))
    exact = logits[0].astype(np.float64)
    assert float(losses[0]) == pytest.approx(np.log(np.exp(exact).sum()) - exact[2], rel=1e-6)
    assert float(losses[1]) == 0
    assert not gradient[1].any()
    assert np.isnan(losses[2:]).all()
    assert np.isnan(gradient[2:]).all()


def batch_with(model: Any, name: str, index: tuple[int, ...], value: int) -> dict[str, Any]:
    batch = batch_for(model, 8)
    batch[name][index] = value
    return batch


INVALID = [
    (
        TINY_LM,
        batch_with(TINY_LM, "tokens", (3, 1), 32),
        "LM: tokens[3, 1] is 32; it can be 0 to 31, or -100 to ignore it",
    ),
    (
        TINY_MLP,
        batch_with(TINY_MLP, "label", (5,), 10),
        "MLP: label[5] is 10; it can be 0 to 9, or -100 to ignore it",
    ),
    (
        TINY_VIT,
        batch_with(TINY_VIT, "label", (0,), -1),
        "ViT: label[0] is -1; it can be 0 to 7, or -100 to ignore it",
    ),
    (
        TINY_MLP,
        {**batch_for(TINY_MLP, 8), "label": np.zeros(8, np.float32)},
        "MLP: label holds float32; it must hold integers",
    ),
    (
        TINY_LM,
        {**batch_for(TINY_LM, 8), "targets": np.zeros((8, 9), np.int32)},
        "LM: targets have shape (8, 9), but tokens of shape (8, 9) predict targets of shape (8, 8)",
    ),
]


@pytest.mark.parametrize(("model", "batch", "message"), INVALID)
def test_an_error_names_the_label_or_token_out_of_range(
    model: Any, batch: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        model.check_batch(batch)
    with pytest.raises(ValueError, match=re.escape(message)):
        model.loss(None, batch, KEY)


@pytest.mark.parametrize("token", [32, -1])
def test_a_traced_token_out_of_range_makes_the_loss_nan(token: int) -> None:
    batch = batch_with(TINY_LM, "tokens", (2, 0), token)  # an input, never a target
    (loss, _), gradients = value_and_grad(TINY_LM, 1)(lm_weights(), batch)
    assert np.isnan(loss)
    assert np.isnan(gradients["norm"]).all()
