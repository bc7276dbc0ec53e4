"""`top_k(verify=True)` never returns a wrong approximate result."""

# mypy: allow-untyped-calls

import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

from drumline.errors import UserError
from drumline.numerics import topk
from drumline.numerics.topk import TopKCheck, TopKWarning, top_k, violations
from drumline.numerics.topk_survey import DISTRIBUTIONS
from tests.numerics import faulty_topk

ROWS, LENGTH, K = 4, 64, 8

Approximate = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]


@pytest.fixture
def replace_approx_max_k(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Approximate], None]]:
    """Return a function that replaces `lax.approx_max_k`."""

    def replace_function(approximate: Approximate) -> None:
        topk._compile_verified_indices.cache_clear()
        monkeypatch.setattr(lax, "approx_max_k", lambda x, k, **_: approximate(x, k))

    yield replace_function
    topk._compile_verified_indices.cache_clear()


def run_with_callbacks(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result after its callbacks have run."""
    result = function(*arguments)
    jax.effects_barrier()
    return result


def hash_of_rows(x: jax.Array, modulus: int) -> jax.Array:
    """Return a number that depends on the rows."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return (bits.sum() % modulus).astype(jnp.int32)


def out_of_range(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values, indices = lax.top_k(x, k)
    bad_index = jnp.where(hash_of_rows(x, 2) == 0, -1, x.shape[-1])
    return values, indices.at[hash_of_rows(x, ROWS), hash_of_rows(x, k)].set(bad_index)


def repeated_index(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values, indices = lax.top_k(x, k)
    row, column = hash_of_rows(x, ROWS), hash_of_rows(x, k - 1)
    return (
        values.at[row, column + 1].set(values[row, column]),
        indices.at[row, column + 1].set(indices[row, column]),
    )


def wrong_value(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values, indices = lax.top_k(x, k)
    row, column = hash_of_rows(x, ROWS), hash_of_rows(x, k)
    return values.at[row, column].set(jnp.nextafter(values[row, column], x.dtype.type(-9))), indices


def not_descending(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values, indices = lax.top_k(x, k)
    row, column = hash_of_rows(x, ROWS), hash_of_rows(x, k - 1)
    permutation = jnp.arange(k).at[column].set(column + 1).at[column + 1].set(column)
    return (
        values.at[row].set(values[row][permutation]),
        indices.at[row].set(indices[row][permutation]),
    )


def no_maximum(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values, indices = lax.top_k(x, k + 1)
    row = hash_of_rows(x, ROWS)
    return (
        values[:, :k].at[row].set(values[row, 1:]),
        indices[:, :k].at[row].set(indices[row, 1:]),
    )


def missed_elements(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Miss all but the maximum."""
    values, indices = lax.top_k(x, x.shape[-1])
    row = hash_of_rows(x, ROWS)
    kept_ranks = jnp.concatenate([jnp.arange(1), jnp.arange(k, 2 * k - 1)])
    return (
        values[:, :k].at[row].set(values[row][kept_ranks]),
        indices[:, :k].at[row].set(indices[row][kept_ranks]),
    )


FAULTY_RESULTS: dict[TopKCheck, Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]] = {
    TopKCheck.RANGE: out_of_range,
    TopKCheck.TWICE: repeated_index,
    TopKCheck.VALUE: wrong_value,
    TopKCheck.ORDER: not_descending,
    TopKCheck.MAXIMUM: no_maximum,
    TopKCheck.MISSED: missed_elements,
}


def rows(seed: int, dtype: Any = np.float32) -> np.ndarray:
    """Return rows with different elements, in every type."""
    random = np.random.default_rng(seed)
    ranked = np.stack([random.permutation(LENGTH) for _ in range(ROWS)])
    values_of_rows: np.ndarray = (ranked - 20.0).astype(dtype)
    if dtype == np.float32:
        values_of_rows += random.uniform(-0.4, 0.4, values_of_rows.shape).astype(np.float32)
    return values_of_rows


@jax.jit
def exact_top_k(x: jax.Array) -> Any:
    return lax.top_k(x, K)


@pytest.mark.parametrize("check", FAULTY_RESULTS)
def test_a_wrong_result_is_always_replaced_by_the_exact_one(
    check: TopKCheck, replace_approx_max_k: Callable[[Approximate], None]
) -> None:
    replace_approx_max_k(FAULTY_RESULTS[check])
    verified_top_k = jax.jit(lambda x: top_k(x, K, verify=True, recall_target=0.97))
    for seed in range(25):
        x = rows(seed)
        with pytest.warns(TopKWarning, match=f"in 1 of {ROWS} rows .*{check} in 1"):
            values, indices = run_with_callbacks(verified_top_k, x)
        for actual, reference in zip((values, indices), exact_top_k(x), strict=True):
            np.testing.assert_array_equal(actual, reference)


@pytest.mark.parametrize("axis", [0, 1])
def test_mapped_rows_are_one_batch(
    axis: int, replace_approx_max_k: Callable[[Approximate], None]
) -> None:
    def all_without_maximum(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        values, indices = lax.top_k(x, k + 1)
        return values[..., 1:], indices[..., 1:]

    replace_approx_max_k(all_without_maximum)
    x = rows(3)
    mapped = jax.jit(jax.vmap(lambda row: top_k(row, K, verify=True)[1], in_axes=axis))
    with pytest.warns(TopKWarning, match=f"in {ROWS} of {ROWS} rows") as warnings_raised:
        indices = run_with_callbacks(mapped, x if axis == 0 else x.T)
    assert len(warnings_raised) == 1
    np.testing.assert_array_equal(indices, lax.top_k(x, K)[1])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.int32])
def test_a_good_result_is_used_without_a_warning(dtype: Any) -> None:
    x = jnp.asarray(rows(5, dtype))
    expected = lax.top_k(x, K)
    for function in (top_k, jax.jit(top_k, static_argnames=("k", "verify"))):
        for verify in (False, True):
            outputs = run_with_callbacks(partial(function, k=K, verify=verify), x)
            for actual, reference in zip(outputs, expected, strict=True):
                assert actual.dtype == reference.dtype
                np.testing.assert_array_equal(actual, reference)


def test_an_allowed_miss_stays(replace_approx_max_k: Callable[[Approximate], None]) -> None:
    """The approximate result is used, and the exact one is not computed."""

    def misses_the_second(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        values, indices = lax.top_k(x, k + 1)
        return jnp.delete(values, 1, axis=-1), jnp.delete(indices, 1, axis=-1)

    replace_approx_max_k(misses_the_second)
    x = rows(7)
    _, indices = run_with_callbacks(partial(top_k, k=K, verify=True, recall_target=0.9), x)
    np.testing.assert_array_equal(indices, np.delete(lax.top_k(x, K + 1)[1], 1, axis=-1))


def test_a_false_alarm_of_the_quick_count_gives_no_warning(
    replace_approx_max_k: Callable[[Approximate], None],
) -> None:
    """Miss the smallest element: the quick count is too high, the exact one is not."""

    def last_is_least(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        ranked = lax.top_k(x, x.shape[-1])
        kept_ranks = jnp.concatenate([jnp.arange(k - 1), jnp.array([x.shape[-1] - 1])])
        return ranked[0][:, kept_ranks], ranked[1][:, kept_ranks]

    replace_approx_max_k(last_is_least)
    x = rows(8)
    _, indices = run_with_callbacks(partial(top_k, k=K, verify=True, recall_target=0.9), x)
    np.testing.assert_array_equal(indices, lax.top_k(x, K)[1])


@pytest.mark.parametrize("mapped", [False, True])
def test_the_gradient_is_that_of_the_exact_one(mapped: bool) -> None:
    x, weight = jnp.asarray(rows(9)), jnp.arange(1.0, K + 1)

    def gradient(verify: bool) -> jax.Array:
        def loss(rows: jax.Array) -> jax.Array:
            return (top_k(rows, K, verify=verify)[0] ** 2 * weight).sum()

        gradient: jax.Array = jax.jit(jax.vmap(jax.grad(loss)) if mapped else jax.grad(loss))(x)
        return gradient

    np.testing.assert_array_equal(gradient(True), gradient(False))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_rows_of_every_kind_are_sorted(dtype: Any) -> None:
    """This includes NaN, which the approximate result may not sort."""
    verified_top_k = jax.jit(partial(top_k, k=20, verify=True))
    for draw in DISTRIBUTIONS.values():
        x = draw(np.random.default_rng(0), (4, 200), jnp.dtype(dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TopKWarning)
            values, indices = run_with_callbacks(verified_top_k, x)
        assert violations(x, values, indices) == []


def primitives(jaxpr: Any, in_branch: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the names of all operations of a program, with True for those in a branch."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, in_branch
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(parameter):
                inner_program = getattr(parameter, "jaxpr", parameter)
                yield from primitives(inner_program, in_branch or equation.primitive.name == "cond")


def is_program(value: Any) -> bool:
    return hasattr(value, "eqns")


@pytest.mark.parametrize("mapped", [False, True])
def test_the_exact_result_is_computed_only_in_a_branch(mapped: bool) -> None:
    verified_top_k = partial(top_k, k=K, verify=True)
    program = jax.make_jaxpr(jax.vmap(verified_top_k) if mapped else verified_top_k)(rows(0))
    calls = list(primitives(program.jaxpr))
    assert ("approx_top_k", False) in calls
    assert ("top_k", True) in calls
    assert ("top_k", False) not in calls


class DeviceChecks:
    """The checks of `top_k`, compiled for given results."""

    def __init__(self, dtype: str) -> None:
        self.failed: set[TopKCheck] = set()

        def record(rows: int, by_check: np.ndarray, *_: np.ndarray) -> None:
            assert rows == faulty_topk.ROWS
            self.failed |= {
                check for check, count in zip(TopKCheck, by_check, strict=True) if count
            }

        def verified_top_k(x: jax.Array, values: jax.Array, indices: jax.Array) -> jax.Array:
            with (
                mock.patch.object(lax, "approx_max_k", return_value=(values, indices)),
                mock.patch.object(topk, "_warn", record),
            ):
                return topk._verified_indices(x, faulty_topk.K, 1.0)

        x = jax.ShapeDtypeStruct((faulty_topk.ROWS, faulty_topk.LENGTH), dtype)
        result = jax.ShapeDtypeStruct((faulty_topk.ROWS, faulty_topk.K), dtype)
        index = jax.ShapeDtypeStruct((faulty_topk.ROWS, faulty_topk.K), jnp.int32)
        self.verified_top_k = jax.jit(verified_top_k).lower(x, result, index).compile()

    def __call__(self, result: faulty_topk.Result) -> tuple[set[TopKCheck], np.ndarray]:
        self.failed = set()
        indices = run_with_callbacks(self.verified_top_k, result.x, result.values, result.indices)
        return self.failed, np.asarray(indices)


device_checks_of = lru_cache(DeviceChecks)


@pytest.mark.parametrize("check", [None, *faulty_topk.FAULTY_RESULTS])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(faulty_topk.results)
def test_the_device_finds_the_same_violations_as_the_host(
    check: TopKCheck | None, result: faulty_topk.Result
) -> None:
    correct_indices = result.indices.copy()
    if check is not None:
        faulty_topk.FAULTY_RESULTS[check](result)
    failed, indices = device_checks_of(str(result.x.dtype))(result)
    expected = {
        violation.check for violation in violations(result.x, result.values, result.indices)
    }
    assert check is None or check in failed
    if expected & {TopKCheck.RANGE, TopKCheck.TWICE}:
        # Missing elements are counted only roughly if indices are wrong.
        missing_checks = {TopKCheck.MAXIMUM, TopKCheck.MISSED}
        failed, expected = failed - missing_checks, expected - missing_checks
    assert failed == expected
    if failed:
        values = np.take_along_axis(result.x, indices, axis=1)
        assert violations(result.x, values, indices) == []
    else:
        np.testing.assert_array_equal(indices, correct_indices)


def test_empty_inputs_give_empty_results() -> None:
    assert top_k(jnp.ones((2, 3)), 0, verify=True)[0].shape == (2, 0)
    assert top_k(jnp.ones((0, 3)), 2, verify=True)[1].shape == (0, 2)


@pytest.mark.parametrize(
    ("shape", "k", "recall", "message"),
    [
        ((2, 3), 4, 0.9, "k is 4 and rows have 3 elements"),
        ((2, 3), -1, 0.9, "k is -1"),
        ((), 1, 0.9, "single number"),
        ((3,), 1, 0.0, "recall_target is 0.0"),
        ((3,), 1, float("nan"), "recall_target is nan"),
    ],
)
def test_bad_arguments_are_a_user_error(
    shape: tuple[int, ...], k: int, recall: float, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        top_k(jnp.ones(shape), k, verify=True, recall_target=recall)
