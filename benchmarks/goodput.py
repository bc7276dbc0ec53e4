"""Compare the goodput of the job manager with simpler policies on changing spot capacity.

    .venv/bin/python benchmarks/goodput.py [--worlds 10] [--days 3] [--seed 1] [--why] [--json]

Two endless jobs run for days of virtual time in the simulation of `make simulate`. Three zones have
random capacity traces: each zone has capacity or none for random durations, and a zone that loses
its capacity preempts all of its slices. No public trace of TPU capacity is known to the authors.
The traces of the first two climates are drawn from the statistics of SkyPilot's public traces of
spot GPUs (github.com/skypilot-org/spot-traces): the fraction of time in which a zone has capacity,
and the median length of such a period. The third climate is drawn from single observations of TPUs
(see `BimodalPeriods`). In each world all policies run with the same traces, zones and programs.

"Useful" is training time that is in a checkpoint. "Paid" is the time of a slice from READY to its
deletion. The share of useful hours is printed with the standard error of its mean over the worlds.
Policies that differ by less than that cannot be ranked. "Of oracle" is the useful time as a share
of the oracle's, which knows the traces (see `follow_plan`). `--why` also prints how the jobs spend
the time (see `ACTIVITIES`). `--json` prints the useful time of each world too, because all policies
run in the same worlds and can be compared world by world.
"""

import argparse
import asyncio
import contextlib
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, Protocol

sys.path.append(str(Path(__file__).parents[1]))  # the simulation is in the tests

from tests.simulation import hosts, programs, server
from tests.simulation.cloud import Conditions, SimulatedCloud
from tests.simulation.environment import Environment, RandomStreams, Stream
from tests.simulation.hosts import Host, HostRun
from tests.simulation.loop import SimulatedLoop
from tests.simulation.programs import Plan
from tests.simulation.runs import fix_hash_seed, run_all
from tests.simulation.server import Server, isolate

from drumline.chips import price, slice_of
from drumline.cloud.model.resources import NodeState, RequestState
from drumline.cloud.protocol import CloudError, PlacementRequest
from drumline.observed import ListedPlacement, PlacementState

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
ZONES = ("us-central1-a", "us-west4-a", "europe-west4-b")
KIND, CHIPS = "v5litepod-16", 16
JOBS = ("000001", "000002")
PROGRAM = Plan(steps=1 << 20, seconds=30.0, save_every=20, on_sigterm="leaves")
"""The program saves a checkpoint every ten minutes, and one on SIGTERM."""
SAVE_SECONDS = PROGRAM.seconds * PROGRAM.save_every
COMPILE_SECONDS = 20.0
"""The seconds from the start of the program to its first step."""
SETUP_SECONDS = 15.0
"""The seconds that a script takes from the first login to the start of the program."""
LOGIN_SECONDS = 5.0
"""The seconds between two attempts of a script to log in to hosts that still boot."""
POLL_SECONDS = 60.0
"""The seconds between two polls of the cloud. Drumline polls sooner after a host reports an
error.
"""
ZONE_SECONDS = 600.0
"""The seconds that "zone by zone" waits for a zone."""
NOTICES = (0.0, 30.0)
"""The notice of a preemption in seconds, each as likely as the other."""
SETTINGS = f"""
cloud: google
project: lab-tpu-1
zones: [{", ".join(ZONES)}]
look_seconds: {POLL_SECONDS:.0f}
"""


# Capacity -----------------------------------------------------------------------------------------


class ZoneStatistics(Protocol):
    """The statistics of the capacity of one zone."""

    @property
    def up_fraction(self) -> float:
        """The fraction of time in which the zone has capacity."""

    def draw_seconds(self, stream: Stream, has_capacity: bool) -> float:
        """Draw the duration of a period with or without capacity."""


@dataclass(frozen=True)
class LognormalPeriods:
    """Periods of similar length, with and without capacity."""

    up_fraction: float
    hours: float
    """The median length of a period with capacity, in hours."""

    def draw_seconds(self, stream: Stream, has_capacity: bool) -> float:
        """Draw the duration of a period with or without capacity."""
        sigma = 1.0
        mean_up = self.hours * HOUR * math.exp(sigma**2 / 2)
        mean_down = mean_up * (1 - self.up_fraction) / self.up_fraction
        mean_seconds = mean_up if has_capacity else mean_down
        return mean_seconds * stream.lognormvariate(-(sigma**2) / 2, sigma)


