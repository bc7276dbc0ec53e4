"""`violations` finds every fault in a top k, and none in a correct result."""

# mypy: allow-untyped-calls

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from jax import lax

from drumline.errors import UserError
from drumline.numerics.topk import TopKCheck, allowed_misses, recalls, top_k, violations
from drumline.numerics.topk_survey import DISTRIBUTIONS, TopKGrid
from tests.numerics.faulty_topk import DTYPES, FAULTY_RESULTS, ROWS, Result, results


@pytest.mark.parametrize("check", FAULTY_RESULTS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(results)
def test_a_fault_is_found_at_its_position(check: TopKCheck, result: Result) -> None:
    column = FAULTY_RESULTS[check](result)
    failures = violations(result.x, result.values, result.indices)
    assert {violation.row for violation in failures} == {(result.row,)}
    columns = [violation.column for violation in failures if violation.check is check]
    assert columns
    assert column is None or column in columns


@settings(max_examples=150, deadline=None, derandomize=True)
@given(results)
@example(Result("all equal", "float32", 0))
@example(Result("all equal", "bfloat16", 0))
def test_a_correct_result_has_no_violations(result: Result) -> None:
    assert violations(result.x, result.values, result.indices) == []
    assert recalls(result.x, result.indices).tolist() == [1.0] * ROWS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_exact_top_k_of_jax_keeps_the_contract(distribution: str, dtype: str) -> None:
    x = DISTRIBUTIONS[distribution](np.random.default_rng(1), (4, 200), jnp.dtype(dtype))
    values, indices = lax.top_k(x, 20)
    assert violations(x, values, indices) == []


def test_integers_are_checked_too() -> None:
    x = np.array([[3, -7, 3, 9]], np.int32)
    assert violations(x, np.array([[9, 3]], np.int32), np.array([[3, 2]])) == []
    (violation,) = violations(x, np.array([[9, -7]], np.int32), np.array([[3, 1]]))
    assert str(violation) == "more missed than the recall allows at [0, 0]"


def test_equal_elements_are_interchangeable() -> None:
    x = np.array([2.0, 1.0, 2.0, 1.0, 1.0], np.float32)
    values = np.array([2.0, 2.0, 1.0], np.float32)
    for last in (1, 3, 4):
        assert violations(x, values, np.array([2, 0, last])) == []
    failures = violations(x, np.array([2.0, 1.0, 1.0], np.float32), np.array([0, 1, 3]))
    assert [(violation.check, violation.row, violation.column) for violation in failures] == [
        (TopKCheck.MISSED, (), 2)
    ]


def test_rows_have_an_index_for_each_axis() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 10)).astype(np.float32)
    values, indices = (np.array(array) for array in lax.top_k(x, 4))
    indices[1, 2, 3] = 10
    assert {violation.row for violation in violations(x, values, indices)} == {(1, 2)}


def test_a_low_recall_by_chance_is_no_violation() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 512)).astype(np.float32)
    ranked = np.argsort(-x, axis=1)
    kept_ranks = np.sort(
        np.argsort(random.random((200, 512)) > 0.95, axis=1, kind="stable")[:, :64]
    )
    indices = np.take_along_axis(ranked, kept_ranks, axis=1)
    values = np.take_along_axis(x, indices, axis=1)
    recall = recalls(x, indices)
    assert recall.min() < 0.95
    failed_checks = {
        violation.check
        for violation in violations(x, values, indices, recall_target=float(recall.mean()))
    }
    assert failed_checks <= {TopKCheck.MAXIMUM}
    # The whole batch shows a low recall that no single row shows.
    batch_violations = violations(x, values, indices, recall_target=0.98)
    assert {
        violation.row for violation in batch_violations if violation.check is TopKCheck.MISSED
    } == {(row,) for row in range(200) if recall[row] < 1}


@pytest.mark.parametrize(
    ("approximate_k", "target", "allowed"),
    [(10, 1.0, 0), (1, 0.5, 1), (10, 0.95, 8), (64, 0.95, 19)],
)
def test_misses_are_allowed_by_chance_at_the_recall_target(
    approximate_k: int, target: float, allowed: int
) -> None:
    assert allowed_misses(approximate_k, target) == allowed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1.0, 2.0], [0, 1]), "k is 2 and rows have 1 elements"),
        (([1.0, 2.0], [2.0], [0, 1]), "no result for rows"),
        ((1.0, 1.0, 0), "single number"),
    ],
)
def test_invalid_results_are_a_user_error(arguments: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        violations(*(np.asarray(array) for array in arguments))


def test_the_order_of_nan_and_zeros_in_jax() -> None:
    special_values = np.array([1.0, np.nan, np.inf, -np.inf, -0.0, 0.0, -np.nan], np.float32)
    values, indices = jax.jit(lambda x: lax.top_k(x, 7))(special_values)
    assert indices.tolist() == [1, 2, 0, 5, 4, 3, 6]
    assert np.isnan(np.asarray(values)[[0, -1]]).all()


def test_arguments_of_other_types_are_a_user_error() -> None:
    x = np.arange(4.0, dtype=np.float32)
    with pytest.raises(UserError, match=r"k is 2\.5; it has to be a whole number"):
        top_k(x, 2.5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="indices float64"):
        violations(x, x[:2], np.array([0.0, 1.0]))
    with pytest.raises(UserError, match="length: 99999999999 elements"):
        TopKGrid(shapes=((1, 99_999_999_999),))
