"""Results of a top k with a known fault, to test `violations`."""

# mypy: allow-untyped-calls

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from drumline.numerics.topk import TopKCheck
from drumline.numerics.topk_survey import DISTRIBUTIONS

ROWS, LENGTH, K = 3, 24, 5
DTYPES = ("float32", "bfloat16", "float16")


def comparable_values(x: np.ndarray) -> np.ndarray:
    """Return the elements as numbers, with subnormals as zeros, as devices treat them."""
    value = x.astype(np.float64)
    smallest_normal = 0.0 if x.dtype == np.float16 else float(jnp.finfo(x.dtype).smallest_normal)
    return np.where(np.abs(value) < smallest_normal, 0.0, value)


def order(x: np.ndarray) -> np.ndarray:
    """Return the indices in descending order, by value and not by bits as in the code."""
    value = comparable_values(x)
    nan_rank = np.where(np.isnan(value), np.where(np.signbit(value), -1, 1), 0)
    return np.lexsort((-np.where(nan_rank == 0, value, 0.0), -nan_rank), axis=-1)


class Result:
    """Rows, their correct top k, and functions that add a fault."""

    def __init__(self, distribution: str, dtype: str, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.x = DISTRIBUTIONS[distribution](self.random, (ROWS, LENGTH), jnp.dtype(dtype))
        self.order = order(self.x)
        self.indices = self.order[:, :K].astype(np.int32)
        self.values = np.take_along_axis(self.x, self.indices, axis=1)
        self.row = int(self.random.integers(ROWS))
        self.column = int(self.random.integers(K))

    def less(self, a: int, b: int) -> bool:
        """Return True if one element of the row is less than another."""
        first_value, second_value = comparable_values(self.x[self.row])[[a, b]]
        if np.isnan(first_value) or np.isnan(second_value):
            return bool(np.isnan(second_value) and not np.isnan(first_value))
        return bool(first_value < second_value)

    def set_result(self, column: int, index: int) -> None:
        self.indices[self.row, column] = index
        self.values[self.row, column] = self.x[self.row, index]

    def out_of_range(self) -> int:
        self.indices[self.row, self.column] = self.random.choice([-1, LENGTH, LENGTH + 7, -(2**31)])
        return self.column

    def repeated_index(self) -> int:
        first, second = sorted(self.random.choice(K, 2, replace=False))
        self.set_result(second, self.indices[self.row, first])
        return int(second)

    def wrong_value(self) -> int:
        bits = self.values.view(f"uint{8 * self.values.dtype.itemsize}")
        bits[self.row, self.column] ^= 1 << int(self.random.integers(8 * self.values.itemsize))
        value = self.values[self.row, self.column]
        source_value = self.x[self.row, self.indices[self.row, self.column]]
        # Another NaN is no fault, because a device may change a NaN's payload.
        with np.errstate(invalid="ignore"):
            assume(value == value or source_value == source_value)
        return self.column

    def swapped(self) -> int:
        first = int(self.random.integers(K - 1))
        a, b = self.indices[self.row, first : first + 2].tolist()
        assume(self.less(b, a))
        self.set_result(first, b)
        self.set_result(first + 1, a)
        return first + 1

    def missing_maximum(self) -> int:
        maximum_index = int(self.order[self.row, 0])
        smaller_indices = [
            at for at in self.order[self.row].tolist() if self.less(at, maximum_index)
        ]
        assume(len(smaller_indices) >= K)
        for column in range(K):
            self.set_result(column, smaller_indices[column])
        x = comparable_values(self.x[self.row])
        return int(np.argmax(np.isnan(x) if np.isnan(x[maximum_index]) else x == x[maximum_index]))

    def missed_element(self) -> None:
        last = int(self.indices[self.row, -1])
        smaller_indices = [at for at in self.order[self.row].tolist() if self.less(at, last)]
        assume(smaller_indices)
        self.set_result(K - 1, smaller_indices[0])


FAULTY_RESULTS: dict[TopKCheck, Callable[[Result], int | None]] = {
    TopKCheck.RANGE: Result.out_of_range,
    TopKCheck.TWICE: Result.repeated_index,
    TopKCheck.VALUE: Result.wrong_value,
    TopKCheck.ORDER: Result.swapped,
    TopKCheck.MAXIMUM: Result.missing_maximum,
    TopKCheck.MISSED: Result.missed_element,
}

results = st.builds(
    Result,
    st.sampled_from([name for name in DISTRIBUTIONS if name != "all equal"]),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
)
