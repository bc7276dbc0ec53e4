"""Operations placed on a timeline: the device's own work, and its links, each busy with one thing.

A program that its own compiler has scheduled is played as it stands: what lies between the start
and the end of a collective hides it. One that is not scheduled for this device is scheduled here:
of the operations whose operands are there, the device takes the one that most depends on, and a
collective begins as soon as it can. The turns of a loop follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from drumline.inspect.collectives import (
    KINDS,
    async_part,
    axes,
    group_size,
    is_scattered,
    operand_shapes,
)
from drumline.inspect.cost.kernels import FREE, Cost, Kernel, as_compiled, fused, kernel_cost
from drumline.inspect.cost.network import Network
from drumline.inspect.hlo.groups import read_pairs
from drumline.inspect.hlo.loops import trips
from drumline.inspect.hlo.source import SourcePlace
from drumline.inspect.hlo.text import Computation, Instruction, Module

DEVICE = "device"
"""The resource that computes."""
LINK_IS_FREE = -1
PRODUCTS = ("dot", "convolution")
COPIES = "copies"
"""The resource that copies between a device's memories, beside its computing."""


@dataclass(frozen=True)
class TimelineEvent:
    """Something that keeps a resource busy, once."""

    name: str
    kind: str
    """The collective's kind, or the operation's: `matmul`, `elementwise`, `loop` and so on."""
    resource: str
    start: float
    end: float
    place: SourcePlace
    cost: Cost = field(default_factory=Cost, repr=False)
    axes: tuple[str, ...] = ()
    exposed: float = 0.0
    """For a collective: how long the device waits for it."""
    inside: Timeline | None = field(default=None, repr=False)
    """One turn of a loop, or what is called."""
    turns: int = 1
    latency: float = 0.0
    """The part of a collective in which its links are free for the next."""
    holds: tuple[str, ...] = ()
    """Links that are not free meanwhile: those that a loop's turns use."""

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The events of one computation, from 0."""

    events: tuple[TimelineEvent, ...]
    seconds: float
    unknown_turns: bool = False
    """Whether a loop within runs an unknown number of times, counted once."""

    def flat(self, times: int = 1) -> Iterator[tuple[TimelineEvent, int]]:
        """Every event that is no loop, with how often it happens."""
        for event in self.events:
            if event.inside is not None:
                yield from event.inside.flat(times * event.turns)
            else:
                yield event, times


@dataclass(frozen=True)
class Player:
    """Places the operations of a program for one machine."""

    module: Module
    network: Network
    mesh: Mapping[str, int]
    """The mesh by which the program's groups of devices are numbered."""
    scheduled: bool
    """Whether the program's own compiler has fused and ordered it for this device."""
    _known: dict[str, Timeline] = field(default_factory=dict, repr=False)

    def play(self, computation: Computation | None = None) -> Timeline:
        """The timeline of a computation; of the whole program without one."""
        chosen = computation or self.module.entry
        if chosen.name not in self._known:
            if self.scheduled:
                self._known[chosen.name] = self._in_order(as_compiled(chosen, self.module), chosen)
            else:
                # What is to stay on the chip must leave room for what is being computed.
                small = self.network.machine.constants.on_chip / 8 / self.network.machine.per_chip
                kernels = fused(chosen, self.module, small)
                self._known[chosen.name] = self._by_need(kernels, chosen)
        return self._known[chosen.name]

    # What one kernel is, without its place in time.

    def _event(self, kernel: Kernel, within: Computation) -> TimelineEvent:
        lead = kernel.lead
        base = _base(lead.opcode)
        if base in KINDS:
            return self._collective(lead, within)
        if lead.opcode in ("while", "conditional", "call"):
            return self._called(lead, within)
        cost = kernel_cost(kernel, self.network.machine, self.scheduled)
        return TimelineEvent(kernel.name, cost.kind, DEVICE, 0.0, cost.seconds, lead.place, cost)

    def _collective(self, lead: Instruction, within: Computation) -> TimelineEvent:
        kind = KINDS[_base(lead.opcode)]
        over = axes(lead, self.mesh, self.module.partitions)
        if group_size(lead, self.module.partitions) <= 1:
            return TimelineEvent(lead.name, "free", DEVICE, 0.0, 0.0, lead.place)
        taken = float(sum(shape.bytes for shape in operand_shapes(lead, within)))
        if kind == "all-reduce" and not self.scheduled and is_scattered(lead, within):
            # Every accelerator's compiler makes a reduce-scatter of this; the CPU's does not.
            kind = "reduce-scatter"
        seconds = self.network.seconds(kind, taken, over)
        resource = "+".join(self.network.resources(over, _direction(lead)))
        return TimelineEvent(
            lead.name,
            kind,
            resource,
            0.0,
            seconds,
            lead.place,
            Cost(kind=kind, bytes=taken),
            over,
            latency=self.network.seconds(kind, 0.0, over),
        )

    def _called(self, lead: Instruction, within: Computation) -> TimelineEvent:
        called = lead.called()
        turns: int | None = 1
        names = [name for some in called.values() for name in some]
        known = self.module.computations
        inner = [self.play(known[name]) for name in names if name in known]
        # Of a condition's branches, the longest.
        longest = max(inner, key=lambda line: line.seconds, default=Timeline((), 0.0))
        if lead.opcode == "while":
            turns = trips(lead, within, self.module)
            longest = _turn(inner, self.network.machine.constants.operation)
        longest = replace(longest, unknown_turns=longest.unknown_turns or turns is None)
        times = 1 if turns is None else turns
        return TimelineEvent(
            lead.name,
            "loop" if lead.opcode == "while" else "call",
            DEVICE,
            0.0,
            longest.seconds * times,
            lead.place,
            inside=longest,
            turns=times,
            holds=_links(longest),
        )

    # In time: as the program's own compiler ordered it.

    def _in_order(self, kernels: list[Kernel], within: Computation) -> Timeline:
        now = 0.0
        free: dict[str, float] = {}
        running: dict[str, int] = {}
        events: list[TimelineEvent] = []
        for kernel in kernels:
            lead = kernel.lead
            if lead.opcode in FREE:
                continue
            begun = next((name for name in lead.operands if name in running), None)
            fused = async_part(lead, self.module)
            if fused and fused.part == "done":
                begun = fused.channel if fused.channel in running else None
            if lead.opcode.endswith(("-done", "-update")) or (fused and fused.part == "done"):
                if begun is None:
                    continue
                at = running[begun]
                if lead.opcode.endswith("-update"):
                    running[lead.name] = at
                    continue
                waited = max(0.0, events[at].end - now)
                events[at] = replace(events[at], exposed=waited)
                now += waited
                continue
            if "cross_program_prefetch_index" in lead.rest:
                continue  # made while the program before this one still runs
            event = self._event(_started(kernel, self.module), within)
            links = event.resource.split("+")
            if lead.opcode.endswith("-start") or fused:
                begin = max(now, *(free.get(link, 0.0) for link in links))
                running[fused.channel if fused else lead.name] = len(events)
                if event.resource == DEVICE:  # a copy between memories: beside the computing
                    links = [COPIES]
                    event = replace(event, resource=COPIES)
            else:
                begin = max(now, *(free.get(link, 0.0) for link in links))
                now = begin + event.seconds
            end = begin + event.seconds
            waits = event.seconds if event.kind in KINDS and end == now else 0.0
            for link in links:
                free[link] = end - event.latency
            events.append(replace(event, start=begin, end=end, exposed=waits))
        return _line(events, max([now, *(event.end for event in events)]))

    # In time: as the operands allow.

    def _by_need(self, kernels: list[Kernel], within: Computation) -> Timeline:
        events = [self._event(kernel, within) for kernel in kernels]
        makers: dict[str, list[int]] = {}
        for at, kernel in enumerate(kernels):
            for one in kernel.instructions:
                makers.setdefault(one.name, []).append(at)
        needs = [
            {m for name in kernel.takes for m in makers.get(name, ()) if m != at}
            for at, kernel in enumerate(kernels)
        ]
        return _schedule(events, needs)


