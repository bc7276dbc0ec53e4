"""Seconds of one operation on one device: multiplying, computing, loading, starting."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drumline.inspect.cost.kernels import Kernel
from drumline.inspect.cost.machines import Machine
from drumline.inspect.cost.work import ELEMENTWISE

TRIFLE = 1024
"""Bytes and operations of what runs beside everything else: offsets, counters, a scalar."""
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


@dataclass(frozen=True)
class Cost:
    """What one operation costs, and what it is bound by."""

    kind: str = ""
    seconds: float = 0.0
    bound: str = ""
    """`compute`, `memory` or `overhead`."""
    flops: float = 0.0
    at_peak: float = 0.0
    """Seconds that its products would take at the peak of their type."""
    bytes: float = 0.0
    recomputed: bool = False
    """Whether it is done again, for a backward pass that did not keep the first result."""
    cycles: float | None = None
    """Seconds by the TPU compiler's own estimate, where there is one."""


def kernel_cost(kernel: Kernel, machine: Machine, scheduled: bool) -> Cost:
    """What a kernel costs on a machine.

    The longest of multiplying, elementwise work and loading hides most of the others. Of products,
    the TPU's compiler has an estimate of its own, which counts; its figures for moving data are
    several times the bandwidth's, which counts instead.
    """
    work, constants = kernel.work, machine.constants
    if not work.products and max(work.moved, work.vector) <= TRIFLE:
        return Cost(kind=_kind(kernel))
    peak = machine.peak_flops * constants.matmul
    multiplying = sum(
        p.padded_flops(constants) / (peak * p.speed(constants)) for p in work.products
    )
    computing = work.vector * machine.per_chip / constants.vector_flops
    loading = work.moved / (machine.memory_bandwidth * constants.hbm)
    longest = max(multiplying, computing, loading)
    rest = multiplying + computing + loading - longest
    seconds = longest + constants.unhidden * rest
    cycles = _cycles(kernel, machine) if scheduled else None
    if cycles is not None and work.products:
        seconds = max(cycles, loading)
    if longest > 0 and not kernel.written_in:
        seconds += constants.operation
    bound = "memory" if longest == loading else "compute"
    if longest < constants.operation:
        bound = "overhead"
    return Cost(
        kind=_kind(kernel),
        seconds=seconds,
        bound=bound,
        flops=work.flops,
        at_peak=sum(p.flops / p.peak_of_type() for p in work.products) / machine.peak_flops,
        bytes=work.moved,
        recomputed="rematted_computation" in kernel.lead.place.op_name,
        cycles=cycles,
    )


def _cycles(kernel: Kernel, machine: Machine) -> float | None:
    found = _CYCLES.search(kernel.lead.rest)
    clock = machine.constants.clock
    return int(found[1]) / clock if found and clock else None


def _kind(kernel: Kernel) -> str:
    if kernel.written_in:
        return kernel.written_in
    if kernel.work.products:
        return "matmul"
    opcode = kernel.lead.opcode
    if opcode == "fusion" or opcode in ELEMENTWISE:
        return "elementwise"
    return opcode