@dataclass(frozen=True)
class LogUniform:
    """A log-uniform distribution of durations in seconds."""

    shortest: float
    longest: float

    @property
    def mean(self) -> float:
        """The mean duration."""
        return (self.longest - self.shortest) / math.log(self.longest / self.shortest)

    def draw(self, stream: Stream) -> float:
        """Draw a duration."""
        return self.shortest * math.pow(self.longest / self.shortest, stream.random())


SHORT_LIFE = LogUniform(10 * MINUTE, 25 * MINUTE)
LONG_LIFE = LogUniform(4 * HOUR, 12 * HOUR)
SHORT_GAP = LogUniform(1 * MINUTE, 5 * MINUTE)
LONG_GAP = LogUniform(1 * HOUR, 10 * HOUR)
PROMPT_SECONDS = 5 * MINUTE
"""The age of a request after which the cloud neglects it."""
NEGLECT_SECONDS = 70 * MINUTE
"""The seconds for which the cloud neglects a request."""


@dataclass(frozen=True)
class BimodalPeriods:
    """Periods that are either short or long, from single observations of spot TPUs.

    - A slice dies early or lives for hours. `SHORT_LIFE`: spot TPUs were "routinely" preempted
      after 10 to 25 minutes in bad zones (marin issue 5976). `LONG_LIFE`: 256 chips of v5p were
      lost twice in one night (gpu-tpu-pedia, experiment log, section 4.7), and slices of v2 and v3
      4 to 11 times in 3.5 to 4.5 days (skypilot pull request 1500).
    - A request is granted within minutes or not for hours. `SHORT_GAP`: 16 hosts of TPU7x that were
      deleted and requested again were ready within 5 minutes (gpu-tpu-pedia, section 5), and three
      slices in a row lived for 2 to 3 minutes (section 9). `LONG_GAP`: 64 hosts of v5p came back
      after one hour (section 4.7), and six requests for TPU7x got nothing for ten hours (section
      9).
    - A waiting request has no place in a queue. `PROMPT_SECONDS` and `NEGLECT_SECONDS`: a pool of
      TPU7x that waited got nothing in 1.5 hours, while the same request, made again, was served
      within 5 minutes (section 5). A request that was abandoned after 10 minutes, but not deleted,
      was granted 70 minutes later (marin issue 4724). So a request is granted at once if the zone
      has capacity. If the capacity returns when the request is older than `PROMPT_SECONDS`, the
      cloud neglects it for `NEGLECT_SECONDS` more, and grants it afterwards if there is capacity
      then, whether or not somebody still wants it.

    The shares of short periods are not observed. They are chosen for zones that have capacity for
    22 %, 53 % and 69 % of the time. The AWS zones in "Can't Be Late" (NSDI 2024) had it for 4 to
    40 % (bad) and 43 to 78 % (good).
    """

    short_lives: float
    """The share of short periods among those with capacity."""
    short_gaps: float
    """The share of short periods among those without capacity."""

    @property
    def up_fraction(self) -> float:
        """The fraction of time in which the zone has capacity."""
        up = self.short_lives * SHORT_LIFE.mean + (1 - self.short_lives) * LONG_LIFE.mean
        down = self.short_gaps * SHORT_GAP.mean + (1 - self.short_gaps) * LONG_GAP.mean
        return up / (up + down)

    def draw_seconds(self, stream: Stream, has_capacity: bool) -> float:
        """Draw the duration of a period with or without capacity."""
        short_share = self.short_lives if has_capacity else self.short_gaps
        short, long = (SHORT_LIFE, LONG_LIFE) if has_capacity else (SHORT_GAP, LONG_GAP)
        return (short if stream.bernoulli(short_share) else long).draw(stream)


@dataclass(frozen=True)
class Climate:
    """The statistics of the traces, from the worst zone to the best."""

    name: str
    description: str
    zones: tuple[ZoneStatistics, ZoneStatistics, ZoneStatistics]
    neglects_old_requests: bool = False
    """True if the cloud neglects waiting requests (see `BimodalPeriods`)."""


CLIMATES = (
    Climate(
        "one node",
        "one node each: up 17-90 %, for 0.3-1.4 h",
        (LognormalPeriods(0.17, 0.3), LognormalPeriods(0.55, 0.8), LognormalPeriods(0.90, 1.4)),
    ),
    Climate(
        "four nodes",
        "four nodes: up 30-79 %, for 0.8-2.6 h",
        (LognormalPeriods(0.30, 0.8), LognormalPeriods(0.55, 1.6), LognormalPeriods(0.79, 2.6)),
    ),
    Climate(
        "bimodal",
        "bimodal: up 22-69 %, for 10-25 min or 4-12 h, then down for minutes or hours",
        (BimodalPeriods(0.9, 0.1), BimodalPeriods(0.6, 0.3), BimodalPeriods(0.4, 0.5)),
        neglects_old_requests=True,
    ),
)


