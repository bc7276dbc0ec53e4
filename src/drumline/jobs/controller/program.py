"""The program that the hosts of an attempt run, built from the record of the job."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.hosts.packing.rules import RULES, CodeError, left_out_json, left_out_line
from drumline.hosts.packing.selection import format_size
from drumline.hosts.protocol import DEFAULT_SHM_SIZE, Program, PythonEnvironment
from drumline.jobs.billing import Prices
from drumline.jobs.core.reasons import EventType
from drumline.jobs.core.state import Attempt, Decision, Event, Job, Placement
from drumline.jobs.folders import Folders
from drumline.jobs.store.records import Record
from drumline.jobs.store.specs import StoredSpec

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from drumline.hosts.code import Archive

ChangeJob = Callable[[str, Callable[[Record], Decision | None], StoredSpec | None], object]
"""The type of `Supervisor.change`."""


def build_program(
    record: Record,
    attempt: int,
    placement: Placement,
    folders: Folders,
    slice_lifetime: float | None = None,
) -> Program:
    """Return everything that the hosts of a placement need for an attempt.

    `slice_lifetime` is the mean lifetime of slices like this one in seconds; None if it is unknown.
    """
    spec = record.spec
    job_id = record.job.id
    archive = spec.archive
    if archive is not None and archive.rules < RULES:
        raise CodeError(
            f"code: an older version of Drumline packed the code of {job_id}, which may hold "
            f"secrets and is not sent; drumline cancel {job_id}, then drumline resume {job_id} "
            "packs it again"
        )
    current = record.job.attempt
    return Program(
        job_id=job_id,
        name=record.name,
        attempt=attempt,
        accelerator=placement.accelerator,
        archive=folders.code / archive.file_name if archive else None,
        archive_sha=archive.sha if archive else None,
        large_files=archive.large_files if archive else (),
        mounts=spec.mounts,
        python=_python(spec),
        setup=spec.setup,
        run=spec.run,
        environment=spec.environment,
        secrets=folders.secrets(job_id),
        hosts=None if spec.hosts == "all" else spec.hosts,
        checkpoint=spec.checkpoints_of(job_id),
        owner=record.job.owner,
        fence=current.fence if current and current.number == attempt else 0,
        slice_lifetime=slice_lifetime,
        interpreter=Path(spec.interpreter) if spec.interpreter else None,
    )


def _python(spec: StoredSpec) -> PythonEnvironment:
    source, container = spec.python, spec.docker
    requirements = source.requirements
    return PythonEnvironment(
        kind=source.kind,
        version=source.version,
        requirements=requirements if isinstance(requirements, tuple) else None,
        requirements_file=requirements if isinstance(requirements, str) else None,
        image=source.image,
        drumline=spec.archive.drumline if spec.archive else "none",
        login=container.login if container else None,
        shm_size=container.shm_size if container else DEFAULT_SHM_SIZE,
    )


# --- Events -----------------------------------------------------------------------------------


def add_event_details(
    events: tuple[Event, ...], job: Job, spec: StoredSpec, prices: Prices
) -> tuple[Event, ...]:
    """Return the events with the code, set-up and command of the job, and the cost of slices."""
    placement = job.active
    hosts = placement.hosts if placement else 0
    host_count = "1 host" if hosts == 1 else f"{hosts} hosts"
    new_slice = bool(job.attempt and placement and is_first_attempt(job.attempt, placement))
    detailed: list[Event] = []
    for event in events:
        if event.kind == "code":
            detailed += _code_events(spec, host_count) if new_slice else []
        elif event.kind == "parked":
            detailed.append(_with_cost(event, job, spec, prices))
        elif event.kind == "run":
            detailed += _setup_events(spec, host_count) if new_slice else []
            command = spec.run.strip().splitlines()
            more = f" … ({len(command)} lines)" if len(command) > 1 else ""
            detailed.append(Event(EventType.RUN, command[0] + more))
        else:
            detailed.append(event)
    return tuple(detailed)


def is_first_attempt(attempt: Attempt, placement: Placement) -> bool:
    """Return True if no previous attempt ran on these slices."""
    if placement.first_attempt is None:  # saved by an older version
        return attempt.started_at <= placement.asked_at
    return attempt.number == placement.first_attempt


def _with_cost(event: Event, job: Job, spec: StoredSpec, prices: Prices) -> Event:
    """Add the cost of all slices that are held back now, if it is known."""
    rates = [prices.per_hour(p.accelerator, p.zone, spec.capacity) for p in job.held_back]
    total = sum(rate or 0.0 for rate in rates)
    cost = f"; {len(rates)} parked cost about ${total:,.2f} an hour" if total else ""
    return Event(event.kind, event.text + cost)


def _code_events(spec: StoredSpec, host_count: str) -> list[Event]:
    archive = spec.archive
    if archive is None:
        return []
    files = "1 file" if archive.files == 1 else f"{archive.files} files"
    return [Event(EventType.CODE, f"{files}, {format_size(archive.bytes)} → {host_count}")]


def _setup_events(spec: StoredSpec, host_count: str) -> list[Event]:
    parts = [*spec.mounts]
    if spec.python.kind != "system":
        parts.append(spec.python.kind)
    if spec.setup:
        parts.append("setup")
    return [Event(EventType.SETUP, f"{', '.join(parts)} on {host_count}")] if parts else []


# --- Archives of older versions ---------------------------------------------------------------


async def repack_old_archives(
    records: Mapping[str, Record], folder: Path, change_job: ChangeJob
) -> None:
    """Repack the archives of these jobs that an older version packed.

    They may hold keys and secrets. Files that today's packing rules leave out are not in the new
    archive. An archive that cannot be read is kept, and `build_program` refuses to send it.
    """
    for job_id, record in list(records.items()):
        packed = record.spec.archive
        if packed is None or packed.rules >= RULES:
            continue
        from drumline.hosts.packing.repack import repack

        try:
            repacked = await asyncio.to_thread(repack, folder / packed.file_name)
        except (CodeError, OSError) as error:
            log.warning("the code of job %s: %s", job_id, error)
            continue
        current = records.get(job_id)
        # A resume may have repacked the code in the meantime.
        if current is not None and current.spec.archive == packed:
            try:
                _save_archive(current, repacked, change_job)
            except Exception:  # the disk may be full; the other jobs are not affected
                log.exception("the code of job %s could not be recorded", job_id)


def _save_archive(record: Record, repacked: "Archive | None", change_job: ChangeJob) -> None:
    """Save the new archive of a job, and the files that it leaves out."""
    left_out = left_out_json(repacked.left_out if repacked else ())
    archive: dict[str, Any] = {**record.spec.document["archive"], "rules": RULES, **left_out}
    events: tuple[Event, ...] = ()
    if repacked is not None:
        archive |= {
            "sha": repacked.sha256,
            "files": repacked.files,
            "bytes": repacked.bytes,
        }
        events = (Event(EventType.WARNING, f"code of an older version: {left_out_line(left_out)}"),)
    spec = StoredSpec.from_json({**record.spec.document, "archive": archive})
    change_job(record.job.id, lambda current: Decision(current.job, events=events), spec)
