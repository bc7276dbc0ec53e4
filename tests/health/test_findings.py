"""Judging observations: the chips that are named, those that are not, and slow chips."""

from typing import Any

import pytest

from drumline.health.findings import (
    CPU_SLOWER,
    HOP,
    REDUCED,
    SAME,
    Observation,
    find_faults,
    find_slow_chips,
    merge_hosts,
)
from drumline.health.host_checks import Device, check_devices
from drumline.health.report import FAIL, PASS, WARN
from drumline.health.summary import RunTimings, build_report


def equal_values(values: dict[int, tuple[int, ...]], run: int = 0, **fields: Any) -> Observation:
    return Observation("matmul_int8", "bytes, round 1", run, SAME, values, **fields)


def test_two_chips_that_always_differ_fail_and_neither_is_named() -> None:
    findings = find_faults([equal_values({0: (1,), 1: (2,)}, run) for run in range(3)])
    assert [(finding.device, finding.suspects) for finding in findings] == [(None, (0, 1))]
    chips = [Device(index, 0, "cpu", "cpu", None) for index in (0, 1)]
    report = build_report(chips, [{}], findings, {}, 1.0)
    assert report.verdict == FAIL
    assert [chip.verdict for chip in report.devices] == [WARN, WARN]
    assert [(fault.host, fault.chip) for fault in report.faults] == [(0, None)]


def test_the_expected_value_decides_between_two_chips() -> None:
    findings = find_faults(
        [equal_values({0: (1,), 1: (2,)}, run, expected=(1,)) for run in range(2)]
    )
    assert [(finding.device, finding.verdict) for finding in findings] == [(1, FAIL)]


def test_chips_that_all_differ_from_the_expected_value_get_a_warning() -> None:
    findings = find_faults([equal_values(dict.fromkeys(range(4), (2,)), expected=(1,))])
    assert {finding.verdict for finding in findings} == {WARN}


def test_chips_of_two_kinds_are_not_compared() -> None:
    """Another kind of chip rounds differently and takes a different time."""
    kinds = {0: "old", 1: "old", 2: "old", 3: "new"}
    runs = [equal_values({0: (1,), 1: (1,), 2: (1,), 3: (2,)}, run) for run in range(2)]
    assert [finding.device for finding in find_faults(runs)] == [3]
    assert not find_faults(runs, kinds)
    wrong_run = equal_values({0: (1,), 1: (5,), 2: (1,), 3: (2,)}, 1)
    assert [finding.device for finding in find_faults([runs[0], wrong_run], kinds)] == [1]
    unstable_run = equal_values({0: (1,), 1: (1,), 2: (1,), 3: (5,)}, 1)
    assert [finding.device for finding in find_faults([runs[0], unstable_run], kinds)] == [3]
    timings = RunTimings([{0: 1.0, 1: 1.0, 2: 1.0, 3: 3.0}] * 3, flops=1.0)
    devices = [Device(index, 0, kind, "gpu", None) for index, kind in kinds.items()]
    report = build_report(devices, [{}], [], {"matmul_bf16": timings}, 1.0)
    assert report.verdict == PASS


def hop(run: int, values: dict[int, tuple[int, ...]]) -> Observation:
    senders = {1: 0, 2: 1, 0: 2} if run else {}
    return Observation("links", "all chips, round 1", run, HOP, values, senders=senders)


def test_chips_that_pass_on_a_damaged_buffer_are_not_named() -> None:
    good_buffer = (0, 7)
    findings = find_faults(
        [
            hop(0, {0: good_buffer, 1: good_buffer, 2: good_buffer}),
            hop(1, {0: good_buffer, 1: (3, 8), 2: good_buffer}),
            hop(2, {0: good_buffer, 1: good_buffer, 2: (3, 8)}),
            hop(3, {0: (4, 9), 1: good_buffer, 2: good_buffer}),
        ]
    )
    assert [finding.link for finding in findings] == [(0, 1), (2, 0)]
    assert "the link 0 → 1 delivered 3 words" in findings[0].reason


