"""Runs a program on all hosts of one slice.

A session has no state of its own: the hosts record what ran, and files beside the logs record what
the server must know. To continue after a restart, close the session and create a new one.

Hosts that `Program.hosts` leaves out are prepared like the others, run nothing and count as EXITED
with exit code 0. The hosts that run the program have ranks from 0 in the order of the slice:
DRUMLINE_HOST is the rank, DRUMLINE_HOSTS the number of ranks, and rank 0 is the coordinator.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from drumline.cancellation import cancel_tasks
from drumline.errors import HostError
from drumline.files import write_atomically
from drumline.hosts.connection import KnownHosts
from drumline.hosts.contact import describe_connection_error
from drumline.hosts.driver import CONNECTION_ERRORS, HostRunner, RunnerResources
from drumline.hosts.outputs import OutputFolder
from drumline.hosts.protocol import (
    Admit,
    CopiedOutputs,
    HostCopy,
    OnOutput,
    OutputTarget,
    admit_all,
)
from drumline.hosts.values import (
    Address,
    HostAssignment,
    ShellProgram,
    Step,
    Timing,
    known_hosts_name,
)
from drumline.observed import HostPhase, HostReport

__all__ = [
    "Address",
    "HostPhase",
    "HostReport",
    "ShellProgram",
    "SliceSession",
    "Step",
    "Timing",
]

DEFAULT_TIMING = Timing()
MAX_COPYING_HOSTS = 8
"""The number of hosts whose outputs are copied at the same time."""


class AttemptRecord(BaseModel):
    """The facts about an attempt that a new server needs, in the file `started` beside the logs."""

    coordinator: str = ""
    burnin: float = 0.0
    hosts: list[int] = []
    """The hosts on which the program was started."""
    identities: dict[int, dict[str, str]] = {}
    stopped: bool = False
    grace: float = 0.0


class StartBarrier:
    """Lets the hosts of a slice start together, and saves the record of the attempt.

    See `drumline.hosts.driver.Gate` for the methods.
    """

    def __init__(self, hosts: int, file: Path) -> None:
        """`file` has the record of a previous session, if there was one."""
        self._file = file
        self._hosts = hosts
        self._ready: set[int] = set()
        self._all_ready = asyncio.Event()
        self._coordinator_known = asyncio.Event()
        try:
            self._record = AttemptRecord.model_validate_json(file.read_text())
        except (OSError, ValidationError):
            self._record = AttemptRecord()
        if self._record.coordinator:
            self._coordinator_known.set()

    @property
    def stopped(self) -> bool:
        """True if the attempt was stopped: no program starts any more."""
        return self._record.stopped

    @property
    def grace(self) -> float:
        """The seconds between SIGTERM and SIGKILL for a stopped program."""
        return self._record.grace

    @property
    def burnin(self) -> float:
        """The seconds of burn-in on every host, fixed at the start of the first host."""
        return self._record.burnin

    @property
    def may_have_started(self) -> bool:
        """True if the program may run on some host."""
        return self._coordinator_known.is_set()

    def mark_ready(self, host: int) -> None:
        """Mark a host ready to start the program."""
        self._ready.add(host)
        if len(self._ready) == self._hosts:
            self._all_ready.set()

    def mark_unreachable(self, host: int) -> None:
        """Mark a host unreachable. Until the program starts, the other hosts wait for it."""
        self._ready.discard(host)
        self._all_ready.clear()

    def mark_started(self, host: int) -> None:
        """Record that the program was started on a host."""
        if host not in self._record.hosts:
            self._record.hosts.append(host)
            self._save()

    def was_started(self, host: int) -> bool:
        """Return True if this or a previous session started the program on a host."""
        return host in self._record.hosts

    def join_running(self, coordinator: str) -> None:
        """Let all hosts join a program that already runs with this coordinator."""
        if coordinator and not self._record.coordinator:
            self._record.coordinator = coordinator
            self._save()
        self._coordinator_known.set()

    async def coordinator(
        self, assignment: HostAssignment, free_port: Callable[[], Awaitable[int]]
    ) -> str:
        """Wait until all hosts are ready. Rank 0 then chooses the port."""
        if assignment.rank == 0 and not self._coordinator_known.is_set():
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
                self.join_running(f"{assignment.address.internal_ip}:{await free_port()}")
        await self._coordinator_known.wait()
        return self._record.coordinator

    def request_burn_in(self, seconds: float) -> None:
        """Request a burn-in before the program. The longest request counts."""
        if not self._coordinator_known.is_set():
            self._record.burnin = max(self._record.burnin, seconds)

    def set_identity(self, host: int, identity: Mapping[str, str]) -> None:
        """Record the names of a host. They are saved with the first start."""
        self._record.identities[host] = dict(identity)

    def identity(self, host: int) -> Mapping[str, str]:
        """Return the names of a host that were recorded in this or a previous session."""
        return self._record.identities.get(host, {})

    def stop(self, grace: float) -> None:
        """Prevent any further start."""
        self._record.stopped, self._record.grace = True, grace
        self._save()

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps(self._record.model_dump()))


class SliceSession:
    """One attempt on one slice."""

    def __init__(
        self,
        program: ShellProgram,
        addresses: Sequence[Address],
        *,
        key: Path,
        known_hosts: Path,
        logs: Path,
        clock: Callable[[], float] = time.monotonic,
        timing: Timing = DEFAULT_TIMING,
        node: str | None = None,
        log_limit: int | None = None,
        admit: Admit = admit_all,
    ) -> None:
        """Open no connection yet: `start` does.

        Clouds reuse addresses, so host keys are pinned per slice, by its name `node`, or per
        attempt without one. `log_limit` is the number of bytes to keep of each host's log. `admit`
        decides if a host may be used.
        """
        chosen = range(len(addresses)) if program.hosts is None else sorted(set(program.hosts))
        if unknown := [host for host in chosen if not 0 <= host < len(addresses)]:
            raise ValueError(f"hosts: {unknown[0]} is not on a slice of {len(addresses)} hosts")
        self.changed = asyncio.Event()
        self._clock = clock
        name = node or f"{program.job_id}-{program.attempt}"
        self.known_hosts_file = known_hosts / known_hosts_name(name)
        self._gate = StartBarrier(len(addresses), logs / "started")
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped: set[int] = set()
        """The hosts that confirmed a stop."""
        self._runners = []
        ranks = {host: rank for rank, host in enumerate(chosen)}
        for index, address in enumerate(addresses):
            assignment = HostAssignment(index, address, ranks.get(index), len(ranks))
            resources = RunnerResources(
                key=key,
                known_hosts=KnownHosts(self.known_hosts_file),
                log=logs / f"host-{index}.log",
                clock=clock,
                timing=timing,
                on_change=self.changed.set,
                log_limit=log_limit,
                admit=admit,
            )
            self._runners.append(HostRunner(program, assignment, self._gate, resources))

    def start(self) -> None:
        """Connect to all hosts and run the program on them."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(runner.run_forever()) for runner in self._runners]

    def reports(self) -> tuple[HostReport, ...]:
        """Return the current report of each host."""
        return tuple(runner.report() for runner in self._runners)

    async def stop(self, grace: float) -> tuple[int, ...]:
        """Stop the program for good: send SIGTERM on every host, and SIGKILL after `grace`.

        Return the hosts that did not confirm it in time. A repeated call stops only those.
        """
        self._gate.stop(grace)
        self.start()

        async def stop_host(host: int) -> None:
            if await self._runners[host].stop(grace):
                self._stopped.add(host)

        hosts = [host for host in range(len(self._runners)) if host not in self._stopped]
        await asyncio.gather(*map(stop_host, hosts))
        return tuple(host for host in hosts if host not in self._stopped)

    async def run(
        self,
        host: int,
        command: str,
        output: OnOutput,
        timeout: float | None = None,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> int:
        """Run a shell command in the job's working copy on one host and return its exit code.

        Its output goes to `output` at once. The command is ended after `timeout`. Raises HostError
        if the exit code is unknown, because the host cannot be reached or the connection is lost.
        """
        try:
            return await self._runners[host].run(command, output, timeout, stdin)
        except CONNECTION_ERRORS as error:
            raise HostError(describe_connection_error(error)) from error

    async def copy_outputs(
        self, paths: Sequence[str], target: OutputTarget, seconds: float
    ) -> CopiedOutputs:
        """Copy the outputs of every host that runs the program, in about `seconds` at most."""
        deadline, folder = self._clock() + seconds, OutputFolder(target)
        await folder.begin()
        at_once = asyncio.Semaphore(MAX_COPYING_HOSTS)

        async def copy_host(runner: HostRunner) -> HostCopy:
            async with at_once:
                return await runner.copy_outputs(paths, folder, deadline)

        runners = [runner for runner in self._runners if runner.assignment.rank is not None]
        copies = await asyncio.gather(*map(copy_host, runners))
        indices = [runner.assignment.index for runner in runners]
        return CopiedOutputs(dict(zip(indices, copies, strict=True)), *await folder.measure())

    async def close(self) -> None:
        """Close the connections. The program continues."""
        await cancel_tasks(self._tasks)
        self._tasks = []
