"""Check that all numbers of a tree are finite, in every training step, without waiting for it.

A reduction over the floating-point leaves finds the first element that is NaN or infinite. The
reduction is dispatched after the step, its few bytes are copied to the host in the background, and
a later call reads them. By then the tree may have been donated to the next step, so the reduction
returns everything that an error reports.
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

from drumline.deprecated import renamed_attribute
from drumline.errors import UserError

MAX_PENDING = 64
"""The maximum number of unread results. A host further ahead waits for the oldest."""

_KINDS = ("nan", "inf", "-inf")
_NONE = np.uint32(2**32 - 1)
"""The value if all elements are finite, which exceeds all positions."""
_MAX_POSITIONS = 2**30
"""The positions that fit into 32 bits with two bits for the kind, without reaching `_NONE`."""


class NotFinite(ArithmeticError):
    """An error: a tree has an element that is NaN or infinite."""

    def __init__(self, element: NonFiniteElement, step: int | None = None) -> None:
        """`element` is the first such element, `step` the step that it belongs to."""
        super().__init__(element, step)
        self.element = element
        self.step = step

    place = renamed_attribute("place", "element")

    def __str__(self) -> str:
        """Return the step, the element and its value."""
        return str(self.element) if self.step is None else f"step {self.step}: {self.element}"


@dataclass(frozen=True)
class NonFiniteElement:
    """The first element of a tree that is NaN or infinite."""

    leaf: str
    """The path of the leaf, such as `params.blocks.query`."""
    position: tuple[int, ...]
    """The index in the leaf, first in row-major order."""
    kind: str
    """`nan`, `inf` or `-inf`."""
    count: int | None
    """The number of non-finite elements in the leaf, or None for leaves of 2³² elements or more."""
    size: int
    """The number of elements in the leaf."""

    def __str__(self) -> str:
        """Return a sentence without a full stop."""
        position = f"[{', '.join(map(str, self.position))}]" if self.position else ""
        total = "" if self.count is None else f"; {self.count:,} of {self.size:,} are not finite"
        return f"{self.leaf}{position} is {self.kind}{total}"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FirstNotFinite:
    """The result of the reduction over a tree, on the device. A jitted step may return it."""

    encoded: UInt32[Array, " fields"]
    """The index of the leaf, the count, and the parts of the position; the last part includes the
    kind."""
    leaves: tuple[tuple[str, tuple[int, ...]], ...] = field(metadata={"static": True})
    """The paths and shapes of the floating-point leaves."""

    found = renamed_attribute("found", "encoded")
    place = renamed_attribute("place", "read")

    def read(self, name: str = "tree") -> NonFiniteElement | None:
        """Wait for the device and return the element, or None if the tree is finite."""
        fields = [int(value) for value in np.asarray(self.encoded.addressable_data(0))]
        if fields[0] == _NONE:
            return None
        path, shape = self.leaves[fields[0]]
        axis_groups = _axis_groups(shape)
        *indices, last = fields[2 : 2 + len(axis_groups)]
        position: list[int] = []
        for (start, end), index in zip(axis_groups, (*indices, last // 4), strict=True):
            position += (int(i) for i in np.unravel_index(index, shape[start:end]))
        size = math.prod(shape)
        return NonFiniteElement(
            leaf=f"{name}.{path}" if path else name,
            position=tuple(position),
            kind=_KINDS[last % 4],
            count=fields[1] if size < 2**32 else None,
            size=size,
        )


def first_not_finite(tree: Any) -> FirstNotFinite:
    """Find the first element that is NaN or infinite. This also works inside `jax.jit`.

    Return the result from a jitted step and pass it to `check_finite` instead of a tree.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    floating = [
        (path, leaf)
        for path, leaf in zip(_leaf_paths(structure), leaves, strict=True)
        if _is_floating(leaf)
    ]
    return FirstNotFinite(
        encoded=_reduce(tuple(_fit_to_float32(leaf) for _, leaf in floating)),
        leaves=tuple((path, np.shape(leaf)) for path, leaf in floating),
    )


def check_finite(
    tree: Any, name: str = "tree", *, step: int | None = None, wait: bool = False
) -> None:
    """Raise for this tree, or for that of an earlier call, once the device has the result.

    Integers and leaves that are not numeric are ignored. Each thread has its own queue. An error
    empties the queue, so that a caught error is not followed by others with the same cause.

    Args:
        tree: Arrays, or the result of `first_not_finite` in a jitted step.
        name: The name of the tree in the error.
        step: The step that the tree belongs to, for the error.
        wait: True to wait for this tree and all earlier ones, as after the last step.

    Raises:
        NotFinite: An element is NaN or infinite.
    """
    first = tree if isinstance(tree, FirstNotFinite) else first_not_finite(tree)
    if isinstance(first.encoded, jax.core.Tracer):
        raise UserError(
            f"check_finite: {name} is being traced and has no numbers yet; inside jax.jit use "
            "first_not_finite, return its result, and check that outside"
        )
    queue = _local.queue
    if first.leaves:
        first.encoded.copy_to_host_async()
        queue.append(_PendingCheck(first, name, step))
    while queue and (wait or len(queue) > MAX_PENDING or queue[0].is_ready()):
        pending = queue.popleft()
        element = pending.first.read(pending.name)
        if element is not None:
            queue.clear()
            raise NotFinite(element, pending.step)


