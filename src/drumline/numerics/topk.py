"""Top-k: exact, or approximate and verified on the device.

`lax.approx_max_k` is fast on TPUs because it keeps only the maximum of a bin of elements, and may
miss some of the k. Its contract excludes a missing maximum, a repeated index, and a value that is
not the element at its index. `top_k(verify=True)` checks this on the device. If a check fails, it
warns and uses the exact result for the batch. `violations` checks on the host, by element.

Elements are ordered by their bits, as in `lax.top_k`: a positive NaN is above infinity, a negative
NaN below minus infinity. Elements that the comparison of `lax.approx_max_k` cannot distinguish are
ties: the two zeros, NaNs of the same sign, and, except in float16, zero and subnormals, which
devices treat as zero. That comparison does not order NaN. On devices that sort with it, a single
NaN puts its row out of order.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Int, Num

from drumline.errors import UserError

RECALL_TARGET = 0.95
"""JAX's default recall."""

FALSE_ALARM_RATE = 1e-9
"""The probability that a row with the target recall counts as a violation, low enough for years of
sampling."""

_APPROXIMATE_TYPES = {np.dtype(name) for name in (np.float16, jnp.bfloat16, np.float32, np.float64)}
"""The types with an approximate result. `lax.approx_max_k` takes no integers."""


class TopKWarning(RuntimeWarning):
    """An approximate result failed a check, and the exact result is used."""


class TopKCheck(StrEnum):
    """The checks of a result. The value describes the failure."""

    RANGE = "index out of range"
    TWICE = "index named twice"
    VALUE = "value is not its index's element"
    ORDER = "values not descending"
    MAXIMUM = "maximum missing"
    MISSED = "more missed than the recall allows"


@dataclass(frozen=True)
class Violation:
    """A failed check of an element of a result."""

    check: TopKCheck
    row: tuple[int, ...]
    """The row, as an index into all axes except the last."""
    column: int
    """The column in the result, or for a missing element in `x`."""

    def __str__(self) -> str:
        """Return a sentence without a full stop."""
        position = ", ".join(map(str, (*self.row, self.column)))
        return f"{self.check} at [{position}]"


def allowed_misses(count: int, recall_target: float) -> int:
    """Return the number of misses, among the `count` largest elements, that the recall allows.

    The target is a mean. With random bins about half of the rows are below it, so the limit cannot
    be `(1 - recall_target) * k`. Rows with the target recall exceed the limit with a probability
    below `FALSE_ALARM_RATE`, by Chernoff's bound for independent misses. Misses in bins are rarer,
    because elements that share a bin leave other bins empty. With a target of 1, no miss is
    allowed. The limit of a row is weak (8 of 10 at 0.95), so a batch also has a limit.
    """
    miss_rate = 1.0 - recall_target
    if miss_rate <= 0.0:
        return 0
    min_surprise = -math.log(FALSE_ALARM_RATE)
    low, high = math.floor(count * miss_rate), count
    while low < high:
        middle = (low + high) // 2
        if count * _kl_divergence((middle + 1) / count, miss_rate) >= min_surprise:
            high = middle
        else:
            low = middle + 1
    return low


