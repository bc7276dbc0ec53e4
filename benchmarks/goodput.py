"""Compare the goodput of the job manager with three simpler policies on changing spot capacity.

    .venv/bin/python benchmarks/goodput.py [--days 3] [--worlds 4]

Two endless jobs run for days of virtual time in the simulation of `make simulate`. Three zones have
random capacity traces: each zone has capacity or none for random durations, and a zone that loses
its capacity preempts all of its slices. No public trace of TPU capacity is known to the authors.
The traces are drawn from the statistics of SkyPilot's public traces of spot GPUs
(github.com/skypilot-org/spot-traces): the fraction of time in which a zone has capacity, and the
median length of such a period. In each world all policies run with the same traces, zones and
programs.

"Useful" is training time that is in a checkpoint. "Paid" is the time of a slice from READY to its
deletion. The share of useful hours is printed with the standard error of its mean over the worlds.
Policies that differ by less than that cannot be ranked.
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

sys.path.append(str(Path(__file__).parents[1]))  # the simulation is in the tests

from tests.simulation import hosts, programs, server
from tests.simulation.cloud import Conditions, SimulatedCloud
from tests.simulation.environment import Environment, RandomStreams, Stream
from tests.simulation.hosts import Host, HostRun
from tests.simulation.loop import SimulatedLoop
from tests.simulation.programs import Plan
from tests.simulation.runs import fix_hash_seed, run_all
from tests.simulation.server import Server, isolate

from drumline.chips import price
from drumline.cloud.model.resources import NodeState
from drumline.cloud.protocol import CloudError, PlacementRequest
from drumline.observed import ListedPlacement, PlacementState

HOUR, DAY = 3600.0, 86400.0
ZONES = ("us-central1-a", "us-west4-a", "europe-west4-b")
KIND, CHIPS = "v5litepod-16", 16
JOBS = ("000001", "000002")
PROGRAM = Plan(steps=1 << 20, seconds=30.0, save_every=20, on_sigterm="leaves")
"""The program saves a checkpoint every ten minutes, and one on SIGTERM."""
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
SETTINGS = f"""
cloud: google
project: lab-tpu-1
zones: [{", ".join(ZONES)}]
look_seconds: {POLL_SECONDS:.0f}
"""


@dataclass(frozen=True)
class Climate:
    """The statistics of the traces, from the worst zone to the best."""

    name: str
    up_fraction: tuple[float, float, float]
    """The fraction of time in which a zone has capacity."""
    hours: tuple[float, float, float]
    """The median length of a period with capacity, in hours."""


CLIMATES = (
    Climate("one node each: up 17-90 %, for 0.3-1.4 h", (0.17, 0.55, 0.90), (0.3, 0.8, 1.4)),
    Climate("four nodes: up 30-79 %, for 0.8-2.6 h", (0.30, 0.55, 0.79), (0.8, 1.6, 2.6)),
)


def trace(stream: Stream, up_fraction: float, hours: float) -> Iterator[tuple[bool, float]]:
    """Yield endless periods: True if the zone has capacity, and the duration in seconds."""
    sigma = 1.0
    mean_up = hours * HOUR * math.exp(sigma**2 / 2)
    mean_down = mean_up * (1 - up_fraction) / up_fraction
    has_capacity = stream.bernoulli(up_fraction)
    while True:
        mean_seconds = mean_up if has_capacity else mean_down
        yield has_capacity, mean_seconds * stream.lognormvariate(-(sigma**2) / 2, sigma)
        has_capacity = not has_capacity


class SpotWorld:
    """Three zones, the programs of the jobs, and the policy that manages them."""

    def __init__(self, seed: int, climate: Climate, home: Path) -> None:
        """Create the world without running it."""
        streams = RandomStreams(seed)
        self.loop = SimulatedLoop(streams["order"])
        asyncio.set_event_loop(self.loop)
        self.environment = Environment(self.loop, streams)
        self.cloud = SimulatedCloud(self.environment, ZONES, 0)
        self.cloud.conditions = Conditions(failure_rate=0.002)
        self.server = Server(self.environment, self.cloud, home, SETTINGS)
        climate_indices = list(range(3))
        streams["zones"].shuffle(climate_indices)
        self.zones = ZONES  # the user's order, in ignorance of the best zone
        for zone, climate_index in zip(ZONES, climate_indices, strict=True):
            weather = trace(
                streams[f"trace {zone}"],
                climate.up_fraction[climate_index],
                climate.hours[climate_index],
            )
            self.environment.spawn(self._apply_trace(zone, weather))
        self.environment.spawn(self.cloud.live())

    async def _apply_trace(self, zone: str, periods: Iterator[tuple[bool, float]]) -> None:
        stream = self.environment.streams[f"notice {zone}"]
        for has_capacity, seconds in periods:
            self.cloud.fleet.limits.capacity[zone] = {
                "v5e": CHIPS * len(JOBS) if has_capacity else 0
            }
            if not has_capacity:
                for node in self.cloud.ready_nodes(zone):
                    self.cloud.preempt(node, stream.choice((0.0, 30.0)))
            self.cloud.notify()
            await asyncio.sleep(seconds)

    # The steps of scripts -------------------------------------------------------------------------

    async def request(self, name: str, zone: str) -> None:
        """Request a slice until the request is accepted."""
        placement_request = PlacementRequest(
            name, zone, KIND, "", tier="spot", labels={}, metadata={}
        )
        while True:
            try:
                await self.cloud.ask(placement_request)
                return
            except CloudError:
                await asyncio.sleep(POLL_SECONDS)

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


async def stay_and_wait(world: SpotWorld, job: str) -> None:
    """Stay in the first zone of the user's list."""
    zone, attempt = world.zones[0], 0
    while True:
        attempt += 1
        name = f"dl-{job}-{attempt}"
        await world.request(name, zone)
        if await world.wait_until_ready(name, zone):
            await world.run_until_lost(job, attempt, name, zone)
        else:
            await world.release(name, zone)


