"""Measure the recall of `lax.approx_max_k` on this device, and check its contract.

A case has a distribution of the rows, their length, a k and a target recall. The survey measures
mean and minimum recall and counts violations of the contract.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from drumline.errors import UserError
from drumline.numerics.topk import RECALL_TARGET, recalls, violations

Shape = tuple[int, int]
Dtype = np.dtype[Any]
Sampler = Callable[[np.random.Generator, Shape, Dtype], np.ndarray]


def _normal(rng: np.random.Generator, shape: Shape, dtype: Dtype) -> np.ndarray:
    x: np.ndarray = rng.standard_normal(shape).astype(dtype)
    return x


def _ties(rng: np.random.Generator, shape: Shape, dtype: Dtype) -> np.ndarray:
    """Sample from five values, including both zeros."""
    values = np.array([-1.0, -0.0, 0.0, 1.0, 2.0], dtype)
    return values[rng.integers(0, len(values), shape)]


def _infinities(rng: np.random.Generator, shape: Shape, dtype: Dtype) -> np.ndarray:
    x, uniform = _normal(rng, shape, dtype), rng.random(shape)
    x[uniform < 0.01] = np.inf
    # Like masked tokens in a sampler.
    x[uniform > 0.5] = -np.inf
    return x


def _nan(rng: np.random.Generator, shape: Shape, dtype: Dtype) -> np.ndarray:
    x = _normal(rng, shape, dtype)
    x[rng.random(shape) < 0.01] = np.nan
    return x


def _ascending(rng: np.random.Generator, shape: Shape, dtype: Dtype) -> np.ndarray:
    return np.sort(rng.standard_normal(shape), axis=-1).astype(dtype)


def _descending(rng: np.random.Generator, shape: Shape, dtype: Dtype) -> np.ndarray:
    return np.ascontiguousarray(_ascending(rng, shape, dtype)[:, ::-1])


def _maximum_first(rng: np.random.Generator, shape: Shape, dtype: Dtype) -> np.ndarray:
    x = _normal(rng, shape, dtype)
    x[:, 0] = 100.0
    return x


def _maximum_last(rng: np.random.Generator, shape: Shape, dtype: Dtype) -> np.ndarray:
    x = _normal(rng, shape, dtype)
    x[:, -1] = 100.0
    return x


def _equal(rng: np.random.Generator, shape: Shape, dtype: Dtype) -> np.ndarray:
    return np.broadcast_to(_normal(rng, (shape[0], 1), dtype), shape).copy()


def _huge_range(rng: np.random.Generator, shape: Shape, dtype: Dtype) -> np.ndarray:
    """Sample from the smallest normal to the largest number, with both signs."""
    info = jnp.finfo(dtype)
    low, high = math.log2(float(info.smallest_normal)), math.log2(float(info.max))
    x = np.exp2(rng.uniform(low, high, shape)) * rng.choice([-1.0, 1.0], shape)
    clipped: np.ndarray = np.clip(x, -float(info.max), float(info.max)).astype(dtype)
    return clipped


def _subnormal(rng: np.random.Generator, shape: Shape, dtype: Dtype) -> np.ndarray:
    """Sample the bits, because arithmetic may flush subnormal numbers to zero."""
    integer_type = np.dtype(f"uint{8 * dtype.itemsize}")
    bits = rng.integers(0, 2 ** jnp.finfo(dtype).nmant, shape).astype(integer_type)
    sign = rng.integers(0, 2, shape).astype(integer_type) << (8 * dtype.itemsize - 1)
    x: np.ndarray = (bits | sign).view(dtype)
    return x


DISTRIBUTIONS: dict[str, Sampler] = {
    "normal": _normal,
    "ties": _ties,
    "infinities": _infinities,
    "nan": _nan,
    "ascending": _ascending,
    "descending": _descending,
    "maximum first": _maximum_first,
    "maximum last": _maximum_last,
    "all equal": _equal,
    "huge range": _huge_range,
    "subnormal": _subnormal,
}
"""The samplers of rows, by name."""


MAX_LENGTH = 2**24
"""The largest number of elements in a row. It is larger than any vocabulary."""


@dataclass(frozen=True)
class TopKGrid:
    """The cases of a survey: all combinations of these values."""

    shapes: tuple[tuple[int, int], ...] = ((8, 8192),)
    """Pairs of the number of rows and their length."""
    ks: tuple[int, ...] = (64,)
    recall_targets: tuple[float, ...] = (RECALL_TARGET,)
    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)
    dtypes: tuple[str, ...] = ("float32",)
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        """Reject invalid values."""
        for _, length in self.shapes:
            if not 1 <= length <= MAX_LENGTH:
                raise UserError(f"length: {length} elements in a row; use 1 to {MAX_LENGTH}")
        for (_, length), k in itertools.product(self.shapes, self.ks):
            if not 1 <= k <= length:
                raise UserError(
                    f"k: rows have {length} elements, so {k} is out of range; use 1 to {length}"
                )
        for target in self.recall_targets:
            if not 0.0 < target <= 1.0:
                raise UserError(f"recall: {target} is not a share; use 0 < recall ≤ 1")
        for name in self.distributions:
            if name not in DISTRIBUTIONS:
                raise UserError(
                    f"distributions: {name!r} is unknown; use {', '.join(DISTRIBUTIONS)}"
                )
        for name in self.dtypes:
            if name not in ("float16", "bfloat16", "float32"):
                raise UserError(f"dtype: {name!r} is unknown; use float32, bfloat16, float16")


@dataclass(frozen=True)
class TopKCase:
    """The measurements of a case."""

    distribution: str
    dtype: str
    length: int
    k: int
    recall_asked: float
    recall_mean: float
    recall_worst: float
    """The minimum recall of a row."""
    violations: tuple[str, ...]


@dataclass(frozen=True)
class TopKSurvey:
    """The cases of a survey and the device that ran them."""

    device: str
    cases: tuple[TopKCase, ...]

    @property
    def exact(self) -> bool:
        """True if no element was missed."""
        return all(case.recall_worst == 1.0 for case in self.cases)

    @property
    def _exact_without_nan(self) -> bool:
        return all(case.recall_worst == 1.0 for case in self.cases if case.distribution != "nan")

    @property
    def broken(self) -> tuple[TopKCase, ...]:
        """The cases with violations."""
        return tuple(case for case in self.cases if case.violations)

    @property
    def verdict(self) -> str:
        """A sentence with the result."""
        if self.broken and all(case.distribution == "nan" for case in self.broken):
            count = sum(len(case.violations) for case in self.broken)
            other_rows = "exact on all other rows" if self._exact_without_nan else "valid on others"
            return (
                f"approx_max_k cannot order rows with NaN on {self.device}: {count} violations "
                f"there ({self.broken[0].dtype}: {self.broken[0].violations[0]}); it was "
                f"{other_rows}"
            )
        if self.broken:
            count = sum(len(case.violations) for case in self.broken)
            worst = max(self.broken, key=lambda case: len(case.violations))
            return (
                f"approx_max_k broke its contract on {self.device}: {count} violations in "
                f"{len(self.broken)} of {len(self.cases)} cases, most on {worst.distribution} "
                f"({worst.violations[0]})"
            )
        if self.exact:
            return (
                f"no violation: on {self.device} approx_max_k was exact at every target recall; "
                "it is approximate only on TPUs"
            )
        closest = min(self.cases, key=lambda case: case.recall_mean - case.recall_asked)
        return (
            f"no violation: approx_max_k kept its recall on {self.device}; nearest to its target "
            f"was {closest.distribution}, {closest.recall_mean:.4f} for {closest.recall_asked:g}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the survey as JSON values."""
        return {
            "device": self.device,
            "exact": self.exact,
            "verdict": self.verdict,
            "cases": [asdict(case) for case in self.cases],
        }


