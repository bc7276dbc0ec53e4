"""Every exchange gives what a float64 loop over tokens gives, values and all gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

from drumline.parallel.experts import exchange as experts_exchange
from drumline.parallel.experts import rounds as experts_rounds
from drumline.parallel.experts.matmul import expert_matmul
from tests.compiling import EVERY_CASE

from .tokens import (
    KINDS,
    P,
    assert_close,
    assert_true,
    assign,
    draw,
    mesh_of,
    sharded,
    truth,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("traced_for_cpu_alone")
MESHES = ((1, 1), (8, 1), (4, 2), (2, 4))
EXCHANGES = ("allgather", "alltoall")
# The ends of both numbers and a middle, or all that k permits.
GRID = (
    [(experts, k) for experts in (4, 8, 16, 64) for k in (1, 2, 4)]
    if EVERY_CASE
    else [(4, 4), (16, 2), (64, 1)]
)


@pytest.mark.parametrize(("experts", "k"), GRID)
def test_every_exchange_agrees_with_a_loop_over_tokens_and_the_local_function(
    experts: int, k: int
) -> None:
    """Every mesh that can hold the experts, every assignment; slots out of range count nothing.

    Each mesh and each number of experts meets both exchanges, not all three at once.
    """
    case = draw(experts, k)
    assignments = {kind: assign(kind, experts, k) for kind in (*KINDS, "out of range")}
    expected = {kind: truth(case, chosen) for kind, chosen in assignments.items()}
    # With one gate open for each token the sum over k has one term, and no order to differ in.
    one_open = np.eye(k, dtype=np.float32)[np.random.default_rng(0).integers(0, k, len(case.a))]
    alone, skewed = replace(case, gates=one_open), assignments["adversarial"]
    runs = {"local": with_gradients(expert_matmul)}
    for number, mesh in enumerate(MESHES):
        if experts % mesh[0] == 0:
            turn = (number + GRID.index((experts, k))) % 2
            for exchange in EXCHANGES if EVERY_CASE else EXCHANGES[turn:][:1]:
                runs[f"{exchange} on {mesh}"] = with_gradients(sharded(mesh_of(*mesh), exchange))
    bits = runs["local"](alone, skewed)[0]
    for name, run in runs.items():
        for kind, chosen in assignments.items():
            assert_close(run(case, chosen), expected[kind], f"{name}, {kind}")
        np.testing.assert_array_equal(run(alone, skewed)[0], bits, name)


def test_unsharded_columns_and_an_unchecked_shard_map() -> None:
    case, assignment = draw(8, 2), assign("adversarial", 8, 2)
    run = with_gradients(sharded(mesh_of(4, 2), "alltoall", columns=None, check_vma=False))
    assert_true(run(case, assignment), case, assignment)


def test_packed_buffers_arrive_at_the_right_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for GPU and TPU, with `ragged_all_to_all` played by an all-gather."""

    def played(
        operand: jax.Array,
        output: jax.Array,
        input_offsets: jax.Array,
        send_sizes: jax.Array,
        output_offsets: jax.Array,
        recv_sizes: jax.Array,
        *,
        axis_name: str,
    ) -> jax.Array:
        me = lax.axis_index(axis_name)
        row = jnp.arange(operand.shape[0])
        gathered = [
            lax.all_gather(x, axis_name) for x in (input_offsets, send_sizes, output_offsets)
        ]
        everyone = lax.all_gather(operand, axis_name)
        for source in range(everyone.shape[0]):
            start, size, at = (x[source, me] for x in gathered)
            size = jnp.where(size == recv_sizes[source], size, 0)  # both ends must agree
            mine = ((row >= at) & (row < at + size))[:, None]
            rows = everyone[source, jnp.clip(start + row - at, 0, row.size - 1)]
            output = jnp.where(mine, rows, output)
        return output

    def run_on(platform: str) -> list[tuple[jax.Array, ...]]:
        def chosen(*operands: Any, default: Any, **others: Any) -> Any:
            return others.get(platform, default)(*operands)

        monkeypatch.setattr(experts_exchange, "by_platform", chosen)
        run = with_gradients(sharded(mesh_of(4, 2), "alltoall"))
        return [run(case, assignment) for assignment in assignments]

    monkeypatch.setattr(experts_rounds, "ragged_all_to_all", played)
    case = draw(16, 2)
    # One device alone has something to send: the busiest sender sets the rounds.
    alone, nobody = assign("uniform", 16, 2), assign("uniform", 16, 2)
    alone[16:], nobody[:] = -1, -1
    assignments = [*(assign(kind, 16, 2) for kind in KINDS), alone, nobody]
    visit_in_turn, ahead = run_on("cuda"), run_on("tpu")
    for visit, assignment in zip(visit_in_turn, assignments, strict=True):
        assert_true(visit, case, assignment)
    # Sent ahead, rows are summed in the same order.
    jax.tree.map(np.testing.assert_array_equal, ahead, visit_in_turn)


