"""What a user can do about the slices of a lost database: list, release or adopt them."""

import getpass
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drumline.jobs.controller.slices import Orphan
from drumline.jobs.controller.supervisor import Supervisor
from drumline.jobs.core.state import Candidate, Decision, Event
from drumline.jobs.server import verbs
from drumline.jobs.server.jobfiles import JobFiles
from drumline.jobs.server.verbs import Mistake
from drumline.jobs.store.records import SliceRow


class LostSlices:
    """Lists, releases and adopts slices that belong to no job here."""

    def __init__(self, supervisor: Supervisor, files: JobFiles) -> None:
        """`supervisor` polls the zones and holds the jobs that adopt a slice."""
        self._supervisor = supervisor
        self._files = files

    def seen(self) -> list[Orphan]:
        """The strays in the newest polls."""
        return self._supervisor.orphans.all(self._supervisor.zones.known_slices())

    async def found(self) -> dict[str, Any]:
        """Poll all zones and list the strays there; `not_seen` are zones that did not answer."""
        await self._supervisor.zones.poll_all_zones()
        return {
            "strays": [stray.as_json() for stray in self.seen()],
            "not_seen": dict(self._supervisor.polls.errors),
        }

    async def settle(self, verb: str, names: Sequence[str], user: str) -> dict[str, Any]:
        """`release` or `adopt` strays: those named, or all."""
        if verb not in {"release", "adopt"}:
            raise Mistake(f"{verb!r} is nothing one can do to a slice", 404)
        await self._supervisor.zones.poll_all_zones()
        found = {stray.name: stray for stray in self.seen()}
        unknown = [name for name in names if name not in found]
        if unknown:
            raise Mistake(f"{unknown[0]} is no stray slice; drumline server strays lists them", 404)
        chosen = [found[name] for name in names] or [*found.values()]
        if verb == "release":
            lines = [self._release(stray) for stray in chosen]
        else:
            lines = [self._adopt(stray, user) for stray in chosen]
        self._supervisor.wake()
        return {"text": lines or ["there are no stray slices"]}

    def _release(self, stray: Orphan) -> str:
        now = time.time()
        # Under no job: its number is that of another job in this database.
        row = SliceRow(stray.name, "", stray.zone, stray.accelerator, now, None, now, None)
        self._supervisor.store.adopt_orphan(row)
        return f"{stray.name} in {stray.zone} is being released"

    def _adopt(self, stray: Orphan, user: str) -> str:
        """Give a stray to a new job, which holds it as a cancelled job does."""
        if not stray.adoptable:
            return f"{stray.name} in {stray.zone} is {stray.state}: it can only be released"
        name = f"adopted-{stray.job or stray.name}"
        spec = self._files.valid(
            {
                "name": name, "accelerator": [stray.accelerator], "zones": [stray.zone],
                "workdir": None, "run": "true",
            }
        )  # fmt: skip
        kept = spec.model_dump(mode="json")
        kept |= {"archive": None, "origin": {"adopted": stray.name}}
        choices = (Candidate(stray.accelerator, stray.zone),)
        job = verbs.adopted(
            verbs.JobTerms.of(spec, choices), stray, self._supervisor.store.owner, time.time()
        )
        record = self._supervisor.store.add(
            user or getpass.getuser(), name, kept, lambda job_id: replace(job, id=job_id)
        )
        self._supervisor.add(record)
        event = Event("note", f"adopted {stray.name}, a slice of a database that was lost")
        self._supervisor.change(record.job.id, lambda now: Decision(now.job, events=(event,)))
        number = record.job.id
        return (
            f"{number} holds {stray.name} in {stray.zone}; drumline resume {number} --file FILE"
            f" goes on on it, drumline delete {number} releases it"
        )
