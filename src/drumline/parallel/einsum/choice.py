"""X"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, assert_never

import jax.numpy as jnp

from drumline.parallel.axes import AxisName
from drumline.parallel.einsum.costs import RingWork, Times, Travels, by_xla, on_ring
from drumline.parallel.einsum.operands import Axes, Labelled, Product, item_bytes
from drumline.parallel.rings.ring import Direction, Loop, Ring
from drumline.parallel.target import TPU, Target

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


Choice = Literal["local", "gather-matmul", "matmul-scatter", "matmul-allreduce", "jnp.einsum"]
NEAR = 1.02
"""Rings whose times differ by less are as good as each other."""
_CHOICE: dict[Movement, Choice] = {
    "gather contraction": "gather-matmul",
    "gather rows": "gather-matmul",
    "scatter rows": "matmul-scatter",
    "scatter columns": "matmul-scatter",
    "allreduce": "matmul-allreduce",
}


@dataclass(frozen=True)
class Explanation:
    """What `einsum` does with two operands, and why. `str()` is a sentence or two.

    Attributes:
        choice: `"local"` (nothing moves), one of the three rings, or `"jnp.einsum"`, where XLA
            chooses the collectives.
        reason: why, in the letters of the specification.
        bytes_per_axis: what each device sends over its link along each mesh axis in the forward
            pass: the bytes each way for `direction="both"` (where the halves differ, the larger),
            all bytes one way for `"one"`. A ring over several axes at once has one entry named
            with all of them, as "X,Y". Empty for `"jnp.einsum"`, where XLA decides.
        direction: whether those bytes go both ways round the ring or one way.
        wire_dtype: the type in which sums travel on the ring; None is that in which they are added.
        route: the ring's movement in detail, None where there is no ring.
    """

    choice: Choice
    reason: str
    bytes_per_axis: Mapping[str, int]
    direction: Direction
    wire_dtype: jnp.dtype | None = None
    route: Route | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """The choice, the reason, and the bytes of each axis that has any."""
        sent = [f"{axis}: {count:,}" for axis, count in self.bytes_per_axis.items() if count]
        way = "each way" if self.direction == "both" else "one way"
        moved = f"; bytes per device {way}, {', '.join(sent)}" if sent else ""
        return f"{self.choice}: {self.reason}{moved}"


@dataclass(frozen=True)
class Types:
    """The element types of a product: what travels of x and w, the sums, and the result."""

    x: jnp.dtype
    w: jnp.dtype
    sums: jnp.dtype
    result: jnp.dtype


@dataclass(frozen=True)
class Manner:
    """How the caller wants a ring, and what it would be written for.

    Attributes:
        direction: as asked for.
        loop: likewise.
        wire_dtype: likewise; None leaves it open.
        target: what rings are written for here.
        chip: the TPU, None for any other device.
        weights: how many times the columns of w there are, where one tour serves several.
    """

    direction: Direction
    loop: Loop = "auto"
    wire_dtype: jnp.dtype | None = None
    target: Target = "other"
    chip: TPU | None = None
    weights: float = 1.0


def explain(product: Product, types: Types, manner: Manner) -> Explanation:
    """The choice for a product whose operands' shardings are known."""
    direction = manner.direction
    for operand in (product.x, product.w):
        if 0 in operand.lengths:
            # A ring of empty blocks saves nothing, and XLA cannot compile every one.
            label = operand.labels[operand.lengths.index(0)]
            return fallback(f"{label!r} is empty: there is nothing to multiply", direction)
    if is_local(product):
        nothing = {axis: 0 for axis, _ in product.mesh}
        reason = "each device has all that its part of the result needs"
        return Explanation("local", reason, nothing, direction)
    found = find_route(product)
    if isinstance(found, str):
        return fallback(found, direction)
    wire, why = manner.wire_dtype, told(found)
    if manner.chip is not None and jnp.issubdtype(types.result, jnp.floating):
        judged = _judged(product, found, types, manner)
        if judged.ring is None:
            return fallback(f"{why}, but {judged.told}", direction)
        wire, why = judged.ring, f"{why}; {judged.told}"
        wire = None if wire == types.sums else wire
    on_wire = replace(types, sums=wire or types.sums)
    ring = Ring(
        found.axis_name,
        product.devices(found.axes),
        direction,
        manner.loop,
        None,
        target=manner.target,
    )
    sent = {axis: 0 for axis, _ in product.mesh}
    sent[",".join(found.axes)] = _ring_bytes(product, found, on_wire, ring)
    way: Direction = "one" if ring.size == 2 else direction
    return Explanation(_CHOICE[found.movement], why, sent, way, wire, found)


