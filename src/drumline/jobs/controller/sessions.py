"""The open connections to the hosts of every attempt that is under way."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from drumline.cloud.protocol import Cloud, CloudError
from drumline.hosts.values import Address, Admission, Admit
from drumline.jobs.config import Config
from drumline.jobs.controller.actions import Actions
from drumline.jobs.controller.host_history import HostMemory
from drumline.jobs.controller.polling import ZonePolls
from drumline.jobs.controller.program import program_of
from drumline.jobs.core.state import Job, Placement
from drumline.jobs.folders import Folders, trim
from drumline.jobs.store.records import Record
from drumline.observed import HostPhase, HostReport, ListedPlacement

if TYPE_CHECKING:
    from drumline.hosts.session import SliceSession

log = logging.getLogger(__name__)

STOP_LIMIT = 10.0
"""Seconds beyond the grace that the hosts have to confirm that a program was ended."""

Run = tuple[str, int]
"""A job's id and the number of its attempt."""


def run_of(job: Job) -> Run | None:
    """The attempt that is under way."""
    return (job.id, job.attempt.number) if job.attempt else None


class Sessions:
    """For each attempt: its connections, since when they are open, whether it was stopped."""

    def __init__(
        self,
        cloud: Cloud,
        config: Config,
        folders: Folders,
        memory: HostMemory,
        clock: Callable[[], float],
    ) -> None:
        """`memory` says which hosts may be used, `clock` when they are heard."""
        self._cloud = cloud
        self._memory = memory
        self._config = config
        self._folders = folders
        self._clock = clock
        self._open: dict[Run, SliceSession] = {}
        self._since: dict[Run, float] = {}
        self._stopped: set[Run] = set()

    def get(self, run: Run | None) -> "SliceSession | None":
        """The connections of an attempt, where they are open."""
        return self._open.get(run) if run else None

    def reports(self, job: Job) -> tuple[HostReport, ...]:
        """The newest reports from the hosts of the attempt under way."""
        session = self.get(run_of(job))
        return session.reports() if session else ()

    def listening_since(self, job: Job) -> float | None:
        """Since when we listen to its hosts: earlier silence says nothing about them."""
        run = run_of(job)
        return self._since.get(run) if run else None

    def stopped(self, job: Job) -> bool:
        """Whether its program was stopped: it ended, or its time to do so was up."""
        return run_of(job) in self._stopped

    async def addresses(self, listed: ListedPlacement) -> list[Address]:
        """How to reach each host, with its host key where the cloud publishes it."""
        try:
            keys = await self._cloud.host_keys(listed)
        except CloudError:
            keys = []
        ends = listed.endpoints
        keys = [*keys, *[None] * len(ends)][: len(ends)]
        return [
            Address(end.ssh_ip, end.ssh_port, end.internal_ip, key)
            for end, key in zip(ends, keys, strict=True)
        ]

    def begin(self, record: Record, held: Placement, addresses: Sequence[Address]) -> None:
        """Open connections to the hosts and have them run the attempt under way."""
        # Imported here, because SSH takes longer to load than all the rest of the server.
        from drumline.hosts.session import SliceSession

        run = run_of(record.job)
        assert run is not None
        job_id, number = run
        self._open[run] = session = SliceSession(
            program_of(record, number, held, self._folders),
            addresses,
            key=self._folders.key,
            known_hosts=self._folders.all_known_hosts,
            node=held.name,
            logs=self._folders.logs(job_id, number),
            clock=self._clock,
            timing=self._config.timing,
            log_limit=self._config.log_limit(held.hosts),
            admit=self._admission(record, held),
        )
        self._since[run] = self._clock()
        session.start()

    def _admission(self, record: Record, held: Placement) -> Admit:
        """Asks the memory about each host, once."""
        seconds = self._config.burn_in
        usual = 0.0 if held.proved else seconds[record.spec.burnin]

        @cache
        def welcome(index: int, told: tuple[tuple[str, str], ...]) -> Admission:
            found = self._memory.met(index, dict(told), held, record.job.id)
            if found.refused:
                return Admission(refused=found.refused)
            examined = found.examined and not held.proved
            return Admission(burnin=max(usual, seconds["long"]) if examined else usual)

        return lambda index, told: welcome(index, tuple(sorted(told.items())))

    async def stop(self, run: Run, grace: float) -> None:
        """End the program on every host that can be reached; then it counts as stopped."""
        session = self._open.get(run)
        if session is not None:
            try:
                async with asyncio.timeout(grace + STOP_LIMIT):
                    await session.stop(grace)
            except TimeoutError:
                log.warning("job %s: some hosts did not confirm the stop", run[0])
        self._stopped.add(run)

    def end(self, run: Run) -> "SliceSession | None":
        """Forget an attempt that is over; returns its connections, to be closed."""
        self._stopped.discard(run)
        self._since.pop(run, None)
        session = self._open.pop(run, None)
        if session is not None:
            session.changed.set()  # those who wait for its news need not wait any longer
        return session

    def listen_again(self) -> None:
        """Begin to listen again after a time when we could not: no host was silent meanwhile."""
        self._since = dict.fromkeys(self._since, self._clock())

    async def close(self) -> None:
        """Close all connections; the programs go on."""
        await asyncio.gather(*(s.close() for s in self._open.values()), return_exceptions=True)


