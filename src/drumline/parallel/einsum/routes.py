"""The one ring that makes a product of two sharded arrays, where there is one.

Every label is looked at in the two places it occurs. Where its mesh axes agree, nothing has to
move for its sake. One disagreement is one movement, and each of the five movements below is one
ring; two at a time, or any other, are XLA's to arrange.

    contracted  over A in x, whole in w        gather-matmul, gathered="contraction"
    row of x    over A in x, whole in result   gather-matmul, gathered="rows"
    contracted  over A in both                 matmul-allreduce, or matmul-scatter if the
                                               result has rows or columns over A
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from drumline.parallel.axes import AxisName
from drumline.parallel.einsum.labels import Axes, Labelled, Product

Movement = Literal[
    "gather contraction", "gather rows", "scatter rows", "scatter columns", "allreduce"
]


@dataclass(frozen=True)
class Route:
    """One movement over the ring of `axes`, for the sake of one label.

    Attributes:
        movement: what travels.
        label: the dimension that is gathered or scattered, or summed over by an all-reduce.
        contracted: the contracted dimension that is divided over the axes, if one is.
        axes: the mesh axes of the ring.
        swapped: whether w travels instead of x, as the operands of the transposed product.
    """

    movement: Movement
    label: str
    contracted: str | None
    axes: Axes
    swapped: bool = False

    @property
    def gathers_x(self) -> bool:
        """Whether x is what travels."""
        return self.movement.startswith("gather") and not self.swapped

    @property
    def axis_name(self) -> AxisName:
        """The ring's axis as the ring functions take it."""
        return self.axes[0] if len(self.axes) == 1 else self.axes


def find_route(product: Product) -> Route | str:
    """The one ring that makes this product, or the reason why there is none."""
    if product.batched:
        return f"{product.batched[0]!r} is in both operands and the result, a batched product"
    if product.summed_alone:
        return f"{product.summed_alone[0]!r} is summed over within one operand"
    x, w, out = product.x, product.w, product.out
    divided = [n for n in product.contracted if x.axes_of(n) or w.axes_of(n)]
    changed = [n for n in product.rows if x.axes_of(n) != out.axes_of(n)]
    changed += [n for n in product.columns if w.axes_of(n) != out.axes_of(n)]
    partial_sums = [n for n in divided if x.axes_of(n) == w.axes_of(n)]
    scatters = [
        n for n in changed if partial_sums and _new_axes(product, n) == x.axes_of(partial_sums[0])
    ]
    if len(divided) + len(changed) - len(scatters) != 1:
        moves = "; ".join(_difference(product, n) for n in [*divided, *changed])
        return f"more than one dimension has to move ({moves}): reshard all but one before"
    if scatters:
        return _scatter(product, scatters[0], partial_sums[0])
    if partial_sums:
        return _allreduce(product, partial_sums[0])
    label = (divided or changed)[0]
    if label in product.contracted and w.axes_of(label) and not x.axes_of(label):
        return _gather(product.swapped(), label, swapped=True)
    if label in product.columns:
        return _gather(product.swapped(), label, swapped=True)
    return _gather(product, label, swapped=False)


def is_local(product: Product) -> bool:
    """Whether every dimension is divided in the operands no finer than in the result."""
    for operand in (product.x, product.w):
        for label, axes in zip(operand.labels, operand.axes, strict=True):
            if label not in product.out.labels:
                if axes:
                    return False
            elif product.out.axes_of(label)[: len(axes)] != axes:
                return False
    return True


def _gather(product: Product, label: str, *, swapped: bool) -> Route | str:
    x, w, out = product.x, product.w, product.out
    told = _difference(product.swapped() if swapped else product, label)
    if label in product.contracted:
        axes = x.axes_of(label)
        if w.axes_of(label):
            return f"the operands disagree: {told}"
    else:
        kept, axes = out.axes_of(label), x.axes_of(label)[len(out.axes_of(label)) :]
        if x.axes_of(label) != kept + axes or not axes:
            return f"{told}, which is no gather"
    shared = {axis for n in product.columns for axis in w.axes_of(n)}
    if not shared.issuperset(axes):
        return (
            f"{told}, and nothing of the other operand is over {_names(axes)}: "
            "all its devices would multiply the same"
        )
    if label in product.contracted:
        return Route("gather contraction", label, label, axes, swapped)
    return Route("gather rows", label, None, axes, swapped)


def _scatter(product: Product, label: str, contracted: str) -> Route | str:
    axes = product.x.axes_of(contracted)
    operand: Labelled = product.x if label in product.rows else product.w
    length = operand.length_of(label) // product.devices(operand.axes_of(label))
    if length % product.devices(axes):
        return (
            f"{label!r} has {length} entries on a device, which cannot be divided "
            f"between the {product.devices(axes)} of {_names(axes)}"
        )
    movement: Movement = "scatter rows" if label in product.rows else "scatter columns"
    return Route(movement, label, contracted, axes)


def _allreduce(product: Product, contracted: str) -> Route | str:
    axes = product.x.axes_of(contracted)
    rows, columns = local_size(product, product.rows), local_size(product, product.columns)
    if rows % product.devices(axes) and columns % product.devices(axes):
        return (
            f"neither the {rows} rows nor the {columns} columns of the result can be divided "
            f"between the {product.devices(axes)} devices of {_names(axes)}"
        )
    return Route("allreduce", contracted, contracted, axes)


def _new_axes(product: Product, label: str) -> Axes | None:
    """The axes by which a dimension is divided finer in the result, None if it is not finer."""
    before = (product.x if label in product.rows else product.w).axes_of(label)
    after = product.out.axes_of(label)
    return after[len(before) :] if after[: len(before)] == before else None


def local_size(product: Product, labels: str, *, of: Labelled | None = None) -> int:
    """Entries a device has of some dimensions together, as they are in `of` or in the result."""
    array = product.out if of is None else of
    return prod(array.length_of(n) // product.devices(array.axes_of(n)) for n in labels)


def told(route: Route) -> str:
    """What moves, in the letters of the specification."""
    names, label = _names(route.axes), route.label
    match route.movement:
        case "gather contraction" | "gather rows":
            moved = "w" if route.swapped else "x"
            kind = "contracted " if route.movement == "gather contraction" else ""
            return f"{kind}{label!r} of {moved} comes from {names} while it is multiplied"
        case "scatter rows" | "scatter columns":
            return (
                f"contracted {route.contracted!r} is over {names}, and so is {label!r} of the "
                "result: the sums travel to their owners"
            )
        case "allreduce":
            return f"contracted {label!r} is over {names}, and the result is whole along it"


def _difference(product: Product, label: str) -> str:
    x, w, out = product.x, product.w, product.out
    if label in product.contracted:
        return f"{label!r} is {_over(x.axes_of(label))} in x and {_over(w.axes_of(label))} in w"
    name, before = ("x", x) if label in product.rows else ("w", w)
    return (
        f"{label!r} is {_over(before.axes_of(label))} in {name} "
        f"and {_over(out.axes_of(label))} in the result"
    )


def _over(axes: Axes) -> str:
    return f"over {_names(axes)}" if axes else "whole"


def _names(axes: Axes) -> str:
    return " and ".join(repr(axis) for axis in axes)