def _schedule(events: list[TimelineEvent], needs: list[set[int]]) -> Timeline:
    followers: list[list[int]] = [[] for _ in events]
    for at, before in enumerate(needs):
        for one in before:
            followers[one].append(at)
    urgency = _urgency(events, followers, needs)
    missing = [len(before) for before in needs]
    waiting: dict[str, list[tuple[float, int]]] = {}
    placed: list[TimelineEvent] = []
    free: dict[str, float] = {}

    def enter(at: int) -> None:
        heappush(waiting.setdefault(events[at].resource, []), (-urgency[at], at))

    for at, count in enumerate(missing):
        if count == 0:
            enter(at)
    pending: list[tuple[float, int]] = []  # ends to come
    now = 0.0
    done = 0
    while done < len(events):
        started = True
        while started:
            started = False
            for resource, queue in waiting.items():
                if not queue:
                    continue
                links = (*resource.split("+"), *events[queue[0][1]].holds)
                if all(free.get(link, 0.0) <= now for link in links):
                    _, at = heappop(queue)
                    event = replace(events[at], start=now, end=now + events[at].seconds)
                    placed.append(event)
                    for link in links:
                        free[link] = event.end - event.latency
                    heappush(pending, (event.end, at))
                    if event.latency:
                        heappush(pending, (event.end - event.latency, LINK_IS_FREE))
                    started = True
        if not pending:  # a cycle: the text is not what it should be
            break
        now, at = heappop(pending)
        finished = [at]
        while pending and pending[0][0] <= now:
            finished.append(heappop(pending)[1])
        for at in finished:
            if at == LINK_IS_FREE:
                continue
            done += 1
            for one in followers[at]:
                missing[one] -= 1
                if missing[one] == 0:
                    enter(one)
    total = max((event.end for event in placed), default=0.0)
    return _line(_exposed(placed, total), total)


