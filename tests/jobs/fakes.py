"""A job manager with a fake cloud, fake hosts and virtual time, in which days pass in a second.

The store, service, supervisor and lifecycle are the real ones, with the timeouts for Google Cloud.
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
from drumline.cloud.protocol import CloudError, OperationState, PlacementRequest
from drumline.hosts.protocol import Admit
from drumline.hosts.values import Address, ShellProgram
from drumline.jobs.config import read
from drumline.jobs.controller.supervisor import Supervisor
from drumline.jobs.server.process import make_runner
from drumline.jobs.server.service import JobService
from drumline.jobs.store.records import Store
from drumline.observed import Endpoint, HostPhase, HostReport, ListedPlacement, Refusal

ZONE = "us-central2-b"
HOUR = 3600.0
NO_CAPACITY = CloudError(f'There is no more capacity in the zone "{ZONE}"', 8)
UNAVAILABLE = CloudError("The service is currently unavailable.", 14)
LOGIN_EXPIRED = CloudError("Request had invalid authentication credentials.", 16)


class _SkippingSelector(selectors.DefaultSelector):
    """A selector that does not wait but moves the time to the end of the wait."""

    now = 1_800_000_000.0
    in_threads = 0
    """The number of functions in threads. Virtual time stands still while they take real time."""

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0.01 if self.in_threads and timeout != 0 else 0)
        if not ready and timeout and not self.in_threads:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time."""

    def sleep_through(self, seconds: float) -> None:
        """Move the time forward, as if the machine slept."""
        self._skipping.now += seconds

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)
        # The resolution of a float at this time; a smaller one would miss timers.
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

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait for the threads in real time, without the timeout that Python has since 3.12."""
        del timeout
        self._skipping.in_threads += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._skipping.in_threads -= 1


@dataclass(frozen=True)
class Call:
    at: float
    verb: str
    name: str


class FakeCloud:
    """A cloud in which slices are ready as soon as they are requested, unless a test changes
    that."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.calls: list[Call] = []
        self.error: CloudError | None = None
        """The error of every call."""
        self.refusal: CloudError | None = None
        """The error of every request for slices."""
        self.given: tuple[str, str | None] = ("ACTIVE", "READY")
        """The states of a new request and of its node."""
        self.request_error: RpcError | None = None
        """The error of a new request."""
        self.creation: OperationState | None = None
        """The state of every create operation; None if the cloud has none."""
        self.creates = True
        """False if accepted requests never appear."""
        self.no_operation: CloudError | None = None
        """The error of every read of an operation."""
        self.slow = 0.0
        """Seconds that a request for slices takes."""
        self.ignores_deletes = False
        """True if deletes succeed without an effect."""
        self.no_release: CloudError | None = None
        """The error of every delete."""
        self.unlisted: set[str] = set()
        """Existing slices that listings omit."""
        self.no_find: CloudError | None = None
        """The error of every lookup by name."""
        self.login_error: CloudError | None = None
        """The error of a login that is missing or expired."""
        self.no_keys: CloudError | None = None
        """The error of every read of host keys."""
        self.no_names: CloudError | None = None
        """The error of every read of instance names."""
        self.names_published = True
        """False if the hosts publish no instance names."""
        self.buckets: dict[str, str] = {}
        self._clock = clock
        self.asked: list[PlacementRequest] = []
        self.requested: dict[str, ListedRequest] = {}
        self.held: dict[str, ListedNode] = {}

    def count(self, verb: str, since: float = 0.0) -> int:
        return sum(call.verb == verb and call.at >= since for call in self.calls)

    def _called(self, verb: str, name: str) -> None:
        self.calls.append(Call(self._clock(), verb, name))
        if self.error:
            raise self.error

    def becomes(self, name: str, request: str, node: str | None) -> None:
        """Change the state of a slice."""
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
        if not any(resource and resource.zone == zone for resource in (request, node)):
            return None
        return placements.combine(request, [node] if node else [])

    def explain(self, error: CloudError, zone: str) -> Refusal:
        return refusal(error.code, str(error), zone)

    async def operation(self, name: str) -> OperationState | None:
        self._called("operation", name)
        if self.no_operation:
            raise self.no_operation
        return self.creation

    async def ask(self, request: PlacementRequest) -> str:
        self._called("ask", request.name)
        self.asked.append(request)
        await asyncio.sleep(self.slow)
        if self.refusal:
            raise self.refusal
        operation = f"projects/p/locations/{request.zone}/operations/{request.name}"
        if not self.creates:
            return operation
        state, node = self.given
        name, zone, kind = request.name, request.zone, request.accelerator
        self.requested[name] = ListedRequest(
            name, zone, state, kind, request.labels, self.request_error
        )
        ends = tuple(Endpoint(f"10.0.0.{n}", f"34.0.0.{n}") for n in range(2))
        if node:
            self.held[name] = ListedNode(name, zone, node, kind, request.labels, ends)
        return operation

    async def release(self, zone: str, name: str, slices: Sequence[str] = ()) -> None:
        del zone, slices
        self._called("release", name)
        if self.no_release:
            raise self.no_release
        if self.ignores_deletes:
            return
        self.requested.pop(name, None)
        self.held.pop(name, None)

    async def host_keys(self, placement: ListedPlacement) -> list[str | None]:
        self._called("keys", placement.name)
        if self.no_keys:
            raise self.no_keys
        return []

    async def check_login(self) -> None:
        if self.login_error:
            raise self.login_error

    async def instance_names(self, placement: ListedPlacement) -> list[str | None]:
        self._called("names", placement.name)
        if self.no_names:
            raise self.no_names
        hosts = range(len(placement.endpoints))
        return [f"instance-{index}" if self.names_published else None for index in hosts]

    async def bucket_location(self, bucket: str) -> str | None:
        self._called("bucket", bucket)
        return self.buckets.get(bucket)

    async def close(self) -> None:
        pass


