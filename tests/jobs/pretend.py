"""A job manager whose cloud, hosts and clock are pretended: days pass in a second.

Store, desk, supervisor and lifecycle are the real ones, at the pace kept with Google.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from drumline.cloud.google import placements
from drumline.cloud.google.errors import refusal
from drumline.cloud.google.placements import ListedNode, ListedRequest, RpcError
from drumline.cloud.protocol import CloudError, PlacementRequest
from drumline.hosts.values import Address, Admit, Program
from drumline.jobs.config import read
from drumline.jobs.controller.supervisor import Supervisor
from drumline.jobs.server.service import JobService
from drumline.jobs.store.records import Store
from drumline.observed.faults import Refusal
from drumline.observed.hosts import HostPhase, HostReport
from drumline.observed.placements import Endpoint, ListedPlacement

ZONE = "us-central2-b"
HOUR = 3600.0
NO_CAPACITY = CloudError(f'There is no more capacity in the zone "{ZONE}"', 8)
UNAVAILABLE = CloudError("The service is currently unavailable.", 14)
LOGIN_EXPIRED = CloudError("Request had invalid authentication credentials.", 16)


class _Skipping(selectors.DefaultSelector):
    """Does not wait: time jumps to when the wait would be over."""

    now = 1_800_000_000.0
    in_threads = 0
    """Things under way in threads. They take the time of this world, so the other stands still."""

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0.01 if self.in_threads and timeout != 0 else 0)
        if not ready and timeout and not self.in_threads:
            self.now += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time."""

    def sleep_through(self, seconds: float) -> None:
        """The machine sleeps: time passes and nothing happens."""
        self._skipping.now += seconds

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)
        # At this date a float has no smaller steps; a timer that is missed by one never rings.
        self._clock_resolution = 1e-5

    def time(self) -> float:
        return self._skipping.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        def done(_: object) -> None:
            self._skipping.in_threads -= 1

        self._skipping.in_threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(done)
        return future


@dataclass(frozen=True)
class Call:
    at: float
    verb: str
    name: str


