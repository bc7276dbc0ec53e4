"""The differences between two job files, key by key, as lines for the user."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_LONGEST = 60


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Lines like `retry.failures: 3 → 1`; both jobs are the JSON of `model_dump(mode="json")`."""
    old, new = dict(_flat(before)), dict(_flat(after))
    return [
        f"{key}: {_change(old.get(key), new.get(key))}"
        for key in dict.fromkeys([*old, *new])
        if _given(old.get(key)) != _given(new.get(key))
    ]


def _given(value: object) -> object:
    """The value; an empty list is the same as a key that an older version did not have."""
    return None if value == [] else value


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", found) for inner, found in value.items())
        else:
            yield key, value


def _change(old: object, new: object) -> str:
    was, becomes = _text(old), _text(new)
    return f"{was} → {becomes}" if was != becomes else f"{becomes}, changed further on"


def _text(value: object) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    line = " ⏎ ".join(text.strip().splitlines())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
