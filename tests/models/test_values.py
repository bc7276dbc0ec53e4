"""Losses and gradients agree with a plain float64 implementation of the same models."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.models import LM, MLP
from drumline.parallel.block.layers import layer_norm
from tests.models import reference
from tests.models.training import KEY, MODELS, batch_for, trained, weights_of

FLOAT32 = 5e-6
"""The relative error of a loss after about ten float32 roundings."""


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_agree_with_the_reference(name: str) -> None:
    model, run = MODELS[name], trained(name, "data", 1)
    batch = batch_for(model)
    exact = jax.tree.map(np.float64, weights_of(name))
    assert run.losses[0] == pytest.approx(reference.loss(model, exact, batch), rel=FLOAT32)

    rng, step = np.random.default_rng(2), 1e-5
    for _ in range(2):
        # Scale each weight's direction so that a step of one changes the loss by about one, unless
        # the gradient vanishes, as for the bias of the keys.
        direction = jax.tree.map(
            lambda g: rng.normal(size=g.shape) / max(1e-3, float(np.linalg.norm(g))), run.gradients
        )

        def loss_after(distance: float, direction: Any = direction) -> float:
            weights = jax.tree.map(lambda w, d: w + distance * d, exact, direction)
            return reference.loss(model, weights, batch)

        slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, run.gradients, direction)))
        assert slope == pytest.approx((loss_after(step) - loss_after(-step)) / (2 * step), abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_numpy_weights_and_inputs_give_what_jax_arrays_give(name: str, scan_layers: bool) -> None:
    model: Any = MODELS[name]
    weights, batch = weights_of(name), batch_for(model, 2)
    if not isinstance(model, MLP):
        model = replace(model, scan_layers=scan_layers)
        inputs = batch["tokens"][:, :-1] if isinstance(model, LM) else batch["image"]
        expected = model.logits(jax.tree.map(jnp.asarray, weights), jnp.asarray(inputs))
        np.testing.assert_allclose(model.logits(weights, inputs), expected, rtol=1e-5, atol=1e-5)
    arrays = jax.tree.map(jnp.asarray, (weights, batch))
    for expected, actual in (
        (model.loss(*arrays, KEY), model.loss(weights, batch, KEY)),
        (model.evaluate(*arrays), model.evaluate(weights, batch)),
    ):
        np.testing.assert_allclose(jax.tree.leaves(actual), jax.tree.leaves(expected), rtol=1e-5)


def test_layer_norm_is_accurate_for_a_mean_much_larger_than_the_deviation() -> None:
    rng = np.random.default_rng(0)
    x = (1000 + rng.normal(size=(64, 256))).astype(np.float32)
    scale, shift = rng.normal(size=(2, 256)).astype(np.float32)
    exact = reference.layer_norm(*(array.astype(np.float64) for array in (x, scale, shift)))
    actual = jax.jit(layer_norm)(x, scale, shift)
    # A float32 near 1000 has an error of 3e-5, and so has the mean.
    assert np.abs(actual - exact).max() < 1e-3
    slope = jax.jit(jax.grad(lambda x: (layer_norm(x, scale, shift) * rng.normal(size=256)).sum()))
    assert np.isfinite(slope(x)).all()


def test_the_router_computes_its_logits_at_highest_precision_on_a_tpu() -> None:
    model = MODELS["MoE"]
    assert isinstance(model, LM)
    model = replace(model, compute_dtype="bfloat16")
    shapes, batch = jax.eval_shape(model.init, KEY), batch_for(model, 2)
    step = jax.jit(jax.grad(lambda w, batch: model.loss(w, batch, KEY)[0]))
    text = step.trace(shapes, batch).lower(lowering_platforms=("tpu",)).as_text()
    dots = re.findall(r"dot_general.*: \(tensor<\w+xf32>, tensor<\w+xf32>\).*", text)
    # For the routing and for the balance loss, forward and in both gradients.
    assert len(dots) == 6
    assert all("precision = [HIGHEST, HIGHEST]" in dot for dot in dots)
