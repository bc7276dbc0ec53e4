"""The open connections to the hosts of every attempt that is under way."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from drumline.cloud.protocol import Cloud, CloudError
from drumline.hosts.values import Address, Admission, Admit
from drumline.jobs.config import Config
from drumline.jobs.controller.memory import HostMemory
from drumline.jobs.controller.program import program_of
from drumline.jobs.core.state import Job, Placement
from drumline.jobs.folders import Folders
from drumline.jobs.store.records import Record
from drumline.observed.hosts import HostReport
from drumline.observed.placements import ListedPlacement

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
