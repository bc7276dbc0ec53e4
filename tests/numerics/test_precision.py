"""Functions in several execution modes: the changes, their first operation and the reason."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend import core as jex

from drumline.errors import UserError
from drumline.numerics import precision
from drumline.numerics.rounding.differences import Margin, count_flips, measure_difference
from drumline.numerics.rounding.execution import (
    ExecutionMode,
    Float64Unavailable,
    ProgramInMode,
    all_executions,
    run_in_float64,
)
from drumline.numerics.rounding.first_difference import DifferenceSearch, OperationRunner, explain
from drumline.numerics.rounding.precision import PrecisionReport, VariantReport
from drumline.numerics.rounding.tracing import TracedFunction, make_closed_jaxpr, trace

LENGTH = 30


def random_array(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def line(function: Callable[..., Any], marker: str) -> int:
    """Return the number of the function's line that ends with `# marked`."""
    lines, first_index = inspect.getsourcelines(function)
    return first_index + next(
        i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {marker}")
    )


def run_in(report: PrecisionReport, mode: ExecutionMode) -> VariantReport:
    return next(variant for variant in report.variants if variant.mode is mode)


# The first difference -----------------------------------------------------------------------------


def rounded_intermediate(x: jax.Array) -> jax.Array:
    rounded_product = x * jnp.bfloat16(3.1)  # rounded
    widened = rounded_product.astype(jnp.float32)  # wide again
    return jnp.abs(widened)  # the same bits compiled alone or in a fusion


def test_a_dropped_rounding_is_found_at_its_line() -> None:
    report = precision(rounded_intermediate, random_array(64, 64).astype(jnp.bfloat16))
    no_excess = run_in(report, ExecutionMode.NO_EXCESS)
    assert 0 < no_excess.changes <= 64 * 64
    assert no_excess.first is not None
    operation = no_excess.first.operation
    assert operation.primitive == "convert_element_type"
    assert (operation.inputs, operation.outputs) == (("bfloat16[64,64]",), ("float32[64,64]",))
    assert operation.source is not None
    assert operation.source.file == __file__
    assert operation.source.line == line(rounded_intermediate, "wide again")
    assert "its bfloat16 operand was kept in float32" in no_excess.first.reason
    assert f":{line(rounded_intermediate, 'rounded')} never happened" in no_excess.first.reason
    # The compiled result is closer to exact arithmetic, but differs from the written rounding.
    compiled, rounded = report.as_compiled.outputs[0].error, no_excess.outputs[0].error
    assert compiled is not None
    assert rounded is not None
    assert compiled.largest < rounded.largest
    assert "xla_allow_excess_precision" in report.verdict


def test_op_by_op_distinguishes_a_dropped_rounding_from_fusion() -> None:
    report = precision(rounded_intermediate, random_array(64, 64).astype(jnp.bfloat16))
    op_by_op = run_in(report, ExecutionMode.OP_BY_OP)
    assert op_by_op.same_as is ExecutionMode.NO_EXCESS
    assert op_by_op.first == run_in(report, ExecutionMode.NO_EXCESS).first
    assert "op by op" not in report.verdict


def test_a_function_without_changes_is_reported() -> None:
    report = precision(lambda x, y: x + y, random_array(8), random_array(8, seed=1))
    assert not report.changes
    assert [variant.first for variant in report.variants] == [None, None, None]
    assert report.verdict.startswith("nothing changes on this device (")
    assert report.as_compiled.outputs[0].error is not None
    assert report.as_compiled.outputs[0].error.ulps is not None
    assert 0 < report.as_compiled.outputs[0].error.ulps <= 0.5


def additions(x: jax.Array) -> jax.Array:
    for index in range(LENGTH):
        x = x + (index + 0.5)
    return x


@pytest.fixture(scope="module")
def chain() -> TracedFunction:
    traced = trace(additions, [random_array(4)])
    assert len(traced) == LENGTH
    return traced