class Driving:
    """Starts what the hosts of jobs are to do, each in a task of its own."""

    def __init__(
        self,
        records: Mapping[str, Record],
        sessions: Sessions,
        polls: ZonePolls,
        actions: Actions,
        folders: Folders,
        config: Config,
        *,
        heard: Callable[[Job, tuple[HostReport, ...]], None],
        wake: Callable[[], None],
    ) -> None:
        """`heard` takes in what hosts report, `wake` starts the next round of the supervisor."""
        self._records = records
        self._sessions = sessions
        self._polls = polls
        self._actions = actions
        self._folders = folders
        self._config = config
        self._heard = heard
        self._wake = wake

    def go_on(self, job: Job, held: Placement) -> None:
        """Connect to the hosts if nobody has, and listen to them."""
        run = run_of(job)
        if run and self._sessions.get(run):
            self._keep_listening(run, held.zone)
        elif run and self.hosts_known(held):
            # Not before a poll has shown where its hosts are: a drive that comes back with
            # nothing done would be ordered again at once, for as long as polls fail.
            self._actions.start(f"drive {held.name}", lambda: self._drive(job.id, held), job.id)

    def hosts_known(self, held: Placement) -> bool:
        """Whether a poll has shown where all hosts are."""
        listed = self._polls.listed(held)
        return listed is not None and len(listed.endpoints) == held.hosts

    def stop_soon(self, job: Job, held: Placement) -> None:
        """Stop the program; a server that has just started must first find its hosts."""
        run = run_of(job)
        if run is None or self._sessions.stopped(job):
            return
        if self._sessions.get(run) is None and self._polls.of(held) is None:
            self._polls.soon(held.zone)
            return
        self._actions.start(f"stop {run[0]}/{run[1]}", lambda: self._stop(run, held), job.id)

    async def _drive(self, job_id: str, held: Placement) -> None:
        """Open connections to the hosts and have them run the attempt."""
        record = self._records.get(job_id)
        if record is None:
            return
        attempt, listed = record.job.attempt, self._polls.listed(held)
        if attempt is None or listed is None or len(listed.endpoints) != held.hosts:
            return
        addresses = await self._sessions.addresses(listed)
        if attempt.number > 3:
            logs, most = self._folders.logs(job_id), 3 * self._config.log_bytes // 4
            await asyncio.to_thread(trim, logs, attempt.number, most)
        now = self._records.get(job_id)
        if now is None or now.job.placement is None or now.job.placement.name != held.name:
            return
        if now.job.attempt != attempt:
            return
        self._sessions.begin(record, held, addresses)
        self._keep_listening((job_id, attempt.number), held.zone)

    def _keep_listening(self, run: Run, zone: str) -> None:
        job_id, number = run
        self._actions.start(f"listen {job_id}/{number}", lambda: self._listen(run, zone), job_id)

    async def _listen(self, run: Run, zone: str) -> None:
        """Wake the loop when a host has news; news of trouble brings the next poll forward.

        A heartbeat alone is taken in here: with ten a second from each job, a round for each
        would keep the server busy with nothing else.
        """
        session = self._sessions.get(run)
        before: list[tuple[HostPhase, str, int | None, str, str]] = []
        while session is not None and self._sessions.get(run) is session:
            await session.changed.wait()
            session.changed.clear()
            state = [
                (r.phase, r.detail, r.exit_code, r.error, r.going_down) for r in session.reports()
            ]
            record = self._records.get(run[0])
            if state == before and record is not None:
                self._heard(record.job, self._sessions.reports(record.job))
                continue
            if [host[:2] for host in state] != [host[:2] for host in before]:
                self._polls.soon(zone)
            before = state
            self._wake()

    async def _stop(self, run: Run, held: Placement) -> None:
        record = self._records.get(run[0])
        if record is None:
            return
        if self._sessions.get(run) is None:
            await self._drive(run[0], held)
        await self._sessions.stop(run, record.job.grace)
