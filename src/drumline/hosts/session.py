"""All hosts of one slice, driven together until the program runs on them.

A session has no state of its own: what ran is on the hosts, what we saw of it is beside the logs.
Closing it and making a new one, in this process or the next, reattaches to what is there.

Hosts that `Program.hosts` leaves out are prepared like the others, run nothing and then count as
EXITED with 0. Those that run are numbered from 0 in slice order: DRUMLINE_HOST is that number,
DRUMLINE_HOSTS their count, and the coordinator is the first of them.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from drumline.hosts.connection import KnownHosts
from drumline.hosts.driver import HostDriver, Means
from drumline.hosts.messages import HostRank
from drumline.hosts.values import Address, Admit, Output, Program, Step, Timing, admit_all
from drumline.observed import HostPhase, HostReport

__all__ = [
    "Address",
    "HostPhase",
    "HostReport",
    "Program",
    "SliceSession",
    "Step",
    "Timing",
]

USUAL = Timing()


class Begun(BaseModel):
    """What a new server must know about an attempt; kept in `started` beside the logs."""

    coordinator: str = ""
    burnin: float = 0.0
    hosts: list[int] = []
    identities: dict[int, dict[str, str]] = {}
    stopped: bool = False
    grace: float = 0.0


class StartBarrier:
    """Where the hosts wait for each other."""

    def __init__(self, hosts: int, file: Path) -> None:
        """Go on from what an earlier session saved in `file`."""
        self._file = file
        self._hosts = hosts
        self._ready: set[int] = set()
        self._all_ready = asyncio.Event()
        self._coordinator_known = asyncio.Event()
        try:
            self._begun = Begun.model_validate_json(file.read_text())
        except (OSError, ValidationError):
            self._begun = Begun()
        if self._begun.coordinator:
            self._coordinator_known.set()

    @property
    def stopped(self) -> bool:
        """Whether the attempt was stopped."""
        return self._begun.stopped

    @property
    def grace(self) -> float:
        """Seconds that a stopped program has to end by itself."""
        return self._begun.grace

    def ready(self, host: int) -> None:
        """A host is prepared."""
        self._ready.add(host)
        if len(self._ready) == self._hosts:
            self._all_ready.set()

    def away(self, host: int) -> None:
        """A host cannot be reached: while nothing has started, the others wait for it."""
        self._ready.discard(host)
        self._all_ready.clear()

    def found_running(self, coordinator: str) -> None:
        """A host already runs the program: the others join it."""
        if coordinator and not self._begun.coordinator:
            self._begun.coordinator = coordinator
            self._write()
        self._coordinator_known.set()

    async def coordinator(self, place: HostRank, free_port: Callable[[], Awaitable[int]]) -> str:
        """Wait until all are ready; the first host then chooses a port."""
        if place.rank == 0 and not self._coordinator_known.is_set():
            waits = {
                asyncio.ensure_future(self._all_ready.wait()),
                asyncio.ensure_future(self._coordinator_known.wait()),
            }
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if not self._coordinator_known.is_set():
                # Saved before any host starts, so that a later session uses the same port.
                self.found_running(f"{place.address.internal_ip}:{await free_port()}")
        await self._coordinator_known.wait()
        return self._begun.coordinator

    def examine(self, seconds: float) -> None:
        """A host wants a burn-in of so many seconds before the program; the longest counts."""
        if not self._coordinator_known.is_set():
            self._begun.burnin = max(self._begun.burnin, seconds)

    @property
    def burnin(self) -> float:
        """Seconds of burn-in on every host before the program, as it was when the first began."""
        return self._begun.burnin

    @property
    def begun(self) -> bool:
        """Whether a host may have started already."""
        return self._coordinator_known.is_set()

    def identify(self, host: int, told: Mapping[str, str]) -> None:
        """Remember what a host says it is; written down with the first start."""
        self._begun.identities[host] = dict(told)

    def identity(self, host: int) -> Mapping[str, str]:
        """What it said, to this session or an earlier one."""
        return self._begun.identities.get(host, {})

    def was_started(self, host: int) -> bool:
        """Whether the program was started there."""
        return host in self._begun.hosts

    def started(self, host: int) -> None:
        """Remember that the program was started there."""
        if host not in self._begun.hosts:
            self._begun.hosts.append(host)
            self._write()

    def stop(self, grace: float) -> None:
        """Let nothing start from now on."""
        self._begun.stopped, self._begun.grace = True, grace
        self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        draft.write_text(json.dumps(self._begun.model_dump()))
        draft.replace(self._file)


class SliceSession:
    """One attempt on one slice."""

    def __init__(
        self,
        program: Program,
        addresses: Sequence[Address],
        *,
        key: Path,
        known_hosts: Path,
        logs: Path,
        clock: Callable[[], float] = time.monotonic,
        timing: Timing = USUAL,
        node: str | None = None,
        log_limit: int | None = None,
        admit: Admit = admit_all,
    ) -> None:
        """Nothing is done before `start`.

        Host keys are pinned per slice, because clouds reuse addresses: `node` is its name; without
        one they are pinned per attempt. `log_limit` bytes of each host's log are kept. `admit` says
        of each host whether it may be used.
        """
        chosen = range(len(addresses)) if program.hosts is None else sorted(set(program.hosts))
        if unknown := [host for host in chosen if not 0 <= host < len(addresses)]:
            raise ValueError(f"hosts: {unknown[0]} is not on a slice of {len(addresses)} hosts")
        self.changed = asyncio.Event()
        name = quote(node or f"{program.job_id}-{program.attempt}", safe="").replace(".", "%2E")
        self.known_hosts_file = known_hosts / name
        self._gate = StartBarrier(len(addresses), logs / "started")
        self._tasks: list[asyncio.Task[None]] = []
        self._drivers = []
        ranks = {host: rank for rank, host in enumerate(chosen)}
        for index, address in enumerate(addresses):
            place = HostRank(index, address, ranks.get(index), len(ranks))
            means = Means(
                key=key,
                known=KnownHosts(self.known_hosts_file),
                log=logs / f"host-{index}.log",
                clock=clock,
                timing=timing,
                changed=self.changed.set,
                log_limit=log_limit,
                admit=admit,
            )
            self._drivers.append(HostDriver(program, place, self._gate, means))

    def start(self) -> None:
        """Begin to drive all hosts until they run the program."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(driver.drive()) for driver in self._drivers]

    def reports(self) -> tuple[HostReport, ...]:
        """What is known now."""
        return tuple(driver.report() for driver in self._drivers)

    async def stop(self, grace: float) -> None:
        """Send SIGTERM, and after `grace` SIGKILL, to the program on every host, for good."""
        self._gate.stop(grace)
        self.start()
        await asyncio.gather(*(driver.stop(grace) for driver in self._drivers))

    async def run(
        self,
        host: int,
        command: str,
        output: Output,
        timeout: float | None = None,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> int:
        """Run a shell command in the job's working copy on one host, ended after `timeout`.

        Its output goes to `output` as it comes; returns its exit code. Raises TimeoutError if the
        host cannot be reached for a while.
        """
        return await self._drivers[host].run(command, output, timeout, stdin)

    async def close(self) -> None:
        """Close the connections; the program goes on."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
