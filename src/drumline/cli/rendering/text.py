"""Text for a terminal: safe output of untrusted text, numbers, times and tables. Pure functions.

All text from a job (its name, log and errors) passes through `sanitize`, or in chunks through
`Sanitizer`, before it is printed. Otherwise a name could move the cursor, and a log could write to
the clipboard.
"""

import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

import typer

DASH = "–"

# Complete escape sequences are removed first, so that no `[31m` remains; then all other control
# characters, and the marks that reverse the text direction. Compiled on first use, because most
# commands need none of them.
_SEQUENCES = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
# Latin letters and the punctuation of our own messages take one column each.
_NARROW = re.compile("[ -~\xa0-\u02ff\u2010-\u2027\u2190-\u2193]*")


def sanitize(text: object) -> str:
    """Return the text on one line, without control characters and escape sequences."""
    plain = str(text)
    if plain.isprintable():
        return plain
    plain = re.sub(_CONTROLS, "", re.sub(_SEQUENCES, "", plain))
    return plain.replace("\n", " ").replace("\t", " ")


# In a stream, a sequence ends at the end of its line at the latest, so that an unclosed sequence
# does not hide the rest of the log. An incomplete sequence is kept for the next chunk.
_COMPLETE = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-OQ-WYZ\\`a-~]"
)
_UNFINISHED = r"(?:[\x1b\x90\x98\x9b\x9d-\x9f][^\n]*|\r)\Z"
_OPENING = r"\x1b[\[\]PX^_]"
_MAX_SEQUENCE = 4096


class Sanitizer:
    """Removes control characters and escape sequences from text that arrives in chunks.

    Line breaks and tabs are kept. A carriage return starts a new line, so nothing is overwritten.
    """

    def __init__(self) -> None:
        """Create a sanitizer for one stream."""
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    def feed(self, chunk: bytes, last: bool = False) -> str:
        """Return the text that can be printed now. With `last`, return all that remains."""
        text = self._pending + self._decoder.decode(chunk, last)
        self._pending = ""
        if text.isprintable():
            return text
        text = re.sub(_COMPLETE, "", text)
        unfinished = None if last else re.search(_UNFINISHED, text)
        if unfinished and len(text) - unfinished.start() <= _MAX_SEQUENCE:
            text, self._pending = text[: unfinished.start()], text[unfinished.start() :]
        text = re.sub(_OPENING, "", text).replace("\r\n", "\n").replace("\r", "\n")
        return re.sub(_CONTROLS, "", text)


def sanitize_lines(text: str) -> str:
    """Return lines of text without control characters and escape sequences."""
    if text.isprintable():
        return text
    return Sanitizer().feed(text.encode("utf-8", "replace"), last=True)


@lru_cache(maxsize=4096)  # a table measures the same few words many times
def display_width(text: str) -> int:
    """Return the number of terminal columns of the text."""
    if text.isascii() or _NARROW.fullmatch(text):
        return len(text)
    from wcwidth import wcswidth

    columns = wcswidth(text)
    return len(text) if columns < 0 else columns  # wcswidth is negative for control characters


def truncate(text: str, columns: int) -> str:
    """Shorten the text with an ellipsis if it is wider than `columns`."""
    if display_width(text) <= columns:
        return text
    kept = text[: max(columns - 1, 0)]
    while kept and display_width(kept) > columns - 1:
        kept = kept[:-1]
    return kept + "…" if columns > 0 else ""


def wrap(line: str, columns: int, indent: int) -> list[str]:
    """Wrap a line between words, and indent all lines but the first."""
    if display_width(line) <= columns:
        return [line]
    lines, current = [], ""
    for word in re.findall(r"\s*\S+", line):
        while display_width(current + word) > columns:
            if current.strip():
                lines.append(current)
                current, word = " " * indent, word.lstrip()
                continue
            # A word wider than the line is split at the end of the line.
            part = current + word
            head = truncate(part, columns + 1).removesuffix("…")
            lines.append(head)
            current, word = " " * indent, part[len(head) :]
        current += word
    return [*lines, current] if current.strip() else lines


def format_duration(seconds: float) -> str:
    """Format as `1.2 s`, `48 s`, `2 min 5 s`, `20 min`, `2 h 10 min` or `3 d 4 h`."""
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 600:
        return _pair(rounded, 60, "min", "s")
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return _pair(minutes, 60, "h", "min")
    return _pair(round(seconds / 3600), 24, "d", "h")


def _pair(amount: int, size: int, large: str, small: str) -> str:
    first, rest = divmod(amount, size)
    return f"{first} {large} {rest} {small}" if rest else f"{first} {large}"


def format_dollars(amount: float) -> str:
    """Format as `$9.12`, without cents from a hundred: `$1,234`, and `<$0.01` for less."""
    if 0 < amount < 0.005:
        return "<$0.01"
    return f"${amount:,.0f}" if abs(amount) >= 99.995 else f"${amount:,.2f}"


def plural(count: int, noun: str) -> str:
    """Format as `1 chip`, `2 chips` or `1,024 chips`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def format_short(value: float) -> str:
    """Format with three digits and a prefix: `9.8k`, `1.25M`, `412`."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def format_size(size: int) -> str:
    """Format as `412 B`, `1.25 kB` or `3.4 MB`."""
    text = format_short(size)
    return f"{text} B" if text[-1].isdecimal() else f"{text[:-1]} {text[-1]}B"


def format_time(at: float, now: float, seconds: bool = False) -> str:
    """Format as the local time of day, with the date if it is not today."""
    local = time.localtime(at)
    time_of_day = time.strftime("%H:%M:%S" if seconds else "%H:%M", local)
    if time.strftime("%Y%j", local) == time.strftime("%Y%j", time.localtime(now)):
        return time_of_day
    return f"{local.tm_mday} {time.strftime('%b', local)} {time_of_day}"


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_time(text: str, now: float) -> float:
    """Parse `10m` (ago), `14:02` (today or yesterday) or `2026-03-01 14:02`. Raise ValueError."""
    from datetime import datetime

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())
    if match:
        return now - float(match[1]) * _UNITS[match[2]]
    if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text.strip()):
        day = datetime.fromtimestamp(now)
        hour, minute, *second = map(int, text.strip().split(":"))
        at = day.replace(hour=hour, minute=minute, second=second[0] if second else 0)
        timestamp = at.replace(microsecond=0).timestamp()
        return timestamp if timestamp <= now else timestamp - _UNITS["d"]
    return datetime.fromisoformat(text.strip()).timestamp()


def render_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: str = "",
    paint: Callable[[int, str], str] | None = None,
) -> list[str]:
    """Align rows under headings. `right` has an `r` for each right-aligned column.

    Columns beyond the end of `right` are left-aligned. `paint` takes the index of a column and a
    padded cell, and returns the cell with colour.
    """
    sizes = [[display_width(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(column) for column in zip(*sizes, strict=True)]
    alignment = right.ljust(len(widths))

    def line(cells: Sequence[str], cell_widths: Sequence[int], painted: bool) -> str:
        padded = []
        for index, cell in enumerate(cells):
            gap = " " * (widths[index] - cell_widths[index])
            text = gap + cell if alignment[index] == "r" else cell + gap
            padded.append(paint(index, text) if paint and painted else text)
        return "  ".join(padded).rstrip()

    lines = [line(row, used, True) for row, used in zip(rows, sizes[1:], strict=True)]
    return [line(headings, sizes[0], False), *lines]


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
    """Print rows under headings, aligned as in `render_table`, with bold headings on a terminal."""
    cells = [[sanitize(cell) for cell in row] for row in rows]
    heading, *lines = render_table(headings, cells, right)
    typer.secho(heading, bold=True)
    for line in lines:
        typer.echo(line)