@dataclass(frozen=True)
class _Judged:
    """Whether a ring pays, in which type its sums then travel, and why."""

    ring: jnp.dtype | None
    told: str


def _judged(product: Product, route: Route, types: Types, manner: Manner) -> _Judged:
    """Of the rings that are open to the caller, the one that pays: the most exact that is as good.

    Sums in the result's type are no worse than those of plain `jit`, which adds in it.
    """
    assert manner.chip is not None
    work = _work(product, route, types, manner)
    plain = by_xla(work, manner.chip)
    wires = [types.sums, types.result] if manner.wire_dtype is None else [manner.wire_dtype]
    rings = [(wire, on_ring(work, item_bytes(wire), manner.chip)) for wire in wires]
    best = min(rings, key=lambda ring: ring[1].worse(plain))
    wire, times = next(
        ring for ring in rings if ring[1].worse(plain) <= best[1].worse(plain) * NEAR
    )
    if times.worse(plain) > 1:
        return _Judged(None, f"XLA's own is expected to be faster: {_compared(plain, times)}")
    where = f", with sums in {wire} on the wire" if wire != types.sums else ""
    return _Judged(wire, f"it is expected to pay{where}: {_compared(times, plain)}")


def _compared(chosen: Times, other: Times) -> str:
    return (
        f"{chosen.forward * 1e6:.0f} µs against {other.forward * 1e6:.0f} forward, "
        f"{chosen.step * 1e6:.0f} against {other.step * 1e6:.0f} with gradients"
    )


def _work(product: Product, route: Route, types: Types, manner: Manner) -> RingWork:
    if route.swapped:
        product, types = product.swapped(), replace(types, x=types.w, w=types.x)
    devices = product.devices(route.axes)
    rows = local_size(product, product.rows, of=product.x)
    columns = local_size(product, product.columns, of=product.w) * manner.weights
    depth = local_size(product, product.contracted, of=product.x)
    travels: Travels
    shard: float
    match route.movement:
        case "gather contraction" | "gather rows":
            travels, shard, item = route.movement, rows * depth, item_bytes(types.x)
        case "scatter rows" | "scatter columns":
            travels, shard, item = "scatter", rows * columns / devices, item_bytes(types.result)
        case "allreduce":
            travels, shard, item = "allreduce", rows * columns / devices, item_bytes(types.result)
    gathered = devices if travels.startswith("gather") else 1
    flops = 2.0 * rows * depth * columns * gathered
    ring = Ring(route.axis_name, devices, manner.direction, manner.loop, None, target="tpu")
    held = depth * columns * (devices if travels == "gather contraction" else 1)
    one_way = manner.direction == "one"
    return RingWork(travels, devices, flops, shard, held, item, one_way, ring.rolled)


def fallback(reason: str, direction: Direction) -> Explanation:
    """The choice of leaving it to XLA."""
    return Explanation("jnp.einsum", reason, {}, direction)


def _ring_bytes(product: Product, route: Route, types: Types, ring: Ring) -> int:
    """Bytes that a device sends the busier way while the ring goes round once."""
    if route.swapped:
        product, types = product.swapped(), Types(types.w, types.x, types.sums, types.result)
    n = ring.size
    rows = local_size(product, product.rows, of=product.x)
    columns = local_size(product, product.columns, of=product.w)
    movement = route.movement
    match movement:
        case "gather contraction":
            depth = local_size(product, product.contracted, of=product.x)
            return _busier(ring, rows, depth * item_bytes(types.x))
        case "gather rows":
            height = local_size(product, route.label, of=product.x)
            depth = local_size(product, product.contracted, of=product.x)
            entry = rows // height * depth
            return _busier(ring, height, entry * item_bytes(types.x))
        case "scatter columns":
            return _busier(ring, columns // n, rows * item_bytes(types.sums))
        case "scatter rows":
            height = local_size(product, route.label, of=product.x)
            entry = rows // height * columns
            return _busier(ring, height // n, entry * item_bytes(types.sums))
        case "allreduce":
            # Sums on the first tour, finished shares on the second.
            item = item_bytes(types.sums) + item_bytes(types.result)
            if rows % n == 0:
                return _busier(ring, rows // n, columns * item)
            return _busier(ring, columns // n, rows * item)
        case _:
            assert_never(movement)


def _busier(ring: Ring, rows: int, row_bytes: int) -> int:
    if ring.whole:
        return ring.size // 2 * rows * row_bytes
    ways: dict[int, int] = {}
    for lane in ring.lanes(rows):
        ways[lane.shift] = ways.get(lane.shift, 0) + lane.size * row_bytes
    return max(ways.values()) * (ring.size - 1)
