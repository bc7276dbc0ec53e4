"""The commands that create, show and stop jobs.

The server decides. `rendering` and `follow` format the output.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drumline.cli.connect import (
    INTERRUPTED,
    TIMED_OUT,
    USER_ERROR,
    coloured,
    confirm,
    connect,
    echo_json,
    echo_lines,
    interruptible,
    on_terminal,
    runnable,
    terminal_size,
)
from drumline.cli.options import AsJson, DryRun, JobId, JobIds, Overrides, Yes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from drumline.jobs.client import Client, OnPacking

MAX_WAIT_SECONDS = 1e9
WATCH_SECONDS = 2.0
MAX_JOBS_SHOWN = 10


def create(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The job file.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the job until it ends.")
    ] = False,
    overrides: Overrides = None,
    begin_from: Annotated[
        str | None,
        typer.Option("--from", metavar="ID", help="Start from the checkpoints of that job."),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Create a job from a job file. Asks for confirmation if its files are large."""
    from drumline.cli.rendering.text import sanitize, sanitize_lines
    from drumline.jobs.spec import SpecError

    client = connect()
    try:
        if dry_run:
            plan = client.dry_run(file, overrides or (), begin_from=begin_from)
            lines = [sanitize(line) for line in plan["lines"]]
            echo_json(plan | {"lines": lines}) if as_json else echo_lines(lines)
            return
        job = _send_code(
            "create",
            yes,
            lambda allow_large, on_packing: client.create(
                file,
                overrides or (),
                begin_from=begin_from,
                allow_large=allow_large,
                on_packing=on_packing,
            ),
        )
    except SpecError as error:
        typer.echo(sanitize_lines(f"{error}\nnothing was created"), err=True)
        raise typer.Exit(USER_ERROR) from None
    if follow:
        _follow(client, job, as_json)
        return
    if as_json:
        echo_json(job)
        return
    from drumline.cli.follow import opening_line
    from drumline.hosts.packing.rules import packing_notes

    job_id = job["id"]
    typer.echo(opening_line(job))
    for note in packing_notes(job):
        typer.echo(f"  · {sanitize(note)}")
    for warning in job.get("warnings") or ():
        typer.echo(f"  ! {sanitize(warning)}")
    typer.echo(runnable(f"  next: drumline follow {job_id} · drumline show {job_id}"))


