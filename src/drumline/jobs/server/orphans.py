"""Orphans: slices of a lost database. A user can list, release or adopt them."""

import getpass
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drumline.jobs.controller.slices import Orphan
from drumline.jobs.controller.supervisor import Supervisor
from drumline.jobs.core.reasons import EventType
from drumline.jobs.core.state import Decision, Event
from drumline.jobs.server import verbs
from drumline.jobs.server.job_files import JobFiles
from drumline.jobs.server.verbs import RequestError
from drumline.jobs.store.records import SliceRow


class Orphans:
    """Lists, releases and adopts slices that belong to no job in this database."""

    def __init__(self, supervisor: Supervisor, files: JobFiles) -> None:
        """`supervisor` polls the zones and holds the jobs that adopt a slice."""
        self._supervisor = supervisor
        self._files = files

    def known(self) -> list[Orphan]:
        """Return the orphans in the newest polls."""
        return self._supervisor.orphans.all(self._supervisor.zones.known_slices())

    async def find(self) -> dict[str, Any]:
        """Poll all zones and list their orphans. `not_seen` has the zones that did not answer."""
        await self._supervisor.zones.poll_all_zones()
        return {
            "strays": [orphan.as_json() for orphan in self.known()],
            "not_seen": dict(self._supervisor.polls.errors),
        }

    async def apply(self, verb: str, names: Sequence[str], user: str) -> dict[str, Any]:
        """`release` or `adopt` the named orphans, or all of them."""
        if verb not in {"release", "adopt"}:
            raise RequestError(f"{verb!r} is not an action on slices", 404)
        await self._supervisor.zones.poll_all_zones()
        orphans = {orphan.name: orphan for orphan in self.known()}
        unknown = [name for name in names if name not in orphans]
        if unknown:
            raise RequestError(
                f"{unknown[0]} is not an orphan slice; drumline server strays lists them", 404
            )
        selected = [orphans[name] for name in names] or [*orphans.values()]
        if verb == "release":
            lines = [self._release(orphan) for orphan in selected]
        else:
            lines = [self._adopt(orphan, user) for orphan in selected]
        self._supervisor.wake()
        return {"text": lines or ["there are no orphan slices"]}

    def _release(self, orphan: Orphan) -> str:
        now = time.time()
        # Without a job: the id in its name belongs to another job in this database.
        row = SliceRow(orphan.name, "", orphan.zone, orphan.accelerator, now, None, now, None)
        self._supervisor.store.adopt_orphan(row)
        return f"{orphan.name} in {orphan.zone} is being released"

    def _adopt(self, orphan: Orphan, user: str) -> str:
        """Give an orphan to a new job, which keeps it like a cancelled job."""
        if not orphan.adoptable:
            return f"{orphan.name} in {orphan.zone} is {orphan.state}; it can only be released"
        name = f"adopted-{orphan.job or orphan.name}"
        spec = self._files.validate(
            {
                "name": name, "accelerator": [orphan.accelerator], "zones": [orphan.zone],
                "workdir": None, "run": "true",
            }
        )  # fmt: skip
        stored = spec.model_dump(mode="json")
        stored |= {"archive": None, "origin": {"adopted": orphan.name}}
        job = verbs.adopting_job(spec, orphan, self._supervisor.store.owner, time.time())
        record = self._supervisor.store.add(
            user or getpass.getuser(), name, stored, lambda new_id: replace(job, id=new_id)
        )
        self._supervisor.add(record)
        event = Event(EventType.NOTE, f"adopted {orphan.name}, a slice of a lost database")
        self._supervisor.change(
            record.job.id, lambda current: Decision(current.job, events=(event,))
        )
        job_id = record.job.id
        return (
            f"{job_id} holds {orphan.name} in {orphan.zone}; drumline resume {job_id} --file FILE"
            f" runs a job on it, drumline delete {job_id} releases it"
        )
