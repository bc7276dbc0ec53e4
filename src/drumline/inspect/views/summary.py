"""Ten lines about an estimate that a researcher can act on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from drumline.inspect.compiling.axes import shown
from drumline.inspect.views.words import duration, plural, share, size

if TYPE_CHECKING:
    from drumline.inspect.estimate import Estimate, EstimatedOperation, Waiting


def summary(told: Estimate) -> list[str]:
    """At most ten lines."""
    return list(_lines(told))[:10]


def _lines(told: Estimate) -> Iterator[str]:
    least = "at least " if told.at_least else ""
    mesh = f" on {shown(told.mesh)}" if told.mesh else ""
    yield (
        f"{told.name}: {least}{duration(told.seconds)} a call on {told.on}{mesh}, "
        f"MFU {100 * told.mfu:.1f} %, bound by {told.bound}"
    )
    parts = ", ".join(
        f"{name} {share(seconds / told.seconds)}"
        for name, seconds in sorted(told.bounds.items(), key=lambda item: -item[1])
        if told.seconds and seconds / told.seconds >= 0.005
    )
    yield f"  time: {parts}" if parts else "  time: none"
    yield f"  {_communication(told)}"
    for one in told.communication[:2]:
        if told.seconds and one.exposed / told.seconds >= 0.01:
            yield f"  {_waits(told, one)}"
    for operation in told.operations[:2]:
        if operation.seconds > 0:  # a copy that is hidden keeps nothing waiting
            yield f"  {_operation(told, operation)}"
    yield f"  {_memory(told)}"
    if told.laid:
        laid = "; ".join(f"{axis} {where}" for axis, where in told.laid.items())
        yield f"  links: {laid}"
    yield f"  compiled by {told.compiled_by}; times are the model's, not measured"


def _communication(told: Estimate) -> str:
    if not told.communication:
        return "no communication"
    hidden, exposed = told.hidden, told.exposed
    count = sum(one.count for one in told.communication)
    if exposed <= 0.01 * told.seconds:
        return f"communication: {plural(count, 'collective')}, {duration(hidden)}, all hidden"
    return (
        f"communication: {plural(count, 'collective')}, {duration(hidden + exposed)}, of which the "
        f"device waits for {duration(exposed)} ({share(exposed / told.seconds)} of the step)"
    )


def _waits(told: Estimate, one: Waiting) -> str:
    where = one.source.rpartition("/")[2] or one.scope or "an unknown line"
    axes = " and ".join(one.axes) or "the devices"
    # Hidden, it still has to be sent: the links' own time is the least that is left.
    links = max((s for r, s in told.busy.items() if r != "device"), default=0.0)
    left = max(told.seconds - one.exposed, links)
    saved = (told.seconds - left) / told.seconds
    gain = f"; overlapping it would save up to {share(saved)}" if saved >= 0.01 else ""
    part = share(one.exposed / told.seconds)
    return f"{part} of the step waits for {one.kind} over {axes} at {where}{gain}"


def _operation(told: Estimate, one: EstimatedOperation) -> str:
    where = one.source.rpartition("/")[2] or one.scope or "an unknown line"
    part = share(one.seconds / told.seconds) if told.seconds else "0 %"
    rate = ""
    if one.flops:
        used = one.flops / one.seconds / told.machine.peak_flops
        rate = f", {share(used)} of peak"
    elif one.bytes:
        used = one.bytes / one.seconds / told.machine.memory_bandwidth
        rate = f", {share(used)} of the memory's bandwidth"
    return f"{part} is {one.kind} at {where}, bound by {one.bound}{rate}"


def _memory(told: Estimate) -> str:
    memory = told.memory
    verdict = "fits" if told.fits else "does NOT fit"
    text = (
        f"memory: {size(memory.total)} of {size(told.memory_limit)} a device, {verdict}: "
        f"arguments {size(memory.arguments)}, temporaries {size(memory.temporaries)}"
    )
    if memory.largest:
        first = memory.largest[0]
        text += f"; largest: {first.what} ({size(first.bytes)})"
    return text
