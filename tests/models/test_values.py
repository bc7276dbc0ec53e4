"""Losses and gradients are those of the same models written out plainly in float64."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from drumline.models import LM
from drumline.parallel.block.norms import layer_norm
from tests.models import reference
from tests.models.training import KEY, MODELS, batch_for, trained, weights_of

FLOAT32 = 5e-6
"""Relative error of a loss through some ten roundings of float32."""


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_and_its_slopes_are_the_plain_ones(name: str) -> None:
    model, run = MODELS[name], trained(name, "data", 1)
    batch = batch_for(model)
    exact = jax.tree.map(np.float64, weights_of(name))
    assert run.losses[0] == pytest.approx(reference.loss(model, exact, batch), rel=FLOAT32)

    rng, step = np.random.default_rng(2), 1e-5
    for _ in range(2):
        # Each weight has its say: it moves the loss by about one for a step of one. Gradients
        # that vanish, as that of a key's bias does, have none.
        direction = jax.tree.map(
            lambda g: rng.normal(size=g.shape) / max(1e-3, float(np.linalg.norm(g))), run.gradients
        )

        def moved(by: float, direction: Any = direction) -> float:
            weights = jax.tree.map(lambda w, d: w + by * d, exact, direction)
            return reference.loss(model, weights, batch)

        slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, run.gradients, direction)))
        assert slope == pytest.approx((moved(step) - moved(-step)) / (2 * step), abs=1e-4)


def test_a_layer_norm_keeps_its_digits_where_the_mean_outweighs_what_varies() -> None:
    rng = np.random.default_rng(0)
    x = (1000 + rng.normal(size=(64, 256))).astype(np.float32)
    scale, shift = rng.normal(size=(2, 256)).astype(np.float32)
    exact = reference.normal(*(each.astype(np.float64) for each in (x, scale, shift)))
    found = jax.jit(layer_norm)(x, scale, shift)
    # A float32 of 1000 is known to 3e-5: the mean can be no better.
    assert np.abs(found - exact).max() < 1e-3
    slope = jax.jit(jax.grad(lambda x: (layer_norm(x, scale, shift) * rng.normal(size=256)).sum()))
    assert np.isfinite(slope(x)).all()


def test_a_router_decides_on_all_digits_of_its_scores_on_a_tpu() -> None:
    model = MODELS["MoE"]
    assert isinstance(model, LM)
    model = replace(model, compute_dtype="bfloat16")
    shapes, batch = jax.eval_shape(model.init, KEY), batch_for(model, 2)
    step = jax.jit(jax.grad(lambda w, batch: model.loss(w, batch, KEY)[0]))
    text = step.trace(shapes, batch).lower(lowering_platforms=("tpu",)).as_text()
    wide = re.findall(r"dot_general.*: \(tensor<\w+xf32>, tensor<\w+xf32>\).*", text)
    # For the choice and for the balance, forward and in both gradients.
    assert len(wide) == 6
    assert all("precision = [HIGHEST, HIGHEST]" in product for product in wide)
