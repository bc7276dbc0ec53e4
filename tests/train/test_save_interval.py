"""The interval between checkpoints that a run chooses, and runs with such intervals."""

import json
import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drumline.errors import UserError
from drumline.jobs.core import zone_history
from drumline.train import Data, Ending, Recipe, Settings, fingerprint, fit
from drumline.train.config import parse_value
from drumline.train.recipe import SaveEvery
from drumline.train.save_interval import (
    FIRST_SAVE_SECONDS,
    LONGEST_SECONDS,
    USUAL_LIFETIME,
    VARIABLE,
    AutoSchedule,
    best_interval,
    read_slice_lifetime,
)
from tests.train.toy import Slow, toy


def test_a_small_cost_gives_the_interval_of_young() -> None:
    assert best_interval(0.0, 3600.0) == 0.0
    assert best_interval(0.01, 1e6) == pytest.approx(math.sqrt(2 * 0.01 * 1e6), rel=1e-3)


@pytest.mark.parametrize("cost", [0.1, 2.0, 60.0, 600.0, 3000.0])
def test_no_other_interval_loses_less_time(cost: float) -> None:
    lifetime = 3600.0

    def seconds_per_second_of_training(interval: float) -> float:
        """Return the expected time if the slice is lost at random, once in `lifetime` seconds."""
        return lifetime * math.expm1((interval + cost) / lifetime) / interval

    chosen = seconds_per_second_of_training(best_interval(cost, lifetime))
    best = min(seconds_per_second_of_training(1.05**n) for n in range(1, 200))
    assert chosen < 1.005 * best


def test_a_save_that_takes_longer_than_slices_live_comes_once_in_a_life() -> None:
    assert best_interval(100.0, 40.0) == 40.0


class Run:
    """A run with steps and saves of given durations, on a clock that only they advance."""

    def __init__(
        self,
        lifetime: float | None = 7200.0,
        *,
        step: float = 0.1,
        cost: float = 2.0,
        keep_every: int | None = None,
        agree: Callable[[Sequence[float]], list[float]] = list,
    ) -> None:
        self.step_seconds, self.cost = step, cost
        self.waited = self.write_seconds = 0.0
        self.log: list[str] = []
        self.saved: list[int] = []
        self.meetings: list[int] = []
        self.step, self.now = 0, 1000.0
        self.schedule = AutoSchedule(
            lifetime, keep_every, self.log.append, agree=agree, clock=lambda: self.now
        )
        self.schedule.restart(0)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            compilation = 0.0 if self.step else 300.0
            self.step += 1
            self.now += self.step_seconds + compilation
            if self.schedule.meets_after(self.step):
                self.meetings.append(self.step)
                self.schedule.meet(self.step)
            if self.schedule.saves_after(self.step):
                self.save()

    def save(self) -> None:
        self.schedule.begin_save()
        # The first save compiles.
        self.now += self.cost + self.waited + (0.0 if self.saved else 30.0)
        self.schedule.end_save(self.step, self.waited, self.write_seconds)
        self.saved.append(self.step)

    @property
    def interval_seconds(self) -> float:
        return (self.saved[-1] - self.saved[-2]) * self.step_seconds


@pytest.mark.parametrize("step", [0.01, 0.5, 7.0, 50.0, 500.0])
def test_the_first_save_comes_within_two_minutes_or_two_steps(step: float) -> None:
    run = Run(step=step)
    while not run.saved:
        run.train(1)
    assert run.step == 2 or 0.8 * FIRST_SAVE_SECONDS <= run.step * step <= FIRST_SAVE_SECONDS + step
    assert run.meetings == [2**n for n in range(len(run.meetings))]


def test_the_first_save_comes_within_two_minutes_although_steps_become_slower() -> None:
    run = Run(step=0.01)
    run.train(100)
    run.step_seconds = 0.5
    run.train(400)
    assert run.saved
    assert run.saved[0] * 0.5 < 2 * FIRST_SAVE_SECONDS


