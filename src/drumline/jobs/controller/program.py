"""What the hosts of an attempt run, from the record of the job."""

from drumline.hosts.bundled_package import Use
from drumline.hosts.environment import (
    PythonEnvironment,
    mount_steps,
    python_steps,
    run_wrap,
    setup_step,
)
from drumline.hosts.packing.rules import RULES, CodeError
from drumline.hosts.values import Program, Step
from drumline.jobs.billing.costs import per_hour
from drumline.jobs.core.state import Event, Job, Placement
from drumline.jobs.folders import Folders
from drumline.jobs.store.records import Record
from drumline.jobs.store.specs import PythonChoice, StoredSpec


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
