"""Arguments and options that several commands share."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Annotated

import typer


def complete_job_id(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the ids of the jobs that `list` shows, newest first, and names. Start no server."""
    from drumline.jobs.client import Client, Refused

    try:
        jobs = Client(autostart=False).list()
    except (OSError, Refused):
        return []
    names = [str(job["name"]) for job in jobs]
    # A shell would split or expand other names, and a number is an id.
    unique = [n for n in names if names.count(n) == 1 and re.fullmatch(r"(?!\d+$)\w[\w.+-]*", n)]
    typed = context.params.get("job_ids") or ()
    words = [*(str(job["id"]) for job in reversed(jobs)), *unique]
    return [word for word in words if word.startswith(incomplete) and word not in typed]


JobId = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="A job: 12, 000012 or its name.", autocompletion=complete_job_id
    ),
]
JobIds = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID...]", help="Jobs, by id or name; or --all.", autocompletion=complete_job_id
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; repeatable."),
]
HostOrAll = Annotated[
    str | None, typer.Option("--host", metavar="N|all", help="A host index, or all.")
]
TargetName = Annotated[
    str,
    typer.Argument(metavar="MODULE:FUNCTION", help="The function to run, such as sampler.py:step."),
]
InputsName = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="NAME",
        help="The function of the module that returns the arguments [default: inputs].",
    ),
]


def require_jax() -> None:
    """Raise UserError if JAX is not installed."""
    from drumline.errors import UserError

    if find_spec("jax") is None:
        raise UserError("this command needs jax: pip install 'drumline[jax]'")


@contextmanager
def redirect_prints() -> Iterator[None]:
    """Send the prints of the user's code to stderr, because stdout is for the report."""
    with redirect_stdout(sys.stderr):
        yield
