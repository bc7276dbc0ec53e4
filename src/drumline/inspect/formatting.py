"""Sizes, times and tables in words, as every report here writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def size(count: float) -> str:
    """A number of bytes: `1.5 MiB`."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_BINARY) - 1:
        count, unit = count / 1024, unit + 1
    digits = f"{count:.0f}" if unit == 0 or count >= 1000 else f"{count:.3g}"
    return f"{digits} {_BINARY[unit]}"


def read_size(text: str | int) -> int:
    """The bytes of `8 MiB`, `1.5 GB` or `4096`; raises ValueError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(text)
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(text), re.IGNORECASE)
    if found is None:
        raise ValueError(text)
    unit = (found[2] or "B").upper()
    unit = unit if unit.endswith("B") else f"{unit}B"
    factor = _DECIMAL.get(unit) or 1024 ** ("BKMGT".index(unit[0]))
    return round(float(found[1]) * factor)


def duration(seconds: float) -> str:
    """A time: `311 µs`, `2.4 ms`, `3.44 s`."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def share(part: float) -> str:
    """A part of one: `62 %`."""
    return f"{100 * part:.0f} %" if part >= 0.01 or not part else "<1 %"


def plural(count: int, noun: str) -> str:
    """`1 loop`, `3 loops`, `2 all-reduces`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> list[str]:
    """Lines of columns; `right` has an r for each column that is aligned right."""
    every = [list(headings), *[list(row) for row in rows]]
    widths = [max(len(row[at]) for row in every) for at in range(len(headings))]
    lines = []
    for row in every:
        cells = [
            cell.rjust(width) if right[at : at + 1] == "r" else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
