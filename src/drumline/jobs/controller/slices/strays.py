"""Slices that have our label and are unknown to this database.

The label of a slice is the id of the database that requested it. A slice of this database that it
does not list was forgotten, and `releases` deletes it. But a database can be lost, or be an old
copy, while its slices run on and cost. So the ids are kept beside it, in `owners.json`, with the
zones that were used: a slice with one of these ids that is unknown here is shown, and the user
decides whether to release or to adopt it. Another home may know it, so nothing is done unasked.
"""

import json
import logging
import os
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drumline.jobs.controller.polling import ZonePoll
from drumline.jobs.controller.slices.releases import LABEL_JOB, LABEL_OWNER
from drumline.observed.placements import PlacementState

log = logging.getLogger(__name__)


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
