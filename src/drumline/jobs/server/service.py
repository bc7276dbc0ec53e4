"""The operations of the HTTP API on plain values.

The service only records what the user asks for; the supervisor carries it out.
"""

import asyncio
import contextlib
import getpass
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from drumline.errors import CloudError
from drumline.hosts.code import needs_confirmation
from drumline.hosts.packing.rules import packing_notes
from drumline.jobs.controller.sessions import attempt_key
from drumline.jobs.controller.supervisor import Supervisor
from drumline.jobs.core.reasons import EventType
from drumline.jobs.core.state import Decision, Event, Job
from drumline.jobs.server import verbs, views
from drumline.jobs.server.execution import Execution
from drumline.jobs.server.host_history import HostHistoryApi
from drumline.jobs.server.job_files import JobFiles, PackingOptions, require_wanted
from drumline.jobs.server.orphans import Orphans
from drumline.jobs.server.verbs import RequestError
from drumline.jobs.slice_settings import SLICE_KEYS
from drumline.jobs.store.records import (
    UNREADABLE,
    JobFilter,
    Record,
    SliceRow,
    UnreadableJob,
    UnreadableJobError,
)
from drumline.jobs.store.specs import StoredSpec, checkpoint_owner
from drumline.observed import HostPhase

RECENT_SECONDS = 24 * 3600.0
"""Seconds for which `list` shows a finished job without `--all`."""
ALL_JOBS = JobFilter()
MAX_ID_DIGITS = 15
"""The maximum number of digits of a job id in the database."""
MAX_CANDIDATES = 10
"""The maximum number of jobs that are listed for an ambiguous name."""
CLEAN_SECONDS = 30.0
"""Seconds beyond the grace period for which `clean` waits for a job to end."""


