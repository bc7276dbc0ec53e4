"""How `lax.approx_max_k` keeps its contract on this device, over rows of many kinds.

Each case is a kind of rows, their length, a k and a recall that is asked for. Measured is the
recall, as a mean and in the worst row; counted is whatever `violations` finds.
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

from drumline.numerics.mistakes import Mistake
from drumline.numerics.topk import RECALL_TARGET, recalls, violations

Draw = Callable[[np.random.Generator, tuple[int, int], np.dtype[Any]], np.ndarray]


def _normal(
    random: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]
) -> np.ndarray:
    drawn: np.ndarray = random.standard_normal(shape).astype(dtype)
    return drawn


def _ties(random: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
    """Five values, two of them zeros of different signs."""
    few = np.array([-1.0, -0.0, 0.0, 1.0, 2.0], dtype)
    return few[random.integers(0, len(few), shape)]


def _infinities(
    random: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]
) -> np.ndarray:
    x, where = _normal(random, shape, dtype), random.random(shape)
    x[where < 0.01] = np.inf
    # Most of a row: what a sampler has after it masked its tokens.
    x[where > 0.5] = -np.inf
    return x


def _nan(random: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
    x = _normal(random, shape, dtype)
    x[random.random(shape) < 0.01] = np.nan
    return x


def _ascending(
    random: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]
) -> np.ndarray:
    return np.sort(random.standard_normal(shape), axis=-1).astype(dtype)


def _descending(
    random: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]
) -> np.ndarray:
    return np.ascontiguousarray(_ascending(random, shape, dtype)[:, ::-1])


def _maximum_first(
    random: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]
) -> np.ndarray:
    x = _normal(random, shape, dtype)
    x[:, 0] = 100.0
    return x


def _maximum_last(
    random: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]
) -> np.ndarray:
    x = _normal(random, shape, dtype)
    x[:, -1] = 100.0
    return x


def _equal(random: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
    return np.broadcast_to(_normal(random, (shape[0], 1), dtype), shape).copy()


def _huge_range(
    random: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]
) -> np.ndarray:
    """From the least normal number to the largest there is, of both signs."""
    limits = jnp.finfo(dtype)
    low, high = math.log2(float(limits.smallest_normal)), math.log2(float(limits.max))
    drawn = np.exp2(random.uniform(low, high, shape)) * random.choice([-1.0, 1.0], shape)
    cut: np.ndarray = np.clip(drawn, -float(limits.max), float(limits.max)).astype(dtype)
    return cut


def _subnormal(
    random: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]
) -> np.ndarray:
    """Made of bits: arithmetic may take numbers as small as these for zero."""
    width = np.dtype(f"uint{8 * dtype.itemsize}")
    bits = random.integers(0, 2 ** jnp.finfo(dtype).nmant, shape).astype(width)
    sign = random.integers(0, 2, shape).astype(width) << (8 * dtype.itemsize - 1)
    made: np.ndarray = (bits | sign).view(dtype)
    return made


DISTRIBUTIONS: dict[str, Draw] = {
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
"""Kinds of rows, by name."""


LONGEST = 2**24
"""Elements in a row, beyond which memory ends before a vocabulary does."""


@dataclass(frozen=True)
class TopKGrid:
    """The cases of a survey: every combination of these."""

    shapes: tuple[tuple[int, int], ...] = ((8, 8192),)
    """Rows and their length."""
    ks: tuple[int, ...] = (64,)
    recall_targets: tuple[float, ...] = (RECALL_TARGET,)
    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)
    dtypes: tuple[str, ...] = ("float32",)
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for _, length in self.shapes:
            if not 1 <= length <= LONGEST:
                raise Mistake(f"length: {length} elements in a row; use 1 to {LONGEST}")
        for (_, length), k in itertools.product(self.shapes, self.ks):
            if not 1 <= k <= length:
                raise Mistake(f"k: {k} of {length} elements cannot be chosen; use 1 to {length}")
        for target in self.recall_targets:
            if not 0.0 < target <= 1.0:
                raise Mistake(f"recall: {target} is no part of a whole; use 0 < recall ≤ 1")
        for name in self.distributions:
            if name not in DISTRIBUTIONS:
                raise Mistake(f"distributions: {name!r} is none of {', '.join(DISTRIBUTIONS)}")
        for name in self.dtypes:
            if name not in ("float16", "bfloat16", "float32"):
                raise Mistake(f"dtype: {name!r} is none of float32, bfloat16, float16")


@dataclass(frozen=True)
class TopKCase:
    """One case of a survey, and what it showed."""

    distribution: str
    dtype: str
    length: int
    k: int
    recall_asked: float
    recall_mean: float
    recall_worst: float
    """Of a single row."""
    violations: tuple[str, ...]


@dataclass(frozen=True)
class TopKSurvey:
    """All cases, and the device they ran on."""

    device: str
    cases: tuple[TopKCase, ...]

    @property
    def exact(self) -> bool:
        """Whether nothing was missed anywhere."""
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
        """What the survey showed, in a sentence."""
        if self.broken and all(case.distribution == "nan" for case in self.broken):
            count = sum(len(case.violations) for case in self.broken)
            rest = "exact on all rows without it" if self._exact_without_nan else "sound without it"
            return (
                f"approx_max_k cannot order rows with NaN on {self.device}: {count} violations "
                f"there ({self.broken[0].dtype}: {self.broken[0].violations[0]}); it was {rest}"
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
                f"no violation: on {self.device} approx_max_k was exact at every recall asked for; "
                "only a device where it is approximate, a TPU, can show its recall"
            )
        least = min(self.cases, key=lambda case: case.recall_mean - case.recall_asked)
        return (
            f"no violation: approx_max_k kept its recall on {self.device}; nearest to its target "
            f"was {least.distribution}, {least.recall_mean:.4f} for {least.recall_asked:g}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "device": self.device,
            "exact": self.exact,
            "verdict": self.verdict,
            "cases": [asdict(case) for case in self.cases],
        }


def survey_topk(grid: TopKGrid) -> TopKSurvey:
    """Run `lax.approx_max_k` on every case, on the default device."""
    cases = itertools.product(
        grid.dtypes, grid.shapes, grid.ks, grid.recall_targets, grid.distributions
    )
    return TopKSurvey(
        device=jax.devices()[0].device_kind,
        cases=tuple(_measure(*case, grid.seeds) for case in cases),
    )


@lru_cache
def _approximate(k: int, recall_target: float) -> Callable[[np.ndarray], Any]:
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
    found: list[str] = []
    shares = []
    for seed in seeds:
        x = DISTRIBUTIONS[distribution](np.random.default_rng(seed), shape, jnp.dtype(dtype))
        values, indices = map(np.asarray, _approximate(k, recall_target)(x))
        found += map(str, violations(x, values, indices, recall_target=recall_target))
        shares.append(recalls(x, indices))
    recall = np.concatenate(shares)
    return TopKCase(
        distribution=distribution,
        dtype=dtype,
        length=shape[1],
        k=k,
        recall_asked=recall_target,
        recall_mean=float(recall.mean()),
        recall_worst=float(recall.min()),
        violations=tuple(found),
    )
