"""Accepted requests that appear late, fail later, or never finish booting."""

from dataclasses import replace

import pytest

from drumline.jobs.core.lifecycle import adapt_times
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    EffectType,
    Status,
)
from drumline.observed import (
    Endpoint,
    Fault,
    FaultType,
    ListedPlacement,
    ListedSlice,
    PlacementState,
    Refusal,
    Scope,
)
from tests.jobs.scenario import TIMEOUTS, A, B, Scenario

STOCKOUT = Refusal(Fault(FaultType.STOCKOUT, Scope.ZONE), "no capacity in us-central2-b")
INVALID = Refusal(Fault(FaultType.INVALID, Scope.REQUEST), "the request was refused: bad version")
SLICE = "dl-me-000001-1"


def accepted() -> Scenario:
    return Scenario().settle().cloud_takes_the_request()


def test_a_request_that_does_not_appear_at_once_is_waited_for() -> None:
    scenario = accepted().hidden()
    scenario.now += TIMEOUTS.visible - 5
    scenario.hidden()
    assert scenario.did(EffectType.RELEASE) == []
    assert scenario.job.preemptions == 0
    scenario.look("ACTIVE", "READY")
    assert scenario.status() is Status.STARTING
    assert scenario.job.asks == 1


def test_a_request_that_never_appears_is_released_after_a_minute() -> None:
    scenario = accepted()
    scenario.now += TIMEOUTS.visible + 5
    scenario.hidden()
    assert scenario.did(EffectType.RELEASE) == [SLICE]
    assert not scenario.status().ended


def test_the_minute_begins_when_the_cloud_accepts_the_request() -> None:
    scenario = Scenario().settle().passes(TIMEOUTS.visible + 60).cloud_takes_the_request()
    scenario.hidden()
    assert scenario.did(EffectType.RELEASE) == []


def test_a_new_server_with_a_clock_set_forward_gives_a_request_its_minute_again() -> None:
    scenario = accepted()
    scenario.now += 3 * 3600
    scenario.job = adapt_times(scenario.job, scenario.now)
    scenario.hidden()
    assert scenario.did(EffectType.RELEASE) == []
    scenario.now += TIMEOUTS.visible + 5
    scenario.hidden()
    assert scenario.did(EffectType.RELEASE) == [SLICE]


def test_an_operation_in_progress_is_not_a_lost_request() -> None:
    scenario = accepted()
    scenario.now += TIMEOUTS.visible * 5
    scenario.hidden(creating=True)
    assert scenario.did(EffectType.RELEASE) == []
    scenario.now += TIMEOUTS.booting
    scenario.hidden(creating=True)
    assert scenario.did(EffectType.RELEASE) == [SLICE]
    assert scenario.job.preemptions == 0, "nothing was ever granted"
    assert scenario.outcomes == []
    assert f"slice in {A.zone} is still not created after 45 min" in scenario.event_texts


def test_the_error_of_the_operation_decides_as_a_refusal() -> None:
    scenario = accepted().hidden(STOCKOUT)
    assert scenario.outcomes == []
    assert scenario.job.preemptions == 0
    assert scenario.did(EffectType.NO_CAPACITY) == [SLICE]
    assert scenario.placement is not None
    assert scenario.placement.zone == B.zone, "the next candidate"
    assert "no capacity in us-central2-b" in scenario.event_texts


def test_an_operation_error_that_needs_a_new_job_file_ends_the_job_with_its_message() -> None:
    scenario = accepted().hidden(INVALID)
    assert scenario.status() is Status.FAILED
    assert scenario.outcomes == [EndReason.REFUSED]
    assert scenario.job.reason == INVALID.message


@pytest.mark.parametrize(
    ("request_state", "node", "words"),
    [
        ("PROVISIONING", None, "PROVISIONING"),
        ("PROVISIONING", "CREATING", "CREATING"),
        ("ACTIVE", "UNKNOWN", "UNKNOWN"),
        ("ACTIVE", "REPAIRING", "REPAIRING"),
    ],
)
def test_a_slice_that_boots_for_too_long_is_given_up_for_the_next_candidate(
    request_state: str, node: str | None, words: str
) -> None:
    scenario = accepted().look(request_state, node)
    assert scenario.status() is Status.STARTING
    scenario.now += TIMEOUTS.booting - 60
    scenario.look(request_state, node)
    assert scenario.did(EffectType.RELEASE) == []
    scenario.now += 120
    scenario.look(request_state, node)
    assert scenario.did(EffectType.RELEASE) == [SLICE]
    assert scenario.placement is not None
    assert scenario.placement.zone == B.zone
    assert scenario.job.preemptions == 0
    assert f"slice in {A.zone} is still {words} after 41 min" in scenario.event_texts


def test_a_ready_slice_without_all_addresses_is_given_up_too() -> None:
    scenario = accepted()
    listed = ListedPlacement(
        SLICE, A.zone, PlacementState.READY, A.accelerator, {}, "READY",
        (ListedSlice(SLICE, (Endpoint("10.0.0.1", "34.0.0.1"),)),), may_run=True,
    )  # fmt: skip
    scenario.listed = listed
    scenario.settle().passes(TIMEOUTS.booting + 1)
    assert scenario.did(EffectType.RELEASE) == [SLICE]
    assert f"slice in {A.zone} is still READY without all addresses after 40 min" in (
        scenario.event_texts
    )


def test_a_queue_that_moves_back_does_not_renew_the_deadline() -> None:
    scenario = accepted().look("PROVISIONING", None).look("WAITING_FOR_RESOURCES", None)
    scenario.now += TIMEOUTS.booting + 1
    scenario.zones = {B: replace(scenario.zones[B], open=False)} if B in scenario.zones else {}
    scenario.look("PROVISIONING", None)
    assert SLICE in scenario.did(EffectType.RELEASE)
