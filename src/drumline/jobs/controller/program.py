"""From a job's record to what the hosts of one attempt run."""

from collections.abc import Mapping
from typing import Any

from drumline.hosts.companion import Use
from drumline.hosts.environment import (
    PythonEnvironment,
    mount_steps,
    python_steps,
    run_wrap,
    setup_step,
)
from drumline.hosts.values import Program, Step
from drumline.jobs.core.state import Event, Job, Placement
from drumline.jobs.folders import Folders
from drumline.jobs.store.records import Record


def program_of(record: Record, attempt: int, held: Placement, folders: Folders) -> Program:
    """Everything the hosts of `held` need for this attempt."""
    spec = record.spec
    job_id = record.job.id
    archive = spec.get("archive")
    python = _python(spec["python"], (archive or {}).get("drumline", "none"))
    sha = archive["sha"] if archive else None
    steps: tuple[Step, ...] = (*mount_steps(spec["mounts"]), *python_steps(python, job_id))
    if spec["setup"]:
        steps += (setup_step(python, job_id, spec["setup"]),)
    return Program(
        job_id=job_id,
        name=record.name,
        attempt=attempt,
        accelerator=held.accelerator,
        archive=folders.code / f"{sha}.tar.gz" if sha else None,
        archive_sha=sha,
        steps=steps,
        run=spec["run"],
        environment=spec["environment"],
        secrets=folders.secrets(job_id),
        hosts=None if spec["hosts"] == "all" else tuple(spec["hosts"]),
        checkpoint=checkpoint_of(spec, job_id),
        wrap=run_wrap(python, job_id, spec["mounts"]),
    )


def checkpoint_of(spec: Mapping[str, Any], job_id: str) -> str | None:
    """Where a job keeps its checkpoints: a folder of its own, or that of the job it began from."""
    taken_over = (spec.get("origin") or {}).get("checkpoint")
    if taken_over:
        return str(taken_over)
    # Two jobs from one file must not write over each other's checkpoints.
    root = spec.get("checkpoint")
    return f"{root.rstrip('/')}/{job_id}" if root else None


def told_events(events: tuple[Event, ...], job: Job, spec: Mapping[str, Any]) -> tuple[Event, ...]:
    """The events, with what the user gave for the job where the hosts start to run it."""
    held = job.placement
    first_on_slice = job.attempt and held and job.attempt.started_at <= held.asked_at
    told: list[Event] = []
    count = "1 host" if held and held.hosts == 1 else f"{held.hosts if held else 0} hosts"
    for event in events:
        if event.kind == "code":
            told += _code_events(spec, count) if first_on_slice else ()
            continue
        if event.kind != "run":
            told.append(event)
            continue
        if first_on_slice:
            told += _setup_events(spec, count)
        command = spec["run"].strip().splitlines()
        more = f" … ({len(command)} lines)" if len(command) > 1 else ""
        told.append(Event("run", command[0] + more))
    return tuple(told)


def _code_events(spec: Mapping[str, Any], count: str) -> list[Event]:
    """What was sent to the hosts of a fresh slice."""
    archive = spec.get("archive")
    if not archive:
        return []
    files = "1 file" if archive["files"] == 1 else f"{archive['files']} files"
    size = max(1, round(archive["bytes"] / 1000))
    return [Event("code", f"{files}, {size:,} kB → {count}")]


def _setup_events(spec: Mapping[str, Any], count: str) -> list[Event]:
    """What was done on the hosts of a fresh slice between the code and the program."""
    done = [*spec["mounts"]]
    if spec["python"]["kind"] != "system":
        done.append(spec["python"]["kind"])
    if spec["setup"]:
        done.append("setup")
    return [Event("setup", f"{', '.join(done)} on {count}")] if done else []


def _python(given: dict[str, Any], drumline: Use) -> PythonEnvironment:
    wanted = given.get("requirements")
    return PythonEnvironment(
        kind=given["kind"],
        version=given.get("version"),
        requirements=tuple(wanted) if isinstance(wanted, list) else None,
        requirements_file=wanted if isinstance(wanted, str) else None,
        image=given.get("image"),
        drumline=drumline,
    )
