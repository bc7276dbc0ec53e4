"""`trace_divergence`: find the first layer in which a JAX model differs from its PyTorch original.

Both models run on the same inputs. A float64 run of PyTorch's model is the reference for the errors
of both. A layer diverges if JAX's error is many times PyTorch's, even if it is small. The cause of
the first divergence is found by trial (see `causes`).
"""

# NumPy annotates many results as Any.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import ml_dtypes
import numpy as np

from drumline.deprecated import renamed_attribute
from drumline.errors import UserError
from drumline.numerics.errors import NDArray
from drumline.numerics.implementations import import_torch, to_numpy
from drumline.numerics.plots import Chart, write_svg
from drumline.numerics.ported import causes
from drumline.numerics.ported.causes import CandidateCause
from drumline.numerics.ported.torch_values import (
    OUTPUT,
    Recording,
    Rename,
    TorchName,
    float64_copy,
    record,
    torch_counterpart,
)
from drumline.parallel.taps import collecting

if TYPE_CHECKING:
    import torch


BOUND = 8.0
"""The maximum ratio between the errors in JAX and in PyTorch."""
FLOOR_ROUNDINGS = 4.0
"""The roundings of its type that a layer may have, even if PyTorch happens to have none."""
MIN_REDUCTION = 3.0
"""The minimum factor by which a cause must reduce the error."""


@dataclass(frozen=True)
class LayerError:
    """The errors of a layer, relative to the root mean square of the reference."""

    name: str
    """The name in JAX."""
    torch: str
    """The name in PyTorch."""
    jax_error: float
    torch_error: float
    floor: float
    """The maximum error of rounding in the finer type."""
    dtypes: tuple[str, str]
    """The types in JAX and in PyTorch."""

    @property
    def ratio(self) -> float:
        """JAX's error divided by PyTorch's."""
        if self.jax_error == self.torch_error:  # both may be infinite
            return 1.0
        return max(self.jax_error, self.floor) / max(self.torch_error, self.floor)

    def diverges(self, bound: float) -> bool:
        """Return True if the ratio exceeds the bound, or if types differ and both errors are large.

        The float64 run uses PyTorch's rounded weights. If JAX has weights of a wider type, both
        errors are large.
        """
        both_large = min(self.jax_error, self.torch_error) > bound * self.floor
        types_differ = self.dtypes[0] != self.dtypes[1]
        return not 1 / bound <= self.ratio <= bound or (both_large and types_differ)

    parts = renamed_attribute("parts", "diverges")


@dataclass(frozen=True)
class DivergenceCause:
    """The likely cause of a divergence."""

    kind: str
    """The name of the cause, or `unknown`."""
    description: str
    remaining_error: float
    """JAX's error against a reference with this cause."""

    words = renamed_attribute("words", "description")
    error_left = renamed_attribute("error_left", "remaining_error")

    def to_dict(self) -> dict[str, Any]:
        """Return the cause as JSON values."""
        return {
            "kind": self.kind,
            "words": self.description,
            "error_left": self.remaining_error,
        }


