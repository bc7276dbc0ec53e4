"""Rows that a Hopper kernel leaves unwritten may hold NaN, which must not reach a result.

The block loops stand for the kernels, with NaN in the rows that the real kernels do not write: the
rows past the last group, for scattered tokens and for matmuls.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.parallel.experts.layer import MoEBlock
from drumline.parallel.experts.matmul import expert_matmul
from drumline.parallel.experts.routing import Routing
from drumline.parallel.grouped import hopper as grouped_hopper
from drumline.parallel.grouped import matmul as grouped_matmul
from drumline.parallel.grouped import rows as grouped_rows
from drumline.parallel.grouped.blocks import blocked_matmul, blocked_outer
from tests.cases import rare

from .tokens import (
    P,
    assert_matches_reference,
    assign,
    mesh_of,
    random_block,
    random_case,
    sharded,
    with_gradients,
)

ROWS = 16


def _matmul(x: jax.Array, w: jax.Array, sizes: jax.Array, **options: Any) -> jax.Array:
    y = blocked_matmul(x, w, sizes, **options)
    return jnp.where(jnp.arange(len(y))[:, None] < jnp.sum(sizes), y, jnp.nan)


def _scatter_rows(
    tokens: jax.Array, gates: jax.Array | None, row: jax.Array, padding: jax.Array, *, rows: int
) -> jax.Array:
    row_index = jnp.arange(rows)[:, None, None]
    is_padding = ((row_index[:, 0] >= padding[0]) & (row_index[:, 0] < padding[1])).any(1)
    out = jnp.where(is_padding[:, None], jnp.zeros_like(tokens, shape=()), jnp.nan)
    out = jnp.broadcast_to(out, (rows, tokens.shape[1]))
    for slot in range(row.shape[1]):
        weighted_tokens = tokens if gates is None else gates[:, slot, None] * tokens
        out = out.at[row[:, slot]].set(weighted_tokens, mode="drop")
    return out


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_hopper(*operands: Any, default: Any, cuda: Any = None, **_: Any) -> Any:
        return (cuda or default)(*operands)

    monkeypatch.setattr(grouped_matmul, "_on_hopper", lambda: True)
    monkeypatch.setattr(grouped_matmul, "by_platform", on_hopper)
    monkeypatch.setattr(grouped_rows, "by_platform", on_hopper)
    monkeypatch.setattr(grouped_hopper, "supports", lambda *_: True)
    monkeypatch.setattr(grouped_hopper, "ROWS", ROWS)
    monkeypatch.setattr(grouped_hopper, "matmul", _matmul)
    monkeypatch.setattr(grouped_hopper, "outer", blocked_outer)
    monkeypatch.setattr(grouped_rows, "supports_scatter", lambda tokens: tokens.ndim == 2)
    monkeypatch.setattr(grouped_rows, "scatter_tokens", _scatter_rows)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("exchange", ["alltoall", *rare("local", "allgather")])
def test_unwritten_rows_do_not_affect_expert_matmul(exchange: str) -> None:
    case = random_case(8, 2)
    function = expert_matmul if exchange == "local" else sharded(mesh_of(4, 2), exchange)
    run = with_gradients(function)
    for kind in ("out of range", "one expert", "adversarial"):
        assignment = assign(kind, 8, 2)
        assert_matches_reference(run(case, assignment), case, assignment, kind)


@cache
def _layer() -> tuple[Any, Any]:
    """Return a block and its tokens, with the value and gradients without NaN."""
    block = random_block(8, 12, 8, 2)
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    return (block, x), _with_gradients(MoEBlock.__call__)(block, x)


def _with_gradients(function: Any) -> Any:
    def loss(block: MoEBlock, x: jax.Array) -> Any:
        out, routing = function(block, x)
        return jnp.sum(jnp.sin(out)) + routing.balance_loss

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


@pytest.mark.every_case
@pytest.mark.parametrize("exchange", ["alltoall", *rare("local")])
def test_unwritten_rows_do_not_affect_the_layer(
    exchange: str, request: pytest.FixtureRequest
) -> None:
    (block, x), expected = _layer()
    request.getfixturevalue("_hopper")

    def function(block: MoEBlock, x: jax.Array) -> Any:
        if exchange == "local":
            return block(x)
        specs = jax.tree.map(lambda leaf: P("X") if leaf.ndim > 2 else P(), block)
        return jax.shard_map(
            lambda block, x: tuple(block(x, axis_name="X", exchange=exchange)),
            mesh=mesh_of(4, 1),
            in_specs=(specs, P("X")),
            out_specs=(P("X"), Routing(P("X"), P("X"), P(), P(), P(), P(), 1.0)),
        )(block, x)

    actual = _with_gradients(function)(block, x)
    for value, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_hopper")
def test_grouped_matmul_returns_zeros_for_rows_past_its_groups() -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(64, 8)), rng.normal(size=(64, 12))
    w, sizes = rng.normal(size=(3, 8, 12)), jnp.array([16, 0, 32])

    def run(x: jax.Array, w: jax.Array, dy: jax.Array, zero_rest: bool) -> Any:
        def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
            return grouped_matmul.grouped_matmul(x, w, sizes, aligned=True, zero_rest=zero_rest)

        y, vjp_function = jax.vjp(multiply, x, w)
        return y, *vjp_function(dy)

    compiled = jax.jit(run, static_argnums=3)
    y, dx, dw = (np.asarray(v) for v in compiled(x, w, dy, True))
    assert not y[48:].any()
    assert not dx[48:].any()
    np.testing.assert_allclose(y[16:48], x[16:48] @ w[2], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw[2], x[16:48].T @ dy[16:48], rtol=1e-4, atol=1e-4)
    # The emulated kernels leave NaN, so the zeros above were written explicitly.
    assert np.isnan(compiled(x, w, dy, False)[0][48:]).all()