@dataclass(frozen=True)
class Period:
    """A period in which a zone has capacity. Times are seconds since the start."""

    zone: str
    begin: float
    end: float
    notice: float
    """The notice before slices are preempted, which begins at `end`."""


def draw_periods(
    zone: str, zone_statistics: ZoneStatistics, streams: RandomStreams, until: float
) -> tuple[Period, ...]:
    """Draw the periods with capacity that begin before `until`."""
    trace, notices = streams[f"trace {zone}"], streams[f"notice {zone}"]
    periods, begin = [], 0.0
    has_capacity = trace.bernoulli(zone_statistics.up_fraction)
    while begin < until:
        end = begin + zone_statistics.draw_seconds(trace, has_capacity)
        if has_capacity:
            periods.append(Period(zone, begin, end, notices.choice(NOTICES)))
        begin, has_capacity = end, not has_capacity
    return tuple(periods)


def draw_capacity(climate: Climate, seed: int, until: float) -> tuple[Period, ...]:
    """Draw the periods of all zones, with the worst zone at a random position of the list.

    Every random stream depends only on the seed and its name. So the whole trace can be drawn in
    advance, and no random number of the simulation changes.
    """
    streams = RandomStreams(seed)
    climate_indices = list(range(len(ZONES)))
    streams["zones"].shuffle(climate_indices)
    periods = [
        period
        for zone, index in zip(ZONES, climate_indices, strict=True)
        for period in draw_periods(zone, climate.zones[index], streams, until)
    ]
    return tuple(sorted(periods, key=lambda period: period.begin))


# The world ----------------------------------------------------------------------------------------


class SpotMarket:
    """Three zones, the programs of the jobs, and the policy that manages them."""

    def __init__(self, climate: Climate, seed: int, seconds: float, home: Path) -> None:
        """Create the world without running it. `seconds` is its duration."""
        streams = RandomStreams(seed)
        self.loop = SimulatedLoop(streams["order"])
        asyncio.set_event_loop(self.loop)
        self.environment = Environment(self.loop, streams)
        self.start = self.environment.now()
        self.seconds = seconds
        self.cloud = SimulatedCloud(self.environment, ZONES, 0)
        self.cloud.conditions = Conditions(failure_rate=0.002)
        self.server = Server(self.environment, self.cloud, home, SETTINGS)
        self.zones = ZONES  # the user's order, in ignorance of the best zone
        self.periods = draw_capacity(climate, seed, seconds)
        self._neglects_old_requests = climate.neglects_old_requests
        for zone in ZONES:
            periods = [period for period in self.periods if period.zone == zone]
            self.environment.spawn(self._apply_trace(periods))
        self.environment.spawn(self.cloud.live())

    def now(self) -> float:
        """Return the seconds since the start."""
        return self.environment.now() - self.start

    async def sleep_until(self, time: float) -> None:
        """Sleep until a time in seconds since the start."""
        await asyncio.sleep(max(0.0, time - self.now()))

    async def _apply_trace(self, periods: Sequence[Period]) -> None:
        """Give a zone its capacity and take it away, with all of its slices."""
        capacity = self.cloud.fleet.limits.capacity
        for period in periods:
            await self.sleep_until(period.begin)
            capacity[period.zone] = {"v5e": CHIPS * len(JOBS)}
            if self._neglects_old_requests:
                self._neglect_old_requests(period.zone)
            self.cloud.notify()
            await self.sleep_until(period.end)
            capacity[period.zone] = {"v5e": 0}
            for node in self.cloud.ready_nodes(period.zone):
                self.cloud.preempt(node, period.notice)
            self.cloud.notify()

    def _neglect_old_requests(self, zone: str) -> None:
        """Let old requests of a zone wait although it has capacity (see `BimodalPeriods`)."""
        for request in self.cloud.fleet.requests.values():
            neglected_at = request.created + PROMPT_SECONDS
            waits = request.state is RequestState.WAITING and request.spec.zone == zone
            if waits and self.environment.now() > neglected_at:
                request.due_at = max(request.due_at, neglected_at + NEGLECT_SECONDS)

    # The steps of scripts -------------------------------------------------------------------------

    async def request(self, name: str, zone: str, pause: float = POLL_SECONDS) -> None:
        """Request a slice until the request is accepted."""
        placement_request = PlacementRequest(name, zone, KIND, tier="spot")
        while True:
            try:
                await self.cloud.ask(placement_request)
                return
            except CloudError:
                await asyncio.sleep(pause)

    async def release(self, name: str, zone: str) -> None:
        """Delete the slice until it is gone."""
        while await self.find_placement(name, zone) is not None:
            with contextlib.suppress(CloudError):
                await self.cloud.release(zone, name, [name])
            await asyncio.sleep(POLL_SECONDS)

    async def find_placement(self, name: str, zone: str) -> ListedPlacement | None:
        """Return the placement as the cloud lists it, or None."""
        while True:
            try:
                return await self.cloud.find(zone, name)
            except CloudError:
                await asyncio.sleep(POLL_SECONDS)

    async def wait_until_ready(self, name: str, zone: str, until: float = math.inf) -> bool:
        """Return True if the slice is ready by the deadline."""
        while self.environment.now() < until:
            placement = await self.find_placement(name, zone)
            if placement is None or placement.state is PlacementState.LOST:
                return False
            if placement.state is PlacementState.READY:
                return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    def ready_hosts(self, name: str, zone: str) -> list[Host]:
        """Return the hosts of a slice that is READY; empty if it is not."""
        return [
            host
            for node in self.cloud.ready_nodes(zone)
            if node.spec.name.endswith(f"/{name}") and node.state is NodeState.READY
            for host in self.cloud.hosts_of(node)
        ]

    async def start_program(self, job: str, attempt: int, name: str, zone: str) -> None:
        """Start the program once all hosts of a ready slice accept logins, unless it is lost."""
        while not all(host.up for host in self.ready_hosts(name, zone)):
            await asyncio.sleep(LOGIN_SECONDS)
        await asyncio.sleep(SETUP_SECONDS)
        slice_hosts = self.ready_hosts(name, zone)
        for rank, host in enumerate(slice_hosts):
            run = HostRun(host, job, job, attempt, rank, len(slice_hosts))
            host.attempts[job] = run
            host._start(run, {"coordinator": ""})

    async def run_until_lost(self, job: str, attempt: int, name: str, zone: str) -> None:
        """Run the program until the slice is lost, and delete the slice."""
        await self.start_program(job, attempt, name, zone)
        while (
            placement := await self.find_placement(name, zone)
        ) is not None and placement.state is not PlacementState.LOST:
            await asyncio.sleep(POLL_SECONDS)
        await self.release(name, zone)


