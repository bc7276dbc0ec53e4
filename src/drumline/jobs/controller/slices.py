"""The slices of this database in the cloud: requests, releases, orphans, and the zones to poll.

Each delete is repeated until a poll shows that the slice no longer exists. A delete that fails is
retried with a growing backoff, and the cloud's message is shown to the user.

The label of a slice is the id of the database that requested it. A labelled slice that this
database does not know was forgotten and is deleted, because it costs money. But a database can be
lost, or restored from an old copy, while its slices continue to run. So `owners.json` beside the
database keeps the ids of all databases of this home and the zones that they used. A slice with one
of these ids that is unknown here is an *orphan*. It is shown, and the user decides whether to
release or to adopt it. Drumline takes no action without the user, because a different home may own
the slice.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drumline.cloud.protocol import Cloud, CloudError, PlacementRequest
from drumline.hosts.protocol import Runner
from drumline.jobs.controller.polling import ZonePoll, ZonePolls
from drumline.jobs.controller.tasks import BackgroundTasks, RateLimit
from drumline.jobs.core.state import OldProgram, Placement, PlacementRole
from drumline.jobs.slice_settings import NO_SETTINGS, SliceSettings
from drumline.jobs.store.records import Record, SliceRow, Store
from drumline.observed import PlacementState, Refusal

log = logging.getLogger(__name__)

LABEL_OWNER = "drumline-owner"
LABEL_JOB = "drumline-job"
MAX_DOUBLINGS = 5
"""The maximum number of doublings of the pause after a failed delete."""
LONGEST_DELETE_PAUSE = 600.0
"""The longest pause in seconds between two deletes of a slice, which costs money meanwhile."""
BOOT_POLL_SECONDS = 900.0
"""Seconds from the grant of a slice in which its zone is polled more often: slices boot in minutes,
and cost money from READY on. One that boots for longer is probably broken."""
SWEEP_SECONDS = 300.0
"""Seconds between polls of zones without known slices, because a forgotten slice costs money."""


class SliceRequests:
    """Requests for slices with this database's label, limited to a number per minute."""

    def __init__(
        self,
        cloud: Cloud,
        runner: Runner,
        owner: str,
        limit: RateLimit,
        defaults: SliceSettings = NO_SETTINGS,
    ) -> None:
        """`owner` is the label of all slices of this database.

        `defaults` are the settings for all jobs.
        """
        self._cloud = cloud
        self._owner = owner
        self._runner = runner
        self._limit = limit
        self._defaults = defaults

    def take_request(self) -> bool:
        """Return True if one more request may be made now, and count it."""
        return self._limit.take()

    async def request(self, record: Record, placement: Placement) -> Refusal | str:
        """Request a placement. Return the name of its create operation, or the refusal."""
        settings = record.spec.settings.over(self._defaults)
        request = PlacementRequest(
            name=placement.name,
            zone=placement.zone,
            accelerator=placement.accelerator,
            tier=record.spec.capacity,
            labels={**settings.labels, LABEL_OWNER: self._owner, LABEL_JOB: record.job.id},
            slices=placement.slices,
            options=settings.options(),
            login=self._runner.login,
        )
        try:
            return await self._cloud.ask(request)
        except CloudError as error:
            return self._cloud.explain(error, placement.zone)


