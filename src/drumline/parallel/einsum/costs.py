"""A cost model of rings on a TPU: the times of a ring and of plain `jit`.

Plain `jit` waits for most gathers and scatters of a sharded matmul, and computes the matmul without
splitting it. A ring overlaps its permutes with matmuls if these are long enough, but its steps load
the weights repeatedly. The model estimates the seconds from the chip's peak and the bandwidths of a
link and of the memory. Its constants were fitted to programs of the TPU's compiler (the tables in
docs/overlap.md, `python benchmarks/tpu_compile.py`).

    jit    matmul + bytes / (both directions of a link)
    ring   steps · (matmul + STEP_SECONDS) + exposed part of the permutes

`einsum` uses a ring if it is faster in the forward pass and in a training step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from drumline.parallel.target import TPU

CostMovement = Literal["gather contraction", "gather rows", "scatter", "allreduce"]

Implementation = Literal["auto", "xla", "ring"]

STEP_SECONDS = 2.2e-6
"""The constant cost of a matmul in seconds."""
SUM_OVERHEAD = 0.25
"""The relative overhead of a matmul whose result is summed over the steps or is unsharded."""
LOOP_OVERHEAD = 0.1
"""The relative overhead of a matmul in a loop, which copies its carry."""
UNOVERLAPPED = 0.25
"""The part of computing or loading, the shorter of the two, that does not overlap."""
MARGIN = 0.9
"""The largest ratio of a ring's time to that of blocking collectives for which a model uses the
ring. A program with rings takes longer to compile."""
MAX_BFLOAT16_DEVICES = 16
"""The number of devices up to which sums of 16-bit results are sent in 16 bits. Each of up to 15
permutes rounds a sum by at most 2⁻⁹, so its error is below 3 % of the largest partial sum."""
LINK_EFFICIENCY = 0.9
"""The part of a link's bandwidth that permutes and collectives reach."""


