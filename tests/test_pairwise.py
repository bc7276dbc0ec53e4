"""Every pair of values is covered, with few cases."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairwise import pairwise

OPTIONS = [
    ["ab", "xyz"],
    ["ab", "xy", "pq"],
    ["abcde", "xyz", "pqr", "12"],
    ["abcdefg", "12345", "xyz", "pqr", "uv"],
]


@pytest.mark.parametrize("options", OPTIONS)
def test_every_two_values_of_two_options_meet(options: list[str]) -> None:
    cases = pairwise(*options)
    for first, second in combinations(range(len(options)), 2):
        pairs = {(case[first], case[second]) for case in cases}
        assert pairs == set(product(options[first], options[second]))


def test_two_options_are_their_product() -> None:
    assert pairwise("ab", "xyz") == list(product("ab", "xyz"))


def test_no_more_cases_than_the_two_longest_options_need_and_a_few() -> None:
    assert len(pairwise("abcdefg", "12345", "xyz", "pqr", "uv")) <= 1.3 * 35


def test_the_cases_are_the_same_every_time() -> None:
    assert pairwise(*OPTIONS[2]) == pairwise(*OPTIONS[2])


def test_options_without_values_have_no_case() -> None:
    assert pairwise("ab", "") == []
