"""Measure float32 matmuls in JAX and PyTorch against float64.

`[d, 4] × [4, d]` shows the precision of the operands, because almost nothing is summed. Square
matmuls also show the error of a sum and the cost of precision in time.
"""

# NumPy annotates many results as Any.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from drumline.deprecated import renamed_attribute
from drumline.numerics.errors import (
    ErrorStatistics,
    NDArray,
    error_statistics,
    round_to_bfloat16,
    round_to_tf32,
)
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
class MatmulMeasurement:
    """The measurement of a matmul by an implementation.

    Attributes:
        shape: `thin` or `square`.
        size: d.
        implementation: The name of the implementation.
        errors: The errors against float64.
        seconds: The median time of a run.
    """

    shape: str
    size: int
    implementation: str
    errors: ErrorStatistics
    seconds: float


@dataclass(frozen=True)
class MatmulSurvey:
    """The measurements of all matmuls.

    Attributes:
        device: The kind of the device, as JAX reports it.
        inner: The inner dimension of the thin matmuls.
        measurements: A measurement for each shape, size and implementation.
        operands: For each operand type, the relative difference of JAX's default results from
            those with operands rounded to this type.
    """

    device: str
    inner: int
    measurements: tuple[MatmulMeasurement, ...]
    operands: Mapping[str, float]

    products = renamed_attribute("products", "measurements")
    of = renamed_attribute("of", "select")

    @property
    def default(self) -> str:
        """The type of the operands in JAX's default precision on this device."""
        return min(self.operands, key=lambda name: self.operands[name])

    def select(self, shape: str, implementation: str) -> list[MatmulMeasurement]:
        """Return the measurements of a shape and an implementation, by size."""
        return [
            measurement
            for measurement in self.measurements
            if measurement.shape == shape and measurement.implementation == implementation
        ]

    def implementations(self) -> list[str]:
        """Return the names of the implementations, in order."""
        return list(dict.fromkeys(measurement.implementation for measurement in self.measurements))

    def verdict(self) -> list[str]:
        """Return sentences about the result and the settings to use."""
        errors = {
            name: max(measurement.errors.max_abs for measurement in self.select(THIN, name))
            for name in self.implementations()
        }
        has_torch_result = TORCH in errors
        sentences = [
            f"On {self.device} JAX's default precision multiplies float32 as {self.default}: errors"
            f" up to {errors[DEFAULT]:.1e}, and {errors[HIGHEST]:.1e} at the highest precision."
        ]
        if self.default == "float32":
            suffix = ", as in PyTorch" if has_torch_result else ""
            sentences.append(f"No setting is needed{suffix}: all precisions are float32.")
            return sentences
        largest_default = self.select(SQUARE, DEFAULT)[-1]
        slowdown = self.select(SQUARE, HIGHEST)[-1].seconds / largest_default.seconds
        if has_torch_result:
            sentences.append(f"PyTorch's default is float32: errors up to {errors[TORCH]:.1e}.")
        sentences.append(
            "To make them agree: jax.config.update('jax_default_matmul_precision', 'highest')"
            f" (or JAX_DEFAULT_MATMUL_PRECISION=highest), which took {slowdown:.1f} times as long"
            f" at d={largest_default.size}"
            + (
                "; or torch.set_float32_matmul_precision('high'), which makes PyTorch as coarse."
                if has_torch_result and self.default == "TF32"
                else "."
            )
        )
        return sentences

    def chart(self, shape: str = THIN) -> Chart:
        """Return a chart of the maximum errors over d."""
        shapes = f"[d,{self.inner}] × [{self.inner},d]" if shape == THIN else "[d,d] × [d,d]"
        curves = {
            name: [
                (float(measurement.size), measurement.errors.max_abs)
                for measurement in self.select(shape, name)
            ]
            for name in self.implementations()
        }
        return Chart(
            f"float32 {shapes} on {self.device}", "d", "largest error against float64", curves
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the survey as JSON values."""
        return {
            "device": self.device,
            "inner": self.inner,
            "default": self.default,
            "operands": dict(self.operands),
            "verdict": self.verdict(),
            "products": [
                {
                    "shape": measurement.shape,
                    "size": measurement.size,
                    "implementation": measurement.implementation,
                    "seconds": measurement.seconds,
                    **measurement.errors.to_dict(),
                }
                for measurement in self.measurements
            ],
        }


def survey_matmul(
    sizes: Sequence[int], inner: int = 4, *, squares: Sequence[int] | None = None, seed: int = 0
) -> MatmulSurvey:
    """Multiply normally distributed matrices in all precisions of JAX and, if present, PyTorch.

    Args:
        sizes: d of the thin matmuls.
        inner: The inner dimension of the thin matmuls.
        squares: d of the square matmuls, by default `sizes`.
        seed: The seed of the matrices.
    """
    import jax

    rng = np.random.default_rng(seed)
    measurements = []
    operands: dict[str, float] = {}
    for shape, shape_sizes in ((THIN, sizes), (SQUARE, sizes if squares is None else squares)):
        for size in shape_sizes:
            inner_size = inner if shape == THIN else size
            a = rng.standard_normal((size, inner_size)).astype(np.float32)
            b = rng.standard_normal((inner_size, size)).astype(np.float32)
            expected = a.astype(np.float64) @ b.astype(np.float64)
            for name, multiply in matmul_implementations().items():
                result = multiply(a, b)
                errors = error_statistics(result, expected)
                seconds = multiply.seconds(a, b)
                measurements.append(MatmulMeasurement(shape, size, name, errors, seconds))
                if shape == THIN and name == DEFAULT:
                    operands = _compare_operand_types(a, b, result)
    device = jax.local_devices()[0]
    return MatmulSurvey(device.device_kind, inner, tuple(measurements), operands)


def matmul_implementations() -> dict[str, Implementation]:
    """Return the matmuls of all precisions of the installed libraries, by name."""
    import jax.numpy as jnp

    implementations: dict[str, Implementation] = {
        f"JAX {precision}": UnderJax(jnp.matmul, precision) for precision in get_args(JaxPrecision)
    }
    if has_torch():
        import torch

        for precision in get_args(TorchPrecision)[::-1]:
            implementations[f"PyTorch {precision}"] = UnderTorch(torch.matmul, precision)
    return implementations


OPERAND_TYPES: dict[str, Callable[[NDArray], NDArray]] = {
    "float32": lambda x: x,
    "TF32": round_to_tf32,
    "bfloat16": round_to_bfloat16,
}


def _compare_operand_types(a: NDArray, b: NDArray, result: NDArray) -> dict[str, float]:
    """Return the relative difference of a result from exact matmuls of rounded operands."""
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    differences: dict[str, float] = {}
    for name, round_operand in OPERAND_TYPES.items():
        expected = round_operand(a64) @ round_operand(b64)
        mean_square = np.mean(np.square(result - expected))
        differences[name] = float(np.sqrt(mean_square / np.mean(np.square(expected))))
    return differences
