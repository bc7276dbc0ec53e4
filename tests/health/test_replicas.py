"""Comparing replicas names the devices that are wrong, and never one that is right."""

import random
from collections.abc import Hashable

import pytest

from drumline.health import ReplicaComparison, compare_replicas

DEVICES = tuple(range(8))


def test_no_device_is_named_if_all_agree() -> None:
    assert not compare_replicas([dict.fromkeys(DEVICES, "a")] * 3)
    assert not compare_replicas([{0: 1, 1: 1, 2: 9, 3: 9}], [(0, 1), (2, 3)])
    assert not compare_replicas([])


def test_one_deviation_in_one_run_is_enough() -> None:
    runs = [dict.fromkeys(DEVICES, "a") for _ in range(3)]
    runs[1][5] = "b"
    assert compare_replicas(runs) == ReplicaComparison(devices=(5,), run_counts={5: 1})


def test_repeats_decide_between_two_replicas() -> None:
    assert compare_replicas([{0: "a", 1: "b"}, {0: "a", 1: "a"}]).devices == (1,)


def test_a_tie_names_no_device() -> None:
    comparison = compare_replicas([{0: "a", 1: "b"}] * 3)
    assert comparison.devices == ()
    assert comparison.tied == ((0, 1),)
    assert comparison


def test_a_run_that_differs_as_a_whole_names_no_device() -> None:
    runs = [dict.fromkeys(DEVICES, value) for value in "aba"]
    assert compare_replicas(runs) == ReplicaComparison(spread=True)


def test_a_majority_that_is_wrong_at_once_counts_as_spread() -> None:
    runs = [dict.fromkeys(DEVICES, "a") for _ in range(3)]
    runs[2].update(dict.fromkeys(DEVICES[1:], "b"))
    comparison = compare_replicas(runs)
    assert comparison.devices == ()
    assert comparison.spread


def test_a_single_device_that_does_not_repeat_is_named() -> None:
    assert compare_replicas([{3: "a"}, {3: "b"}]).devices == (3,)
    # Several shards without replicas changed at once, so the error came from one of them.
    assert compare_replicas(
        [{0: 1, 1: 2, 2: 3}, {0: 7, 1: 8, 2: 3}], [(0,), (1,), (2,)]
    ) == ReplicaComparison(spread=True)
    assert compare_replicas([{0: 1, 1: 2}, {0: 7, 1: 2}], [(0,), (1,)]).devices == (0,)


def test_each_group_has_its_own_majority() -> None:
    runs = [{0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "c"}] * 2
    comparison = compare_replicas(runs, [(0, 1, 2), (3, 4, 5)])
    assert comparison.devices == (5,)
    assert comparison.run_counts == {5: 2}


@pytest.mark.parametrize("seed", range(40))
def test_a_minority_of_random_liars_is_named_exactly(seed: int) -> None:
    rng = random.Random(seed)
    replicas = rng.randint(3, 9)
    faulty = rng.sample(range(replicas), rng.randint(0, (replicas - 1) // 2))
    runs: list[dict[int, Hashable]] = [
        {device: rng.randint(1, 9) if device in faulty else 0 for device in range(replicas)}
        for _ in range(rng.randint(1, 4))
    ]
    assert compare_replicas(runs).devices == tuple(sorted(faulty))
