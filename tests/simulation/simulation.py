"""One schedule from its first job to the morning after, with the promises checked on the way."""

import asyncio
import hashlib
import math
import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from drumline.cloud.google.errors import RULES, classify
from drumline.cloud.model.errors import RpcStatus
from drumline.jobs.core.refusals import RefusalAction, action_for
from tests.simulation.cloud import SimulatedCloud, Weather
from tests.simulation.environment import Environment, RandomStreams
from tests.simulation.invariants import Invariants
from tests.simulation.loop import Deadlock, SimulatedLoop, Spinning
from tests.simulation.schedule import HOUR, ZONES, Incident, JobPlan, Schedule
from tests.simulation.server import INSUFFICIENT_STORAGE, Refused, Server, ServerKilled, isolate

SETTINGS = f"""
cloud: google
project: lab-tpu-1
zones: [{", ".join(ZONES)}]
look_seconds: 1200
patience:
  {{waiting: 4000, silence: 1200, bad_silence: 3600, first_contact: 3600, booting: 3600,
    deleting: 3600}}
"""
CHIPS = 48
"""In each zone: three of the largest jobs, so that they compete."""
DAY = 24 * HOUR
MORNING = 12 * HOUR
"""After the faults stop, every job ends within this."""
TIDY = 3 * HOUR
"""After the last job ended, nothing of ours is left within this: a kept slice stays an hour."""
SHM = Path("/dev/shm")  # noqa: S108, a file system in memory
TEXTS = tuple(
    rule.example
    for rule in RULES
    if action_for(classify(8, rule.example)) is not RefusalAction.GIVE_UP
)
"""Texts of failed requests after which a job continues."""


@dataclass(frozen=True)
class Outcome:
    """How a schedule went."""

    seed: int
    broken: tuple[str, ...]
    story: tuple[str, ...]
    fingerprint: str
    """Of everything that happened: the same for the same schedule."""
    seconds: float
    """Of virtual time."""
    steps: int
    lives: int


