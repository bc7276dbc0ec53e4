"""What the commands share: the client, the terminal, confirmations and JSON."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from drumline.jobs.client import Client

MISTAKE = 2
TIMED_OUT = 124
INTERRUPTED = 130


def connect(autostart: bool = True) -> "Client":
    """A client of the server in `$DRUMLINE_HOME`; its warnings go to stderr."""
    from drumline.jobs.client import Client

    return Client(autostart=autostart, warn=lambda sentence: typer.echo(sentence, err=True))


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def coloured() -> bool:
    """Whether to colour stdout."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_size() -> tuple[int, int]:
    """Columns and rows."""
    import shutil

    size = shutil.get_terminal_size()
    return size.columns, size.lines


def echo_lines(lines: list[str]) -> None:
    """Print many lines at once: a call for each would be slow with a thousand jobs."""
    typer.echo("\n".join(lines))


def echo_json(value: Any) -> None:
    """Print JSON, indented for a terminal."""
    import json
    import re

    text = json.dumps(value, indent=2, ensure_ascii=False)
    # JSON escapes the control characters of ASCII and leaves those above it.
    escaped = re.sub(
        "[\x7f-\x9f\u202a-\u202e\u2066-\u2069]", lambda match: f"\\u{ord(match[0]):04x}", text
    )
    typer.echo(escaped)


def confirm(verb: str, question: str, yes: bool) -> None:
    """Ask before something is destroyed; without a terminal, `--yes` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        typer.echo(
            f"{verb} asks before it goes on, and there is no terminal to ask on: add --yes",
            err=True,
        )
        raise typer.Exit(MISTAKE)
    if not typer.confirm(question, default=False):
        typer.echo("nothing was changed")
        raise typer.Exit(1)


def runnable(hint: str) -> str:
    """A hint whose `drumline …` can be run as it is, even where it is not on the PATH."""
    import shutil

    if os.path.basename(sys.argv[0]) not in {"drumline", "jobman"} or shutil.which("drumline"):
        return hint
    inside = os.path.relpath(sys.argv[0])
    shown = sys.argv[0] if inside.startswith("..") else inside
    return hint.replace("drumline ", f"{shown} ")


@contextmanager
def interruptible(sentence: str) -> Iterator[None]:
    """Let Ctrl-C end only this command, not the job, and say so."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\n{sentence}", err=True)
        raise typer.Exit(INTERRUPTED) from None
