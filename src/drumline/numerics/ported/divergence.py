"""`trace_divergence`: the first layer in which a ported model is not the model it was ported from.

Both models run on the same inputs, and PyTorch's a second time in float64. That tells for every
layer how far float32 has to be from the truth: PyTorch's own error. A layer in which JAX is many
times further away computes something else, however small the difference is; one in which both are
as far away is the same. What differs is then found by trying (`causes`).
"""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np

from drumline.numerics.errors import Numbers
from drumline.numerics.mistakes import Mistake
from drumline.numerics.plots import Chart, write
from drumline.numerics.ported import causes
from drumline.numerics.ported.attention import attention
from drumline.numerics.ported.causes import Candidate
from drumline.numerics.ported.names import Rename, TorchPlace, counterpart
from drumline.numerics.ported.recorded import OUTPUT, Recording, in_float64, record
from drumline.parallel.taps import collecting

if TYPE_CHECKING:
    import torch


BOUND = 8.0
"""How many times further from the truth than the other side a layer may be."""
UNITS = 4.0
"""Roundings that any layer may have, in units of its type: some have none in PyTorch, by luck."""
EXPLAINED = 3.0
"""A cause must bring the error down to one part in so many."""


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
    """What roundings alone may come to."""

    @property
    def ratio(self) -> float:
        """How many times further away JAX is; less than one where PyTorch is further."""
        return max(self.jax_error, self.floor) / max(self.torch_error, self.floor)


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
        """For JSON."""
        found = asdict(self)
        for layer, errors in zip(found["layers"], self.layers, strict=True):
            layer["ratio"] = errors.ratio
        return found

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
        listed = _some(dict.fromkeys(self.unmatched))
        return f"\n  not compared, for want of a counterpart: {listed}"


def trace_divergence(
    jax_fn: Callable[..., Any],
    torch_module: torch.nn.Module,
    inputs: Any,
    *,
    rename: Rename | None = None,
    bound: float = BOUND,
) -> Divergence:
    """Run a JAX function and the PyTorch module that it was ported from, and compare layers.

    Args:
        jax_fn: taps its intermediates (`drumline.numerics.tap`), or returns them as a dictionary
            by name, alone or as the second of two results. It is run under `jax.jit`.
        torch_module: the original; it is put back into the mode in which it was.
        inputs: an array or a tuple of them, given to both.
        rename: from JAX's names to PyTorch's, see `drumline.numerics.Rename`; there are tables
            for our models, `TIMM_VIT` and `LLAMA`. None where the names are the same.
        bound: how many times further from the truth than the other side a layer may be.

    Raises:
        Mistake: nothing could be matched, or shapes differ.
    """
    given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    ours = _intermediates(jax_fn, given)
    original, exact = record(torch_module, given), record(in_float64(torch_module), given)
    pairs = dict(_matched(ours, exact, rename))
    if not pairs:
        raise Mistake(
            f"no intermediate has a counterpart: JAX has {_some(ours)}, PyTorch "
            f"{_some(exact.returned)}; say with rename which is which"
        )
    layers = tuple(
        _layer_error(name, place, ours[name], original, exact) for name, place in pairs.items()
    )
    first = next((e for e in layers if not 1 / bound <= e.ratio <= bound), None)
    cause = None
    if first is not None:
        cause = _cause(first, ours, pairs, exact)
    unmatched = tuple(name for name in ours if name not in pairs)
    return Divergence(layers, first, cause, unmatched, bound)


def _intermediates(jax_fn: Callable[..., Any], inputs: Sequence[Any]) -> dict[str, Numbers]:
    """Everything that the function taps or returns by name, its result as the last."""
    names: list[str] = []
    # One that is compiled already was traced when nobody looked.
    jax_fn = getattr(jax_fn, "__wrapped__", jax_fn)

    def run(*inputs: Any) -> list[Any]:
        with collecting() as seen:
            result = jax_fn(*inputs)
        found: dict[str, Any] = dict(seen)
        if isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Mapping):
            result, named = result
            found |= named
        if isinstance(result, Mapping):
            found |= result
        elif hasattr(result, "shape"):
            found.setdefault(OUTPUT, result)
        names[:] = found  # in this order, which a dictionary would lose on its way out of jit
        return list(found.values())

    try:
        values = jax.jit(run)(*(_plain(given) for given in inputs))
    except jax.errors.UnexpectedTracerError:
        raise Mistake(
            "a tap lies within a function that is traced by itself, such as the body of a scan or "
            "a checkpoint; trace the model with its layers one by one"
        ) from None
    return {name: np.asarray(value) for name, value in zip(names, values, strict=True)}


def _plain(given: Any) -> Numbers:
    """An input as JAX takes it, also if it is PyTorch's."""
    return np.asarray(given.detach().cpu().numpy() if hasattr(given, "detach") else given)


def _matched(
    ours: Mapping[str, Numbers], exact: Recording, rename: Rename | None
) -> Iterator[tuple[str, TorchPlace]]:
    """The names that both sides have, and where on PyTorch's side they are."""
    for name, value in ours.items():
        theirs = counterpart(name, rename)
        place = TorchPlace.read(theirs) if theirs is not None else None
        if place is None and name == OUTPUT:
            place = TorchPlace(OUTPUT)
        found = exact.at(place) if place is not None else None
        if place is None or found is None:
            continue
        if value.size != found.size:
            raise Mistake(
                f"{name} is {value.shape} in JAX, and {theirs} is {found.shape} in PyTorch: these "
                "are not the same values; mend rename"
            )
        yield name, place


