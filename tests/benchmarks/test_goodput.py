"""The traces, the oracle and the output of `benchmarks/goodput.py`."""

import asyncio
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest

import goodput
from drumline.cloud.model.resources import RequestState
from goodput import (
    BimodalPeriods,
    Climate,
    LognormalPeriods,
    Period,
    Row,
    SpotMarket,
    ZoneStatistics,
)
from tests.simulation.environment import RandomStreams, Stream

ROOT = Path(__file__).parents[2]
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
POLICIES = ["stay and wait", "zone by zone", "first that answers", "drumline", "oracle"]
BIMODAL = goodput.CLIMATES[2]


def run_benchmark(*arguments: str) -> list[dict[str, Any]]:
    """Return the rows of the benchmark."""
    command = [sys.executable, "benchmarks/goodput.py", "--json", "--workers", "1", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


# Traces -------------------------------------------------------------------------------------------

EVERY_ZONE = pytest.mark.parametrize(
    "zone_statistics", [zone for climate in goodput.CLIMATES for zone in climate.zones], ids=str
)


def up_and_down(zone_statistics: ZoneStatistics) -> tuple[list[float], list[float]]:
    """Return the durations of many periods with capacity, and of those without."""
    periods = goodput.draw_periods("zone", zone_statistics, RandomStreams(1), 100_000 * HOUR)
    up = [period.end - period.begin for period in periods]
    down = [b.begin - a.end for a, b in pairwise(periods)]
    return up, down


@EVERY_ZONE
def test_a_zone_has_capacity_for_the_stated_fraction_of_time(
    zone_statistics: ZoneStatistics,
) -> None:
    up, down = up_and_down(zone_statistics)
    assert sum(up) / (sum(up) + sum(down)) == pytest.approx(zone_statistics.up_fraction, abs=0.02)


@pytest.mark.parametrize("hours", [0.3, 2.6])
def test_lognormal_periods_have_the_stated_median(hours: float) -> None:
    up, _ = up_and_down(LognormalPeriods(0.5, hours))
    assert statistics.median(up) / HOUR == pytest.approx(hours, rel=0.05)


def test_bimodal_periods_are_short_or_long_in_the_stated_shares() -> None:
    up, down = up_and_down(BimodalPeriods(short_lives=0.9, short_gaps=0.1))
    short_lives = [seconds for seconds in up if 10 * MINUTE <= seconds <= 25 * MINUTE]
    long_lives = [seconds for seconds in up if 4 * HOUR <= seconds <= 12 * HOUR]
    short_gaps = [seconds for seconds in down if 1 * MINUTE <= seconds <= 5 * MINUTE]
    long_gaps = [seconds for seconds in down if 1 * HOUR <= seconds <= 10 * HOUR]
    assert len(short_lives) + len(long_lives) == len(up)
    assert len(short_gaps) + len(long_gaps) == len(down)
    assert len(short_lives) / len(up) == pytest.approx(0.9, abs=0.01)
    assert len(short_gaps) / len(down) == pytest.approx(0.1, abs=0.01)


def test_bimodal_zones_have_the_documented_capacity() -> None:
    up_fractions = [zone.up_fraction for zone in BIMODAL.zones]
    assert up_fractions == pytest.approx([0.22, 0.53, 0.69], abs=0.005)


def test_the_seed_alone_decides_the_trace() -> None:
    two_days = goodput.draw_capacity(BIMODAL, 1, 2 * DAY)
    assert goodput.draw_capacity(BIMODAL, 1, 2 * DAY) == two_days
    assert goodput.draw_capacity(BIMODAL, 2, 2 * DAY) != two_days
    one_day = tuple(period for period in two_days if period.begin < DAY)
    assert goodput.draw_capacity(BIMODAL, 1, DAY) == one_day


# The world ----------------------------------------------------------------------------------------


class CapacityFrom(LognormalPeriods):
    """Capacity for hours, from a time on."""

    def __init__(self, time: float) -> None:
        super().__init__(up_fraction=0.0, hours=time / HOUR)

    def draw_seconds(self, stream: Stream, has_capacity: bool) -> float:
        del stream
        return 12 * HOUR if has_capacity else self.hours * HOUR


@contextmanager
def world_with_capacity_from(time: float, folder: Path, neglects: bool) -> Iterator[SpotMarket]:
    """Yield a world in which all zones get capacity at this time."""
    zone = CapacityFrom(time)
    climate = Climate("test", "", (zone, zone, zone), neglects_old_requests=neglects)
    world = SpotMarket(climate, 1, DAY, folder)
    with closing(world.loop):
        yield world
        tasks = world.loop.pending_tasks()
        for task in tasks:
            task.cancel()
        world.loop.run_until_complete(asyncio.wait(tasks))
        asyncio.set_event_loop(None)


@pytest.mark.parametrize(
    ("neglects", "requested", "granted"),
    [
        (True, 0.0, 75 * MINUTE),
        (True, 16 * MINUTE, 20 * MINUTE),
        (True, 21 * MINUTE, 21 * MINUTE),
        (False, 0.0, 20 * MINUTE),
    ],
)
def test_an_old_request_that_nobody_deleted_is_granted_late_only_where_the_cloud_neglects_it(
    neglects: bool, requested: float, granted: float, tmp_path: Path
) -> None:
    with world_with_capacity_from(20 * MINUTE, tmp_path, neglects) as world:

        async def grant_time() -> float:
            zone = world.zones[0]
            await world.sleep_until(requested)
            await world.request("abandoned", zone)
            (request,) = world.cloud.fleet.requests.values()
            while request.state in {RequestState.CREATING, RequestState.WAITING}:
                await asyncio.sleep(1.0)
            return world.now()

        assert world.loop.run_until_complete(grant_time()) == pytest.approx(granted, abs=60.0)


# The oracle ---------------------------------------------------------------------------------------


def period(zone: str, begin: float, end: float, notice: float = 30.0) -> Period:
    """Return a period with times in hours."""
    return Period(zone, begin * HOUR, end * HOUR, notice)


def test_the_oracle_uses_a_short_period_only_if_it_delays_no_better_one() -> None:
    long, early, overlapping = period("a", 1.0, 9.0), period("b", 0.0, 0.9), period("b", 0.0, 1.2)
    assert goodput.plan_periods([early, long], 12 * HOUR) == [early, long]
    assert goodput.plan_periods([overlapping, long], 12 * HOUR) == [overlapping, long]
    useless = period("b", 0.99, 1.01)
    assert goodput.plan_periods([useless, long], 12 * HOUR) == [long]


def test_the_oracle_prefers_one_long_period_to_two_short_ones() -> None:
    short = [period("a", 0.0, 2.0), period("c", 2.0, 4.0)]
    long = period("b", 0.0, 4.0)
    assert goodput.plan_periods([*short, long], 4 * HOUR) == [long]


@pytest.mark.parametrize("seed", range(5))
def test_no_other_sequence_of_periods_is_better_than_the_plan(seed: int) -> None:
    rng = random.Random(seed)
    periods = []
    for zone in "abcdef":
        begin = rng.uniform(0.0, 3.0)
        end = begin + rng.uniform(0.1, 2.0)
        periods.append(period(zone, begin, end, rng.choice(goodput.NOTICES)))

    def useful(sequence: tuple[Period, ...]) -> float:
        total, lost_at = 0.0, 0.0
        for choice in sequence:
            begin = max(lost_at, choice.begin)
            if choice.end <= begin:
                return 0.0
            total, lost_at = total + goodput.expected_useful_seconds(choice, begin), choice.end
        return total

    plan = tuple(goodput.plan_periods(periods, DAY))
    best = max(useful(choice) for n in range(7) for choice in permutations(periods, n))
    assert useful(plan) == pytest.approx(best)


# Activities ---------------------------------------------------------------------------------------


def test_the_first_of_several_activities_counts_and_the_rest_is_idle() -> None:
    spans = {"training": [(10.0, 20.0)], "queued": [(5.0, 12.0), (18.0, 99.0), (40.0, 30.0)]}
    seconds = goodput.divide_time(spans, until=50.0)
    assert seconds == {"training": 10.0, "queued": 35.0, "idle": 5.0}


def test_a_job_is_noticing_from_its_loss_to_its_next_call() -> None:
    job, slice_name, zone = goodput.JOBS[0], "dl-000001-1", goodput.ZONES[0]
    trace = [
        (0.0, "asked", slice_name, zone),
        (20.0, "booting", slice_name, 4),
        *((150.0, "start", job, 1, f"{slice_name}/{host}") for host in range(4)),
        (1000.0, "preempt", slice_name, 0.0),
        (1000.0, "killed", job, 1, f"{slice_name}/0"),
        (1060.0, "released", slice_name),
        (1180.0, "asked", "dl-000001-2", zone),
    ]
    record = goodput.read_trace(trace, [(slice_name, 110.0)])[job]
    capacity = [Period(zone, 0.0, 1000.0, 0.0), Period(zone, 1100.0, 2000.0, 0.0)]
    seconds = goodput.divide_time(goodput.find_spans(record, capacity, 1200.0), 1200.0)
    assert seconds == {
        "training": 830.0,
        "starting": 60.0,
        "booting": 90.0,
        "no capacity": 100.0,
        "queued": 40.0,
        "wrong zone": 0.0,
        "noticing": 0.0,
        "idle": 80.0,
    }


# The command --------------------------------------------------------------------------------------

DAYS = 0.2


@pytest.fixture(scope="module")
def sample() -> list[dict[str, Any]]:
    """The rows of two worlds, with the seeds 1 and 2."""
    return run_benchmark("--worlds", "2", "--days", str(DAYS))


def test_json_has_a_row_for_each_climate_and_policy(sample: list[dict[str, Any]]) -> None:
    names = [(row["world"], row["policy"]) for row in sample]
    assert names == [
        (climate, policy)
        for climate in ("one node", "four nodes", "bimodal")
        for policy in POLICIES
    ]
    keys = {"useful", "useful_error", "paid", "dollars_per_useful_hour", "lost_per_day"}
    for row in sample:
        assert keys <= row.keys()
        assert 0 <= row["useful"] <= row["paid"] <= 2
        assert row["useful"] == pytest.approx(statistics.mean(row["useful_by_world"]))
        assert sum(row["activities"].values()) == pytest.approx(1.0)
        assert row["activities"]["lost"] >= 0.0


def test_no_policy_has_more_useful_time_than_the_oracle(sample: list[dict[str, Any]]) -> None:
    oracle = {row["world"]: row["useful"] for row in sample if row["policy"] == "oracle"}
    # The sample ends at a random time between two checkpoints of each policy.
    tolerance = goodput.SAVE_SECONDS / (DAYS * DAY)
    for row in sample:
        assert row["useful"] <= oracle[row["world"]] + tolerance, row["policy"]
    weakest = [row for row in sample if row["policy"] == "stay and wait"]
    assert all(row["of_oracle"] < 0.95 for row in weakest)


def test_the_seed_decides_all_figures(sample: list[dict[str, Any]]) -> None:
    rows = run_benchmark("--worlds", "1", "--days", str(DAYS), "--seed", "2")
    assert [row["useful"] for row in rows] == [row["useful_by_world"][1] for row in sample]
    assert [row["useful"] for row in rows] != [row["useful_by_world"][0] for row in sample]


def test_the_table_has_the_standard_error_and_the_share_of_the_oracle() -> None:
    figures = goodput.Figures(
        useful_hours=24.0,
        paid_hours=30.0,
        dollars=240.0,
        losses=4,
        activity_hours=dict.fromkeys(goodput.ACTIVITIES, 4.0),
    )
    none = goodput.Figures(
        useful_hours=0.0,
        paid_hours=0.0,
        dollars=0.0,
        losses=0,
        activity_hours=dict.fromkeys(goodput.ACTIVITIES, 0.0),
    )
    results = {"drumline": [figures, none], "idle": [none, none], "oracle": [figures, figures]}
    rows: list[Row] = goodput.summarize(BIMODAL, results, days=1.0)
    assert goodput.format_table(rows).splitlines() == [
        "policy                  useful h/h  of oracle  paid h/h  $/useful h  lost/day",
        "drumline             0.250 ± 0.250     50.0 %     0.312       10.00       1.0",
        "idle                 0.000 ± 0.000      0.0 %     0.000           -       0.0",
        "oracle               0.500 ± 0.000    100.0 %     0.625       10.00       2.0",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worlds", "0"], "argument --worlds: '0' is not an integer of at least 1"),
        (["--worlds", "many"], "argument --worlds: 'many' is not an integer of at least 1"),
        (["--days", "-1"], "argument --days: '-1' is not a positive number"),
        (["--days", "nan"], "argument --days: 'nan' is not a positive number"),
        (["--seed", "1.5"], "argument --seed: '1.5' is not an integer of at least 0"),
        (["--workers", "0"], "argument --workers: '0' is not an integer of at least 1"),
        (["--world", "1"], "unrecognized arguments: --world 1"),
    ],
)
def test_a_bad_argument_exits_with_2_and_one_sentence(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["goodput.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        goodput.main()
    assert capsys.readouterr().err == f"benchmarks/goodput.py: {message}\n"
