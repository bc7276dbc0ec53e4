"""Simulate a compiled program on a timeline.

The device and each of its links run one operation at a time. A program that was scheduled by its
own compiler keeps that order, and operations between a collective's start and done overlap with it.
Any other program is scheduled here by list scheduling: of the kernels whose inputs are ready, the
device runs the one on the longest path to the end, and a collective starts as soon as it can. The
iterations of a loop run one after another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from drumline.inspect.collectives import (
    COLLECTIVE_KINDS,
    async_phase,
    base_opcode,
    becomes_reduce_scatter,
    collective_axes,
    group_size,
    operand_shapes,
)
from drumline.inspect.cost.coverage import (
    MAX_ITERATION_SECONDS,
    MIN_ITERATIONS,
    SMALL_STEPS,
    operation_kind,
)
from drumline.inspect.cost.kernels import (
    FREE_OPCODES,
    Cost,
    Kernel,
    compiled_kernels,
    fuse,
    kernel_cost,
)
from drumline.inspect.cost.network import Network
from drumline.inspect.hlo.groups import parse_permute_pairs
from drumline.inspect.hlo.loops import trip_count
from drumline.inspect.hlo.source import SourceLocation
from drumline.inspect.hlo.text import Computation, Instruction, Module

DEVICE = "device"
"""The resource that computes."""
COPIES = "copies"
"""The resource that copies between the memories of a device while it computes."""
LINK_IS_FREE = -1
"""The entry in the scheduler's event queue for a link that is free before its event ends."""


@dataclass(frozen=True)
class TimelineEvent:
    """An operation that occupies a resource from `start` to `end`, in seconds."""

    name: str
    kind: str
    """The kind of collective or of operation, such as `matmul`, `elementwise` or `loop`."""
    resource: str
    """The device, or the links of a collective joined by `+`."""
    start: float
    end: float
    location: SourceLocation
    cost: Cost = field(default_factory=Cost, repr=False)
    axes: tuple[str, ...] = ()
    """The mesh axes of a collective."""
    exposed: float = 0.0
    """The seconds for which the device waits for the operation."""
    body: Timeline | None = field(default=None, repr=False)
    """One iteration of a loop, or a called computation."""
    trip_count: int = 1
    """The number of iterations of a loop."""
    latency: float = 0.0
    """The last part of a collective, in which its links are already free for the next one."""
    blocked_links: tuple[str, ...] = ()
    """The links that the body of a loop or a call uses."""

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start

    @property
    def device_seconds(self) -> float:
        """The time of the device: only the exposed time of a collective or a background copy."""
        in_background = self.resource == COPIES or self.kind in COLLECTIVE_KINDS.values()
        return self.exposed if in_background else self.seconds


