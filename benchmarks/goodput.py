"""Goodput on spot capacity that comes and goes: our job manager against three simpler policies.

    .venv/bin/python benchmarks/goodput.py [--days 3] [--worlds 4]

Two jobs that never end run for days of virtual time, in the simulation that `make simulate` uses,
in three zones whose capacity follows a drawn trace: up and down for random times, and whoever has a
slice in a zone that goes down loses it with all others there. No public trace of TPU capacity is
known to us. The traces are drawn from the statistics of SkyPilot's public traces of spot GPUs
(github.com/skypilot-org/spot-traces): how much of the time a zone is up, and the median length of
such a time. In each world all policies meet the same traces, zones and programs.

Useful is a second of training that is in a checkpoint. Paid is a slice from READY to gone. Beside
each share of useful hours stands the standard error of its mean over the worlds; policies that lie
closer together than that cannot be told apart.
"""

import argparse
import asyncio
import contextlib
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the simulation lives with the tests

from tests.simulation import hosts, programs
from tests.simulation.cloud import Conditions, SimulatedCloud
from tests.simulation.environment import Environment, RandomStreams, Stream
from tests.simulation.hosts import HostRun
from tests.simulation.loop import SimulatedLoop
from tests.simulation.programs import Plan
from tests.simulation.runs import fix_hash_seed, run_all
from tests.simulation.server import Server, isolate

from drumline.chips import price
from drumline.cloud.protocol import CloudError, PlacementRequest
from drumline.observed import ListedPlacement, PlacementState

HOUR, DAY = 3600.0, 86400.0
ZONES = ("us-central1-a", "us-west4-a", "europe-west4-b")
KIND, CHIPS = "v5litepod-16", 16
JOBS = ("000001", "000002")
PROGRAM = Plan(steps=1 << 20, seconds=30.0, save_every=20, on_sigterm="leaves")
"""A checkpoint every ten minutes, and one on SIGTERM."""
SETUP = 15.0
"""Seconds that a script takes from READY to the start of the program."""
LOOK = 60.0
"""Seconds between two looks at the cloud; ours looks sooner when its hosts tell of trouble."""
TRY = 600.0
"""Seconds that "zone by zone" waits for a zone."""
SETTINGS = f"""
cloud: google
project: lab-tpu-1
zones: [{", ".join(ZONES)}]
look_seconds: {LOOK:.0f}
"""


@dataclass(frozen=True)
class Climate:
    """What the traces are like, from the worst zone to the best."""

    name: str
    up: tuple[float, float, float]
    """The share of time in which a zone has capacity."""
    hours: tuple[float, float, float]
    """The median length of such a time."""


CLIMATES = (
    Climate("one node each: up 17-90 %, for 0.3-1.4 h", (0.17, 0.55, 0.90), (0.3, 0.8, 1.4)),
    Climate("four nodes: up 30-79 %, for 0.8-2.6 h", (0.30, 0.55, 0.79), (0.8, 1.6, 2.6)),
)


def trace(stream: Stream, up: float, hours: float) -> Iterator[tuple[bool, float]]:
    """For ever: whether the zone has capacity, and for how many seconds."""
    spread = 1.0
    usual_up = hours * HOUR * math.exp(spread**2 / 2)
    usual_down = usual_up * (1 - up) / up
    now_up = stream.bernoulli(up)
    while True:
        mean = usual_up if now_up else usual_down
        yield now_up, mean * stream.lognormvariate(-(spread**2) / 2, spread)
        now_up = not now_up