def _urgency(
    events: list[TimelineEvent], followers: list[list[int]], needs: list[set[int]]
) -> list[float]:
    """The longest way from each event to the end: what most depends on goes first."""
    urgency = [event.seconds for event in events]
    counts = [len(after) for after in followers]
    stack = [at for at, count in enumerate(counts) if count == 0]
    while stack:
        at = stack.pop()
        for before in needs[at]:
            urgency[before] = max(urgency[before], events[before].seconds + urgency[at])
            counts[before] -= 1
            if counts[before] == 0:
                stack.append(before)
    return urgency


def _exposed(events: list[TimelineEvent], total: float) -> list[TimelineEvent]:
    """Lay each gap of the device to the collectives that run in it, the first to begin first."""
    busy = sorted((e.start, e.end) for e in events if e.resource == DEVICE and e.seconds > 0)
    gaps, at = [], 0.0
    for start, end in busy:
        if start > at:
            gaps.append((at, start))
        at = max(at, end)
    if total > at:
        gaps.append((at, total))
    exposed = dict.fromkeys(range(len(events)), 0.0)
    links = [(n, e) for n, e in enumerate(events) if e.kind in KINDS.values()]
    links.sort(key=lambda item: item[1].start, reverse=True)
    running: list[tuple[int, TimelineEvent]] = []
    for start, end in gaps:
        while links and links[-1][1].start < end:
            running.append(links.pop())
        running = [(number, event) for number, event in running if event.end > start]
        cursor = start
        for number, event in running:
            if cursor >= end:
                break
            part = min(end, event.end) - max(cursor, event.start)
            if part > 0:
                exposed[number] += part
                cursor = min(end, event.end)
    return [replace(event, exposed=exposed[n]) for n, event in enumerate(events)]


def _line(events: list[TimelineEvent], total: float) -> Timeline:
    unknown = any(event.inside is not None and event.inside.unknown_turns for event in events)
    kept = tuple(event for event in events if event.seconds > 0)
    return Timeline(tuple(sorted(kept, key=lambda event: event.start)), total, unknown)


def _turn(parts: list[Timeline], start: float) -> Timeline:
    """One turn of a loop: its condition, its body, and what it takes to begin another."""
    events: list[TimelineEvent] = []
    seconds = 0.0
    for part in parts:
        events += [
            replace(event, start=event.start + seconds, end=event.end + seconds)
            for event in part.events
        ]
        seconds += part.seconds
    unknown = any(part.unknown_turns for part in parts)
    return Timeline(tuple(events), seconds + start, unknown)


def _links(timeline: Timeline) -> tuple[str, ...]:
    """The links that anything within a timeline keeps busy."""
    used = {link for event, _ in timeline.flat() for link in event.resource.split("+")}
    return tuple(sorted(used - {DEVICE, COPIES}))


def _base(opcode: str) -> str:
    return opcode.removesuffix("-start").removesuffix("-done")


def _started(kernel: Kernel, module: Module) -> Kernel:
    """The collective that an `async-start` starts or that is all of a fusion, in its place."""
    lead = kernel.lead
    if lead.opcode not in ("async-start", "fusion"):
        return kernel
    called = module.computations.get((lead.called().get("calls") or ("",))[0])
    inner = [one for one in called.instructions if one.opcode in KINDS] if called else []
    if called is None or not inner or any(one.opcode in PRODUCTS for one in called.instructions):
        return kernel
    opcode = inner[0].opcode
    if lead.opcode == "fusion" and opcode == "all-reduce" and is_scattered(inner[0], called):
        opcode = "reduce-scatter"  # as the TPU's compiler writes one
    # Its operands are the start's: the parameters of the called computation stand for them.
    started = replace(inner[0], opcode=opcode, operands=lead.operands)
    return Kernel(kernel.name, [started], takes=kernel.takes)


def _direction(lead: Instruction) -> str:
    """Which way a permute sends along a ring: most of its pairs go up, or down."""
    pairs = read_pairs(lead.attributes.get("source_target_pairs", ""))
    if not pairs:
        return ""
    up = sum(1 if target > source else -1 for source, target in pairs)
    return "up" if up > 0 else "down"