class Simulation:
    """The world of one schedule."""

    def __init__(self, schedule: Schedule, loop: SimulatedLoop, home: Path) -> None:
        """Everything in its place, and nothing begun."""
        self.schedule = schedule
        self.environment = Environment(loop, RandomStreams(schedule.seed))
        self.cloud = SimulatedCloud(self.environment, ZONES, CHIPS)
        self.servers = [Server(self.environment, self.cloud, home, SETTINGS)]
        if any(job.home for job in schedule.jobs):
            (home / "second").mkdir()
            second = Server(self.environment, self.cloud, home / "second", SETTINGS, "second")
            self.servers.append(second)
        self.invariants = [
            Invariants(self.environment, self.cloud, server) for server in self.servers
        ]
        self.ids: dict[int, tuple[int, str]] = {}
        """The number of a job in the schedule → its home and its id there."""
        self._storms = 0

    async def run(self) -> None:
        """From the evening to the morning."""
        environment = self.environment
        begin = environment.now()
        living = environment.spawn(self.cloud.live())
        for server, invariants in zip(self.servers, self.invariants, strict=True):
            environment.spawn(invariants.watch())
            server.start()
            environment.key(server.owner, "")
        events: list[tuple[float, int, JobPlan | Incident]] = []
        events += [(job.at, n, job) for n, job in enumerate(self.schedule.jobs)]
        events += [(i.at, 1000 + n, i) for n, i in enumerate(self.schedule.incidents)]
        for at, _, event in sorted(events, key=lambda entry: entry[:2]):
            await asyncio.sleep(max(0.0, begin + at - environment.now()))
            if isinstance(event, JobPlan):
                environment.spawn(self._create(event))
            else:
                environment.spawn(self._apply(event))
        await asyncio.sleep(max(0.0, begin + self.schedule.quiet_at - environment.now()))
        await self._stop_faults()
        morning = environment.now() + MORNING
        for invariants in self.invariants:
            await invariants.jobs_end(morning)
        tidy = environment.now() + TIDY
        for invariants in self.invariants:
            await invariants.cloud_is_empty(tidy)
        await asyncio.sleep(max(0.0, begin + DAY - environment.now()))
        for invariants in self.invariants:
            invariants.check_at_end()
        living.cancel()

    async def _stop_faults(self) -> None:
        """Nothing goes wrong any more."""
        environment = self.environment
        environment.quiet = True
        environment.note("quiet")
        while self._storms:
            await asyncio.sleep(60.0)
        self.cloud.weather = Weather(failing=0.0)
        self.cloud.lag(0.0)
        self.cloud.end_deletions()
        for zone in ZONES:
            self.cloud.fleet.limits.capacity[zone] = {"v5e": 10 * CHIPS}
        self.cloud.stir()
        for server in self.servers:
            if not server.alive:
                server.start()

    # Users ---------------------------------------------------------------------------------------

    async def _create(self, plan: JobPlan) -> None:
        body = {"spec": plan.spec, "secrets": {"TOKEN": "geheim"}, "user": "lab"}
        for _ in range(40):
            try:
                made = await self.servers[plan.home].call("POST", "/jobs", body)
            except ServerKilled:
                # The user looks whether it was taken, and asks again if it was not.
                await asyncio.sleep(45.0)
                job_id = await self._id_of(plan.home, plan.spec["name"])
                if job_id is not None:
                    self._known(plan, job_id)
                    return
            except Refused as refused:
                if refused.code != INSUFFICIENT_STORAGE:
                    raise
                await asyncio.sleep(120.0)
            else:
                self._known(plan, made["id"])
                return

    def _known(self, plan: JobPlan, job_id: str) -> None:
        self.ids[plan.number] = (plan.home, job_id)
        key = self.environment.key(self.servers[plan.home].owner, job_id)
        self.environment.plans[key] = plan.program
        self.invariants[plan.home].created(job_id)

    async def _id_of(self, home: int, name: str) -> str | None:
        for _ in range(40):
            try:
                listed = await self.servers[home].call("GET", "/jobs", name=name)
                ids = [job["id"] for job in listed if job["name"] == name]
                return str(ids[0]) if ids else None
            except ServerKilled:
                await asyncio.sleep(45.0)
        return None

    async def _verb(self, verb: str, home: int, job_id: str) -> None:
        environment, invariants = self.environment, self.invariants[home]
        environment.note("user", verb, job_id)
        request = invariants.asked(job_id, verb)
        try:
            answer = await self.servers[home].call(
                "POST", f"/jobs/{job_id}/{verb}", {"secrets": {"TOKEN": "geheim"}}
            )
        except ServerKilled:
            request.unknown()
        except Refused as refused:
            environment.note("told", job_id, str(refused))
            if refused.code == INSUFFICIENT_STORAGE or "try again" in str(refused):
                request.unknown()  # begun, and not done
            else:
                request.refused()
        else:
            environment.note("told", job_id, answer["text"])
            request.answered(answer["text"])

    async def _open_views(self, home: int, job_id: str) -> None:
        """Somebody looks, as `list`, `show` and `watch` do; that changes nothing."""
        server = self.servers[home]
        with suppress(ServerKilled, Refused):
            await server.call("GET", "/jobs", all=1)
            await server.call("GET", f"/jobs/{job_id}")
            await server.call("GET", f"/jobs/{job_id}/events", wait=20)

    # What goes wrong -----------------------------------------------------------------------------

    async def _apply(self, incident: Incident) -> None:
        if incident.kind in {"cancel", "resume", "delete", "clean", "look"}:
            if self.ids:
                job = list(self.ids.values())[incident.target % len(self.ids)]
                looks = incident.kind == "look"
                await (self._open_views(*job) if looks else self._verb(incident.kind, *job))
            return
        self._storms += 1
        try:
            await self._fault(incident)
        finally:
            self._storms -= 1

    async def _fault(self, incident: Incident) -> None:
        environment, cloud = self.environment, self.cloud
        server = self.servers[incident.target // 7 % len(self.servers)]
        fleet, weather = cloud.fleet, cloud.weather
        environment.note("fault", incident.kind)
        zone = ZONES[incident.target % len(ZONES)]
        nodes = cloud.ready_nodes()
        node = nodes[incident.target % len(nodes)] if nodes else None
        hosts = list(environment.hosts.values())
        host = hosts[incident.target % len(hosts)] if hosts else None
        match incident.kind:
            case "preempt" if node:
                cloud.preempt(node, 0.0)
            case "preempt with notice" if node:
                cloud.preempt(node, incident.seconds)
            case "preempt zone":
                for victim in cloud.ready_nodes(zone):
                    cloud.preempt(victim, 0.0)
            case "no capacity":
                fleet.limits.capacity[zone] = {"v5e": 0}
                await asyncio.sleep(incident.seconds)
                fleet.limits.capacity[zone] = {"v5e": CHIPS}
                cloud.stir()
            case "request fails":
                waiting = list(fleet.requests.values())
                if waiting:
                    text = TEXTS[incident.target % len(TEXTS)]
                    error = None if incident.amount < 0.1 else RpcStatus(8, text)
                    cloud.fail_request(waiting[incident.target % len(waiting)], error)
            case "refuse":
                weather.refuses = 0.5
                await asyncio.sleep(incident.seconds)
                weather.refuses = 0.0
            case "cloud fails":
                weather.failing = 0.2 + 0.8 * incident.amount
                await asyncio.sleep(incident.seconds)
                weather.failing = 0.01
            case "deletes fail":
                weather.deaf = 1.0
                await asyncio.sleep(incident.seconds)
                weather.deaf = 0.0
            case "login expires":
                weather.logged_in = False
                await asyncio.sleep(incident.seconds)
                weather.logged_in = True
            case "listings lag":
                cloud.lag(5 + 115 * incident.amount)
                await asyncio.sleep(incident.seconds)
                cloud.lag(0.0)
            case "listings have holes":
                weather.holes = 0.5 * incident.amount
                await asyncio.sleep(incident.seconds)
                weather.holes = 0.0
            case "creations fail":
                weather.creates_nothing = 0.2 + 0.6 * incident.amount
                await asyncio.sleep(incident.seconds)
                weather.creates_nothing = 0.0
            case "requests appear late":
                weather.hides = 50.0
                await asyncio.sleep(incident.seconds)
                weather.hides = 0.0
            case "lookups fail":
                weather.unsure, weather.holes = 0.3 + 0.7 * incident.amount, 0.3
                await asyncio.sleep(incident.seconds)
                weather.unsure = weather.holes = 0.0
            case "slices never boot":
                weather.boots_nothing = 0.7
                await asyncio.sleep(incident.seconds)
                weather.boots_nothing = 0.0
            case "deletions hang":
                cloud.hang_deletions(True)
                await asyncio.sleep(incident.seconds)
                cloud.hang_deletions(False)
            case "maintenance" if node:
                await cloud.maintain(node, incident.seconds)
            case "cancel out of reach" if self.ids:
                await self._cancel_out_of_reach(incident)
            case "cut host" if host:
                host.cut()
            case "hang host" | "hang host long" if host:
                host.hang(incident.seconds)
                await asyncio.sleep(incident.seconds)
            case "mute host" if host:
                host.mute(incident.seconds)
                await asyncio.sleep(incident.seconds)
            case "host is lost" if host:
                # Until its slice is given up, which no calm night does for us.
                (host.hang if incident.amount < 0.5 else host.mute)(math.inf)
            case "host lies" if host:
                host.lie(int(2 * incident.amount))
            case "reboot host" if host:
                host.reboot(incident.seconds)
            case "host disk full" if host:
                host.full_until = environment.now() + incident.seconds
                await asyncio.sleep(incident.seconds)
            case "kill server":
                # Counted in callbacks: at a time of the clock it would mostly find it idle.
                struck = asyncio.Event()
                environment.loop.after_steps(1 + incident.target % 400, server.kill)
                environment.loop.after_steps(1 + incident.target % 400, struck.set)
                await struck.wait()
                await asyncio.sleep(incident.seconds * incident.amount)
                if not server.alive:
                    server.start()
            case "sleep" if server.alive and not server.asleep:
                await server.sleep(min(incident.seconds, 2 * HOUR), counts=incident.amount < 0.5)
            case "clock forward":
                server.stepped += 86400 * incident.amount
            case "clock back":
                server.stepped -= 86400 * incident.amount
            case "disk full" if server.alive:
                server.fill_disk(True)
                await asyncio.sleep(incident.seconds)
                server.fill_disk(False)

    async def _cancel_out_of_reach(self, incident: Incident) -> None:
        """A user cancels a job while one of its hosts answers nothing."""
        home, job_id = list(self.ids.values())[incident.target % len(self.ids)]
        key = self.environment.key(self.servers[home].owner, job_id)
        runs = [run for host in self.environment.hosts.values() for run in host.attempts.values()]
        hosts = [run.host for run in runs if run.alive and run.job == key]
        if hosts:
            hosts[incident.target // 11 % len(hosts)].hang(incident.seconds)
            await self._verb("cancel", home, job_id)
            await asyncio.sleep(incident.seconds)


def simulate(schedule: Schedule) -> Outcome:
    """Let one schedule happen."""
    loop = SimulatedLoop(RandomStreams(schedule.seed)["order"])
    where = SHM if SHM.is_dir() else None
    home = Path(tempfile.mkdtemp(prefix="drumline-night-", dir=where))
    begin = loop.time()
    # What a killed server left half done is closed when it is collected, with nobody to hear it.
    loop.set_exception_handler(lambda *_: None)
    asyncio.set_event_loop(loop)
    with ExitStack() as closing:
        closing.callback(shutil.rmtree, home, ignore_errors=True)
        night = Simulation(schedule, loop, home)
        with isolate(night.environment, night.servers[0], schedule.round_pause):
            try:
                loop.run_until_complete(night.run())
            except Deadlock:
                night.environment.fail("everything waits, and nothing will ever come")
            except Spinning:
                night.environment.fail("the server spins, and time stands still")
            except RuntimeError:
                if not night.environment.broken:  # otherwise the loop was stopped for that
                    raise
            for server in night.servers:
                server.kill()
        asyncio.set_event_loop(None)
    environment = night.environment
    story = tuple(" ".join(map(str, entry)) for entry in environment.trace)
    passed = f"{loop.steps} callbacks until {loop.time()!r}"
    fingerprint = hashlib.sha256("\n".join([*story, passed]).encode()).hexdigest()[:16]
    return Outcome(
        schedule.seed,
        tuple(environment.broken),
        story,
        fingerprint,
        loop.time() - begin,
        loop.steps,
        sum(server.lives for server in night.servers),
    )
