"""The verbs that make, look at and end jobs.

Thin: the server decides, `views`, `show`, `plans` and `follow` hold what is printed.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.connect import (
    MISTAKE,
    TIMED_OUT,
    coloured,
    confirm,
    connect,
    echo_json,
    echo_lines,
    interruptible,
    on_terminal,
    terminal_size,
)

if TYPE_CHECKING:
    from drumline.jobs.client import Client

Id = Annotated[str, typer.Argument(metavar="ID", help="A job: 12 or 000012.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Jobs: 12 or 000012.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

WATCH_SECONDS = 2.0


def create(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The job file.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until it ends.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; repeatable."),
    ] = None,
    begin_from: Annotated[
        str | None,
        typer.Option("--from", metavar="ID", help="Begin with the checkpoints of that job."),
    ] = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Hand over a job file; the job runs until it is done, whatever the cloud does."""
    from drumline.cli.text import harmless, harmless_lines
    from drumline.jobs.spec import SpecError

    client = connect()
    try:
        if dry_run:
            planned = client.plan(file, overrides or (), begin_from=begin_from)
            lines = [harmless(line) for line in planned]
            echo_json({"lines": lines}) if as_json else echo_lines(lines)
            return
        job = client.create(file, overrides or (), begin_from=begin_from)
    except SpecError as mistake:
        typer.echo(harmless_lines(f"{mistake}\nnothing was created"), err=True)
        raise typer.Exit(MISTAKE) from None
    if follow:
        _follow(client, job, as_json)
        return
    if as_json:
        echo_json(job)
        return
    from drumline.cli.follow import opening

    number = job["id"]
    typer.echo(opening(job))
    for warning in job.get("warnings") or ():
        typer.echo(f"  ! {harmless(warning)}")
    typer.echo(f"  next: drumline show {number} · drumline logs {number} --follow")


def _follow(client: "Client", job: dict[str, object], as_json: bool) -> None:
    from drumline.cli.follow import Screen, follow

    # With --json, stdout is for whoever parses it and the story goes beside it.
    stream = sys.stderr if as_json else sys.stdout
    columns = terminal_size()[0] if stream.isatty() else None
    screen = Screen(stream, columns, colour=coloured() and not as_json)
    number = job["id"]
    with interruptible(f"{number} goes on; drumline logs {number} --follow picks it up"):
        ended = follow(client, job, screen)
    if as_json:
        echo_json(ended)
    raise typer.Exit(0 if ended["status"] == "SUCCEEDED" else 1)


