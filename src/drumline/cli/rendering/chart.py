"""A drawing in a terminal: curves of braille dots, two by four to a character. Pure."""

import typer

from drumline.cli.rendering.curves import Drawing, Spot
from drumline.cli.rendering.text import cut, width

NARROWEST, LOWEST = 20, 4
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_SHADES = ("cyan", "blue")
_BREAK, _AGAIN = "┊", "━"


class _Canvas:
    """Braille characters, each with the shade of the attempt that was drawn there last."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._dots = [[0] * columns for _ in range(rows)]
        self._shades = [[0] * columns for _ in range(rows)]

    def line(self, begin: Spot, end: Spot, shade: int) -> None:
        """Draw a line of dots; coordinates are from 0 to 1, from the lower left."""
        wide, high = 2 * self.columns - 1, 4 * self.rows - 1
        x0, y0, x1, y1 = begin[0] * wide, begin[1] * high, end[0] * wide, end[1] * high
        steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for number in range(steps + 1):
            x = round(x0 + (x1 - x0) * number / steps)
            y = high - round(y0 + (y1 - y0) * number / steps)
            if 0 <= x <= wide and 0 <= y <= high:
                self._dots[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
                self._shades[y // 4][x // 2] = shade

    def row(self, number: int, breaks: set[int], colour: bool) -> str:
        """One line of text; a break is visible where no curve is drawn."""
        cells = []
        for column, dots in enumerate(self._dots[number]):
            if dots:
                cell = chr(0x2800 + dots)
                shade = _SHADES[self._shades[number][column] % 2]
                cells.append(typer.style(cell, fg=shade) if colour else cell)
            else:
                mark = _BREAK if column in breaks else " "
                cells.append(typer.style(mark, fg="yellow") if colour and mark != " " else mark)
        return "".join(cells)


def chart_lines(drawing: Drawing, columns: int, rows: int, colour: bool = False) -> list[str]:
    """The drawing with its axes, in this many columns and rows."""
    labels = {tick: drawing.y.text(tick) for tick in drawing.y.ticks}
    margin = max(map(width, labels.values()), default=0) + 1
    canvas = _Canvas(max(columns - margin - 1, NARROWEST), max(rows - 4, LOWEST))
    for number, curve in enumerate(drawing.curves):
        for run in curve.runs:
            placed = [(drawing.x.share(x), drawing.y.share(y)) for x, y in run]
            for begin, end in zip(placed, placed[1:] or placed, strict=False):
                canvas.line(begin, end, number)
    at_row = {
        canvas.rows - 1 - round(drawing.y.share(tick) * (canvas.rows - 1)): text
        for tick, text in labels.items()
    }
    broken = {
        _column(drawing.x.share(interruption.x), canvas.columns) for interruption in drawing.breaks
    }
    title = cut(drawing.title, columns)
    lines = [typer.style(title, bold=True) if colour else title]
    for row in range(canvas.rows):
        label = at_row.get(row, "")
        edge = "┤" if label else "│"
        lines.append(f"{label:>{margin}}{edge}{canvas.row(row, broken, colour)}".rstrip())
    lines += _x_axis(drawing, margin, canvas.columns)
    if drawing.breaks or len(drawing.curves) > 1:
        marks = f"{_BREAK} " if drawing.breaks else ""
        legend = marks + " · ".join(drawing.notes) + (f" ({_AGAIN})" if drawing.again else "")
        lines.append(" " * (margin + 1) + cut(legend, canvas.columns))
    return lines


def _column(share: float, columns: int) -> int:
    return min(max(round(share * (2 * columns - 1)) // 2, 0), columns - 1)


def _x_axis(drawing: Drawing, margin: int, columns: int) -> list[str]:
    """The axis line, as many of its ticks as are legible, and the axis label."""
    edge, text = ["─"] * columns, [" "] * columns
    name = drawing.x.label
    free_from, free_to = 0, columns - len(name) - 1
    for tick in drawing.x.ticks:
        column = _column(drawing.x.share(tick), columns)
        edge[column] = "┴"
        label = drawing.x.text(tick)
        start = min(max(column - len(label) // 2, 0), columns - len(label))
        if start >= free_from and start + len(label) < free_to:
            text[start : start + len(label)] = label
            free_from = start + len(label) + 1
    for begin, end in drawing.again:
        first = _column(drawing.x.share(begin), columns)
        last = _column(drawing.x.share(end), columns)
        edge[first : last + 1] = _AGAIN * (last + 1 - first)
    text[columns - len(name) :] = name
    return [" " * margin + "└" + "".join(edge), " " * (margin + 1) + "".join(text).rstrip()]
