"""The filter of a list call."""

import pytest

from drumline.cloud.emulator.api.filters import matcher, value_at
from drumline.cloud.model.errors import ApiError

THING = {
    "name": "projects/p/locations/z/acceleratorTypes/v4-8",
    "type": "v4-8",
    "done": True,
    "acceleratorConfigs": [{"topology": "2x2x1"}],
    "labels": {"team": "vision", "odd": "a [b] 'c'"},
    "metadata": {"createTime": "2026-01-02T03:04:05Z"},
    "tags": ["one", "two"],
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("type = v4-8", True),
        ('type="v4-8"', True),
        ("type = v4-16", False),
        ("type != v4-16", True),
        ("type = v4*", True),
        ("NOT type = v4*", False),
        ("name:acceleratorTypes", True),
        ("type = v4-16 OR type = v4-8", True),
        ("type = v4-8 AND done = true", True),
        ("type = v4-8 done = false", False),
        # OR binds tighter than AND.
        ("type = none AND done = true OR done = false", False),
        ("(type = none AND done = true) OR done = true", True),
        ("labels.team = vision", True),
        ("labels:team", True),
        ("labels:other", False),
        ("tags:two", True),
        ("tags:three", False),
        ("missing:*", False),
        ("labels:*", True),
        ("metadata.create_time > 2026-01-01", True),
        ("metadata.createTime < 2026-01-01", False),
        ("missing = x", False),
        ("missing != x", True),
        ("labels.odd = \"a [b] 'c'\"", True),
        (r'labels.odd = "a \[b\] \'c\'"', True),
    ],
)
def test_a_filter_picks_what_it_describes(text: str, wanted: bool) -> None:
    test = matcher(text)
    assert test is not None
    assert test(THING) is wanted


def test_without_a_filter_there_is_none() -> None:
    assert matcher("") is matcher("  ") is None


@pytest.mark.parametrize(
    "text", ["type", "type =", "= v4", "(type = v4-8", "type = v4-8)", 'type = "v4', "a OR", "!"]
)
def test_a_filter_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="Invalid filter"):
        matcher(text)


def test_fields_are_found_in_either_spelling() -> None:
    assert value_at(THING, "accelerator_configs") == value_at(THING, "acceleratorConfigs")
    assert value_at(THING, "type.deeper") is None
