"""What observations mean: who is named, who is not, and when slow is too slow."""

from typing import Any

import pytest

from drumline.health.checks.devices import Device, check_devices
from drumline.health.judging import CPU_SLOWER, findings, slow_chips
from drumline.health.observations import HOP, REDUCED, SAME, Observation, from_json, joined
from drumline.health.report import FAIL, PASS, WARN
from drumline.health.summary import RunTimes, summarise


def same(values: dict[int, tuple[int, ...]], run: int = 0, **more: Any) -> Observation:
    return Observation("matmul_int8", "bytes, round 1", run, SAME, values, **more)


def test_two_chips_that_always_differ_fail_without_a_name() -> None:
    found = findings([same({0: (1,), 1: (2,)}, run) for run in range(3)])
    assert [(finding.device, finding.among) for finding in found] == [(None, (0, 1))]
    chips = [Device(number, 0, "cpu", "cpu", None) for number in (0, 1)]
    report = summarise(chips, [{}], found, {}, 1.0)
    assert report.verdict == FAIL
    assert [chip.verdict for chip in report.devices] == [WARN, WARN]
    assert [(said.host, said.chip) for said in report.accusations] == [(0, None)]


def test_where_the_host_knows_the_truth_two_chips_are_told_apart() -> None:
    found = findings([same({0: (1,), 1: (2,)}, run, truth=(1,)) for run in range(2)])
    assert [(finding.device, finding.verdict) for finding in found] == [(1, FAIL)]


def test_chips_that_all_differ_from_the_truth_are_warned_of() -> None:
    found = findings([same(dict.fromkeys(range(4), (2,)), truth=(1,))])
    assert {finding.verdict for finding in found} == {WARN}


def test_chips_of_two_kinds_are_not_held_against_each_other() -> None:
    """One of another make rounds in its own way, and takes its own time."""
    kinds = {0: "old", 1: "old", 2: "old", 3: "new"}
    runs = [same({0: (1,), 1: (1,), 2: (1,), 3: (2,)}, run) for run in range(2)]
    assert [finding.device for finding in findings(runs)] == [3]
    assert not findings(runs, kinds)
    lies = same({0: (1,), 1: (5,), 2: (1,), 3: (2,)}, 1)
    assert [finding.device for finding in findings([runs[0], lies], kinds)] == [1]
    fickle = same({0: (1,), 1: (1,), 2: (1,), 3: (5,)}, 1)
    assert [finding.device for finding in findings([runs[0], fickle], kinds)] == [3]
    times = RunTimes([{0: 1.0, 1: 1.0, 2: 1.0, 3: 3.0}] * 3, flops=1.0)
    devices = [Device(number, 0, kind, "gpu", None) for number, kind in kinds.items()]
    report = summarise(devices, [{}], [], {"matmul_bf16": times}, 1.0)
    assert report.verdict == PASS


def hop(run: int, values: dict[int, tuple[int, ...]]) -> Observation:
    senders = {1: 0, 2: 1, 0: 2} if run else {}
    return Observation("links", "all chips, round 1", run, HOP, values, senders=senders)


def test_what_a_bad_link_did_is_not_blamed_on_those_who_pass_it_on() -> None:
    sound = (0, 7)
    found = findings(
        [
            hop(0, {0: sound, 1: sound, 2: sound}),
            hop(1, {0: sound, 1: (3, 8), 2: sound}),
            hop(2, {0: sound, 1: sound, 2: (3, 8)}),
            hop(3, {0: (4, 9), 1: sound, 2: sound}),
        ]
    )
    assert [finding.link for finding in found] == [(0, 1), (2, 0)]
    assert "the link 0 → 1 delivered 3 words" in found[0].why


def test_a_collective_names_a_chip_only_if_no_other_has_it_wrong() -> None:
    def reduced(wrong: dict[int, int]) -> list[int | None]:
        values = {chip: (wrong.get(chip, 0), 0) for chip in range(4)}
        seen = Observation("links", "all-reduce, round 1", 0, REDUCED, values)
        return [finding.device for finding in findings([seen])]

    assert reduced({}) == []
    assert reduced({2: 5}) == [2]
    assert reduced({1: 5, 2: 5}) == [None]


def test_observations_travel_between_hosts() -> None:
    first = same({0: (1, 2)}, seconds={0: 0.5}, truth=(1, 2))
    second = same({4: (1, 2)}, seconds={4: 0.6}, truth=(1, 2))
    assert from_json(first.as_json()) == first
    (whole,) = joined([first, second])
    assert whole.values == {0: (1, 2), 4: (1, 2)}
    assert whole.seconds == {0: 0.5, 4: 0.6}


@pytest.mark.parametrize(
    ("platform", "factor", "slow"),
    [("tpu", 1.04, False), ("tpu", 1.07, True), ("gpu", 1.07, False), ("gpu", 1.2, True)],
)
def test_a_chip_is_slow_beside_its_peers(platform: str, factor: float, slow: bool) -> None:
    runs = [{0: 1.0, 1: 1.0, 2: factor, 3: 1.001}] * 3
    assert (list(slow_chips(runs, platform)) == [2]) == slow


def test_an_emulated_chip_is_slow_only_if_it_always_is() -> None:
    slow = {0: 1.0, 1: 1.0, 2: 2 * CPU_SLOWER}
    assert slow_chips([slow] * 6, "cpu")
    assert not slow_chips([*[slow] * 5, {0: 1.0, 1: 1.0, 2: 1.0}], "cpu")
    assert not slow_chips([slow] * 2, "cpu")


def tpu(number: int, place: tuple[int, ...], host: int = 0) -> Device:
    return Device(number, host, "TPU v4", "tpu", place)


def test_devices_that_are_missing_or_in_one_place() -> None:
    square = [tpu(2 * x + y, (x, y, 0, 0)) for x in (0, 1) for y in (0, 1)]
    assert check_devices(square, [[0, 1, 2, 3]], 4)[0].verdict == PASS
    assert check_devices(square[:3], [[0, 1, 2]], 4)[0].said == "3 of 4 devices: chip 3 is missing"
    assert (
        "is where another is" in check_devices([*square[:3], tpu(3, (0, 0, 0, 0))], [[]], 4)[0].said
    )
    holed = [*square[:3], tpu(3, (2, 1, 0, 0))]
    assert "do not fill their box" in check_devices(holed, [[]], 4)[0].said


def test_a_host_with_fewer_devices_than_the_others_is_named() -> None:
    chips = [Device(number, number // 4, "cpu", "cpu", None) for number in range(7)]
    found = check_devices(chips, [[0, 1, 2, 3], [0, 1, 3]], None)
    assert [found[host].verdict for host in (0, 1)] == [PASS, FAIL]
    assert found[1].said == "3 of 4 devices: chip 2 is missing"


def test_rates_stand_beside_the_catalogue() -> None:
    chips = [Device(0, 0, "TPU v5 lite", "tpu", (0, 0, 0, 0))]
    times = {
        "matmul_bf16": RunTimes([{0: 1.0}], flops=100e12),
        "memory": RunTimes([{0: 1.0}], bytes=8e11),
    }
    tests = summarise(chips, [{}], [], times, 1.0).devices[0].tests
    assert tests["matmul_bf16"].verdict == WARN
    assert tests["matmul_bf16"].said == "matmul bf16: 100 of 197 TFLOP/s, under 70%"
    assert tests["memory"].verdict == PASS
    assert tests["memory"].share == pytest.approx(800 / 820)
    assert tests["links"].said == "skipped: there is one device"
