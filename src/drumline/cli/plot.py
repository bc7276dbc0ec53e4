"""`drumline plot`: a job's metrics over its steps, across attempts, with their interruptions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.connect import coloured, connect, echo_json, echo_lines, on_terminal
from drumline.cli.jobs import AsJson, Id

if TYPE_CHECKING:
    from drumline.cli.rendering.curves import Drawing

PIPE_COLUMNS, PIPE_ROWS = 80, 20
MOST_ROWS = 26
# Rows for the prompt, and for the command itself above the drawing.
_ROWS_AROUND = 3


def plot(
    job_id: Id,
    metric: Annotated[
        str | None,
        typer.Option("--metric", "-m", metavar="NAME", help="What to draw; without it, the loss."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.svg", help="Draw into a file instead."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the loss or another metric across all attempts."""
    from drumline.cli.rendering.curves import NothingToDraw, draw
    from drumline.jobs.client import Refused

    if output is not None and output.suffix.lower() != ".svg":
        raise Refused(f"--output {output}: it is drawn as SVG; name it {output.stem}.svg")
    history = connect().history(job_id)
    if as_json:
        echo_json(history)
        return
    try:
        drawing = draw(history, metric)
    except NothingToDraw as nothing:
        raise Refused(str(nothing)) from None
    if output is not None:
        _write(drawing, output)
        return
    from drumline.cli.connect import terminal_size
    from drumline.cli.rendering.chart import chart_lines

    columns, rows = PIPE_COLUMNS, PIPE_ROWS
    if on_terminal():
        columns, rows = terminal_size()
        rows = min(rows - _ROWS_AROUND, MOST_ROWS)
    echo_lines(chart_lines(drawing, columns, rows, coloured()))


def _write(drawing: "Drawing", output: Path) -> None:
    from drumline.cli.rendering.svg import svg_of
    from drumline.jobs.client import Refused

    try:
        output.write_text(svg_of(drawing), encoding="utf-8")
    except OSError as trouble:
        raise Refused(f"--output {output}: cannot be written: {trouble.strerror}") from None
    typer.echo(f"wrote {output}: {drawing.title} · {' · '.join(drawing.notes)}")