@dataclass(frozen=True)
class RingCost:
    """The work of a device for a matmul on a ring.

    Attributes:
        movement: the movement in the forward pass.
        devices: the number of devices of the ring.
        flops: the FLOPs of the device.
        shard: the elements of the device's shard of the array that moves.
        weights: the elements of the device's weights.
        element_bytes: the bytes of an element of the operands and of the result.
        one_way: True for a unidirectional ring.
        rolled: True if the steps are a loop.
    """

    movement: CostMovement
    devices: int
    flops: float
    shard: float
    weights: float
    element_bytes: int
    one_way: bool = False
    rolled: bool = False

    @property
    def permutes(self) -> int:
        """The number of sequential permutes."""
        return self.devices - 1 if self.one_way else max(1, self.devices // 2)

    @property
    def moving_elements(self) -> float:
        """The elements of the full array that moves."""
        return self.shard * self.devices

    @property
    def resident_elements(self) -> float:
        """The elements of the array that is neither moved nor the weights.

        The device multiplies [rows, a] by [a, b], and a·b are the weights.
        """
        rows = self.flops / (2 * self.weights)
        return rows * rows * self.weights / self.moving_elements


@dataclass(frozen=True)
class RingSeconds:
    """The seconds of the forward pass, and of a step with all gradients."""

    forward: float
    step: float

    def ratio(self, other: RingSeconds) -> float:
        """Return the ratio of the times, for the forward pass or the step, the larger."""
        return max(self.forward / other.forward, self.step / other.step)


@dataclass(frozen=True)
class ProjectionPlan:
    """The implementation of a matmul, and the type in which its sums are sent."""

    implementation: Literal["xla", "ring"]
    wire_dtype: jnp.dtype | None
    """None is the type in which the sums are added."""


def choose_implementation(
    cost: RingCost,
    implementation: Implementation,
    wire_dtype: DTypeLike | None,
    result: jnp.dtype,
    chip: TPU | None,
) -> ProjectionPlan:
    """Choose between a ring and blocking collectives, and the type in which sums are sent.

    `result` is the type of the result, and `chip` the TPU; None is any other device, on which a
    ring sends the sums in their own type.
    """
    requested = None if wire_dtype is None else jnp.dtype(wire_dtype)
    if chip is None:
        return ProjectionPlan("xla" if implementation == "xla" else "ring", requested)
    wire = requested
    if wire is None and cost.devices <= MAX_BFLOAT16_DEVICES:
        wire = jnp.dtype(result)
    if implementation != "auto":
        return ProjectionPlan(implementation, wire)
    if not chip.rings_in_models:
        return ProjectionPlan("xla", wire)
    ring = ring_seconds(cost, 4 if wire is None else wire.itemsize, chip)
    return ProjectionPlan(
        "ring" if ring.step <= MARGIN * xla_seconds(cost, chip).step else "xla", wire
    )


def ring_seconds(cost: RingCost, wire: int, chip: TPU) -> RingSeconds:
    """Return the seconds of the ring; `wire` is the bytes per element of sums when sent."""
    gather_step, sum_step = _gather_step(cost, chip), _weight_gradient_step(cost, chip)
    scatter = cost.devices * _step_seconds(cost, 2 * wire * cost.shard + _read_in_step(cost), chip)
    match cost.movement:
        case "gather contraction" | "gather rows":
            forward = cost.devices * gather_step + _exposed_seconds(
                cost, cost.element_bytes, 1, chip
            )
            if cost.movement == "gather contraction":
                forward += SUM_OVERHEAD * cost.flops / chip.peak_flops
            # In the backward pass the sums of x's gradient move, and x for the weight gradient.
            # Their permutes overlap with all matmuls.
            back = (
                scatter
                + cost.devices * sum_step
                + _exposed_seconds(cost, max(wire, cost.element_bytes), 2, chip)
            )
        case "scatter":
            forward = scatter + _exposed_seconds(cost, wire, 1, chip)
            # In the backward pass the gradients of the operands share a gather of the cotangent.
            back = cost.devices * (gather_step + sum_step) + _exposed_seconds(
                cost, cost.element_bytes, 2, chip
            )
        case "allreduce":
            # The gather of the finished shares has no matmul to overlap with.
            forward = scatter + SUM_OVERHEAD * cost.flops / chip.peak_flops
            forward += _exposed_seconds(cost, wire, 1, chip) + _exposed_seconds(
                cost, cost.element_bytes, 0, chip
            )
            back = 2 * _unsplit_seconds(cost, chip)
    return RingSeconds(forward, forward + back)


def xla_seconds(cost: RingCost, chip: TPU) -> RingSeconds:
    """Return the seconds of plain `jit`, which waits for its collectives."""
    ways = 2 if cost.devices > 2 else 1
    collective = (
        cost.shard
        * cost.element_bytes
        * (cost.devices - 1)
        / (ways * LINK_EFFICIENCY * chip.link_bandwidth)
    )
    contraction = _unsplit_seconds(cost, chip)
    if cost.movement == "allreduce":
        return RingSeconds(contraction + 2 * collective, 3 * contraction + 2 * collective)
    # In the backward pass a gather becomes a scatter, and the reverse. The gathered array is saved.
    return RingSeconds(contraction + collective, 3 * contraction + 2 * collective)


def _unsplit_seconds(cost: RingCost, chip: TPU) -> float:
    """Return the seconds of the undivided matmul, which reads its weights once."""
    rows = cost.moving_elements + cost.resident_elements
    return _overlapped_seconds(
        cost.flops / chip.peak_flops, cost.element_bytes * (rows + cost.weights), chip
    )


def _gather_step(cost: RingCost, chip: TPU) -> float:
    """Return the seconds of one step's matmul, written to its place in the result."""
    written = cost.element_bytes * cost.resident_elements / cost.devices
    return _step_seconds(cost, written + cost.element_bytes * (cost.shard + cost.weights), chip)


def _weight_gradient_step(cost: RingCost, chip: TPU) -> float:
    """Return the seconds of one step's term of the weight gradient, summed in float32."""
    read = cost.element_bytes * (cost.moving_elements + cost.resident_elements) / cost.devices
    return _step_seconds(cost, read + 2 * 4 * cost.weights, chip)


def _read_in_step(cost: RingCost) -> float:
    """Return the bytes of the operands of one term of a sum that moves."""
    return cost.element_bytes * (cost.resident_elements / cost.devices + cost.weights)


def _step_seconds(cost: RingCost, bytes_moved: float, chip: TPU) -> float:
    contraction = (
        cost.flops / cost.devices / chip.peak_flops * (1 + (LOOP_OVERHEAD if cost.rolled else 0))
    )
    return STEP_SECONDS + _overlapped_seconds(contraction, bytes_moved, chip)


def _overlapped_seconds(contraction: float, bytes_moved: float, chip: TPU) -> float:
    """Return the seconds of a matmul that also moves some bytes from and to the memory.

    A step loads as much as the undivided matmul. This slows down chips whose peak is high relative
    to their memory bandwidth, such as the v6e, where a sum over the steps takes longer than its
    matmuls.
    """
    loading = bytes_moved / chip.memory_bandwidth
    return max(contraction, loading) + UNOVERLAPPED * min(contraction, loading)


def _exposed_seconds(cost: RingCost, element_bytes: int, contractions: int, chip: TPU) -> float:
    """Return the exposed part of the permutes that have some matmuls to overlap with.

    A shard that needs two permutes is certain to overlap with a single matmul only, because the
    compiler starts a permute as late as its estimates allow.
    """
    hop = cost.shard * element_bytes / (LINK_EFFICIENCY * chip.link_bandwidth)
    beside = contractions * cost.flops / cost.devices / chip.peak_flops
    return cost.permutes * max(0.0, hop - beside)