class PretendedCloud:
    """Slices are there as soon as they are asked for, until a test says otherwise."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.calls: list[Call] = []
        self.trouble: CloudError | None = None
        """What every call fails with."""
        self.refusal: CloudError | None = None
        """What asking for a slice fails with."""
        self.given: tuple[str, str | None] = ("ACTIVE", "READY")
        """The states of a new request and of its node."""
        self.given_trouble: RpcError | None = None
        """What a new request failed with."""
        self.slow = 0.0
        """Seconds that asking for a slice takes."""
        self.deaf = False
        """Whether deletes are taken and nothing is done about them."""
        self.no_release: CloudError | None = None
        """What every delete fails with."""
        self.unlisted: set[str] = set()
        """Slices that are there and that listings leave out."""
        self.no_find: CloudError | None = None
        """What every lookup by name fails with."""
        self.buckets: dict[str, str] = {}
        self._clock = clock
        self.requested: dict[str, ListedRequest] = {}
        self.held: dict[str, ListedNode] = {}

    def count(self, verb: str, since: float = 0.0) -> int:
        return sum(call.verb == verb and call.at >= since for call in self.calls)

    def _called(self, verb: str, name: str) -> None:
        self.calls.append(Call(self._clock(), verb, name))
        if self.trouble:
            raise self.trouble

    def becomes(self, name: str, request: str, node: str | None) -> None:
        """The cloud changes the state of a slice."""
        self.requested[name] = replace(self.requested[name], state=request)
        if node is None:
            self.held.pop(name, None)
        else:
            self.held[name] = replace(self.held[name], state=node)

    async def requests(self, zone: str) -> list[ListedRequest]:
        self._called("requests", zone)
        return [r for r in self.requested.values() if self._listed(r, zone)]

    async def nodes(self, zone: str) -> list[ListedNode]:
        self._called("nodes", zone)
        return [n for n in self.held.values() if self._listed(n, zone)]

    def _listed(self, entry: ListedRequest | ListedNode, zone: str) -> bool:
        return entry.zone == zone and entry.name not in self.unlisted

    async def placements(self, zone: str) -> list[ListedPlacement]:
        return placements.combine_listings(await self.requests(zone), await self.nodes(zone))

    async def find(self, zone: str, name: str) -> ListedPlacement | None:
        self._called("find", name)
        if self.no_find:
            raise self.no_find
        request, node = self.requested.get(name), self.held.get(name)
        if not any(found and found.zone == zone for found in (request, node)):
            return None
        return placements.combine(request, [node] if node else [])

    def explain(self, error: CloudError, zone: str) -> Refusal:
        return refusal(error.code, str(error), zone)

    async def ask(self, request: PlacementRequest) -> None:
        self._called("ask", request.name)
        await asyncio.sleep(self.slow)
        if self.refusal:
            raise self.refusal
        state, node = self.given
        name, zone, kind = request.name, request.zone, request.accelerator
        self.requested[name] = ListedRequest(
            name, zone, state, kind, request.labels, self.given_trouble
        )
        ends = tuple(Endpoint(f"10.0.0.{n}", f"34.0.0.{n}") for n in range(2))
        if node:
            self.held[name] = ListedNode(name, zone, node, kind, request.labels, ends)

    async def release(self, zone: str, name: str, slices: Sequence[str] = ()) -> None:
        del zone, slices
        self._called("release", name)
        if self.no_release:
            raise self.no_release
        if self.deaf:
            return
        self.requested.pop(name, None)
        self.held.pop(name, None)

    async def host_keys(self, placement: ListedPlacement) -> list[str | None]:
        del placement
        return []

    async def bucket_location(self, bucket: str) -> str | None:
        self._called("bucket", bucket)
        return self.buckets.get(bucket)

    async def close(self) -> None:
        pass


class PretendedSession:
    """The hosts of one attempt; each runs until a test says how it ends."""

    opened: ClassVar["list[PretendedSession]"] = []

    def __init__(self, program: Program, addresses: list[Address], **means: Any) -> None:
        self.program = program
        self.changed = asyncio.Event()
        self._clock: Callable[[], float] = means["clock"]
        self._cut_since: float | None = None
        self.stopped = False
        self._hosts = [self._host(n, means["admit"]) for n in range(len(addresses))]
        PretendedSession.opened.append(self)

    def _host(self, number: int, admit: Admit) -> HostReport:
        """One that runs, or is refused for what is known of its machine."""
        told = {"physical_host": f"machine-{number}", "instance_id": f"i-{number}"}
        refused = admit(number, told).refused
        phase = HostPhase.PREPARING if refused else HostPhase.RUNNING
        return HostReport(number, phase, self._clock(), identity=told, refused=refused)

    def start(self) -> None:
        self.changed.set()

    def reports(self) -> tuple[HostReport, ...]:
        heard = self._cut_since or self._clock()
        return tuple(replace(report, heard=heard) for report in self._hosts)

    def move_to(self, shelf: str) -> None:
        """Its hosts are on other machines than those before."""
        self._hosts = [
            replace(r, identity={"physical_host": f"{shelf}-{r.index}"}, started_at=self._clock())
            for r in self._hosts
        ]

    def connection(self, there: bool) -> None:
        self._cut_since = None if there else self._clock()
        self.changed.set()

    def ends(self, code: int, error: str = "") -> None:
        now = self._clock()
        self._hosts = [
            replace(r, phase=HostPhase.EXITED, exit_code=code, error=error, error_at=now)
            for r in self._hosts
        ]
        self.changed.set()

    def goes_down(self, why: str) -> None:
        """The hosts are told that they will be taken."""
        self._hosts = [replace(report, going_down=why) for report in self._hosts]
        self.changed.set()

    def tells(self, **told: object) -> None:
        """A heartbeat from every host."""
        self._hosts = [replace(report, heartbeat=told) for report in self._hosts]
        self.changed.set()

    async def stop(self, grace: float) -> None:
        del grace
        self.stopped = True
        self.ends(-15)

    async def close(self) -> None:
        pass


class Office:
    """The job manager and the world it sees."""

    sessions = PretendedSession

    def __init__(self, home: Path, settings: str = "") -> None:
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.yaml").write_text(f"cloud: google\nproject: lab-tpu-1\n{settings}")
        self.clock = asyncio.get_running_loop().time
        self.stepped = 0.0
        """Seconds by which somebody has set the wall clock forward."""
        self.cloud = PretendedCloud(self.clock)
        self._home = home
        self._open()

    def _open(self) -> None:
        key = "ssh-ed25519 AAAA drumline"
        self.supervisor = Supervisor(
            Store(self._home / "jobs.db"),
            self.cloud,
            read(self._home),
            key,
            wall=self.wall,
            monotonic=self.clock,
        )
        self.desk = JobService(self.supervisor)
        self.running = asyncio.create_task(self.supervisor.run())

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.supervisor.close()
        self.desk.store.close()

    async def restart(self) -> None:
        """Another server takes over; the cloud and the hosts go on."""
        await self.close()
        self._open()

    def wall(self) -> float:
        return self.clock() + self.stepped

    async def create(self, run: str = "python train.py", **keys: Any) -> str:
        spec = {"accelerator": "v4-16", "zones": [ZONE], "run": run, "workdir": None} | keys
        return str((await self.desk.create(spec, {}, "lab"))["id"])

    def show(self, job: str) -> dict[str, Any]:
        return self.desk.show(job)

    def status(self, job: str) -> str:
        return str(self.show(job)["status"])

    def starts(self, job: str) -> "list[PretendedSession]":
        """Every time the program was started."""
        return [one for one in PretendedSession.opened if one.program.job_id == job]

    def machine_sleeps(self, seconds: float) -> None:
        """Time passes and nothing happens."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        loop.sleep_through(seconds)

    def rounds(self) -> Callable[[], int]:
        """Counts the rounds of the loop from now on."""
        count = 0
        look = self.supervisor.polls.next_due

        def counted() -> float:
            nonlocal count
            count += 1
            return look()

        self.supervisor.polls.next_due = counted  # type: ignore[method-assign]
        return lambda: count

    async def until(self, condition: Callable[[], bool], within: float = 60.0) -> None:
        deadline = self.clock() + within
        while not condition():
            assert self.clock() < deadline, f"not within {within} s"
            await asyncio.sleep(0.1)

    async def reaches(self, job: str, status: str, within: float = 60.0) -> None:
        await self.until(lambda: self.status(job) == status, within)


Story = Callable[[Office], Awaitable[None]]


def play(home: Path, story: Story, settings: str = "") -> None:
    """Let a story happen to a job manager that runs meanwhile."""

    async def stage() -> None:
        office = Office(home, settings)
        try:
            await story(office)
        finally:
            await office.close()

    PretendedSession.opened = []
    hosts = patch("drumline.hosts.session.SliceSession", PretendedSession)
    with hosts, asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(stage())
