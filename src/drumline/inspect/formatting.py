"""Format sizes, durations and tables for reports."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def format_bytes(count: float) -> str:
    """Format a number of bytes, such as `1.5 MiB`."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_BINARY_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    digits = f"{count:.0f}" if unit == 0 or count >= 1000 else f"{count:.3g}"
    return f"{digits} {_BINARY_UNITS[unit]}"


def parse_bytes(text: str | int) -> int:
    """Parse `8 MiB`, `1.5 GB` or `4096`.

    Raises:
        ValueError: the text is not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(text)
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(text), re.IGNORECASE)
    if match is None:
        raise ValueError(text)
    unit = (match[2] or "B").upper()
    unit = unit if unit.endswith("B") else f"{unit}B"
    factor = _DECIMAL_UNITS.get(unit) or 1024 ** ("BKMGT".index(unit[0]))
    return round(float(match[1]) * factor)


def format_seconds(seconds: float) -> str:
    """Format a duration, such as `311 µs`, `2.4 ms` or `3.44 s`."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def format_share(fraction: float) -> str:
    """Format a fraction as a percentage, such as `62 %`."""
    return f"{100 * fraction:.0f} %" if fraction >= 0.01 or not fraction else "<1 %"


def format_count(count: int, noun: str) -> str:
    """Format a number with its noun, such as `1 loop` or `3 loops`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def format_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], alignment: str = ""
) -> list[str]:
    """Return the lines of a table. An `r` in `alignment` aligns its column to the right."""
    table = [list(headings), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if alignment[column : column + 1] == "r" else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
