"""Formats numbers and times, and makes untrusted text safe for a terminal.

Pure functions. What came from a job (its name, its log, its errors) goes through `harmless` or,
where it comes in pieces, through `HarmlessStream` before it reaches a terminal: a name must not be
able to move the cursor, nor a log to write into the clipboard.
"""

import re
import time
from functools import lru_cache

NOTHING = "–"

# Whole escape sequences first, so that no `[31m` is left of them; then every control character that
# remains, and the marks that reverse the text direction. Compiled on first use: most commands need
# none.
_SEQUENCES = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
# Latin letters and our own punctuation take one column each.
_NARROW = re.compile("[ -~\xa0-\u02ff\u2010-\u2027\u2190-\u2193]*")


def harmless(text: object) -> str:
    """The text on one line, without anything a terminal would act on."""
    plain = str(text)
    if plain.isprintable():
        return plain
    plain = re.sub(_CONTROLS, "", re.sub(_SEQUENCES, "", plain))
    return plain.replace("\n", " ").replace("\t", " ")


# In a stream a sequence ends with its line at the latest: an opening that is never closed must not
# swallow the rest of the log. As the rest may come with the next piece, an opening alone is held
# back.
_WHOLE = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-OQ-WYZ\\`a-~]"
)
_UNFINISHED = r"(?:[\x1b\x90\x98\x9b\x9d-\x9f][^\n]*|\r)\Z"
_OPENING = r"\x1b[\[\]PX^_]"
_LONGEST_SEQUENCE = 4096


class HarmlessStream:
    """Text that comes in pieces of bytes, without anything a terminal would act on.

    Lines and tabs stay. A carriage return begins a new line: nothing is overwritten.
    """

    def __init__(self) -> None:
        """Nothing is held back yet."""
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, piece: bytes, last: bool = False) -> str:
        """What can be shown by now; with `last`, all that is left."""
        text = self._held + self._decoder.decode(piece, last)
        self._held = ""
        if text.isprintable():
            return text
        text = re.sub(_WHOLE, "", text)
        unfinished = None if last else re.search(_UNFINISHED, text)
        if unfinished and len(text) - unfinished.start() <= _LONGEST_SEQUENCE:
            text, self._held = text[: unfinished.start()], text[unfinished.start() :]
        text = re.sub(_OPENING, "", text).replace("\r\n", "\n").replace("\r", "\n")
        return re.sub(_CONTROLS, "", text)


def harmless_lines(text: str) -> str:
    """Lines of text, without anything a terminal would act on."""
    if text.isprintable():
        return text
    return HarmlessStream().feed(text.encode("utf-8", "replace"), last=True)


@lru_cache(maxsize=4096)  # a table measures the same few words again and again
def width(text: str) -> int:
    """How many columns the text takes on a terminal."""
    if text.isascii() or _NARROW.fullmatch(text):
        return len(text)
    from wcwidth import wcswidth

    columns = wcswidth(text)
    return len(text) if columns < 0 else columns  # wcswidth is negative for control characters


def cut(text: str, columns: int) -> str:
    """The text, shortened with an ellipsis where it is wider than `columns`."""
    if width(text) <= columns:
        return text
    kept = text[: max(columns - 1, 0)]
    while kept and width(kept) > columns - 1:
        kept = kept[:-1]
    return kept + "…" if columns > 0 else ""


def wrapped(line: str, columns: int, indent: int) -> list[str]:
    """The line in pieces that fit, broken between words, all but the first indented."""
    if width(line) <= columns:
        return [line]
    lines, current = [], ""
    for word in re.findall(r"\s*\S+", line):
        while width(current + word) > columns:
            if current.strip():
                lines.append(current)
                current, word = " " * indent, word.lstrip()
                continue
            # A word wider than the line is broken at its end.
            part = current + word
            kept = cut(part, columns + 1).removesuffix("…")
            lines.append(kept)
            current, word = " " * indent, part[len(kept) :]
        current += word
    return [*lines, current] if current.strip() else lines


def duration(seconds: float) -> str:
    """`1.2 s`, `48 s`, `2 min 5 s`, `20 min`, `2 h 10 min`, `3 d 4 h`."""
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return _pair(whole, 60, "min", "s")
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return _pair(minutes, 60, "h", "min")
    return _pair(round(seconds / 3600), 24, "d", "h")


def _pair(amount: int, size: int, large: str, small: str) -> str:
    first, rest = divmod(amount, size)
    return f"{first} {large} {rest} {small}" if rest else f"{first} {large}"


def dollars(amount: float) -> str:
    """`$9.12`; from a hundred on without the cents: `$1,234`."""
    return f"${amount:,.0f}" if abs(amount) >= 99.995 else f"${amount:,.2f}"


def count(number: int, noun: str) -> str:
    """`1 chip`, `2 chips`, `1,024 chips`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def short(number: float) -> str:
    """Three figures and a letter: `9.8k`, `1.25M`, `412`."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.3g}"


def clock(moment: float, now: float, seconds: bool = False) -> str:
    """The local time of day, with the date where it is not today's."""
    then = time.localtime(moment)
    of_day = time.strftime("%H:%M:%S" if seconds else "%H:%M", then)
    if time.strftime("%Y%j", then) == time.strftime("%Y%j", time.localtime(now)):
        return of_day
    return f"{then.tm_mday} {time.strftime('%b', then)} {of_day}"


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def moment(text: str, now: float) -> float:
    """When `10m` (so long ago), `14:02` (today, or yesterday) or `2026-03-01 14:02` was.

    ValueError for anything else.
    """
    from datetime import datetime

    ago = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())
    if ago:
        return now - float(ago[1]) * _UNITS[ago[2]]
    if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text.strip()):
        day = datetime.fromtimestamp(now)
        hour, minute, *second = map(int, text.strip().split(":"))
        then = day.replace(hour=hour, minute=minute, second=second[0] if second else 0)
        found = then.replace(microsecond=0).timestamp()
        return found if found <= now else found - _UNITS["d"]
    return datetime.fromisoformat(text.strip()).timestamp()
