"""Slices with a bad host: refused, returned or held back, and the cost for the job."""

from dataclasses import replace
from itertools import pairwise

import pytest

from drumline.jobs.core.host_history import EvidenceType
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Allowance,
    DesiredState,
    EffectType,
    Status,
)
from drumline.observed import HostPhase
from tests.jobs.scenario import NO_CAPACITY, TIMEOUTS, Scenario

LIES = "drumline: chip 5 of host 1 computes wrong: its product differs from 7 others"


def burnt(scenario: Scenario) -> Scenario:
    """End every host with the verdict of the burn-in, which names host 1."""
    return fails(scenario, exit_code=86, error=LIES)


def fails(scenario: Scenario, **how: object) -> Scenario:
    """End every host like this, while the cloud still lists the slice as ready."""
    scenario.all_hosts(HostPhase.EXITED, error_at=1.0, **how)
    return scenario.passes(TIMEOUTS.settle + 1).look("ACTIVE", "READY")


def test_the_host_that_a_burn_in_names_is_the_cause() -> None:
    scenario = burnt(Scenario().runs())
    assert scenario.outcomes == [EndReason.BAD_HOST]
    assert scenario.job.cause is not None
    assert (scenario.job.cause.host, scenario.job.cause.proof) == (1, EvidenceType.BURN_IN)
    assert "chip 5 of host 1 computes wrong" in scenario.event_texts[-2]


def test_a_training_that_names_a_chip_is_a_replay() -> None:
    scenario = Scenario().runs()
    error = f"train.py:9  drumline.health.HardwareFault: {LIES}"
    fails(scenario, exit_code=1, error=error)
    assert scenario.outcomes == [EndReason.BAD_HOST]
    assert scenario.job.cause is not None
    assert (scenario.job.cause.host, scenario.job.cause.proof) == (1, EvidenceType.REPLAY)


def test_a_fault_report_without_a_host_records_no_evidence() -> None:
    scenario = Scenario().runs()
    error = "drumline: a chip of this slice computes wrong: two runs differ"
    fails(scenario, exit_code=1, error=error)
    assert scenario.outcomes == [EndReason.BAD_HOST]
    assert scenario.job.cause is not None
    assert scenario.job.cause.proof == ""


def test_a_measured_fault_uses_up_no_allowance() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, allowance=Allowance(failures=0, bad_hosts=0))
    burnt(scenario.runs())
    assert scenario.status() is Status.RECOVERING
    assert (scenario.job.bad_hosts, scenario.job.bad_in_a_row, scenario.job.failures) == (1, 0, 0)


def test_failed_starts_in_a_row_use_it_up_but_not_once_a_step_was_made() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, allowance=Allowance(bad_hosts=1))
    vfio = {"exit_code": 1, "error": "Couldn't open iommu group /dev/vfio/0"}
    fails(scenario.runs(), **vfio)
    assert scenario.job.bad_in_a_row == 1
    scenario.runs().send_heartbeat(1)
    assert scenario.job.bad_in_a_row == 0
    fails(scenario, **vfio)
    assert scenario.status() is Status.RECOVERING
    fails(scenario.runs(), **vfio)
    assert scenario.status() is Status.FAILED


def test_a_rejected_slice_is_released_and_the_attempt_continues() -> None:
    scenario = (
        Scenario()
        .slice_is_there()
        .host(1, HostPhase.PREPARING, refused="m-1 is excluded: it lies")
        .settle()
    )
    assert scenario.outcomes == []
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]
    assert "refused" in scenario.events
    assert (scenario.job.attempts, scenario.job.bad_hosts, scenario.job.failures) == (1, 0, 0)
    scenario.passes(60)
    assert scenario.placement is not None
    assert scenario.placement.name == "dl-me-000001-2"
    assert scenario.job.attempts == 1


def reject_slices(scenario: Scenario, count: int) -> None:
    for _ in range(count):
        scenario.slice_is_there()
        scenario.host(1, HostPhase.PREPARING, refused="m-1 is excluded: it lies").settle()
        scenario.passes(300)


def test_slices_are_held_back_when_the_same_host_is_granted_again_and_again() -> None:
    scenario = Scenario()
    reject_slices(scenario, 2)
    assert not scenario.job.held_back
    reject_slices(scenario, 2)
    assert [placement.name for placement in scenario.job.held_back] == ["dl-me-000001-3"]
    reject_slices(scenario, 14)
    assert len(scenario.job.held_back) == 4
    scenario.slice_is_there().all_hosts(HostPhase.RUNNING)
    assert not scenario.job.held_back


def test_no_slice_is_held_back_if_the_job_file_says_so() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, parking=0)
    reject_slices(scenario, 9)
    assert not scenario.job.held_back


