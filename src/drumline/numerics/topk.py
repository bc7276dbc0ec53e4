"""The k largest elements of each row: exact, or approximate and checked while the program runs.

`lax.approx_max_k` is fast on TPUs since it may miss some of the k: it keeps one winner for each of
many bins. What it may never do is lose the maximum, name an element twice, or return a value that
is not its index's. `top_k(verify=True)` takes it, checks on the device that it kept to that, and
falls back to the exact result for the whole batch where it did not, with a warning. `violations`
is the same judgement on the host, element by element.

Order: elements are compared as `lax.top_k` compares them, by their bits, so that rows with NaN have
an order too: a NaN without a sign is above infinity, one with a sign is below minus infinity. What
the comparison of `lax.approx_max_k` cannot tell apart ties: the two zeros, NaNs of one sign, and,
but for float16, zero and the numbers below the least normal one, which devices take for zero. NaN
has no place in that comparison at all: where it sorts with it, one NaN disorders the whole row.
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

from drumline.numerics.mistakes import Mistake

RECALL_TARGET = 0.95
"""Of the k largest, the part to be found; JAX's own default."""

FALSE_ALARM = 1e-9
"""How likely a row that keeps its recall may be to count as one that does not: rarely enough for a
sampler that draws for years."""

_CHECKED = {np.dtype(name) for name in (np.float16, jnp.bfloat16, np.float32, np.float64)}
"""Types that have an approximate result to check. `lax.approx_max_k` takes no integers."""


class TopKWarning(RuntimeWarning):
    """An approximate result broke its contract, and the exact one was used instead."""


class TopKCheck(StrEnum):
    """What is checked of a result; the value says what is wrong where it fails."""

    RANGE = "index out of range"
    TWICE = "index named twice"
    VALUE = "value is not its index's element"
    ORDER = "values not descending"
    MAXIMUM = "maximum missing"
    MISSED = "more missed than the recall allows"


@dataclass(frozen=True)
class Violation:
    """A place where a result is outside its contract."""

    check: TopKCheck
    row: tuple[int, ...]
    """The row, as an index into all axes but the last."""
    column: int
    """Where in the row of the result; for an element that is missing, where in the row of `x`."""

    def __str__(self) -> str:
        """A sentence without its full stop."""
        where = ", ".join(map(str, (*self.row, self.column)))
        return f"{self.check} at [{where}]"


def allowed_misses(chosen: int, recall_target: float) -> int:
    """How many of so many largest elements may be missing before the recall counts as broken.

    The target is a mean: with bins drawn at random about half of all rows fall below it, so that
    `(1 - recall_target) * k` would condemn them. Counted as broken is what rows that keep it show
    less than once in `FALSE_ALARM⁻¹`, by Chernoff's bound for independent misses; misses in bins
    are fewer than that, as elements that share a bin leave others free. At a target of 1 no miss is
    allowed. A few elements prove little (8 of 10 may miss at 0.95), which is why the rows of a
    batch are counted together, too.
    """
    miss = 1.0 - recall_target
    if miss <= 0.0:
        return 0
    surprising = -math.log(FALSE_ALARM)
    low, high = math.floor(chosen * miss), chosen
    while low < high:
        middle = (low + high) // 2
        if chosen * _divergence((middle + 1) / chosen, miss) >= surprising:
            high = middle
        else:
            low = middle + 1
    return low


def _divergence(seen: float, expected: float) -> float:
    """Kullback and Leibler's, between two coins."""
    if seen >= 1.0:
        return -math.log(expected)
    return seen * math.log(seen / expected) + (1 - seen) * math.log((1 - seen) / (1 - expected))


# ---- on the device ---------------------------------------------------------------------------