def test_where_slices_die_young_the_first_save_comes_sooner() -> None:
    run = Run(lifetime=80.0)
    run.train(105)
    assert 9 <= run.saved[0] * run.step_seconds <= 10.5


@pytest.mark.parametrize("cost", [0.01, 0.5, 2.0, 20.0])
@pytest.mark.parametrize("lifetime", [600.0, 7200.0, 40_000.0])
def test_the_interval_follows_the_cost_of_a_save_and_the_life_of_slices(
    cost: float, lifetime: float
) -> None:
    run = Run(lifetime, cost=cost)
    run.train(60_000)
    assert run.interval_seconds == pytest.approx(best_interval(cost, lifetime), rel=0.02, abs=0.11)


def test_the_interval_adapts_when_costs_and_steps_change() -> None:
    run = Run(lifetime=7200.0, step=0.1, cost=2.0)
    run.train(20_000)
    run.cost = 8.0
    run.train(30_000)
    assert run.interval_seconds == pytest.approx(best_interval(8.0, 7200.0), rel=0.01)
    before = run.saved[-1] - run.saved[-2]
    run.step_seconds = 0.2
    run.train(30_000)
    assert run.saved[-1] - run.saved[-2] == pytest.approx(before / 2, rel=0.01)


def test_the_compilation_of_the_first_save_does_not_count() -> None:
    run = Run(lifetime=7200.0, cost=2.0)
    run.train(5000)
    first, second, third = run.saved[:3]
    assert (second - first) * run.step_seconds <= FIRST_SAVE_SECONDS
    assert (third - second) * run.step_seconds == pytest.approx(
        best_interval(2.0, 7200.0), rel=0.02
    )


def test_one_slow_save_does_not_change_the_interval() -> None:
    run = Run(lifetime=7200.0, cost=2.0)
    run.train(20_000)
    before = run.schedule.interval
    assert before
    run.cost = 100.0
    saves = len(run.saved)
    while len(run.saved) == saves:
        run.train(1)
    assert run.schedule.interval == pytest.approx(before, rel=0.01)


def test_the_interval_is_at_least_a_step_and_at_most_an_hour() -> None:
    run = Run(lifetime=30.0, step=100.0, cost=1.0)
    run.train(10)
    assert run.saved[-3:] == [8, 9, 10]
    run = Run(lifetime=1e7, step=1.0, cost=20.0)
    run.train(20_000)
    assert run.interval_seconds == LONGEST_SECONDS


def test_a_save_does_not_come_before_the_previous_checkpoint_is_complete() -> None:
    run = Run(lifetime=7200.0, cost=0.1)
    run.waited, run.write_seconds = 100.0, 300.0
    run.train(20_000)
    assert run.interval_seconds == pytest.approx(300.0)
    assert run.log == ["saving every 3,000 steps (5 min): writing a checkpoint takes 5 min"]


def test_multiples_of_keep_every_are_saved_too() -> None:
    run = Run(lifetime=7200.0, keep_every=2500)
    run.train(10_000)
    assert {2500, 5000, 7500, 10_000} < {*run.saved}


def test_after_a_rollback_the_interval_starts_again() -> None:
    run = Run(lifetime=7200.0)
    run.train(20_000)
    interval = run.schedule.interval
    assert interval
    run.step = run.saved[-1]
    run.now += 60.0
    run.schedule.restart(run.step)
    run.train(interval)
    assert run.saved[-1] - run.saved[-2] == interval
    assert run.schedule.interval == pytest.approx(interval, rel=0.01)


def test_the_interval_is_reported_when_it_is_chosen_and_when_it_changes_by_a_quarter() -> None:
    run = Run(lifetime=7800.0, step=0.29, cost=2.1)
    run.train(5000)
    chosen = (
        "saving every 619 steps (3 min): a save holds up training for 2.1 s, slices live 2 h 10 min"
    )
    assert run.log == [chosen]
    run.cost = 2.5
    run.train(10_000)
    assert run.log == [chosen]
    run.cost = 8.0
    run.train(20_000)
    assert len(run.log) == 2
    assert "holds up training for 8 s" in run.log[1]


