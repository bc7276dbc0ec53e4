"""The choice of `einsum`: the ring of a sharded contraction, or XLA.

`find_route` compares the mesh axes of a label in the arrays that have it. A label with equal axes
needs no communication. A label whose axes differ needs a movement. A ring can implement a single
movement. XLA computes all other cases.

    contracted  over A in x, unsharded in w        gather-matmul, gathered="contraction"
    row of x    over A in x, unsharded in result   gather-matmul, gathered="rows"
    contracted  over A in both                     matmul-allreduce, or matmul-scatter if the
                                                   result has rows or columns over A

Empty arrays need no ring. On a TPU, the cost model (`costs`) must also expect the ring to be faster
than plain `jit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, assert_never

import jax.numpy as jnp

from drumline.parallel.axes import AxisName
from drumline.parallel.einsum.costs import (
    CostMovement,
    RingCost,
    RingSeconds,
    ring_seconds,
    xla_seconds,
)
from drumline.parallel.einsum.operands import Axes, Contraction, LabelledArray, item_bytes
from drumline.parallel.rings.ring import Direction, Loop, Ring
from drumline.parallel.target import TPU, Target

EinsumImplementation = Literal["auto", "xla", "ring", "pallas"]
Movement = Literal[
    "gather contraction", "gather rows", "scatter rows", "scatter columns", "allreduce"
]


@dataclass(frozen=True)
class Route:
    """The movement of an array along a ring.

    Attributes:
        movement: the kind of the movement.
        label: the dimension that is gathered or scattered, or summed over by an all-reduce.
        contracted: the contracted dimension that is sharded over the axes, if any.
        axes: the mesh axes of the ring.
        swapped: True if w moves instead of x, as the operands of the transposed contraction.
    """

    movement: Movement
    label: str
    contracted: str | None
    axes: Axes
    swapped: bool = False

    @property
    def gathers_x(self) -> bool:
        """True if x is gathered."""
        return self.movement.startswith("gather") and not self.swapped

    @property
    def axis_name(self) -> AxisName:
        """The axes as an argument of the ring functions."""
        return self.axes[0] if len(self.axes) == 1 else self.axes


def find_route(contraction: Contraction) -> Route | str:
    """Return the ring of a contraction, or the reason if there is none."""
    if contraction.batched:
        return f"{contraction.batched[0]!r} is in both operands and the result, a batched product"
    if contraction.summed_alone:
        return f"{contraction.summed_alone[0]!r} is summed over within one operand"
    x, w, out = contraction.x, contraction.w, contraction.out
    divided = [n for n in contraction.contracted if x.axes_of(n) or w.axes_of(n)]
    changed = [n for n in contraction.rows if x.axes_of(n) != out.axes_of(n)]
    changed += [n for n in contraction.columns if w.axes_of(n) != out.axes_of(n)]
    partial_sums = [n for n in divided if x.axes_of(n) == w.axes_of(n)]
    scatters = [
        n
        for n in changed
        if partial_sums and _new_axes(contraction, n) == x.axes_of(partial_sums[0])
    ]
    if len(divided) + len(changed) - len(scatters) != 1:
        moves = "; ".join(_describe_difference(contraction, n) for n in [*divided, *changed])
        return f"more than one dimension must move ({moves}); reshard all but one first"
    if scatters:
        return _scatter(contraction, scatters[0], partial_sums[0])
    if partial_sums:
        return _allreduce(contraction, partial_sums[0])
    label = (divided or changed)[0]
    if label in contraction.contracted and w.axes_of(label) and not x.axes_of(label):
        return _gather(contraction.swapped(), label, swapped=True)
    if label in contraction.columns:
        return _gather(contraction.swapped(), label, swapped=True)
    return _gather(contraction, label, swapped=False)


def is_local(contraction: Contraction) -> bool:
    """Return True if no operand dimension is sharded more finely than in the result."""
    for operand in (contraction.x, contraction.w):
        for label, axes in zip(operand.labels, operand.axes, strict=True):
            if label not in contraction.out.labels:
                if axes:
                    return False
            elif contraction.out.axes_of(label)[: len(axes)] != axes:
                return False
    return True


def _gather(contraction: Contraction, label: str, *, swapped: bool) -> Route | str:
    x, w, out = contraction.x, contraction.w, contraction.out
    difference = _describe_difference(contraction.swapped() if swapped else contraction, label)
    if label in contraction.contracted:
        axes = x.axes_of(label)
        if w.axes_of(label):
            return f"the operands disagree: {difference}"
    else:
        kept, axes = out.axes_of(label), x.axes_of(label)[len(out.axes_of(label)) :]
        if x.axes_of(label) != kept + axes or not axes:
            return f"{difference}, which is not a gather"
    shared = {axis for n in contraction.columns for axis in w.axes_of(n)}
    if not shared.issuperset(axes):
        return (
            f"{difference}, and nothing of the other operand is over {_join_axes(axes)}: "
            "all its devices would compute the same matmul"
        )
    if label in contraction.contracted:
        return Route("gather contraction", label, label, axes, swapped)
    return Route("gather rows", label, None, axes, swapped)


def _scatter(contraction: Contraction, label: str, contracted: str) -> Route | str:
    axes = contraction.x.axes_of(contracted)
    operand: LabelledArray = contraction.x if label in contraction.rows else contraction.w
    length = operand.length_of(label) // contraction.devices(operand.axes_of(label))
    if length % contraction.devices(axes):
        return (
            f"{label!r} has {length} entries on a device, which cannot be divided "
            f"between the {contraction.devices(axes)} of {_join_axes(axes)}"
        )
    movement: Movement = "scatter rows" if label in contraction.rows else "scatter columns"
    return Route(movement, label, contracted, axes)


def _allreduce(contraction: Contraction, contracted: str) -> Route | str:
    axes = contraction.x.axes_of(contracted)
    rows, columns = (
        local_size(contraction, contraction.rows),
        local_size(contraction, contraction.columns),
    )
    if rows % contraction.devices(axes) and columns % contraction.devices(axes):
        return (
            f"neither the {rows} rows nor the {columns} columns of the result can be divided "
            f"between the {contraction.devices(axes)} devices of {_join_axes(axes)}"
        )
    return Route("allreduce", contracted, contracted, axes)


def _new_axes(contraction: Contraction, label: str) -> Axes | None:
    """Return the axes that only the result adds to a dimension, or None if it has others."""
    operand_axes = (contraction.x if label in contraction.rows else contraction.w).axes_of(label)
    axes = contraction.out.axes_of(label)
    return axes[len(operand_axes) :] if axes[: len(operand_axes)] == operand_axes else None


def local_size(contraction: Contraction, labels: str, *, of: LabelledArray | None = None) -> int:
    """Return the local size of some dimensions together, in `of` or in the result."""
    array = contraction.out if of is None else of
    return prod(array.length_of(n) // contraction.devices(array.axes_of(n)) for n in labels)


def describe_route(route: Route) -> str:
    """Describe the movement of a route with the labels of the specification."""
    names, label = _join_axes(route.axes), route.label
    match route.movement:
        case "gather contraction" | "gather rows":
            operand = "w" if route.swapped else "x"
            kind = "contracted " if route.movement == "gather contraction" else ""
            return f"{kind}{label!r} of {operand} is gathered over {names}"
        case "scatter rows" | "scatter columns":
            return (
                f"contracted {route.contracted!r} is over {names}, and so is {label!r} of the "
                "result: the sums are scattered"
            )
        case "allreduce":
            return f"contracted {label!r} is over {names}, and the result is unsharded along it"


def _describe_difference(contraction: Contraction, label: str) -> str:
    x, w, out = contraction.x, contraction.w, contraction.out
    if label in contraction.contracted:
        x_axes, w_axes = _describe_axes(x.axes_of(label)), _describe_axes(w.axes_of(label))
        return f"{label!r} is {x_axes} in x and {w_axes} in w"
    name, operand = ("x", x) if label in contraction.rows else ("w", w)
    return (
        f"{label!r} is {_describe_axes(operand.axes_of(label))} in {name} "
        f"and {_describe_axes(out.axes_of(label))} in the result"
    )


def _describe_axes(axes: Axes) -> str:
    return f"over {_join_axes(axes)}" if axes else "unsharded"


def _join_axes(axes: Axes) -> str:
    return " and ".join(repr(axis) for axis in axes)


Choice = Literal["local", "gather-matmul", "matmul-scatter", "matmul-allreduce", "jnp.einsum"]
SIMILAR = 1.02
"""Rings whose times differ by less than this factor count as equally fast."""
_CHOICE: dict[Movement, Choice] = {
    "gather contraction": "gather-matmul",
    "gather rows": "gather-matmul",
    "scatter rows": "matmul-scatter",
    "scatter columns": "matmul-scatter",
    "allreduce": "matmul-allreduce",
}


@dataclass(frozen=True)
class Explanation:
    """The choice of `einsum` and its reason. `str()` formats them as a message.

    Attributes:
        choice: `"local"` (no communication), the name of a ring, or `"jnp.einsum"`, where XLA
            inserts the collectives.
        reason: the reason, with the labels of the specification.
        bytes_per_axis: the bytes that a device sends along each mesh axis in the forward pass: in
            the busier direction for `direction="both"`, in total for `"one"`. A ring over a tuple
            of axes has a single entry with their names, such as "X,Y". Empty for `"jnp.einsum"`.
        direction: the directions in which the bytes are sent.
        wire_dtype: the type in which the ring sends sums; None is the type of the sums.
        route: the details of the ring, or None.
    """

    choice: Choice
    reason: str
    bytes_per_axis: Mapping[str, int]
    direction: Direction
    wire_dtype: jnp.dtype | None = None
    route: Route | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Return the choice, the reason, and the bytes per axis."""
        sent = [f"{axis}: {count:,}" for axis, count in self.bytes_per_axis.items() if count]
        sent_direction = "each way" if self.direction == "both" else "one way"
        bytes_moved = f"; bytes per device {sent_direction}, {', '.join(sent)}" if sent else ""
        return f"{self.choice}: {self.reason}{bytes_moved}"