class JobService:
    """The operations of the HTTP API."""

    def __init__(self, supervisor: Supervisor) -> None:
        """`supervisor` holds the jobs."""
        self.supervisor = supervisor
        self.store = supervisor.store
        self.folders = supervisor.folders
        self.files = JobFiles(supervisor.config, supervisor.cloud, self.folders.code)
        self.orphans = Orphans(supervisor, self.files)
        self.host_history = HostHistoryApi(supervisor.host_history)

    # --- views ------------------------------------------------------------------------------

    def record(self, job_id: str) -> Record:
        """Return the job with this id, written as 12 or 000012. Raise RequestError."""
        job_id = self._valid_id(job_id)
        try:
            record = self.supervisor.record(job_id)
        except UnreadableJobError as error:
            raise RequestError(
                f"the row of {job_id} in jobs.db cannot be read ({error}); a newer drumline may"
                f" read it; drumline delete {job_id} releases its slices, clean removes it",
                409,
            ) from None
        if record is None:
            raise self._no_job(job_id)
        return record

    def _valid_id(self, job_id: str) -> str:
        """Return an id with its leading zeros. Raise RequestError if it can be no id."""
        job_id = job_id.zfill(6)
        if not (job_id.isascii() and job_id.isdecimal()) or len(job_id) > MAX_ID_DIGITS:
            raise self._no_job(job_id)
        return job_id

    def _no_job(self, job: str) -> RequestError:
        """Return the error for an id or a name of no job."""
        named = self.store.named(job.lstrip("0")) if job.isdecimal() else []
        job = "".join(filter(str.isprintable, job))[:40]
        hint = "drumline list --all lists all jobs"
        if named:
            ids = ", ".join(named[-MAX_CANDIDATES:])
            hint = f"a number is always an id; the job with this name is {ids}"
        return RequestError(f"there is no job {job}; {hint}", 404)

    def ids(self, names: Iterable[str]) -> list[str]:
        """Return the ids of jobs by their names. Raise RequestError for every name that fails."""
        ids, errors = [], []
        for name in names:
            candidates = self.store.named(name)
            if len(candidates) == 1:
                ids += candidates
            elif candidates:
                errors.append(self._ambiguous(name, candidates))
            else:
                errors.append(str(self._no_job(name)))
        if errors:
            raise RequestError("\n".join(errors), 404)
        return ids

    def _ambiguous(self, name: str, candidates: Sequence[str]) -> str:
        """Return the error for a name of multiple jobs: ids and states, newest first."""
        lines = [f"{len(candidates)} jobs are named {name}; give one of their ids instead:"]
        for job_id in reversed(candidates[-MAX_CANDIDATES:]):
            try:
                status: str = self.record(job_id).job.status
            except RequestError:
                status = UNREADABLE
            lines.append(f"  {job_id} {status}")
        if len(candidates) > MAX_CANDIDATES:
            lines.append(f"  … and {len(candidates) - MAX_CANDIDATES:,} older ones")
        return "\n".join(lines)

    def overview(self, search: JobFilter = ALL_JOBS) -> list[dict[str, Any]]:
        """Return the summaries of the matching jobs, oldest first."""
        summaries = []
        for job_id in self.store.find(search):
            try:
                record = self.supervisor.record(job_id)
            except UnreadableJobError as error:
                summaries.append(views.unreadable(error.job))
            else:
                assert record is not None
                summaries.append(views.summary(self.supervisor, record))
        return summaries

    def show(self, job_id: str) -> dict[str, Any]:
        """Return everything about a job."""
        return views.full(self.supervisor, self.record(job_id))

    def history(self, job_id: str) -> dict[str, Any]:
        """Return the metrics of a job over its steps."""
        return views.history(self.supervisor, self.record(job_id))

    async def events(self, job_id: str, after: int, wait: float) -> dict[str, Any]:
        """Return the events after event `after`. Wait up to `wait` seconds for one."""
        record = self.record(job_id)
        deadline = time.monotonic() + wait
        while True:
            events = self.store.events(record.job.id, after)
            remaining = deadline - time.monotonic()
            current = self.supervisor.record(record.job.id)
            if events or remaining <= 0 or current is None or current.job.status.ended:
                summary = views.summary(self.supervisor, current or record)
                return {"events": events, "job": summary}
            await self._wait_for_round(min(remaining, 1.0))

    async def _wait_for_round(self, seconds: float) -> None:
        """Wait for the next round of the supervisor, at most `seconds`."""
        # In Python 3.11, wait_for can swallow a cancellation that arrives with the result.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self.supervisor.changed:
                await self.supervisor.changed.wait()

    def status(self) -> dict[str, Any]:
        """Return the state of the server."""
        config = self.supervisor.config
        return {
            "home": str(config.home),
            "cloud": config.cloud,
            "project": config.project,
            "jobs": self.store.count(),
            "living": len(self.supervisor.records),
            "unreadable": [asdict(aside) for aside in self.store.unreadable_jobs()],
            "strays": [orphan.as_json() for orphan in self.orphans.known()],
            "trouble": self._errors(),
        }

    def _errors(self) -> dict[str, str]:
        """Return the current errors by source: a zone, a slice to release, hosts or the disk."""
        supervisor = self.supervisor
        disk = {"disk": supervisor.tasks.disk_error} if supervisor.tasks.disk_error else {}
        hosts = (
            {"hosts": event} if (event := supervisor.host_history.mass_failure_message()) else {}
        )
        return {**disk, **hosts, **supervisor.polls.errors, **supervisor.releases.errors}

    # --- new jobs ---------------------------------------------------------------------------

    async def create(
        self,
        raw: Mapping[str, Any],
        secrets: Mapping[str, str],
        user: str,
        origin: Mapping[str, Any] | None = None,
        interpreter: str | None = None,
        packing: PackingOptions | None = None,
    ) -> dict[str, Any]:
        """Create a job and pack its code, so that later edits do not change it.

        `origin` has the `file` and the `overrides` for a later resume, and in `from` the job whose
        checkpoints the new job takes over. `interpreter` is the Python of the client.
        """
        options = packing or PackingOptions()
        with self.files.track(options):
            return await self._create(raw, secrets, user, origin, interpreter, options)

    async def _create(
        self,
        raw: Mapping[str, Any],
        secrets: Mapping[str, str],
        user: str,
        origin: Mapping[str, Any] | None,
        interpreter: str | None,
        packing: PackingOptions,
    ) -> dict[str, Any]:
        job_origin = dict(origin or {})
        if job_origin.get("from"):
            raw, job_origin = self._take_over(raw, job_origin)
        if message := await self.files.login_error(raw):
            raise RequestError(f"{message}; nothing was created")
        spec, choices = await self.files.check(raw)
        missing = set(spec.secrets) - set(secrets)
        if missing:
            raise RequestError(f"secrets: {min(missing)} is not set in your environment")
        bundled = await self.files.choose_package(spec)
        archive = await self.files.pack(spec, bundled, packing)
        stored = spec.model_dump(mode="json")
        stored |= {"archive": archive, "origin": job_origin or None}
        stored["interpreter"] = self._local_interpreter(interpreter)
        now = time.time()
        stored["checkpoint_owner"] = checkpoint_owner(self.store.owner, now)
        _stored_spec(stored)
        cleanup = contextlib.ExitStack()

        def make_job(job_id: str) -> Job:
            values = {name: secrets[name] for name in spec.secrets}
            cleanup.enter_context(self.folders.new_secrets(job_id, values))
            job = Job(id=job_id, owner=self.store.owner, choices=choices, created_at=now)
            return verbs.apply_job_file(job, spec, choices)

        # No await from here on, so that no other request interferes.
        require_wanted(packing)
        if job_origin.get("checkpoint"):
            self._require_unused(job_origin["checkpoint"], "")
        with cleanup:
            record = self.store.add(user or getpass.getuser(), spec.name, stored, make_job)
        self.supervisor.add(record)
        warnings = self.files.warnings(spec, choices, bundled)
        for warning in warnings:
            self.store.add_event(record.job.id, Event(EventType.WARNING, warning), now)
        fields = packing_fields(archive)
        for line in packing_notes(fields):
            self.store.add_event(record.job.id, Event(EventType.NOTE, line), now)
        self.supervisor.wake()
        return views.full(self.supervisor, record) | {"warnings": warnings} | fields

    def _local_interpreter(self, interpreter: str | None) -> str | None:
        """Return the Python of a client for the hosts, which only the emulator has here."""
        return interpreter if self.supervisor.config.local else None

    def _take_over(
        self, raw: Mapping[str, Any], origin: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a job file and its origin, changed to use the checkpoints of an existing job."""
        other = self.record(str(origin["from"]))
        folder = other.spec.checkpoints_of(other.job.id)
        if folder is None:
            raise RequestError(
                f"{other.job.id} has no checkpoints to start from: its job file sets no checkpoint"
            )
        self._require_unused(folder, "")
        spec = {**raw, "checkpoint": other.spec.checkpoint}
        return spec, {**origin, "from": other.job.id, "checkpoint": folder}

    def _require_unused(self, folder: str, job_id: str) -> None:
        """Raise RequestError if an active job writes its checkpoints to this folder."""
        for other in self.supervisor.records.values():
            job = other.job
            if job.id == job_id or job.status.ended:
                continue
            if other.spec.checkpoints_of(job.id) == folder:
                raise RequestError(
                    f"{job.id} is {job.status} and writes its checkpoints to {folder};"
                    f" run drumline cancel {job.id} first",
                    409,
                )

    async def plan(
        self, raw: Mapping[str, Any], origin: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the dry run of `create`: `lines` for the user, and fields about files."""
        start_lines = []
        if origin and origin.get("from"):
            raw, origin = self._take_over(raw, origin)
            folder = origin["checkpoint"]
            start_lines = [f"would start from the checkpoints of {origin['from']} in {folder}"]
        spec, choices = await self.files.check(raw)
        bundled = await self.files.choose_package(spec)
        archive = await self.files.measure(spec, bundled)
        warnings = [f"! {warning}" for warning in self.files.warnings(spec, choices, bundled)]
        if message := await self.files.login_error(raw):
            warnings.append(f"! {message}")
        if _is_large(archive):
            warnings.append(
                "! much is sent to every host: create asks first, and needs --yes without a"
                " terminal"
            )
        packing = packing_fields(archive)
        settings = spec.slice_settings.over(self.supervisor.config.slice_settings)
        plan = views.render_plan(spec, choices, archive, settings, self.supervisor.prices)
        notes = [*packing_notes(packing), *start_lines, *warnings]
        return {"lines": [*plan, *notes]} | packing

    # --- verbs ------------------------------------------------------------------------------

    async def verb(self, job_id: str, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """`resume`, `cancel`, `delete` or `clean` a job."""
        job_id = self._valid_id(job_id)
        try:
            self.supervisor.record(job_id)
        except UnreadableJobError as error:
            if verb in {"delete", "clean"}:
                return self._release_unreadable(error.job, verb, body.get("outputs") is True)
        self.record(job_id)
        releasing = self._releasing(job_id)
        match verb:
            case "resume":
                options = PackingOptions.from_body(body)
                with self.files.track(options):
                    return await self._resume(job_id, body, options)
            case "cancel":
                cancel = partial(verbs.cancel, prices=self.supervisor.prices, releasing=releasing)
                text = self._change(job_id, cancel)
            case "delete":
                text = self._change(job_id, partial(verbs.delete, releasing=releasing))
            case "clean":
                return await self._clean(job_id, body.get("outputs") is True)
            case _:
                raise RequestError(f"{verb!r} is not an action on jobs", 404)
        return self._answer(self.record(job_id), text)

    def _releasing(self, job_id: str) -> list[SliceRow]:
        """Return the slices of a job that are being deleted."""
        return [row for row in self.store.releasing() if row.job == job_id]

    def _release_unreadable(self, aside: UnreadableJob, verb: str, outputs: bool) -> dict[str, Any]:
        """Release the slices of a job whose row cannot be read. `clean` also removes the job."""
        count = self.store.release_all(aside.id, time.time())
        self.supervisor.wake()
        text = f"{count} slice{'' if count == 1 else 's'} of {aside.id} will be released"
        if verb == "clean":
            text = f"{self._remove(aside.id, outputs)}; {text}"
        return {"job": views.unreadable(aside), "text": text}

    def _remove(self, job_id: str, outputs: bool) -> str:
        """Remove a job. Its outputs stay unless the user asked to delete them."""
        self.supervisor.forget(job_id)
        self.store.remove(job_id)
        self.folders.forget_secrets(job_id)
        self.folders.remove_logs(job_id)
        folder, text = self.folders.outputs(job_id), f"{job_id} and its logs are removed"
        if folder.exists() and not outputs:
            self.folders.outputs_record(job_id).unlink(missing_ok=True)
            return f"{text}; its outputs stay in {folder}"
        self.folders.remove_outputs(job_id)
        return text

    def _answer(self, record: Record, text: str) -> dict[str, Any]:
        return {"job": views.summary(self.supervisor, record), "text": text}

    def _change(
        self,
        job_id: str,
        verb: Callable[[Record], verbs.VerbResult],
        spec: StoredSpec | None = None,
    ) -> str:
        """Apply a verb to the current state of the job. Return the message for the user."""
        results: list[verbs.VerbResult] = []

        def decide(record: Record) -> Decision | None:
            results.append(verb(record))
            return results[0].decision

        if self.supervisor.change(job_id, decide, spec) is None:
            raise self._no_job(job_id)
        self.supervisor.wake()
        return results[0].text

    async def _resume(
        self, job_id: str, body: Mapping[str, Any], options: PackingOptions
    ) -> dict[str, Any]:
        """Rerun a job, with the current job file if the caller has sent it."""
        from drumline.jobs.spec import changes

        record = self.record(job_id)
        requested, before = record.job, record.spec.file
        reason = verbs.reason_not_to_resume(requested)
        if reason is not None:
            return self._answer(record, reason)
        origin = record.spec.document.get("origin")
        adopted = record.spec.origin is not None and record.spec.origin.adopted
        if adopted and body.get("spec") is None:
            raise RequestError(
                f"{job_id} was adopted without its job file; run drumline resume {job_id}"
                " --file FILE"
            )
        if body.get("spec") is not None:
            raw = dict(body["spec"])
            if origin and origin.get("from"):
                raw["checkpoint"] = before["checkpoint"]
            spec, choices = await self.files.check(raw)
            origin = {**(origin or {}), **(body.get("origin") or {}), "adopted": None}
        else:
            spec, choices = self.files.validate(before), requested.choices
        secrets = body.get("secrets", {})
        missing = set(spec.secrets) - set(secrets)
        if missing:
            raise RequestError(f"secrets: {min(missing)} is not set in your environment")
        after = spec.model_dump(mode="json")
        changed = [] if adopted else changes(before, after)
        if not adopted:
            self._require_same_slice(requested, before, after)
        if _is_large(record.spec.document.get("archive")):  # its user has allowed it before
            options = replace(options, allow_large=True)
        archive = await self.files.pack(spec, await self.files.choose_package(spec), options)
        owner = record.spec.checkpoint_owner
        if after["checkpoint"] != before.get("checkpoint"):
            owner = checkpoint_owner(self.store.owner, time.time())
        interpreter = self._local_interpreter(body.get("interpreter")) or record.spec.interpreter
        added = {"archive": archive, "origin": origin, "checkpoint_owner": owner}
        added["interpreter"] = interpreter
        stored = _stored_spec(after | added)
        # No await from here on: the job is reread and changed at once.
        require_wanted(options)
        folder = stored.checkpoints_of(job_id)
        if folder is not None:
            self._require_unused(folder, job_id)
        with self.folders.new_secrets(job_id, {name: secrets[name] for name in spec.secrets}):
            verb = partial(
                verbs.resume, requested=requested, spec=spec, choices=choices, changes=changed
            )
            text = self._change(job_id, verb, stored)
        packing = packing_fields(archive)
        for line in packing_notes(packing):
            self.store.add_event(job_id, Event(EventType.NOTE, line), time.time())
        return self._answer(self.record(job_id), text) | {"changes": changed} | packing

    def _require_same_slice(
        self, job: Job, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> None:
        """Raise RequestError if a key changed that the slice of the job was requested with."""
        if not job.placements:
            return
        for key in ("capacity", *SLICE_KEYS):
            old, new = (
                None if value in ([], {}) else value for value in (before.get(key), after[key])
            )
            if old != new:
                held_slice = (
                    f"a {old} slice" if key == "capacity" else "a slice from before this change"
                )
                raise RequestError(
                    f"{key}: {job.id} holds {held_slice};"
                    f" run drumline delete {job.id} to release it, then resume",
                    409,
                )

    async def _clean(self, job_id: str, outputs: bool) -> dict[str, Any]:
        record = self.record(job_id)
        self._change(job_id, verbs.delete)
        deadline = time.monotonic() + record.job.grace + CLEAN_SECONDS
        while not verbs.removable(self.record(job_id).job):
            if time.monotonic() > deadline:
                raise RequestError(f"{job_id} is still stopping; try again later", 409)
            await self._wait_for_round(1.0)
        record, releasing = self.record(job_id), self._releasing(job_id)
        rest = f"; {verbs.no_slice(releasing)}" if releasing else ""
        return self._answer(record, f"{self._remove(job_id, outputs)}{rest}")

    # --- hosts ------------------------------------------------------------------------------

    def execution(
        self,
        job_id: str,
        host: int | str,
        command: Any,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> Execution:
        """Return a command that runs on one host or all. Each host gets all of `stdin`."""
        record = self.record(job_id)
        session = self.supervisor.sessions.get(attempt_key(record.job))
        if session is None:
            raise RequestError(f"{record.job.id} is {record.job.status}; no host is connected", 409)
        count = len(session.reports())
        indices = range(count) if host == "all" else [int(host)]
        if any(not 0 <= index < count for index in indices):
            raise RequestError(f"{record.job.id} has hosts 0 to {count - 1}")
        for report in session.reports():
            if report.index in indices and report.phase is HostPhase.CONNECTING:
                raise RequestError(
                    f"host {report.index} of {record.job.id} is not connected yet", 409
                )
        line = command if isinstance(command, str) else shlex.join(command)
        return Execution(session, indices, line, stdin)

    async def hosts(self, job_id: str) -> list[dict[str, Any]]:
        """Return the login to each host of a job."""
        record = self.record(job_id)
        placement = record.job.active
        listed = self.supervisor.polls.listed(placement) if placement else None
        if placement is None or listed is None or not listed.slices:
            raise RequestError(f"{record.job.id} is {record.job.status}; it holds no slice", 409)
        try:
            return await self.supervisor.sessions.logins(record, listed)
        except CloudError as error:
            raise RequestError(str(error), 502) from None


def _stored_spec(document: dict[str, Any]) -> StoredSpec:
    """Return the spec to store. Raise RequestError if a caller has sent an invalid origin."""
    try:
        return StoredSpec.from_json(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{place}: {first['msg'].lower()}") from None


def _is_large(archive: Mapping[str, Any] | None) -> bool:
    """Return True for code, packed or measured, that its user must allow."""
    return archive is not None and needs_confirmation(
        archive["bytes"], archive.get("largest") or ()
    )


def packing_fields(archive: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields about omitted and large files of an archive, packed or measured."""
    fields = archive or {}
    return {
        "left_out": fields.get("left_out", []),
        "left_out_total": fields.get("left_out_total", 0),
        "largest": fields.get("largest", []),
    }
