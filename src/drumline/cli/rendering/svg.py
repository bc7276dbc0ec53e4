"""A drawing as SVG: one file for browsers and papers. Pure."""

from html import escape

from drumline.cli.rendering.curves import Axis, Break, Drawing, Spot

WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 64, 56
_SHADES = ("#1a5fb4", "#62a0ea")
"""The colours of attempts, which alternate to show where the next began."""
_BROKEN, _AGAIN, _INK, _FAINT = "#c64600", "#f8e4c0", "#1c1c1c", "#e4e4e4"
_FONT = "font-family='Helvetica, Arial, sans-serif'"
LABEL_ROOM = 66
"""The width of the label of a break; a break that follows closer has only its line."""


def svg_of(drawing: Drawing) -> str:
    """The whole file."""
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}'"
        f" width='{WIDTH}' height='{HEIGHT}' {_FONT} font-size='13' fill='{_INK}'>",
        f"<title>{escape(drawing.title)}</title>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        f"<text x='{LEFT}' y='26' font-size='16' font-weight='bold'>{escape(drawing.title)}</text>",
        f"<text x='{LEFT}' y='46' fill='#5e5c64'>{escape(' · '.join(drawing.notes))}</text>",
        *_bands(drawing),
        *_grid(drawing),
        *_breaks(drawing),
        *_curves(drawing),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _place(drawing: Drawing, spot: Spot) -> Spot:
    x = LEFT + drawing.x.share(spot[0]) * (WIDTH - LEFT - RIGHT)
    y = HEIGHT - BOTTOM - drawing.y.share(spot[1]) * (HEIGHT - TOP - BOTTOM)
    return x, y


def _across(drawing: Drawing, x: float) -> float:
    return _place(drawing, (x, drawing.y.low))[0]


def _bands(drawing: Drawing) -> list[str]:
    """The steps that were run again, shaded; never too narrow to be seen."""
    if not drawing.again:
        return []
    right = WIDTH - RIGHT
    bands = [
        f"<rect x='{right - 12}' y='35' width='12' height='12' fill='{_AGAIN}'/>",
        f"<text x='{right - 18}' y='46' text-anchor='end' fill='#5e5c64'>run again</text>",
    ]
    for begin, end in drawing.again:
        first, last = _across(drawing, begin), _across(drawing, end)
        wide = max(last - first, 2.0)
        bands.append(
            f"<rect x='{first:.1f}' y='{TOP}' width='{wide:.1f}' height='{HEIGHT - TOP - BOTTOM}'"
            f" fill='{_AGAIN}'><title>steps {begin:,.0f} to {end:,.0f} run again</title></rect>"
        )
    return bands


def _grid(drawing: Drawing) -> list[str]:
    low, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in drawing.y.ticks:
        y = _place(drawing, (drawing.x.low, tick))[1]
        parts.append(
            f"<line x1='{LEFT}' y1='{y:.1f}' x2='{right}' y2='{y:.1f}' stroke='{_FAINT}'/>"
        )
        parts.append(
            f"<text x='{LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>"
            f"{_text(drawing.y, tick)}</text>"
        )
    for tick in drawing.x.ticks:
        x = _across(drawing, tick)
        parts.append(f"<line x1='{x:.1f}' y1='{low}' x2='{x:.1f}' y2='{low + 5}' stroke='{_INK}'/>")
        parts.append(
            f"<text x='{x:.1f}' y='{low + 20}' text-anchor='middle'>{_text(drawing.x, tick)}</text>"
        )
    parts.append(f"<path d='M{LEFT} {TOP}V{low}H{right}' fill='none' stroke='{_INK}'/>")
    parts.append(
        f"<text x='{(LEFT + right) / 2:.0f}' y='{HEIGHT - 14}' text-anchor='middle'>"
        f"{escape(drawing.x.label)}</text>"
    )
    middle = (TOP + low) / 2
    parts.append(
        f"<text transform='translate(18 {middle:.0f}) rotate(-90)' text-anchor='middle'>"
        f"{escape(drawing.y.label)}</text>"
    )
    return parts


def _text(axis: Axis, tick: float) -> str:
    return escape(axis.text(tick))


def _breaks(drawing: Drawing) -> list[str]:
    parts: list[str] = []
    free_from = 0.0
    for interruption in sorted(drawing.breaks, key=lambda interruption: interruption.x):
        x = _across(drawing, interruption.x)
        parts += _break(interruption, x, named=x >= free_from)
        free_from = max(free_from, x + LABEL_ROOM)
    return parts


def _break(interruption: Break, x: float, named: bool) -> list[str]:
    line = (
        f"<line x1='{x:.1f}' y1='{TOP}' x2='{x:.1f}' y2='{HEIGHT - BOTTOM}' stroke='{_BROKEN}'"
        " stroke-dasharray='4 3'/>"
    )
    if not named:
        return [line]
    # Near the right edge the label would leave the picture.
    anchor, gap = ("end", -4) if x > WIDTH - RIGHT - LABEL_ROOM else ("start", 4)
    word = (
        f"<text x='{x + gap:.1f}' y='{TOP + 12}' font-size='11' fill='{_BROKEN}'"
        f" text-anchor='{anchor}'>{escape(interruption.what)}</text>"
    )
    return [line, word]


def _curves(drawing: Drawing) -> list[str]:
    parts = []
    for number, curve in enumerate(drawing.curves):
        shade = _SHADES[number % 2]
        for run in curve.runs:
            placed = [_place(drawing, spot) for spot in run]
            if len(placed) == 1:
                x, y = placed[0]
                parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2' fill='{shade}'/>")
                continue
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
            parts.append(
                f"<path d='M{path}' fill='none' stroke='{shade}' stroke-width='1.6'"
                f" stroke-linejoin='round'><title>attempt {curve.attempt}</title></path>"
            )
    return parts
