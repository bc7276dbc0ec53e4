"""The judge of a top k finds every fault that is planted, and nothing in what is right."""

# mypy: allow-untyped-calls

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jax import lax

from drumline.numerics.mistakes import Mistake
from drumline.numerics.topk import TopKCheck, allowed_misses, recalls, violations
from drumline.numerics.topk_survey import DISTRIBUTIONS

ROWS, LENGTH, K = 3, 24, 5
DTYPES = ("float32", "bfloat16", "float16")


def compared(x: np.ndarray) -> np.ndarray:
    """Elements as numbers, those that devices take for zero as zeros."""
    value = x.astype(np.float64)
    least = 0.0 if x.dtype == np.float16 else float(jnp.finfo(x.dtype).smallest_normal)
    return np.where(np.abs(value) < least, 0.0, value)


def order(x: np.ndarray) -> np.ndarray:
    """Indices from the largest to the least, by value and not by bits as the code has it."""
    value = compared(x)
    beyond = np.where(np.isnan(value), np.where(np.signbit(value), -1, 1), 0)
    return np.lexsort((-np.where(beyond == 0, value, 0.0), -beyond), axis=-1)


class Result:
    """Rows, the right answer for them, and ways to spoil it."""

    def __init__(self, distribution: str, dtype: str, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.x = DISTRIBUTIONS[distribution](self.random, (ROWS, LENGTH), jnp.dtype(dtype))
        self.order = order(self.x)
        self.indices = self.order[:, :K].astype(np.int32)
        self.values = np.take_along_axis(self.x, self.indices, axis=1)
        self.row = int(self.random.integers(ROWS))
        self.column = int(self.random.integers(K))

    def less(self, a: int, b: int) -> bool:
        """Whether one element of the row is truly less than another."""
        one, other = compared(self.x[self.row])[[a, b]]
        if np.isnan(one) or np.isnan(other):
            return bool(np.isnan(other) and not np.isnan(one))
        return bool(one < other)

    def put(self, column: int, index: int) -> None:
        self.indices[self.row, column] = index
        self.values[self.row, column] = self.x[self.row, index]

    def out_of_range(self) -> int:
        self.indices[self.row, self.column] = self.random.choice([-1, LENGTH, LENGTH + 7, -(2**31)])
        return self.column

    def twice(self) -> int:
        first, second = sorted(self.random.choice(K, 2, replace=False))
        self.put(second, self.indices[self.row, first])
        return int(second)

    def wrong_value(self) -> int:
        bits = self.values.view(f"uint{8 * self.values.dtype.itemsize}")
        bits[self.row, self.column] ^= 1 << int(self.random.integers(8 * self.values.itemsize))
        value = self.values[self.row, self.column]
        own = self.x[self.row, self.indices[self.row, self.column]]
        # Another NaN is no fault: a device may change what it carries.
        with np.errstate(invalid="ignore"):
            assume(value == value or own == own)
        return self.column

    def swapped(self) -> int:
        first = int(self.random.integers(K - 1))
        a, b = self.indices[self.row, first : first + 2].tolist()
        assume(self.less(b, a))
        self.put(first, b)
        self.put(first + 1, a)
        return first + 1

    def no_maximum(self) -> int:
        best = int(self.order[self.row, 0])
        rest = [at for at in self.order[self.row].tolist() if self.less(at, best)]
        assume(len(rest) >= K)
        for column in range(K):
            self.put(column, rest[column])
        x = compared(self.x[self.row])
        return int(np.argmax(np.isnan(x) if np.isnan(x[best]) else x == x[best]))

    def missed(self) -> None:
        last = int(self.indices[self.row, -1])
        rest = [at for at in self.order[self.row].tolist() if self.less(at, last)]
        assume(rest)
        self.put(K - 1, rest[0])


PLANTED: dict[TopKCheck, Callable[[Result], int | None]] = {
    TopKCheck.RANGE: Result.out_of_range,
    TopKCheck.TWICE: Result.twice,
    TopKCheck.VALUE: Result.wrong_value,
    TopKCheck.ORDER: Result.swapped,
    TopKCheck.MAXIMUM: Result.no_maximum,
    TopKCheck.MISSED: Result.missed,
}

results = st.builds(
    Result,
    st.sampled_from([name for name in DISTRIBUTIONS if name != "all equal"]),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
)


@pytest.mark.parametrize("check", PLANTED)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(results)
def test_a_planted_fault_is_found_where_it_is(check: TopKCheck, result: Result) -> None:
    column = PLANTED[check](result)
    found = violations(result.x, result.values, result.indices)
    assert {one.row for one in found} == {(result.row,)}
    columns = [one.column for one in found if one.check is check]
    assert columns
    assert column is None or column in columns


@settings(max_examples=200, deadline=None, derandomize=True)
@given(results)
@example(Result("all equal", "float32", 0))
@example(Result("all equal", "bfloat16", 0))
def test_what_is_right_has_no_violations(result: Result) -> None:
    assert violations(result.x, result.values, result.indices) == []
    assert recalls(result.x, result.indices).tolist() == [1.0] * ROWS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_exact_top_k_of_jax_keeps_the_contract(distribution: str, dtype: str) -> None:
    x = DISTRIBUTIONS[distribution](np.random.default_rng(1), (4, 200), jnp.dtype(dtype))
    values, indices = lax.top_k(x, 20)
    assert violations(x, values, indices) == []


def test_integers_are_judged_too() -> None:
    x = np.array([[3, -7, 3, 9]], np.int32)
    assert violations(x, np.array([[9, 3]], np.int32), np.array([[3, 2]])) == []
    (found,) = violations(x, np.array([[9, -7]], np.int32), np.array([[3, 1]]))
    assert str(found) == "more missed than the recall allows at [0, 0]"


def test_any_of_equal_elements_will_do() -> None:
    x = np.array([2.0, 1.0, 2.0, 1.0, 1.0], np.float32)
    values = np.array([2.0, 2.0, 1.0], np.float32)
    for last in (1, 3, 4):
        assert violations(x, values, np.array([2, 0, last])) == []
    found = violations(x, np.array([2.0, 1.0, 1.0], np.float32), np.array([0, 1, 3]))
    assert [(one.check, one.row, one.column) for one in found] == [(TopKCheck.MISSED, (), 2)]


def test_rows_are_named_by_all_their_axes() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 10)).astype(np.float32)
    values, indices = (np.array(each) for each in lax.top_k(x, 4))
    indices[1, 2, 3] = 10
    assert {one.row for one in violations(x, values, indices)} == {(1, 2)}