def with_subtraction(traced: TracedFunction, index: int) -> ProgramInMode:
    """Replace one addition by a subtraction."""
    equations = list(traced.closed_jaxpr.jaxpr.eqns)
    equations[index] = equations[index].replace(primitive=jex.primitives.sub_p)
    jaxpr = traced.closed_jaxpr.jaxpr
    closed = make_closed_jaxpr([], jaxpr.invars, jaxpr.outvars, equations)
    return ProgramInMode(ExecutionMode.OP_BY_OP, replace(traced, closed_jaxpr=closed))


def first_index(search: DifferenceSearch, execution: OperationRunner, end: int) -> int | None:
    difference = search.find(execution, [end])
    return None if difference is None else difference[0]


@dataclass
class CountingExecution:
    """An execution that counts the calls."""

    variant: ProgramInMode
    run_count: int = 0

    def results(self, index: int) -> list[np.ndarray]:
        self.run_count += 1
        return self.variant.results(index)


@pytest.mark.parametrize("index", range(LENGTH))
def test_a_change_is_found_at_any_operation(chain: TracedFunction, index: int) -> None:
    execution = CountingExecution(with_subtraction(chain, index))
    search = DifferenceSearch(chain, ProgramInMode(ExecutionMode.OP_BY_OP, chain))
    assert first_index(search, execution, LENGTH - 1) == index
    assert execution.run_count <= math.ceil(math.log2(LENGTH)) + 2


@dataclass(frozen=True)
class FakeExecution:
    """An execution with results that differ from 0 at some operations."""

    positions: frozenset[int] = frozenset()

    def results(self, index: int) -> list[np.ndarray]:
        return [floats(index in self.positions)]


@given(positions=st.frozensets(st.integers(0, LENGTH - 1), min_size=1))
@settings(deadline=None, max_examples=200)
def test_a_disappearing_difference_ends_at_neighbours(
    chain: TracedFunction, positions: frozenset[int]
) -> None:
    index = first_index(
        DifferenceSearch(chain, FakeExecution()), FakeExecution(positions), max(positions)
    )
    assert index is not None
    assert index in positions
    assert index == 0 or index - 1 not in positions


def test_the_differing_branch_is_found_behind_an_agreeing_one() -> None:
    def branches(x: jax.Array) -> jax.Array:
        left = jnp.sin(x)
        right = jnp.cos(jnp.cos(jnp.cos(x)))
        return left + right

    traced = trace(branches, [random_array(4)])
    assert [e.primitive.name for e in traced.closed_jaxpr.jaxpr.eqns] == [
        "sin",
        "cos",
        "cos",
        "cos",
        "add",
    ]
    assert (
        first_index(DifferenceSearch(traced, FakeExecution()), FakeExecution(frozenset({0, 4})), 4)
        == 0
    )


def test_an_output_that_agrees_by_itself_has_no_first_operation(
    chain: TracedFunction,
) -> None:
    assert (
        first_index(DifferenceSearch(chain, FakeExecution()), FakeExecution(), LENGTH - 1) is None
    )


def test_the_reason_for_a_matmul_is_its_precision() -> None:
    def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y

    variants = {
        variant.mode: variant
        for variant in all_executions(matmul, [random_array(4, 4), random_array(4, 4)])
    }
    equation = variants[ExecutionMode.HIGHEST].program.closed_jaxpr.jaxpr.eqns[0]
    assert equation.params["precision"] == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    assert (
        variants[ExecutionMode.AS_COMPILED].program.closed_jaxpr.jaxpr.eqns[0].params["precision"]
        is None
    )
    reason = explain(
        variants[ExecutionMode.HIGHEST].program, 0, ExecutionMode.HIGHEST, is_excess=False
    )
    assert reason.startswith("a matmul at default precision")


