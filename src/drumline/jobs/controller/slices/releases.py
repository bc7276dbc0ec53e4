"""Slices to delete: each delete is repeated until a poll shows that the slice is gone.

A forgotten slice costs money, so what has our label and belongs to no job is deleted too. A delete
that fails is retried with a growing backoff, and what the cloud said about it is shown.
"""

import logging
from collections.abc import Callable, Collection, Iterator

from drumline.cloud.protocol import Cloud, CloudError
from drumline.jobs.controller.polling import ZonePoll, ZonePolls
from drumline.jobs.folders import Folders
from drumline.jobs.store.records import SliceRow, Store

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