async def zone_by_zone(world: SpotWorld, job: str) -> None:
    """Wait ten minutes for each zone in turn, and start again from the first after each loss."""
    attempt = 0
    while True:
        for zone in world.zones:
            attempt += 1
            name = f"dl-{job}-{attempt}"
            await world.request(name, zone)
            if await world.wait_until_ready(name, zone, world.environment.now() + ZONE_SECONDS):
                await world.run_until_lost(job, attempt, name, zone)
                break
            await world.release(name, zone)


async def first_ready(world: SpotWorld, job: str) -> None:
    """Request a slice in every zone at once, keep the first one, and delete the others."""
    attempt = 0
    while True:
        attempt += 1
        names = {zone: f"dl-{job}-{attempt}-{zone}" for zone in world.zones}
        for zone, name in names.items():
            await world.request(name, zone)
        winning_zone = None
        while winning_zone is None:
            for zone, name in names.items():
                placement = await world.find_placement(name, zone)
                if placement is not None and placement.state is PlacementState.READY:
                    winning_zone = winning_zone or zone
                elif placement is None or placement.state is PlacementState.LOST:
                    await world.release(name, zone)
                    await world.request(name, zone)
            await asyncio.sleep(0.0 if winning_zone else POLL_SECONDS)
        releases = [
            world.release(name, zone) for zone, name in names.items() if zone != winning_zone
        ]
        await asyncio.gather(
            world.run_until_lost(job, attempt, names[winning_zone], winning_zone), *releases
        )


async def run_drumline(world: SpotWorld, job: str) -> None:
    """Run the job manager as installed."""
    if not world.server.alive:
        world.server.start()
    spec = {
        "name": f"job-{job}", "accelerator": KIND, "zones": list(world.zones),
        "run": "python train.py", "workdir": None, "checkpoint": "gs://lab/run",
    }  # fmt: skip
    await world.server.call("POST", "/jobs", {"spec": spec, "secrets": {}, "user": "lab"})


Policy = Callable[[SpotWorld, str], Coroutine[Any, Any, None]]
POLICIES: dict[str, Policy] = {
    "stay and wait": stay_and_wait,
    "zone by zone": zone_by_zone,
    "first that answers": first_ready,
    "drumline": run_drumline,
}


