"""Is every number of a tree finite? Told in every training step, and never waited for.

One reduction over all floating leaves, which finds the first element that is NaN or infinite. It
is dispatched behind the step, its few bytes are copied to the host in the background, and a later
call reads them once they are there. By then the tree itself may have been donated to the next step:
all that an error tells was carried by the reduction.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, UInt32

from drumline.numerics.mistakes import Mistake

MOST_PENDING = 64
"""Results that may be outstanding: a host so far ahead of its devices waits for the oldest."""

_KINDS = ("nan", "inf", "-inf")
_NONE = np.uint32(2**32 - 1)
"""Stands where all is finite; no position is as high."""
_SPAN = 2**30
"""Positions that fit beside a kind into 32 bits, less `_NONE`."""


class NotFinite(ArithmeticError):
    """The first element of a tree that is NaN or infinite."""

    def __init__(self, place: NotFinitePlace, step: int | None = None) -> None:
        """Made of what the reduction found, and the step it belongs to."""
        super().__init__(place, step)
        self.place = place
        self.step = step

    def __str__(self) -> str:
        """What stands where, and in which step."""
        return str(self.place) if self.step is None else f"step {self.step}: {self.place}"


@dataclass(frozen=True)
class NotFinitePlace:
    """Where a tree is not finite, and what stands there."""

    leaf: str
    """Its path, such as `params.blocks.query`."""
    position: tuple[int, ...]
    """The first such element, row by row."""
    kind: str
    """`nan`, `inf` or `-inf`."""
    count: int | None
    """How many elements of the leaf are not finite; unknown for leaves of 2³² and more."""
    size: int
    """How many elements the leaf has."""

    def __str__(self) -> str:
        """A sentence without its full stop."""
        at = f"[{', '.join(map(str, self.position))}]" if self.position else ""
        many = "" if self.count is None else f"; {self.count:,} of {self.size:,} are not finite"
        return f"{self.leaf}{at} is {self.kind}{many}"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FirstNotFinite:
    """What the reduction over a tree tells, on the device still. A jitted step may return it."""

    found: UInt32[Array, " facts"]
    """The leaf's number, its count, and the position in parts, the kind in the last."""
    leaves: tuple[tuple[str, tuple[int, ...]], ...] = field(metadata={"static": True})
    """The path and the shape of each floating leaf."""

    def place(self, name: str = "tree") -> NotFinitePlace | None:
        """Where the tree is not finite; None where it is. Waits for the device."""
        facts = [int(fact) for fact in np.asarray(self.found.addressable_data(0))]
        if facts[0] == _NONE:
            return None
        path, shape = self.leaves[facts[0]]
        parts = _parts(shape)
        *upper, last = facts[2 : 2 + len(parts)]
        position: list[int] = []
        for (start, end), at in zip(parts, (*upper, last // 4), strict=True):
            position += (int(p) for p in np.unravel_index(at, shape[start:end]))
        size = math.prod(shape)
        return NotFinitePlace(
            leaf=f"{name}.{path}" if path else name,
            position=tuple(position),
            kind=_KINDS[last % 4],
            count=facts[1] if size < 2**32 else None,
            size=size,
        )


def first_not_finite(tree: Any) -> FirstNotFinite:
    """The first element that is NaN or infinite, for use inside `jax.jit` too.

    Give what a jitted step returns of it to `check_finite`, in place of a tree.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    floating = [
        (path, leaf)
        for path, leaf in zip(_paths(structure), leaves, strict=True)
        if _is_floating(leaf)
    ]
    return FirstNotFinite(
        found=_reduce(tuple(_as_jax_takes_it(leaf) for _, leaf in floating)),
        leaves=tuple((path, np.shape(leaf)) for path, leaf in floating),
    )


def check_finite(
    tree: Any, name: str = "tree", *, step: int | None = None, wait: bool = False
) -> None:
    """Raise for this tree, or for one of an earlier call, as soon as the device has told.

    Integers and whatever is no number are passed over. Each thread has its own queue; an error
    empties it, so that one that is caught is not followed by others of the same cause.

    Args:
        tree: arrays, or what `first_not_finite` found inside of a jitted step.
        name: what to call the tree in the error.
        step: the step it belongs to, for the error.
        wait: whether to wait for this tree and all earlier ones, as after the last step.

    Raises:
        NotFinite: an element is NaN or infinite.
    """
    first = tree if isinstance(tree, FirstNotFinite) else first_not_finite(tree)
    if isinstance(first.found, jax.core.Tracer):
        raise Mistake(
            f"check_finite: {name} is being traced and has no numbers yet; inside of jax.jit use "
            "first_not_finite, return what it gives, and check that outside"
        )
    pending = _here.pending
    if first.leaves:
        first.found.copy_to_host_async()
        pending.append(_Pending(first, name, step))
    while pending and (wait or len(pending) > MOST_PENDING or pending[0].is_ready()):
        told = pending.popleft()
        place = told.first.place(told.name)
        if place is not None:
            pending.clear()
            raise NotFinite(place, told.step)


@dataclass(frozen=True)
class _Pending:
    """A reduction whose result has not been read."""

    first: FirstNotFinite
    name: str
    step: int | None

    def is_ready(self) -> bool:
        found: Any = self.first.found
        return bool(found.is_ready())


class _Here(threading.local):
    """What a thread has dispatched, oldest first."""

    def __init__(self) -> None:
        self.pending: deque[_Pending] = deque()


_here = _Here()


# ---- the reduction ---------------------------------------------------------------------------


@jax.jit
def _reduce(leaves: tuple[jax.Array, ...]) -> UInt32[Array, " facts"]:
    """The number of the first leaf that is not finite, and what `_first` tells of it."""
    longest = max((len(_parts(leaf.shape)) for leaf in leaves), default=1)
    if not leaves:
        return jnp.full(2 + longest, _NONE)
    rows = []
    for leaf in leaves:
        facts = _first(leaf)
        rows.append(jnp.stack(facts + [_NONE] * (1 + longest - len(facts))))
    table = jnp.stack(rows)
    bad = table[:, 1] != _NONE
    number = jnp.argmax(bad)
    leaf_number = jnp.where(bad.any(), number.astype(jnp.uint32), _NONE)
    return jnp.concatenate([leaf_number[None], table[number]])


def _first(leaf: Any) -> list[Any]:
    """How many elements are not finite, and the parts of the first one's position.

    Positions are made of each axis by itself, never of the leaf laid out flat: a leaf that is
    sharded stays where it is, and every device searches its own shard.
    """
    x = jnp.asarray(leaf)
    if jnp.iscomplexobj(x):
        x = jnp.where(jnp.isfinite(x.real), x.imag, x.real)
    if x.dtype.itemsize == 1:
        x = x.astype(jnp.float32)
    bad = ~jnp.isfinite(x)
    kind = jnp.where(jnp.isnan(x), 0, jnp.where(x > 0, 1, 2)).astype(jnp.uint32)
    *upper, last = _parts(x.shape)
    among, found = bad, []
    for part in upper:
        at = _position(x.shape, part)
        found.append(_least(among, at))
        among = among & (at == found[-1])
    found.append(_least(among, _position(x.shape, last) * 4 + kind))
    count = bad.sum(dtype=jnp.uint32) if x.size < 2**32 else jnp.uint32(0)
    return [count, *found]


def _least(among: Bool[Array, "*dims"], at: UInt32[Array, "*dims"]) -> UInt32[Array, ""]:
    return jnp.where(among, at, _NONE).min()


def _position(shape: tuple[int, ...], part: tuple[int, int]) -> UInt32[Array, "*dims"]:
    """Each element's place among these axes, row by row."""
    at, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(*part)):
        at = at + lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
        stride *= shape[axis]
    return at


def _parts(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Axes in groups, first to end, so that a place within a group can be counted in 32 bits.

    The last group leaves room for the kind; it has no axes where the last axis is too long.
    """
    parts, end, size = [], len(shape), 1
    for axis in reversed(range(len(shape))):
        if size * shape[axis] > _SPAN:
            parts.append((axis + 1, end))
            end, size = axis + 1, 1
        size *= shape[axis]
    return [(0, end), *reversed(parts)]


@lru_cache
def _paths(structure: Any) -> tuple[str, ...]:
    """The place of each leaf, as a user writes it; made once, as every step asks for the same."""
    numbered = jax.tree_util.tree_unflatten(structure, range(structure.num_leaves))
    paths, _ = jax.tree_util.tree_flatten_with_path(numbered)
    return tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)


def _as_jax_takes_it(leaf: Any) -> Any:
    """A leaf of the host's may be wider than JAX's numbers, which would make 1e300 infinite."""
    if isinstance(leaf, jax.Array) or np.dtype(getattr(leaf, "dtype", float)).itemsize <= 4:
        return leaf
    wide = np.asarray(leaf)
    kind = np.complex64 if wide.dtype.kind == "c" else np.float32
    return np.where(np.isfinite(wide), 0, wide).astype(kind)


def _is_floating(leaf: Any) -> bool:
    if isinstance(leaf, float | complex):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and _is_inexact(dtype) and 0 not in leaf.shape


@lru_cache
def _is_inexact(dtype: Any) -> bool:
    """JAX takes microseconds to say so, and a tree has hundreds of leaves."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))