class FakeSession:
    """The hosts of one attempt. They run until a test ends them."""

    opened: ClassVar["list[FakeSession]"] = []

    def __init__(self, program: ShellProgram, addresses: list[Address], **means: Any) -> None:
        self.program = program
        self.addresses = addresses
        self.changed = asyncio.Event()
        self._clock: Callable[[], float] = means["clock"]
        self._cut_since: float | None = None
        self.stopped = False
        self.unreachable: tuple[int, ...] = ()
        """Hosts that do not confirm a stop."""
        self._hosts = [self._host(n, means["admit"]) for n in range(len(addresses))]
        FakeSession.opened.append(self)

    def _host(self, number: int, admit: Admit) -> HostReport:
        """Return a host that runs, or that the host history refuses."""
        identity = {"physical_host": f"machine-{number}", "instance_id": f"i-{number}"}
        refused = admit(number, identity).refused
        phase = HostPhase.PREPARING if refused else HostPhase.RUNNING
        return HostReport(number, phase, self._clock(), identity=identity, refused=refused)

    def start(self) -> None:
        self.changed.set()

    def reports(self) -> tuple[HostReport, ...]:
        heard = self._cut_since or self._clock()
        return tuple(replace(report, heard_at=heard) for report in self._hosts)

    def move_to(self, rack: str) -> None:
        """Move the hosts to other machines."""
        self._hosts = [
            replace(r, identity={"physical_host": f"{rack}-{r.index}"}, started_at=self._clock())
            for r in self._hosts
        ]

    def connection(self, there: bool) -> None:
        self._cut_since = None if there else self._clock()
        self.changed.set()

    def ends(self, code: int, error: str = "", **facts: Any) -> None:
        now = self._clock()
        self._hosts = [
            replace(r, phase=HostPhase.EXITED, exit_code=code, error=error, error_at=now, **facts)
            for r in self._hosts
        ]
        self.changed.set()

    def goes_down(self, why: str) -> None:
        """Announce the shutdown of all hosts."""
        self._hosts = [replace(report, shutdown_reason=why) for report in self._hosts]
        self.changed.set()

    def send_heartbeat(self, **metrics: object) -> None:
        """Send a heartbeat from every host."""
        self._hosts = [replace(report, heartbeat=metrics) for report in self._hosts]
        self.changed.set()

    async def stop(self, grace: float) -> tuple[int, ...]:
        if unreachable := self.unreachable:
            await asyncio.sleep(grace + 10)
            return unreachable
        self.stopped = True
        self.ends(-15)
        return ()

    async def close(self) -> None:
        pass


