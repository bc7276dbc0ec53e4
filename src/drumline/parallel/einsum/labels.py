"""A two-operand einsum as labelled dimensions: how long each is, and over which mesh axes.

This is what `choice` decides on. Nothing here touches an array: operands give their shape,
their type and their `PartitionSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from string import ascii_letters

import jax.numpy as jnp
from jax.sharding import PartitionSpec

Axes = tuple[str, ...]


class NotTwoOperands(ValueError):
    """The specification is one that the rings cannot read; the message says why."""


@dataclass(frozen=True)
class Labelled:
    """One array of an einsum: a letter, a length and mesh axes for each dimension."""

    labels: str
    lengths: tuple[int, ...]
    axes: tuple[Axes, ...]

    def axes_of(self, label: str) -> Axes:
        """The mesh axes a dimension is divided over, the slowest first; () if it is whole."""
        return self.axes[self.labels.index(label)]

    def length_of(self, label: str) -> int:
        """The length of a dimension over all devices."""
        return self.lengths[self.labels.index(label)]


@dataclass(frozen=True)
class Product:
    """An einsum of two operands with its result, on a mesh of so many devices along each axis.

    Axes of a single device divide nothing and are left out.
    """

    x: Labelled
    w: Labelled
    out: Labelled
    mesh: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> str:
        """Labels that x alone hands to the result."""
        return "".join(n for n in self.x.labels if n in self.out.labels and n not in self.w.labels)

    @property
    def columns(self) -> str:
        """Labels that w alone hands to the result."""
        return "".join(n for n in self.w.labels if n in self.out.labels and n not in self.x.labels)

    @property
    def contracted(self) -> str:
        """Labels of both operands that the result no longer has."""
        return "".join(n for n in self.x.labels if n in self.w.labels and n not in self.out.labels)

    @property
    def batched(self) -> str:
        """Labels of both operands and the result."""
        return "".join(n for n in self.x.labels if n in self.w.labels and n in self.out.labels)

    @property
    def summed_alone(self) -> str:
        """Labels of one operand that the result no longer has."""
        return "".join(
            n
            for n in self.x.labels + self.w.labels
            if n not in self.out.labels and (n in self.x.labels) != (n in self.w.labels)
        )

    def swapped(self) -> Product:
        """The same product with the operands in each other's place."""
        return Product(self.w, self.x, self.out, self.mesh)

    def devices(self, axes: Axes) -> int:
        """How many devices some mesh axes have together."""
        return prod(size for axis, size in self.mesh if axis in axes)


def read_labels(spec: str, x_dims: int, w_dims: int) -> tuple[str, str, str]:
    """The letters of x, w and the result, with `...` of x written out.

    Raises:
        NotTwoOperands: there is something else between the commas and the arrow.
    """
    text = spec.replace(" ", "")
    operands, arrow, out = text.partition("->")
    terms = operands.split(",")
    if len(terms) != 2:
        raise NotTwoOperands(f"{spec!r} has {len(terms)} operands, not two")
    if not arrow:
        raise NotTwoOperands(f"{spec!r} does not name the result after '->'")
    x, w = terms
    if "..." in w:
        raise NotTwoOperands(f"{spec!r} has '...' in its second operand")
    if "..." in x:
        unused = [letter for letter in ascii_letters if letter not in text]
        written = "".join(unused[: max(x_dims - len(x) + 3, 0)])
        x, out = x.replace("...", written), out.replace("...", written)
    for term, dims in ((x, x_dims), (w, w_dims)):
        if not term.isalpha() or len(term) != dims:
            raise NotTwoOperands(
                f"{spec!r} does not fit operands of {x_dims} and {w_dims} dimensions"
            )
    for term in (x, w, out):
        if len(set(term)) != len(term):
            raise NotTwoOperands(f"{spec!r} repeats a letter within one array")
    if set(out) - set(x + w):
        raise NotTwoOperands(f"{spec!r} has letters in its result that no operand has")
    return x, w, out


def spread(spec: PartitionSpec, dims: int) -> tuple[Axes, ...]:
    """The mesh axes of each of `dims` dimensions, also of those the spec leaves out."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return tuple(entries) + ((),) * (dims - len(entries))


def without_single(axes: tuple[Axes, ...], mesh: Mapping[str, int]) -> tuple[Axes, ...]:
    """The same without the mesh axes that have one device."""
    return tuple(tuple(axis for axis in entry if mesh[axis] > 1) for entry in axes)


def item_bytes(dtype: jnp.dtype) -> int:
    """Bytes of one element."""
    return int(jnp.dtype(dtype).itemsize)