# Policies -----------------------------------------------------------------------------------------


async def stay_and_wait(market: SpotMarket, job: str) -> None:
    """Stay in the first zone of the user's list."""
    zone, attempt = market.zones[0], 0
    while True:
        attempt += 1
        name = f"dl-{job}-{attempt}"
        await market.request(name, zone)
        if await market.wait_until_ready(name, zone):
            await market.run_until_lost(job, attempt, name, zone)
        else:
            await market.release(name, zone)


async def zone_by_zone(market: SpotMarket, job: str) -> None:
    """Wait ten minutes for each zone in turn, and start again from the first after each loss."""
    attempt = 0
    while True:
        for zone in market.zones:
            attempt += 1
            name = f"dl-{job}-{attempt}"
            await market.request(name, zone)
            if await market.wait_until_ready(name, zone, market.environment.now() + ZONE_SECONDS):
                await market.run_until_lost(job, attempt, name, zone)
                break
            await market.release(name, zone)


async def first_ready(market: SpotMarket, job: str) -> None:
    """Request a slice in every zone at once, keep the first one, and delete the others."""
    attempt = 0
    while True:
        attempt += 1
        names = {zone: f"dl-{job}-{attempt}-{zone}" for zone in market.zones}
        for zone, name in names.items():
            await market.request(name, zone)
        winning_zone = None
        while winning_zone is None:
            for zone, name in names.items():
                placement = await market.find_placement(name, zone)
                if placement is not None and placement.state is PlacementState.READY:
                    winning_zone = winning_zone or zone
                elif placement is None or placement.state is PlacementState.LOST:
                    await market.release(name, zone)
                    await market.request(name, zone)
            await asyncio.sleep(0.0 if winning_zone else POLL_SECONDS)
        releases = [
            market.release(name, zone) for zone, name in names.items() if zone != winning_zone
        ]
        await asyncio.gather(
            market.run_until_lost(job, attempt, names[winning_zone], winning_zone), *releases
        )


async def run_drumline(market: SpotMarket, job: str) -> None:
    """Run the job manager as installed."""
    if not market.server.alive:
        market.server.start()
    spec = {
        "name": f"job-{job}", "accelerator": KIND, "zones": list(market.zones),
        "run": "python train.py", "workdir": None, "checkpoint": "gs://lab/run",
    }  # fmt: skip
    await market.server.call("POST", "/jobs", {"spec": spec, "secrets": {}, "user": "lab"})