def test_an_unknown_life_is_reported_as_an_assumption() -> None:
    run = Run(lifetime=None)
    run.train(10_000)
    assert run.log[0].endswith("slices are assumed to live 2 h")


def test_hosts_with_different_measurements_save_after_the_same_steps() -> None:
    values: list[Sequence[float]] = []

    def slower_host(own: Sequence[float]) -> list[float]:
        values.append(own)
        return [*own]

    slow = Run(7200.0, step=0.11, cost=3.0, agree=slower_host)
    slow.train(10_000)
    exchanged = iter(values)

    def agree(own: Sequence[float]) -> list[float]:
        return [*map(max, own, next(exchanged))]

    fast = Run(90_000.0, step=0.1, cost=0.5, agree=agree)
    fast.train(10_000)
    assert fast.saved == slow.saved
    assert len(fast.saved) > 3
    assert fast.schedule.interval == slow.schedule.interval
    # Hosts exchange values only where all of them pause.
    assert len(values) == len(slow.meetings) - 1 + len(slow.saved)


@pytest.mark.parametrize("text", ["", "unknown", "-5", "0", "nan", "inf"])
def test_an_invalid_life_counts_as_unknown(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert read_slice_lifetime() is None


def test_the_job_manager_and_the_run_assume_the_same_life() -> None:
    assert zone_history.USUAL_LIFETIME == USUAL_LIFETIME


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("save_every", "often", "save_every: often is not a number of steps; use 1 or more, or au"),
        ("save_every", 0, "save_every: 0 is not a number of steps; use 1 or more, or auto"),
        ("check_every", "auto", "check_every: auto is not a number of steps; use 1 or more"),
    ],
)
def test_other_intervals_are_rejected_with_a_message(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Settings(**{name: value})  # type: ignore[arg-type]


def test_the_command_line_takes_a_number_or_auto() -> None:
    assert parse_value("save_every", "auto", SaveEvery) == "auto"
    assert parse_value("save_every", "1e3", SaveEvery) == 1000
    message = "^--set save_every=often: 'often' is not a whole number or auto$"
    with pytest.raises(UserError, match=message):
        parse_value("save_every", "often", SaveEvery)


class Stopping(Slow):
    """Records that stop the run by SIGTERM when a batch is read."""

    def __init__(self, reads: int) -> None:
        super().__init__(0.0)
        self.reads = reads

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        self.reads -= 1
        if self.reads == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().rows(numbers)


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_a_run_that_chooses_its_saves_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(records: Slow) -> Recipe:
        base = toy(30, save_every="auto", keep_last=100)
        return replace(base, data=Data(records, batch=16, seed=7, threads=1))

    # With this lifetime the first save comes as soon as a step has been measured.
    monkeypatch.setenv(VARIABLE, "0.001")
    stopped = fit(recipe(Stopping(18)), checkpoint=tmp_path / "run")
    assert stopped.ending is Ending.STOPPED
    before = saved_steps(tmp_path / "run")
    assert before[:2] == [2, 3]
    assert before[-1] == stopped.step < 30
    # With this lifetime there are few saves.
    monkeypatch.setenv(VARIABLE, "1e9")
    resumed = fit(recipe(Slow(0.0)), checkpoint=tmp_path / "run")
    assert resumed.ending is Ending.DONE
    assert saved_steps(tmp_path / "run") == [*before, 30]

    undisturbed = fit(toy(30), checkpoint=tmp_path / "undisturbed")
    assert fingerprint(resumed.state) == fingerprint(undisturbed.state)


def test_the_interval_is_among_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "0.001")
    result = fit(toy(6, save_every="auto"), checkpoint=tmp_path)
    assert result.metrics["save_every"] >= 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # After the second step the run saves for the first time.
    assert ["save_every" in line for line in lines] == [False, False, True, True, True, True]
    output = capsys.readouterr().out
    assert "saving every " in output
    assert "  save every" not in output


def test_without_a_folder_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(toy(4, save_every="auto"))
    assert result.ending is Ending.DONE
    assert "save_every" not in result.metrics
    assert "saving every" not in capsys.readouterr().out