@dataclass(frozen=True)
class Types:
    """The element types of an einsum: of x and w when sent, of the sums, and of the result."""

    x: jnp.dtype
    w: jnp.dtype
    sums: jnp.dtype
    result: jnp.dtype


@dataclass(frozen=True)
class RingOptions:
    """The options of a ring that the caller requests, and its target.

    Attributes:
        direction: the requested direction.
        loop: the requested loop.
        wire_dtype: the requested type, or None.
        target: the compiler that rings are written for.
        chip: the TPU; None for any other device.
        implementation: the requested implementation.
        weights: the total size of all weights that share one gather, relative to the first.
    """

    direction: Direction
    loop: Loop = "auto"
    wire_dtype: jnp.dtype | None = None
    target: Target = "other"
    chip: TPU | None = None
    weights: float = 1.0
    implementation: EinsumImplementation = "auto"


def explain(contraction: Contraction, types: Types, options: RingOptions) -> Explanation:
    """Return the choice for a contraction whose shardings are known."""
    direction = options.direction
    if options.implementation == "xla":
        return fallback("implementation='xla' asks for it", direction)
    for operand in (contraction.x, contraction.w):
        if 0 in operand.lengths:
            # XLA cannot compile all rings of empty blocks.
            label = operand.labels[operand.lengths.index(0)]
            return fallback(f"{label!r} is empty: there is nothing to multiply", direction)
    if is_local(contraction):
        nothing = {axis: 0 for axis, _ in contraction.mesh}
        reason = "each device has the operands of its part of the result"
        return Explanation("local", reason, nothing, direction)
    route = find_route(contraction)
    if isinstance(route, str):
        return fallback(route, direction)
    wire, reason = options.wire_dtype, describe_route(route)
    chooses = options.implementation == "auto" and options.chip is not None
    if chooses and jnp.issubdtype(types.result, jnp.floating):
        wire_choice = _choose_wire_dtype(contraction, route, types, options)
        if wire_choice.wire_dtype is None:
            return fallback(f"{reason}, but {wire_choice.reason}", direction)
        wire, reason = wire_choice.wire_dtype, f"{reason}; {wire_choice.reason}"
        wire = None if wire == types.sums else wire
    sent_types = replace(types, sums=wire or types.sums)
    ring = Ring(
        route.axis_name,
        contraction.devices(route.axes),
        direction,
        options.loop,
        None,
        target=options.target,
    )
    sent = {axis: 0 for axis, _ in contraction.mesh}
    sent[",".join(route.axes)] = _ring_bytes(contraction, route, sent_types, ring)
    sent_direction: Direction = "one" if ring.size == 2 else direction
    return Explanation(_CHOICE[route.movement], reason, sent, sent_direction, wire, route)


