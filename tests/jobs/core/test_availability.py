import pytest

from drumline.jobs.core.availability import (
    CROWDED,
    FIRST_BACKOFF,
    LONGEST_BACKOFF,
    PENDING_LIMIT,
    Availability,
    ZoneBackoff,
)
from drumline.jobs.core.state import Candidate
from drumline.jobs.core.zone_history import (
    EARLY_LOSS,
    RECOVERY_SECONDS,
    USUAL_LIFETIME,
    ZoneEvent,
)
from drumline.observed import FaultType

HERE = Candidate("v4-8", "us-central2-b")


def test_a_short_zone_rests_longer_each_time_up_to_a_limit() -> None:
    book, now, rests = ZoneBackoff(), 0.0, []
    for _ in range(8):
        book.record_shortage(HERE, "no capacity", now)
        began = now
        while not book.status(HERE, 0, now).open:
            now += 1
        rests.append(now - began)
    assert rests[0] == FIRST_BACKOFF
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_BACKOFF


def test_many_requests_that_fail_together_count_as_one_shortage() -> None:
    book = ZoneBackoff()
    for _ in range(50):
        book.record_shortage(HERE, "no capacity", 0.0)
    assert book.status(HERE, 0, FIRST_BACKOFF + 1).open


def test_a_filled_request_opens_the_zone_and_shortens_its_rest() -> None:
    book = ZoneBackoff()
    book.record_shortage(HERE, "no capacity", 0.0)
    book.record_grant(HERE)
    assert book.status(HERE, 0, 1.0).open


def test_a_long_queue_in_one_zone_is_not_made_longer() -> None:
    book = ZoneBackoff()
    assert book.status(HERE, PENDING_LIMIT - 1, 0.0).open
    full = book.status(HERE, PENDING_LIMIT, 0.0)
    assert not full.open
    assert "behind 8 requests for v4-8 in us-central2-b" in full.reason


def test_a_larger_slice_is_not_requested_where_a_smaller_one_is_out() -> None:
    book = ZoneBackoff()
    book.record_shortage(Candidate("v4-16", HERE.zone), "no capacity", 0.0)
    larger = book.status(Candidate("v4-128", HERE.zone), 0, 1.0)
    assert (larger.open, larger.reason) == (
        False,
        "no capacity in us-central2-b, not even for v4-16",
    )
    assert book.status(Candidate("v4-8", HERE.zone), 0, 1.0).open, "a smaller one may be there"
    assert book.status(Candidate("v5litepod-64", HERE.zone), 0, 1.0).open
    assert book.status(Candidate("v4-128", "us-east1-d"), 0, 1.0).open
    assert book.status(Candidate("v4-128", HERE.zone), 0, FIRST_BACKOFF + 1).open


def test_a_missing_permission_for_a_small_slice_says_nothing_about_larger_ones() -> None:
    book = ZoneBackoff()
    book.record_shortage(HERE, "denied", 0.0, fault=FaultType.DENIED)
    assert book.status(Candidate("v4-128", HERE.zone), 0, 1.0).open


def test_a_zone_with_many_requests_is_crowded_before_it_is_closed() -> None:
    book = ZoneBackoff()
    assert not book.status(HERE, CROWDED - 1, 0.0).crowded
    assert book.status(HERE, CROWDED, 0.0).crowded


def availability(events: list[tuple[Candidate, ZoneEvent]], now: list[float]) -> Availability:
    return Availability(1.0, lambda: now[0], {}, lambda *event: events.append(event))


def test_a_zone_that_loses_slices_soon_is_unreliable_for_a_while() -> None:
    events: list[tuple[Candidate, ZoneEvent]] = []
    now = [1000.0]
    zones = availability(events, now)
    zones.record_loss(HERE, EARLY_LOSS / 2)
    assert zones.zones((HERE,))[HERE].reliable
    zones.record_loss(HERE, EARLY_LOSS / 2)
    zones.begin_round([])
    assert not zones.zones((HERE,))[HERE].reliable
    assert zones.zones((HERE,))[HERE].open, "a zone that loses slices also grants them"
    now[0] += RECOVERY_SECONDS
    zones.begin_round([])
    assert zones.zones((HERE,))[HERE].reliable
    assert [event.kind for _, event in events] == ["lost", "lost"]


def test_slices_that_live_for_hours_leave_a_zone_reliable() -> None:
    zones = availability([], [0.0])
    for _ in range(5):
        zones.record_grant(HERE, 180.0)
        zones.record_loss(HERE, 4 * 3600.0)
    summary = zones.summary(HERE)
    assert (summary.wait, summary.lifetime, summary.early_losses) == (180.0, 4 * 3600.0, 0)
    assert summary.health == 1.0


def test_requests_that_fail_together_count_once_in_the_history() -> None:
    events: list[tuple[Candidate, ZoneEvent]] = []
    zones = availability(events, [0.0])
    for _ in range(5):
        zones.record_shortage(HERE, "no capacity", waited=600.0)
    zones.record_shortage(Candidate("v4-16", "us-east1-d"), "denied", fault=FaultType.DENIED)
    assert [event.seconds for _, event in events] == [600.0]


def test_the_life_of_slices_is_unknown_until_one_is_lost() -> None:
    zones = availability([], [0.0])
    assert zones.mean_lifetime(HERE) is None
    zones.record_grant(HERE, 60.0)
    assert zones.mean_lifetime(HERE) is None
    zones.record_loss(HERE, 600.0)
    assert zones.mean_lifetime(HERE) is not None
    assert zones.mean_lifetime(Candidate("v4-16", "us-east1-d")) is None


def test_a_single_early_loss_does_not_decide_the_life_of_slices() -> None:
    zones = availability([], [0.0])
    zones.record_grant(HERE, 60.0)
    zones.record_loss(HERE, 30.0)
    assert zones.mean_lifetime(HERE) == (USUAL_LIFETIME + 30.0) / 2


def test_the_life_of_slices_approaches_the_mean_of_many_lost_ones() -> None:
    zones = availability([], [0.0])
    for _ in range(20):
        zones.record_grant(HERE, 60.0)
        zones.record_loss(HERE, 600.0)
        zones.record_grant(HERE, 60.0)
        zones.record_loss(HERE, 6 * 3600.0)
    assert zones.mean_lifetime(HERE) == pytest.approx(3.05 * 3600.0, rel=0.05)


def test_slices_that_are_not_lost_lengthen_the_life_of_slices() -> None:
    zones = availability([], [0.0])
    for number in range(40):
        zones.record_grant(HERE, 60.0)
        if number % 4 == 0:
            zones.record_loss(HERE, 1200.0)
    assert zones.mean_lifetime(HERE) == (USUAL_LIFETIME + 40 * 1200.0) / 11