def test_a_fused_multiply_and_add_is_explained() -> None:
    def multiply_and_subtract(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y - x

    reason = explain(
        trace(multiply_and_subtract, [random_array(4), random_array(4)]),
        1,
        ExecutionMode.OP_BY_OP,
        is_excess=False,
    )
    assert "a multiply and an add became one rounding" in reason
    assert f"{__name__.rpartition('.')[2]}.py:" in reason


# Kinds of traced functions ------------------------------------------------------------------------


@jax.jit
def inner(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, 0.1 * x)  # inner


@jax.custom_vjp
def with_own_gradient(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


with_own_gradient.defvjp(
    lambda x: (with_own_gradient(x), x),
    lambda x, g: (g * (1 - jnp.tanh(x) ** 2),),
)


def nested(x: jax.Array, w: jax.Array) -> dict[str, Any]:
    def layer(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = with_own_gradient(inner(x @ w) * scale)
        return x, x.sum()

    x, sums = lax.scan(jax.checkpoint(layer), inner(x), jnp.arange(1.0, 4.0))
    x = lax.cond(sums[0] > 0, jnp.sin, jnp.cos, jax.nn.relu(x))
    return {"state": x, "sums": (sums, sums.argmax()), "ended": lax.stop_gradient(x)}


def test_inlined_calls_compute_the_same_as_jit() -> None:
    x, w = random_array(4, 8), random_array(8, 8, seed=1)
    traced = trace(nested, [x, w])
    assert not {"jit", "checkpoint", "custom_vjp_call", "custom_jvp_call"} & {
        equation.primitive.name for equation in traced.closed_jaxpr.jaxpr.eqns
    }
    outputs = ProgramInMode(ExecutionMode.AS_COMPILED, traced).outputs()
    expected = jax.tree.leaves(jax.jit(nested)(x, w))
    pairs = zip(outputs, expected, strict=True)
    assert not any(
        measure_difference(compiled, np.asarray(reference)).differing
        for compiled, reference in pairs
    )
    assert traced.output_names == ("ended", "state", "sums.0", "sums.1")
    names = [equation.primitive.name for equation in traced.closed_jaxpr.jaxpr.eqns]
    selected = traced.sources[names.index("select_n")]
    assert selected is not None
    assert selected.line == line(inspect.unwrap(inner), "inner")


def test_a_function_called_twice_is_inlined_twice() -> None:
    x = random_array(8)
    traced = trace(lambda x: inner(inner(x)), [x])
    [output] = ProgramInMode(ExecutionMode.OP_BY_OP, traced).outputs()
    np.testing.assert_array_equal(output, jnp.where(x > 0, x, np.float32(0.1) * (0.1 * x)))


def test_a_rounding_inside_a_loop_is_found_at_the_loop() -> None:
    def loop(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            bf16_product = x.astype(jnp.bfloat16) * jnp.bfloat16(1.1)
            return bf16_product.astype(jnp.float32), None

        return lax.scan(body, jnp.sin(x), None, length=3)[0]  # looped

    no_excess = run_in(precision(loop, random_array(64)), ExecutionMode.NO_EXCESS)
    assert no_excess.first is not None
    assert no_excess.first.operation.primitive == "scan"
    assert no_excess.first.operation.source is not None
    assert no_excess.first.operation.source.line == line(loop, "looped")
    assert "inside it, values were kept in float32" in no_excess.first.reason


def test_a_changed_index_is_an_output_that_changes() -> None:
    def choose(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        bf16_product = x * jnp.bfloat16(1.1)
        maximum = bf16_product.max(axis=-1, keepdims=True)
        at_maximum = bf16_product.astype(jnp.float32) >= maximum.astype(jnp.float32)  # compared
        return jnp.argmax(at_maximum, axis=-1), at_maximum

    report = precision(choose, random_array(64, 32).astype(jnp.bfloat16))
    no_excess = run_in(report, ExecutionMode.NO_EXCESS)
    indices, at_maximum = no_excess.outputs
    assert (indices.kind, at_maximum.kind) == ("int32[64]", "bool[64,32]")
    assert indices.change.differing > 0
    assert indices.change.ulps is None
    assert no_excess.first is not None
    assert no_excess.first.operation.source is not None
    assert no_excess.first.operation.source.line == line(choose, "compared")


def test_nested_functions_have_a_reference_in_float64() -> None:
    x, w = random_array(4, 8), random_array(8, 8, seed=1)
    exact = run_in_float64(trace(nested, [x, w]))
    float64_inputs = [np.asarray(array, np.float64) for array in (x, w)]
    state = np.where(
        float64_inputs[0] > 0, float64_inputs[0], np.float64(np.float32(0.1)) * float64_inputs[0]
    )
    sums = []
    for scale in (1.0, 2.0, 3.0):
        matmul = state @ float64_inputs[1]
        slope = np.where(matmul > 0, matmul, np.float64(np.float32(0.1)) * matmul)
        state = np.tanh(slope * scale)
        sums.append(state.sum())
    positive = np.maximum(state, 0)
    state = np.sin(positive) if sums[0] > 0 else np.cos(positive)
    assert exact[1].dtype == np.float64
    np.testing.assert_allclose(exact[1], state, rtol=1e-13)
    np.testing.assert_allclose(exact[2], sums, rtol=1e-13)
    assert exact[3] == np.argmax(sums)


def test_complex_numbers_and_a_solver_have_a_reference() -> None:
    def solve_and_transform(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.linalg.solve(x, x[0]), jnp.fft.fft(x[1]) * (1 + 2j)

    x = random_array(6, 6)
    float64_inputs = np.asarray(x, np.float64)
    solution, waves = run_in_float64(trace(solve_and_transform, [x]))
    np.testing.assert_allclose(
        solution, np.linalg.solve(float64_inputs, float64_inputs[0]), rtol=1e-9
    )
    np.testing.assert_allclose(waves, np.fft.fft(float64_inputs[1]) * (1 + 2j), rtol=1e-12)
    error = precision(solve_and_transform, x).as_compiled.outputs[1].error
    assert error is not None
    assert error.ulps is not None
    assert 0 < error.ulps < 100


def test_random_numbers_are_the_same_in_the_reference() -> None:
    def draw_twice(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.random.uniform(key, (16,)), jax.random.split(key)

    key = jax.random.key(3)
    uniform, keys = run_in_float64(trace(draw_twice, [key]))
    np.testing.assert_array_equal(uniform, np.asarray(draw_twice(key)[0], np.float64))
    np.testing.assert_array_equal(keys, jax.random.key_data(jax.random.split(key)))
    assert not precision(draw_twice, key).changes


def test_without_float64_the_reference_is_left_out() -> None:
    def low_bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int32) & 7

    with pytest.raises(
        Float64Unavailable, match=r"bitcast_convert_type at .*test_precision.py:\d+ cannot"
    ):
        run_in_float64(trace(low_bits, [random_array(8)]))
    report = precision(low_bits, random_array(8))
    assert report.as_compiled.outputs[0].error is None
    assert "bitcast_convert_type" in report.left_out[0]


def test_prints_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    def printing(x: jax.Array) -> jax.Array:
        jax.debug.print("x is {}", x)
        return x * 2

    assert precision(printing, random_array(4)).operations == 1
    jax.effects_barrier()  # type: ignore[no-untyped-call]
    assert capfd.readouterr().out == ""


def test_the_options_of_the_users_jit_are_kept() -> None:
    user_jit = jax.jit(rounded_intermediate, compiler_options={"xla_allow_excess_precision": False})
    assert not run_in(
        precision(user_jit, random_array(64, 64).astype(jnp.bfloat16)), ExecutionMode.NO_EXCESS
    ).changes


def test_inputs_that_are_not_arrays_are_passed_on() -> None:
    def scale_by(x: jax.Array, options: dict[str, Any]) -> jax.Array:
        return x * options["by"] if options["mode"] == "times" else x

    assert precision(scale_by, random_array(4), {"mode": "times", "by": 2.0}).operations == 2


def test_an_output_that_is_an_input_and_a_constant_output() -> None:
    def pass_through(x: jax.Array) -> tuple[Any, ...]:
        return x, jnp.ones(3), np.arange(4), True

    report = precision(pass_through, random_array(4))
    assert not report.changes
    kinds = [output.kind for output in report.as_compiled.outputs]
    assert kinds == ["float32[4]", "float32[3]", "int32[4]", "bool[]"]


@pytest.mark.parametrize(
    ("function", "inputs", "message"),
    [
        (lambda x: x.nonsense, [1.0], "cannot be traced: AttributeError"),
        (lambda: None, [], "returns no array"),
        (lambda x: x if x > 0 else -x, [1.0], "bind that input with functools.partial"),
        (lambda x: x, [np.array(["a"])], "not an array"),
    ],
)
def test_functions_that_cannot_be_compared_are_a_user_error(
    function: Callable[..., Any], inputs: Sequence[Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        precision(function, *inputs)
    assert "\n" not in str(raised.value)


# Numbers ------------------------------------------------------------------------------------------


def test_ulps_are_those_of_the_dtype() -> None:
    compiled = np.array([1.0, 2.0, 0.0, np.nan, np.inf], np.float32)
    reference = np.array([1.0, np.nextafter(np.float32(2), np.float32(3)), 0.0, np.nan, np.inf])
    difference = measure_difference(compiled, reference.astype(np.float32))
    assert (difference.elements, difference.differing, difference.ulps) == (5, 1, 1.0)
    assert difference.largest == 2.0**-22
    bf16_product = measure_difference(
        jnp.bfloat16([1.0]).__array__(), jnp.bfloat16([1.0078125]).__array__()
    )
    assert bf16_product.ulps == 1.0
    across_zero = measure_difference(floats(1e-45), floats(-1e-45))
    assert across_zero.ulps == 2.0
    assert measure_difference(floats(1.0), floats(np.inf)).largest == np.inf
    assert measure_difference(floats(1.0), floats(np.nan)).ulps == np.inf
    signed_zeros = measure_difference(floats(0.0), floats(-0.0))
    assert (signed_zeros.differing, signed_zeros.largest) == (1, 0.0)
    integers = measure_difference(np.array([1, 2, 3]), np.array([1, 5, 3]))
    assert (integers.differing, integers.largest, integers.ulps) == (1, 3.0, None)


def test_flipped_decisions_are_counted_with_their_margins() -> None:
    compiled = np.array([[[1, 2, 4], [8, 1, 1], [2, 3, 1]], [[0, 1, 0], [5, 5, 1], [9, 1, 8]]])
    reference = compiled.copy()
    reference[0, 0] = [5, 2, 4]
    reference[1, 1] = [5, 6, 1]
    reference[1, 2] = [9, 1, 8.5]
    flips = count_flips("logits", compiled.astype(np.float32), reference.astype(np.float32))
    assert (flips.output, flips.decisions, flips.flipped) == ("logits", 6, 2)
    assert flips.largest == Margin(2.0, 2.0 * 2**21)
    assert flips.median == Margin(1.0, 2**21)
    no_flips = count_flips("logits", compiled.astype(np.float32), compiled.astype(np.float32))
    assert (no_flips.flipped, no_flips.largest, no_flips.median) == (0, None, None)


def test_rows_of_minus_infinity_have_no_margin() -> None:
    compiled, reference = np.full((1, 3), -np.inf, np.float32), floats(-np.inf, 1, -np.inf)[None]
    assert count_flips("scores", compiled, reference).largest == Margin(0.0, 0.0)


def test_the_output_for_the_argmax_must_exist() -> None:
    def scores_and_token(x: jax.Array) -> dict[str, jax.Array]:
        return {"scores": x * 2, "token": jnp.argmax(x, axis=-1)}

    report = precision(scores_and_token, random_array(3, 5), argmax=True)
    assert [counted.output for counted in report.variants[0].flips] == ["scores"]
    assert report.variants[0].flips[0].decisions == 3
    with pytest.raises(UserError, match="there is no output logits; there is scores, token"):
        precision(scores_and_token, random_array(3, 5), output="logits")
    with pytest.raises(UserError, match=r"the output token is int32\[3\]"):
        precision(scores_and_token, random_array(3, 5), output="token")
