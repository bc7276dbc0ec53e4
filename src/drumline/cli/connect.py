"""The client, the terminal, confirmations and JSON output, for all commands."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from drumline.jobs.client import Client

USER_ERROR = 2
TIMED_OUT = 124
INTERRUPTED = 130


def connect(autostart: bool = True) -> "Client":
    """Return a client of the server in `$DRUMLINE_HOME`. Its warnings go to stderr."""
    from drumline.jobs.client import Client

    return Client(autostart=autostart, warn=lambda message: typer.echo(message, err=True))


def on_terminal() -> bool:
    """Return True if stdout is a terminal."""
    return sys.stdout.isatty()


def coloured() -> bool:
    """Return True if stdout takes colour."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_size() -> tuple[int, int]:
    """Return the columns and rows of the terminal."""
    import shutil

    size = shutil.get_terminal_size()
    return size.columns, size.lines


def echo_lines(lines: list[str]) -> None:
    """Print many lines with one call, because a thousand calls would be slow."""
    typer.echo("\n".join(lines))


def echo_json(value: Any) -> None:
    """Print JSON, indented for a terminal."""
    import json
    import re

    text = json.dumps(value, indent=2, ensure_ascii=False)
    # json.dumps escapes only the control characters of ASCII.
    escaped = re.sub(
        "[\x7f-\x9f\u202a-\u202e\u2066-\u2069]", lambda match: f"\\u{ord(match[0]):04x}", text
    )
    typer.echo(escaped)


def confirm(verb: str, question: str, yes: bool) -> None:
    """Ask for confirmation. Without a terminal, `--yes` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        typer.echo(
            f"{verb} needs a confirmation, and there is no terminal: add --yes",
            err=True,
        )
        raise typer.Exit(USER_ERROR)
    try:
        confirmed = typer.confirm(question, default=False)
    except typer.Abort:  # Ctrl-C, or the end of the input
        typer.echo()
        confirmed = False
    if not confirmed:
        typer.echo("nothing was changed")
        raise typer.Exit(1)


def runnable(hint: str) -> str:
    """Return a hint whose `drumline …` commands work even if drumline is not on the PATH."""
    import shutil

    if os.path.basename(sys.argv[0]) not in {"drumline", "jobman"} or shutil.which("drumline"):
        return hint
    relative = os.path.relpath(sys.argv[0])
    command = sys.argv[0] if relative.startswith("..") else relative
    return hint.replace("drumline ", f"{command} ")


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Print a message on Ctrl-C, which ends only this command, not the job."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\n{message}", err=True)
        raise typer.Exit(INTERRUPTED) from None
