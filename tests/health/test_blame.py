"""Of devices that disagree the wrong one is blamed, and never one that is right."""

import random
from collections.abc import Hashable

import pytest

from drumline.health import Blamed, blame

EIGHT = tuple(range(8))


def test_nobody_is_blamed_where_all_agree() -> None:
    assert not blame([dict.fromkeys(EIGHT, "a")] * 3)
    assert not blame([{0: 1, 1: 1, 2: 9, 3: 9}], [(0, 1), (2, 3)])
    assert not blame([])


def test_one_deviation_in_one_run_is_enough() -> None:
    runs = [dict.fromkeys(EIGHT, "a") for _ in range(3)]
    runs[1][5] = "b"
    assert blame(runs) == Blamed(devices=(5,), times={5: 1})


def test_two_replicas_are_told_apart_by_their_repeats() -> None:
    assert blame([{0: "a", 1: "b"}, {0: "a", 1: "a"}]).devices == (1,)


def test_a_tie_names_nobody() -> None:
    found = blame([{0: "a", 1: "b"}] * 3)
    assert found.devices == ()
    assert found.tied == ((0, 1),)
    assert found


def test_a_whole_run_that_differs_names_nobody() -> None:
    runs = [dict.fromkeys(EIGHT, value) for value in "aba"]
    assert blame(runs) == Blamed(spread=True)


def test_most_devices_wrong_at_once_is_one_cause() -> None:
    runs = [dict.fromkeys(EIGHT, "a") for _ in range(3)]
    runs[2].update(dict.fromkeys(EIGHT[1:], "b"))
    found = blame(runs)
    assert found.devices == ()
    assert found.spread


def test_a_device_alone_that_does_not_repeat_is_to_blame() -> None:
    assert blame([{3: "a"}, {3: "b"}]).devices == (3,)
    # Of shards without replicas several changed at once: what was wrong came from one of them.
    assert blame([{0: 1, 1: 2, 2: 3}, {0: 7, 1: 8, 2: 3}], [(0,), (1,), (2,)]) == Blamed(
        spread=True
    )
    assert blame([{0: 1, 1: 2}, {0: 7, 1: 2}], [(0,), (1,)]).devices == (0,)


def test_each_group_has_its_own_truth() -> None:
    runs = [{0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "c"}] * 2
    found = blame(runs, [(0, 1, 2), (3, 4, 5)])
    assert found.devices == (5,)
    assert found.times == {5: 2}


@pytest.mark.parametrize("seed", range(40))
def test_fewer_than_half_that_lie_at_random_are_all_found_and_nobody_else(seed: int) -> None:
    dice = random.Random(seed)
    replicas = dice.randint(3, 9)
    bad = dice.sample(range(replicas), dice.randint(0, (replicas - 1) // 2))
    runs: list[dict[int, Hashable]] = [
        {device: dice.randint(1, 9) if device in bad else 0 for device in range(replicas)}
        for _ in range(dice.randint(1, 4))
    ]
    assert blame(runs).devices == tuple(sorted(bad))