@dataclass(frozen=True)
class Divergence:
    """The result of a comparison of two models.

    Attributes:
        layers: The common layers, in the order of the JAX function.
        first: The first layer that diverges, or None.
        cause: Its likely cause, or None.
        unmatched: The JAX names without a counterpart.
        bound: The maximum ratio between the errors in JAX and in PyTorch.
    """

    layers: tuple[LayerError, ...]
    first: LayerError | None
    cause: DivergenceCause | None
    unmatched: tuple[str, ...]
    bound: float

    def to_dict(self) -> dict[str, Any]:
        """Return the divergence as JSON values. Infinity becomes a string."""
        fields = asdict(self)
        fields["cause"] = self.cause.to_dict() if self.cause else None
        for layer, errors in zip(fields["layers"], self.layers, strict=True):
            layer["ratio"] = errors.ratio
        return cast(dict[str, Any], _to_json(fields))

    def plot(self, path: str | Path) -> None:
        """Plot the errors by layer into an SVG file."""
        numbered = list(enumerate(self.layers, start=1))
        curves = {
            "JAX": [(float(n), max(layer.jax_error, layer.floor)) for n, layer in numbered],
            "PyTorch": [(float(n), max(layer.torch_error, layer.floor)) for n, layer in numbered],
        }
        title = "Error against PyTorch in float64"
        if self.first is not None:
            layer_number = self.layers.index(self.first) + 1
            curves["first divergence"] = [(float(layer_number), self.first.jax_error)]
            title += f": diverges at {self.first.name}"
        x_label = "layer, in the order of computation"
        write_svg(path, Chart(title, x_label, "relative error", curves, log_x=False))

    def __str__(self) -> str:
        """Return the report as text."""
        count = len(self.layers)
        if self.first is None:
            worst = max(self.layers, key=lambda layer: layer.ratio)
            return (
                f"all {count} layers agree: no error against float64 exceeds {self.bound:g} times "
                f"that of the other side; the largest ratio is {worst.ratio:.1f} at {worst.name}"
                + self._unmatched_line()
            )
        assert self.cause is not None
        first = self.first
        before = self.layers.index(first)
        further = "JAX" if first.ratio > 1 else "PyTorch"
        return "\n".join(
            [
                f"{first.name} (PyTorch: {first.torch}) is the first of {count} layers that"
                f" diverges; {before} before it agree",
                f"  relative error against PyTorch in float64: JAX {first.jax_error:.2e}, PyTorch"
                f" {first.torch_error:.2e}; {further} is further away",
                f"  likely cause: {self.cause.kind}: {self.cause.description}"
                f"{self._unmatched_line()}",
            ]
        )

    def _unmatched_line(self) -> str:
        """Return a line with the names that were not compared."""
        if not self.unmatched:
            return ""
        names = _abbreviate(dict.fromkeys(self.unmatched))
        return f"\n  not compared, because there is no counterpart: {names}"


def _abbreviate(names: Iterable[str]) -> str:
    """Return four names and the number of further names."""
    names = list(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "nothing") + more


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def trace_divergence(
    jax_fn: Callable[..., Any],
    torch_module: torch.nn.Module,
    inputs: Any,
    *,
    rename: Rename | None = None,
    bound: float = BOUND,
) -> Divergence:
    """Run a JAX function and the PyTorch module that it was ported from, and compare the layers.

    Args:
        jax_fn: A function that taps its intermediates (`drumline.numerics.tap`), or returns them as
            a dictionary, alone or as the second of two results. It runs under `jax.jit`.
        torch_module: The PyTorch module. Its training mode is restored.
        inputs: An array or a tuple of arrays.
        rename: A mapping from JAX's names to PyTorch's, see `drumline.numerics.Rename`. `TIMM_VIT`
            and `LLAMA` are the mappings of Drumline's models. Not needed for equal names.
        bound: The maximum ratio between the errors in JAX and in PyTorch.

    Raises:
        UserError: No names match, or shapes differ.
    """
    arguments = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    _check_arguments(torch_module, arguments, bound)
    jax_arrays = _collect_intermediates(jax_fn, arguments)
    torch_run = record(torch_module, arguments)
    reference = record(float64_copy(torch_module), arguments)
    matches = dict(_match_names(jax_arrays, reference, rename))
    if not matches:
        raise UserError(
            f"no intermediate has a counterpart: JAX has {_abbreviate(jax_arrays)}, PyTorch "
            f"{_abbreviate(reference.outputs)}; map the names with rename"
        )
    layers = tuple(
        _layer_error(name, torch_name, jax_arrays[name], torch_run, reference)
        for name, torch_name in matches.items()
    )
    first = next((layer for layer in layers if layer.diverges(bound)), None)
    cause = None
    if first is not None:
        cause = _find_cause(first, bound, jax_arrays, matches, reference)
    unmatched = tuple(name for name in jax_arrays if name not in matches)
    return Divergence(layers, first, cause, unmatched, bound)


def _check_arguments(torch_module: Any, inputs: Sequence[Any], bound: float) -> None:
    torch = import_torch()
    if not isinstance(torch_module, torch.nn.Module):
        raise UserError(f"torch_module is {type(torch_module).__name__}, no torch.nn.Module")
    if not 1 < bound < math.inf:
        raise UserError(f"bound is {bound}; it has to be more than 1, and finite")
    for x in inputs:
        if isinstance(x, Mapping | str) or x is None:
            raise UserError(
                f"an input is {type(x).__name__}: pass arrays, in the order of the arguments"
            )


