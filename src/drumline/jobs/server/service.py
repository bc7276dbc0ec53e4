"""What the server does for its callers: each verb of the HTTP API, on plain values.

The service only records what the user wants; the supervisor does it.
"""

import asyncio
import contextlib
import getpass
import shlex
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from drumline.hosts.messages import working_copy
from drumline.hosts.packing.rules import left_out_line
from drumline.jobs.controller.sessions import attempt_key
from drumline.jobs.controller.supervisor import Supervisor
from drumline.jobs.core.state import Decision, Event, Job
from drumline.jobs.server import verbs, views
from drumline.jobs.server.execution import Execution
from drumline.jobs.server.jobfiles import JobFiles
from drumline.jobs.server.known.lost import LostSlices
from drumline.jobs.server.known.remembered import RememberedHosts
from drumline.jobs.server.verbs import Mistake
from drumline.jobs.store.records import JobFilter, Record, UnreadableJob, UnreadableJobError
from drumline.jobs.store.specs import StoredSpec
from drumline.observed import HostPhase

__all__ = ["JobService", "Mistake"]

RECENT = 24 * 3600.0
"""Seconds an ended job stays in the plain list."""
EVERYTHING = JobFilter()

MOST_DIGITS = 15
"""The most digits of a job's number; the database takes no more."""


