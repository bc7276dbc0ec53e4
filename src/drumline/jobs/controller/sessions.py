"""The connections to the hosts of current attempts: open, listen, stop, close."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from drumline.hosts.protocol import (
    AddressesUnreadableError,
    Admission,
    Admit,
    HostAccess,
    Hosts,
    Runner,
    Session,
)
from drumline.jobs.config import Config
from drumline.jobs.controller.host_history import HostHistory
from drumline.jobs.controller.polling import ZonePolls
from drumline.jobs.controller.program import build_program
from drumline.jobs.controller.tasks import BackgroundTasks
from drumline.jobs.core.state import AddressError, Candidate, Job, Placement
from drumline.jobs.folders import Folders, trim_logs
from drumline.jobs.store.records import Record
from drumline.observed import HostPhase, HostReport, ListedPlacement, Refusal

log = logging.getLogger(__name__)

AttemptKey = tuple[str, int]
"""A job's id and the number of its attempt."""


def attempt_key(job: Job) -> AttemptKey | None:
    """Return the key of the current attempt; None if there is none."""
    return (job.id, job.attempt.number) if job.attempt else None


class Sessions:
    """The connections of each attempt, since when they are open, and the attempts stopped."""

    def __init__(
        self,
        runner: Runner,
        config: Config,
        folders: Folders,
        host_history: HostHistory,
        clock: Callable[[], float],
        mean_lifetime: Callable[[Candidate], float | None],
    ) -> None:
        """`host_history` decides which hosts may be used.

        `mean_lifetime` returns that of slices of a zone and accelerator in seconds, or None.
        """
        self._runner = runner
        self._mean_life = mean_lifetime
        self._host_history = host_history
        self._config = config
        self._folders = folders
        self._clock = clock
        self._sessions: dict[AttemptKey, Session] = {}
        self._listening_since: dict[AttemptKey, float] = {}
        self._address_errors: dict[AttemptKey, AddressError] = {}
        self._stopped: dict[AttemptKey, tuple[int, ...]] = {}
        """The hosts that did not confirm the last stop of an attempt."""

    def get(self, key: AttemptKey | None) -> Session | None:
        """Return the connections of an attempt; None if they are not open."""
        return self._sessions.get(key) if key else None

    def reports(self, job: Job) -> tuple[HostReport, ...]:
        """Return the newest report of each host of the current attempt."""
        session = self.get(attempt_key(job))
        return session.reports() if session else ()

    def listening_since(self, job: Job) -> float | None:
        """Return when this server started to listen to the hosts; None if it does not."""
        key = attempt_key(job)
        return self._listening_since.get(key) if key else None

    def address_error(self, job: Job) -> AddressError | None:
        """Return the reason for missing connections; None without a failure."""
        key = attempt_key(job)
        return self._address_errors.get(key) if key else None

    def record_address_error(self, key: AttemptKey, refusal: Refusal) -> None:
        """Record that the addresses of an attempt's hosts could not be read."""
        now, last = self._clock(), self._address_errors.get(key)
        self._address_errors[key] = AddressError(refusal, last.since if last else now, now)

    def stopped(self, job: Job) -> bool:
        """Return True if every host confirmed that the program is stopped."""
        key = attempt_key(job)
        return key in self._stopped and not self._stopped[key]

    def unreachable(self, job: Job) -> tuple[int, ...]:
        """Return the hosts that did not confirm the last stop."""
        key = attempt_key(job)
        return self._stopped.get(key, ()) if key else ()

    async def find_hosts(self, record: Record, listed: ListedPlacement) -> Hosts:
        """Return the hosts of a slice. Raises AddressesUnreadableError."""
        return await self._runner.find_hosts(listed, self._access(record))

    async def logins(self, record: Record, listed: ListedPlacement) -> list[dict[str, Any]]:
        """Return the login to each host. Raises CloudError."""
        archive = record.spec.archive
        sha = archive.sha if archive else None
        return await self._runner.logins(listed, self._access(record), record.job.id, sha)

    def _access(self, record: Record) -> HostAccess:
        return record.spec.settings.over(self._config.slice_settings).access()

    def was_contacted(self, placement: Placement) -> bool:
        """Return True if a host of a slice was ever reached. No data was sent before that."""
        return self._runner.was_contacted(placement.name)

    def open(self, record: Record, placement: Placement, hosts: Hosts) -> None:
        """Connect to the hosts and run the current attempt on them."""
        key = attempt_key(record.job)
        assert key is not None
        job_id, attempt = key
        self._sessions[key] = session = self._runner.session(
            build_program(
                record, attempt, placement, self._folders, self._mean_life(placement.candidate)
            ),
            placement.name,
            hosts,
            logs=self._folders.logs(job_id, attempt),
            log_limit=self._config.log_limit(placement.hosts),
            clock=self._clock,
            admit=self._admission(record, placement),
        )
        self._listening_since[key] = self._clock()
        self._address_errors.pop(key, None)
        session.start()

    def _admission(self, record: Record, placement: Placement) -> Admit:
        """Return a function that checks each host once against the host history."""
        seconds = self._config.burn_in
        usual = 0.0 if placement.proved else seconds[record.spec.burnin]

        @cache
        def check(index: int, identity: tuple[tuple[str, str], ...]) -> Admission:
            clearance = self._host_history.record_use(
                index, dict(identity), placement, record.job.id
            )
            if clearance.refusal:
                return Admission(refused=clearance.refusal)
            needs_long_burn_in = clearance.burn_in_reason and not placement.proved
            return Admission(burnin=max(usual, seconds["long"]) if needs_long_burn_in else usual)

        return lambda index, identity: check(index, tuple(sorted(identity.items())))

    async def stop(self, key: AttemptKey, grace: float) -> None:
        """Stop the program, and record the hosts that did not confirm it."""
        session = self._sessions.get(key)
        if session is None:
            return
        hosts = await session.stop(grace)
        if hosts and hosts != self._stopped.get(key):
            log.warning("job %s: hosts %s did not confirm the stop", key[0], hosts)
        self._stopped[key] = hosts

    def mark_stopped(self, key: AttemptKey) -> None:
        """Record that no program of an attempt was ever sent to a host."""
        self._stopped[key] = ()

    def mark_unreachable(self, key: AttemptKey, hosts: int) -> None:
        """Record that no host of an attempt could be told to stop."""
        self._stopped[key] = tuple(range(hosts))

    def end(self, key: AttemptKey) -> Session | None:
        """Forget an attempt that is over. Return its connections, to be closed."""
        self._stopped.pop(key, None)
        self._address_errors.pop(key, None)
        self._listening_since.pop(key, None)
        session = self._sessions.pop(key, None)
        if session is not None:
            session.changed.set()  # end the task that waits for its reports
        return session

    def restart_listening(self) -> None:
        """Count silence from now on, after an interruption of this server."""
        self._listening_since = dict.fromkeys(self._listening_since, self._clock())

    async def close(self) -> None:
        """Close all connections. The programs continue."""
        sessions = self._sessions.values()
        await asyncio.gather(*(s.close() for s in sessions), return_exceptions=True)