class Releases:
    """The slices to delete from the cloud."""

    def __init__(
        self,
        store: Store,
        cloud: Cloud,
        runner: Runner,
        polls: ZonePolls,
        wall: Callable[[], float],
        checkpoints_of: Callable[[str], str | None],
        timeout: float,
    ) -> None:
        """Continue the releases of previous servers.

        `wall` is the clock for saved times. `checkpoints_of` returns a job's checkpoint folder.
        After `timeout` seconds, a slice whose program does no harm delays no job.
        """
        self._timeout = timeout
        self._store = store
        self._cloud = cloud
        self._polls = polls
        self._runner = runner
        self._wall = wall
        self._checkpoints_of = checkpoints_of
        self._checkpoint_folders: dict[str, str | None] = {}
        """The checkpoint folder of each job that has a slice to delete."""
        self._retry_at: dict[str, float] = {}
        self._known_since: dict[str, float] = {}
        """The timestamp of this server's duty to delete a slice, by its monotonic clock."""
        self._failures: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        """The reason why the last delete failed, by slice."""
        self.rows: list[SliceRow] = store.releasing()
        """The slices to delete as of the beginning of this round."""

    def begin_round(self, now: float) -> None:
        """Read the slices to delete, once for the round."""
        self.rows = self._store.releasing()
        jobs = {row.job for row in self.rows if row.ready is not None}
        known = self._checkpoint_folders
        self._checkpoint_folders = {
            job: known[job] if job in known else self._checkpoints_of(job) for job in jobs
        }
        self._known_since = {row.name: self._known_since.get(row.name, now) for row in self.rows}
        self._record_observations()

    def _record_observations(self) -> None:
        """Record slices that were granted after their release, and slices without a program.

        A slice that was granted late costs money until it is deleted. And a deletion makes slices
        look alive that have ended before.
        """
        for row in self.rows:
            poll = self._polls.newest(row.zone)
            listed = poll.placements.get(row.name) if poll else None
            if listed is None:
                continue
            if row.program == OldProgram.NEVER:
                if row.ready is None and listed.endpoints:
                    self._store.record_ready(row.name, self._wall())
            elif not listed.may_run and row.program != OldProgram.ENDED:
                self._store.record_program(row.name, OldProgram.ENDED)

    def may_still_run(self, job_id: str, checkpoints: str | None, now: float) -> bool:
        """Return True if a program that writes to these checkpoints may run on an old slice.

        The slice may be this job's, or that of another job with the same checkpoint folder. Without
        `checkpoints`, any program of this job counts.
        """
        for row in self.rows:
            if row.ready is None or row.program in {OldProgram.NEVER, OldProgram.ENDED}:
                continue
            same_folder = (
                checkpoints is not None and self._checkpoint_folders.get(row.job) == checkpoints
            )
            if row.job != job_id and not same_folder:
                continue
            harmless = row.program == OldProgram.FENCED and checkpoints is not None
            if harmless and now - self._known_since.get(row.name, now) > self._timeout:
                continue
            poll = self._polls.newest(row.zone)
            if poll is None or row.name in poll.unknown:
                return True
            listed = poll.placements.get(row.name)
            if listed is not None and listed.may_run:
                return True
        return False

    def zones_of_requests(self, job_id: str) -> frozenset[str]:
        """Return the zones in which requests of a job without a program are not deleted yet."""
        return frozenset(
            row.zone
            for row in self.rows
            if row.job == job_id and (row.ready is None or row.program == OldProgram.NEVER)
        )

    def error_of(self, job_id: str) -> str:
        """Return the reason why the last delete of a job's slice failed; empty if none did."""
        for row in self.rows:
            if row.job == job_id and row.name in self.errors:
                return f"its slice in {row.zone} cannot be released: {self.errors[row.name]}"
        return ""

    def due(self, now: float, requesting: Collection[str]) -> Iterator[SliceRow]:
        """Yield the slices to delete now. Forget slices that do not exist and will not appear."""
        for row in self.rows:
            poll = self._polls.newest(row.zone)
            newer = poll is not None and poll.at > self._known_since.get(row.name, now)
            may_appear = row.name in requesting or self._polls.may_appear(row.name)
            if poll and newer and not may_appear and poll.is_gone(row.name):
                self._store.gone(row.name, self._wall())
                self._runner.forget(row.name)
                self._polls.forget(row.name)
                for by_name in (self._retry_at, self._failures, self.errors):
                    by_name.pop(row.name, None)
            elif now >= self._retry_at.get(row.name, 0.0):
                self._retry_at[row.name] = now + self._polls.interval
                yield row

    async def release(self, row: SliceRow) -> None:
        """Delete a slice, which may already be deleted."""
        try:
            poll = self._polls.newest(row.zone)
            listed = poll.placements.get(row.name) if poll else None
            slices = [part.name for part in listed.slices] if listed else []
            await self._cloud.release(row.zone, row.name, slices)
        except CloudError as error:
            log.info("release %s: %s", row.name, error)
            if row.name not in self._retry_at:
                return  # a poll has shown meanwhile that it no longer exists
            failures = self._failures[row.name] = self._failures.get(row.name, 0) + 1
            pause = self._polls.interval * 2.0 ** min(failures, MAX_DOUBLINGS)
            self._retry_at[row.name] += min(pause, LONGEST_DELETE_PAUSE)
            self.errors[row.name] = self._cloud.explain(error, row.zone).text
        else:
            self._failures.pop(row.name, None)
            self.errors.pop(row.name, None)
        if row.ready is not None:  # a request without slices costs nothing
            self._polls.poll_soon(row.zone)

    def release_forgotten(self, poll: ZonePoll, known: Collection[str]) -> None:
        """Release slices with this database's label that are not in its records."""
        known = {*known, *(row.name for row in self._store.releasing())}
        for name, listed in poll.placements.items():
            labelled = listed.labels.get(LABEL_OWNER) == self._store.owner
            if not labelled or name in known or listed.being_deleted:
                continue
            log.warning("slice %s in %s belongs to no job and is released", name, poll.zone)
            job_id, now = listed.labels.get(LABEL_JOB, ""), self._wall()
            row = SliceRow(name, job_id, poll.zone, listed.accelerator, now, None, now, None)
            self._store.adopt_orphan(row)


