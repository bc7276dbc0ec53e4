"""Every exchange agrees with a float64 loop over tokens, in values and all gradients."""

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
from tests.cases import rare

from .tokens import (
    KINDS,
    P,
    assert_close,
    assert_matches_reference,
    assign,
    float64_reference,
    mesh_of,
    random_case,
    sharded,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("traced_for_cpu_alone")
MESHES = ((1, 1), (8, 1), (4, 2), (2, 4))
EXCHANGES = ("allgather", "alltoall")
ALL_RUNS = tuple((mesh, exchange) for mesh in MESHES for exchange in EXCHANGES)
# Few experts with a large k and many with a small one, each on some of the meshes.
SAMPLE = [
    (4, 4, (((4, 2), "allgather"),)),
    (64, 1, (((8, 1), "alltoall"), ((2, 4), "allgather"))),
]
GRID = [(experts, k, ALL_RUNS) for experts in (4, 8, 16, 64) for k in (1, 2, 4)]


@pytest.mark.parametrize(("experts", "k", "sharded_runs"), [*SAMPLE, *rare(*GRID)])
def test_every_exchange_agrees_with_a_loop_over_tokens_and_the_local_function(
    experts: int, k: int, sharded_runs: tuple[tuple[tuple[int, int], str], ...]
) -> None:
    """Compare meshes that fit the experts, with every assignment and slots out of range."""
    case = random_case(experts, k)
    assignments = {kind: assign(kind, experts, k) for kind in (*KINDS, "out of range")}
    expected = {
        kind: float64_reference(case, assignment) for kind, assignment in assignments.items()
    }
    # With one open gate per token the sum over k has one term, so its order cannot matter.
    open_gates = np.eye(k, dtype=np.float32)[np.random.default_rng(0).integers(0, k, len(case.a))]
    one_gate_case, skewed = replace(case, gates=open_gates), assignments["adversarial"]
    runs = {"local": with_gradients(expert_matmul)}
    for mesh, exchange in sharded_runs:
        if experts % mesh[0] == 0:
            runs[f"{exchange} on {mesh}"] = with_gradients(sharded(mesh_of(*mesh), exchange))
    local_output = runs["local"](one_gate_case, skewed)[0]
    for name, run in runs.items():
        for kind, assignment in assignments.items():
            assert_close(run(case, assignment), expected[kind], f"{name}, {kind}")
        np.testing.assert_array_equal(run(one_gate_case, skewed)[0], local_output, name)


def test_unsharded_columns_and_an_unchecked_shard_map() -> None:
    case, assignment = random_case(8, 2), assign("adversarial", 8, 2)
    run = with_gradients(sharded(mesh_of(4, 2), "alltoall", columns=None, check_vma=False))
    assert_matches_reference(run(case, assignment), case, assignment)


@pytest.mark.parametrize(
    ("columns", "platforms"), [(1, ("tpu",)), *rare((1, ("cuda", "tpu")), (2, ("cuda", "tpu")))]
)
def test_packed_buffers_arrive_at_the_right_rows(
    columns: int, platforms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the path for GPU and TPU, with `ragged_all_to_all` emulated by an all-gather."""

    def emulated_ragged_all_to_all(
        operand: jax.Array,
        output: jax.Array,
        input_offsets: jax.Array,
        send_sizes: jax.Array,
        output_offsets: jax.Array,
        recv_sizes: jax.Array,
        *,
        axis_name: str,
    ) -> jax.Array:
        device = lax.axis_index(axis_name)
        row = jnp.arange(operand.shape[0])
        gathered = [
            lax.all_gather(x, axis_name) for x in (input_offsets, send_sizes, output_offsets)
        ]
        all_rows = lax.all_gather(operand, axis_name)
        for source in range(all_rows.shape[0]):
            start, size, offset = (x[source, device] for x in gathered)
            size = jnp.where(size == recv_sizes[source], size, 0)  # sender and receiver must agree
            received = ((row >= offset) & (row < offset + size))[:, None]
            rows = all_rows[source, jnp.clip(start + row - offset, 0, row.size - 1)]
            output = jnp.where(received, rows, output)
        return output

    def run_on(platform: str) -> list[tuple[jax.Array, ...]]:
        def select_platform(*operands: Any, default: Any, **others: Any) -> Any:
            return others.get(platform, default)(*operands)

        monkeypatch.setattr(experts_exchange, "by_platform", select_platform)
        run = with_gradients(sharded(mesh_of(4, columns), "alltoall"))
        return [run(case, assignment) for assignment in assignments]

    monkeypatch.setattr(experts_rounds, "ragged_all_to_all", emulated_ragged_all_to_all)
    case = random_case(16, 2)
    # Only one device has rows to send, and the busiest sender determines the rounds.
    one_sender, no_expert = assign("uniform", 16, 2), assign("uniform", 16, 2)
    one_sender[16:], no_expert[:] = -1, -1
    assignments = [*(assign(kind, 16, 2) for kind in KINDS), one_sender, no_expert]
    outputs = [run_on(platform) for platform in platforms]
    for result, assignment in zip(outputs[0], assignments, strict=True):
        assert_matches_reference(result, case, assignment)
    # A TPU sends ahead, which keeps the order of the sums.
    for other_outputs in outputs[1:]:
        jax.tree.map(np.testing.assert_array_equal, other_outputs, outputs[0])


@pytest.mark.parametrize("buffer_rows", [1, *rare(7)])
def test_no_token_is_dropped(buffer_rows: int) -> None:
    """Use ones for tokens and e + 1 for expert e, so that all sums are exact integers."""
    tokens, experts, k, d, f = 64, 8, 2, 4, 2
    a = np.ones((tokens, d), np.float32)
    w = np.ones((experts, d, f), np.float32) * (1 + np.arange(experts))[:, None, None]
    function = sharded(mesh_of(4, 2), "alltoall", buffer_rows=buffer_rows)

    def run(assignment: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jnp.ones((tokens, k))
        out, vjp_function = jax.vjp(lambda w: function(a, w, assignment, gates), w)
        return out, vjp_function(jnp.ones_like(out))[0]

    compiled = jax.jit(run)
    for kind in KINDS:
        assignment = assign(kind, experts, k, tokens)
        out, dw = compiled(assignment)
        np.testing.assert_array_equal(out[:, 0], d * (assignment + 1).sum(1).astype(np.float32))
        # The gradient of each expert counts its tokens.
        np.testing.assert_array_equal(
            dw[:, 0, 0], np.bincount(assignment.ravel(), minlength=experts)
        )
        # One slot without an expert must reduce the count by one token.
        assignment[5, 1] = -1
        assert float(compiled(assignment)[1][:, 0, 0].sum()) == tokens * k - 1


def test_bfloat16_is_summed_in_float32() -> None:
    case, assignment = random_case(4, 4, tokens=64, d=64), assign("uniform", 4, 4)
    a, w = jnp.asarray(case.a, jnp.bfloat16), jnp.asarray(case.w, jnp.bfloat16)
    out = jax.jit(expert_matmul)(a, w, assignment, case.gates)
    assert out.dtype == jnp.bfloat16
    exact = float64_reference(
        type(case)(np.asarray(a, np.float32), np.asarray(w, np.float32), case.gates, case.dout),
        assignment,
    )[0]
    # Each expert's output and the sum are rounded once: a few units of 2⁻⁹ of the summands.
    assert np.abs(np.asarray(out, np.float64) - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("exchange", ["alltoall", *rare("allgather")])
def test_outputs_of_several_devices_are_summed_in_float32(exchange: str) -> None:
    """The sum 256 + 1 + 1 + 1 is 260 rounded once to bfloat16, but 256 or 258 rounded at each
    addition.
    """
    a = np.ones((8, 1), jnp.bfloat16)
    w = np.array([256, 1, 1, 1], jnp.bfloat16).reshape(4, 1, 1)
    function = sharded(mesh_of(4, 1), exchange)
    every_expert = np.tile(np.arange(4), (8, 1))

    @jax.jit
    def with_gradient(a: Any, gates: Any) -> tuple[jax.Array, jax.Array]:
        out, vjp_function = jax.vjp(lambda a: function(a, w, every_expert, gates), a)
        return out, vjp_function(jnp.ones_like(out))[0]

    for gates in (np.ones((8, 4), np.float32), np.ones((8, 4), jnp.bfloat16)):
        out, da = with_gradient(a, gates)
        assert (out.dtype, da.dtype) == (jnp.bfloat16, jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(out, np.float32), 260)
        np.testing.assert_array_equal(np.asarray(da, np.float32), 260)


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, *rare(np.uint8, np.int16, np.uint16)])
def test_assignments_can_have_any_integer_type(dtype: Any) -> None:
    """Include types that cannot hold the number of experts, 300."""
    a, w = np.ones((4, 2), np.float32), np.arange(300, dtype=np.float32)
    assignment = np.array([0, 5, 100, 127], dtype)
    matrices = np.broadcast_to(w[:, None, None], (300, 2, 1))
    expected = 2 * assignment.astype(np.float32)[:, None]
    untyped_expert_matmul: Any = expert_matmul
    for out in (
        jax.jit(expert_matmul)(a, matrices, assignment),
        # NumPy checks whether a number fits into the type, which JAX does not.
        jax.jit(lambda: untyped_expert_matmul(a, matrices, assignment))(),
    ):
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("exchange", ["alltoall", *rare("allgather")])
def test_axes_in_another_order_than_the_mesh(exchange: str) -> None:
    case, assignment = random_case(8, 2), assign("adversarial", 8, 2)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("X", "Y", "Z"))
    axes, columns = ("Z", "X"), "Y"
    options: Any = {"axis_name": axes, "gather_axis_name": columns, "exchange": exchange}
    function = jax.shard_map(
        partial(expert_matmul, **options),
        mesh=mesh,
        in_specs=(P(axes, columns), P(axes, None, columns), P(axes), P(axes)),
        out_specs=P(axes, columns),
    )
    assert_matches_reference(with_gradients(function)(case, assignment), case, assignment)