@pytest.mark.parametrize("buffer_rows", [1, 7])
def test_no_token_is_dropped(buffer_rows: int) -> None:
    """With ones for tokens and e + 1 for expert e, sums are whole numbers and exact."""
    tokens, experts, k, d, f = 64, 8, 2, 4, 2
    a = np.ones((tokens, d), np.float32)
    w = np.ones((experts, d, f), np.float32) * (1 + np.arange(experts))[:, None, None]
    function = sharded(mesh_of(4, 2), "alltoall", buffer_rows=buffer_rows)

    def run(assignment: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jnp.ones((tokens, k))
        out, pull = jax.vjp(lambda w: function(a, w, assignment, gates), w)
        return out, pull(jnp.ones_like(out))[0]

    compiled = jax.jit(run)
    for kind in KINDS:
        assignment = assign(kind, experts, k, tokens)
        out, dw = compiled(assignment)
        np.testing.assert_array_equal(out[:, 0], d * (assignment + 1).sum(1).astype(np.float32))
        # The gradient of each expert counts the tokens it saw.
        np.testing.assert_array_equal(
            dw[:, 0, 0], np.bincount(assignment.ravel(), minlength=experts)
        )
        # And the count would notice: one slot that goes nowhere is one token too few.
        assignment[5, 1] = -1
        assert float(compiled(assignment)[1][:, 0, 0].sum()) == tokens * k - 1


def test_bfloat16_is_summed_in_float32() -> None:
    case, assignment = draw(4, 4, tokens=64, d=64), assign("uniform", 4, 4)
    a, w = jnp.asarray(case.a, jnp.bfloat16), jnp.asarray(case.w, jnp.bfloat16)
    out = jax.jit(expert_matmul)(a, w, assignment, case.gates)
    assert out.dtype == jnp.bfloat16
    exact = truth(
        type(case)(np.asarray(a, np.float32), np.asarray(w, np.float32), case.gates, case.dout),
        assignment,
    )[0]
    # Rounding each expert's answer and the sum once: a few units of 2⁻⁹ of the summands.
    assert np.abs(np.asarray(out, np.float64) - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("exchange", ["alltoall", "allgather"])
def test_answers_of_several_devices_are_summed_in_float32(exchange: str) -> None:
    """256 + 1 + 1 + 1 is 260 rounded once to bfloat16, and 256 or 258 rounded at each addition."""
    a = jnp.ones((8, 1), jnp.bfloat16)
    w = jnp.asarray([256, 1, 1, 1], jnp.bfloat16).reshape(4, 1, 1)
    function = sharded(mesh_of(4, 1), exchange)
    everywhere = jnp.tile(jnp.arange(4), (8, 1))

    def both(a: jax.Array, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, pull = jax.vjp(lambda a: function(a, w, everywhere, gates), a)
        return out, pull(jnp.ones_like(out))[0]

    for gates in (jnp.ones((8, 4)), jnp.ones((8, 4), jnp.bfloat16)):
        out, da = jax.jit(both)(a, gates)
        assert (out.dtype, da.dtype) == (jnp.bfloat16, jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(out, np.float32), 260)
        np.testing.assert_array_equal(np.asarray(da, np.float32), 260)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32])
def test_assignments_can_have_any_integer_type(dtype: Any) -> None:
    """Also of one that does not hold the number of experts, 300."""
    a, w = np.ones((4, 2), np.float32), np.arange(300, dtype=np.float32)
    chosen = np.array([0, 5, 100, 127], dtype)
    matrices = np.broadcast_to(w[:, None, None], (300, 2, 1))
    out = jax.jit(expert_matmul)(a, matrices, chosen)
    np.testing.assert_array_equal(out[:, 0], 2 * np.float32(chosen))
    at_once: Any = expert_matmul
    np.testing.assert_array_equal(at_once(a, matrices, chosen), out)


def test_axes_in_another_order_than_the_mesh() -> None:
    case, chosen = draw(8, 2), assign("adversarial", 8, 2)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("X", "Y", "Z"))
    over, columns = ("Z", "X"), "Y"
    for exchange in ("alltoall", "allgather"):
        function = jax.shard_map(
            partial(expert_matmul, axis_name=over, gather_axis_name=columns, exchange=exchange),
            mesh=mesh,
            in_specs=(P(over, columns), P(over, None, columns), P(over), P(over)),
            out_specs=P(over, columns),
        )
        assert_true(with_gradients(function)(case, chosen), case, chosen, exchange)