def _kl_divergence(p: float, q: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli distributions."""
    if p >= 1.0:
        return -math.log(q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


# ---- On the device -----------------------------------------------------------------------------


def top_k(
    x: Num[Array, "*rows n"], k: int, *, verify: bool = False, recall_target: float = RECALL_TARGET
) -> tuple[Num[Array, "*rows k"], Int[Array, "*rows k"]]:
    """Return the k largest elements of the rows, in descending order, and their indices.

    This works under `jax.jit` and is differentiable in the values, like `lax.top_k`. Under
    `jax.vmap` all rows are a single batch, and the exact result is computed only if a check fails.

    Args:
        x: The rows, along the last axis.
        k: The number of elements.
        verify: True to compute and verify the approximate result instead of the exact result.
            Integers are always exact.
        recall_target: The mean share of the k largest elements in an approximate result.

    Warns:
        TopKWarning: An approximate result failed a check, so the exact result is used.
    """
    x = jnp.asarray(x)
    _check_arguments("top_k", x.shape, k, recall_target)
    if not verify or k == 0 or x.size == 0 or x.dtype not in _APPROXIMATE_TYPES:
        values, indices = lax.top_k(x, k)
        return values, indices
    indices = _compile_verified_indices(k, recall_target)(lax.stop_gradient(x))
    # The values of `approx_max_k` are equal to these elements, which have a gradient.
    return jnp.take_along_axis(x, indices, axis=-1), indices


@lru_cache
def _compile_verified_indices(k: int, recall_target: float) -> Callable[[jax.Array], jax.Array]:
    """Compile a function. The cache is for callers outside `jax.jit`."""

    @custom_vmap
    def verified_indices(x: jax.Array) -> jax.Array:
        return _verified_indices(x, k, recall_target)

    @verified_indices.def_vmap
    def _(_size: int, _batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        # A mapped `lax.cond` would compute both branches. Treat the axis as rows instead.
        return verified_indices(x), True

    compiled: Callable[[jax.Array], jax.Array] = jax.jit(verified_indices)
    return compiled


def _verified_indices(
    x: Num[Array, "*rows n"], k: int, recall_target: float
) -> Int[Array, "*rows k"]:
    values, indices = lax.approx_max_k(x, k, recall_target=recall_target)
    rows = math.prod(x.shape[:-1])
    row_limit = allowed_misses(k, recall_target)
    batch_limit = allowed_misses(rows * k, recall_target)
    keys = _sort_keys(x)
    selected = jnp.take_along_axis(keys, indices, axis=-1, mode="clip")
    failures = _failed_checks(x, values, indices, keys, selected)
    # A quick upper bound of the missing elements: the number of unselected elements above the
    # smallest selected element.
    smallest = selected.min(axis=-1, keepdims=True)
    skipped = (keys > smallest).sum(axis=-1) - (selected > smallest).sum(axis=-1)
    is_doubtful = (
        failures.any()
        | (skipped > row_limit).any()
        | (skipped.astype(jnp.float32).sum() > batch_limit)
    )

    def exact_indices() -> Int[Array, "*rows k"]:
        exact: jax.Array = lax.top_k(x, k)[1]
        largest = jnp.take_along_axis(keys, exact, axis=-1)
        missing = _count_missing(largest, selected)
        exceeds = (missing > row_limit) | ((missing.sum() > batch_limit) & (missing > 0))
        violated = jnp.concatenate([failures, exceeds[..., None]], axis=-1)
        rows_by_check = violated.reshape(rows, len(TopKCheck)).sum(axis=0)
        rows_with_nan = jnp.isnan(x).any(axis=-1).sum()
        violating_rows = violated.any(axis=-1).sum()
        jax.debug.callback(partial(_warn, rows), rows_by_check, violating_rows, rows_with_nan)
        return exact

    return lax.cond(is_doubtful, exact_indices, lambda: indices)  # type: ignore[no-any-return]


def _failed_checks(
    x: Num[Array, "*rows n"],
    values: Num[Array, "*rows k"],
    indices: Int[Array, "*rows k"],
    keys: Int[Array, "*rows n"],
    selected: Int[Array, "*rows k"],
) -> Bool[Array, "*rows checks"]:
    """Return the failed checks by row, in the order of `TopKCheck`, without the recall."""
    elements = jnp.take_along_axis(x, indices, axis=-1, mode="clip")
    equal = (_bits(values) == _bits(elements)) | (jnp.isnan(values) & jnp.isnan(elements))
    out_of_range = (indices < 0) | (indices >= x.shape[-1])
    sorted_indices = jnp.sort(indices, axis=-1)
    value_keys = _sort_keys(values)
    checks = {
        TopKCheck.RANGE: out_of_range.any(axis=-1),
        TopKCheck.TWICE: (sorted_indices[..., 1:] == sorted_indices[..., :-1]).any(axis=-1),
        TopKCheck.VALUE: ~(equal | out_of_range).all(axis=-1),
        TopKCheck.ORDER: (value_keys[..., 1:] > value_keys[..., :-1]).any(axis=-1),
        TopKCheck.MAXIMUM: keys.max(axis=-1) != selected.max(axis=-1),
    }
    return jnp.stack([checks[check] for check in TopKCheck if check in checks], axis=-1)


def _count_missing(
    largest: Int[Array, "*rows k"], selected: Int[Array, "*rows k"]
) -> Int[Array, "*rows"]:
    """Count the k largest elements that are not selected. Equal elements are interchangeable."""
    kth = largest[..., -1:]
    above = (largest > kth).sum(axis=-1)
    ties = largest.shape[-1] - above
    missing = above - (selected > kth).sum(axis=-1)
    return missing + jnp.maximum(0, ties - (selected == kth).sum(axis=-1))


def _warn(
    rows: int, rows_by_check: np.ndarray, violating_rows: np.ndarray, rows_with_nan: np.ndarray
) -> None:
    """Warn about failed checks, if the doubt was justified."""
    failed = {
        check: int(count) for check, count in zip(TopKCheck, rows_by_check, strict=True) if count
    }
    if not failed:
        return
    failures = ", ".join(f"{check} in {count}" for check, count in failed.items())
    nan = f"; rows with NaN, which it cannot order: {int(rows_with_nan)}" if rows_with_nan else ""
    warnings.warn(
        f"top_k: lax.approx_max_k broke its contract in {int(violating_rows)} of {rows} rows "
        f"({failures}){nan}; the exact result is used instead",
        TopKWarning,
        stacklevel=2,
    )


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")


def _sort_keys(x: Num[Array, "*rows n"]) -> Int[Array, "*rows n"]:
    bits = _bits(x)
    # Some devices cannot compare 16-bit integers.
    integers = bits.astype(jnp.promote_types(bits.dtype, jnp.int32))
    keys: jax.Array = _ordered_keys(integers, x.dtype, jnp)
    return keys


def _ordered_keys(bits: Any, dtype: np.dtype[Any], xp: Any) -> Any:
    """Return integers in the order of the floats with these bits. `xp` is numpy or jax.numpy."""
    integer_type = np.dtype(f"int{8 * dtype.itemsize}")

    def bits_of(value: Any) -> int:
        return int(np.asarray(value, dtype).view(integer_type))

    infinity = bits_of(np.inf)
    # A negative number has the key -1 - (its bits without the sign), so minus zero has -1.
    signed = xp.where(bits < 0, bits ^ np.iinfo(integer_type).max, bits)
    smallest_normal = 1 if dtype == np.float16 else bits_of(jnp.finfo(dtype).smallest_normal)
    is_zero = (signed >= -smallest_normal) & (signed < smallest_normal)
    # Keys beyond the infinities are NaN.
    return xp.clip(xp.where(is_zero, 0, signed), -infinity - 2, infinity + 1)


# ---- On the host -------------------------------------------------------------------------------


def violations(x: Any, values: Any, indices: Any, *, recall_target: float = 1.0) -> list[Violation]:
    """Return the violations in a result for the k largest elements of the rows of `x`.

    Missing elements are violations if the row or the batch misses more than `allowed_misses`, which
    is 0 for a target of 1. Equal elements are interchangeable.
    """
    x, values, indices = np.asarray(x), np.asarray(values), np.asarray(indices)
    if indices.dtype.kind not in "iu" or x.dtype.kind == "c":
        raise UserError(
            f"violations: rows are {x.dtype} and indices {indices.dtype}; use rows of ordered "
            "numbers, and integers as indices"
        )
    k = values.shape[-1] if values.ndim else 0
    _check_arguments("violations", x.shape, k, recall_target)
    if values.shape != (*x.shape[:-1], k) or indices.shape != values.shape:
        raise UserError(
            f"violations: values {values.shape} and indices {indices.shape} are no result for "
            f"rows of shape {x.shape}"
        )
    if values.dtype != x.dtype:
        raise UserError(f"violations: values are {values.dtype} and the rows {x.dtype}")
    if k == 0 or x.size == 0:
        return []
    shape, n = x.shape[:-1], x.shape[-1]
    x, values, indices = x.reshape(-1, n), values.reshape(-1, k), indices.reshape(-1, k)
    keys, value_keys = _sort_keys_on_host(x), _sort_keys_on_host(values)
    in_range = (indices >= 0) & (indices < n)
    elements = np.take_along_axis(x, np.where(in_range, indices, 0), axis=1)
    selected = _selected_elements(indices, n)
    maxima = keys == keys.max(axis=1, keepdims=True)
    lost_maxima = ~(maxima & selected).any(axis=1, keepdims=True) & maxima
    failures = {
        TopKCheck.RANGE: ~in_range,
        TopKCheck.TWICE: _repeated_indices(indices),
        TopKCheck.VALUE: in_range & ~_equal_bits_or_nan(values, elements),
        TopKCheck.ORDER: _ascending_steps(value_keys),
        # Report only the first of equal maxima.
        TopKCheck.MAXIMUM: lost_maxima & (np.cumsum(lost_maxima, axis=1) == 1),
        TopKCheck.MISSED: _excess_misses(keys, selected, k, recall_target),
    }
    return [
        Violation(check, tuple(int(index) for index in np.unravel_index(row, shape)), int(column))
        for check, mask in failures.items()
        for row, column in np.argwhere(mask)
    ]


def recalls(x: Any, indices: Any) -> np.ndarray:
    """Return the share of the k largest elements in a result, by row."""
    x, indices = np.asarray(x), np.asarray(indices)
    n, k = x.shape[-1], indices.shape[-1]
    keys = _sort_keys_on_host(x.reshape(-1, n))
    missing = _missing_elements(keys, _selected_elements(indices.reshape(-1, k), n), k)
    recall: np.ndarray = 1.0 - missing.sum(axis=1) / k
    return recall.reshape(x.shape[:-1])


def _ascending_steps(keys: np.ndarray) -> np.ndarray:
    ascends = np.zeros(keys.shape, bool)
    ascends[:, 1:] = keys[:, 1:] > keys[:, :-1]
    return ascends


def _repeated_indices(indices: np.ndarray) -> np.ndarray:
    """Return True for indices that an earlier column of the row contains."""
    order = np.argsort(indices, axis=1, kind="stable")
    sorted_indices = np.take_along_axis(indices, order, axis=1)
    equals_previous = np.zeros(indices.shape, bool)
    equals_previous[:, 1:] = sorted_indices[:, 1:] == sorted_indices[:, :-1]
    repeated = np.zeros(indices.shape, bool)
    np.put_along_axis(repeated, order, equals_previous, axis=1)
    return repeated


def _equal_bits_or_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return True if the bits are equal or both are NaN. Devices may change a NaN's payload."""
    integer_type = f"uint{8 * a.dtype.itemsize}"
    # NumPy warns about signaling NaNs.
    with np.errstate(invalid="ignore"):
        both_nan = (a != a) & (b != b)
    equal: np.ndarray = (a.view(integer_type) == b.view(integer_type)) | both_nan
    return equal


def _selected_elements(indices: np.ndarray, n: int) -> np.ndarray:
    """Return a mask of the elements in a result."""
    selected = np.zeros((indices.shape[0], n), bool)
    rows, columns = np.nonzero((indices >= 0) & (indices < n))
    selected[rows, indices[rows, columns]] = True
    return selected


def _missing_elements(keys: np.ndarray, selected: np.ndarray, k: int) -> np.ndarray:
    """Return a mask of the k largest elements that a result lacks."""
    kth = np.partition(keys, keys.shape[1] - k, axis=1)[:, keys.shape[1] - k, None]
    above, tied = keys > kth, keys == kth
    missing_ties = k - above.sum(axis=1) - (tied & selected).sum(axis=1)
    unselected_ties = tied & ~selected
    # Among equal elements, report those with the lowest indices.
    first_ties = unselected_ties & (np.cumsum(unselected_ties, axis=1) <= missing_ties[:, None])
    missing: np.ndarray = (above & ~selected) | first_ties
    return missing


def _excess_misses(
    keys: np.ndarray, selected: np.ndarray, k: int, recall_target: float
) -> np.ndarray:
    missing = _missing_elements(keys, selected, k)
    row_exceeds = missing.sum(axis=1, keepdims=True) > allowed_misses(k, recall_target)
    batch_exceeds = missing.sum() > allowed_misses(k * keys.shape[0], recall_target)
    excess: np.ndarray = missing & (row_exceeds | batch_exceeds)
    return excess


def _sort_keys_on_host(x: np.ndarray) -> np.ndarray:
    if x.dtype not in _APPROXIMATE_TYPES:
        return x
    integers = x.view(f"int{8 * x.dtype.itemsize}").astype(np.int64)
    keys: np.ndarray = _ordered_keys(integers, x.dtype, np)
    return keys


def _check_arguments(caller: str, shape: tuple[int, ...], k: int, recall_target: float) -> None:
    if not isinstance(k, int | np.integer) or isinstance(k, bool):
        raise UserError(f"{caller}: k is {k!r}; it has to be a whole number, not a traced value")
    if not shape:
        raise UserError(f"{caller}: x is a single number; pass an array with one axis or more")
    if not 0 <= k <= shape[-1]:
        raise UserError(
            f"{caller}: k is {k} and rows have {shape[-1]} elements; use 0 to {shape[-1]}"
        )
    if not 0.0 < recall_target <= 1.0:
        raise UserError(
            f"{caller}: recall_target is {recall_target}; use more than 0 and at most 1"
        )
