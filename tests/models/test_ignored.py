"""What is not to be predicted leaves no trace, and what is no label at all never trains."""

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
LITTLE_MLP = MODELS["MLP"]


@cache
def both(model: Any, *sizes: int) -> Any:
    """Loss, metrics and gradients as a program for a mesh, by weights and batch."""
    program = jax.jit(
        jax.value_and_grad(lambda w, batch: model.loss(w, batch, KEY), has_aux=True),
    )

    def run(weights: Any, batch: Any) -> Any:
        with jax.set_mesh(mesh_of(*sizes)):
            return program(weights, batch)

    return run


def assert_same(found: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(1,), (4, 2)])
def test_ignored_labels_count_neither_for_loss_nor_accuracy_nor_gradient(
    sizes: tuple[int, ...],
) -> None:
    assert isinstance(LITTLE_MLP, MLP)
    model = replace(LITTLE_MLP, layout="fsdp+tensor")
    batch = batch_for(model, 16)
    # Unevenly: of the first device's examples none are left, of the last one's all.
    ignored = np.array([0, 1, 2, 3, 5, 8])
    batch["label"][ignored] = model.ignore_index
    found = both(model, *sizes)(weights_of("MLP"), batch)
    rest = {name: np.delete(values, ignored, axis=0) for name, values in batch.items()}
    assert_same(found, both(replace(model, layout="data"), 1)(weights_of("MLP"), rest))
    everything = {**batch, "label": np.full(16, model.ignore_index)}
    (loss, metrics), gradients = both(model, *sizes)(weights_of("MLP"), everything)
    assert (float(loss), float(metrics["accuracy"])) == (0, 0)
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradients))


def lm_weights() -> Any:
    weights = weights_of("LM")
    return {**weights, "blocks": {name: w[:1] for name, w in weights["blocks"].items()}}


def test_padding_behind_a_text_changes_nothing() -> None:
    text = batch_for(TINY_LM, 4)["tokens"][:, :6]
    padded = np.pad(text, ((0, 0), (0, 3)), constant_values=TINY_LM.ignore_index)
    found, expected = (
        both(TINY_LM, 1)(lm_weights(), {"tokens": tokens}) for tokens in (padded, text)
    )
    assert_same(found, expected)


def test_only_the_targets_are_predicted_where_they_are_given() -> None:
    tokens = batch_for(TINY_LM, 4)["tokens"]
    next_ones = tokens[:, 1:].copy()
    shown = both(TINY_LM, 1)(lm_weights(), {"tokens": tokens, "targets": next_ones})
    assert_same(shown, both(TINY_LM, 1)(lm_weights(), {"tokens": tokens}))
    # The last answer of each text alone is one target each: their mean.
    next_ones[:, :-1] = TINY_LM.ignore_index
    (loss, _), _ = both(TINY_LM, 1)(lm_weights(), {"tokens": tokens, "targets": next_ones})
    single = []
    for row in range(4):
        alone = np.full_like(next_ones, TINY_LM.ignore_index)
        alone[row, -1] = next_ones[row, -1]
        batch = {"tokens": tokens, "targets": alone}
        single.append(float(both(TINY_LM, 1)(lm_weights(), batch)[0][0]))
    assert float(loss) == pytest.approx(np.mean(single), rel=1e-6)


@pytest.mark.parametrize("over", [(), ("model",)])
def test_a_target_that_is_no_class_has_no_loss_and_an_ignored_one_none_at_all(
    over: tuple[str, ...],
) -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
    targets = jnp.array([2, IGNORE_INDEX, 6, -1])
    spec = jax.P(None, over[0]) if over else jax.P()

    def all_of_it(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        function = jax.shard_map(
            lambda x: cross_entropy(x, targets, over),
            mesh=mesh_of(1, 2),
            in_specs=spec,
            out_specs=jax.P(),
        )
        losses, pull = jax.vjp(function, logits)
        return losses, pull(jnp.ones(4))[0]

    losses, gradient = jax.jit(all_of_it)(logits)
    exact = np.asarray(logits[0], np.float64)
    assert float(losses[0]) == pytest.approx(np.log(np.exp(exact).sum()) - exact[2], rel=1e-6)
    assert float(losses[1]) == 0
    assert not gradient[1].any()
    assert np.isnan(losses[2:]).all()
    assert np.isnan(gradient[2:]).all()


def _with(model: Any, name: str, at: tuple[int, ...], value: int) -> dict[str, Any]:
    batch = batch_for(model, 8)
    batch[name][at] = value
    return batch


WRONG = [
    (
        TINY_LM,
        _with(TINY_LM, "tokens", (3, 1), 32),
        "LM: tokens[3, 1] is 32; it can be 0 to 31, or -100 for one that is not to be predicted",
    ),
    (
        LITTLE_MLP,
        _with(LITTLE_MLP, "label", (5,), 10),
        "MLP: label[5] is 10; it can be 0 to 9, or -100 for one that is not to be predicted",
    ),
    (
        TINY_VIT,
        _with(TINY_VIT, "label", (0,), -1),
        "ViT: label[0] is -1; it can be 0 to 7, or -100 for one that is not to be predicted",
    ),
    (
        LITTLE_MLP,
        {**batch_for(LITTLE_MLP, 8), "label": np.zeros(8, np.float32)},
        "MLP: label holds float32; it must hold integers",
    ),
    (
        TINY_LM,
        {**batch_for(TINY_LM, 8), "targets": np.zeros((8, 9), np.int32)},
        "LM: targets are (8, 9), but tokens of (8, 9) predict (8, 8)",
    ),
]


@pytest.mark.parametrize(("model", "batch", "says"), WRONG)
def test_a_label_or_token_out_of_range_is_named(model: Any, batch: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        model.check_batch(batch)
    with pytest.raises(ValueError, match=re.escape(says)):
        model.loss(None, batch, KEY)


@pytest.mark.parametrize("token", [32, -1])
def test_a_token_out_of_range_that_cannot_be_seen_makes_the_loss_nan(token: int) -> None:
    batch = _with(TINY_LM, "tokens", (2, 0), token)  # never a target, only read
    (loss, _), gradients = both(TINY_LM, 1)(lm_weights(), batch)
    assert np.isnan(loss)
    assert np.isnan(gradients["norm"]).all()