@dataclass(frozen=True)
class Orphan:
    """A slice of another database."""

    name: str
    zone: str
    accelerator: str
    state: str
    """The cloud's own name of the state."""
    job: str
    """The id of its job in that database."""
    owner: str
    hosts: int
    adoptable: bool
    """True if a job can continue with this slice."""

    def as_json(self) -> dict[str, Any]:
        """Return the orphan as the server sends it."""
        return asdict(self)


class DatabaseIds:
    """The ids of the databases of this home, their last jobs, and the zones that they used."""

    def __init__(self, path: Path) -> None:
        """Read the file at `path`. A file that cannot be read is replaced."""
        self._path = path
        self.last_jobs: dict[str, int] = {}
        """The highest job number so far, by database."""
        self.last_fence = 0
        """The highest fencing number so far, of any database."""
        self.zones: set[str] = set()
        self._saved = True
        try:
            saved = json.loads(path.read_text())
            self.last_jobs = {str(owner): int(last) for owner, last in saved["last_jobs"].items()}
            self.zones = {str(zone) for zone in saved["zones"]}
            self.last_fence = int(saved.get("last_fence", 0))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read: %s", path, error)

    def update(
        self, owner: str, last_job: int = 0, zones: Collection[str] = (), fence: int = 0
    ) -> None:
        """Save changes of a database. If the disk is full, the next call saves them."""
        last = max(last_job, self.last_jobs.get(owner, 0))
        unchanged = self.last_jobs.get(owner) == last and self.zones.issuperset(zones)
        if unchanged and fence <= self.last_fence and self._saved:
            return
        self.last_jobs[owner] = last
        self.last_fence = max(self.last_fence, fence)
        self.zones.update(zones)
        try:
            self._save()
            self._saved = True
        except OSError as error:
            self._saved = False
            log.warning("%s cannot be written: %s", self._path, error)

    def _save(self) -> None:
        new_path = self._path.with_suffix(".new")
        descriptor = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            numbers = {"last_jobs": self.last_jobs, "last_fence": self.last_fence}
            json.dump({**numbers, "zones": sorted(self.zones)}, file)
        new_path.rename(self._path)


