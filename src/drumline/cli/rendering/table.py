"""Tables with aligned columns: bold headings on a terminal, plain text in a pipe."""

from collections.abc import Callable, Sequence

import typer

from drumline.cli.rendering.text import harmless, width


def table_lines(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: str = "",
    paint: Callable[[int, str], str] | None = None,
) -> list[str]:
    """Rows under headings; `right` has an `r` for each column that is aligned to the right.

    A column beyond the end of `right` is aligned to the left. `paint` gets a column's number and a
    padded cell, and may colour it.
    """
    sizes = [[width(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(column) for column in zip(*sizes, strict=True)]
    sides = right.ljust(len(widths))

    def line(cells: Sequence[str], used: Sequence[int], painted: bool) -> str:
        padded = []
        for number, cell in enumerate(cells):
            gap = " " * (widths[number] - used[number])
            whole = gap + cell if sides[number] == "r" else cell + gap
            padded.append(paint(number, whole) if paint and painted else whole)
        return "  ".join(padded).rstrip()

    shown = [line(row, used, True) for row, used in zip(rows, sizes[1:], strict=True)]
    return [line(headings, sizes[0], False), *shown]


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
    """Print rows under headings, aligned as `table_lines` does."""
    shown = [[harmless(cell) for cell in row] for row in rows]
    heading, *lines = table_lines(headings, shown, right)
    typer.secho(heading, bold=True)
    for line in lines:
        typer.echo(line)
