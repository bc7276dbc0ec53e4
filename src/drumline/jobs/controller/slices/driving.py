"""The hosts of a slice: connect to them, have them run an attempt, listen, stop."""

import asyncio
from collections.abc import Callable, Mapping

from drumline.jobs.config import Config
from drumline.jobs.controller.actions import Actions
from drumline.jobs.controller.log_limit import trim
from drumline.jobs.controller.polling import ZonePolls
from drumline.jobs.controller.slices.sessions import Run, Sessions, run_of
from drumline.jobs.core.state import Job, Placement
from drumline.jobs.folders import Folders
from drumline.jobs.store.records import Record
from drumline.observed.hosts import HostPhase, HostReport


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