def test_a_recall_below_its_target_by_chance_is_no_violation() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 512)).astype(np.float32)
    ranked = np.argsort(-x, axis=1)
    kept = np.sort(np.argsort(random.random((200, 512)) > 0.95, axis=1, kind="stable")[:, :64])
    indices = np.take_along_axis(ranked, kept, axis=1)
    values = np.take_along_axis(x, indices, axis=1)
    share = recalls(x, indices)
    assert share.min() < 0.95
    missed = {
        one.check for one in violations(x, values, indices, recall_target=float(share.mean()))
    }
    assert missed <= {TopKCheck.MAXIMUM}
    # The whole batch shows what no row does.
    wrong = violations(x, values, indices, recall_target=0.98)
    assert {one.row for one in wrong if one.check is TopKCheck.MISSED} == {
        (row,) for row in range(200) if share[row] < 1
    }


@pytest.mark.parametrize(
    ("chosen", "target", "allowed"), [(10, 1.0, 0), (1, 0.5, 1), (10, 0.95, 8), (64, 0.95, 19)]
)
def test_how_many_may_be_missing(chosen: int, target: float, allowed: int) -> None:
    assert allowed_misses(chosen, target) == allowed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([1.0], [1.0, 2.0], [0, 1]), "k is 2 and rows have 1 elements"),
        (([1.0, 2.0], [2.0], [0, 1]), "no result for rows"),
        ((1.0, 1.0, 0), "single number"),
    ],
)
def test_what_is_no_result_is_a_sentence(arguments: Any, said: str) -> None:
    with pytest.raises(Mistake, match=said):
        violations(*(np.asarray(each) for each in arguments))


def test_how_jax_orders_what_has_no_order() -> None:
    odd = np.array([1.0, np.nan, np.inf, -np.inf, -0.0, 0.0, -np.nan], np.float32)
    values, indices = jax.jit(lambda x: lax.top_k(x, 7))(odd)
    assert indices.tolist() == [1, 2, 0, 5, 4, 3, 6]
    assert np.isnan(np.asarray(values)[[0, -1]]).all()