@dataclass(frozen=True)
class Timeline:
    """The events of one computation. The first starts at 0."""

    events: tuple[TimelineEvent, ...]
    seconds: float
    unknown_trip_count: bool = False
    """True if a loop has an unknown trip count. It counts as one iteration."""

    def leaf_events(self, executions: int = 1) -> Iterator[tuple[TimelineEvent, int]]:
        """Yield all events, also those inside loops and calls, with their numbers of executions."""
        for event in self.events:
            if event.body is None:
                yield event, executions
            else:
                yield from event.body.leaf_events(executions * event.trip_count)

    def seconds_by_operation(self, executions: int = 1) -> dict[str, float]:
        """Return the device time by kind of operation, and the exposed time of collectives."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for event in self.events:
            body, count = event.body, event.trip_count
            if body is None:
                kind, duration = event.cost.operation or event.kind, event.device_seconds
                seconds[kind] += duration * executions
            elif event.kind == "loop" and _has_small_steps(body, count):
                seconds[SMALL_STEPS] += event.seconds * executions
            else:
                for kind, duration in body.seconds_by_operation(executions * count).items():
                    seconds[kind] += duration
        return dict(seconds)


def _has_small_steps(iteration: Timeline, count: int) -> bool:
    many = count >= MIN_ITERATIONS or iteration.unknown_trip_count
    return many and iteration.seconds < MAX_ITERATION_SECONDS


@dataclass(frozen=True)
class TimelineSimulator:
    """A simulator of the computations of a program on one machine."""

    module: Module
    network: Network
    mesh: Mapping[str, int]
    """The mesh that the replica groups of the program refer to."""
    scheduled: bool
    """True if the program's own compiler has fused and scheduled it for this device."""
    _timelines: dict[str, Timeline] = field(default_factory=dict, repr=False)

    def simulate(self, computation: Computation | None = None) -> Timeline:
        """Return the timeline of a computation, by default of the whole program."""
        computation = computation or self.module.entry
        if computation.name not in self._timelines:
            self._timelines[computation.name] = (
                self._follow_schedule(computation)
                if self.scheduled
                else self._make_schedule(computation)
            )
        return self._timelines[computation.name]

    def _follow_schedule(self, computation: Computation) -> Timeline:
        """Run the kernels in program order. Only a `done` instruction waits for a collective."""
        now = 0.0
        free_at: dict[str, float] = {}
        running: dict[str, int] = {}  # indices of started events, by instruction name or channel
        events: list[TimelineEvent] = []
        for kernel in compiled_kernels(computation, self.module):
            primary = kernel.primary
            if primary.opcode in FREE_OPCODES:
                continue
            phase = async_phase(primary, self.module)
            is_done = phase.name == "done" if phase else primary.opcode.endswith("-done")
            is_update = primary.opcode.endswith("-update")
            if is_done or is_update:
                names = (phase.channel,) if phase else primary.operands
                start_name = next((name for name in names if name in running), None)
                if start_name is None:
                    continue
                index = running[start_name]
                if is_update:  # a stage between start and done; the next stage refers to it
                    running[primary.name] = index
                else:
                    wait = max(0.0, events[index].end - now)
                    events[index] = replace(events[index], exposed=wait)
                    now += wait
                continue
            if "cross_program_prefetch_index" in primary.attribute_text:
                continue  # this copy runs during the previous program
            event = self._event(_unwrap_collective(kernel, self.module), computation)
            is_start = phase is not None or primary.opcode.endswith("-start")
            is_copy = is_start and event.resource == DEVICE
            if is_copy:
                event = replace(event, resource=COPIES)
            links = event.resource.split("+")
            start = now if is_copy else max(now, *(free_at.get(link, 0.0) for link in links))
            end = start + event.seconds
            exposed = 0.0
            if is_start:
                running[phase.channel if phase else primary.name] = len(events)
            else:
                now = end
                exposed = event.seconds if event.kind in COLLECTIVE_KINDS else 0.0
            for link in links:
                free_at[link] = end - event.latency
            events.append(replace(event, start=start, end=end, exposed=exposed))
        return _make_timeline(events, max([now, *(event.end for event in events)]))

    def _make_schedule(self, computation: Computation) -> Timeline:
        """Fuse the computation into kernels and schedule them."""
        machine = self.network.machine
        # Values that stay on the chip must leave most of its memory to the running kernel.
        small_bytes = machine.constants.on_chip_bytes / 8 / machine.devices_per_chip
        kernels = fuse(computation, self.module, small_bytes)
        producers: dict[str, list[int]] = {}
        for index, kernel in enumerate(kernels):
            for instruction in kernel.instructions:
                producers.setdefault(instruction.name, []).append(index)
        dependencies = [
            {
                producer
                for name in kernel.inputs
                for producer in producers.get(name, ())
                if producer != index
            }
            for index, kernel in enumerate(kernels)
        ]
        events = [self._event(kernel, computation) for kernel in kernels]
        return _list_schedule(events, dependencies)

    def _event(self, kernel: Kernel, computation: Computation) -> TimelineEvent:
        """Return the event of a kernel, starting at 0."""
        primary = kernel.primary
        if base_opcode(primary.opcode) in COLLECTIVE_KINDS:
            return self._collective_event(primary, computation)
        if primary.opcode in ("while", "conditional", "call"):
            return self._call_event(primary, computation)
        cost = kernel_cost(kernel, self.network.machine, self.scheduled)
        operation = operation_kind(kernel.instructions, computation, self.module, kernel.scope)
        cost = replace(cost, operation=operation)
        return TimelineEvent(
            kernel.name, cost.kind, DEVICE, 0.0, cost.seconds, primary.location, cost
        )

    def _collective_event(self, collective: Instruction, computation: Computation) -> TimelineEvent:
        partitions = self.module.partitions
        if group_size(collective, partitions) <= 1:
            return TimelineEvent(collective.name, "free", DEVICE, 0.0, 0.0, collective.location)
        kind = COLLECTIVE_KINDS[base_opcode(collective.opcode)]
        if (
            kind == "all-reduce"
            and not self.scheduled
            and becomes_reduce_scatter(collective, computation)
        ):
            # Compilers of accelerators make this a reduce-scatter. The CPU's does not.
            kind = "reduce-scatter"
        axes = collective_axes(collective, self.mesh, partitions)
        operand_bytes = float(sum(s.bytes for s in operand_shapes(collective, computation)))
        links = self.network.resources(axes, _permute_direction(collective))
        return TimelineEvent(
            collective.name,
            kind,
            "+".join(links),
            0.0,
            self.network.collective_seconds(kind, operand_bytes, axes),
            collective.location,
            Cost(kind=kind, bytes=operand_bytes),
            axes,
            latency=self.network.collective_seconds(kind, 0.0, axes),
        )

    def _call_event(self, caller: Instruction, computation: Computation) -> TimelineEvent:
        """Return the event of a loop, a call, or the longest branch of a conditional."""
        computations = self.module.computations
        callees = [
            self.simulate(computations[name])
            for names in caller.called_computations().values()
            for name in names
            if name in computations
        ]
        if caller.opcode == "while":
            kind = "loop"
            count = trip_count(caller, computation, self.module)
            body = _loop_iteration(callees, self.network.machine.constants.operation_seconds)
        else:
            kind, count = "call", 1
            body = max(callees, key=lambda callee: callee.seconds, default=Timeline((), 0.0))
        body = replace(body, unknown_trip_count=body.unknown_trip_count or count is None)
        iterations = 1 if count is None else count
        return TimelineEvent(
            caller.name,
            kind,
            DEVICE,
            0.0,
            body.seconds * iterations,
            caller.location,
            body=body,
            trip_count=iterations,
            blocked_links=_used_links(body),
        )


