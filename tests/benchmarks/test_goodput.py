"""The traces of `benchmarks/goodput.py`."""

import asyncio
import statistics
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

import goodput
from drumline.cloud.model.resources import RequestState
from goodput import (
    BimodalPeriods,
    Climate,
    LognormalPeriods,
    SpotWorld,
    ZoneStatistics,
)
from tests.simulation.environment import RandomStreams, Stream

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
BIMODAL = goodput.CLIMATES[2]


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
def world_with_capacity_from(time: float, folder: Path, neglects: bool) -> Iterator[SpotWorld]:
    """Yield a world in which all zones get capacity at this time."""
    zone = CapacityFrom(time)
    climate = Climate("test", "", (zone, zone, zone), neglects_old_requests=neglects)
    world = SpotWorld(climate, 1, DAY, folder)
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