class OrphanedSlices:
    """The orphans in the newest poll of each zone."""

    def __init__(self, owner: str, databases: DatabaseIds, last_job: int) -> None:
        """`owner` is the id of this database, and `last_job` its highest job number.

        If it once had a higher one, it is an older copy that does not know the jobs since then.
        """
        self._owner = owner
        self._databases = databases
        self._forgotten = range(last_job + 1, databases.last_jobs.get(owner, 0) + 1)
        self._by_zone: dict[str, list[Orphan]] = {}

    @property
    def zones(self) -> set[str]:
        """The zones that any database of this home has used."""
        return set(self._databases.zones)

    def record_job(self, job_id: str) -> None:
        """Save that this database has used a job number."""
        self._databases.update(self._owner, int(job_id))

    def update(self, poll: ZonePoll) -> None:
        """Take the orphans of a zone from its poll."""
        self._by_zone[poll.zone] = [*self._find(poll)]
        self._databases.update(self._owner, zones=[poll.zone])

    def _find(self, poll: ZonePoll) -> Iterator[Orphan]:
        for name, listed in poll.placements.items():
            owner, job = listed.labels.get(LABEL_OWNER, ""), listed.labels.get(LABEL_JOB, "")
            if not listed.being_deleted and self._is_orphan(owner, job):
                hosts = len(listed.endpoints)
                yield Orphan(
                    name, poll.zone, listed.accelerator, listed.cloud_state, job, owner, hosts,
                    adoptable=listed.state is PlacementState.READY and hosts > 0,
                )  # fmt: skip

    def _is_orphan(self, owner: str, job: str) -> bool:
        if owner == self._owner:
            return job.isdecimal() and int(job) in self._forgotten
        return owner in self._databases.last_jobs

    def all(self, known: Collection[str]) -> list[Orphan]:
        """Return the orphans that are not among the `known` slices."""
        return [
            orphan
            for zone in sorted(self._by_zone)
            for orphan in self._by_zone[zone]
            if orphan.name not in known
        ]

    def names(self) -> set[str]:
        """Return the names of the orphans, which are not released without the user."""
        return {orphan.name for orphans in self._by_zone.values() for orphan in orphans}


class ZoneWatch:
    """Polls zones with known slices at the usual interval, and all others now and then."""

    def __init__(
        self,
        store: Store,
        polls: ZonePolls,
        releases: Releases,
        orphans: OrphanedSlices,
        *,
        zones: Collection[str],
        placements: Callable[[], Iterable[Placement]],
        clock: Callable[[], float],
    ) -> None:
        """`zones` are those of the settings. `placements` returns those of all jobs now."""
        self._store = store
        self._polls = polls
        self._releases = releases
        self._orphans = orphans
        self._configured_zones = zones
        self._placements = placements
        self._clock = clock
        self._swept_at = float("-inf")

    def start_polls(self, tasks: BackgroundTasks) -> None:
        """Start every poll that is due."""
        now = self._clock()
        zones = {placement.zone for placement in self._placements()}
        zones |= {row.zone for row in self._releases.rows}
        for placement in self._placements():
            boots = placement.role is PlacementRole.STARTING and placement.booting_at is not None
            if boots and now - (placement.booting_at or now) < BOOT_POLL_SECONDS:
                self._polls.poll_soon(placement.zone)
        if now - self._swept_at > SWEEP_SECONDS:
            zones |= self._all_zones()
            self._swept_at = now
        for zone in self._polls.take_due(zones):
            tasks.start(f"look {zone}", partial(self._poll, zone))

    async def poll_all_zones(self) -> None:
        """Poll every zone that may have a slice of this home, now."""
        await asyncio.gather(*(self._poll(zone) for zone in self._all_zones()))

    def known_slices(self) -> set[str]:
        """Return the names of slices that a job holds or that are being deleted."""
        names = {placement.name for placement in self._placements()}
        return names | {row.name for row in self._store.releasing()}

    def _all_zones(self) -> set[str]:
        return set(self._configured_zones) | self._store.zones_used() | self._orphans.zones

    async def _poll(self, zone: str) -> None:
        # A job may have given up a slice since the start of this round.
        releasing = {row.name for row in self._store.releasing() if row.zone == zone}
        operations = {
            placement.name: placement.operation
            for placement in self._placements()
            if placement.operation and placement.role is PlacementRole.REQUESTED
        }
        poll = await self._polls.poll(zone, self._names_in(zone) | releasing, operations)
        if poll is not None:
            self._orphans.update(poll)
            # Jobs may have requested slices during the poll.
            unreadable_jobs = self._store.slices_of_unreadable_jobs()
            known = self._names_in(zone) | unreadable_jobs | self._orphans.names()
            self._releases.release_forgotten(poll, known)

    def _names_in(self, zone: str) -> set[str]:
        return {placement.name for placement in self._placements() if placement.zone == zone}
