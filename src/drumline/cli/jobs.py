"""The verbs that create, show and end jobs.

Thin: the server decides, and `views`, `show`, `plans` and `follow` make what is printed.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    runnable,
    terminal_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from drumline.jobs.client import Client

Id = Annotated[str, typer.Argument(metavar="ID", help="A job: 12 or 000012.")]
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID...]", help="Jobs: 12 or 000012; or --all.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

LONGEST_WAIT = 1e9
WATCH_SECONDS = 2.0
MOST_FACTS = 10


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
    """Hand over a job file; it runs until it is done."""
    from drumline.cli.rendering.text import harmless, harmless_lines
    from drumline.jobs.spec import SpecError

    client = connect()
    try:
        if dry_run:
            planned = client.dry_run(file, overrides or (), begin_from=begin_from)
            lines = [harmless(line) for line in planned["lines"]]
            echo_json(planned | {"lines": lines}) if as_json else echo_lines(lines)
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
    from drumline.hosts.packing.rules import left_out_line

    number = job["id"]
    typer.echo(opening(job))
    if omitted := left_out_line(job):
        typer.echo(f"  · {harmless(omitted)}")
    for warning in job.get("warnings") or ():
        typer.echo(f"  ! {harmless(warning)}")
    typer.echo(runnable(f"  next: drumline follow {number} · drumline show {number}"))


def _follow(client: "Client", job: dict[str, object], as_json: bool) -> None:
    from drumline.cli.follow import Screen, follow

    # With --json, stdout is for JSON only and the story goes to stderr.
    stream = sys.stderr if as_json else sys.stdout
    columns = terminal_size()[0] if stream.isatty() else None
    screen = Screen(stream, columns, colour=coloured() and not as_json)
    number = job["id"]
    with interruptible(runnable(f"{number} goes on; drumline follow {number} comes back to it")):
        ended = follow(client, job, screen)
    if as_json:
        echo_json(ended)
    raise typer.Exit(0 if ended["status"] == "SUCCEEDED" else 1)


def follow_job(job_id: Id, as_json: AsJson = False) -> None:
    """Tell a job's story so far, and stay until it ends."""
    client = connect()
    _follow(client, client.show(job_id), as_json)


def list_jobs(
    all_jobs: Annotated[
        bool, typer.Option("--all", "-a", help="Also those that ended over a day ago.")
    ] = False,
    status: Annotated[
        list[str] | None,
        typer.Option("--status", metavar="S", help="Those in that state; repeatable."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="TEXT", help="Those with it in their name, or 'llama-*'."),
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", metavar="U", help="Those of a user.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="The newest N.")
    ] = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="ID", help="Those older than a job.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it up to date.")] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs: where they run, how far they are, why they wait."""
    from drumline.cli.rendering.views import list_lines

    client = connect()
    states = [state.strip().upper() for text in status or () for state in text.split(",")]

    def fetch() -> list[dict[str, Any]]:
        return client.list(all_jobs, states, name, user, limit, before)

    if watch:
        with interruptible("the jobs go on"):
            _watch(fetch, as_json)
    jobs = fetch()
    if as_json:
        echo_json(jobs)
        return
    columns = terminal_size()[0] if on_terminal() else None
    echo_lines(list_lines(jobs, columns, coloured()))


def _watch(fetch: "Callable[[], list[dict[str, Any]]]", as_json: bool) -> None:
    """Redraw on a terminal; elsewhere print again whenever something changed."""
    import json

    from drumline.cli.rendering.views import list_lines

    before = ""
    while True:
        jobs = fetch()
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
    """Show one job: what went wrong, its attempts, what to do."""
    job = connect().show(job_id)
    if as_json:
        echo_json(job)
        return
    from drumline.cli.rendering.show import show_lines

    echo_lines(show_lines(job, time.time(), coloured()))


def wait(
    job_ids: Ids = None,
    every: Annotated[bool, typer.Option("--all", help="Every job that has not ended.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="S", min=0, help="Give up after S seconds.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Wait until jobs have ended: exit code 0 if all succeeded.

    It is 1 if one did not, and 124 when the time is up.
    """
    from drumline.cli.follow import Screen
    from drumline.cli.rendering.views import COLOURS, ENDED
    from drumline.jobs.client import Refused

    if timeout is not None and not timeout <= LONGEST_WAIT:
        raise Refused(f"--timeout {timeout:g}: give seconds, at most {LONGEST_WAIT:.0f}")
    client = connect()
    numbers = _chosen(client, "wait", job_ids, every)
    deadline = None if timeout is None else time.monotonic() + timeout
    # In a pipe nothing is redrawn, so the whole wait is one call.
    redrawn = on_terminal() and not as_json
    screen = Screen(sys.stdout, terminal_size()[0] if redrawn else None, coloured())
    with interruptible("the jobs go on"):
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            turn = left if not screen.redraws else min(1.0, 1.0 if left is None else left)
            statuses = client.wait(numbers, turn)
            going = [job for job, status in statuses.items() if status not in ENDED]
            if not going or (deadline is not None and time.monotonic() >= deadline):
                break
            screen.progress(
                f"  ▸ waiting for {', '.join(f'{job} {statuses[job]}' for job in going)}"
            )
    screen.wipe()
    if as_json:
        echo_json(statuses)
    for job, status in () if as_json else statuses.items():
        shown = typer.style(status, fg=COLOURS.get(status)) if coloured() else status
        typer.echo(f"{job} {shown}")
    if going:
        typer.echo(f"still going after {timeout:g} s: {', '.join(going)}", err=True)
        raise typer.Exit(TIMED_OUT)
    raise typer.Exit(0 if set(statuses.values()) <= {"SUCCEEDED"} else 1)


