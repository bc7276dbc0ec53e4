"""The `filter` of a list call, in the language that Google's APIs share (AIP-160).

    type = "v4-8" OR (version:alpha AND NOT name = "*lite*")

Comparisons of a field with a value, joined by AND, OR, NOT and parentheses; OR binds tighter than
AND, and adjacent terms are joined by AND. `:` checks whether a text contains the value, whether a
list or a map has it, or with `*` whether the field exists.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drumline.cloud.model.errors import ApiError, Json, invalid

Test = Callable[[Json], bool]
_TOKEN = re.compile(
    r"""\s*(?:(?P<word>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s()=!<>:"']+)"""
    r"""|(?P<mark><=|>=|!=|[=<>:()]))"""
)


def matcher(text: str) -> Test | None:
    """A test of a listed thing, as JSON; None where no filter was given."""
    return _Reader(text).everything() if text.strip() else None


def value_at(thing: object, path: str) -> Any:
    """The value at a path like `metadata.verb`, in camelCase or snake_case; None if missing."""
    for part in path.split("."):
        if not isinstance(thing, Mapping):
            return None
        spelt = {key.replace("_", "").lower(): key for key in thing}
        thing = thing.get(spelt.get(part.replace("_", "").lower(), part))
    return thing


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._words: list[str] = []
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None:
                raise self._wrong(f"at {text[at:].strip()!r}")
            self._words.append(found["word"] or found["mark"])
            at = found.end()
        self._words.reverse()

    def everything(self) -> Test:
        test = self._all()
        if self._words:
            raise self._wrong(f"at {self._words[-1]!r}")
        return test

    def _all(self) -> Test:
        tests = [self._any()]
        while self._words and self._words[-1] != ")":
            if self._words[-1] == "AND":
                self._words.pop()
            tests.append(self._any())
        return lambda thing: all(test(thing) for test in tests)

    def _any(self) -> Test:
        tests = [self._term()]
        while self._words and self._words[-1] == "OR":
            self._words.pop()
            tests.append(self._term())
        return lambda thing: any(test(thing) for test in tests)

    def _term(self) -> Test:
        word = self._next()
        if word == "NOT":
            test = self._term()
            return lambda thing: not test(thing)
        if word == "(":
            test = self._all()
            if self._next() != ")":
                raise self._wrong("a parenthesis is not closed")
            return test
        how = self._next()
        if how not in _COMPARISONS:
            raise self._wrong(f"{word!r} is not compared with anything")
        compare, value = _COMPARISONS[how], _unquoted(self._next())
        return lambda thing: compare(value_at(thing, word), value)

    def _next(self) -> str:
        if not self._words:
            raise self._wrong("it ends too early")
        return self._words.pop()

    def _wrong(self, why: str) -> ApiError:
        return invalid(f"Invalid filter '{self._text}': {why}", "filter")


def _unquoted(word: str) -> str:
    return re.sub(r"\\(.)", r"\1", word[1:-1]) if word[0] in "\"'" else word


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _equal(value: object, wanted: str) -> bool:
    return value is not None and fnmatch.fnmatchcase(_text(value), wanted.replace("[", "[[]"))


def _has(value: object, wanted: str) -> bool:
    if value is None or wanted == "*":
        return value is not None
    if isinstance(value, Mapping):
        return wanted in value
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(_equal(item, wanted) for item in value)
    return wanted.lower() in _text(value).lower()


_COMPARISONS: Mapping[str, Callable[[object, str], bool]] = {
    "=": _equal,
    "!=": lambda value, wanted: not _equal(value, wanted),
    ":": _has,
    "<": lambda value, wanted: value is not None and _text(value) < wanted,
    ">": lambda value, wanted: value is not None and _text(value) > wanted,
    "<=": lambda value, wanted: value is not None and _text(value) <= wanted,
    ">=": lambda value, wanted: value is not None and _text(value) >= wanted,
}