def top_k(
    x: Num[Array, "*rows n"], k: int, *, verify: bool = False, recall_target: float = RECALL_TARGET
) -> tuple[Num[Array, "*rows k"], Int[Array, "*rows k"]]:
    """The k largest of each row, descending, and their indices; inside or outside of `jax.jit`.

    Differentiable in the values, as `lax.top_k` is. Under `jax.vmap` all rows are one batch still:
    the exact result costs nothing while the approximate ones are good.

    Args:
        x: the rows, along the last axis.
        k: how many.
        verify: whether to take the approximate result and check it, instead of the exact one.
            Integers are exact in any case.
        recall_target: of an approximate result, the part of the k largest to be found.

    Warns:
        TopKWarning: an approximate result failed a check, so the exact one was used.
    """
    x = jnp.asarray(x)
    _check_arguments("top_k", x.shape, k, recall_target)
    if not verify or k == 0 or x.size == 0 or x.dtype not in _CHECKED:
        exact, found = lax.top_k(x, k)
        return exact, found
    indices = _verified_indices(k, recall_target)(lax.stop_gradient(x))
    # Each value has been found to be its index's element, and this has the gradient.
    return jnp.take_along_axis(x, indices, axis=-1), indices


@lru_cache
def _verified_indices(k: int, recall_target: float) -> Callable[[jax.Array], jax.Array]:
    """A compiled choice for these numbers, once, for those who call it outside of `jax.jit`."""

    @custom_vmap
    def indices_of(x: jax.Array) -> jax.Array:
        return _choose(x, k, recall_target)

    @indices_of.def_vmap
    def _(_size: int, _batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        # A mapped `lax.cond` would compute both of its branches; one more axis of rows does not.
        return indices_of(x), True

    compiled: Callable[[jax.Array], jax.Array] = jax.jit(indices_of)
    return compiled


def _choose(x: Num[Array, "*rows n"], k: int, recall_target: float) -> Int[Array, "*rows k"]:
    values, indices = lax.approx_max_k(x, k, recall_target=recall_target)
    rows = math.prod(x.shape[:-1])
    in_row, in_all = allowed_misses(k, recall_target), allowed_misses(rows * k, recall_target)
    keys = _keys(x)
    picked = jnp.take_along_axis(keys, indices, axis=-1, mode="clip")
    faults = _faults(x, values, indices, keys, picked)
    # Elements above the least of the chosen that are not chosen. Not all of them need be of the k
    # largest, so that this is never less than what was missed, and quick to count.
    least = picked.min(axis=-1, keepdims=True)
    above = (keys > least).sum(axis=-1) - (picked > least).sum(axis=-1)
    doubtful = faults.any() | (above > in_row).any() | (above.astype(jnp.float32).sum() > in_all)

    def exact() -> Int[Array, "*rows k"]:
        found: jax.Array = lax.top_k(x, k)[1]
        best = jnp.take_along_axis(keys, found, axis=-1)
        missed = _missed_on_device(best, picked)
        too_many = (missed > in_row) | ((missed.sum() > in_all) & (missed > 0))
        broken = jnp.concatenate([faults, too_many[..., None]], axis=-1)
        by_check = broken.reshape(rows, len(TopKCheck)).sum(axis=0)
        with_nan = jnp.isnan(x).any(axis=-1).sum()
        jax.debug.callback(partial(_warn, rows), by_check, broken.any(axis=-1).sum(), with_nan)
        return found

    return lax.cond(doubtful, exact, lambda: indices)  # type: ignore[no-any-return]


def _faults(
    x: Num[Array, "*rows n"],
    values: Num[Array, "*rows k"],
    indices: Int[Array, "*rows k"],
    keys: Int[Array, "*rows n"],
    picked: Int[Array, "*rows k"],
) -> Bool[Array, "*rows checks"]:
    """Which checks a row fails, in the order of `TopKCheck`, but for the last, its recall."""
    own = jnp.take_along_axis(x, indices, axis=-1, mode="clip")
    same = (_bits(values) == _bits(own)) | (jnp.isnan(values) & jnp.isnan(own))
    outside = (indices < 0) | (indices >= x.shape[-1])
    ordered = jnp.sort(indices, axis=-1)
    returned = _keys(values)
    checks = {
        TopKCheck.RANGE: outside.any(axis=-1),
        TopKCheck.TWICE: (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1),
        TopKCheck.VALUE: ~(same | outside).all(axis=-1),
        TopKCheck.ORDER: (returned[..., 1:] > returned[..., :-1]).any(axis=-1),
        TopKCheck.MAXIMUM: keys.max(axis=-1) != picked.max(axis=-1),
    }
    return jnp.stack([checks[check] for check in TopKCheck if check in checks], axis=-1)


def _missed_on_device(
    best: Int[Array, "*rows k"], picked: Int[Array, "*rows k"]
) -> Int[Array, "*rows"]:
    """How many of the k largest are not among the chosen; any of equal elements will do."""
    last = best[..., -1:]
    above = (best > last).sum(axis=-1)
    ties = best.shape[-1] - above
    missing = above - (picked > last).sum(axis=-1)
    return missing + jnp.maximum(0, ties - (picked == last).sum(axis=-1))


def _warn(rows: int, by_check: np.ndarray, broken: np.ndarray, with_nan: np.ndarray) -> None:
    """Say which checks failed; nothing where the quick count was in doubt without reason."""
    failed = {check: int(times) for check, times in zip(TopKCheck, by_check, strict=True) if times}
    if not failed:
        return
    told = ", ".join(f"{check} in {times}" for check, times in failed.items())
    nan = f"; rows with NaN, which it cannot order: {int(with_nan)}" if with_nan else ""
    warnings.warn(
        f"top_k: lax.approx_max_k broke its contract in {int(broken)} of {rows} rows "
        f"({told}){nan}; the exact result is used instead",
        TopKWarning,
        stacklevel=2,
    )


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")


def _keys(x: Num[Array, "*rows n"]) -> Int[Array, "*rows n"]:
    bits = _bits(x)
    # Not in 16 bits: not every device has comparisons for them.
    wide: jax.Array = _ordered(bits.astype(jnp.promote_types(bits.dtype, jnp.int32)), x.dtype, jnp)
    return wide


def _ordered(bits: Any, dtype: np.dtype[Any], of: Any) -> Any:
    """Integers in the order of the floats with these bits; `of` is NumPy or its likeness in JAX."""
    width = np.dtype(f"int{8 * dtype.itemsize}")

    def place(value: Any) -> int:
        return int(np.asarray(value, dtype).view(width))

    infinity = place(np.inf)
    # A number with a sign is at -1 - (its bits without): minus zero, that is, at -1.
    signed = of.where(bits < 0, bits ^ np.iinfo(width).max, bits)
    normal = 1 if dtype == np.float16 else place(jnp.finfo(dtype).smallest_normal)
    zeros_tied = of.where((signed >= -normal) & (signed < normal), 0, signed)
    # What lies beyond the infinities are NaNs.
    return of.clip(zeros_tied, -infinity - 2, infinity + 1)


# ---- on the host -----------------------------------------------------------------------------


def violations(x: Any, values: Any, indices: Any, *, recall_target: float = 1.0) -> list[Violation]:
    """Everything in a result for the k largest of each row of `x` that is outside its contract.

    Missing elements count where their row misses more than `allowed_misses`, or the whole batch.
    With a target of 1 that is every missing element, up to ties: any of equal elements will do.
    """
    x, values, indices = np.asarray(x), np.asarray(values), np.asarray(indices)
    if indices.dtype.kind not in "iu" or x.dtype.kind == "c":
        raise Mistake(
            f"violations: rows are {x.dtype} and indices {indices.dtype}; rows have to have an "
            "order, and indices to be whole numbers"
        )
    k = values.shape[-1] if values.ndim else 0
    _check_arguments("violations", x.shape, k, recall_target)
    if values.shape != (*x.shape[:-1], k) or indices.shape != values.shape:
        raise Mistake(
            f"violations: values {values.shape} and indices {indices.shape} are no result for "
            f"rows of shape {x.shape}"
        )
    if values.dtype != x.dtype:
        raise Mistake(f"violations: values are {values.dtype} and the rows {x.dtype}")
    if k == 0 or x.size == 0:
        return []
    shape, n = x.shape[:-1], x.shape[-1]
    x, values, indices = x.reshape(-1, n), values.reshape(-1, k), indices.reshape(-1, k)
    keys, returned = _host_keys(x), _host_keys(values)
    inside = (indices >= 0) & (indices < n)
    own = np.take_along_axis(x, np.where(inside, indices, 0), axis=1)
    picked = _picked(indices, n)
    highest = keys == keys.max(axis=1, keepdims=True)
    lost = ~(highest & picked).any(axis=1, keepdims=True) & highest
    found = {
        TopKCheck.RANGE: ~inside,
        TopKCheck.TWICE: _seen_before(indices),
        TopKCheck.VALUE: inside & ~_same(values, own),
        TopKCheck.ORDER: _rises(returned),
        # Of equal maxima, the first stands for all.
        TopKCheck.MAXIMUM: lost & (np.cumsum(lost, axis=1) == 1),
        TopKCheck.MISSED: _missed_too_often(keys, picked, k, recall_target),
    }
    return [
        Violation(check, tuple(int(at) for at in np.unravel_index(row, shape)), int(column))
        for check, places in found.items()
        for row, column in np.argwhere(places)
    ]


def recalls(x: Any, indices: Any) -> np.ndarray:
    """Of the k largest of each row, the part that a result has; any of equal elements will do."""
    x, indices = np.asarray(x), np.asarray(indices)
    n, k = x.shape[-1], indices.shape[-1]
    keys = _host_keys(x.reshape(-1, n))
    missing = _missing(keys, _picked(indices.reshape(-1, k), n), k)
    whole: np.ndarray = 1.0 - missing.sum(axis=1) / k
    return whole.reshape(x.shape[:-1])


def _rises(keys: np.ndarray) -> np.ndarray:
    rises = np.zeros(keys.shape, bool)
    rises[:, 1:] = keys[:, 1:] > keys[:, :-1]
    return rises


def _seen_before(indices: np.ndarray) -> np.ndarray:
    """Where an index stands that the row has further left."""
    order = np.argsort(indices, axis=1, kind="stable")
    ordered = np.take_along_axis(indices, order, axis=1)
    again = np.zeros(indices.shape, bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    seen = np.zeros(indices.shape, bool)
    np.put_along_axis(seen, order, again, axis=1)
    return seen


def _same(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Whether the bits are equal, or both are NaN: a device may change what a NaN carries."""
    width = f"uint{8 * values.dtype.itemsize}"
    # NumPy warns of NaNs that signal.
    with np.errstate(invalid="ignore"):
        both_nan = (values != values) & (others != others)
    same: np.ndarray = (values.view(width) == others.view(width)) | both_nan
    return same


def _picked(indices: np.ndarray, n: int) -> np.ndarray:
    """Which elements of each row a result names."""
    picked = np.zeros((indices.shape[0], n), bool)
    rows, columns = np.nonzero((indices >= 0) & (indices < n))
    picked[rows, indices[rows, columns]] = True
    return picked


def _missing(keys: np.ndarray, picked: np.ndarray, k: int) -> np.ndarray:
    """Which elements of each row are missing from its k largest."""
    last = np.partition(keys, keys.shape[1] - k, axis=1)[:, keys.shape[1] - k, None]
    above, tied = keys > last, keys == last
    wanted = k - above.sum(axis=1) - (tied & picked).sum(axis=1)
    free = tied & ~picked
    # Of equal elements, the first ones stand for those that are missing.
    tied_and_missing = free & (np.cumsum(free, axis=1) <= wanted[:, None])
    missing: np.ndarray = (above & ~picked) | tied_and_missing
    return missing


def _missed_too_often(
    keys: np.ndarray, picked: np.ndarray, k: int, recall_target: float
) -> np.ndarray:
    missing = _missing(keys, picked, k)
    in_row = missing.sum(axis=1, keepdims=True) > allowed_misses(k, recall_target)
    in_all = missing.sum() > allowed_misses(k * keys.shape[0], recall_target)
    too_often: np.ndarray = missing & (in_row | in_all)
    return too_often


def _host_keys(x: np.ndarray) -> np.ndarray:
    if x.dtype not in _CHECKED:
        return x
    keys: np.ndarray = _ordered(x.view(f"int{8 * x.dtype.itemsize}").astype(np.int64), x.dtype, np)
    return keys


def _check_arguments(caller: str, shape: tuple[int, ...], k: int, recall_target: float) -> None:
    if not isinstance(k, int | np.integer) or isinstance(k, bool):
        raise Mistake(f"{caller}: k is {k!r}; it has to be a whole number, known before it runs")
    if not shape:
        raise Mistake(f"{caller}: x is a single number; it needs a last axis to choose from")
    if not 0 <= k <= shape[-1]:
        raise Mistake(
            f"{caller}: k is {k} and rows have {shape[-1]} elements; use 0 to {shape[-1]}"
        )
    if not 0.0 < recall_target <= 1.0:
        raise Mistake(f"{caller}: recall_target is {recall_target}; use more than 0 and at most 1")
