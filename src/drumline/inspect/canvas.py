"""A sheet to draw bars and words on, twice as large as it is saved, so that edges are smooth.

Words are set in the font that comes with Pillow, so that a picture looks the same everywhere. That
font has no `µ` and no `×`: they are made of the letters `u` and `x` here.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

from drumline.errors import UserError

SCALE = 2
INK = "#1f2933"
_DASHES = str.maketrans({"–": "-", "—": "-", "−": "-", "‑": "-", "→": ">", "μ": "µ"})
_KEPT = "µ×…·°±©«»‘’“”™"


def pillow() -> Any:
    """Pillow's modules that draw.

    Raises:
        UserError: it is not installed.
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
def width(words: str, size: int) -> float:
    """How wide words are set."""
    return float(sum(_font(size).getlength(piece) for piece, _ in _pieces(words))) / SCALE


@cache
def _pieces(words: str) -> tuple[tuple[str, str], ...]:
    """What is set of a font's own letters, and which sign is to be made of it."""
    pieces: list[tuple[str, str]] = []
    plain = ""
    for letter in words.translate(_DASHES):
        if letter in "µ×":
            pieces += [(plain, "")] if plain else []
            pieces.append(("u" if letter == "µ" else "x", letter))
            plain = ""
        elif letter.isascii() or letter in _KEPT:
            plain += letter
        else:
            # `ö` without its dots is better than an empty box.
            bare = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
            plain += bare or "?"
    return (*pieces, (plain, "")) if plain else tuple(pieces)


class Canvas:
    """A white sheet; places and sizes are those of the picture that is saved."""

    def __init__(self, across: int, down: int) -> None:
        """An empty one."""
        image, draw, _ = pillow()
        self.size = (across, down)
        self._image = image.new("RGB", (across * SCALE, down * SCALE), "white")
        self._pen = draw.Draw(self._image)

    def box(
        self,
        corners: tuple[float, float, float, float],
        fill: str | None,
        outline: str | None = None,
        round_by: float = 0.0,
    ) -> None:
        """A rectangle; at least as wide as the finest line."""
        left, top, right, bottom = (round(place * SCALE) for place in corners)
        right, bottom = max(left, right - 1), max(top, bottom - 1)
        room = min(right - left, bottom - top) // 2
        self._pen.rounded_rectangle(
            (left, top, right, bottom),
            radius=min(round(round_by * SCALE), room),
            fill=fill,
            outline=outline,
            width=SCALE if outline else 0,
        )

    def line(
        self, ends: tuple[float, float, float, float], colour: str, thick: float = 1.0
    ) -> None:
        """A straight line."""
        scaled = tuple(round(place * SCALE) for place in ends)
        self._pen.line(scaled, fill=colour, width=max(1, round(thick * SCALE)))

    def hatch(
        self, corners: tuple[float, float, float, float], fill: str, colour: str, apart: float = 6.0
    ) -> None:
        """A rectangle of slanted lines."""
        self.box(corners, fill)
        left, top, right, bottom = corners
        height = bottom - top
        # From a grid of the whole sheet, so that the lines of neighbours meet.
        slant = (left + top) // apart * apart - top
        while slant - height < right:
            # The line on which x + y is constant, cut off at both sides.
            begin, end = max(left, slant - height), min(right, slant)
            if end > begin:
                self.line((begin, top + slant - begin, end, top + slant - end), colour, 1.5)
            slant += apart
        if right - left < apart / 2:  # too narrow for slanted lines to show
            self.box(corners, colour)

    def words(
        self, at: tuple[float, float], words: str, size: int, colour: str = INK, anchor: str = "lm"
    ) -> None:
        """Words beside a place; the anchor is Pillow's: `lm` has them to its right."""
        x = at[0] * SCALE
        if anchor[0] != "l":
            x -= width(words, size) * SCALE / (2 if anchor[0] == "m" else 1)
        y = at[1] * SCALE
        # The middle of capital letters; Pillow's own depends on what is written.
        baseline = round(y + 0.355 * size * SCALE) if anchor[1] == "m" else round(y)
        for piece, sign in _pieces(words):
            raised = round(0.05 * size * SCALE) if sign == "×" else 0
            self._pen.text(
                (round(x), baseline - raised), piece, font=_font(size), fill=colour, anchor="ls"
            )
            if sign == "µ":
                self._stem(round(x), baseline, size, colour)
            x += _font(size).getlength(piece)

    def _stem(self, x: int, baseline: int, size: int, colour: str) -> None:
        """What makes a `µ` of a `u`: its left stroke goes on below the line."""
        letter = pillow()[0].new("L", (2 * size * SCALE, 2 * size * SCALE))
        pillow()[1].Draw(letter).text((0, size * SCALE), "u", 255, _font(size), anchor="ls")
        left, top, right, bottom = letter.getbbox()
        thick = max(2, round((right - left) / 6))
        below = round((bottom - top) * 0.38)
        stroke = (x + left, baseline - thick, x + left + thick - 1, baseline + below)
        self._pen.rectangle(stroke, fill=colour)

    def save(self, path: Path) -> None:
        """Write it as PNG.

        Raises:
            UserError: it cannot be written there.
        """
        image = pillow()[0]
        small = self._image.resize(self.size, image.Resampling.BOX)
        # Few colours: a palette makes the file a third as large, and no eye sees it.
        few = small.quantize(colors=128, dither=image.Dither.NONE)
        try:
            few.save(path, format="PNG", optimize=True)
        except OSError as trouble:
            raise UserError(f"{path}: cannot be written: {trouble.strerror or trouble}") from None
