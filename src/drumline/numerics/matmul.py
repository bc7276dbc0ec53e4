"""The slides' chart: products of float32 matrices in JAX and in PyTorch, against float64.

`[d, 4] × [4, d]` shows the precision of the operands by itself, because almost nothing is summed;
square ones show it beside the error of a sum, and what precision costs in time.
"""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from drumline.numerics import narrow as rounded_to
from drumline.numerics.errors import ErrorStatistics, Numbers, error_statistics
from drumline.numerics.implementations import (
    Implementation,
    JaxPrecision,
    TorchPrecision,
    UnderJax,
    UnderTorch,
    has_torch,
)
from drumline.numerics.plots import Chart

THIN, SQUARE = "thin", "square"
DEFAULT = "JAX default"
HIGHEST = "JAX highest"
TORCH = "PyTorch highest"


@dataclass(frozen=True)
class MeasuredProduct:
    """One product by one implementation.

    Attributes:
        shape: `thin`, or `square`.
        size: d.
        implementation: its name.
        errors: against float64.
        seconds: the median time of a run.
    """

    shape: str
    size: int
    implementation: str
    errors: ErrorStatistics
    seconds: float


@dataclass(frozen=True)
class MatmulSurvey:
    """All products.

    Attributes:
        device: what it ran on, in JAX's words.
        inner: the inner length of the thin ones.
        products: one for each shape, size and implementation.
        operands: how the default of JAX rounds its operands on this device, and how far its
            results are from those of such operands, over their size.
    """

    device: str
    inner: int
    products: tuple[MeasuredProduct, ...]
    operands: Mapping[str, float]

    @property
    def default(self) -> str:
        """The type in which JAX multiplies float32 unless told otherwise."""
        return min(self.operands, key=lambda name: self.operands[name])

    def of(self, shape: str, implementation: str) -> list[MeasuredProduct]:
        """By size."""
        return [p for p in self.products if p.shape == shape and p.implementation == implementation]

    def implementations(self) -> list[str]:
        """Their names, in order."""
        return list(dict.fromkeys(product.implementation for product in self.products))

    def verdict(self) -> list[str]:
        """What it means, and what to set."""
        errors = {
            name: max(p.errors.max_abs for p in self.of(THIN, name))
            for name in self.implementations()
        }
        with_torch = TORCH in errors
        told = [
            f"On {self.device} JAX's default precision multiplies float32 as {self.default}: errors"
            f" up to {errors[DEFAULT]:.1e}, and {errors[HIGHEST]:.1e} at the highest precision."
        ]
        if self.default == "float32":
            also = ", as PyTorch does" if with_torch else ""
            told.append(f"Nothing has to be set here{also}: all precisions are float32.")
            return told
        slower = self._slower(HIGHEST, DEFAULT)
        if with_torch:
            told.append(f"PyTorch's default is float32: errors up to {errors[TORCH]:.1e}.")
        told.append(
            "To make them agree: jax.config.update('jax_default_matmul_precision', 'highest')"
            f" (or JAX_DEFAULT_MATMUL_PRECISION=highest), which took {slower:.1f} times as long"
            f" at d={self.of(SQUARE, DEFAULT)[-1].size}"
            + (
                "; or torch.set_float32_matmul_precision('high'), which makes PyTorch as coarse."
                if with_torch and self.default == "TF32"
                else "."
            )
        )
        return told

    def _slower(self, one: str, other: str) -> float:
        return self.of(SQUARE, one)[-1].seconds / self.of(SQUARE, other)[-1].seconds

    def chart(self, shape: str = THIN) -> Chart:
        """The largest errors over d."""
        what = f"[d,{self.inner}] × [{self.inner},d]" if shape == THIN else "[d,d] × [d,d]"
        curves = {
            name: [(float(p.size), p.errors.max_abs) for p in self.of(shape, name)]
            for name in self.implementations()
        }
        return Chart(
            f"float32 {what} on {self.device}", "d", "largest error against float64", curves
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "device": self.device,
            "inner": self.inner,
            "default": self.default,
            "operands": dict(self.operands),
            "verdict": self.verdict(),
            "products": [
                {
                    "shape": p.shape,
                    "size": p.size,
                    "implementation": p.implementation,
                    "seconds": p.seconds,
                    **p.errors.to_dict(),
                }
                for p in self.products
            ],
        }


def survey_matmul(
    sizes: Sequence[int], inner: int = 4, *, squares: Sequence[int] | None = None, seed: int = 0
) -> MatmulSurvey:
    """Multiply matrices of normal numbers, in all precisions of JAX and, if it is there, PyTorch.

    Args:
        sizes: d of the thin products.
        inner: their inner length.
        squares: d of the square ones; the same if None.
        seed: of the numbers.
    """
    import jax

    dice = np.random.default_rng(seed)
    found, coarse = [], {}
    for shape, lengths in ((THIN, sizes), (SQUARE, sizes if squares is None else squares)):
        for size in lengths:
            length = inner if shape == THIN else size
            a = dice.standard_normal((size, length)).astype(np.float32)
            b = dice.standard_normal((length, size)).astype(np.float32)
            true = a.astype(np.float64) @ b.astype(np.float64)
            for name, multiply in implementations().items():
                result = multiply(a, b)
                errors = error_statistics(result, true)
                found.append(MeasuredProduct(shape, size, name, errors, multiply.seconds(a, b)))
                if shape == THIN and name == DEFAULT:
                    coarse = _operands(a, b, result)
    device = jax.local_devices()[0]
    return MatmulSurvey(device.device_kind, inner, tuple(found), coarse)


def implementations() -> dict[str, Implementation]:
    """Every precision of each library that is here."""
    import jax.numpy as jnp

    found: dict[str, Implementation] = {
        f"JAX {precision}": UnderJax(jnp.matmul, precision) for precision in get_args(JaxPrecision)
    }
    if has_torch():
        import torch

        for precision in get_args(TorchPrecision)[::-1]:
            found[f"PyTorch {precision}"] = UnderTorch(torch.matmul, precision)
    return found


OPERANDS: dict[str, Callable[[Numbers], Numbers]] = {
    "float32": lambda x: x,
    "TF32": rounded_to.tf32,
    "bfloat16": rounded_to.bfloat16,
}


def _operands(a: Numbers, b: Numbers, result: Numbers) -> dict[str, float]:
    """How far a result is from that of operands in each type, summed without error."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    found: dict[str, float] = {}
    for name, narrow in OPERANDS.items():
        value = narrow(wide_a) @ narrow(wide_b)
        found[name] = float(np.sqrt(np.mean(np.square(result - value)) / np.mean(np.square(value))))
    return found
