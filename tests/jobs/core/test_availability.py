from drumline.jobs.core.availability import (
    FIRST_BACKOFF,
    LONGEST_BACKOFF,
    PENDING_LIMIT,
    ZoneBackoff,
)
from drumline.jobs.core.state import Candidate

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


def test_another_size_in_the_same_zone_is_judged_by_itself() -> None:
    book = ZoneBackoff()
    book.record_shortage(HERE, "no capacity", 0.0)
    assert book.status(Candidate("v4-128", HERE.zone), 0, 1.0).open
