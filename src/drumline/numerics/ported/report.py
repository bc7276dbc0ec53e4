"""What a comparison of two models found: layer by layer, the first that parts, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from drumline.numerics.plots import Chart, write


@dataclass(frozen=True)
class LayerError:
    """How far a layer is from the truth on either side, each over the root mean square of it."""

    name: str
    """On the JAX side."""
    torch: str
    """On PyTorch's."""
    jax_error: float
    torch_error: float
    floor: float
    """What roundings alone may come to, in the finer of both types."""
    dtypes: tuple[str, str]
    """JAX's and PyTorch's."""

    @property
    def ratio(self) -> float:
        """How many times further away JAX is; less than one where PyTorch is further."""
        if self.jax_error == self.torch_error:  # both may be infinite
            return 1.0
        return max(self.jax_error, self.floor) / max(self.torch_error, self.floor)

    def parts(self, bound: float) -> bool:
        """Whether one side is that many times further away, or both are, in different types.

        PyTorch's in float64 has PyTorch's weights: those of a narrower type are rounded there too,
        and JAX, with its own, seems as far from the truth as PyTorch is.
        """
        coarse = min(self.jax_error, self.torch_error) > bound * self.floor
        other = self.dtypes[0] != self.dtypes[1]
        return not 1 / bound <= self.ratio <= bound or (coarse and other)


@dataclass(frozen=True)
class DivergenceCause:
    """Why a layer differs."""

    kind: str
    """One of the known ones; `unknown` if none of them explains it."""
    words: str
    error_left: float
    """JAX's error if that is taken into account."""


@dataclass(frozen=True)
class Divergence:
    """What was found.

    Attributes:
        layers: those that both sides have, in the order of the JAX function.
        first: the first that is beyond the bound; None where all agree.
        cause: its likely cause; None where all agree.
        unmatched: names of the JAX side without a counterpart.
        bound: how many times further from the truth than the other side a layer may be.
    """

    layers: tuple[LayerError, ...]
    first: LayerError | None
    cause: DivergenceCause | None
    unmatched: tuple[str, ...]
    bound: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: it becomes a string."""
        found = asdict(self)
        for layer, errors in zip(found["layers"], self.layers, strict=True):
            layer["ratio"] = errors.ratio
        return cast(dict[str, Any], _finite(found))

    def plot(self, path: str | Path) -> None:
        """Draw the errors of both sides, layer by layer, into an SVG file."""
        numbered = list(enumerate(self.layers, start=1))
        curves = {
            "JAX": [(float(n), max(layer.jax_error, layer.floor)) for n, layer in numbered],
            "PyTorch": [(float(n), max(layer.torch_error, layer.floor)) for n, layer in numbered],
        }
        title = "Error against PyTorch in float64"
        if self.first is not None:
            at = self.layers.index(self.first) + 1
            curves["first to part"] = [(float(at), self.first.jax_error)]
            title += f": parts at {self.first.name}"
        across = "layer, in the order of computation"
        write(path, Chart(title, across, "error, of its size", curves, by_powers=False))

    def __str__(self) -> str:
        """The report for a reader."""
        count = len(self.layers)
        if self.first is None:
            worst = max(self.layers, key=lambda layer: layer.ratio)
            return (
                f"all {count} layers agree: none is further from float64 than {self.bound:g} times "
                f"the other side's own error; the furthest is {worst.name} at {worst.ratio:.1f}"
                + self._alone()
            )
        assert self.cause is not None
        first = self.first
        before = self.layers.index(first)
        further = "JAX" if first.ratio > 1 else "PyTorch"
        return "\n".join(
            [
                f"{first.name} (PyTorch: {first.torch}) is the first of {count} layers that parts;"
                f" {before} before it agree",
                f"  error against PyTorch in float64: JAX {first.jax_error:.2e}, PyTorch"
                f" {first.torch_error:.2e} of its size; {further} is the one further away",
                f"  likely cause: {self.cause.kind}: {self.cause.words}{self._alone()}",
            ]
        )

    def _alone(self) -> str:
        """A line about what could not be compared, which may be a slip in `rename`."""
        if not self.unmatched:
            return ""
        listed = some(dict.fromkeys(self.unmatched))
        return f"\n  not compared, for want of a counterpart: {listed}"


def some(names: Mapping[str, Any]) -> str:
    """The first of some names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return (", ".join(listed[:4]) or "nothing") + more


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