def resume(
    job_ids: Ids = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every job that is FAILED or CANCELLED.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Another job file for it.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; repeatable."),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Start jobs again that have ended, by their files as now."""
    from drumline.jobs.client import Refused
    from drumline.jobs.spec import SpecError

    client = connect()
    chosen = _chosen(client, "resume", job_ids, every)
    if file is not None and len(chosen) > 1:
        raise Refused("resume: --file is for one job; name it by its id")

    def again(number: str) -> dict[str, Any]:
        try:
            return client.resume(number, file=file, overrides=overrides or ())
        except SpecError as mistake:
            left = "nothing was" if len(chosen) == 1 else f"{number} was not"
            raise Refused(f"{mistake}\n{left} resumed") from None

    def changed(number: str) -> list[str]:
        return client.resume_changes(number, file, overrides or ())

    task = _Task("resume", again, every and not yes, as_json, dry_run, changed)
    try:
        _act(client, task, chosen)
    except SpecError as mistake:
        raise Refused(f"{mistake}\nnothing was resumed") from None


def cancel(
    job_ids: Ids = None,
    every: Annotated[bool, typer.Option("--all", help="Every job that has not ended.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """End the programs and keep the slices for a resume."""
    client = connect()
    task = _Task("cancel", lambda job: client.cancel(job)[0], every and not yes, as_json, dry_run)
    _act(client, task, _chosen(client, "cancel", job_ids, every))


def delete(
    job_ids: Ids = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every job that has not ended or holds a slice.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """End the programs and release the slices; logs stay."""
    client = connect()
    task = _Task("delete", lambda job: client.delete(job)[0], not yes, as_json, dry_run)
    _act(client, task, _chosen(client, "delete", job_ids, every))


def clean(
    job_ids: Ids = None,
    every: Annotated[bool, typer.Option("--all", help="Every job that has ended.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Delete jobs, and remove their logs and records."""
    client = connect()
    task = _Task("clean", lambda job: client.clean(job)[0], not yes, as_json, dry_run)
    _act(client, task, _chosen(client, "clean", job_ids, every))


@dataclass(frozen=True)
class _Task:
    """A verb for several jobs, and how its results are printed."""

    verb: str
    do: "Callable[[str], dict[str, Any]]"
    asks: bool
    as_json: bool
    dry_run: bool
    changes: "Callable[[str], list[str]] | None" = None
    """Returns what the verb would change in a job's file, a line each."""


def _chosen(client: "Client", verb: str, typed: list[str] | None, every: bool) -> list[str]:
    """The ids that were typed, or those of every job that the verb is for."""
    from drumline.cli.rendering.views import ENDED
    from drumline.jobs.client import Refused, job_id

    if bool(typed) == every:
        raise Refused(f"{verb}: name the jobs by their ids, or all of them by --all")
    if not every:
        return list(dict.fromkeys(job_id(text) for text in typed or ()))
    fits: dict[str, Callable[[dict[str, Any]], bool]] = {
        "wait": lambda job: job["status"] not in ENDED,
        "cancel": lambda job: job["status"] not in ENDED,
        "delete": lambda job: job["status"] not in ENDED or bool(job.get("chips_held")),
        "resume": lambda job: job["status"] in {"FAILED", "CANCELLED"},
        "clean": lambda job: job["status"] in ENDED,
    }
    return [str(job["id"]) for job in client.list(all=True) if fits[verb](job)]


def _act(client: "Client", task: _Task, numbers: list[str]) -> None:
    """Do a verb to each job; all ids are looked up before the first is acted on."""
    from drumline.cli.rendering.plans import loss, standing, would
    from drumline.cli.rendering.text import count, harmless, harmless_lines
    from drumline.jobs.client import Refused

    if not numbers:
        echo_json([]) if task.as_json else typer.echo(f"there is no job to {task.verb}")
        return
    if task.dry_run or task.asks or len(numbers) > 1:
        jobs = [client.show(number) for number in numbers]
        if task.dry_run:
            plan = {str(job["id"]): [would(task.verb, job)] for job in jobs}
            for number in numbers if task.changes else ():
                plan[number] += _change_lines(task.changes(number) if task.changes else [])
            lines = [line for planned in plan.values() for line in planned]
            echo_json(plan) if task.as_json else echo_lines(lines)
            return
        if task.asks:
            facts = [f"{standing(job)}\n{loss(task.verb, job)}" for job in jobs]
            if len(facts) > MOST_FACTS:
                facts[MOST_FACTS:] = [f"… and {count(len(facts) - MOST_FACTS, 'job')} more."]
            confirm(task.verb, "\n".join(facts) + " Go on?", yes=False)
    refused = False
    answers = []
    for number in numbers:
        try:
            # One at a time: a refusal for one job must not keep the others from being done.
            answers.append(task.do(number))
        except Refused as mistake:
            typer.echo(harmless_lines(str(mistake)), err=True)
            refused = True
        else:
            if not task.as_json:
                from drumline.hosts.packing.rules import left_out_line

                changed = _change_lines(answers[-1].get("changes") or ())
                omitted = left_out_line(answers[-1])
                lines = [harmless(answers[-1]["text"]), *changed]
                echo_lines([*lines, f"  {harmless(omitted)}"] if omitted else lines)
    if task.as_json:
        echo_json(answers)
    if refused:
        raise typer.Exit(MISTAKE)


def _change_lines(changes: "Sequence[str]") -> list[str]:
    """The lines that show what changed in a job file since the job was created."""
    from drumline.cli.rendering.text import harmless

    return [f"  changed  {harmless(line)}" for line in changes]
