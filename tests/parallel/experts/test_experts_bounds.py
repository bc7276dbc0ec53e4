"""Memory does not grow with skew, work stays near one dense matmul, and errors name their cause."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.parallel.experts.matmul import expert_matmul
from drumline.parallel.experts.rounds import default_buffer_rows, round_count
from drumline.parallel.grouped.blocks import blocked_matmul, rows_per_block
from tests.cases import rare

from .tokens import assign, mesh_of, random_case, sharded

# Multiples of the balanced share: k·S/X rows of D/Y columns in and F/Y out, in float32. The
# backward pass also sums the gradient of its experts, whose size is independent of the tokens.
FORWARD_MULTIPLE = 1.0
BACKWARD_MULTIPLE = 1.5


def _type(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


@pytest.mark.every_case
@pytest.mark.usefixtures("traced_for_cpu_alone")
def test_memory_is_bounded_for_any_assignment() -> None:
    tokens, d, f, experts, k, x = 4096, 256, 512, 16, 2, 8
    share = tokens * k // x * (d + f) * 4
    shapes = [_type((tokens, d)), _type((experts, d, f)), _type((tokens, k), jnp.int32)]
    shapes += [_type((tokens, k)), _type((tokens, f))]

    def with_gradients(function: Any) -> Any:
        def run(a: Any, w: Any, assignment: Any, gates: Any, dout: Any) -> Any:
            out, vjp_function = jax.vjp(lambda a, w, g: function(a, w, assignment, g), a, w, gates)
            return out, vjp_function(dout)

        return run

    def compiled(function: Any, *operands: Any) -> tuple[Any, int]:
        program: Any = jax.jit(function).lower(*operands).compile()
        return program, program.memory_analysis().temp_size_in_bytes

    exchanged = sharded(mesh_of(x, 1), "alltoall")
    program, forward = compiled(exchanged, *shapes[:4])
    _, backward = compiled(with_gradients(exchanged), *shapes)
    _, gathered = compiled(sharded(mesh_of(x, 1), "allgather"), *shapes[:4])
    assert forward <= FORWARD_MULTIPLE * share
    assert backward <= BACKWARD_MULTIPLE * share + experts // x * d * f * 4
    assert gathered > 4 * share
    # One program serves every assignment. The most skewed one uses the same memory and more rounds.
    case = random_case(experts, k, tokens=tokens, d=d, f=f)
    out = program(case.a, case.w, assign("one expert", experts, k, tokens), case.gates)
    expected = case.gates.sum(1, keepdims=True) * (case.a @ case.w[-1])
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-2)


def test_skew_costs_rounds() -> None:
    peers, experts, rows = 8, 16, 1024
    capacity = default_buffer_rows(rows, peers)
    even = jnp.full((peers, experts), rows // experts)
    skewed = jnp.zeros((peers, experts), jnp.int32).at[:, 3].set(rows)
    for packed in (False, True):
        assert int(round_count(even, peers, capacity, packed=packed)) == 4
        assert int(round_count(skewed, peers, capacity, packed=packed)) == 4 * peers


def test_the_cpu_does_the_work_of_one_dense_matmul() -> None:
    tokens, d, f, experts = 16384, 64, 64, 64
    m = rows_per_block(tokens, experts)
    operands = (_type((tokens, d)), _type((experts, d, f)), _type((experts,), jnp.int32))
    compiled: Any = (
        jax.jit(lambda x, w, s: blocked_matmul(x, w, s, transpose=False, out_dtype=x.dtype))
        .lower(*operands)
        .compile()
    )
    flops_per_trip = compiled.cost_analysis()["flops"]  # XLA counts the body of a loop once
    dense = 2 * tokens * d * f
    rng = np.random.default_rng(0)
    uniform = np.bincount(rng.integers(0, experts, tokens), minlength=experts)
    one_expert = np.zeros(experts, int)
    one_expert[5] = tokens
    # In the worst case every group has one row more than full blocks.
    worst_case = np.full(experts, tokens // experts // m * m - m + 1)
    worst_case[0] += tokens - worst_case.sum()
    for sizes in (uniform, one_expert, worst_case):
        trips = (-(-sizes // m)).sum()
        assert trips * flops_per_trip <= 1.5 * dense
    ragged: Any = jax.jit(jax.lax.ragged_dot).lower(*operands).compile()
    assert ragged.cost_analysis()["flops"] > 60 * dense


def test_no_array_of_tokens_by_matrices_or_experts_by_tokens_exists() -> None:
    tokens, d, f, experts = 512, 32, 48, 16
    text = (
        jax.jit(expert_matmul)
        .lower(_type((tokens, d)), _type((experts, d, f)), _type((tokens,), jnp.int32))
        .as_text()
    )
    assert f"tensor<{tokens}x{d}x{f}x" not in text
    assert f"tensor<{experts}x{tokens}x{d}x" not in text
    assert f"tensor<{tokens}x{f}x" in text  # the output exists, so the search works


def _assert_rejected(match: str, **changes: Any) -> None:
    operands: dict[str, Any] = {
        "a": jnp.zeros((6, 4)),
        "w": jnp.zeros((3, 4, 5)),
        "assignment": jnp.zeros((6, 2), jnp.int32),
        "gates": jnp.zeros((6, 2)),
    }
    with pytest.raises(ValueError, match=match):
        expert_matmul(**{**operands, **changes})


def test_invalid_arguments_are_rejected() -> None:
    outside = jnp.zeros((6, 2), jnp.int32).at[4, 1].set(3)
    _assert_rejected(
        r"assignment\[4, 1\] is 3, but there are 3 experts, numbered 0 to 2", assignment=outside
    )
    _assert_rejected(r"assignment\[4, 1\] is -3", assignment=-outside)
    _assert_rejected("a has 3 columns, w takes 4", a=jnp.zeros((6, 3)))
    _assert_rejected("7 tokens but 6 rows of assignment", a=jnp.zeros((7, 4)))
    _assert_rejected(r"gates\[6, 3\] must have the shape", gates=jnp.zeros((6, 3)))
    _assert_rejected("it must hold integers", assignment=jnp.zeros((6, 2)))
    _assert_rejected(r"expected a\[S, D\]", w=jnp.zeros((4, 5)))
    _assert_rejected("give both the same float type", w=jnp.zeros((3, 4, 5), jnp.bfloat16))
    _assert_rejected("'alltoall' or 'allgather'", exchange="bicycle")
    _assert_rejected("buffer_rows is 0", buffer_rows=0)
    _assert_rejected("axis_name is missing", gather_axis_name="Y")
    _assert_rejected("names no expert", assignment=jnp.zeros((6, 0), jnp.int32), gates=None)


def test_without_gates_the_experts_are_averaged() -> None:
    case, assignment = random_case(4, 2), jnp.asarray(assign("uniform", 4, 2))
    run = jax.jit(expert_matmul)
    without_gates = run(case.a, case.w, assignment)
    with_equal_gates = run(case.a, case.w, assignment, jnp.full((64, 2), 0.5))
    np.testing.assert_array_equal(without_gates, with_equal_gates)
    single_expert = run(case.a, case.w, assignment[:, 0])
    np.testing.assert_allclose(
        single_expert, np.einsum("sd,sdf->sf", case.a, case.w[assignment[:, 0]]), atol=1e-4
    )


@pytest.mark.parametrize("exchange", ["alltoall", *rare("local", "allgather")])
def test_forward_mode_and_second_derivatives_are_rejected(exchange: str) -> None:
    case, assignment = random_case(4, 2, tokens=8), assign("uniform", 4, 2, 8)
    product: Any = expert_matmul if exchange == "local" else sharded(mesh_of(4, 1), exchange)

    def forward(a: Any) -> Any:
        return product(a, case.w, assignment, case.gates)

    def gradient_norm(a: Any) -> Any:
        return jnp.sum(jax.grad(lambda a: jnp.sum(forward(a) ** 2))(a) ** 2)

    with pytest.raises(ValueError, match=r"expert_matmul: has a gradient .* no forward mode"):
        jax.jit(lambda a: jax.jvp(forward, (a,), (a,)))(case.a)
    with pytest.raises(ValueError, match=r"expert_matmul.*: has a gradient but no second"):
        jax.eval_shape(jax.grad(gradient_norm), case.a)
    local: Any = expert_matmul
    with pytest.raises(ValueError, match=r"expert_matmul: there is no mesh axis 'X' outside"):
        local(case.a, case.w, assignment, case.gates, axis_name="X")


@pytest.mark.every_case
@pytest.mark.parametrize("exchange", ["alltoall", "allgather"])
def test_vmap_over_tokens_equals_separate_calls(exchange: str) -> None:
    case, assignment = random_case(4, 2, tokens=8), assign("adversarial", 4, 2, 8)
    function = sharded(mesh_of(4, 1), exchange)
    batches = np.stack([case.a, 2 * case.a])

    def mapped(batches: Any) -> Any:
        over_tokens: Any = jax.vmap(lambda a: function(a, case.w, assignment, case.gates))
        return over_tokens(batches)

    single_output = jax.jit(function)(case.a, case.w, assignment, case.gates)
    outputs = jax.jit(mapped)(batches)
    np.testing.assert_allclose(
        outputs, np.stack([single_output, 2 * np.asarray(single_output)]), rtol=1e-5, atol=1e-5
    )