def _layer_error(
    name: str, place: TorchPlace, value: Numbers, original: Recording, exact: Recording
) -> LayerError:
    theirs, true = original.at(place), exact.at(place)
    assert theirs is not None
    assert true is not None
    # Of the finer of both types: a side that computes in a coarser one is to be told.
    types = [kind for kind in (value.dtype, original.dtype_at(place)) if _is_float(kind)]
    unit = min((float(ml_dtypes.finfo(kind).eps) / 2 for kind in types), default=2.0**-24)
    return LayerError(
        name,
        _written(place),
        _relative(value, true),
        _relative(theirs, true),
        UNITS * unit,
    )


def _cause(
    first: LayerError,
    ours: Mapping[str, Numbers],
    pairs: Mapping[str, TorchPlace],
    exact: Recording,
) -> DivergenceCause:
    """The known cause under which the layer would be what JAX, or PyTorch, made of it."""
    if first.ratio < 1:
        return DivergenceCause(
            "precision default",
            "PyTorch is the one that computes less precisely; look for autocast, TF32 "
            "(torch.backends.cuda.matmul.allow_tf32) or a module in a narrower dtype",
            first.jax_error,
        )
    place, value = pairs[first.name], ours[first.name]
    if not np.isfinite(value.astype(np.float64)).all():
        bad = int((~np.isfinite(value.astype(np.float64))).sum())
        return DivergenceCause(
            "not finite", f"JAX has {bad} values that are NaN or infinite", math.inf
        )
    tried = list(_candidates(first.name, place, ours, pairs, exact))
    scored = [
        (_relative(value, candidate.value), candidate)
        for candidate in tried
        if candidate.value.size == value.size
    ]
    # An activation is known by what PyTorch's returns; everything else says what it is.
    plain = next((error for error, candidate in scored if not candidate.cause), first.jax_error)
    if not scored:
        return DivergenceCause(
            "unknown", "no cause is known for what lies between these layers", plain
        )
    error, best = min(scored, key=lambda entry: entry[0])
    if not best.cause or error * EXPLAINED > min(plain, first.jax_error):
        return DivergenceCause(
            "unknown",
            f"of {len(scored)} causes that were tried none explains it; the layers before it agree",
            plain,
        )
    return DivergenceCause(
        best.cause, f"JAX computes {best.words} (then the error is {error:.1e})", error
    )


def _candidates(
    name: str,
    place: TorchPlace,
    ours: Mapping[str, Numbers],
    pairs: Mapping[str, TorchPlace],
    exact: Recording,
) -> Iterator[Candidate]:
    """What the layer would return under each known cause, as the place has it."""
    module, given, theirs = exact.module_at(place), exact.whole(place.module), exact.at(place)
    assert theirs is not None
    if module is not None and given is not None:
        found = [
            Candidate(candidate.cause, candidate.words, place.pick(candidate.value))
            for candidate in causes.of_module(module, given, exact.whole_result(place.module))
        ]
        if found:
            yield from found
            return
    scope, dot, last = name.rpartition(".")

    def near(other: str) -> Numbers | None:
        """What another tap of the same block has, as the JAX side shapes it."""
        key = f"{scope}{dot}{other}"
        value = exact.at(pairs[key]) if key in pairs else None
        return None if value is None else value.reshape(ours[key].shape)

    if last == "mixed":
        query, key, value = near("query"), near("key"), near("value")
        if query is not None and key is not None and value is not None and query.ndim == 4:
            yield from attention(query, key, value, theirs)
        return
    # The two sums of a block: what it was given and the branch of attention; then that of the
    # feed-forward part.
    norm = pairs.get(f"{scope}{dot}attention_norm")
    sums = {
        "attention": (exact.whole(norm.module) if norm else None, near("output")),
        "feedforward": (near("attention"), near("down")),
    }
    x, branch = sums.get(last, (None, None))
    if x is not None and branch is not None:
        yield from causes.residual(x.reshape(theirs.shape), branch.reshape(theirs.shape))


def _aligned(value: Numbers, like: Numbers) -> Numbers:
    """A value of the JAX side in the shape of PyTorch's, channels first where those are."""
    if value.shape != like.shape and value.ndim == 4 and like.ndim == 4:
        turned = value.transpose(0, 3, 1, 2)
        if turned.shape == like.shape:
            return turned
    return value.reshape(like.shape)


def _relative(value: Numbers, true: Numbers) -> float:
    """The root mean square of the difference, over that of the true values."""
    wide = _aligned(value.astype(np.float64), true)
    size = math.sqrt(float(np.mean(np.square(true)))) if true.size else 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        error = math.sqrt(float(np.mean(np.square(wide - true)))) if true.size else 0.0
    if not math.isfinite(error):
        return math.inf
    return error / size if size else (math.inf if error else 0.0)


def _is_float(kind: np.dtype[Any]) -> bool:
    return bool(np.issubdtype(kind, np.floating)) or kind == ml_dtypes.bfloat16


def _written(place: TorchPlace) -> str:
    part = "" if place.part is None else f"[{place.part[0]}/{place.part[1]}]"
    token = "" if place.token is None else f"[:,{place.token}]"
    return f"{place.module}{part}{token}{':input' if place.given else ''}"


def _some(names: Mapping[str, Any]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return (", ".join(listed[:4]) or "nothing") + more