def test_a_slice_is_held_back_until_the_program_runs_elsewhere() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, parking=1)
    burnt(scenario.runs())
    assert scenario.did(EffectType.RELEASE) == []
    assert [placement.name for placement in scenario.job.held_back] == ["dl-me-000001-1"]
    burnt(scenario.slice_is_there().all_hosts(HostPhase.RUNNING, burn_in="running"))
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-2"], "there is room for one"
    scenario.slice_is_there().all_hosts(HostPhase.RUNNING, burn_in="running")
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-2"], "this one may be bad as well"
    scenario.all_hosts(HostPhase.RUNNING, burn_in="pass")
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-2", "dl-me-000001-1"]
    assert scenario.job.held_back == ()


def test_a_slice_on_which_the_program_may_still_run_is_never_held_back() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, parking=1)
    scenario.runs().host(0, HostPhase.RUNNING, heard_at=scenario.now)
    scenario.passes(TIMEOUTS.bad_silence + 1).look("ACTIVE", "READY")
    assert scenario.outcomes == [EndReason.BAD_HOST]
    assert scenario.job.held_back == ()
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]


@pytest.mark.parametrize("wish", [DesiredState.CANCEL, DesiredState.DELETE])
def test_no_slice_is_held_back_after_the_end_of_the_job(wish: DesiredState) -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, parking=2, keep=0.0)
    burnt(scenario.runs())
    scenario.job = replace(scenario.job, wish=wish)
    scenario.settle()
    assert scenario.status() is Status.CANCELLED
    assert scenario.did(EffectType.RELEASE).count("dl-me-000001-1") == 1
    assert scenario.job.held_back == ()


def test_a_passed_burn_in_is_recorded_once() -> None:
    scenario = Scenario().slice_is_there().all_hosts(HostPhase.RUNNING, burn_in="running")
    assert (scenario.status(), scenario.job.reason) == (Status.STARTING, "running the burn-in")
    scenario.all_hosts(HostPhase.RUNNING, burn_in="pass", burn_in_seconds=31.2)
    assert scenario.status() is Status.RUNNING
    assert scenario.placement is not None
    assert scenario.placement.proved
    assert scenario.events[-2:] == ["burnin", "run"]
    assert scenario.event_texts[-2] == "passed in 31 s"


def parked(scenario: Scenario) -> Scenario:
    """The first slice is held back, and the job has another one."""
    scenario.job = replace(scenario.job, parking=1)
    return burnt(scenario.runs()).slice_is_there()


def test_a_host_without_a_program_prevents_neither_the_proof_nor_the_release() -> None:
    scenario = parked(Scenario())
    scenario.host(0, HostPhase.RUNNING, burn_in="running")
    scenario.host(1, HostPhase.EXITED, exit_code=0, rank=None).settle()
    assert scenario.job.held_back
    scenario.host(0, HostPhase.RUNNING, burn_in="pass").settle()
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]
    assert scenario.placement is not None
    assert scenario.placement.proved


def test_a_new_server_without_reports_releases_no_slice() -> None:
    scenario = parked(Scenario()).all_hosts(HostPhase.RUNNING, burn_in="running")
    scenario.hosts = ()
    scenario.settle()
    assert scenario.did(EffectType.RELEASE) == []
    assert scenario.job.held_back


def test_a_slice_where_the_program_may_still_run_is_released_and_not_held_back() -> None:
    scenario = Scenario().runs()
    scenario.job = replace(scenario.job, parking=1)
    scenario.passes(TIMEOUTS.bad_silence + 1).host(0, HostPhase.RUNNING)
    scenario.look("ACTIVE", "READY")
    assert scenario.outcomes == [EndReason.BAD_HOST]
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]
    assert scenario.job.held_back == ()


def test_held_back_slices_are_released_when_the_quota_is_used_up() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, parking=1)
    burnt(scenario.runs()).settle()
    scenario.cloud_refuses(
        8, "Quota limit 'TPUV4sPreemptiblePodPerProjectPerZone' has been exceeded."
    )
    assert scenario.did(EffectType.RELEASE).count("dl-me-000001-1") == 1
    assert "no other slice is available" in scenario.event_texts[-1]


def test_held_back_slices_are_released_when_no_candidate_has_capacity() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, parking=1)
    burnt(scenario.runs()).settle()
    scenario.cloud_refuses(8, NO_CAPACITY.message).settle()
    assert scenario.job.held_back, "the other zone may have one"
    scenario.cloud_refuses(8, NO_CAPACITY.message)
    assert scenario.job.held_back == ()