def _collect_intermediates(jax_fn: Callable[..., Any], inputs: Sequence[Any]) -> dict[str, NDArray]:
    """Return the values that the function taps or returns by name, and its result."""
    names: list[str] = []
    if hasattr(jax_fn, "lower"):
        # A jitted function may have a cached trace without the taps.
        jax_fn = getattr(jax_fn, "__wrapped__", jax_fn)

    def run(*inputs: Any) -> list[Any]:
        with collecting() as taps:
            result = jax_fn(*inputs)
        arrays: dict[str, Any] = dict(taps)
        if isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Mapping):
            result, named = result
            arrays |= named
        if isinstance(result, Mapping):
            arrays |= result
        elif hasattr(result, "shape"):
            arrays.setdefault(OUTPUT, result)
        names[:] = arrays  # jit sorts dictionaries
        return list(arrays.values())

    try:
        arrays = jax.jit(run)(*(np.asarray(to_numpy(x)) for x in inputs))
    except jax.errors.UnexpectedTracerError:
        raise UserError(
            "a tap is inside a function that is traced by itself, such as the body of a scan or "
            "a checkpoint; trace the model with its layers one by one"
        ) from None
    return {name: np.asarray(x) for name, x in zip(names, arrays, strict=True)}


def _match_names(
    jax_arrays: Mapping[str, NDArray], reference: Recording, rename: Rename | None
) -> Iterator[tuple[str, TorchName]]:
    """Yield the pairs of JAX and PyTorch names."""
    for name, jax_array in jax_arrays.items():
        counterpart = torch_counterpart(name, rename)
        if counterpart is not None and not isinstance(counterpart, str):
            raise UserError(f"rename: {name} becomes {counterpart!r}, which is not a name")
        torch_name = TorchName.parse(counterpart) if counterpart is not None else None
        if torch_name is None and name == OUTPUT:
            torch_name = TorchName(OUTPUT)
        torch_array = reference.value(torch_name) if torch_name is not None else None
        if torch_name is None or torch_array is None:
            continue
        if jax_array.size != torch_array.size:
            raise UserError(
                f"{name} is {jax_array.shape} in JAX, and {counterpart} is {torch_array.shape} in "
                "PyTorch: these are not the same values; correct rename"
            )
        yield name, torch_name


def _layer_error(
    name: str,
    torch_name: TorchName,
    jax_array: NDArray,
    torch_run: Recording,
    reference: Recording,
) -> LayerError:
    torch_array, expected = torch_run.value(torch_name), reference.value(torch_name)
    assert torch_array is not None
    assert expected is not None
    # Use the finer type, so that a coarser type in JAX or PyTorch is reported.
    dtypes = jax_array.dtype, torch_run.dtype(torch_name)
    rounding = min(
        (float(ml_dtypes.finfo(dtype).eps) / 2 for dtype in dtypes if _is_float(dtype)),
        default=2.0**-24,
    )
    return LayerError(
        name,
        str(torch_name),
        _relative_error(jax_array, expected),
        _relative_error(torch_array, expected),
        FLOOR_ROUNDINGS * rounding,
        (str(dtypes[0]), str(dtypes[1])),
    )


def _find_cause(
    first: LayerError,
    bound: float,
    jax_arrays: Mapping[str, NDArray],
    matches: Mapping[str, TorchName],
    reference: Recording,
) -> DivergenceCause:
    """Return the cause that best explains JAX's output of a layer."""
    torch_name = matches[first.name]
    expected = reference.value(torch_name)
    assert expected is not None
    jax_output = _align(jax_arrays[first.name].astype(np.float64), expected)
    non_finite = int((~np.isfinite(jax_output) & ~_equal_or_nan(jax_output, expected)).sum())
    if non_finite:
        description = (
            f"JAX has {non_finite} values that are NaN or infinite, and PyTorch has numbers there"
        )
        return DivergenceCause("not finite", description, math.inf)
    if first.ratio * bound < 1:
        return DivergenceCause(
            "precision default",
            "PyTorch computes less precisely; look for autocast, TF32 "
            "(torch.backends.cuda.matmul.allow_tf32) or a module in a narrower dtype",
            first.jax_error,
        )
    trials = [
        (_relative_error(jax_output, candidate.output), candidate)
        for candidate in _candidates(first.name, torch_name, jax_arrays, matches, reference)
        if candidate.output.size == jax_output.size
    ]
    unexplained = min(first.jax_error, *(error for error, c in trials if not c.cause), math.inf)
    agreement = bound * max(first.torch_error, first.floor)
    explanations = [
        (error, candidate)
        for error, candidate in trials
        if candidate.cause
        and error * MIN_REDUCTION <= unexplained
        and (candidate.is_rounding or error <= agreement)
    ]
    if explanations:
        error, best = min(explanations, key=lambda explanation: explanation[0])
        description = f"JAX computes {best.description} (then the error is {error:.1e})"
        return DivergenceCause(best.cause, description, error)
    if first.ratio <= bound:
        description = (
            f"JAX has {first.dtypes[0]} and PyTorch {first.dtypes[1]}: both errors are those of "
            "the narrower type; use the same type in both"
        )
        return DivergenceCause("computed in another dtype", description, unexplained)
    description = (
        f"none of {len(trials)} known variants gives JAX's values; all layers before it agree"
    )
    return DivergenceCause("unknown", description, unexplained)


