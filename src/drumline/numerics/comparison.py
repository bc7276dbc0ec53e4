"""`compare`: one computation by several implementations, against a reference that knows better."""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drumline.numerics.errors import ErrorStatistics, Numbers, error_statistics
from drumline.numerics.implementations import UnderJax, UnderTorch
from drumline.numerics.mistakes import Mistake


@dataclass(frozen=True)
class Row:
    """The errors of one output of one implementation."""

    implementation: str
    output: str
    dtype: str
    errors: ErrorStatistics


@dataclass(frozen=True)
class ErrorComparison:
    """All of them, in the order in which they were given."""

    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
        """For a reader."""
        headings = ["IMPLEMENTATION", "OUTPUT", "DTYPE", "MAX ERROR", "RMS", "MAX ULP", "RMS ULP"]
        cells = [[*headings, "DIFFER"]]
        for row in self.rows:
            e = row.errors
            numbers = [
                f"{e.max_abs:.2e}",
                f"{e.rms_abs:.2e}",
                f"{e.max_ulp:.3g}",
                f"{e.rms_ulp:.3g}",
            ]
            cells.append([row.implementation, row.output, row.dtype, *numbers, f"{e.differ:.1%}"])
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        )

    __str__ = table

    def plot(self, path: str | Path) -> None:
        """Draw the largest errors in units of the last place into an SVG file."""
        from drumline.numerics.plots import Chart, write

        outputs = list(dict.fromkeys(row.output for row in self.rows))
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            spot = (float(1 + outputs.index(row.output)), row.errors.max_ulp)
            curves.setdefault(row.implementation, []).append(spot)
        labels = {float(1 + i): name for i, name in enumerate(outputs)}
        write(
            path,
            Chart("Largest error by output", "", "units in the last place", curves, labels, False),
        )


def compare(
    fns: Mapping[str, Callable[..., Any]],
    *inputs: Any,
    reference: Callable[..., Any] | None = None,
) -> ErrorComparison:
    """Run each function on the same inputs and measure its results against a reference.

    Args:
        fns: by name; a plain function is given NumPy arrays. `UnderJax` and `UnderTorch` wrap
            functions of JAX's arrays and PyTorch's tensors, with their settings.
        inputs: arrays, given to each.
        reference: returns what is true, as float64 or as mpmath's numbers (`numerics.exact`). If
            None, the first function in float64.

    Raises:
        Mistake: there is nothing to compare, or the outputs have other names or shapes.
    """
    if not fns:
        raise Mistake("compare: there is no function to compare")
    given = tuple(np.asarray(x) for x in inputs)
    name, first = next(iter(fns.items()))
    truth = dict(_outputs(reference(*given) if reference else _in_float64(first, given)))
    if not truth:
        raise Mistake("compare: the reference returns nothing that could be compared")
    for output, value in truth.items():
        if reference is None and value.dtype.itemsize < 8 and value.dtype.kind not in "biu":
            raise Mistake(
                f"compare: given float64, {name} computes {output} in {value.dtype} all the same; "
                "give a reference"
            )
    rows = []
    for name, function in fns.items():
        found = dict(_outputs(function(*given)))
        if found.keys() != truth.keys():
            raise Mistake(
                f"compare: {name} returns {', '.join(found)}, and the reference {', '.join(truth)}"
            )
        for output, value in found.items():
            errors = error_statistics(value, truth[output])
            rows.append(Row(name, output, str(value.dtype), errors))
    return ErrorComparison(tuple(rows))


def _in_float64(function: Callable[..., Any], inputs: tuple[Numbers, ...]) -> Any:
    wide = tuple(_widest(x) for x in inputs)
    if isinstance(function, UnderTorch):
        return UnderTorch(function.function, device="cpu")(*wide)
    import jax

    with jax.enable_x64(True):
        if isinstance(function, UnderJax):
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                return UnderJax(function.function, "highest")(*wide)
        return function(*wide)


def _widest(x: Numbers) -> Numbers:
    if np.iscomplexobj(x):
        return x.astype(np.complex128)
    # Narrow floats are of no kind that NumPy knows.
    return x if x.dtype.kind in "biuOUS" else x.astype(np.float64)


def _outputs(value: Any, path: str = "") -> Iterator[tuple[str, Numbers]]:
    """The arrays in a result, by their places."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _outputs(part, f"{path}.{name}" if path else str(name))
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _outputs(part, f"{path}[{number}]")
    else:
        yield path or "result", np.asarray(value)