def _unwrap_collective(kernel: Kernel, module: Module) -> Kernel:
    """Replace an `async-start` or a fusion around a collective by the collective itself."""
    wrapper = kernel.primary
    if wrapper.opcode not in ("async-start", "fusion"):
        return kernel
    callee = module.fused_computation(wrapper)
    opcodes = [instruction.opcode for instruction in callee.instructions] if callee else []
    index = next((i for i, opcode in enumerate(opcodes) if opcode in COLLECTIVE_KINDS), None)
    if callee is None or index is None or "dot" in opcodes or "convolution" in opcodes:
        return kernel
    collective = callee.instructions[index]
    opcode = collective.opcode
    if (
        wrapper.opcode == "fusion"
        and opcode == "all-reduce"
        and becomes_reduce_scatter(collective, callee)
    ):
        opcode = "reduce-scatter"  # the TPU compiler's form of a reduce-scatter
    # Outside the callee, the operands of the wrapper stand for its parameters.
    collective = replace(collective, opcode=opcode, operands=wrapper.operands)
    return Kernel(kernel.name, [collective], inputs=kernel.inputs)


def _permute_direction(collective: Instruction) -> str:
    """Return the direction of most pairs of a permute: `up`, `down`, or "" if it has none."""
    pairs = parse_permute_pairs(collective.attributes.get("source_target_pairs", ""))
    if not pairs:
        return ""
    net_direction = sum(1 if target > source else -1 for source, target in pairs)
    return "up" if net_direction > 0 else "down"


def _loop_iteration(callees: list[Timeline], overhead: float) -> Timeline:
    """Join the condition and the body of a loop, and add the overhead of an iteration."""
    events: list[TimelineEvent] = []
    offset = 0.0
    for callee in callees:
        events += [
            replace(event, start=event.start + offset, end=event.end + offset)
            for event in callee.events
        ]
        offset += callee.seconds
    unknown = any(callee.unknown_trip_count for callee in callees)
    return Timeline(tuple(events), offset + overhead, unknown)


def _used_links(timeline: Timeline) -> tuple[str, ...]:
    """Return the names of all links that a timeline uses."""
    resources = {name for event, _ in timeline.leaf_events() for name in event.resource.split("+")}
    return tuple(sorted(resources - {DEVICE, COPIES}))