def test_held_back_slices_are_released_when_the_queue_does_not_move() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, parking=1, choices=scenario.job.choices[:1])
    burnt(scenario.runs()).settle().cloud_takes_the_request().look("WAITING_FOR_RESOURCES", None)
    scenario.passes(TIMEOUTS.waiting - 60)
    assert scenario.job.held_back
    scenario.passes(120)
    assert scenario.job.held_back == ()


def test_requests_back_off_when_every_machine_is_excluded() -> None:
    scenario = Scenario()
    request_times: list[float] = []
    for _ in range(8):
        while scenario.job.turned_down and scenario.placement is None:
            assert scenario.status() is Status.WAITING
            assert "m-1 is excluded: it lies" in scenario.job.reason
            scenario.old_program_may_run = scenario.now + 1 < scenario.job.not_before
            scenario.passes(1)
        request_times.append(scenario.now)
        scenario.slice_is_there()
        scenario.host(1, HostPhase.PREPARING, refused="m-1 is excluded: it lies").settle()
    pauses = [later - earlier for earlier, later in pairwise(request_times)]
    assert pauses == sorted(pauses)
    assert 120 <= pauses[-1] <= 130, pauses
    assert "(8 in a row)" in scenario.job.reason
    assert scenario.passes(120).runs().job.turned_down == 0


def test_a_slice_that_is_refused_leaves_no_trace_in_the_attempt() -> None:
    scenario = Scenario().slice_is_there()
    scenario.host(0, HostPhase.FAILED, error="setup").settle()
    assert scenario.job.attempt is not None
    assert scenario.job.attempt.failed_at is not None
    scenario.host(1, HostPhase.PREPARING, refused="m-1 is excluded: it lies").settle()
    assert scenario.job.attempt.failed_at is None
    assert scenario.job.attempt.number == 1


@pytest.mark.parametrize("host", ["7", "99999999", "9" * 5000, "-1"])
def test_a_fault_report_of_an_unknown_host_records_no_evidence(host: str) -> None:
    scenario = Scenario().runs()
    fails(scenario, exit_code=1, error=f"drumline: chip 3 of host {host} computes wrong: x")
    assert EndReason.BAD_HOST not in scenario.outcomes or scenario.job.cause is not None
    assert scenario.job.cause is None or scenario.job.cause.proof == ""


def test_the_reported_host_is_a_rank_of_the_program() -> None:
    scenario = Scenario().slice_is_there()
    scenario.host(0, HostPhase.EXITED, exit_code=0, rank=None).host(1, HostPhase.RUNNING, rank=0)
    scenario.settle()
    fault_text = "drumline: chip 3 of host 0 computes wrong: x"
    scenario.host(1, HostPhase.EXITED, rank=0, exit_code=86, error_at=1.0, error=fault_text)
    scenario.passes(TIMEOUTS.settle + 1).look("ACTIVE", "READY")
    assert scenario.job.cause is not None
    assert (scenario.job.cause.host, scenario.job.cause.proof) == (1, EvidenceType.BURN_IN)


def test_fault_reports_of_tested_chips_use_up_the_allowance() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, allowance=Allowance(bad_hosts=2))
    for _ in range(3):
        assert scenario.status() is not Status.FAILED
        scenario.slice_is_there().all_hosts(HostPhase.RUNNING, burn_in="pass")
        scenario.send_heartbeat(20, resumed=20, checkpoint=20).send_heartbeat(
            30, resumed=20, checkpoint=20
        )
        fails(scenario, exit_code=1, error=LIES)
    assert scenario.status() is Status.FAILED


def test_a_long_burn_in_is_not_a_program_that_is_stuck() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, stuck_after=60.0, has_stepped=True)
    scenario.slice_is_there().all_hosts(HostPhase.RUNNING, burn_in="running")
    scenario.hangs(1000)
    for index in range(2):
        scenario.host(index, HostPhase.RUNNING, burn_in="pass")
    scenario.settle().hangs(100)
    assert scenario.outcomes == []
    assert scenario.job.cause is None
    scenario.hangs(100)
    assert scenario.job.cause is not None
    assert scenario.job.cause.kind == "stuck"


@pytest.mark.parametrize("wish", [DesiredState.RUN, DesiredState.CANCEL])
def test_old_held_back_slices_are_released_while_the_job_waits_for_a_deletion(
    wish: DesiredState,
) -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, parking=1)
    scenario.runs().old_program_may_run = True
    burnt(scenario)
    scenario.job = replace(scenario.job, wish=wish)
    scenario.passes(TIMEOUTS.deleting / 2)
    assert len(scenario.job.held_back) == 1, "the next request must not get the same host"
    scenario.passes(TIMEOUTS.deleting)
    assert scenario.placement is None
    assert not scenario.job.held_back
    text = "1 held-back slice released: the job waits for another slice to be deleted"
    assert scenario.event_texts[-1] == text
