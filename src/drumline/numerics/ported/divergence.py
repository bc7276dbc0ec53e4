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
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np

from drumline.numerics.errors import Numbers
from drumline.numerics.implementations import from_torch, need_torch
from drumline.numerics.mistakes import Mistake
from drumline.numerics.ported import causes
from drumline.numerics.ported.attention import attention
from drumline.numerics.ported.causes import Candidate
from drumline.numerics.ported.names import Rename, TorchPlace, counterpart
from drumline.numerics.ported.recorded import OUTPUT, Recording, in_float64, record
from drumline.numerics.ported.report import Divergence, DivergenceCause, LayerError, some
from drumline.parallel.taps import collecting

if TYPE_CHECKING:
    import torch


BOUND = 8.0
"""How many times further from the truth than the other side a layer may be."""
UNITS = 4.0
"""Roundings that any layer may have, in units of its type: some have none in PyTorch, by luck."""
EXPLAINED = 3.0
"""A cause must bring the error down to one part in so many."""


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
    _check(torch_module, given, bound)
    ours = _intermediates(jax_fn, given)
    original, exact = record(torch_module, given), record(in_float64(torch_module), given)
    pairs = dict(_matched(ours, exact, rename))
    if not pairs:
        raise Mistake(
            f"no intermediate has a counterpart: JAX has {some(ours)}, PyTorch "
            f"{some(exact.returned)}; say with rename which is which"
        )
    layers = tuple(
        _layer_error(name, place, ours[name], original, exact) for name, place in pairs.items()
    )
    first = next((layer for layer in layers if layer.parts(bound)), None)
    cause = _cause(first, bound, ours, pairs, exact) if first is not None else None
    unmatched = tuple(name for name in ours if name not in pairs)
    return Divergence(layers, first, cause, unmatched, bound)


def _check(torch_module: Any, inputs: Sequence[Any], bound: float) -> None:
    torch = need_torch()
    if not isinstance(torch_module, torch.nn.Module):
        raise Mistake(f"torch_module is {type(torch_module).__name__}, no torch.nn.Module")
    if not 1 < bound < math.inf:
        raise Mistake(f"bound is {bound}; it has to be more than 1, and finite")
    for given in inputs:
        if isinstance(given, Mapping | str) or given is None:
            raise Mistake(
                f"an input is {type(given).__name__}: give arrays, in the order of the arguments"
            )


def _intermediates(jax_fn: Callable[..., Any], inputs: Sequence[Any]) -> dict[str, Numbers]:
    """Everything that the function taps or returns by name, its result as the last."""
    names: list[str] = []
    if hasattr(jax_fn, "lower"):
        # What is jitted may have been traced when nobody looked, and would not be traced again.
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
    return np.asarray(from_torch(given))


def _matched(
    ours: Mapping[str, Numbers], exact: Recording, rename: Rename | None
) -> Iterator[tuple[str, TorchPlace]]:
    """The names that both sides have, and where on PyTorch's side they are."""
    for name, value in ours.items():
        theirs = counterpart(name, rename)
        if theirs is not None and not isinstance(theirs, str):
            raise Mistake(f"rename: {name} becomes {theirs!r}, which is no name")
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
    both = value.dtype, original.dtype_at(place)
    types = [kind for kind in both if _is_float(kind)]
    unit = min((float(ml_dtypes.finfo(kind).eps) / 2 for kind in types), default=2.0**-24)
    return LayerError(
        name,
        _written(place),
        _relative(value, true),
        _relative(theirs, true),
        UNITS * unit,
        (str(both[0]), str(both[1])),
    )


