"""Compare implementations of a computation with a more precise reference."""

# NumPy annotates many results as Any.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drumline.errors import UserError
from drumline.numerics.errors import ErrorStatistics, NDArray, error_statistics
from drumline.numerics.implementations import UnderJax, UnderTorch


@dataclass(frozen=True)
class ComparisonRow:
    """The errors of an implementation in an output."""

    implementation: str
    output: str
    dtype: str
    errors: ErrorStatistics


@dataclass(frozen=True)
class ErrorComparison:
    """The errors of all implementations, in the order of the arguments of `compare`."""

    rows: tuple[ComparisonRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "rows": [
                {
                    "implementation": row.implementation,
                    "output": row.output,
                    "dtype": row.dtype,
                    **row.errors.to_dict(),
                }
                for row in self.rows
            ]
        }

    def table(self) -> str:
        """Return the comparison as a table of text."""
        headings = ["IMPLEMENTATION", "OUTPUT", "DTYPE", "MAX ERROR", "RMS", "MAX ULP", "RMS ULP"]
        cells = [[*headings, "DIFFER"]]
        for row in self.rows:
            errors = row.errors
            formatted = [
                f"{errors.max_abs:.2e}",
                f"{errors.rms_abs:.2e}",
                f"{errors.max_ulp:.3g}",
                f"{errors.rms_ulp:.3g}",
                f"{errors.differ:.1%}",
            ]
            cells.append([row.implementation, row.output, row.dtype, *formatted])
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        )

    __str__ = table

    def plot(self, path: str | Path) -> None:
        """Plot the maximum errors in ulps into an SVG file."""
        from drumline.numerics.plots import Chart, write_svg

        outputs = list(dict.fromkeys(row.output for row in self.rows))
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            point = (float(1 + outputs.index(row.output)), row.errors.max_ulp)
            curves.setdefault(row.implementation, []).append(point)
        labels = {float(1 + i): name for i, name in enumerate(outputs)}
        write_svg(
            path,
            Chart("Largest error by output", "", "units in the last place", curves, labels, False),
        )


def compare(
    fns: Mapping[str, Callable[..., Any]],
    *inputs: Any,
    reference: Callable[..., Any] | None = None,
) -> ErrorComparison:
    """Run functions on the same inputs and measure their errors against a reference.

    Args:
        fns: The functions by name. A plain function gets NumPy arrays. `UnderJax` and `UnderTorch`
            wrap functions of JAX arrays and PyTorch tensors, with their settings.
        inputs: The arrays to pass to each function.
        reference: Returns the expected results as float64 or as mpmath's numbers
            (`numerics.exact`). By default, the first function runs in float64.

    Raises:
        UserError: There is nothing to compare, or the outputs differ in name or shape.
    """
    if not fns:
        raise UserError("compare: there is no function to compare")
    arrays = tuple(np.asarray(x) for x in inputs)
    first_name, first = next(iter(fns.items()))
    expected = dict(
        _named_outputs(reference(*arrays) if reference else _run_in_float64(first, arrays))
    )
    if not expected:
        raise UserError("compare: the reference returns nothing that could be compared")
    for output, value in expected.items():
        if reference is None and value.dtype.itemsize < 8 and value.dtype.kind not in "biu":
            raise UserError(
                f"compare: given float64, {first_name} computes {output} in {value.dtype}; "
                "pass a reference"
            )
    rows = []
    for name, function in fns.items():
        actual = dict(_named_outputs(function(*arrays)))
        if actual.keys() != expected.keys():
            raise UserError(
                f"compare: {name} returns {', '.join(actual)}, and the reference "
                f"{', '.join(expected)}"
            )
        for output, value in actual.items():
            errors = error_statistics(value, expected[output])
            rows.append(ComparisonRow(name, output, str(value.dtype), errors))
    return ErrorComparison(tuple(rows))


def _run_in_float64(function: Callable[..., Any], inputs: tuple[NDArray, ...]) -> Any:
    inputs64 = tuple(_as_float64(x) for x in inputs)
    if isinstance(function, UnderTorch):
        return UnderTorch(function.function, device="cpu")(*inputs64)
    import jax

    with jax.enable_x64(True):
        if isinstance(function, UnderJax):
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                return UnderJax(function.function, "highest")(*inputs64)
        return function(*inputs64)


def _as_float64(x: NDArray) -> NDArray:
    if np.iscomplexobj(x):
        return x.astype(np.complex128)
    # NumPy does not know the kind of bfloat16 and float8.
    return x if x.dtype.kind in "biuOUS" else x.astype(np.float64)


def _named_outputs(value: Any, path: str = "") -> Iterator[tuple[str, NDArray]]:
    """Yield the arrays in a result with their paths."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _named_outputs(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _named_outputs(item, f"{path}[{index}]")
    else:
        yield path or "result", np.asarray(value)