PLANNED_START_SECONDS = 180.0
"""The usual seconds from a grant to the first step of the program, by which the oracle plans."""


def expected_useful_seconds(period: Period, begin: float) -> float:
    """Return the expected training in a checkpoint if a slice is granted at `begin`.

    A preemption without notice loses the steps since the last checkpoint. That checkpoint was saved
    at a random time of the last ten minutes, if there was one.
    """
    seconds = max(0.0, period.end - begin - PLANNED_START_SECONDS)
    if period.notice:
        return seconds
    if seconds < SAVE_SECONDS:
        return seconds**2 / (2 * SAVE_SECONDS)
    return seconds - SAVE_SECONDS / 2


def plan_periods(periods: Iterable[Period], until: float) -> list[Period]:
    """Return the sequence of periods with the most useful training until `until`.

    A slice runs from the grant to the end of its period. The next one is granted then, or when its
    own period begins.
    """
    options = [
        Period(period.zone, period.begin, min(period.end, until), period.notice)
        for period in periods
    ]
    best: dict[float, tuple[float, Period | None]] = {}
    """Time of a loss → the most useful seconds from then on, and the next period."""
    for lost_at in sorted({0.0, *(period.end for period in options)}, reverse=True):
        best[lost_at] = (0.0, None)
        for period in options:
            if period.end > lost_at:
                useful = expected_useful_seconds(period, max(lost_at, period.begin))
                useful += best[period.end][0]
                if useful > best[lost_at][0]:
                    best[lost_at] = (useful, period)
    plan = []
    next_period = best[0.0][1]
    while next_period is not None:
        plan.append(next_period)
        next_period = best[next_period.end][1]
    return plan


async def follow_plan(market: SpotMarket, job: str) -> None:
    """Run on the periods of capacity that give the most useful training (the oracle).

    The oracle knows when each zone has capacity, until the end, and whether a
    preemption comes with a notice. It chooses the periods of all its slices in advance, so it waits
    for a long period where a short one would cost more than the wait. Its request is in the queue
    just early enough to be granted when the previous slice is preempted or the capacity returns. So
    it never holds two slices that are READY. It observes within seconds, without polls, that a
    slice is ready and that its hosts accept logins.

    The oracle cannot avoid the time from the grant to READY, hosts that accept logins late, the
    set-up and compilation of the program, calls that fail, and the steps that a preemption without
    notice loses. It does not know how long each slice will boot.

    It is a bound, up to that noise, for all policies that run one slice at a time until the slice
    is preempted. Two slices that boot at once could beat it by choosing the one that boots faster.
    So could a policy that leaves a slice right after its last checkpoint, in favour of a zone with
    capacity. No policy here does that: it has to know when the preemption comes.
    """
    waiting_seconds = market.cloud.fleet.timing.waiting
    for attempt, period in enumerate(plan_periods(market.periods, market.seconds), start=1):
        name, zone = f"dl-{job}-{attempt}", period.zone
        await market.sleep_until(period.begin - waiting_seconds)
        await market.request(name, zone, pause=1.0)
        next_request_at = period.end - waiting_seconds
        while not market.ready_hosts(name, zone) and market.now() < next_request_at:
            await asyncio.sleep(1.0)
        if market.ready_hosts(name, zone):
            await market.start_program(job, attempt, name, zone)
        market.environment.spawn(_release_lost_slice(market, name, period))
        await market.sleep_until(next_request_at)


async def _release_lost_slice(market: SpotMarket, name: str, period: Period) -> None:
    await market.sleep_until(period.end + period.notice)
    await market.release(name, period.zone)


Policy = Callable[[SpotMarket, str], Coroutine[Any, Any, None]]
ORACLE = "oracle"
POLICIES: dict[str, Policy] = {
    "stay and wait": stay_and_wait,
    "zone by zone": zone_by_zone,
    "first that answers": first_ready,
    "drumline": run_drumline,
    ORACLE: follow_plan,
}


# The activity of a job ----------------------------------------------------------------------------

ACTIVITIES = {
    "useful": "training that is in a checkpoint",
    "lost": "steps that were lost with a slice or are in no checkpoint yet",
    "starting": "from READY to the first step: logins, set-up and compilation",
    "booting": "from the grant to READY",
    "no capacity": "no zone has capacity",
    "queued": "a request waits in a zone that has capacity",
    "wrong zone": "requests wait only in zones without capacity, while another one has it",
    "noticing": "from the loss of the program or the slice to the first call that follows",
    "idle": "no request waits, because of a deletion, a backoff or the plan of the oracle",
}
"""The activities of a job. Of several at one time, the first one counts."""
Span = tuple[float, float]


