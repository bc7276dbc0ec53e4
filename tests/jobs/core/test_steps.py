"""Values derived from heartbeats: repeated steps, and the cost of lost steps."""

from dataclasses import replace
from typing import Any

import pytest

from drumline.jobs.billing import (
    Prices,
    cheapest_zone,
    cost_of_lost_steps,
    cost_of_slices,
    price_per_hour,
)
from drumline.jobs.core.steps import Steps, count_repeated_steps, update_steps
from drumline.jobs.store.records import SliceRow
from drumline.jobs.store.specs import StoredSpec

ZONE = "us-central2-b"
HOUR = 3600.0


def course(*beats: tuple[float, dict[str, object]]) -> Steps:
    steps: Steps | None = None
    for at, heartbeat in beats:
        steps = update_steps(steps, heartbeat, at)
    assert steps is not None
    return steps


def beat(step: object, **more: object) -> dict[str, object]:
    return {"step": step, **more}


def test_a_course_knows_its_last_step_and_when_it_was_saved() -> None:
    fields = {"resumed": 100, "total": 300}
    steps = course(
        (10.0, beat(101, checkpoint=100, **fields)),
        (20.0, beat(150, checkpoint=150, **fields)),
        (21.0, beat(151, checkpoint=150, **fields)),
        (90.0, beat(151, checkpoint=150, **fields)),
    )
    assert (steps.step, steps.stepped_at, steps.moving) == (151, 21.0, True)
    assert (steps.resumed, steps.checkpoint, steps.saved_at) == (100, 150, 20.0)


def test_the_checkpoint_it_began_with_is_none_of_its_own() -> None:
    steps = course((10.0, beat(101, checkpoint=100, resumed=100)))
    assert (steps.checkpoint, steps.saved_at) == (100, None)


@pytest.mark.parametrize("step", [None, "five", float("nan"), True, [1], "12"])
def test_an_invalid_step_is_ignored(step: object) -> None:
    assert update_steps(None, {"step": step}, 1.0) is None
    known = Steps(7, 1.0)
    assert update_steps(known, {"step": step, "loss": 3}, 2.0) == known


def test_steps_run_again_are_those_between_a_checkpoint_and_the_step_that_was_reached() -> None:
    courses = [
        Steps(151, 1.0, resumed=0),
        None,  # it never reached a step
        Steps(233, 2.0, resumed=150),
        Steps(300, 3.0, resumed=230),
    ]
    assert count_repeated_steps(courses) == 1 + 3
    assert count_repeated_steps(courses[:1]) == 0
    assert count_repeated_steps([]) == 0


def test_saved_on_notice_means_no_step_again() -> None:
    assert count_repeated_steps([Steps(151, 1.0, resumed=0), Steps(300, 2.0, resumed=152)]) == 0


def test_the_first_step_is_unknown_if_the_program_does_not_report_it() -> None:
    assert count_repeated_steps([Steps(151, 1.0), Steps(300, 2.0)]) is None


# Cost


def attempt(number: int, begin: float, end: float | None, outcome: str | None) -> dict[str, Any]:
    return {
        "number": number, "zone": ZONE, "accelerator": "v4-128", "started": begin * HOUR,
        "running": begin * HOUR, "ended": None if end is None else end * HOUR, "outcome": outcome,
    }  # fmt: skip


def held(begin: float, end: float | None = None) -> SliceRow:
    gone = None if end is None else end * HOUR
    return SliceRow("s", "000001", ZONE, "v4-128", begin * HOUR, begin * HOUR, gone, gone)


SPEC = {"capacity": "spot", "checkpoint": "gs://lab/run"}
RATE = price_per_hour("v4-128", ZONE, "spot") or 0.0
TELLS = {"tells_checkpoints": True}


def lost_hours(
    attempts: list[dict[str, Any]], courses: dict[int, Steps], *slices: SliceRow, **spec: object
) -> float | None:
    stored = StoredSpec.from_json(SPEC | spec)
    cost = cost_of_lost_steps(attempts, courses, slices, stored, price_per_hour)
    return None if cost is None else round(cost / RATE, 3)


