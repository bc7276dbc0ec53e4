"""Run one schedule from its first job to the end of the day, and check the invariants."""

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
from drumline.cloud.model.resources import Tier
from drumline.jobs.core.refusals import RefusalAction, action_for
from tests.simulation.cloud import Conditions, SimulatedCloud
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
"""In each zone: enough for three of the largest jobs, so that the jobs compete."""
DAY = 24 * HOUR
JOBS_END_SECONDS = 12 * HOUR
"""After the faults stop, every job ends within this time."""
CLEANUP_SECONDS = 3 * HOUR
"""After the last job has ended, the cloud is empty within this time: a kept slice stays an hour."""
SHM = Path("/dev/shm")  # noqa: S108, a file system in memory
TEXTS = tuple(
    rule.example
    for rule in RULES
    if action_for(classify(8, rule.example)) is not RefusalAction.GIVE_UP
)
"""Texts of failed requests after which a job continues."""


@dataclass(frozen=True)
class Outcome:
    """The result of a schedule."""

    seed: int
    violations: tuple[str, ...]
    events: tuple[str, ...]
    fingerprint: str
    """Hash of all events, the same for the same schedule."""
    seconds: float
    """Virtual time in seconds."""
    steps: int
    starts: int


class Simulation:
    """One schedule with its cloud, servers and invariants."""

    def __init__(self, schedule: Schedule, loop: SimulatedLoop, home: Path) -> None:
        """Create the cloud and the servers without starting them."""
        self.schedule = schedule
        self._folder = home
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
        self._active_faults = 0

    async def run(self) -> None:
        """Run the schedule, then wait for the end of the day."""
        environment = self.environment
        began_at = environment.now()
        cloud_task = environment.spawn(self.cloud.live())
        for server, invariants in zip(self.servers, self.invariants, strict=True):
            environment.spawn(invariants.watch())
            server.start()
            environment.key(server.owner, "")
        events: list[tuple[float, int, JobPlan | Incident]] = []
        events += [(job.at, n, job) for n, job in enumerate(self.schedule.jobs)]
        events += [(i.at, 1000 + n, i) for n, i in enumerate(self.schedule.incidents)]
        for at, _, event in sorted(events, key=lambda entry: entry[:2]):
            await asyncio.sleep(max(0.0, began_at + at - environment.now()))
            if isinstance(event, JobPlan):
                environment.spawn(self._create(event))
            else:
                environment.spawn(self._apply(event))
        await asyncio.sleep(max(0.0, began_at + self.schedule.quiet_at - environment.now()))
        await self._stop_faults()
        jobs_deadline = environment.now() + JOBS_END_SECONDS
        for invariants in self.invariants:
            await invariants.jobs_end(jobs_deadline)
        cleanup_deadline = environment.now() + CLEANUP_SECONDS
        for invariants in self.invariants:
            await invariants.cloud_is_empty(cleanup_deadline)
        await asyncio.sleep(max(0.0, began_at + DAY - environment.now()))
        for invariants in self.invariants:
            invariants.check_at_end()
        cloud_task.cancel()

    async def _stop_faults(self) -> None:
        """Stop all faults."""
        environment = self.environment
        environment.quiet = True
        environment.note("quiet")
        while self._active_faults:
            await asyncio.sleep(60.0)
        self.cloud.conditions = Conditions(failure_rate=0.0)
        self.cloud.lag(0.0)
        self.cloud.end_deletions()
        for zone in ZONES:
            self.cloud.fleet.limits.capacity[zone] = {"v5e": 10 * CHIPS}
        self.cloud.notify()
        for server in self.servers:
            if not server.alive:
                server.start()

    # Users ---------------------------------------------------------------------------------------

    async def _create(self, plan: JobPlan) -> None:
        body = {"spec": plan.spec, "secrets": {"TOKEN": "geheim"}, "user": "lab"}
        for _ in range(40):
            try:
                created = await self.servers[plan.home].call("POST", "/jobs", body)
            except ServerKilled:
                # The user looks for the job, and submits it again if it does not exist.
                await asyncio.sleep(45.0)
                job_id = await self._id_of(plan.home, plan.spec["name"])
                if job_id is not None:
                    self._register(plan, job_id)
                    return
            except Refused as refused:
                if refused.code != INSUFFICIENT_STORAGE:
                    raise
                await asyncio.sleep(120.0)
            else:
                self._register(plan, created["id"])
                return

    def _register(self, plan: JobPlan, job_id: str) -> None:
        self.ids[plan.number] = (plan.home, job_id)
        key = self.environment.key(self.servers[plan.home].owner, job_id)
        self.environment.plans[key] = plan.program
        self.invariants[plan.home].created(job_id)

    async def _id_of(self, home: int, name: str) -> str | None:
        for _ in range(40):
            try:
                jobs = await self.servers[home].call("GET", "/jobs", name=name)
                ids = [job["id"] for job in jobs if job["name"] == name]
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
                request.unknown()  # begun, and possibly executed
            else:
                request.refused()
        else:
            # The folder has another name in each run of the schedule.
            environment.note("told", job_id, answer["text"].replace(str(self._folder), "home"))
            request.answered(answer["text"])

    async def _open_views(self, home: int, job_id: str) -> None:
        """Read jobs like `list`, `show` and `watch`, which changes nothing."""
        server = self.servers[home]
        with suppress(ServerKilled, Refused):
            await server.call("GET", "/jobs", all=1)
            await server.call("GET", f"/jobs/{job_id}")
            await server.call("GET", f"/jobs/{job_id}/events", wait=20)

    # Faults --------------------------------------------------------------------------------------

    async def _apply(self, incident: Incident) -> None:
        if incident.kind in {"cancel", "resume", "delete", "clean", "look"}:
            if self.ids:
                job = list(self.ids.values())[incident.target % len(self.ids)]
                is_view = incident.kind == "look"
                await (self._open_views(*job) if is_view else self._verb(incident.kind, *job))
            return
        self._active_faults += 1
        try:
            await self._fault(incident)
        finally:
            self._active_faults -= 1

    async def _fault(self, incident: Incident) -> None:
        environment, cloud = self.environment, self.cloud
        server = self.servers[incident.target // 7 % len(self.servers)]
        fleet, conditions = cloud.fleet, cloud.conditions
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
                cloud.notify()
            case "request fails":
                waiting = list(fleet.requests.values())
                if waiting:
                    text = TEXTS[incident.target % len(TEXTS)]
                    error = None if incident.amount < 0.1 else RpcStatus(8, text)
                    cloud.fail_request(waiting[incident.target % len(waiting)], error)
            case "refuse":
                conditions.refusal_rate = 0.5
                await asyncio.sleep(incident.seconds)
                conditions.refusal_rate = 0.0
            case "cloud fails":
                conditions.failure_rate = 0.2 + 0.8 * incident.amount
                await asyncio.sleep(incident.seconds)
                conditions.failure_rate = 0.01
            case "deletes fail":
                conditions.lost_deletes = 1.0
                await asyncio.sleep(incident.seconds)
                conditions.lost_deletes = 0.0
            case "login expires":
                conditions.logged_in = False
                await asyncio.sleep(incident.seconds)
                conditions.logged_in = True
            case "listings lag":
                cloud.lag(5 + 115 * incident.amount)
                await asyncio.sleep(incident.seconds)
                cloud.lag(0.0)
            case "listings have holes":
                conditions.missing_entries = 0.5 * incident.amount
                await asyncio.sleep(incident.seconds)
                conditions.missing_entries = 0.0
            case "creations fail":
                conditions.failed_creations = 0.2 + 0.6 * incident.amount
                await asyncio.sleep(incident.seconds)
                conditions.failed_creations = 0.0
            case "requests appear late":
                conditions.visibility_delay = 50.0
                await asyncio.sleep(incident.seconds)
                conditions.visibility_delay = 0.0
            case "lookups fail":
                conditions.lookup_failures, conditions.missing_entries = (
                    0.3 + 0.7 * incident.amount,
                    0.3,
                )
                await asyncio.sleep(incident.seconds)
                conditions.lookup_failures = conditions.missing_entries = 0.0
            case "slices never boot":
                conditions.failed_boots = 0.7
                await asyncio.sleep(incident.seconds)
                conditions.failed_boots = 0.0
            case "deletions hang":
                cloud.hang_deletions(True)
                await asyncio.sleep(incident.seconds)
                cloud.hang_deletions(False)
            case "slices boot in the same time":
                conditions.equal_boots = True
                await asyncio.sleep(incident.seconds)
                conditions.equal_boots = False
            case "deletions begin late":
                conditions.late_deletions = True
                await asyncio.sleep(incident.seconds)
                conditions.late_deletions = False
            case "no quota in two zones":
                others = [other for other in ZONES if other != zone]
                fleet.limits.quota |= {other: {Tier.SPOT: 0} for other in others}
                await asyncio.sleep(incident.seconds)
                for other in others:
                    fleet.limits.quota.pop(other, None)
            case "no capacity anywhere":
                fleet.limits.capacity |= {everywhere: {"v5e": 0} for everywhere in ZONES}
                await asyncio.sleep(incident.seconds)
                fleet.limits.capacity |= {everywhere: {"v5e": CHIPS} for everywhere in ZONES}
                cloud.notify()
            case "deletions never end":
                conditions.endless_deletions = True
                await asyncio.sleep(incident.seconds)
                conditions.endless_deletions = False
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
                # The host stays lost until its slice is given up, even after the faults stop.
                (host.hang if incident.amount < 0.5 else host.mute)(math.inf)
            case "host lies" if host:
                host.lie(int(2 * incident.amount))
            case "reboot host" if host:
                host.reboot(incident.seconds)
            case "host disk full" if host:
                host.full_until = environment.now() + incident.seconds
                await asyncio.sleep(incident.seconds)
            case "kill server":
                # Counted in callbacks: at a random time the server would mostly be idle.
                killed = asyncio.Event()
                environment.loop.after_steps(1 + incident.target % 400, server.kill)
                environment.loop.after_steps(1 + incident.target % 400, killed.set)
                await killed.wait()
                await asyncio.sleep(incident.seconds * incident.amount)
                if not server.alive:
                    server.start()
            case "sleep" if server.alive and not server.asleep:
                await server.sleep(min(incident.seconds, 2 * HOUR), counts=incident.amount < 0.5)
            case "clock forward":
                server.clock_offset += 86400 * incident.amount
            case "clock back":
                server.clock_offset -= 86400 * incident.amount
            case "disk full" if server.alive:
                server.fill_disk(True)
                await asyncio.sleep(incident.seconds)
                server.fill_disk(False)

    async def _cancel_out_of_reach(self, incident: Incident) -> None:
        """Cancel a job while one of its hosts does not respond. Some slices are never deleted."""
        home, job_id = list(self.ids.values())[incident.target % len(self.ids)]
        key = self.environment.key(self.servers[home].owner, job_id)
        runs = [run for host in self.environment.hosts.values() for run in host.attempts.values()]
        hosts = [run.host for run in runs if run.alive and run.job == key]
        if hosts:
            if incident.amount < 0.5:
                self.cloud.undeletable.add(hosts[0].name.rpartition("/")[0])
            hosts[incident.target // 11 % len(hosts)].hang(incident.seconds)
            await self._verb("cancel", home, job_id)
            await asyncio.sleep(incident.seconds)


def simulate(schedule: Schedule) -> Outcome:
    """Run one schedule."""
    loop = SimulatedLoop(RandomStreams(schedule.seed)["order"])
    parent = SHM if SHM.is_dir() else None
    home = Path(tempfile.mkdtemp(prefix="drumline-night-", dir=parent))
    began_at = loop.time()
    # The garbage collector closes unfinished tasks of a killed server; their errors are ignored.
    loop.set_exception_handler(lambda *_: None)
    asyncio.set_event_loop(loop)
    with ExitStack() as closing:
        closing.callback(shutil.rmtree, home, ignore_errors=True)
        simulation = Simulation(schedule, loop, home)
        with isolate(simulation.environment, simulation.servers[0], schedule.round_pause):
            try:
                loop.run_until_complete(simulation.run())
            except Deadlock:
                simulation.environment.fail("deadlock: nothing is ready and no timer is set")
            except Spinning:
                simulation.environment.fail("the server spins in a busy loop")
            except RuntimeError:
                if not simulation.environment.violations:  # a violated invariant stops the loop
                    raise
            for server in simulation.servers:
                server.kill()
        asyncio.set_event_loop(None)
    environment = simulation.environment
    events = tuple(" ".join(map(str, entry)) for entry in environment.trace)
    final_state = f"{loop.steps} callbacks until {loop.time()!r}"
    fingerprint = hashlib.sha256("\n".join([*events, final_state]).encode()).hexdigest()[:16]
    return Outcome(
        schedule.seed,
        tuple(environment.violations),
        events,
        fingerprint,
        loop.time() - began_at,
        loop.steps,
        sum(server.starts for server in simulation.servers),
    )
