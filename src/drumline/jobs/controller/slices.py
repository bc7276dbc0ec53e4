"""Requests for slices, limited to so many a minute."""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drumline.chips import slice_of
from drumline.cloud.protocol import Cloud, CloudError, PlacementRequest
from drumline.jobs.controller.actions import Actions, Budget
from drumline.jobs.controller.polling import ZonePoll, ZonePolls
from drumline.jobs.core.state import Placement
from drumline.jobs.folders import Folders
from drumline.jobs.store.records import Record, SliceRow, Store
from drumline.observed import PlacementState, Refusal


class Requests:
    """Requests slices with our label, and with our SSH key for their hosts."""

    def __init__(self, cloud: Cloud, owner: str, public_key: str, budget: Budget) -> None:
        """`owner` is the label of all slices of this database."""
        self._cloud = cloud
        self._owner = owner
        self._public_key = public_key
        self._budget = budget

    def may_ask(self) -> bool:
        """Whether one more request may be made now; if so, it is counted."""
        return self._budget.take()

    async def ask(self, record: Record, held: Placement) -> Refusal | None:
        """Ask for a placement; returns why it was refused, if it was."""
        wanted = slice_of(held.accelerator)
        request = PlacementRequest(
            name=held.name,
            zone=held.zone,
            accelerator=held.accelerator,
            image=wanted.runtime_image or "",
            tier=record.spec.capacity,
            labels={LABEL_OWNER: self._owner, LABEL_JOB: record.job.id},
            # With OS Login on, the hosts would not read the key from the metadata.
            metadata={"ssh-keys": f"drumline:{self._public_key}", "enable-oslogin": "FALSE"},
            slices=held.slices,
        )
        try:
            await self._cloud.ask(request)
        except CloudError as error:
            return self._cloud.explain(error, held.zone)
        return None


log = logging.getLogger(__name__)

LABEL_OWNER = "drumline-owner"
LABEL_JOB = "drumline-job"
MOST_DOUBLED = 5
"""How often the backoff doubles: a failing delete is retried at least every 32 intervals."""