def survey_topk(grid: TopKGrid) -> TopKSurvey:
    """Run `lax.approx_max_k` on all cases, on the default device."""
    cases = itertools.product(
        grid.dtypes, grid.shapes, grid.ks, grid.recall_targets, grid.distributions
    )
    return TopKSurvey(
        device=jax.devices()[0].device_kind,
        cases=tuple(_measure(*case, grid.seeds) for case in cases),
    )


@lru_cache
def _compile_approx_max_k(k: int, recall_target: float) -> Callable[[np.ndarray], Any]:
    compiled: Callable[[np.ndarray], Any] = jax.jit(
        partial(lax.approx_max_k, k=k, recall_target=recall_target)
    )
    return compiled


def _measure(
    dtype: str,
    shape: tuple[int, int],
    k: int,
    recall_target: float,
    distribution: str,
    seeds: tuple[int, ...],
) -> TopKCase:
    messages: list[str] = []
    row_recalls = []
    for seed in seeds:
        x = DISTRIBUTIONS[distribution](np.random.default_rng(seed), shape, jnp.dtype(dtype))
        values, indices = map(np.asarray, _compile_approx_max_k(k, recall_target)(x))
        messages += map(str, violations(x, values, indices, recall_target=recall_target))
        row_recalls.append(recalls(x, indices))
    recall = np.concatenate(row_recalls)
    return TopKCase(
        distribution=distribution,
        dtype=dtype,
        length=shape[1],
        k=k,
        recall_asked=recall_target,
        recall_mean=float(recall.mean()),
        recall_worst=float(recall.min()),
        violations=tuple(messages),
    )