def list_jobs(
    all_jobs: Annotated[
        bool, typer.Option("--all", "-a", help="Also those that ended over a day ago.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it up to date.")] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs: where they run, how far they are, why they wait."""
    from drumline.cli.views import list_lines

    client = connect()
    if watch:
        with interruptible("the jobs go on"):
            _watch(client, all_jobs, as_json)
    jobs = client.list(all=all_jobs)
    if as_json:
        echo_json(jobs)
        return
    columns = terminal_size()[0] if on_terminal() else None
    echo_lines(list_lines(jobs, columns, coloured()))


def _watch(client: "Client", all_jobs: bool, as_json: bool) -> None:
    """Redraw on a terminal; elsewhere print again whenever something changed."""
    import json

    from drumline.cli.views import list_lines

    before = ""
    while True:
        jobs = client.list(all=all_jobs)
        if on_terminal() and not as_json:
            columns, rows = terminal_size()
            lines = list_lines(jobs, columns, coloured(), rows)
            typer.echo("\x1b[2J\x1b[H" + "\n".join(lines), nl=False)
            sys.stdout.flush()
        else:
            now = json.dumps(jobs) if as_json else "\n".join([*list_lines(jobs), ""])
            if now != before:
                typer.echo(now)
            before = now
        time.sleep(WATCH_SECONDS)


def show(job_id: Id, as_json: AsJson = False) -> None:
    """Show one job: what went wrong, its attempts, cost and slice, and what to do next."""
    job = connect().show(job_id)
    if as_json:
        echo_json(job)
        return
    from drumline.cli.show import show_lines

    echo_lines(show_lines(job, time.time(), coloured()))


def wait(
    job_ids: Ids,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="S", min=0, help="Give up after S seconds.")
    ] = None,
) -> None:
    """Wait until jobs have ended: exit code 0 if all succeeded, 1 if not, 124 on time-out."""
    from drumline.cli.follow import Screen
    from drumline.cli.views import COLOURS, ENDED

    client = connect()
    deadline = None if timeout is None else time.monotonic() + timeout
    # Nothing is redrawn in a pipe, so there the whole wait is one call.
    screen = Screen(sys.stdout, terminal_size()[0] if on_terminal() else None, coloured())
    with interruptible("the jobs go on"):
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            turn = left if not screen.redraws else min(1.0, 1.0 if left is None else left)
            statuses = client.wait(job_ids, turn)
            going = [one for one, status in statuses.items() if status not in ENDED]
            if not going or (deadline is not None and time.monotonic() >= deadline):
                break
            screen.progress(
                f"  ▸ waiting for {', '.join(f'{one} {statuses[one]}' for one in going)}"
            )
    screen.wipe()
    for one, status in statuses.items():
        shown = typer.style(status, fg=COLOURS.get(status)) if coloured() else status
        typer.echo(f"{one} {shown}")
    if going:
        typer.echo(f"still going after {timeout:g} s: {', '.join(going)}", err=True)
        raise typer.Exit(TIMED_OUT)
    raise typer.Exit(0 if set(statuses.values()) == {"SUCCEEDED"} else 1)


def resume(
    job_id: Id,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Another job file for it.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; repeatable."),
    ] = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Start a job again that has ended, by its job file as it is now."""
    from drumline.cli.plans import would
    from drumline.cli.text import harmless
    from drumline.jobs.spec import SpecError

    client = connect()
    try:
        if dry_run:
            changed = client.resume_changes(job_id, file, overrides or ())
            answer = {"text": would("resume", client.show(job_id)), "changes": changed}
        else:
            answer = client.resume(job_id, file=file, overrides=overrides or ())
    except SpecError as mistake:
        typer.echo(f"{mistake}\nnothing was resumed", err=True)
        raise typer.Exit(MISTAKE) from None
    if as_json:
        echo_json(answer)
        return
    typer.echo(answer["text"])
    for line in answer.get("changes") or ():
        typer.echo(f"  changed  {harmless(line)}")


def cancel(job_ids: Ids, dry_run: DryRun = False) -> None:
    """End the program and keep the slice for a resume; says what keeping it costs."""
    _act("cancel", job_ids, dry_run)


def delete(job_ids: Ids, yes: Yes = False, dry_run: DryRun = False) -> None:
    """End the program and release the slice; logs and record stay."""
    _act("delete", job_ids, dry_run, asks=not yes)


def clean(job_ids: Ids, yes: Yes = False, dry_run: DryRun = False) -> None:
    """End the program, release the slice, and remove the job's logs and record."""
    _act("clean", job_ids, dry_run, asks=not yes)


def _act(verb: str, typed: list[str], dry_run: bool, asks: bool = False) -> None:
    """Do a verb to each job; all ids are looked up before the first is acted on."""
    from drumline.cli.plans import loss, standing, would
    from drumline.cli.text import harmless, harmless_lines
    from drumline.jobs.client import Refused, job_id

    client = connect()
    numbers = list(dict.fromkeys(job_id(one) for one in typed))
    if dry_run or asks or len(numbers) > 1:
        jobs = [client.show(number) for number in numbers]
        if dry_run:
            echo_lines([would(verb, job) for job in jobs])
            return
        if asks:
            facts = [line for job in jobs for line in (standing(job), loss(verb, job))]
            confirm(verb, "\n".join(facts) + " Go on?", yes=False)
    refused = False
    for number in numbers:
        try:
            # One at a time: what is refused for one job is no reason to leave the others.
            answer = getattr(client, verb)(number)[0]
        except Refused as mistake:
            typer.echo(harmless_lines(str(mistake)), err=True)
            refused = True
        else:
            typer.echo(harmless(answer["text"]))
    if refused:
        raise typer.Exit(MISTAKE)
