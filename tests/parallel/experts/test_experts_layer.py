"""Routing, the feed-forward layer and its block."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.parallel.experts.layer import MoEBlock
from drumline.parallel.experts.routing import Routing, route
from tests.cases import rare

from .tokens import P, mesh_of, random_block

pytestmark = pytest.mark.usefixtures("traced_for_cpu_alone")
TOKENS, D, F, EXPERTS, K = 64, 16, 24, 8, 2


@cache
def _compiled(**options: Any) -> Callable[[Any], Routing]:
    return jax.jit(partial(route, **options))


def _random_array(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@cache
def _block() -> MoEBlock:
    return random_block(D, F, EXPERTS, K)


@cache
def _expected() -> Any:
    return _with_gradients(_reference_block)(_random_array(1, TOKENS, D), _block())


def test_softmax_gates_are_the_largest_and_sum_to_one() -> None:
    logits = _random_array(0, 32, 8)
    routing = _compiled(k=3)(logits)
    top_experts = np.argsort(-np.asarray(logits), axis=1)[:, :3]
    np.testing.assert_array_equal(routing.experts, top_experts)
    np.testing.assert_allclose(routing.gates.sum(1), 1, rtol=1e-6)
    exact = np.exp(np.take_along_axis(np.asarray(logits, np.float64), top_experts, 1))
    np.testing.assert_allclose(routing.gates, exact / exact.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(
        routing.tokens_per_expert, np.bincount(top_experts.ravel(), minlength=8)
    )
    z = np.log(np.exp(np.asarray(logits, np.float64)).sum(1))
    np.testing.assert_allclose(routing.z_loss, (z**2).mean(), rtol=1e-5)


def test_sigmoid_gates_do_not_depend_on_other_experts() -> None:
    logits = _random_array(1, 32, 8)
    routing = _compiled(k=2, gate="sigmoid", normalize=False)(logits)
    chosen = np.take_along_axis(np.asarray(logits, np.float64), np.asarray(routing.experts), 1)
    np.testing.assert_allclose(routing.gates, 1 / (1 + np.exp(-chosen)), rtol=1e-5)


def test_the_balance_loss_is_one_under_a_uniform_load_and_grows_with_skew() -> None:
    even = 10 * np.eye(8, dtype=np.float32)[np.arange(64) % 8]
    skewed = 10 * np.eye(8, dtype=np.float32)[np.zeros(64, int)]
    loss = jax.jit(jax.value_and_grad(lambda x: route(x, 1).balance_loss))
    assert float(loss(even)[0]) == pytest.approx(1, abs=1e-3)
    value, gradient = loss(skewed)
    assert float(value) == pytest.approx(8, rel=0.01)
    assert (gradient[:, 0] > 0).all()  # the overloaded expert gets a lower logit


def test_an_approximate_routing_reports_the_requested_recall() -> None:
    logits = _random_array(2, 16, 8)
    exact = jax.eval_shape(partial(route, k=2), logits)
    approximate_route = partial(route, k=2, exact=False, recall_target=0.9)
    assert exact.recall_target == 1.0
    assert jax.eval_shape(approximate_route, logits).recall_target == 0.9
    assert "approx_top_k" in str(jax.make_jaxpr(approximate_route)(logits))
    assert "recall_target=0.9" in str(jax.make_jaxpr(approximate_route)(logits))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"k": 9}, "1 ≤ k ≤ E"),
        ({"k": 2, "gate": "tanh"}, "softmax"),
        ({"k": 1, "recall_target": 0.0}, "recall"),
    ],
)
def test_invalid_routing_options_are_rejected(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        route(jnp.zeros((4, 8)), **options)


def _reference_block(x: jax.Array, block: MoEBlock) -> tuple[jax.Array, Routing]:
    """Apply every expert to every token, as a plain reference."""
    rows = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * block.scale
    routing = route(rows @ block.router, K)
    h = jnp.einsum("sd,edcf->secf", rows, block.w_in)
    y = jnp.einsum("sef,efd->sed", jax.nn.silu(h[:, :, 0]) * h[:, :, 1], block.w_out)
    gates = jnp.zeros((TOKENS, EXPERTS))
    gates = gates.at[jnp.arange(TOKENS)[:, None], routing.experts].add(routing.gates)
    return x + jnp.einsum("sed,se->sd", y, gates), routing


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return output, losses and all gradients of a function of (x, block)."""
    dout = _random_array(3, TOKENS, D)

    def loss(x: jax.Array, block: MoEBlock) -> tuple[jax.Array, Any]:
        out, routing = function(x, block)
        total = jnp.sum(out * dout) + routing.balance_loss + routing.z_loss
        return total, (out, routing.tokens_per_expert)

    return jax.jit(
        jax.value_and_grad(loss, (0, 1), has_aux=True),
    )


@pytest.mark.parametrize("exchange", ["alltoall", *rare("local", "allgather")])
def test_the_block_equals_every_expert_on_every_token(exchange: str) -> None:
    block, x = _block(), _random_array(1, TOKENS, D)
    function: Callable[..., Any]
    if exchange == "local":
        function = lambda x, block: tuple(block(x))  # noqa: E731
    else:
        specs = eqx.tree_at(
            lambda b: (b.scale, b.router, b.w_in, b.w_out),
            block,
            (P("Y"), P("Y"), P("X", None, None, "Y"), P("X", "Y")),
        )
        function = jax.shard_map(
            lambda x, b: tuple(b(x, axis_name="X", gather_axis_name="Y", exchange=exchange)),
            mesh=mesh_of(4, 2),
            in_specs=(P("X", "Y"), specs),
            out_specs=(P("X", "Y"), Routing(P("X"), P("X"), P(), P(), P(), P(), 1.0)),
        )
    actual, expected = _with_gradients(function)(x, block), _expected()
    for value, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-4, atol=2e-5)


def test_the_block_keeps_leading_dimensions() -> None:
    two_by_three = jax.ShapeDtypeStruct((2, 3, D), jnp.float32)  # type: ignore[no-untyped-call]
    assert jax.eval_shape(_block(), two_by_three).out.shape == (2, 3, D)