@dataclass
class SliceRecord:
    """The times of one request and its slice. `math.inf` is never."""

    name: str
    zone: str
    requested: float
    granted: float = math.inf
    ready: float = math.inf
    preempted: float = math.inf
    deleted: float = math.inf
    """The time of the first call that deleted it."""

    @property
    def ended(self) -> float:
        """The time when it could be used no longer."""
        return min(self.preempted, self.deleted)


@dataclass
class RunRecord:
    """The times of one attempt of the program."""

    slice_name: str
    host_starts: list[float] = field(default_factory=list)
    ended: float = math.inf

    @property
    def started(self) -> float:
        """The time when all hosts had started it."""
        all_started = len(self.host_starts) == slice_of(KIND).hosts
        return max(self.host_starts) if all_started else math.inf


@dataclass
class JobRecord:
    """The slices and attempts of one job, and the times of its calls to the cloud."""

    slices: list[SliceRecord] = field(default_factory=list)
    runs: dict[int, RunRecord] = field(default_factory=dict)
    calls: list[float] = field(default_factory=list)


def read_trace(
    trace: Iterable[tuple[Any, ...]], ready_times: Iterable[tuple[str, float]]
) -> dict[str, JobRecord]:
    """Return the record of each job from the trace of a simulation.

    `ready_times` are the names of slices and the times when they were ready.
    """
    records = {job: JobRecord() for job in JOBS}
    slices: dict[str, list[SliceRecord]] = {}
    """The slices by name. A script may request the same name again after it was deleted."""
    for at, *event in trace:
        match event:
            case "asked", name, zone:
                record, namesakes = records[_job_of(name)], slices.setdefault(name, [])
                record.calls.append(at)
                if not namesakes or namesakes[-1].ended <= at:
                    namesakes.append(SliceRecord(name, zone, requested=at))
                    record.slices.append(namesakes[-1])
            case "booting", name, _:
                slices[name][-1].granted = at
            case "preempt", name, notice:
                slices[name][-1].preempted = at + notice
            case "released", name:
                records[_job_of(name)].calls.append(at)
                for newest in slices.get(name, [])[-1:]:  # none for a request that was never sent
                    newest.deleted = min(newest.deleted, at)
            case "start", job, attempt, host:
                slice_name = host.rpartition("/")[0]
                run = records[job].runs.setdefault(attempt, RunRecord(slice_name))
                run.host_starts.append(at)
            case (("exit" | "killed"), job, attempt, *_):
                run = records[job].runs[attempt]
                run.ended = min(run.ended, at)
    for name, at in ready_times:
        granted = [record for record in slices[name] if record.granted <= at]
        granted[-1].ready = at
    return records


def _job_of(slice_name: str) -> str:
    return next(job for job in JOBS if job in slice_name.split("-"))


def find_spans(record: JobRecord, periods: Sequence[Period], until: float) -> dict[str, list[Span]]:
    """Return the spans of each activity of a job but "idle". They may overlap.

    Useful and lost steps are "training" together, because the trace has no checkpoints.
    """
    runs = list(record.runs.values())
    first_starts: dict[str, float] = {}
    for run in runs:
        first_starts.setdefault(run.slice_name, run.started)
    waits = [(s.zone, s.requested, min(s.granted, s.ended)) for s in record.slices]
    losses = [run.ended for run in runs]
    losses += [s.preempted for s in record.slices if s.preempted < s.deleted]
    return {
        "training": [(run.started + COMPILE_SECONDS, run.ended) for run in runs],
        "starting": [
            *((run.started, run.started + COMPILE_SECONDS) for run in runs),
            *((s.ready, min(s.ended, first_starts.get(s.name, math.inf))) for s in record.slices),
        ],
        "booting": [(s.granted, min(s.ready, s.ended)) for s in record.slices],
        "no capacity": _spans_without_capacity(periods, until),
        "queued": [
            (max(begin, period.begin), min(end, period.end))
            for zone, begin, end in waits
            for period in periods
            if period.zone == zone
        ],
        "wrong zone": [(begin, end) for _, begin, end in waits],
        "noticing": [
            (loss, min((call for call in record.calls if call > loss), default=until))
            for loss in losses
        ],
    }