def _cause(
    first: LayerError,
    bound: float,
    ours: Mapping[str, Numbers],
    pairs: Mapping[str, TorchPlace],
    exact: Recording,
) -> DivergenceCause:
    """The known cause under which the layer would be what JAX, or PyTorch, made of it."""
    place = pairs[first.name]
    theirs = exact.at(place)
    assert theirs is not None
    value = _aligned(ours[first.name].astype(np.float64), theirs)
    odd = int((~np.isfinite(value) & ~_same(value, theirs)).sum())
    if odd:
        words = f"JAX has {odd} values that are NaN or infinite, and PyTorch has numbers there"
        return DivergenceCause("not finite", words, math.inf)
    if first.ratio * bound < 1:
        return DivergenceCause(
            "precision default",
            "PyTorch is the one that computes less precisely; look for autocast, TF32 "
            "(torch.backends.cuda.matmul.allow_tf32) or a module in a narrower dtype",
            first.jax_error,
        )
    tried = [
        (_relative(value, candidate.value), candidate)
        for candidate in _candidates(first.name, place, ours, pairs, exact)
        if candidate.value.size == value.size
    ]
    plain = min(first.jax_error, *(error for error, c in tried if not c.cause), math.inf)
    met = bound * max(first.torch_error, first.floor)
    explained = [
        (error, candidate)
        for error, candidate in tried
        if candidate.cause and error * EXPLAINED <= plain and (candidate.rounds or error <= met)
    ]
    if explained:
        error, best = min(explained, key=lambda entry: entry[0])
        words = f"JAX computes {best.words} (then the error is {error:.1e})"
        return DivergenceCause(best.cause, words, error)
    if first.ratio <= bound:
        kinds = f"JAX has {first.dtypes[0]} and PyTorch {first.dtypes[1]}"
        words = f"{kinds}: both are off by what the narrower rounds; give both the same"
        return DivergenceCause("computed in another dtype", words, plain)
    words = (
        f"of {len(tried)} ways to compute it none is JAX's; no layer before it is beyond the bound"
    )
    return DivergenceCause("unknown", words, plain)


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
        whole = exact.whole_result(place.module)
        found = []
        # A module of a kind that we only seem to know is one that we do not know.
        with suppress(ArithmeticError, IndexError, RuntimeError, TypeError, ValueError):
            for candidate in causes.of_module(module, given, whole):
                value = place.pick(_shaped_like(candidate.value, whole))
                found.append(Candidate(candidate.cause, candidate.words, value))
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
        query, key, values = near("query"), near("key"), near("value")
        if query is not None and key is not None and values is not None and query.ndim == 4:
            yield from attention(query, key, values, theirs)
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


def _shaped_like(value: Numbers, whole: Numbers) -> Numbers:
    """A candidate for what a convolution returns, which has positions and then channels."""
    if value.ndim == 3 and whole.ndim == 4 and value.size == whole.size:
        return value.swapaxes(1, 2).reshape(whole.shape)
    return value


def _relative(value: Numbers, true: Numbers) -> float:
    """The root mean square of the difference, over that of the true values that are finite."""
    wide = _aligned(value.astype(np.float64), true)
    numbers = true[np.isfinite(true)]
    size = math.sqrt(float(np.mean(np.square(numbers)))) if numbers.size else 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        apart = np.where(_same(wide, true), 0.0, wide - true)
        error = math.sqrt(float(np.mean(np.square(apart)))) if true.size else 0.0
    if not math.isfinite(error):
        return math.inf
    return error / size if size else (math.inf if error else 0.0)


def _same(value: Numbers, true: Numbers) -> Numbers:
    """Whether each is the same, infinities and NaN included: a mask is no difference."""
    return (value == true) | (np.isnan(value) & np.isnan(true))


def _is_float(kind: np.dtype[Any]) -> bool:
    return bool(np.issubdtype(kind, np.floating)) or kind == ml_dtypes.bfloat16


def _written(place: TorchPlace) -> str:
    part = "" if place.part is None else f"[{place.part[0]}/{place.part[1]}]"
    token = "" if place.token is None else f"[:,{place.token}]"
    return f"{place.module}{part}{token}{':input' if place.given else ''}"
