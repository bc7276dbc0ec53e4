"""How numbers, times and strangers' text are written for people.

Pure functions. What came from a job (its name, its log, its errors) goes through `harmless` before
it reaches a terminal: a name must not be able to move the cursor or recolour the screen.
"""

import re
import time

NOTHING = "–"

# Whole escape sequences first, so that no `[31m` is left of them; then every control character that
# remains, and the marks that reverse the direction of what follows. Compiled when first needed:
# most commands meet none.
_SEQUENCES = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
# Latin letters and the punctuation we write ourselves take one column each.
_NARROW = re.compile("[ -~\xa0-\u02ff\u2010-\u2027\u2190-\u2193]*")


def harmless(text: object) -> str:
    """The text on one line, without anything a terminal would act on."""
    plain = str(text)
    if plain.isprintable():
        return plain
    plain = re.sub(_CONTROLS, "", re.sub(_SEQUENCES, "", plain))
    return plain.replace("\n", " ").replace("\t", " ")


def width(text: str) -> int:
    """How many columns the text takes on a terminal."""
    if text.isascii() or _NARROW.fullmatch(text):
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF")
        for one in text
    )


def cut(text: str, columns: int) -> str:
    """The text, shortened with an ellipsis where it is wider than `columns`."""
    if width(text) <= columns:
        return text
    kept = text[: max(columns - 1, 0)]
    while kept and width(kept) > columns - 1:
        kept = kept[:-1]
    return kept + "…" if columns > 0 else ""


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
