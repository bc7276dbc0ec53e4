"""What the server does for its callers: each verb of the HTTP API, on plain values.

The desk only records what the user wants; the supervisor brings it about.
"""

import asyncio
import contextlib
import getpass
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drumline.chips import slice_of
from drumline.cloud.protocol import CloudError
from drumline.hosts.code import CodeError, pack
from drumline.hosts.companion import Companion, companion
from drumline.hosts.values import HostPhase
from drumline.jobs import lifecycle, views
from drumline.jobs.costs import per_hour
from drumline.jobs.quota import beyond_quota
from drumline.jobs.spec import JobSpec, SpecError, validate
from drumline.jobs.spec.places import (
    bucket_uses,
    candidates,
    checkpoint_problem,
    region_conflicts,
)
from drumline.jobs.state import Allowance, Choice, Event, Job, Status, Wish
from drumline.jobs.store import Record
from drumline.jobs.supervisor import Supervisor

RECENT = 24 * 3600.0
"""Seconds an ended job stays in the plain list."""


class Mistake(Exception):
    """The caller asked for something that cannot be; the text is the sentence to show."""

    def __init__(self, sentence: str, code: int = 400) -> None:
        """Keep the HTTP status beside the sentence."""
        super().__init__(sentence)
        self.code = code


class Desk:
    """The server's front."""

    def __init__(self, supervisor: Supervisor) -> None:
        """Serve what this supervisor keeps."""
        self.supervisor = supervisor
        self.store = supervisor.store
        self.folders = supervisor.folders

    # --- views ------------------------------------------------------------------------------

    def record(self, job_id: str) -> Record:
        """The job of that id, typed as 12 or 000012."""
        full = job_id.zfill(6)
        try:
            return self.supervisor.records[full]
        except KeyError:
            raise Mistake(f"there is no job {full}; drumline list --all shows all", 404) from None

    def overview(self, everything: bool) -> list[dict[str, Any]]:
        """Every job, or those that have not ended long ago."""
        since = time.time() - RECENT
        return [
            views.summary(self.supervisor, record)
            for record in self.supervisor.records.values()
            if everything or record.job.ended_at is None or record.job.ended_at > since
        ]

    def show(self, job_id: str) -> dict[str, Any]:
        """All there is to know of a job."""
        return views.full(self.supervisor, self.record(job_id))

    def history(self, job_id: str) -> dict[str, Any]:
        """What a job told over its steps."""
        return views.history(self.supervisor, self.record(job_id))

    async def events(self, job_id: str, after: int, wait: float) -> dict[str, Any]:
        """What happened since an event; waits for something to happen."""
        record = self.record(job_id)
        deadline = time.monotonic() + wait
        while True:
            found = self.store.events(record.job.id, after)
            left = deadline - time.monotonic()
            now = self.supervisor.records.get(record.job.id)
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
        """How the server is."""
        config = self.supervisor.config
        return {
            "home": str(config.home),
            "cloud": config.cloud,
            "project": config.project,
            "jobs": len(self.supervisor.records),
            "trouble": dict(self.supervisor.looks.trouble),
        }

    # --- new jobs ---------------------------------------------------------------------------

    async def _checked(self, raw: Mapping[str, Any]) -> tuple[JobSpec, tuple[Choice, ...]]:
        try:
            spec = validate(raw)
        except SpecError as wrong:
            raise Mistake(str(wrong)) from None
        config = self.supervisor.config
        if not config.local and spec.project not in {None, config.project}:
            raise Mistake(
                f"project: this server works in {config.project}, not {spec.project};"
                " use another DRUMLINE_HOME for another project"
            )
        problem = checkpoint_problem(spec, local=config.local)
        if problem:
            raise Mistake(problem)
        choices = candidates(spec, local=config.local)
        if spec.zones == "any" and not config.local and config.zones:
            choices = tuple(c for c in choices if c.zone in config.zones)
        locations: dict[str, str | None] = {}
        for use in bucket_uses(spec):
            try:
                locations[use.bucket] = await self.supervisor.cloud.bucket_location(use.bucket)
            except CloudError:
                locations[use.bucket] = None
        left, refusal = region_conflicts(spec, choices, locations)
        if refusal:
            raise Mistake(refusal)
        if not left:
            wanted = ", ".join(spec.accelerator)
            raise Mistake(f"zones: none of your zones has {wanted}; drumline chips says which do")
        return spec, left

    async def create(
        self, raw: Mapping[str, Any], secrets: Mapping[str, str], user: str
    ) -> dict[str, Any]:
        """Take in a job: its code is packed now, so that later edits do not change it."""
        spec, choices = await self._checked(raw)
        missing = set(spec.secrets) - set(secrets)
        if missing:
            raise Mistake(f"secrets: {min(missing)} is not set in your environment")
        kept = spec.model_dump(mode="json") | {"archive": await self._pack(spec)}
        allowance = Allowance(
            *(
                None if count == "unlimited" else count
                for count in (spec.retry.failures, spec.retry.bad_hosts, spec.retry.preemptions)
            )
        )
        now = time.time()

        def make(job_id: str) -> Job:
            self.folders.keep_secrets(job_id, {name: secrets[name] for name in spec.secrets})
            return Job(
                id=job_id,
                owner=self.store.owner,
                choices=choices,
                created_at=now,
                allowance=allowance,
                grace=spec.stop_grace,
                stuck_after=None if spec.stuck_after == "never" else spec.stuck_after,
            )

        record = self.store.add(user or getpass.getuser(), spec.name, kept, make)
        self.supervisor.records[record.job.id] = record
        warnings = self._warnings(spec, choices, await self._companion(spec))
        for warning in warnings:
            self.store.note(record.job.id, Event("warning", warning), now)
        self.supervisor.wake()
        return views.full(self.supervisor, record) | {"warnings": warnings}

    def _warnings(self, spec: JobSpec, choices: tuple[Choice, ...], along: Companion) -> list[str]:
        config = self.supervisor.config
        short = [] if config.local else beyond_quota(choices, spec.capacity, config.quota)
        return [*short, along.warning] if along.warning else short

    async def _companion(self, spec: JobSpec) -> Companion:
        """Whether Drumline's own package goes to the hosts with the code."""
        scripts, python = (spec.run, spec.setup or ""), spec.python.model_dump()
        local = self.supervisor.config.local
        try:
            return await asyncio.to_thread(companion, spec.workdir, scripts, python, local=local)
        except CodeError as wrong:
            raise Mistake(str(wrong)) from None

    async def _pack(self, spec: JobSpec) -> dict[str, Any] | None:
        along = await self._companion(spec)
        if spec.workdir is None and along.package is None:
            return None
        try:
            packed = await asyncio.to_thread(
                pack, spec.workdir, self.folders.code, package=along.package
            )
        except CodeError as wrong:
            raise Mistake(str(wrong)) from None
        return {
            "sha": packed.sha256,
            "files": packed.files,
            "bytes": packed.bytes,
            "drumline": along.use,
        }

    async def plan(self, raw: Mapping[str, Any]) -> list[str]:
        """What `create` would do, in a few lines."""
        spec, choices = await self._checked(raw)
        archive = await self._pack(spec)
        along = await self._companion(spec)
        warned = [f"! {warning}" for warning in self._warnings(spec, choices, along)]
        return [*views.plan_lines(spec, choices, archive), *warned]

    # --- verbs ------------------------------------------------------------------------------

    async def verb(self, job_id: str, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """`resume`, `cancel`, `delete` or `clean` a job."""
        record = self.record(job_id)
        match verb:
            case "resume":
                text = await self._resume(record, body.get("secrets", {}))
            case "cancel":
                text = self._cancel(record)
            case "delete":
                text = self._delete(record)
            case "clean":
                text = await self._clean(record)
            case _:
                raise Mistake(f"{verb!r} is nothing one can do to a job", 404)
        self.supervisor.wake()
        now = self.supervisor.records.get(record.job.id)
        return {"job": views.summary(self.supervisor, now or record), "text": text}

    def _put(self, record: Record, job: Job, *events: Event) -> None:
        self.store.put(job, events, time.time())
        self.supervisor.records[job.id] = replace(record, job=job)

    async def _resume(self, record: Record, secrets: Mapping[str, str]) -> str:
        job = record.job
        if not job.status.ended:
            return f"{job.id} is {job.status} already"
        if job.status is Status.SUCCEEDED:
            raise Mistake(f"{job.id} has succeeded; create it again to run it again", 409)
        spec = validate({k: v for k, v in record.spec.items() if k != "archive"})
        missing = set(spec.secrets) - set(secrets)
        if missing:
            raise Mistake(f"secrets: {min(missing)} is not set in your environment")
        self.folders.keep_secrets(job.id, {name: secrets[name] for name in spec.secrets})
        kept = spec.model_dump(mode="json") | {"archive": await self._pack(spec)}
        self.store.put_spec(job.id, kept)
        record = replace(record, spec=kept)
        where = f"on the slice kept in {job.slice.zone}" if job.slice else "on a new slice"
        self._put(record, lifecycle.resume(job), Event("resumed", where))
        return f"{job.id} goes on {where}, with the code as it is now"

    def _cancel(self, record: Record) -> str:
        job = record.job
        if job.status.ended:
            return f"{job.id} is {job.status} already"
        self._put(record, replace(job, wish=Wish.CANCEL), Event("note", "cancel asked for"))
        if job.slice is None or job.slice.ready_at is None:
            return f"{job.id} is cancelled; it held no slice"
        chips = slice_of(job.slice.accelerator).chips
        rate = per_hour(job.slice.accelerator, job.slice.zone, record.spec)
        cost = f", which costs about ${rate:,.2f} an hour" if rate else ""
        return (
            f"{job.id} is being stopped; its slice ({chips} chips in {job.slice.zone}) is kept"
            f" for a resume{cost}; drumline delete {job.id} releases it"
        )

    def _delete(self, record: Record) -> str:
        job = record.job
        if job.wish is not Wish.DELETE:
            event = Event("note", "delete asked for")
            self._put(record, replace(job, wish=Wish.DELETE), event)
        if job.slice is None:
            return f"{job.id} holds no slice"
        chips = slice_of(job.slice.accelerator).chips
        return f"{job.id} ends; {chips} chips in {job.slice.zone} are being released"

    async def _clean(self, record: Record) -> str:
        self._delete(record)
        job_id = record.job.id
        self.supervisor.wake()
        deadline = time.monotonic() + record.job.grace + CLEAN_LIMIT
        while time.monotonic() < deadline:
            job = self.supervisor.records[job_id].job
            if job.status.ended and job.slice is None:
                break
            await self._something_changes(1.0)
        else:
            raise Mistake(f"{job_id} is still stopping; try again in a moment", 409)
        del self.supervisor.records[job_id]
        self.store.remove(job_id)
        self.supervisor.pulses.forget(job_id)
        self.folders.forget_secrets(job_id)
        self.folders.remove_logs(job_id)
        return f"{job_id} and its logs are gone"

    # --- hosts ------------------------------------------------------------------------------

    async def run(self, job_id: str, host: int | str, command: Any) -> list[dict[str, Any]]:
        """Run a command on one host or all."""
        record = self.record(job_id)
        session = self.supervisor.session(record.job)
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
        try:
            async with asyncio.timeout(EXEC_LIMIT):
                done = await asyncio.gather(*(session.run(index, line) for index in wanted))
        except TimeoutError:
            told = f"no answer within {EXEC_LIMIT:.0f} s; drumline ssh is for longer"
            raise Mistake(told, 504) from None
        return [
            {"host": index, "exit_code": d.exit_code, "stdout": d.stdout, "stderr": d.stderr}
            for index, d in zip(wanted, done, strict=True)
        ]

    def hosts(self, job_id: str) -> list[dict[str, Any]]:
        """Where the hosts of a job are, and how to log in."""
        record = self.record(job_id)
        node = self.supervisor.node(record.job)
        if node is None or record.job.slice is None:
            raise Mistake(f"{record.job.id} is {record.job.status}: it holds no slice", 409)
        return [
            {
                "index": index,
                "ip": end.internal_ip,
                "ssh_ip": end.ssh_ip,
                "ssh_port": end.ssh_port,
                "user": "drumline",
                "key": str(self.folders.key),
                "known_hosts": str(self.folders.known_hosts(record.job.slice.name)),
            }
            for index, end in enumerate(node.endpoints)
        ]


EXEC_LIMIT = 300.0
CLEAN_LIMIT = 30.0
"""Seconds beyond the grace that a job may take to end before `clean` gives up waiting."""
