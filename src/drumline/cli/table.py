"""Aligned columns for people: bold headings on a terminal, plain text in a pipe."""

from collections.abc import Callable, Sequence

import typer

from drumline.cli.text import harmless, width


def table_lines(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: str = "",
    paint: Callable[[int, str], str] | None = None,
) -> list[str]:
    """Rows under headings; `right` has an `r` for each column that is aligned to the right.

    A column beyond the end of `right` is aligned to the left. `paint` gets the column's number and
    a cell that is padded already, and may colour it.
    """
    widths = [max(map(width, column)) for column in zip(headings, *rows, strict=True)]
    sides = right.ljust(len(widths))

    def line(cells: Sequence[str], paint: Callable[[int, str], str] | None) -> str:
        padded = []
        for number, (cell, columns, side) in enumerate(zip(cells, widths, sides, strict=True)):
            gap = " " * (columns - width(cell))
            whole = gap + cell if side == "r" else cell + gap
            padded.append(paint(number, whole) if paint else whole)
        return "  ".join(padded).rstrip()

    return [line(headings, None), *(line(row, paint) for row in rows)]


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
    """Print rows under headings, aligned as `table_lines` does."""
    shown = [[harmless(cell) for cell in row] for row in rows]
    heading, *lines = table_lines(headings, shown, right)
    typer.secho(heading, bold=True)
    for line in lines:
        typer.echo(line)