def _send_code(
    verb: str, yes: bool, send: "Callable[[bool, OnPacking], dict[str, Any]]"
) -> dict[str, Any]:
    """Send a request that packs code, and show the progress of packing large code on stderr.

    If the server asks for a confirmation because the code is large, ask the user.
    """
    from drumline.cli.follow import Screen, packing_line
    from drumline.cli.rendering.text import sanitize_lines
    from drumline.jobs.client import CommandInterrupted, LargeCode

    columns = terminal_size()[0] if sys.stderr.isatty() else None
    screen = Screen(sys.stderr, columns, coloured())

    def show_progress(done: int, total: int) -> None:
        screen.progress(packing_line(done, total, columns))

    try:
        return send(yes, show_progress)
    except LargeCode as error:
        if not sys.stdin.isatty():
            raise
        confirm(verb, sanitize_lines(f"{error}\nSend them?"), yes=False)
        return _send_code(verb, True, send)
    except CommandInterrupted as interrupted:
        typer.echo(sanitize_lines(f"\n{runnable(str(interrupted))}"), err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        screen.clear_progress()


def _follow(client: "Client", job: "Mapping[str, Any]", as_json: bool) -> None:
    from drumline.cli.follow import Screen, follow

    # With --json, stdout is for JSON only, and the events go to stderr.
    stream = sys.stderr if as_json else sys.stdout
    columns = terminal_size()[0] if stream.isatty() else None
    screen = Screen(stream, columns, colour=coloured() and not as_json)
    job_id = job["id"]
    with interruptible(
        runnable(f"{job_id} keeps running; follow it with: drumline follow {job_id}")
    ):
        job = follow(client, job, screen)
    if as_json:
        echo_json(job)
    raise typer.Exit(0 if job["status"] == "SUCCEEDED" else 1)


def follow_job(job_id: JobId, as_json: AsJson = False) -> None:
    """Print a job's events and follow it until it ends."""
    client = connect()
    _follow(client, client.show(job_id), as_json)


def list_jobs(
    all_jobs: Annotated[
        bool, typer.Option("--all", "-a", help="Include jobs that ended over a day ago.")
    ] = False,
    status: Annotated[
        list[str] | None,
        typer.Option("--status", metavar="S", help="Jobs in this state; repeatable."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="TEXT", help="Jobs by part of the name, or 'llama-*'."),
    ] = None,
    user: Annotated[str | None, typer.Option("--user", metavar="U", help="Jobs of a user.")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="The newest N jobs.")
    ] = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="ID", help="Jobs older than this job.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Update the list continuously.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs with their zone, status and progress."""
    from drumline.cli.rendering.views import render_list

    client = connect()
    states = [state.strip().upper() for text in status or () for state in text.split(",")]

    def fetch() -> list[dict[str, Any]]:
        return client.list(all_jobs, states, name, user, limit, before)

    if watch:
        with interruptible("the jobs keep running"):
            _watch(fetch, as_json)
    jobs = fetch()
    if as_json:
        echo_json(jobs)
        return
    columns = terminal_size()[0] if on_terminal() else None
    lines = render_list(jobs, columns, coloured())
    echo_lines(lines if jobs else [*map(runnable, lines)])


def _watch(fetch: "Callable[[], list[dict[str, Any]]]", as_json: bool) -> None:
    """Redraw the list on a terminal. In a pipe, print it again after each change."""
    import json

    from drumline.cli.rendering.views import render_list

    before = ""
    while True:
        jobs = fetch()
        if on_terminal() and not as_json:
            columns, rows = terminal_size()
            lines = render_list(jobs, columns, coloured(), rows)
            typer.echo("\x1b[2J\x1b[H" + "\n".join(lines), nl=False)
            sys.stdout.flush()
        else:
            text = json.dumps(jobs) if as_json else "\n".join([*render_list(jobs), ""])
            if text != before:
                typer.echo(text)
            before = text
        time.sleep(WATCH_SECONDS)


def show(job_id: JobId, as_json: AsJson = False) -> None:
    """Show one job: its errors, attempts, cost and next steps."""
    job = connect().show(job_id)
    if as_json:
        echo_json(job)
        return
    from drumline.cli.rendering.show import render_job

    *lines, hint = render_job(job, time.time(), coloured())
    echo_lines([*lines, runnable(hint)])


def wait(
    job_ids: JobIds = None,
    every: Annotated[bool, typer.Option("--all", help="Every job that has not ended.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="S", min=0, help="Stop waiting after S seconds."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Wait until jobs have ended; exit code 0 if all succeeded.

    The exit code is 1 if a job failed or was cancelled, and 124 after a timeout.
    """
    from drumline.cli.follow import Screen
    from drumline.cli.rendering.views import COLOURS, FINAL_STATUSES
    from drumline.jobs.client import Refused

    if timeout is not None and not timeout <= MAX_WAIT_SECONDS:
        raise Refused(f"--timeout {timeout:g}: expected seconds, at most {MAX_WAIT_SECONDS:.0f}")
    client = connect()
    ids = _select(client, "wait", job_ids, every)
    deadline = None if timeout is None else time.monotonic() + timeout
    # In a pipe nothing is redrawn, so one call waits for all the time.
    redraws = on_terminal() and not as_json
    screen = Screen(sys.stdout, terminal_size()[0] if redraws else None, coloured())
    with interruptible("the jobs keep running"):
        while True:
            remaining = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            seconds = remaining
            if screen.redraws:
                seconds = 1.0 if remaining is None else min(1.0, remaining)
            statuses = client.wait(ids, seconds)
            running = [job for job, status in statuses.items() if status not in FINAL_STATUSES]
            if not running or (deadline is not None and time.monotonic() >= deadline):
                break
            screen.progress(
                f"  ▸ waiting for {', '.join(f'{job} {statuses[job]}' for job in running)}"
            )
    screen.clear_progress()
    if as_json:
        echo_json(statuses)
    for job, status in () if as_json else statuses.items():
        styled = typer.style(status, fg=COLOURS.get(status)) if coloured() else status
        typer.echo(f"{job} {styled}")
    if running:
        message = f"timed out after {timeout:g} s; still running: {', '.join(running)}"
        typer.echo(message, err=True)
        raise typer.Exit(TIMED_OUT)
    raise typer.Exit(0 if set(statuses.values()) <= {"SUCCEEDED"} else 1)


def resume(
    job_ids: JobIds = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every job that is FAILED or CANCELLED.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Replace the job file.")
    ] = None,
    overrides: Overrides = None,
    yes: Yes = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Restart jobs that have ended, with their current files."""
    from drumline.jobs.client import Refused
    from drumline.jobs.spec import SpecError

    client = connect()
    ids = _select(client, "resume", job_ids, every)
    if file is not None and len(ids) > 1:
        raise Refused("resume: --file takes one job; give its id")

    def resume_job(job_id: str) -> dict[str, Any]:
        try:
            return _send_code(
                "resume",
                yes,
                lambda allow_large, on_packing: client.resume(
                    job_id,
                    file=file,
                    overrides=overrides or (),
                    allow_large=allow_large,
                    on_packing=on_packing,
                ),
            )
        except SpecError as error:
            subject = "nothing was" if len(ids) == 1 else f"{job_id} was not"
            raise Refused(f"{error}\n{subject} resumed") from None

    def changes(job_id: str) -> list[str]:
        return client.resume_changes(job_id, file, overrides or ())

    task = _Task("resume", resume_job, every and not yes, as_json, dry_run, changes)
    try:
        _run(client, task, ids)
    except SpecError as error:
        raise Refused(f"{error}\nnothing was resumed") from None


def cancel(
    job_ids: JobIds = None,
    every: Annotated[bool, typer.Option("--all", help="Every job that has not ended.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Stop programs and keep their slices for a resume."""
    client = connect()
    task = _Task("cancel", lambda job: client.cancel(job)[0], every and not yes, as_json, dry_run)
    _run(client, task, _select(client, "cancel", job_ids, every))


def delete(
    job_ids: JobIds = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every job that has not ended or holds a slice.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Stop programs and release their slices; keep the logs.

    Asks for confirmation if a program runs or starts on a slice, and with --all.
    """
    client = connect()
    task = _Task(
        "delete",
        lambda job: client.delete(job)[0],
        every and not yes,
        as_json,
        dry_run,
        confirms_stop=not yes,
    )
    _run(client, task, _select(client, "delete", job_ids, every))


def clean(
    job_ids: JobIds = None,
    every: Annotated[bool, typer.Option("--all", help="Every job that has ended.")] = False,
    home: Annotated[
        bool, typer.Option("--home", help="Delete all jobs, settings and files of Drumline.")
    ] = False,
    outputs: Annotated[
        bool, typer.Option("--outputs", help="Delete the outputs of the jobs too.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Delete jobs and remove their logs and records. Asks for confirmation.

    Their outputs stay, except with --outputs.
    """
    if home:
        from drumline.cli.uninstall import clean_home
        from drumline.jobs.client import Refused

        if job_ids or every:
            raise Refused("clean: --home deletes everything and takes no job ids and no --all")
        clean_home(yes, as_json, dry_run)
        return
    client = connect()
    task = _Task(
        "clean",
        lambda job: client.clean(job, outputs=outputs)[0],
        not yes,
        as_json,
        dry_run,
        with_outputs=outputs,
    )
    _run(client, task, _select(client, "clean", job_ids, every))


@dataclass(frozen=True)
class _Task:
    """A verb for several jobs, and the format of its results."""

    verb: str
    apply: "Callable[[str], dict[str, Any]]"
    confirms: bool
    as_json: bool
    dry_run: bool
    changes: "Callable[[str], list[str]] | None" = None
    """Returns the changes that the verb would make to a job file, one per line."""
    confirms_stop: bool = False
    """True if the user is asked before a program is stopped."""
    with_outputs: bool = False
    """True if `clean` deletes the outputs too."""


def _select(client: "Client", verb: str, ids: list[str] | None, every: bool) -> list[str]:
    """Return the given ids, or with `--all` those of every job that the verb applies to."""
    from drumline.cli.rendering.views import FINAL_STATUSES
    from drumline.jobs.client import Refused

    if bool(ids) == every:
        raise Refused(f"{verb}: give job ids, or --all")
    if not every:
        return [*client.ids(ids or ())]
    applies: dict[str, Callable[[dict[str, Any]], bool]] = {
        "wait": lambda job: job["status"] not in FINAL_STATUSES,
        "cancel": lambda job: job["status"] not in FINAL_STATUSES,
        "delete": lambda job: job["status"] not in FINAL_STATUSES or bool(job.get("chips_held")),
        "resume": lambda job: job["status"] in {"FAILED", "CANCELLED"},
        "clean": lambda job: job["status"] in FINAL_STATUSES,
    }
    return [str(job["id"]) for job in client.list(all=True) if applies[verb](job)]


def _run(client: "Client", task: _Task, ids: list[str]) -> None:
    """Apply a verb to each job, after all ids were looked up."""
    from drumline.cli.rendering.text import plural, sanitize, sanitize_lines
    from drumline.cli.rendering.views import (
        describe_effect,
        describe_plan,
        describe_state,
        stops_program,
    )
    from drumline.jobs.client import Refused

    if not ids:
        echo_json([]) if task.as_json else typer.echo(f"there is no job to {task.verb}")
        return
    if task.dry_run or task.confirms or task.confirms_stop or len(ids) > 1:
        jobs = [client.show(job_id) for job_id in ids]
        if task.dry_run:
            plan = {
                str(job["id"]): [describe_plan(task.verb, job, task.with_outputs)] for job in jobs
            }
            for job_id in ids if task.changes else ():
                plan[job_id] += _render_changes(task.changes(job_id) if task.changes else [])
            lines = [line for job_lines in plan.values() for line in job_lines]
            echo_json(plan) if task.as_json else echo_lines(lines)
            return
        if task.confirms or (task.confirms_stop and any(map(stops_program, jobs))):
            effects = [
                f"{describe_state(job)}\n{describe_effect(task.verb, job, task.with_outputs)}"
                for job in jobs
            ]
            if len(effects) > MAX_JOBS_SHOWN:
                effects[MAX_JOBS_SHOWN:] = [
                    f"… and {plural(len(effects) - MAX_JOBS_SHOWN, 'job')} more."
                ]
            confirm(task.verb, "\n".join(effects) + " Continue?", yes=False)
    failed = False
    answers = []
    for job_id in ids:
        try:
            # One call per job, so that an error of one job does not stop the others.
            answers.append(task.apply(job_id))
        except Refused as error:
            typer.echo(sanitize_lines(str(error)), err=True)
            failed = True
        else:
            if not task.as_json:
                from drumline.hosts.packing.rules import packing_notes

                changed = _render_changes(answers[-1].get("changes") or ())
                notes = [f"  {sanitize(note)}" for note in packing_notes(answers[-1])]
                echo_lines([sanitize(answers[-1]["text"]), *changed, *notes])
    if task.as_json:
        echo_json(answers)
    if failed:
        raise typer.Exit(USER_ERROR)


def _render_changes(changes: "Sequence[str]") -> list[str]:
    """Return the lines about changes in a job file since the job was created."""
    from drumline.cli.rendering.text import sanitize

    return [f"  changed  {sanitize(line)}" for line in changes]