class AttemptRunner:
    """Starts the tasks that run attempts on hosts: connect, listen, stop."""

    def __init__(
        self,
        records: Mapping[str, Record],
        sessions: Sessions,
        polls: ZonePolls,
        tasks: BackgroundTasks,
        folders: Folders,
        config: Config,
        *,
        on_reports: Callable[[Job, tuple[HostReport, ...]], None],
        wake: Callable[[], None],
    ) -> None:
        """`on_reports` takes in new reports. `wake` starts the next round of the supervisor."""
        self._records = records
        self._sessions = sessions
        self._polls = polls
        self._tasks = tasks
        self._folders = folders
        self._config = config
        self._on_reports = on_reports
        self._wake = wake

    def run(self, job: Job, placement: Placement) -> None:
        """Start to connect to the hosts if there is no connection yet, and to listen."""
        key = attempt_key(job)
        if key and self._sessions.get(key):
            self._start_listening(key, placement.zone)
        elif key and self.hosts_listed(placement):
            # Only after a poll has listed the hosts: otherwise the task would end at once and be
            # restarted in every round, for as long as polls fail.
            name = f"drive {placement.name}"
            self._tasks.start(name, lambda: self._connect(job.id, placement), job.id)

    def hosts_listed(self, placement: Placement) -> bool:
        """Return True if a poll has listed all hosts."""
        listed = self._polls.listed(placement)
        return listed is not None and len(listed.endpoints) == placement.hosts

    def stop(self, job: Job, placement: Placement) -> None:
        """Start to stop the program. A server that has just started first needs a poll."""
        key = attempt_key(job)
        if key is None or self._sessions.stopped(job):
            return
        if self._sessions.get(key) is None and self._polls.observation(placement) is None:
            self._polls.poll_soon(placement.zone)
            return
        if self._sessions.get(key) is None and not self.hosts_listed(placement):
            self._sessions.mark_unreachable(key, placement.hosts)
            return
        self._tasks.start(f"stop {key[0]}/{key[1]}", lambda: self._stop(key, placement), job.id)

    async def _connect(self, job_id: str, placement: Placement) -> None:
        """Connect to the hosts and run the current attempt on them."""
        record = self._records.get(job_id)
        if record is None:
            return
        attempt, listed = record.job.attempt, self._polls.listed(placement)
        if attempt is None or listed is None or len(listed.endpoints) != placement.hosts:
            return
        try:
            hosts = await self._sessions.find_hosts(record, listed)
        except AddressesUnreadableError as error:
            self._sessions.record_address_error((job_id, attempt.number), error.refusal)
            raise
        if attempt.number > 3:
            logs, max_bytes = self._folders.logs(job_id), 3 * self._config.log_bytes // 4
            await asyncio.to_thread(trim_logs, logs, attempt.number, max_bytes)
        # The job may have changed during the calls above.
        current = self._records.get(job_id)
        if current is None or current.job.active is None or current.job.attempt != attempt:
            return
        if current.job.active.name == placement.name:
            self._sessions.open(record, placement, hosts)
            self._start_listening((job_id, attempt.number), placement.zone)

    def _start_listening(self, key: AttemptKey, zone: str) -> None:
        job_id, attempt = key
        self._tasks.start(f"listen {job_id}/{attempt}", lambda: self._listen(key, zone), job_id)

    async def _listen(self, key: AttemptKey, zone: str) -> None:
        """Wake the supervisor when a host's state changes, and poll its zone soon.

        A heartbeat alone does not wake it: with ten per second from each job, rounds would keep the
        server busy.
        """
        session = self._sessions.get(key)
        before: list[tuple[HostPhase, str, int | None, str, str]] = []
        while session is not None and self._sessions.get(key) is session:
            await session.changed.wait()
            session.changed.clear()
            state = [
                (r.phase, r.detail, r.exit_code, r.error, r.shutdown_reason)
                for r in session.reports()
            ]
            record = self._records.get(key[0])
            if state == before and record is not None:
                self._on_reports(record.job, self._sessions.reports(record.job))
                continue
            if [host[:2] for host in state] != [host[:2] for host in before]:
                self._polls.poll_soon(zone)
            before = state
            self._wake()

    async def _stop(self, key: AttemptKey, placement: Placement) -> None:
        record = self._records.get(key[0])
        if record is None:
            return
        if self._sessions.get(key) is None:
            try:
                await self._connect(key[0], placement)
            except AddressesUnreadableError:
                attempt = record.job.attempt
                if attempt is None or attempt.sent_at is None:
                    # No host was ever reached, so no program was ever sent to one.
                    self._sessions.mark_stopped(key)
                else:
                    self._sessions.mark_unreachable(key, placement.hosts)
                return
        await self._sessions.stop(key, record.job.grace)
