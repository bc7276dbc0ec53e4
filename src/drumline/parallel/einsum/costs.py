"""When a ring pays on a TPU, and in which type its sums should travel there.

Plain `jit` leaves most collectives of a sharded product exposed: it waits for the gather or the
scatter and then multiplies at once. A ring hides what it sends, as far as the products beside its
hops are long enough, and pays for being cut into steps. Both are put into seconds here, from the
chip's peak and the bandwidth of a link, with three constants that were read off what the TPU's own
compiler makes of either (the table in docs/overlap.md, `python benchmarks/tpu_compile.py`).

    jit    product + bytes / (both directions of a link)
    ring   product · (1 + cut) + steps · STEP + what of each hop is longer than the products beside

It decides with the gradients in mind: a ring has to pay forward and over a whole training step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Travels = Literal["gather contraction", "gather rows", "scatter", "allreduce"]

STEP = 2.2e-6
"""Seconds that one more product costs, however small."""
CUT = {"gather contraction": 0.25, "gather rows": 0.04, "scatter": 0.06, "allreduce": 0.25}
"""The part that a product takes longer for being cut into steps; a contraction's steps read and
write a sum."""
WEIGHT_GRADIENT_CUT = 0.12
"""The same for weights whose gradient is a sum over the steps."""
ROLLED_CUT = 0.1
"""The same for a loop, which copies what it carries."""


@dataclass(frozen=True)
class TPU:
    """What decides of a chip: FLOP/s of bfloat16 products, bytes/s of a link one way."""

    peak: float
    link: float


_KINDS = {
    "TPU v2": TPU(2.3e13, 6e10),
    "TPU v3": TPU(6.1e13, 1e11),
    "TPU v4": TPU(2.75e14, 4.5e10),
    "TPU v5 lite": TPU(1.97e14, 4.5e10),
    "TPU v5": TPU(4.59e14, 9e10),
    "TPU v6 lite": TPU(9.2e14, 9e10),
    "TPU7x": TPU(1.15e15, 9e10),
}
_OTHER_NAMES = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite"}


def tpu_of(kind: str) -> TPU:
    """The chip of a device kind as JAX tells it; one that is not known counts as a v5e."""
    return _KINDS.get(_OTHER_NAMES.get(kind, kind), _KINDS["TPU v5 lite"])


@dataclass(frozen=True)
class RingWork:
    """One device's part of a product on a ring.

    Attributes:
        travels: what goes round in the forward pass.
        devices: of the ring.
        flops: of the device's product.
        shard: elements of what a device has or gets of the array that travels.
        item: bytes of an element of the operands and of the result.
        one_way: whether everything goes one way round.
        rolled: whether the steps are a loop.
    """

    travels: Travels
    devices: int
    flops: float
    shard: float
    item: int
    one_way: bool = False
    rolled: bool = False


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
    gather = _gathering(work, chip)
    scatter = _scattering(work, wire, chip)
    product = work.flops / chip.peak * (1 + (ROLLED_CUT if work.rolled else 0))
    match work.travels:
        case "gather contraction" | "gather rows":
            forward = product * (1 + CUT[work.travels]) + gather
            # Back, the sums of x's gradient travel, and x once more for the weights': what one of
            # the two waits for, the other's products hide.
            back = product * (2 + CUT["scatter"] + WEIGHT_GRADIENT_CUT)
            back += max(scatter, gather) + work.devices * STEP
        case "scatter":
            forward = product * (1 + CUT["scatter"]) + scatter
            back = product * (2 + WEIGHT_GRADIENT_CUT) + gather
        case "allreduce":
            # The finished shares go round with nothing to multiply beside them.
            alone = work.devices // 2 * work.shard * work.item / chip.link
            forward = product * (1 + CUT["allreduce"]) + scatter + alone
            back = 2 * product
    return Times(forward, forward + back)


def by_xla(work: RingWork, chip: TPU) -> Times:
    """The seconds of plain `jit`, which waits for its collectives."""
    ways = 2 if work.devices > 2 else 1
    collective = work.shard * work.item * (work.devices - 1) / (ways * chip.link)
    product = work.flops / chip.peak
    if work.travels == "allreduce":
        return Times(product + 2 * collective, 3 * product + 2 * collective)
    # Back: the other collective of the two. What was gathered is kept.
    return Times(product + collective, 3 * product + 2 * collective)


def _gathering(work: RingWork, chip: TPU) -> float:
    """What a tour of shards costs beside its products: the first hops have one, others two."""
    product = work.flops / work.devices / chip.peak
    hop = work.shard * work.item / chip.link
    if work.one_way:
        return work.devices * STEP + (work.devices - 1) * max(0.0, hop - product)
    later = max(work.devices // 2 - 1, 0)
    exposed = max(0.0, hop - product) + later * max(0.0, hop - 2 * product)
    return work.devices * STEP + exposed


def _scattering(work: RingWork, wire: int, chip: TPU) -> float:
    """What a tour of sums costs beside its products: each hop has the other direction's."""
    product = work.flops / work.devices / chip.peak
    hop = work.shard * wire / chip.link
    deep = work.devices - 1 if work.one_way else max(1, work.devices // 2)
    return work.devices * STEP + deep * max(0.0, hop - product)
