"""Aligned columns for people: bold headings on a terminal, plain text in a pipe."""

from collections.abc import Sequence

import typer


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
    """Print rows under headings; `right` has an `r` for each column that is aligned to the right.

    A column beyond the end of `right` is aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    sides = right.ljust(len(widths))

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(cells, widths, sides, strict=True)
        ).rstrip()

    typer.secho(line(headings), bold=True)
    for row in rows:
        typer.echo(line(row))