def _candidates(
    name: str,
    torch_name: TorchName,
    jax_arrays: Mapping[str, NDArray],
    matches: Mapping[str, TorchName],
    reference: Recording,
) -> Iterator[CandidateCause]:
    """Yield the values of a layer under the known causes."""
    module, x = reference.module(torch_name), reference.module_input(torch_name.module)
    expected = reference.value(torch_name)
    assert expected is not None
    if module is not None and x is not None:
        output = reference.module_output(torch_name.module)
        candidates = []
        # A module may differ from its apparent type.
        with suppress(ArithmeticError, IndexError, RuntimeError, TypeError, ValueError):
            for candidate in causes.module_candidates(module, x, output):
                value = torch_name.select(_to_output_shape(candidate.output, output))
                candidates.append(CandidateCause(candidate.cause, candidate.description, value))
        if candidates:
            yield from candidates
            return
    scope, dot, last = name.rpartition(".")

    def sibling(other: str) -> NDArray | None:
        """Return the reference of a tap in the same block, in its JAX shape."""
        key = f"{scope}{dot}{other}"
        value = reference.value(matches[key]) if key in matches else None
        return None if value is None else value.reshape(jax_arrays[key].shape)

    if last == "mixed":
        query, key, values = sibling("query"), sibling("key"), sibling("value")
        if query is not None and key is not None and values is not None and query.ndim == 4:
            yield from causes.attention_candidates(query, key, values, expected)
        return
    # The residual sums of a block, after attention and after the feed-forward layer.
    norm = matches.get(f"{scope}{dot}attention_norm")
    sums = {
        "attention": (
            reference.module_input(norm.module) if norm else None,
            sibling("output"),
        ),
        "feedforward": (sibling("attention"), sibling("down")),
    }
    x, branch = sums.get(last, (None, None))
    if x is not None and branch is not None:
        yield from causes.residual_candidates(
            x.reshape(expected.shape), branch.reshape(expected.shape)
        )


def _align(array: NDArray, expected: NDArray) -> NDArray:
    """Reshape a JAX array to PyTorch's shape, from NHWC to NCHW if necessary."""
    if array.shape != expected.shape and array.ndim == 4 and expected.ndim == 4:
        transposed = array.transpose(0, 3, 1, 2)
        if transposed.shape == expected.shape:
            return transposed
    return array.reshape(expected.shape)


def _to_output_shape(array: NDArray, output: NDArray) -> NDArray:
    """Reshape a candidate for a convolution, [batch, positions, channels], to the output."""
    if array.ndim == 3 and output.ndim == 4 and array.size == output.size:
        return array.swapaxes(1, 2).reshape(output.shape)
    return array


def _relative_error(array: NDArray, expected: NDArray) -> float:
    """Return the root mean square error relative to the finite expected values."""
    actual = _align(array.astype(np.float64), expected)
    finite = expected[np.isfinite(expected)]
    scale = math.sqrt(float(np.mean(np.square(finite)))) if finite.size else 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.where(_equal_or_nan(actual, expected), 0.0, actual - expected)
        error = math.sqrt(float(np.mean(np.square(difference)))) if expected.size else 0.0
    if not math.isfinite(error):
        return math.inf
    return error / scale if scale else (math.inf if error else 0.0)


def _equal_or_nan(array: NDArray, expected: NDArray) -> NDArray:
    """Return True for equal elements, including infinities and NaN."""
    return (array == expected) | (np.isnan(array) & np.isnan(expected))


def _is_float(dtype: np.dtype[Any]) -> bool:
    return bool(np.issubdtype(dtype, np.floating)) or dtype == ml_dtypes.bfloat16