class World:
    """Three zones, the jobs' programs, and whoever looks after them."""

    def __init__(self, seed: int, climate: Climate, home: Path) -> None:
        """Nothing runs yet."""
        streams = RandomStreams(seed)
        self.loop = SimulatedLoop(streams["order"])
        asyncio.set_event_loop(self.loop)
        self.environment = Environment(self.loop, streams)
        self.cloud = SimulatedCloud(self.environment, ZONES, 0)
        self.cloud.conditions = Conditions(failure_rate=0.002)
        self.server = Server(self.environment, self.cloud, home, SETTINGS)
        places = list(range(3))
        streams["zones"].shuffle(places)
        self.zones = ZONES  # in this order a user wrote them down, not knowing which is best
        for zone, place in zip(ZONES, places, strict=True):
            weather = trace(streams[f"trace {zone}"], climate.up[place], climate.hours[place])
            self.environment.spawn(self._weather(zone, weather))
        self.environment.spawn(self.cloud.live())

    async def _weather(self, zone: str, times: Iterator[tuple[bool, float]]) -> None:
        stream = self.environment.streams[f"notice {zone}"]
        for up, seconds in times:
            self.cloud.fleet.limits.capacity[zone] = {"v5e": CHIPS * len(JOBS) if up else 0}
            if not up:
                for node in self.cloud.ready_nodes(zone):
                    self.cloud.preempt(node, stream.choice((0.0, 30.0)))
            self.cloud.notify()
            await asyncio.sleep(seconds)

    # What scripts do -----------------------------------------------------------------------------

    async def ask(self, name: str, zone: str) -> None:
        """Ask until it is taken."""
        wanted = PlacementRequest(name, zone, KIND, "", tier="spot", labels={}, metadata={})
        while True:
            try:
                await self.cloud.ask(wanted)
                return
            except CloudError:
                await asyncio.sleep(LOOK)

    async def release(self, name: str, zone: str) -> None:
        """Delete until it is gone."""
        while await self.seen(name, zone) is not None:
            with contextlib.suppress(CloudError):
                await self.cloud.release(zone, name, [name])
            await asyncio.sleep(LOOK)

    async def seen(self, name: str, zone: str) -> ListedPlacement | None:
        """What the cloud says of it."""
        while True:
            try:
                return await self.cloud.find(zone, name)
            except CloudError:
                await asyncio.sleep(LOOK)

    async def ready(self, name: str, zone: str, until: float = math.inf) -> bool:
        """Whether it is ready by that time."""
        while self.environment.now() < until:
            found = await self.seen(name, zone)
            if found is None or found.state is PlacementState.LOST:
                return False
            if found.state is PlacementState.READY:
                return True
            await asyncio.sleep(LOOK)
        return False

    async def use(self, job: str, attempt: int, name: str, zone: str) -> None:
        """Run the program until the slice is lost, and put the slice away."""
        await asyncio.sleep(SETUP)
        nodes = [n for n in self.cloud.ready_nodes(zone) if n.spec.name.endswith(f"/{name}")]
        hosts = [host for node in nodes for host in self.cloud.hosts_of(node)]
        for rank, host in enumerate(hosts):
            kept = HostRun(host, job, job, attempt, rank, len(hosts))
            host.attempts[job] = kept
            host._start(kept, {"coordinator": ""})
        while (
            found := await self.seen(name, zone)
        ) is not None and found.state is not PlacementState.LOST:
            await asyncio.sleep(LOOK)
        await self.release(name, zone)


async def stay_and_wait(world: World, job: str) -> None:
    """One zone, the first on the user's list, for ever."""
    zone, attempt = world.zones[0], 0
    while True:
        attempt += 1
        name = f"dl-{job}-{attempt}"
        await world.ask(name, zone)
        if await world.ready(name, zone):
            await world.use(job, attempt, name, zone)
        else:
            await world.release(name, zone)


async def zone_by_zone(world: World, job: str) -> None:
    """Ten minutes for each zone in turn, from the first again after each loss."""
    attempt = 0
    while True:
        for zone in world.zones:
            attempt += 1
            name = f"dl-{job}-{attempt}"
            await world.ask(name, zone)
            if await world.ready(name, zone, world.environment.now() + TRY):
                await world.use(job, attempt, name, zone)
                break
            await world.release(name, zone)


async def first_that_answers(world: World, job: str) -> None:
    """Ask everywhere at once, keep the first that comes, and put the others away."""
    attempt = 0
    while True:
        attempt += 1
        names = {zone: f"dl-{job}-{attempt}-{zone}" for zone in world.zones}
        for zone, name in names.items():
            await world.ask(name, zone)
        won = None
        while won is None:
            for zone, name in names.items():
                found = await world.seen(name, zone)
                if found is not None and found.state is PlacementState.READY:
                    won = won or zone
                elif found is None or found.state is PlacementState.LOST:
                    await world.release(name, zone)
                    await world.ask(name, zone)
            await asyncio.sleep(0.0 if won else LOOK)
        others = [world.release(name, zone) for zone, name in names.items() if zone != won]
        await asyncio.gather(world.use(job, attempt, names[won], won), *others)


