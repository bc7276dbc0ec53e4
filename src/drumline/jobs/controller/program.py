"""What the hosts of an attempt run, from the record of the job."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.hosts.companion import Use
from drumline.hosts.environment import (
    PythonEnvironment,
    mount_steps,
    python_steps,
    run_wrap,
    setup_step,
)
from drumline.hosts.packing.rules import RULES, CodeError, left_out_json, left_out_line
from drumline.hosts.values import Program, Step
from drumline.jobs.billing import per_hour
from drumline.jobs.core.state import Decision, Event, Job, Placement
from drumline.jobs.folders import Folders
from drumline.jobs.store.records import Record
from drumline.jobs.store.specs import PythonChoice, StoredSpec

if TYPE_CHECKING:
    from drumline.hosts.code import Archive


def program_of(record: Record, attempt: int, held: Placement, folders: Folders) -> Program:
    """Everything the hosts of `held` need for this attempt."""
    spec = record.spec
    job_id = record.job.id
    archive = spec.archive
    python = _python(spec.python, archive.drumline if archive else "none")
    sha = archive.sha if archive else None
    if archive is not None and archive.rules < RULES:
        raise CodeError(
            f"code: an older version of Drumline packed the code of {job_id}, which may hold "
            f"secrets and is not sent; drumline cancel {job_id}, then drumline resume {job_id} "
            "packs it again"
        )
    steps: tuple[Step, ...] = (*mount_steps(spec.mounts), *python_steps(python, job_id))
    if spec.setup:
        steps += (setup_step(python, job_id, spec.setup),)
    return Program(
        job_id=job_id,
        name=record.name,
        attempt=attempt,
        accelerator=held.accelerator,
        archive=folders.code / f"{sha}.tar.gz" if sha else None,
        archive_sha=sha,
        steps=steps,
        run=spec.run,
        environment=spec.environment,
        secrets=folders.secrets(job_id),
        hosts=None if spec.hosts == "all" else spec.hosts,
        checkpoint=spec.checkpoints_of(job_id),
        owner=record.job.owner,
        fence=_fence_of(record, attempt),
        wrap=run_wrap(python, job_id, spec.mounts),
    )


def _fence_of(record: Record, attempt: int) -> int:
    under_way = record.job.attempt
    return under_way.fence if under_way and under_way.number == attempt else 0


def detailed_events(events: tuple[Event, ...], job: Job, spec: StoredSpec) -> tuple[Event, ...]:
    """The events, with code, set-up and command from the job file where the hosts start."""
    held = job.placement
    first_on_slice = job.attempt and held and job.attempt.started_at <= held.asked_at
    detailed: list[Event] = []
    count = "1 host" if held and held.hosts == 1 else f"{held.hosts if held else 0} hosts"
    for event in events:
        if event.kind == "code":
            detailed += _code_events(spec, count) if first_on_slice else ()
            continue
        if event.kind == "parked":
            detailed.append(_with_cost(event, job, spec))
            continue
        if event.kind != "run":
            detailed.append(event)
            continue
        if first_on_slice:
            detailed += _setup_events(spec, count)
        command = spec.run.strip().splitlines()
        more = f" … ({len(command)} lines)" if len(command) > 1 else ""
        detailed.append(Event("run", command[0] + more))
    return tuple(detailed)


def _with_cost(event: Event, job: Job, spec: StoredSpec) -> Event:
    """What the slices that are parked now cost together, where that is known."""
    rates = [per_hour(each.accelerator, each.zone, spec.capacity) for each in job.parked]
    total = sum(rate or 0.0 for rate in rates)
    cost = f"; {len(rates)} parked cost about ${total:,.2f} an hour" if total else ""
    return Event(event.kind, event.text + cost)


def _code_events(spec: StoredSpec, count: str) -> list[Event]:
    """What was sent to the hosts of a fresh slice."""
    archive = spec.archive
    if archive is None:
        return []
    files = "1 file" if archive.files == 1 else f"{archive.files} files"
    size = max(1, round(archive.bytes / 1000))
    return [Event("code", f"{files}, {size:,} kB → {count}")]


def _setup_events(spec: StoredSpec, count: str) -> list[Event]:
    """What was done on the hosts of a fresh slice between the code and the program."""
    done = [*spec.mounts]
    if spec.python.kind != "system":
        done.append(spec.python.kind)
    if spec.setup:
        done.append("setup")
    return [Event("setup", f"{', '.join(done)} on {count}")] if done else []


def _python(given: PythonChoice, drumline: Use) -> PythonEnvironment:
    wanted = given.requirements
    return PythonEnvironment(
        kind=given.kind,
        version=given.version,
        requirements=wanted if isinstance(wanted, tuple) else None,
        requirements_file=wanted if isinstance(wanted, str) else None,
        image=given.image,
        drumline=drumline,
    )


log = logging.getLogger(__name__)

Change = Callable[[str, Callable[[Record], Decision | None], StoredSpec | None], object]
"""`Supervisor.change`."""


async def make_safe(records: Mapping[str, Record], folder: Path, change: Change) -> None:
    """Repack the archives of these jobs that were not packed by today's rules."""
    for job_id, record in list(records.items()):
        packed = record.spec.archive
        if packed is None or packed.rules >= RULES:
            continue
        from drumline.hosts.packing.repack import repack

        try:
            renewed = await asyncio.to_thread(repack, folder / f"{packed.sha}.tar.gz")
        except (CodeError, OSError) as error:
            log.warning("the code of job %s: %s", job_id, error)
            continue
        current = records.get(job_id)
        # A resume may have packed the code again meanwhile.
        if current is not None and current.spec.archive == packed:
            try:
                _record(current, renewed, change)
            except Exception:  # the disk may be full; the other jobs go on
                log.exception("the code of job %s could not be recorded", job_id)


def _record(record: Record, renewed: "Archive | None", change: Change) -> None:
    """Save that the archive of a job is safe, and what was left out of it."""
    left_out = left_out_json(renewed.left_out if renewed else ())
    archive: dict[str, Any] = {**record.spec.given["archive"], "rules": RULES, **left_out}
    events: tuple[Event, ...] = ()
    if renewed is not None:
        archive |= {
            "sha": renewed.sha256,
            "files": renewed.files,
            "bytes": renewed.bytes,
        }
        events = (Event("warning", f"code of an older version: {left_out_line(left_out)}"),)
    spec = StoredSpec.of({**record.spec.given, "archive": archive})
    change(record.job.id, lambda now: Decision(now.job, events=events), spec)