class Releases:
    """The slices that are to be deleted from the cloud."""

    def __init__(
        self,
        store: Store,
        cloud: Cloud,
        polls: ZonePolls,
        folders: Folders,
        wall: Callable[[], float],
        checkpoints_of: Callable[[str], str | None],
    ) -> None:
        """Take over what earlier servers left to be released.

        `wall` gives the times to save, `checkpoints_of` the checkpoint folder of a job.
        """
        self._store = store
        self._cloud = cloud
        self._polls = polls
        self._folders = folders
        self._wall = wall
        self._checkpoints_of = checkpoints_of
        self._written_to: dict[str, str | None] = {}
        """The checkpoint folder of each job that has a slice to delete."""
        self._again_at: dict[str, float] = {}
        self._known_since: dict[str, float] = {}
        """When this server learnt, by its monotonic clock, that a slice is to be deleted."""
        self._failures: dict[str, int] = {}
        self.trouble: dict[str, str] = {}
        """Why the last delete failed, by slice."""
        self.rows: list[SliceRow] = store.releasing()
        """The slices to delete as of the beginning of this round."""

    def begin_round(self, now: float) -> None:
        """Read the slices to delete, once for the round."""
        self.rows = self._store.releasing()
        jobs = {row.job for row in self.rows if row.ready is not None}
        known = self._written_to
        self._written_to = {
            job: known[job] if job in known else self._checkpoints_of(job) for job in jobs
        }
        self._known_since = {row.name: self._known_since.get(row.name, now) for row in self.rows}

    def may_still_run(self, job_id: str, checkpoints: str | None) -> bool:
        """Return True if a program that writes to these checkpoints may run on an old slice.

        The slice may be this job's, or that of another job with the same checkpoint folder.
        """
        for row in self.rows:
            if row.ready is None:
                continue
            same_folder = checkpoints is not None and self._written_to.get(row.job) == checkpoints
            if row.job != job_id and not same_folder:
                continue
            poll = self._polls.newest(row.zone)
            if poll is None or row.name in poll.unsure:
                return True
            listed = poll.placements.get(row.name)
            if listed is not None and listed.may_run:
                return True
        return False

    def trouble_of(self, job_id: str) -> str:
        """Why the last delete of a slice of a job failed; empty where none did."""
        for row in self.rows:
            if row.job == job_id and row.name in self.trouble:
                return f"its slice in {row.zone} cannot be released: {self.trouble[row.name]}"
        return ""

    def due(self, now: float, asking: Collection[str]) -> Iterator[SliceRow]:
        """The slices to delete now; those that are gone are dropped, unless being requested."""
        for row in self.rows:
            poll = self._polls.newest(row.zone)
            newer = poll is not None and poll.at > self._known_since[row.name]
            if poll and newer and row.name not in asking and poll.is_gone(row.name):
                self._store.gone(row.name, self._wall())
                self._folders.forget_known_hosts(row.name)
                self._polls.forget(row.name)
                for kept in (self._again_at, self._failures, self.trouble):
                    kept.pop(row.name, None)
            elif now >= self._again_at.get(row.name, 0.0):
                self._again_at[row.name] = now + self._polls.interval
                yield row

    async def release(self, row: SliceRow) -> None:
        """Delete a slice; no error if it is gone already."""
        try:
            poll = self._polls.newest(row.zone)
            listed = poll.placements.get(row.name) if poll else None
            slices = [part.name for part in listed.slices] if listed else []
            await self._cloud.release(row.zone, row.name, slices)
        except CloudError as error:
            failures = self._failures[row.name] = self._failures.get(row.name, 0) + 1
            self._again_at[row.name] += self._polls.interval * (2.0 ** min(failures, MOST_DOUBLED))
            self.trouble[row.name] = self._cloud.explain(error, row.zone).said
            log.info("release %s: %s", row.name, error)
        else:
            self._failures.pop(row.name, None)
            self.trouble.pop(row.name, None)
        self._polls.soon(row.zone)

    def take_in_strays(self, poll: ZonePoll, held: Collection[str]) -> None:
        """Release what has our label and belongs to no job."""
        owner = self._store.owner
        known = {*held, *(row.name for row in self._store.releasing())}
        for name, listed in poll.placements.items():
            ours = listed.labels.get(LABEL_OWNER) == owner
            if ours and name not in known and not listed.being_deleted:
                log.warning("stray slice %s in %s is released", name, poll.zone)
                job = listed.labels.get(LABEL_JOB, "")
                now = self._wall()
                stray = SliceRow(name, job, poll.zone, listed.accelerator, now, None, now, None)
                self._store.adopt_stray(stray)


@dataclass(frozen=True)
class Stray:
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
    """Whether a job can go on with this slice."""

    def as_json(self) -> dict[str, Any]:
        """The stray as the server sends it."""
        return asdict(self)


class Owners:
    """The databases that this home has had: their ids, their last jobs, and the zones they used."""

    def __init__(self, path: Path) -> None:
        """Read the file at `path`; one that cannot be read is started again."""
        self._path = path
        self.last_jobs: dict[str, int] = {}
        """The highest job number so far, by database."""
        self.last_fence = 0
        """The highest fencing number so far, of any database."""
        self.zones: set[str] = set()
        self._written = True
        try:
            known = json.loads(path.read_text())
            self.last_jobs = {str(owner): int(last) for owner, last in known["last_jobs"].items()}
            self.zones = {str(zone) for zone in known["zones"]}
            self.last_fence = int(known.get("last_fence", 0))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as wrong:
            log.warning("%s cannot be read: %s", path, wrong)

    def remember(
        self, owner: str, last_job: int = 0, zones: Collection[str] = (), fence: int = 0
    ) -> None:
        """Save what is new about a database; where the disk is full, the next time."""
        last = max(last_job, self.last_jobs.get(owner, 0))
        known = self.last_jobs.get(owner) == last and self.zones.issuperset(zones)
        if known and fence <= self.last_fence and self._written:
            return
        self.last_jobs[owner] = last
        self.last_fence = max(self.last_fence, fence)
        self.zones.update(zones)
        try:
            self._write()
            self._written = True
        except OSError as trouble:
            self._written = False
            log.warning("%s cannot be written: %s", self._path, trouble)

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            last = {"last_jobs": self.last_jobs, "last_fence": self.last_fence}
            json.dump({**last, "zones": sorted(self.zones)}, file)
        new.rename(self._path)