def _spans_without_capacity(periods: Sequence[Period], until: float) -> list[Span]:
    """Return the spans in which no zone has capacity. `periods` are in the order of their begin."""
    spans, capacity_until = [], 0.0
    for period in periods:
        if period.begin > capacity_until:
            spans.append((capacity_until, period.begin))
        capacity_until = max(capacity_until, period.end)
    return [*spans, (capacity_until, until)]


def divide_time(spans: Mapping[str, Iterable[Span]], until: float) -> dict[str, float]:
    """Return the seconds of each activity, and "idle" for the rest of the time until `until`.

    Of several activities at one time, the first one in `spans` counts.
    """
    changes = [(0.0, "idle", 1), (until, "idle", -1)]
    for activity, activity_spans in spans.items():
        for begin, end in activity_spans:
            if begin < min(end, until):
                changes += [(begin, activity, 1), (min(end, until), activity, -1)]
    changes.sort(key=lambda change: change[0])
    active: Counter[str] = Counter()
    seconds = dict.fromkeys([*spans, "idle"], 0.0)
    for (begin, activity, difference), (end, *_) in pairwise(changes):
        active[activity] += difference
        current = next((name for name in spans if active[name]), "idle")
        seconds[current] += end - begin
    return seconds


# Measurements -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One world under one policy."""

    climate: Climate
    policy: str
    seed: int
    days: float


@dataclass(frozen=True)
class Figures:
    """The figures of one case, all jobs together."""

    useful_hours: float
    """The hours of training that are in a checkpoint."""
    paid_hours: float
    """The hours of a slice."""
    dollars: float
    losses: int
    activity_hours: Mapping[str, float]
    """The hours of each activity (see `ACTIVITIES`)."""


def use_real_intervals() -> None:
    """Replace the intervals and limits of the simulation by the real ones."""
    hosts.BEAT, programs.BEAT = 30.0, 60.0
    server.WATCH_SILENCE = 180.0
    server.REQUESTS_PER_MINUTE = 30.0
    # Programs save in the background under every policy, and no program writes after its end.
    programs.WRITING = programs.LATE = 0.0


def measure(case: Case) -> Figures:
    """Run a world for some days and return its figures."""
    use_real_intervals()
    seconds = case.days * DAY
    home = Path(tempfile.mkdtemp(prefix="drumline-goodput-"))
    market = SpotMarket(case.climate, case.seed, seconds, home)
    environment = market.environment
    for job in JOBS:
        environment.plans[job] = PROGRAM

    async def run_jobs() -> None:
        for job in JOBS:
            environment.spawn(POLICIES[case.policy](market, job))
        await asyncio.sleep(seconds)

    try:
        with isolate(environment, market.server):
            market.loop.run_until_complete(run_jobs())
            market.server.kill()
    except RuntimeError:
        if not environment.violations:  # a violated invariant stops the loop
            raise
    finally:
        shutil.rmtree(home)
    if environment.violations:
        raise RuntimeError(environment.violations[0])
    paid_hours, dollars = 0.0, 0.0
    for bill in market.cloud.billed_slices:
        hours = bill.seconds(market.start + seconds) / HOUR
        rate = price(bill.node.spec.slice, bill.node.spec.zone, "spot")
        paid_hours += hours
        dollars += hours * CHIPS * (rate.per_chip_hour if rate else math.nan)
    useful_seconds = sum(
        environment.buckets[job].useful_seconds for job in JOBS if job in environment.buckets
    )
    return Figures(
        useful_hours=useful_seconds / HOUR,
        paid_hours=paid_hours,
        dollars=dollars,
        losses=len(environment.interrupted_slices),
        activity_hours=_activity_hours(market, useful_seconds),
    )


def _activity_hours(market: SpotMarket, useful_seconds: float) -> dict[str, float]:
    """Return the hours of each activity, all jobs together."""
    ready_times = [
        (bill.node.spec.name.rpartition("/")[2], bill.began_at - market.start)
        for bill in market.cloud.billed_slices
    ]
    divided = [
        divide_time(find_spans(record, market.periods, market.seconds), market.seconds)
        for record in read_trace(market.environment.trace, ready_times).values()
    ]
    seconds = {activity: sum(job[activity] for job in divided) for activity in divided[0]}
    seconds["useful"] = useful_seconds
    seconds["lost"] = seconds["training"] - useful_seconds
    return {activity: seconds[activity] / HOUR for activity in ACTIVITIES}