@dataclass(frozen=True)
class _WireChoice:
    """The wire dtype of a ring that is faster than plain `jit`, or None; and the reason."""

    wire_dtype: jnp.dtype | None
    reason: str


def _choose_wire_dtype(
    contraction: Contraction, route: Route, types: Types, options: RingOptions
) -> _WireChoice:
    """Return the most exact wire dtype among those that are about equally fast.

    Sums in the result's type are as exact as those of plain `jit`, which adds in this type.
    """
    assert options.chip is not None
    cost = _ring_cost(contraction, route, types, options)
    plain = xla_seconds(cost, options.chip)
    dtypes = [types.sums, types.result] if options.wire_dtype is None else [options.wire_dtype]
    rings = [(wire, ring_seconds(cost, item_bytes(wire), options.chip)) for wire in dtypes]
    best = min(rings, key=lambda ring: ring[1].ratio(plain))
    wire, times = next(
        ring for ring in rings if ring[1].ratio(plain) <= best[1].ratio(plain) * SIMILAR
    )
    if times.ratio(plain) > 1:
        return _WireChoice(
            None, f"plain jit is expected to be faster: {_compare_seconds(plain, times)}"
        )
    sums_note = f", with sums in {wire} on the wire" if wire != types.sums else ""
    return _WireChoice(
        wire, f"the ring is expected to be faster{sums_note}: {_compare_seconds(times, plain)}"
    )