class JobService:
    """What the HTTP API can do."""

    def __init__(self, supervisor: Supervisor) -> None:
        """`supervisor` holds the jobs."""
        self.supervisor = supervisor
        self.store = supervisor.store
        self.folders = supervisor.folders
        self.files = JobFiles(supervisor.config, supervisor.cloud, self.folders.code)
        self.lost = LostSlices(supervisor, self.files)
        self.remembered = RememberedHosts(supervisor.host_history)

    # --- views ------------------------------------------------------------------------------

    def record(self, job_id: str) -> Record:
        """The job of that id, typed as 12 or 000012."""
        full = job_id.zfill(6)
        if not (full.isascii() and full.isdecimal()) or len(full) > MOST_DIGITS:
            raise self._no_job(full[:40])
        try:
            record = self.supervisor.record(full)
        except UnreadableJobError as wrong:
            raise Mistake(
                f"the row of {full} in jobs.db cannot be read ({wrong}); a newer drumline may;"
                f" drumline delete {full} releases its slices, clean removes it",
                409,
            ) from None
        if record is None:
            raise self._no_job(full)
        return record

    def _no_job(self, job_id: str) -> Mistake:
        return Mistake(f"there is no job {job_id}; drumline list --all shows all", 404)

    def overview(self, search: JobFilter = EVERYTHING) -> list[dict[str, Any]]:
        """The jobs that match, oldest first."""
        found = []
        for job_id in self.store.find(search):
            try:
                record = self.supervisor.record(job_id)
            except UnreadableJobError as wrong:
                found.append(views.unreadable(wrong.job))
            else:
                assert record is not None
                found.append(views.summary(self.supervisor, record))
        return found

    def show(self, job_id: str) -> dict[str, Any]:
        """Everything that is known about a job."""
        return views.full(self.supervisor, self.record(job_id))

    def history(self, job_id: str) -> dict[str, Any]:
        """The metrics of a job over its steps."""
        return views.history(self.supervisor, self.record(job_id))

    async def events(self, job_id: str, after: int, wait: float) -> dict[str, Any]:
        """What happened since an event; waits for something to happen."""
        record = self.record(job_id)
        deadline = time.monotonic() + wait
        while True:
            found = self.store.events(record.job.id, after)
            left = deadline - time.monotonic()
            now = self.supervisor.record(record.job.id)
            if found or left <= 0 or now is None or now.job.status.ended:
                summary = views.summary(self.supervisor, now or record)
                return {"events": found, "job": summary}
            await self._something_changes(min(left, 1.0))

    async def _something_changes(self, seconds: float) -> None:
        """Wait for a round of the supervisor, but no longer than this."""
        # Not wait_for, which in Python 3.11 swallows a cancellation that comes with the news.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self.supervisor.changed:
                await self.supervisor.changed.wait()

    def status(self) -> dict[str, Any]:
        """The state of the server."""
        config = self.supervisor.config
        return {
            "home": str(config.home),
            "cloud": config.cloud,
            "project": config.project,
            "jobs": self.store.count(),
            "living": len(self.supervisor.records),
            "unreadable": [asdict(aside) for aside in self.store.unreadable_jobs()],
            "strays": [stray.as_json() for stray in self.lost.seen()],
            "trouble": self._trouble(),
        }

    def _trouble(self) -> dict[str, str]:
        """What is wrong, by place: a zone, a slice that cannot be released, or the disk."""
        supervisor = self.supervisor
        disk = {"disk": supervisor.tasks.disk_error} if supervisor.tasks.disk_error else {}
        mass = {"hosts": event} if (event := supervisor.host_history.mass_failure_message()) else {}
        return {**disk, **mass, **supervisor.polls.errors, **supervisor.releases.errors}

    # --- new jobs ---------------------------------------------------------------------------

    async def create(
        self,
        raw: Mapping[str, Any],
        secrets: Mapping[str, str],
        user: str,
        origin: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Create a job: its code is packed now, so that later edits do not change it.

        `origin` says where it comes from: `file` and `overrides` for a later resume, and `from`,
        the job whose checkpoints it takes over.
        """
        kept_origin = dict(origin or {})
        if kept_origin.get("from"):
            raw, kept_origin = self._taking_over(raw, kept_origin)
        spec, choices = await self.files.checked(raw)
        missing = set(spec.secrets) - set(secrets)
        if missing:
            raise Mistake(f"secrets: {min(missing)} is not set in your environment")
        along = await self.files.companion(spec)
        archive = await self.files.pack(spec, along)
        kept = spec.model_dump(mode="json")
        kept |= {"archive": archive, "origin": kept_origin or None}
        kept["checkpoint_owner"] = self.store.owner
        settings = verbs.JobTerms.of(spec, choices)
        now = time.time()
        until_written = contextlib.ExitStack()

        def make(job_id: str) -> Job:
            given = {name: secrets[name] for name in spec.secrets}
            until_written.enter_context(self.folders.new_secrets(job_id, given))
            made = Job(id=job_id, owner=self.store.owner, choices=choices, created_at=now)
            return settings.applied(made)

        # From here on nothing is awaited.
        if kept_origin.get("checkpoint"):
            self._require_unused(kept_origin["checkpoint"], "")
        with until_written:
            record = self.store.add(user or getpass.getuser(), spec.name, kept, make)
        self.supervisor.add(record)
        warnings = self.files.warnings(spec, choices, along)
        for warning in warnings:
            self.store.add_event(record.job.id, Event("warning", warning), now)
        left_out = left_out_of(archive)
        if line := left_out_line(left_out):
            self.store.add_event(record.job.id, Event("note", line), now)
        self.supervisor.wake()
        return views.full(self.supervisor, record) | {"warnings": warnings} | left_out

    def _taking_over(
        self, raw: Mapping[str, Any], origin: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A job file and its origin, with the checkpoints of the job that it continues from."""
        other = self.record(str(origin["from"]))
        folder = other.spec.checkpoints_of(other.job.id)
        if folder is None:
            raise Mistake(
                f"{other.job.id} has no checkpoints to begin from: its job file sets no checkpoint"
            )
        self._require_unused(folder, "")
        given = {**raw, "checkpoint": other.spec.checkpoint}
        return given, {**origin, "from": other.job.id, "checkpoint": folder}

    def _require_unused(self, folder: str, job_id: str) -> None:
        """Raise if a job writes to this folder: two programs that save there would ruin both."""
        for other in self.supervisor.records.values():
            job = other.job
            if job.id == job_id or job.status.ended:
                continue
            if other.spec.checkpoints_of(job.id) == folder:
                raise Mistake(
                    f"{job.id} is {job.status} and keeps its checkpoints in {folder};"
                    f" drumline cancel {job.id} first",
                    409,
                )

    async def plan(
        self, raw: Mapping[str, Any], origin: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What `create` would do: `lines` for the user, and what would be `left_out`."""
        begins = []
        if origin and origin.get("from"):
            raw, origin = self._taking_over(raw, origin)
            folder = origin["checkpoint"]
            begins = [f"would begin with the checkpoints of {origin['from']} in {folder}"]
        spec, choices = await self.files.checked(raw)
        along = await self.files.companion(spec)
        archive = await self.files.measure(spec, along)
        warned = [f"! {warning}" for warning in self.files.warnings(spec, choices, along)]
        left_out = left_out_of(archive)
        omitted = [line] if (line := left_out_line(left_out)) else []
        lines = [*views.plan_lines(spec, choices, archive), *omitted, *begins, *warned]
        return {"lines": lines} | left_out

    # --- verbs ------------------------------------------------------------------------------

    async def verb(self, job_id: str, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """`resume`, `cancel`, `delete` or `clean` a job."""
        job_id = job_id.zfill(6)
        try:
            self.supervisor.record(job_id)
        except UnreadableJobError as wrong:
            if verb in {"delete", "clean"}:
                return self._let_go(wrong.job, verb)
        self.record(job_id)
        match verb:
            case "resume":
                return await self._resume(job_id, body)
            case "cancel":
                text = self._change(job_id, verbs.cancel)
            case "delete":
                text = self._change(job_id, verbs.delete)
            case "clean":
                return await self._clean(job_id)
            case _:
                raise Mistake(f"{verb!r} is nothing one can do to a job", 404)
        return self._answer(self.record(job_id), text)

    def _let_go(self, aside: UnreadableJob, verb: str) -> dict[str, Any]:
        """Release, and with `clean` remove, a job whose row cannot be read."""
        count = self.store.release_all(aside.id, time.time())
        self.supervisor.wake()
        text = f"{count} slice{'' if count == 1 else 's'} of {aside.id} to be released"
        if verb == "clean":
            self._remove(aside.id)
            text = f"{aside.id} and its logs are gone; {text}"
        return {"job": views.unreadable(aside), "text": text}

    def _remove(self, job_id: str) -> None:
        self.supervisor.forget(job_id)
        self.store.remove(job_id)
        self.folders.forget_secrets(job_id)
        self.folders.remove_logs(job_id)

    def _answer(self, record: Record, text: str) -> dict[str, Any]:
        return {"job": views.summary(self.supervisor, record), "text": text}

    def _change(
        self,
        job_id: str,
        verb: Callable[[Record], verbs.VerbResult],
        spec: StoredSpec | None = None,
    ) -> str:
        """Apply a verb to the current state of the job, and return the text for the user."""
        answers: list[verbs.VerbResult] = []

        def decided(record: Record) -> Decision | None:
            answers.append(verb(record))
            return answers[0].decision

        if self.supervisor.change(job_id, decided, spec) is None:
            raise self._no_job(job_id)
        self.supervisor.wake()
        return answers[0].text

    async def _resume(self, job_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Run a job again, with the current job file where the caller has sent it."""
        from drumline.jobs.spec import changes

        record = self.record(job_id)
        asked, before = record.job, record.spec.file
        goes_on = verbs.resumable(asked)
        if goes_on is not None:
            return self._answer(record, goes_on)
        origin = record.spec.document.get("origin")
        adopted = record.spec.origin is not None and record.spec.origin.adopted
        if adopted and body.get("spec") is None:
            raise Mistake(
                f"{job_id} was adopted without its job file; drumline resume {job_id} --file FILE"
            )
        if body.get("spec") is not None:
            raw = dict(body["spec"])
            if origin and origin.get("from"):
                raw["checkpoint"] = before["checkpoint"]
            spec, choices = await self.files.checked(raw)
            origin = {**(origin or {}), **(body.get("origin") or {}), "adopted": None}
        else:
            spec, choices = self.files.valid(before), asked.choices
        secrets = body.get("secrets", {})
        missing = set(spec.secrets) - set(secrets)
        if missing:
            raise Mistake(f"secrets: {min(missing)} is not set in your environment")
        after = spec.model_dump(mode="json")
        changed = [] if adopted else changes(before, after)
        if not adopted:
            self._may_change_now(asked, before, after)
        archive = await self.files.pack(spec, await self.files.companion(spec))
        owner: str | None = self.store.owner
        if after["checkpoint"] == before.get("checkpoint"):
            owner = record.spec.checkpoint_owner
        ours = {"archive": archive, "origin": origin, "checkpoint_owner": owner}
        kept = StoredSpec.from_json(after | ours)
        settings = verbs.JobTerms.of(spec, choices)
        # From here on nothing is awaited: the job is read again and changed at once.
        folder = kept.checkpoints_of(job_id)
        if folder is not None:
            self._require_unused(folder, job_id)
        with self.folders.new_secrets(job_id, {name: secrets[name] for name in spec.secrets}):
            verb = partial(verbs.resume, asked=asked, settings=settings, changed=changed)
            text = self._change(job_id, verb, kept)
        left_out = left_out_of(archive)
        if line := left_out_line(left_out):
            self.store.add_event(job_id, Event("note", line), time.time())
        return self._answer(self.record(job_id), text) | {"changes": changed} | left_out

    def _may_change_now(
        self, job: Job, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> None:
        if job.placement is not None and before["capacity"] != after["capacity"]:
            raise Mistake(
                f"capacity: {job.id} holds a slice of {before['capacity']} capacity;"
                f" drumline delete {job.id} releases it, then resume",
                409,
            )

    async def _clean(self, job_id: str) -> dict[str, Any]:
        record = self.record(job_id)
        self._change(job_id, verbs.delete)
        deadline = time.monotonic() + record.job.grace + CLEAN_LIMIT
        while not verbs.removable(self.record(job_id).job):
            if time.monotonic() > deadline:
                raise Mistake(f"{job_id} is still stopping; try again in a moment", 409)
            await self._something_changes(1.0)
        record = self.record(job_id)
        self._remove(job_id)
        return self._answer(record, f"{job_id} and its logs are gone")

    # --- hosts ------------------------------------------------------------------------------

    def execution(
        self,
        job_id: str,
        host: int | str,
        command: Any,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> Execution:
        """A command to be run on one host or all; each gets all of `stdin`."""
        record = self.record(job_id)
        session = self.supervisor.sessions.get(attempt_key(record.job))
        if session is None:
            raise Mistake(f"{record.job.id} is {record.job.status}: no host is connected", 409)
        count = len(session.reports())
        wanted = range(count) if host == "all" else [int(host)]
        if any(not 0 <= index < count for index in wanted):
            raise Mistake(f"{record.job.id} has hosts 0 to {count - 1}")
        for report in session.reports():
            if report.index in wanted and report.phase is HostPhase.CONNECTING:
                raise Mistake(f"host {report.index} of {record.job.id} is not connected yet", 409)
        line = command if isinstance(command, str) else shlex.join(command)
        return Execution(session, wanted, line, stdin)

    def hosts(self, job_id: str) -> list[dict[str, Any]]:
        """Where the hosts of a job are, and how to log in."""
        record = self.record(job_id)
        held = record.job.placement
        listed = self.supervisor.polls.listed(held) if held else None
        if held is None or listed is None or not listed.slices:
            raise Mistake(f"{record.job.id} is {record.job.status}: it holds no slice", 409)
        archive = record.spec.archive
        folder = working_copy(record.job.id, archive.sha if archive else None)
        return [
            {
                "index": index,
                "ip": end.internal_ip,
                "ssh_ip": end.ssh_ip,
                "ssh_port": end.ssh_port,
                "user": "drumline",
                "key": str(self.folders.key),
                "known_hosts": str(self.folders.known_hosts(held.name)),
                "folder": f".drumline/{folder}",
            }
            for index, end in enumerate(listed.endpoints)
        ]


def left_out_of(archive: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of an archive, packed or measured, for what it leaves out."""
    fields = archive or {}
    return {
        "left_out": fields.get("left_out", []),
        "left_out_total": fields.get("left_out_total", 0),
    }


CLEAN_LIMIT = 30.0
"""Seconds beyond the grace that a job may take to end before `clean` gives up waiting."""
