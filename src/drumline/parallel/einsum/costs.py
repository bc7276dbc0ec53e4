"""When a ring pays on a TPU, and in which type its sums should travel there.

Plain `jit` leaves most collectives of a sharded product exposed: it waits for the gather or the
scatter and then multiplies at once. A ring hides what it sends, as far as the products beside its
hops are long enough, and pays for being cut into steps, each of which loads the weights again. Both
are put into seconds here, from the chip's peak and the bandwidths of a link and of its memory, with
constants that were read off what the TPU's own compiler makes of either (the tables in
docs/overlap.md, `python benchmarks/tpu_compile.py`).

    jit    product + bytes / (both directions of a link)
    ring   steps · (product + STEP) + what of each hop is longer than the products beside it

It decides with the gradients in mind: a ring has to pay forward and over a whole training step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drumline.parallel.target import TPU

Travels = Literal["gather contraction", "gather rows", "scatter", "allreduce"]

STEP = 2.2e-6
"""Seconds that one more product costs, however small."""
SUMMED_CUT = 0.25
"""The part that a product takes longer where its result is summed over the steps, or is whole."""
ROLLED_CUT = 0.1
"""The part that it takes longer in a loop, which copies what it carries."""
UNHIDDEN = 0.25
"""The part of the shorter of multiplying and loading that the longer does not hide."""
LINK = 0.9
"""The part of a link's bandwidth that hops and collectives reach."""


@dataclass(frozen=True)
class RingWork:
    """One device's part of a product on a ring.

    Attributes:
        travels: what goes round in the forward pass.
        devices: of the ring.
        flops: of the device's product.
        shard: elements of what a device has or gets of the array that travels.
        weights: elements of the device's weights.
        item: bytes of an element of the operands and of the result.
        one_way: whether everything goes one way round.
        rolled: whether the steps are a loop.
    """

    travels: Travels
    devices: int
    flops: float
    shard: float
    weights: float
    item: int
    one_way: bool = False
    rolled: bool = False

    @property
    def hops(self) -> int:
        """How many follow one another."""
        return self.devices - 1 if self.one_way else max(1, self.devices // 2)

    @property
    def travelling(self) -> float:
        """Elements of the whole array that travels."""
        return self.shard * self.devices

    @property
    def staying(self) -> float:
        """Elements of the operand or result, beside the weights, of which nothing travels.

        The device multiplies [rows, a] by [a, b], and a·b are the weights.
        """
        rows = self.flops / (2 * self.weights)
        return rows * rows * self.weights / self.travelling


@dataclass(frozen=True)
class Times:
    """Seconds forward, and with the gradients of both operands."""

    forward: float
    step: float

    def worse(self, other: Times) -> float:
        """How many times as long as the other, forward or over the step, whichever is more."""
        return max(self.forward / other.forward, self.step / other.step)


def on_ring(work: RingWork, wire: int, chip: TPU) -> Times:
    """The ring's seconds, with sums of so many bytes an element on the wire."""
    again, summed = _gather_step(work, chip), _weight_gradient_step(work, chip)
    scatter = work.devices * _step(work, 2 * wire * work.shard + _read_in_step(work), chip)
    match work.travels:
        case "gather contraction" | "gather rows":
            forward = work.devices * again + _waits(work, work.item, 1, chip)
            if work.travels == "gather contraction":
                forward += SUMMED_CUT * work.flops / chip.peak
            # Back, the sums of x's gradient travel, and x once more for the weights': a hop of
            # either has the products of both beside it.
            back = scatter + work.devices * summed + _waits(work, max(wire, work.item), 2, chip)
        case "scatter":
            forward = scatter + _waits(work, wire, 1, chip)
            # Back, one tour of the cotangent serves the gradients of both operands.
            back = work.devices * (again + summed) + _waits(work, work.item, 2, chip)
        case "allreduce":
            # The finished shares go round with nothing to multiply beside them.
            forward = scatter + SUMMED_CUT * work.flops / chip.peak
            forward += _waits(work, wire, 1, chip) + _waits(work, work.item, 0, chip)
            back = 2 * _whole(work, chip)
    return Times(forward, forward + back)


def by_xla(work: RingWork, chip: TPU) -> Times:
    """The seconds of plain `jit`, which waits for its collectives."""
    ways = 2 if work.devices > 2 else 1
    collective = work.shard * work.item * (work.devices - 1) / (ways * LINK * chip.link)
    product = _whole(work, chip)
    if work.travels == "allreduce":
        return Times(product + 2 * collective, 3 * product + 2 * collective)
    # Back: the other collective of the two. What was gathered is kept.
    return Times(product + collective, 3 * product + 2 * collective)


def _whole(work: RingWork, chip: TPU) -> float:
    """The product at once, which reads its weights once."""
    rows = work.travelling + work.staying
    return _beside(work.flops / chip.peak, work.item * (rows + work.weights), chip)


def _gather_step(work: RingWork, chip: TPU) -> float:
    """One step's product, written where it belongs."""
    written = work.item * work.staying / work.devices
    return _step(work, written + work.item * (work.shard + work.weights), chip)


def _weight_gradient_step(work: RingWork, chip: TPU) -> float:
    """One step's term of the weights' gradient, which is read and written in float32."""
    read = work.item * (work.travelling + work.staying) / work.devices
    return _step(work, read + 2 * 4 * work.weights, chip)


def _read_in_step(work: RingWork) -> float:
    """Bytes of the operands of one term of a sum that travels."""
    return work.item * (work.staying / work.devices + work.weights)


def _step(work: RingWork, moved: float, chip: TPU) -> float:
    product = work.flops / work.devices / chip.peak * (1 + (ROLLED_CUT if work.rolled else 0))
    return STEP + _beside(product, moved, chip)


def _beside(product: float, moved: float, chip: TPU) -> float:
    """Seconds of a product while so many bytes go from and to the memory.

    A step loads what the whole product would load once. A chip that multiplies fast for its memory,
    as the v6e, is slowed down by that: there a sum over the steps takes longer than its products.
    """
    loading = moved / chip.memory
    return max(product, loading) + UNHIDDEN * min(product, loading)


def _waits(work: RingWork, item: int, products: int, chip: TPU) -> float:
    """What of a tour's hops is longer than the products beside each, for elements of so many bytes.

    A shard that goes two hops has only one product beside each for sure: the compiler starts a hop
    as late as it believes that it can.
    """
    hop = work.shard * item / (LINK * chip.link)
    beside = products * work.flops / work.devices / chip.peak
    return work.hops * max(0.0, hop - beside)