@dataclass(frozen=True)
class Figures:
    """The figures of one world under one policy, all jobs together."""

    climate: int
    policy: str
    useful: float
    """The hours of training that are in a checkpoint."""
    paid_hours: float
    """The hours of a slice."""
    dollars: float
    losses: int


def use_real_intervals() -> None:
    """Replace the intervals and limits of the simulation by the real ones."""
    hosts.BEAT, programs.BEAT = 30.0, 60.0
    server.WATCH_SILENCE = 180.0
    server.REQUESTS_PER_MINUTE = 30.0
    # Programs save in the background under every policy, and no program writes after its end.
    programs.WRITING = programs.LATE = 0.0


def measure(case: tuple[int, str, int, float]) -> Figures:
    """Run a world for some days and return its figures."""
    climate, policy, seed, days = case
    use_real_intervals()
    home = Path(tempfile.mkdtemp(prefix="drumline-goodput-"))
    world = SpotWorld(seed, CLIMATES[climate], home)
    environment = world.environment
    for job in JOBS:
        environment.plans[job] = PROGRAM
    start = environment.now()

    async def run_jobs() -> None:
        for job in JOBS:
            environment.spawn(POLICIES[policy](world, job))
        await asyncio.sleep(days * DAY)

    try:
        with isolate(environment, world.server):
            world.loop.run_until_complete(run_jobs())
            world.server.kill()
    except RuntimeError:
        if not environment.violations:  # a violated invariant stops the loop
            raise
    finally:
        shutil.rmtree(home)
    if environment.violations:
        raise RuntimeError(environment.violations[0])
    useful_seconds = [
        environment.buckets[job].useful_seconds for job in JOBS if job in environment.buckets
    ]
    paid_hours, dollars = 0.0, 0.0
    for bill in world.cloud.billed_slices:
        hours = bill.seconds(start + days * DAY) / HOUR
        rate = price(bill.node.spec.slice, bill.node.spec.zone, "spot")
        paid_hours += hours
        dollars += hours * CHIPS * (rate.per_chip_hour if rate else math.nan)
    return Figures(
        climate,
        policy,
        sum(useful_seconds) / HOUR,
        paid_hours,
        dollars,
        len(environment.interrupted_slices),
    )


def main() -> None:
    """Print the table of every climate and policy."""
    options = argparse.ArgumentParser(prog="benchmarks/goodput.py")
    options.add_argument("--days", type=float, default=3.0)
    options.add_argument("--worlds", type=int, default=4)
    options.add_argument("--workers", type=int, default=2)
    arguments = options.parse_args()
    fix_hash_seed()
    cases = [
        (climate, policy, seed, arguments.days)
        for climate in range(len(CLIMATES))
        for policy in POLICIES
        for seed in range(1, arguments.worlds + 1)
    ]
    results = [figures for _, figures in run_all(measure, cases, arguments.workers)]
    days = arguments.worlds * arguments.days * len(JOBS)
    for climate_index, climate in enumerate(CLIMATES):
        setting = (
            f"{arguments.worlds} worlds of {arguments.days:g} days, {len(JOBS)} jobs on {KIND} each"
        )
        print(f"\n{climate.name} · {setting}\n")
        print(f"{'policy':20}    useful h/h  paid h/h  $/useful h  lost/day")
        for policy in POLICIES:
            rows = [f for f in results if (f.climate, f.policy) == (climate_index, policy)]
            shares = [row.useful / arguments.days / len(JOBS) / 24 for row in rows]
            error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0
            useful, paid_hours, dollars, losses = (
                sum(getattr(row, column) for row in rows)
                for column in ("useful", "paid_hours", "dollars", "losses")
            )
            print(
                f"{policy:20} {useful / days / 24:.3f} ± {error:.3f} {paid_hours / days / 24:9.3f}"
                f" {dollars / useful if useful else math.inf:11.2f} {losses / days:9.1f}"
            )


if __name__ == "__main__":
    main()
