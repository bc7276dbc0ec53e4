"""Metrics of programs: the newest for `list`, a bounded history for `plot`."""

import json
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from drumline.jobs.controller.heartbeats import WRITE_SECONDS, Heartbeats
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Attempt,
    Candidate,
    Decision,
    EndedAttempt,
    Job,
)
from drumline.jobs.folders import Folders
from drumline.jobs.store.records import Store
from drumline.observed import HostPhase, HostReport

HOUR = 3600.0


class Listening:
    """A job whose program reports the metrics of a test."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.now = 1_800_000_000.0
        self.store = Store(home / "jobs.db")
        self.job = self.store.add(
            "lab", "digits", {},
            lambda i: Job(
                id=i, owner="me", choices=(Candidate("v4-8", "local-a"),), created_at=1.0
            ),
        ).job  # fmt: skip
        self.pattern: str | None = None
        self.start()

    def start(self) -> None:
        """Start the next server with the data of the previous one."""
        self.heartbeats = Heartbeats(self.store, Folders(self.home), lambda: self.now)

    def begin(self, attempt: int) -> None:
        self.store.save(Decision(Job(**vars(self.job) | {"attempt": Attempt(attempt, 1.0)})), 1.0)

    def tell(self, attempt: int, *beats: dict[str, object] | None) -> None:
        """Send one heartbeat from each host."""
        reports = [
            HostReport(n, HostPhase.RUNNING, self.now, heartbeat=one) for n, one in enumerate(beats)
        ]
        self.heartbeats.update(self.job.id, attempt, reports, self.pattern)

    def end(self, attempt: int) -> None:
        ended = EndedAttempt(Attempt(attempt, 1.0), EndReason.PREEMPTED, "")
        self.store.save(Decision(self.job, ended=(ended,)), self.now)
        self.heartbeats.end(self.job.id, attempt)

    def steps(self) -> list[tuple[int, float]]:
        return [(point.attempt, point.step) for point in self.heartbeats.history(self.job.id)]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    made = Listening(tmp_path)
    made.begin(1)
    yield made
    made.store.close()


def test_metrics_that_a_later_report_leaves_out_stay(listening: Listening) -> None:
    listening.tell(1, {"step": 299, "loss": 0.1, "rate": 9800.0, "mfu": 0.4, "checkpoint": 290})
    listening.tell(1, {"step": 300, "loss": 0.09, "mfu": None, "result": "97.1 %"})
    assert listening.heartbeats.progress(listening.job.id) == {
        "step": 300, "loss": 0.09, "rate": 9800.0, "mfu": None, "checkpoint": 290,
        "result": "97.1 %",
    }  # fmt: skip


def test_the_last_report_stays_until_the_next_attempt_reports(
    listening: Listening,
) -> None:
    listening.tell(1, {"step": 151, "result": "half"})
    listening.end(1)
    listening.begin(2)
    listening.tell(2, None)
    assert listening.heartbeats.progress(listening.job.id) == {"step": 151, "result": "half"}
    listening.tell(2, {"step": 150})
    assert listening.heartbeats.progress(listening.job.id) == {"step": 150}


def test_any_reported_value_can_be_saved_and_sent(listening: Listening) -> None:
    odd = {"step": 3, "loss": math.nan, "rate": math.inf, "list": [math.nan], "long": "x" * 10**6}
    listening.tell(1, odd | {f"metric {n}": n for n in range(1000)})
    progress = listening.heartbeats.progress(listening.job.id)
    assert progress is not None
    assert (progress["loss"], progress["rate"], progress["list"]) == ("nan", "inf", "[nan]")
    assert len(json.dumps(progress, allow_nan=False)) < 10_000


def test_the_history_separates_attempts_and_omits_non_numbers(
    listening: Listening,
) -> None:
    for attempt, steps in ((1, (149, 150, 151)), (2, (151, 152))):
        listening.begin(attempt)
        for step in steps:
            listening.now += 60
            listening.tell(
                attempt, {"step": step, "loss": "nan" if step == 150 else 0.5, "item": "x"}
            )
            listening.tell(attempt, {"step": step, "loss": 7.0})
        listening.end(attempt)
    assert listening.steps() == [(1, 149), (1, 150), (1, 151), (2, 151), (2, 152)]
    losses = [point.metrics for point in listening.heartbeats.history(listening.job.id)]
    assert losses == [{"loss": 0.5}, {}, {"loss": 0.5}, {"loss": 0.5}, {"loss": 0.5}]


def test_a_month_of_heartbeats_stays_small_and_even(listening: Listening) -> None:
    chance, begin, step, attempt = random.Random(1), listening.now, 0, 1
    while listening.now - begin < 30 * 24 * HOUR:
        # Ten a second at first, then fewer and fewer, because points of a long history are far
        # apart.
        pause = max(0.1, (listening.now - begin) / 600)
        listening.now += pause * chance.uniform(0.5, 1.0)
        step += 1
        if chance.random() < 0.01:
            listening.end(attempt)
            attempt += 1
            listening.begin(attempt)
        listening.tell(attempt, {"step": step, "loss": chance.random()})
    points = listening.heartbeats.history(listening.job.id)
    assert 1000 < len(points) < 4000
    widest = max(after.time - before.time for before, after in pairwise(points))
    assert widest < 0.02 * (listening.now - begin)
    assert points[-1].step == step


def test_a_killed_server_loses_only_seconds_of_metrics(listening: Listening) -> None:
    for step in range(1, 101):
        listening.now += WRITE_SECONDS / 10
        listening.tell(1, {"step": step, "resumed": 0})
        listening.heartbeats.save()
    listening.start()
    assert listening.heartbeats.steps(listening.job.id, 1) is None, "nobody has listened yet"
    listening.tell(1, {"step": 100, "resumed": 0})
    course = listening.heartbeats.steps(listening.job.id, 1)
    assert course is not None
    assert (course.step, course.resumed) == (100, 0)
    steps = [step for _, step in listening.steps()]
    assert steps == sorted(set(steps)), "none twice"
    assert len(steps) >= 90


def test_a_step_that_did_not_move_while_the_server_was_away_is_as_old_as_it_is(
    listening: Listening,
) -> None:
    listening.tell(1, {"step": 151})
    began = listening.now
    listening.heartbeats.save(everything=True)
    listening.now += HOUR
    listening.start()
    listening.tell(1, {"step": 151})
    course = listening.heartbeats.steps(listening.job.id, 1)
    assert course is not None
    assert course.stepped_at == began


def test_heartbeats_are_buffered(listening: Listening) -> None:
    writes = 0
    put = listening.store.metrics.save

    def counted(*arguments: object) -> None:
        nonlocal writes
        writes += 1
        put(*arguments)  # type: ignore[arg-type]

    listening.store.metrics.save = counted  # type: ignore[method-assign,assignment]
    for step in range(600):
        listening.now += 0.1
        listening.tell(1, {"step": step})
        listening.heartbeats.save()
    assert writes <= 60 / WRITE_SECONDS + 1


def test_steps_reported_by_two_hosts_never_go_backwards(
    listening: Listening,
) -> None:
    listening.tell(1, None, {"step": 154})
    for step in (152, 153, 154, 155):
        listening.now += 10
        listening.tell(1, {"step": step}, {"step": step + 3})
    assert listening.steps() == [(1, 154), (1, 155)]


def test_steps_come_from_the_log_without_a_heartbeat(listening: Listening) -> None:
    listening.pattern = r"step (?P<step>\d+) loss (?P<loss>\S+)"
    log = listening.home / "logs" / listening.job.id / "1" / "host-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1 loss 2.5\nstep 2 loss 2.25\n")
    listening.tell(1, None)
    assert listening.heartbeats.progress(listening.job.id) == {"step": 2, "loss": 2.25}
    course = listening.heartbeats.steps(listening.job.id, 1)
    assert course is not None
    assert course.moving
    listening.heartbeats.save(everything=True)
    listening.now += HOUR
    listening.start()
    listening.tell(1, None)
    assert listening.heartbeats.steps(listening.job.id, 1) == course, (
        "what the next server reads is no news"
    )
    with log.open("a") as more:
        more.write("step 3 loss 2.0\nstep 4 loss 1.9\n")
    listening.now += HOUR
    listening.tell(1, None)
    assert [step for _, step in listening.steps()] == [1, 2, 3, 4]


def test_a_job_that_is_cleaned_is_forgotten(listening: Listening) -> None:
    listening.tell(1, {"step": 1})
    listening.store.remove(listening.job.id)
    listening.heartbeats.forget(listening.job.id)
    assert listening.heartbeats.progress(listening.job.id) is None


def test_the_number_of_metric_names_is_bounded_with_one_warning(
    listening: Listening,
) -> None:
    for step in range(300):
        listening.now += 1
        others = {f"metric-{step}-{n}": float(n) for n in range(60)}
        listening.tell(1, {**others, "text": "x" * 5000, "n" * 300: 1.0, "step": step, "loss": 0.5})
    progress = listening.heartbeats.progress(listening.job.id)
    assert progress is not None
    assert (progress["step"], progress["loss"]) == (299, 0.5), "the usual names are kept"
    assert len(json.dumps(progress)) < 20_000
    assert (
        len({name for p in listening.heartbeats.history(listening.job.id) for name in p.metrics})
        < 80
    )
    listening.heartbeats.end(listening.job.id, 1)
    listening.start()
    listening.begin(2)
    listening.tell(2, {f"more-{n}": 1.0 for n in range(1000)})
    texts = [event["text"] for event in listening.store.events(listening.job.id)]
    assert [text for text in texts if "metrics" in text] == [
        listening.heartbeats.warnings[listening.job.id]
    ]
    assert (listening.home / "jobs.db").stat().st_size < 2_000_000


def test_values_that_are_not_numbers_are_short_texts(listening: Listening) -> None:
    nested: object = 1
    for _ in range(800):
        nested = [nested]
    listening.tell(
        1, {"step": 1, "nested": nested, "list": list(range(10_000)), "result": "r" * 1500}
    )
    progress = listening.heartbeats.progress(listening.job.id)
    assert progress is not None
    assert len(progress["list"]) <= 200
    assert len(progress["nested"]) <= 200
    assert len(progress["result"]) == 1500