async def ours(world: World, job: str) -> None:
    """The job manager as it is installed."""
    if not world.server.alive:
        world.server.start()
    spec = {
        "name": f"job-{job}", "accelerator": KIND, "zones": list(world.zones),
        "run": "python train.py", "workdir": None, "checkpoint": "gs://lab/run",
    }  # fmt: skip
    await world.server.call("POST", "/jobs", {"spec": spec, "secrets": {}, "user": "lab"})


Policy = Callable[[World, str], Coroutine[Any, Any, None]]
POLICIES: dict[str, Policy] = {
    "stay and wait": stay_and_wait,
    "zone by zone": zone_by_zone,
    "first that answers": first_that_answers,
    "drumline": ours,
}


@dataclass(frozen=True)
class Figures:
    """Of one world under one policy, all jobs together."""

    climate: int
    policy: str
    useful: float
    """Hours of training that are in a checkpoint."""
    paid: float
    """Hours of a slice."""
    dollars: float
    losses: int


def at_full_pace() -> None:
    """Hosts and programs say as often as real ones that they live; the simulation spares that."""
    hosts.BEAT, programs.BEAT = 30.0, 60.0
    # Every policy's programs save in the background, and none writes on after its end.
    programs.WRITING = programs.LATE = 0.0


def measure(case: tuple[int, str, int, float]) -> Figures:
    """Let a world be for some days."""
    climate, policy, seed, days = case
    at_full_pace()
    home = Path(tempfile.mkdtemp(prefix="drumline-goodput-"))
    world = World(seed, CLIMATES[climate], home)
    environment = world.environment
    for job in JOBS:
        environment.plans[job] = PROGRAM
    begin = environment.now()

    async def live() -> None:
        for job in JOBS:
            environment.spawn(POLICIES[policy](world, job))
        await asyncio.sleep(days * DAY)

    try:
        with isolate(environment, world.server):
            world.loop.run_until_complete(live())
            world.server.kill()
    except RuntimeError:
        if not environment.violations:  # otherwise the loop was stopped for that
            raise
    finally:
        shutil.rmtree(home)
    if environment.violations:
        raise RuntimeError(environment.violations[0])
    saved = [environment.buckets[job].useful_seconds for job in JOBS if job in environment.buckets]
    paid, dollars = 0.0, 0.0
    for billed in world.cloud.billed_slices:
        spent = billed.seconds(begin + days * DAY) / HOUR
        rate = price(billed.node.spec.slice, billed.node.spec.zone, "spot")
        paid += spent
        dollars += spent * CHIPS * (rate.per_chip_hour if rate else math.nan)
    return Figures(
        climate, policy, sum(saved) / HOUR, paid, dollars, len(environment.interrupted_slices)
    )


def main() -> None:
    """Both climates, all policies."""
    options = argparse.ArgumentParser(prog="benchmarks/goodput.py")
    options.add_argument("--days", type=float, default=3.0)
    options.add_argument("--worlds", type=int, default=4)
    options.add_argument("--workers", type=int, default=2)
    asked = options.parse_args()
    fix_hash_seed()
    cases = [
        (climate, policy, seed, asked.days)
        for climate in range(len(CLIMATES))
        for policy in POLICIES
        for seed in range(1, asked.worlds + 1)
    ]
    found = [figures for _, figures in run_all(measure, cases, asked.workers)]
    days = asked.worlds * asked.days * len(JOBS)
    for number, climate in enumerate(CLIMATES):
        size = f"{asked.worlds} worlds of {asked.days:g} days, {len(JOBS)} jobs on {KIND} each"
        print(f"\n{climate.name} · {size}\n")
        print(f"{'policy':20}    useful h/h  paid h/h  $/useful h  lost/day")
        for policy in POLICIES:
            rows = [f for f in found if (f.climate, f.policy) == (number, policy)]
            shares = [row.useful / asked.days / len(JOBS) / 24 for row in rows]
            error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0
            useful, paid, dollars, losses = (
                sum(getattr(row, what) for row in rows)
                for what in ("useful", "paid", "dollars", "losses")
            )
            print(
                f"{policy:20} {useful / days / 24:.3f} ± {error:.3f} {paid / days / 24:9.3f}"
                f" {dollars / useful if useful else math.inf:11.2f} {losses / days:9.1f}"
            )


if __name__ == "__main__":
    main()
