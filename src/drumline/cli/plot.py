"""`drumline plot`: draw a metric over the steps of all attempts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.connect import coloured, connect, echo_json, echo_lines, on_terminal
from drumline.cli.options import AsJson, JobId

if TYPE_CHECKING:
    from drumline.cli.rendering.plot import Drawing

PIPE_COLUMNS, PIPE_ROWS = 80, 20
MAX_ROWS = 26
# Rows for the prompt, and for the command above the plot.
_RESERVED_ROWS = 3


def plot(
    job_id: JobId,
    metric: Annotated[
        str | None,
        typer.Option("--metric", "-m", metavar="NAME", help="The metric [default: loss]."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.svg", help="Write a picture instead."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the loss or another metric across all attempts."""
    from drumline.cli.rendering.plot import NothingToDraw, draw
    from drumline.jobs.client import Refused

    if output is not None and output.suffix.lower() != ".svg":
        raise Refused(f"--output {output}: the format is SVG; name it {output.stem}.svg")
    history = connect().history(job_id)
    if as_json:
        echo_json(history)
        return
    try:
        drawing = draw(history, metric)
    except NothingToDraw as error:
        raise Refused(str(error)) from None
    if output is not None:
        _write(drawing, output)
        return
    from drumline.cli.connect import terminal_size
    from drumline.cli.rendering.plot import render_chart

    columns, rows = PIPE_COLUMNS, PIPE_ROWS
    if on_terminal():
        columns, rows = terminal_size()
        rows = min(rows - _RESERVED_ROWS, MAX_ROWS)
    echo_lines(render_chart(drawing, columns, rows, coloured()))


def _write(drawing: "Drawing", output: Path) -> None:
    from drumline.cli.rendering.plot import svg
    from drumline.jobs.client import Refused

    try:
        output.write_text(svg(drawing), encoding="utf-8")
    except OSError as error:
        raise Refused(f"--output {output}: cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {output}: {drawing.title} · {' · '.join(drawing.notes)}")