def _compare_seconds(chosen: RingSeconds, other: RingSeconds) -> str:
    return (
        f"{chosen.forward * 1e6:.0f} µs against {other.forward * 1e6:.0f} forward, "
        f"{chosen.step * 1e6:.0f} against {other.step * 1e6:.0f} with gradients"
    )


def _ring_cost(
    contraction: Contraction, route: Route, types: Types, options: RingOptions
) -> RingCost:
    if route.swapped:
        contraction, types = contraction.swapped(), replace(types, x=types.w, w=types.x)
    devices = contraction.devices(route.axes)
    rows = local_size(contraction, contraction.rows, of=contraction.x)
    columns = local_size(contraction, contraction.columns, of=contraction.w) * options.weights
    depth = local_size(contraction, contraction.contracted, of=contraction.x)
    movement: CostMovement
    shard: float
    match route.movement:
        case "gather contraction" | "gather rows":
            movement, shard, element_bytes = route.movement, rows * depth, item_bytes(types.x)
        case "scatter rows" | "scatter columns" | "allreduce":
            movement = "allreduce" if route.movement == "allreduce" else "scatter"
            shard, element_bytes = rows * columns / devices, item_bytes(types.result)
    gathered = devices if movement.startswith("gather") else 1
    flops = 2.0 * rows * depth * columns * gathered
    ring = Ring(route.axis_name, devices, options.direction, options.loop, None, target="tpu")
    weight_elements = depth * columns * (devices if movement == "gather contraction" else 1)
    one_way = options.direction == "one"
    return RingCost(
        movement, devices, flops, shard, weight_elements, element_bytes, one_way, ring.rolled
    )


def fallback(reason: str, direction: Direction) -> Explanation:
    """Return the choice of XLA."""
    return Explanation("jnp.einsum", reason, {}, direction)


def _ring_bytes(contraction: Contraction, route: Route, types: Types, ring: Ring) -> int:
    """Return the bytes that a device sends in the busier direction."""
    if route.swapped:
        contraction, types = (
            contraction.swapped(),
            Types(types.w, types.x, types.sums, types.result),
        )
    n = ring.size
    rows = local_size(contraction, contraction.rows, of=contraction.x)
    columns = local_size(contraction, contraction.columns, of=contraction.w)
    movement = route.movement
    match movement:
        case "gather contraction":
            depth = local_size(contraction, contraction.contracted, of=contraction.x)
            return _bytes_of_busier_direction(ring, rows, depth * item_bytes(types.x))
        case "gather rows":
            height = local_size(contraction, route.label, of=contraction.x)
            depth = local_size(contraction, contraction.contracted, of=contraction.x)
            entry_elements = rows // height * depth
            return _bytes_of_busier_direction(ring, height, entry_elements * item_bytes(types.x))
        case "scatter columns":
            return _bytes_of_busier_direction(ring, columns // n, rows * item_bytes(types.sums))
        case "scatter rows":
            height = local_size(contraction, route.label, of=contraction.x)
            entry_elements = rows // height * columns
            return _bytes_of_busier_direction(
                ring, height // n, entry_elements * item_bytes(types.sums)
            )
        case "allreduce":
            # The scatter sends sums, the gather finished shares.
            element_bytes = item_bytes(types.sums) + item_bytes(types.result)
            if rows % n == 0:
                return _bytes_of_busier_direction(ring, rows // n, columns * element_bytes)
            return _bytes_of_busier_direction(ring, columns // n, rows * element_bytes)
        case _:
            assert_never(movement)


def _bytes_of_busier_direction(ring: Ring, rows: int, row_bytes: int) -> int:
    if ring.full_shards:
        return ring.size // 2 * rows * row_bytes
    ways: dict[int, int] = {}
    for lane in ring.lanes(rows):
        ways[lane.shift] = ways.get(lane.shift, 0) + lane.size * row_bytes
    return max(ways.values()) * (ring.size - 1)