def test_a_collective_names_a_chip_only_if_it_is_the_only_wrong_one() -> None:
    def devices_named(wrong_values: dict[int, int]) -> list[int | None]:
        values = {chip: (wrong_values.get(chip, 0), 0) for chip in range(4)}
        observation = Observation("links", "all-reduce, round 1", 0, REDUCED, values)
        return [finding.device for finding in find_faults([observation])]

    assert devices_named({}) == []
    assert devices_named({2: 5}) == [2]
    assert devices_named({1: 5, 2: 5}) == [None]


def test_observations_of_two_hosts_are_merged() -> None:
    first = equal_values({0: (1, 2)}, seconds={0: 0.5}, expected=(1, 2))
    second = equal_values({4: (1, 2)}, seconds={4: 0.6}, expected=(1, 2))
    assert Observation.from_json(first.as_json()) == first
    (merged,) = merge_hosts([first, second])
    assert merged.values == {0: (1, 2), 4: (1, 2)}
    assert merged.seconds == {0: 0.5, 4: 0.6}


@pytest.mark.parametrize(
    ("platform", "factor", "slow"),
    [("tpu", 1.04, False), ("tpu", 1.07, True), ("gpu", 1.07, False), ("gpu", 1.2, True)],
)
def test_a_chip_is_compared_with_its_peers(platform: str, factor: float, slow: bool) -> None:
    runs = [{0: 1.0, 1: 1.0, 2: factor, 3: 1.001}] * 3
    assert (list(find_slow_chips(runs, platform)) == [2]) == slow


def test_an_emulated_chip_is_slow_only_if_it_always_is() -> None:
    slow = {0: 1.0, 1: 1.0, 2: 2 * CPU_SLOWER}
    assert find_slow_chips([slow] * 6, "cpu")
    assert not find_slow_chips([*[slow] * 5, {0: 1.0, 1: 1.0, 2: 1.0}], "cpu")
    assert not find_slow_chips([slow] * 2, "cpu")


def tpu(index: int, position: tuple[int, ...], host: int = 0) -> Device:
    return Device(index, host, "TPU v4", "tpu", position)


def test_missing_devices_duplicate_coordinates_and_holes_fail() -> None:
    square = [tpu(2 * x + y, (x, y, 0, 0)) for x in (0, 1) for y in (0, 1)]
    assert check_devices(square, [[0, 1, 2, 3]], 4)[0].verdict == PASS
    assert (
        check_devices(square[:3], [[0, 1, 2]], 4)[0].message == "3 of 4 devices: chip 3 is missing"
    )
    assert (
        "has the coordinates of another"
        in check_devices([*square[:3], tpu(3, (0, 0, 0, 0))], [[]], 4)[0].message
    )
    with_hole = [*square[:3], tpu(3, (2, 1, 0, 0))]
    assert "do not fill their box" in check_devices(with_hole, [[]], 4)[0].message


def test_a_host_with_fewer_devices_than_the_others_is_named() -> None:
    chips = [Device(index, index // 4, "cpu", "cpu", None) for index in range(7)]
    outcomes = check_devices(chips, [[0, 1, 2, 3], [0, 1, 3]], None)
    assert [outcomes[host].verdict for host in (0, 1)] == [PASS, FAIL]
    assert outcomes[1].message == "3 of 4 devices: chip 2 is missing"


def test_rates_are_compared_with_the_catalogue() -> None:
    chips = [Device(0, 0, "TPU v5 lite", "tpu", (0, 0, 0, 0))]
    timings = {
        "matmul_bf16": RunTimings([{0: 1.0}], flops=100e12),
        "memory": RunTimings([{0: 1.0}], bytes=8e11),
    }
    tests = build_report(chips, [{}], [], timings, 1.0).devices[0].tests
    assert tests["matmul_bf16"].verdict == WARN
    assert tests["matmul_bf16"].message == "matmul bf16: 100 of 197 TFLOP/s, under 70%"
    assert tests["memory"].verdict == PASS
    assert tests["memory"].share == pytest.approx(800 / 820)
    assert tests["links"].message == "skipped: there is one device"
