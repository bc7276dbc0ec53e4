"""A canvas for bars and text, drawn at twice the size of the saved picture for smooth edges.

Text uses Pillow's built-in font, so that pictures look the same on every machine. The font has no
`µ` and no `×`. They are drawn with the letters `u` and `x`.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

from drumline.errors import UserError

SCALE = 2
INK = "#1f2933"
_SUBSTITUTES = str.maketrans({"–": "-", "—": "-", "−": "-", "‑": "-", "→": ">", "μ": "µ"})
_IN_FONT = "µ×…·°±©«»‘’“”™"


def pillow() -> Any:
    """Return Pillow's modules Image, ImageDraw and ImageFont.

    Raises:
        UserError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise UserError(
            "pictures are drawn with Pillow, which is not installed: "
            "pip install 'drumline[inspect]'"
        ) from None
    return Image, ImageDraw, ImageFont


@cache
def _font(size: int) -> Any:
    return pillow()[2].load_default(size=size * SCALE)


@cache
def text_width(text: str, size: int) -> float:
    """Return the width of a text."""
    return float(sum(_font(size).getlength(run) for run, _ in _text_runs(text))) / SCALE


@cache
def _text_runs(text: str) -> tuple[tuple[str, str], ...]:
    """Split a text into runs in the font. The second element is the sign to draw with a run."""
    runs: list[tuple[str, str]] = []
    run = ""
    for char in text.translate(_SUBSTITUTES):
        if char in "µ×":
            runs += [(run, "")] if run else []
            runs.append(("u" if char == "µ" else "x", char))
            run = ""
        elif char.isascii() or char in _IN_FONT:
            run += char
        else:
            # Drop the accent of a letter that the font does not have.
            base = unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()
            run += base or "?"
    return (*runs, (run, "")) if run else tuple(runs)


class Canvas:
    """A white canvas. All coordinates are in pixels of the saved picture."""

    def __init__(self, width: int, height: int) -> None:
        """Create an empty canvas."""
        image, draw, _ = pillow()
        self.size = (width, height)
        self._image = image.new("RGB", (width * SCALE, height * SCALE), "white")
        self._draw = draw.Draw(self._image)

    def box(
        self,
        corners: tuple[float, float, float, float],
        fill: str | None,
        outline: str | None = None,
        radius: float = 0.0,
    ) -> None:
        """Draw a rectangle, at least one pixel wide."""
        x0, y0, x1, y1 = (round(coordinate * SCALE) for coordinate in corners)
        x1, y1 = max(x0, x1 - 1), max(y0, y1 - 1)
        max_radius = min(x1 - x0, y1 - y0) // 2
        self._draw.rounded_rectangle(
            (x0, y0, x1, y1),
            radius=min(round(radius * SCALE), max_radius),
            fill=fill,
            outline=outline,
            width=SCALE if outline else 0,
        )

    def line(
        self, ends: tuple[float, float, float, float], colour: str, width: float = 1.0
    ) -> None:
        """Draw a straight line."""
        scaled = tuple(round(coordinate * SCALE) for coordinate in ends)
        self._draw.line(scaled, fill=colour, width=max(1, round(width * SCALE)))

    def hatch(
        self,
        corners: tuple[float, float, float, float],
        fill: str,
        colour: str,
        spacing: float = 6.0,
    ) -> None:
        """Draw a rectangle filled with diagonal lines."""
        self.box(corners, fill)
        x0, y0, x1, y1 = corners
        height = y1 - y0
        # All lines lie on one grid, so that those of adjacent rectangles meet.
        offset = (x0 + y0) // spacing * spacing - y0
        while offset - height < x1:
            # The line with constant x + y, clipped to the rectangle.
            start, end = max(x0, offset - height), min(x1, offset)
            if end > start:
                self.line((start, y0 + offset - start, end, y0 + offset - end), colour, 1.5)
            offset += spacing
        if x1 - x0 < spacing / 2:  # too narrow for the lines to show
            self.box(corners, colour)

    def text(
        self, at: tuple[float, float], text: str, size: int, colour: str = INK, anchor: str = "lm"
    ) -> None:
        """Draw text at a point. The anchor is Pillow's: `lm` puts the text right of the point."""
        x = at[0] * SCALE
        if anchor[0] != "l":
            x -= text_width(text, size) * SCALE / (2 if anchor[0] == "m" else 1)
        y = at[1] * SCALE
        # Centre capital letters. Pillow centres the text itself, which depends on its letters.
        baseline = round(y + 0.355 * size * SCALE) if anchor[1] == "m" else round(y)
        for run, sign in _text_runs(text):
            rise = round(0.05 * size * SCALE) if sign == "×" else 0
            self._draw.text(
                (round(x), baseline - rise), run, font=_font(size), fill=colour, anchor="ls"
            )
            if sign == "µ":
                self._extend_stem(round(x), baseline, size, colour)
            x += _font(size).getlength(run)

    def _extend_stem(self, x: int, baseline: int, size: int, colour: str) -> None:
        """Turn a `u` into a `µ` by extending its left stem below the baseline."""
        glyph = pillow()[0].new("L", (2 * size * SCALE, 2 * size * SCALE))
        pillow()[1].Draw(glyph).text((0, size * SCALE), "u", 255, _font(size), anchor="ls")
        x0, y0, x1, y1 = glyph.getbbox()
        thickness = max(2, round((x1 - x0) / 6))
        descent = round((y1 - y0) * 0.38)
        stem = (x + x0, baseline - thickness, x + x0 + thickness - 1, baseline + descent)
        self._draw.rectangle(stem, fill=colour)

    def save(self, path: Path) -> None:
        """Write the picture as PNG.

        Raises:
            UserError: the file cannot be written.
        """
        image = pillow()[0]
        scaled = self._image.resize(self.size, image.Resampling.BOX)
        # A palette reduces the file to a third without a visible difference.
        palette = scaled.quantize(colors=128, dither=image.Dither.NONE)
        try:
            palette.save(path, format="PNG", optimize=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