class Strays:
    """The strays in the newest poll of each zone."""

    def __init__(self, owner: str, owners: Owners, last_job: int) -> None:
        """`owner` is this database, and `last_job` its highest job number.

        If it once had a higher one, it is an older copy, to which those jobs are unknown.
        """
        self._owner = owner
        self._owners = owners
        self._forgotten = range(last_job + 1, owners.last_jobs.get(owner, 0) + 1)
        self._seen: dict[str, list[Stray]] = {}

    @property
    def zones(self) -> set[str]:
        """Zones where strays may be, whatever this database says."""
        return set(self._owners.zones)

    def gave(self, job_id: str) -> None:
        """Note that this database has given a job that number."""
        self._owners.remember(self._owner, int(job_id))

    def see(self, poll: ZonePoll) -> None:
        """Take in a poll of a zone."""
        self._seen[poll.zone] = [*self._found(poll)]
        self._owners.remember(self._owner, zones=[poll.zone])

    def _found(self, poll: ZonePoll) -> Iterator[Stray]:
        for name, seen in poll.placements.items():
            owner, job = seen.labels.get(LABEL_OWNER, ""), seen.labels.get(LABEL_JOB, "")
            if not seen.being_deleted and self._unknown(owner, job):
                hosts = len(seen.endpoints)
                yield Stray(
                    name, poll.zone, seen.accelerator, seen.word, job, owner, hosts,
                    adoptable=seen.state is PlacementState.READY and hosts > 0,
                )  # fmt: skip

    def _unknown(self, owner: str, job: str) -> bool:
        if owner == self._owner:
            return job.isdecimal() and int(job) in self._forgotten
        return owner in self._owners.last_jobs

    def all(self, known: Collection[str]) -> list[Stray]:
        """The strays that are not among the slices `known` by now."""
        return [
            stray
            for zone in sorted(self._seen)
            for stray in self._seen[zone]
            if stray.name not in known
        ]

    def names(self) -> set[str]:
        """The names of slices that are not to be released unasked."""
        return {stray.name for found in self._seen.values() for stray in found}


SWEEP_SECONDS = 300.0
"""Seconds between polls of zones where we should have nothing: a forgotten slice costs money."""


class ZoneWatch:
    """Polls zones where we have something at the usual interval, and all others now and then."""

    def __init__(
        self,
        store: Store,
        polls: ZonePolls,
        releases: Releases,
        strays: Strays,
        *,
        zones: Collection[str],
        held: Callable[[], Iterable[Placement]],
        clock: Callable[[], float],
    ) -> None:
        """`zones` are those the user named; `held` returns what jobs hold or wait for now."""
        self._store = store
        self._polls = polls
        self._releases = releases
        self._strays = strays
        self._named = zones
        self._held = held
        self._clock = clock
        self._swept_at = float("-inf")

    def start_polls(self, actions: Actions) -> None:
        """Start every poll that is due."""
        now = self._clock()
        zones = {held.zone for held in self._held()} | {row.zone for row in self._releases.rows}
        if now - self._swept_at > SWEEP_SECONDS:
            zones |= self._everywhere()
            self._swept_at = now
        for zone in self._polls.due(zones):
            actions.start(f"look {zone}", partial(self._poll, zone))

    async def poll_everywhere(self) -> None:
        """Poll every zone where a slice of ours may be, now."""
        await asyncio.gather(*(self._poll(zone) for zone in self._everywhere()))

    def known(self) -> set[str]:
        """The names of slices that a job holds or that are to be deleted."""
        held = {placement.name for placement in self._held()}
        return held | {row.name for row in self._store.releasing()}

    def _everywhere(self) -> set[str]:
        """The zones where a slice of ours may be."""
        return set(self._named) | self._store.zones_used() | self._strays.zones

    async def _poll(self, zone: str) -> None:
        expected = self._held_in(zone) | {r.name for r in self._releases.rows if r.zone == zone}
        poll = await self._polls.poll(zone, expected)
        if poll is not None:
            self._strays.see(poll)
            held = self._held_in(zone) | self._store.held_aside() | self._strays.names()
            self._releases.take_in_strays(poll, held)

    def _held_in(self, zone: str) -> set[str]:
        return {placement.name for placement in self._held() if placement.zone == zone}