def _list_schedule(events: list[TimelineEvent], dependencies: list[set[int]]) -> Timeline:
    """Start each event as soon as its dependencies and resources allow.

    If several events wait for a resource, the one on the longest path to the end starts first.
    """
    dependents: list[list[int]] = [[] for _ in events]
    for index, predecessors in enumerate(dependencies):
        for predecessor in predecessors:
            dependents[predecessor].append(index)
    path_seconds = _longest_paths(events, dependencies, dependents)
    open_dependencies = [len(predecessors) for predecessors in dependencies]
    ready: dict[str, list[tuple[float, int]]] = {}  # a heap of events for each resource

    def make_ready(index: int) -> None:
        heappush(ready.setdefault(events[index].resource, []), (-path_seconds[index], index))

    for index, count in enumerate(open_dependencies):
        if count == 0:
            make_ready(index)
    simulated: list[TimelineEvent] = []
    free_at: dict[str, float] = {}
    # A heap of future times with the event that ends then, or LINK_IS_FREE.
    event_queue: list[tuple[float, int]] = []
    now = 0.0
    done = 0
    while done < len(events):
        any_started = True
        while any_started:
            any_started = False
            for resource, queue in ready.items():
                if not queue:
                    continue
                links = (*resource.split("+"), *events[queue[0][1]].blocked_links)
                if any(free_at.get(link, 0.0) > now for link in links):
                    continue
                _, index = heappop(queue)
                event = replace(events[index], start=now, end=now + events[index].seconds)
                simulated.append(event)
                for link in links:
                    free_at[link] = event.end - event.latency
                heappush(event_queue, (event.end, index))
                if event.latency:
                    heappush(event_queue, (event.end - event.latency, LINK_IS_FREE))
                any_started = True
        if not event_queue:
            break  # a dependency cycle, which only malformed HLO has
        now = event_queue[0][0]
        while event_queue and event_queue[0][0] <= now:
            _, index = heappop(event_queue)
            if index == LINK_IS_FREE:
                continue
            done += 1
            for dependent in dependents[index]:
                open_dependencies[dependent] -= 1
                if open_dependencies[dependent] == 0:
                    make_ready(dependent)
    total = max((event.end for event in simulated), default=0.0)
    return _make_timeline(_assign_exposed_time(simulated, total), total)


def _longest_paths(
    events: list[TimelineEvent], dependencies: list[set[int]], dependents: list[list[int]]
) -> list[float]:
    """Return the duration of the longest path from the start of each event to the end."""
    path_seconds = [event.seconds for event in events]
    open_dependents = [len(indices) for indices in dependents]
    stack = [index for index, count in enumerate(open_dependents) if count == 0]
    while stack:
        index = stack.pop()
        for predecessor in dependencies[index]:
            path_seconds[predecessor] = max(
                path_seconds[predecessor], events[predecessor].seconds + path_seconds[index]
            )
            open_dependents[predecessor] -= 1
            if open_dependents[predecessor] == 0:
                stack.append(predecessor)
    return path_seconds


def _assign_exposed_time(events: list[TimelineEvent], total: float) -> list[TimelineEvent]:
    """Set the exposed time of the collectives.

    Each gap of the device counts as exposed time of the collectives that run in it. If several run
    at once, the time counts for the one that started first.
    """
    busy = sorted((e.start, e.end) for e in events if e.resource == DEVICE and e.seconds > 0)
    gaps, cursor = [], 0.0
    for start, end in busy:
        if start > cursor:
            gaps.append((cursor, start))
        cursor = max(cursor, end)
    if total > cursor:
        gaps.append((cursor, total))
    exposed = [0.0] * len(events)
    waiting = [
        (index, event)
        for index, event in enumerate(events)
        if event.kind in COLLECTIVE_KINDS.values()
    ]
    waiting.sort(key=lambda item: item[1].start, reverse=True)
    running: list[tuple[int, TimelineEvent]] = []
    for gap_start, gap_end in gaps:
        while waiting and waiting[-1][1].start < gap_end:
            running.append(waiting.pop())
        running = [(index, event) for index, event in running if event.end > gap_start]
        cursor = gap_start
        for index, event in running:
            if cursor >= gap_end:
                break
            seconds = min(gap_end, event.end) - max(cursor, event.start)
            if seconds > 0:
                exposed[index] += seconds
                cursor = min(gap_end, event.end)
    return [replace(event, exposed=seconds) for event, seconds in zip(events, exposed, strict=True)]


def _make_timeline(events: list[TimelineEvent], total: float) -> Timeline:
    """Sort the events and drop those that take no time."""
    unknown = any(event.body is not None and event.body.unknown_trip_count for event in events)
    timed_events = [event for event in events if event.seconds > 0]
    return Timeline(tuple(sorted(timed_events, key=lambda event: event.start)), total, unknown)