class ServerHarness:
    """A running job manager with its fake cloud and hosts."""

    sessions = FakeSession

    def __init__(self, home: Path, settings: str = "") -> None:
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.yaml").write_text(f"cloud: google\nproject: lab-tpu-1\n{settings}")
        self.clock = asyncio.get_running_loop().time
        self.stepped = 0.0
        """Seconds by which the wall clock was set forward."""
        self.cloud = FakeCloud(self.clock)
        self._home = home
        self._open()

    def _open(self) -> None:
        config = read(self._home)
        self.supervisor = Supervisor(
            Store(self._home / "jobs.db"),
            self.cloud,
            config,
            make_runner(config, self.cloud, "ssh-ed25519 AAAA drumline"),
            wall=self.wall,
            monotonic=self.clock,
        )
        self.service = JobService(self.supervisor)
        self.running = asyncio.create_task(self.supervisor.run())

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.supervisor.close()
        self.service.store.close()

    async def restart(self) -> None:
        """Stop the server and start the next one. The cloud and the hosts continue."""
        await self.close()
        self._open()

    def wall(self) -> float:
        return self.clock() + self.stepped

    async def create(self, run: str = "python train.py", **keys: Any) -> str:
        spec = {"accelerator": "v4-16", "zones": [ZONE], "run": run, "workdir": None} | keys
        return str((await self.service.create(spec, {}, "lab"))["id"])

    def show(self, job: str) -> dict[str, Any]:
        return self.service.show(job)

    def status(self, job: str) -> str:
        return self.service.record(job).job.status.value

    def starts(self, job: str) -> "list[FakeSession]":
        """Return the session of every start of the program."""
        return [session for session in FakeSession.opened if session.program.job_id == job]

    def machine_sleeps(self, seconds: float) -> None:
        """Move the time forward, as if the machine slept."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.sleep_through(seconds)

    def rounds(self) -> Callable[[], int]:
        """Return a function that counts the rounds from now on."""
        count = 0
        next_due = self.supervisor.polls.next_due

        def counted() -> float:
            nonlocal count
            count += 1
            return next_due()

        self.supervisor.polls.next_due = counted  # type: ignore[method-assign]
        return lambda: count

    async def until(self, condition: Callable[[], bool], within: float = 60.0) -> None:
        began_at = self.clock()
        while not condition():
            waited = self.clock() - began_at
            assert waited < within, f"not within {within} s"
            await asyncio.sleep(0.1 if waited < 60 else 1.0)

    async def reaches(self, job: str, status: str, within: float = 60.0) -> None:
        await self.until(lambda: self.status(job) == status, within)


ScenarioFunction = Callable[[ServerHarness], Awaitable[None]]


def run_scenario(home: Path, scenario: ScenarioFunction, settings: str = "") -> None:
    """Run a scenario with a job manager in virtual time."""

    async def run() -> None:
        harness = ServerHarness(home, settings)
        try:
            await scenario(harness)
        finally:
            await harness.close()

    FakeSession.opened = []
    hosts = patch("drumline.hosts.session.SliceSession", FakeSession)
    with hosts, asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())