@dataclass(frozen=True)
class _PendingCheck:
    """A reduction with an unread result."""

    first: FirstNotFinite
    name: str
    step: int | None

    def is_ready(self) -> bool:
        encoded: Any = self.first.encoded
        return bool(encoded.is_ready())


class _ThreadQueue(threading.local):
    """The pending checks of a thread, oldest first."""

    def __init__(self) -> None:
        self.queue: deque[_PendingCheck] = deque()


_local = _ThreadQueue()


# ---- The reduction -----------------------------------------------------------------------------


@jax.jit
def _reduce(leaves: tuple[jax.Array, ...]) -> UInt32[Array, " fields"]:
    """Return the index of the first non-finite leaf, and the fields of `_reduce_leaf`."""
    max_groups = max((len(_axis_groups(leaf.shape)) for leaf in leaves), default=1)
    if not leaves:
        return jnp.full(2 + max_groups, _NONE)
    rows = []
    for leaf in leaves:
        fields = _reduce_leaf(leaf)
        rows.append(jnp.stack(fields + [_NONE] * (1 + max_groups - len(fields))))
    table = jnp.stack(rows)
    is_bad = table[:, 1] != _NONE
    index = jnp.argmax(is_bad)
    leaf_index = jnp.where(is_bad.any(), index.astype(jnp.uint32), _NONE)
    return jnp.concatenate([leaf_index[None], table[index]])


def _reduce_leaf(leaf: Any) -> list[Any]:
    """Return the number of non-finite elements and the encoded position of the first one.

    Positions are computed along the axes, without flattening the leaf. So a sharded leaf is not
    moved, and each device searches its own shard.
    """
    x = jnp.asarray(leaf)
    if jnp.iscomplexobj(x):
        x = jnp.where(jnp.isfinite(x.real), x.imag, x.real)
    if x.dtype.itemsize == 1:
        x = x.astype(jnp.float32)
    is_bad = ~jnp.isfinite(x)
    kind = jnp.where(jnp.isnan(x), 0, jnp.where(x > 0, 1, 2)).astype(jnp.uint32)
    *leading_groups, last_group = _axis_groups(x.shape)
    candidates, indices = is_bad, []
    for axes in leading_groups:
        index = _index_within(x.shape, axes)
        indices.append(_min_where(candidates, index))
        candidates = candidates & (index == indices[-1])
    indices.append(_min_where(candidates, _index_within(x.shape, last_group) * 4 + kind))
    count = is_bad.sum(dtype=jnp.uint32) if x.size < 2**32 else jnp.uint32(0)
    return [count, *indices]


def _min_where(mask: Bool[Array, "*dims"], values: UInt32[Array, "*dims"]) -> UInt32[Array, ""]:
    return jnp.where(mask, values, _NONE).min()


def _index_within(shape: tuple[int, ...], axes: tuple[int, int]) -> UInt32[Array, "*dims"]:
    """Return the row-major indices of the elements within a group of axes."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(*axes)):
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
        stride *= shape[axis]
    return index


def _axis_groups(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Split the axes into groups, as (start, end), so that an index within a group fits 32 bits.

    The last group reserves bits for the kind. It has no axes if the last axis is too long.
    """
    groups, end, size = [], len(shape), 1
    for axis in reversed(range(len(shape))):
        if size * shape[axis] > _MAX_POSITIONS:
            groups.append((axis + 1, end))
            end, size = axis + 1, 1
        size *= shape[axis]
    return [(0, end), *reversed(groups)]


@lru_cache
def _leaf_paths(structure: Any) -> tuple[str, ...]:
    """Return the paths of the leaves. Cached, because every step has the same structure."""
    indices = jax.tree_util.tree_unflatten(structure, range(structure.num_leaves))
    paths, _ = jax.tree_util.tree_flatten_with_path(indices)
    return tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)


def _fit_to_float32(leaf: Any) -> Any:
    """Replace the finite elements of a host's float64 leaf by 0. JAX would make 1e300 infinite."""
    if isinstance(leaf, jax.Array) or np.dtype(getattr(leaf, "dtype", float)).itemsize <= 4:
        return leaf
    array = np.asarray(leaf)
    dtype = np.complex64 if array.dtype.kind == "c" else np.float32
    return np.where(np.isfinite(array), 0, array).astype(dtype)


def _is_floating(leaf: Any) -> bool:
    if isinstance(leaf, float | complex):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and _is_inexact(dtype) and 0 not in leaf.shape


@lru_cache
def _is_inexact(dtype: Any) -> bool:
    """Return True for floating-point types. Cached, because JAX takes microseconds per leaf."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))