@dataclass(frozen=True)
class Row:
    """A row of the table: one policy in the worlds of one climate. All times are per hour."""

    world: str
    policy: str
    useful: float
    useful_error: float
    """The standard error of `useful`, which is a mean over the worlds."""
    of_oracle: float | None
    """`useful` as a share of the oracle's; None if the oracle has no useful time."""
    paid: float
    dollars_per_useful_hour: float | None
    """None without a useful hour."""
    lost_per_day: float
    useful_by_world: Sequence[float]
    """`useful` of each world, in the order of the seeds."""
    activities: Mapping[str, float]
    """The share of each activity (see `ACTIVITIES`)."""


def summarize(climate: Climate, results: Mapping[str, Sequence[Figures]], days: float) -> list[Row]:
    """Return the rows of a climate from the figures of each policy in each of its worlds."""
    job_hours = days * 24 * len(JOBS)
    useful = {
        policy: [figures.useful_hours / job_hours for figures in worlds]
        for policy, worlds in results.items()
    }
    oracle = statistics.fmean(useful[ORACLE])
    rows = []
    for policy, worlds in results.items():
        shares, hours = useful[policy], job_hours * len(worlds)
        mean = statistics.fmean(shares)
        error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0
        dollars = sum(figures.dollars for figures in worlds)
        activities = {
            activity: sum(figures.activity_hours[activity] for figures in worlds) / hours
            for activity in ACTIVITIES
        }
        rows.append(
            Row(
                world=climate.name,
                policy=policy,
                useful=mean,
                useful_error=error,
                of_oracle=mean / oracle if oracle else None,
                paid=sum(figures.paid_hours for figures in worlds) / hours,
                dollars_per_useful_hour=dollars / (mean * hours) if mean else None,
                lost_per_day=sum(figures.losses for figures in worlds) / hours * 24,
                useful_by_world=shares,
                activities=activities,
            )
        )
    return rows


# The command --------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser that reports a bad argument in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _integer_from(lowest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if int(text) >= lowest:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {lowest}")

    return parse


def _positive_number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def format_table(rows: Iterable[Row]) -> str:
    """Format the rows of one climate."""
    lines = [f"{'policy':20}    useful h/h  of oracle  paid h/h  $/useful h  lost/day"]
    for row in rows:
        of_oracle = "-" if row.of_oracle is None else f"{100 * row.of_oracle:.1f} %"
        cost = row.dollars_per_useful_hour
        lines.append(
            f"{row.policy:20} {row.useful:.3f} ± {row.useful_error:.3f} {of_oracle:>10}"
            f" {row.paid:9.3f} {'-' if cost is None else f'{cost:.2f}':>11}"
            f" {row.lost_per_day:9.1f}"
        )
    return "\n".join(lines)


def format_activities(rows: Iterable[Row]) -> str:
    """Format the share of each activity, in percent of the time."""
    lines = [f"{'% of the time':20}" + "".join(f"{activity:>13}" for activity in ACTIVITIES)]
    lines += [
        f"{row.policy:20}" + "".join(f"{100 * share:13.2f}" for share in row.activities.values())
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the table of every climate and policy."""
    options = _Parser(prog="benchmarks/goodput.py", allow_abbrev=False)
    options.add_argument("--worlds", type=_integer_from(1), default=10)
    options.add_argument("--days", type=_positive_number, default=3.0)
    options.add_argument("--seed", type=_integer_from(0), default=1, help="seed of the first world")
    options.add_argument("--why", action="store_true", help="print the activity of the jobs too")
    options.add_argument("--json", action="store_true", help="print a list of rows")
    options.add_argument("--workers", type=_integer_from(1), default=2, help="number of processes")
    arguments = options.parse_args()
    fix_hash_seed()
    seeds = range(arguments.seed, arguments.seed + arguments.worlds)
    cases = [
        Case(climate, policy, seed, arguments.days)
        for climate in CLIMATES
        for policy in POLICIES
        for seed in seeds
    ]
    results = dict(run_all(measure, cases, arguments.workers))
    tables = {
        climate: summarize(
            climate,
            {
                policy: [results[Case(climate, policy, seed, arguments.days)] for seed in seeds]
                for policy in POLICIES
            },
            arguments.days,
        )
        for climate in CLIMATES
    }
    if arguments.json:
        print(json.dumps([asdict(row) for rows in tables.values() for row in rows], indent=2))
        return
    for climate, rows in tables.items():
        print(
            f"\n{climate.description} · {arguments.worlds} worlds of {arguments.days:g} days,"
            f" {len(JOBS)} jobs on {KIND} each\n\n{format_table(rows)}"
        )
        if arguments.why:
            print(f"\n{format_activities(rows)}")
    if arguments.why:
        print("\n" + "\n".join(f"{name}: {text}" for name, text in ACTIVITIES.items()))


if __name__ == "__main__":
    main()