def test_emulated_slices_have_the_price_of_the_cheapest_public_zone_apart_from_real_costs() -> None:
    rows = [held(0, 2), replace(held(2, 5), zone="local-a")]
    spec = StoredSpec.from_json(SPEC)
    prices = Prices(emulated=False)
    assert cheapest_zone("v4-128", "spot") == ZONE
    cost = cost_of_slices(rows, spec, 9 * HOUR, prices.per_hour)
    assert cost == pytest.approx(2 * RATE, abs=1e-3)
    would_cost = cost_of_slices(rows, spec, 9 * HOUR, prices.would_per_hour)
    assert would_cost == pytest.approx(3 * RATE, abs=1e-3)
    assert prices.would_per_hour("v4-128", ZONE, "spot") is None
    assert cheapest_zone("v6e-8", "spot") == "us-central1-b"  # others cost less and need a grant
    assert cheapest_zone("7x-8", "spot") is None
    attempts = [attempt(1, 2, 4, "preempted") | {"zone": "local-a"}]
    lost = cost_of_lost_steps(attempts, {}, rows, StoredSpec(), prices.would_per_hour)
    assert lost == pytest.approx(2 * RATE, abs=1e-3)


def test_a_zone_of_google_on_the_emulator_costs_nothing_and_would_cost_its_own_price() -> None:
    prices, other = Prices(emulated=True), "europe-west4-b"
    assert prices.per_hour("v5litepod-4", other, "spot") is None
    real = price_per_hour("v5litepod-4", other, "spot")
    assert real is not None
    assert prices.would_per_hour("v5litepod-4", other, "spot") == real
    assert prices.reference_zone("v5litepod-4", other, "spot") == other
    assert prices.text("v5litepod-4", other, "spot").startswith("would be about $")


def test_lost_is_the_time_from_the_last_checkpoint_to_the_preemption() -> None:
    attempts = [attempt(1, 0, 5, "preempted"), attempt(2, 6, 8, "succeeded")]
    courses = {1: Steps(151, 5 * HOUR, checkpoint=150, saved_at=4.5 * HOUR, **TELLS)}
    assert lost_hours(attempts, courses, held(0, 5), held(6, 8)) == 0.5


def test_an_attempt_without_a_checkpoint_is_lost_completely() -> None:
    attempts = [attempt(1, 0, 5, "program failed"), attempt(2, 5, 7, "stuck")]
    courses = {1: Steps(151, 5 * HOUR, **TELLS), 2: Steps(9, 6 * HOUR, **TELLS)}
    assert lost_hours(attempts, courses, held(0)) == 7


def test_waiting_for_a_slice_is_neither_cost_nor_loss() -> None:
    attempts = [attempt(1, 0, 5, "preempted")]
    courses = {1: Steps(1, 5 * HOUR, **TELLS)}
    assert lost_hours(attempts, courses, held(4, 5)) == 1
    assert lost_hours(attempts, courses) == 0


def test_neither_a_running_attempt_nor_one_that_saved_and_exited_has_losses() -> None:
    attempts = [attempt(1, 0, 5, "left"), attempt(2, 5, None, None)]
    assert lost_hours(attempts, {1: Steps(9, HOUR, **TELLS)}, held(0)) == 0


def test_the_loss_is_unknown_for_a_program_that_reports_no_saves() -> None:
    attempts = [attempt(1, 0, 5, "preempted")]
    assert lost_hours(attempts, {1: Steps(151, HOUR)}, held(0, 5)) is None
    assert lost_hours(attempts, {}, held(0, 5)) is None


def test_a_job_without_checkpoints_loses_all_of_it() -> None:
    attempts = [attempt(1, 0, 5, "preempted")]
    assert lost_hours(attempts, {}, held(0, 5), checkpoint=None) == 5


def test_an_attempt_without_steps_is_lost_in_a_job_that_reports_steps() -> None:
    attempts = [attempt(1, 0, 2, "program failed"), attempt(2, 2, 3, "preempted")]
    courses = {2: Steps(151, 3 * HOUR, checkpoint=151, saved_at=3 * HOUR, **TELLS)}
    assert lost_hours(attempts, courses, held(0)) == 2
