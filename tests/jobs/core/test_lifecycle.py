"""Observations of the cloud and the hosts, and the decisions on the job."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.cloud.google.placements import RpcError
from drumline.jobs.core import stopping
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Allowance,
    DesiredState,
    EffectType,
    Status,
    ZoneStatus,
)
from drumline.observed import Endpoint, HostPhase, ListedPlacement, ListedSlice, PlacementState
from tests.jobs.scenario import NO_CAPACITY, TIMEOUTS, A, B, Scenario


def test_an_undisturbed_job_asks_runs_and_releases() -> None:
    scenario = Scenario().runs()
    assert scenario.status() is Status.RUNNING
    scenario.all_hosts(HostPhase.EXITED, exit_code=0)
    assert scenario.status() is Status.SUCCEEDED
    assert scenario.outcomes == [EndReason.SUCCEEDED]
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]


def test_a_program_that_ends_at_once_is_recorded_like_any_other() -> None:
    long, short = Scenario().runs(), Scenario().slice_is_there()
    for scenario in (long, short):
        scenario.all_hosts(HostPhase.EXITED, exit_code=0)
        assert scenario.status() is Status.SUCCEEDED
    assert short.events == long.events
    assert "run" in short.events


def test_the_name_of_a_slice_is_written_before_it_is_asked_for() -> None:
    scenario = Scenario().settle()
    assert scenario.placement is not None
    assert scenario.placement.accepted_at is None
    assert set(scenario.did(EffectType.REQUEST)) == {scenario.placement.name}


def test_one_host_that_is_done_early_does_not_end_the_job() -> None:
    scenario = Scenario().runs()
    scenario.host(0, HostPhase.EXITED, exit_code=0).settle()
    assert scenario.status() is Status.RUNNING


@pytest.mark.parametrize(
    ("request_state", "node"),
    [
        ("SUSPENDED", "PREEMPTED"),
        ("SUSPENDING", "READY"),
        ("ACTIVE", "TERMINATED"),
        ("ACTIVE", "PREEMPTED"),
        (None, None),
        ("FAILED", None),
    ],
)
def test_a_taken_slice_is_released_and_the_job_asks_again(
    request_state: str | None, node: str | None
) -> None:
    scenario = Scenario().runs().look(request_state, node)
    assert scenario.outcomes == [EndReason.PREEMPTED]
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]
    assert scenario.status() is Status.RECOVERING
    assert scenario.placement is not None
    assert scenario.placement.name == "dl-me-000001-2"
    assert (scenario.job.preemptions, scenario.job.failures, scenario.job.bad_hosts) == (1, 0, 0)


def test_a_job_preempted_while_it_waits_asks_again() -> None:
    scenario = Scenario().settle().cloud_takes_the_request()
    scenario.look(
        "SUSPENDED", None, RpcError(3, "update is not supported while in state PREEMPTED")
    )
    assert scenario.job.preemptions == 1
    assert scenario.placement is None
    scenario.passes(TIMEOUTS.retry + 1)
    assert scenario.placement is not None
    assert scenario.placement.name == "dl-me-000001-2"


def test_a_job_preempted_in_set_up_is_not_the_users_failure() -> None:
    scenario = Scenario().slice_is_there()
    scenario.host(0, HostPhase.PREPARING, detail="setup", has_code=True)
    scenario.host(1, HostPhase.FAILED, error="Connection lost", exit_code=255).settle()
    assert scenario.job.failures == 0
    scenario.look("SUSPENDED", "PREEMPTED")
    assert (scenario.job.preemptions, scenario.job.failures) == (1, 0)


def test_without_a_fresh_poll_no_slice_is_lost() -> None:
    scenario = Scenario().settle().cloud_takes_the_request()
    scenario.passes(100_000)
    assert scenario.placement is not None
    assert scenario.did(EffectType.RELEASE) == []


def test_a_new_slice_waits_until_the_old_one_can_no_longer_run() -> None:
    scenario = Scenario().runs()
    scenario.old_program_may_run = True
    scenario.look("SUSPENDING", "READY")
    assert scenario.placement is None
    scenario.old_program_may_run = False
    scenario.settle()
    assert scenario.placement is not None


def test_several_slices_are_one_placement_that_is_held_and_lost_together() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, slices=2)
    scenario.settle()
    placement = scenario.placement
    assert placement is not None
    assert (placement.slices, placement.hosts, placement.chips) == (2, 4, 16)
    scenario.cloud_takes_the_request()
    ends = tuple(Endpoint(f"10.0.0.{n}", f"34.0.0.{n}") for n in range(2))
    scenario.listed = ListedPlacement(
        placement.name, placement.zone, PlacementState.BOOTING, "v4-16", {}, "CREATING",
        (ListedSlice("a", ends), ListedSlice("b")),
    )  # fmt: skip
    scenario.passes(1)
    assert scenario.status() is Status.STARTING
    slices = (ListedSlice("a", ends), ListedSlice("b", ends))
    scenario.listed = replace(
        scenario.listed, state=PlacementState.READY, cloud_state="READY", slices=slices
    )
    scenario.passes(1)
    assert set(scenario.did(EffectType.RUN)) == {placement.name}
    lost = replace(scenario.listed, state=PlacementState.LOST, lost_reason="node PREEMPTED")
    scenario.listed = lost
    scenario.passes(1)
    assert scenario.did(EffectType.RELEASE) == [placement.name]
    assert scenario.outcomes == [EndReason.PREEMPTED]


def test_no_capacity_moves_to_the_next_zone_with_a_reason() -> None:
    scenario = Scenario().settle()
    scenario.zones = {
        A: ZoneStatus(open=False, reason="no capacity in us-central2-b"),
        B: ZoneStatus(),
    }
    scenario.cloud_refuses(8, NO_CAPACITY.message)
    assert scenario.did(EffectType.NO_CAPACITY) == ["dl-me-000001-1"]
    assert "no capacity in us-central2-b" in scenario.job.reason
    scenario.settle()
    assert scenario.placement is not None
    assert scenario.placement.zone == "local-b"
    assert scenario.job.attempts == 1


def test_a_request_that_waits_too_long_moves_only_when_another_zone_is_open() -> None:
    scenario = Scenario().settle().cloud_takes_the_request()
    scenario.zones = {A: ZoneStatus(), B: ZoneStatus(open=False, reason="no capacity in local-b")}
    scenario.look("WAITING_FOR_RESOURCES", None)
    scenario.passes(700)
    assert scenario.placement is not None
    assert scenario.placement.zone == A.zone
    assert scenario.status() is Status.WAITING
    scenario.zones = {A: ZoneStatus(), B: ZoneStatus()}
    scenario.zones[A] = ZoneStatus(open=False, reason="short")
    scenario.settle()
    assert scenario.placement is not None
    assert scenario.placement.zone == B.zone


def test_a_job_makes_no_request_when_all_zones_are_out_of_capacity() -> None:
    scenario = Scenario()
    scenario.zones = {
        A: ZoneStatus(False, "no capacity in us-central2-b"),
        B: ZoneStatus(False, "quota used up"),
    }
    scenario.passes(5)
    assert scenario.effects == []
    assert scenario.job.reason == "no capacity in us-central2-b; quota used up"


@pytest.mark.parametrize("code", [None, 14, 16, 13])
def test_a_call_that_fails_changes_nothing_but_the_reason(code: int | None) -> None:
    scenario = Scenario().settle()
    names = [request.name for request in scenario.job.requests]
    scenario.cloud_refuses(code, "backend error")
    assert [request.name for request in scenario.job.requests] == names
    assert scenario.job.status is not Status.FAILED


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (13, "an internal error has occurred"),
        (14, "The service is currently unavailable."),
        (None, "no answer from tpu.googleapis.com: ConnectTimeout"),
        (10, "unable to queue the operation"),
        (7, "Permission 'tpu.nodes.create' denied on 'projects/p'"),
        (5, "Resource 'projects/p/locations/z/nodes/n' was not found"),
    ],
)
def test_three_refusals_in_a_row_lead_to_the_next_zone(code: int | None, text: str) -> None:
    scenario = Scenario().settle()
    asked: list[str] = []
    for _ in range(6):
        assert scenario.placement is not None
        asked.append(scenario.placement.zone)
        scenario.cloud_refuses(code, text).passes(200)
    assert asked == [A.zone] * 3 + [B.zone] * 3
    assert scenario.placement is not None
    assert scenario.placement.zone == A.zone
    assert scenario.job.attempts == 1
    assert scenario.outcomes == []
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1", "dl-me-000001-2"]


@pytest.mark.parametrize(
    ("code", "text"), [(16, "expired"), (8, "Maximum number of CreateNode requests per minute")]
)
def test_a_missing_login_and_the_rate_of_calls_only_wait(code: int, text: str) -> None:
    scenario = Scenario().settle()
    names = [request.name for request in scenario.job.requests]
    for _ in range(10):
        scenario.cloud_refuses(code, text).passes(200)
    assert [request.name for request in scenario.job.requests] == names
    assert scenario.did(EffectType.RELEASE) == []


def test_a_job_with_one_candidate_repeats_its_request() -> None:
    scenario = Scenario(job=replace(Scenario().job, choices=(A,))).settle()
    names = [request.name for request in scenario.job.requests]
    for _ in range(10):
        scenario.cloud_refuses(13, "an internal error has occurred").passes(200)
    assert [request.name for request in scenario.job.requests] == names


def test_a_zone_that_preempts_every_slice_before_it_is_ready_gives_way_to_the_next() -> None:
    scenario = Scenario().settle()
    asked: list[str] = []
    for _ in range(4):
        assert scenario.placement is not None
        asked.append(scenario.placement.zone)
        scenario.cloud_refuses(3, "update is not supported while in state PREEMPTED").passes(200)
    assert asked == [A.zone] * 3 + [B.zone]
    assert scenario.job.preemptions == 4


def test_the_note_and_the_events_quote_the_clouds_message() -> None:
    words = "an internal error has occurred [EID: 0x1]"
    scenario = Scenario().settle().cloud_refuses(13, words)
    assert words in scenario.job.reason
    assert scenario.job.reason != words
    assert [text for text in scenario.event_texts if words in text] == [scenario.job.reason]
    scenario.passes(200).cloud_refuses(13, words)
    assert len([text for text in scenario.event_texts if words in text]) == 1


def test_the_note_of_a_closed_zone_has_the_clouds_message() -> None:
    scenario = Scenario(job=replace(Scenario().job, choices=(A,))).settle()
    scenario.cloud_refuses(8, NO_CAPACITY.message)
    scenario.zones = {A: ZoneStatus(False, "no capacity in us-central2-b", NO_CAPACITY.message)}
    scenario.passes(5)
    assert NO_CAPACITY.message in scenario.job.reason


def test_a_policy_that_forbids_the_request_ends_the_job_with_the_clouds_message() -> None:
    words = "Constraint constraints/compute.vmExternalIpAccess violated for project 1."
    scenario = Scenario().settle().cloud_refuses(9, words)
    assert scenario.status() is Status.FAILED
    assert words in scenario.job.reason
    assert "organization policy" in scenario.job.reason


def test_an_accelerator_that_one_zone_does_not_offer_is_requested_in_the_next() -> None:
    scenario = Scenario().settle()
    scenario.zones = {A: ZoneStatus(open=False, reason="not offered"), B: ZoneStatus()}
    scenario.cloud_refuses(3, 'The requested zone "us-central2-b" is not supported.').settle()
    assert scenario.placement is not None
    assert scenario.placement.zone == B.zone


def test_a_failing_program_is_retried_as_often_as_allowed_and_then_fails() -> None:
    scenario = Scenario().runs().program_fails(host=1, error="ValueError: batch 250").verdict()
    assert scenario.job.failures == 1
    assert scenario.placement is not None
    scenario.passes(60)
    assert scenario.job.attempts == 2
    scenario.all_hosts(HostPhase.RUNNING).program_fails(
        host=1, error="ValueError: batch 250"
    ).verdict()
    assert scenario.status() is Status.FAILED
    assert scenario.outcomes == [EndReason.PROGRAM_FAILED, EndReason.PROGRAM_FAILED]
    assert scenario.job.cause is not None
    assert (scenario.job.cause.host, scenario.job.cause.error) == (1, "ValueError: batch 250")
    assert scenario.job.cause.ahead_seconds == 0.5


def test_a_failure_is_diagnosed_only_after_a_newer_poll() -> None:
    scenario = Scenario().runs().program_fails()
    scenario.passes(60)
    assert scenario.outcomes == []
    scenario.look("SUSPENDED", "PREEMPTED")
    assert scenario.outcomes == [EndReason.PREEMPTED]
    assert scenario.job.failures == 0


def test_a_program_that_was_killed_is_judged_only_if_its_host_lives_on() -> None:
    scenario = Scenario().runs().program_fails(code=137, error="killed")
    scenario.look("ACTIVE", "READY").everybody_is_heard()
    assert scenario.outcomes == [], "the host may be going down"
    scenario.passes(TIMEOUTS.shutdown + 1).look("ACTIVE", "READY").everybody_is_heard()
    scenario.stopped = True
    scenario.settle()
    assert scenario.outcomes == [EndReason.PROGRAM_FAILED]


def test_hosts_that_fail_after_a_silent_host_are_not_the_cause() -> None:
    scenario = Scenario().runs()
    scenario.now += 11
    scenario.host(
        0, HostPhase.EXITED, exit_code=134, error="heartbeat timeout", error_at=scenario.now
    )
    scenario.look("ACTIVE", "READY")
    scenario.passes(30).look("ACTIVE", "READY")
    assert scenario.outcomes == []
    scenario.passes(400).look("ACTIVE", "READY")
    assert scenario.outcomes == [EndReason.BAD_HOST]
    assert (scenario.job.bad_hosts, scenario.job.failures) == (1, 0)


def test_silence_counts_only_while_we_listen() -> None:
    """A server that was down for an hour has no reports; the hosts are not silent."""
    scenario = Scenario().runs()
    scenario.now += 3600
    scenario.listening_since = scenario.now
    scenario.hosts = tuple(replace(report, heard_at=None) for report in scenario.hosts)
    scenario.settle().look("ACTIVE", "READY").passes(TIMEOUTS.first_contact - 10)
    assert scenario.outcomes == []
    scenario.passes(30).look("ACTIVE", "READY")
    assert scenario.outcomes == [EndReason.BAD_HOST]


def test_a_silent_host_of_a_slice_that_is_no_longer_ready_is_a_preemption() -> None:
    scenario = Scenario().runs()
    scenario.passes(100).look("ACTIVE", "REPAIRING")
    assert scenario.outcomes == [EndReason.PREEMPTED]


def test_a_rebooted_host_outranks_the_siblings_that_crashed_first() -> None:
    scenario = Scenario().runs()
    scenario.host(0, HostPhase.EXITED, exit_code=1, error="Connection reset", error_at=scenario.now)
    scenario.host(1, HostPhase.MISSING).settle()
    scenario.look("ACTIVE", "READY").everybody_is_heard()
    assert scenario.outcomes == [EndReason.BAD_HOST]
    assert scenario.job.failures == 0


def test_a_chip_that_cannot_be_opened_is_a_bad_host_not_a_failure() -> None:
    scenario = Scenario().runs()
    scenario.program_fails(host=1, error="Failed to initialize TPU system: open(/dev/vfio/0): busy")
    scenario.look("ACTIVE", "READY").everybody_is_heard()
    assert scenario.outcomes == [EndReason.BAD_HOST]
    assert (scenario.job.bad_hosts, scenario.job.failures) == (1, 0)


def test_a_program_that_saved_and_exited_restarts_without_a_failure_count() -> None:
    scenario = Scenario().runs().leaves()
    assert scenario.outcomes == [EndReason.RESTART_REQUESTED]
    assert (scenario.job.failures, scenario.job.bad_hosts, scenario.job.preemptions) == (0, 0, 0)
    scenario.passes(TIMEOUTS.rest + 1)
    assert scenario.job.attempts == 2
    assert scenario.job.asks == 1


def test_cancel_keeps_the_slice_and_resume_uses_it() -> None:
    scenario = Scenario().runs()
    scenario.job = replace(scenario.job, wish=DesiredState.CANCEL)
    scenario.settle()
    assert scenario.did(EffectType.STOP)
    assert scenario.status() is Status.RUNNING
    scenario.stopped = True
    scenario.settle()
    assert scenario.status() is Status.CANCELLED
    assert scenario.did(EffectType.RELEASE) == []
    scenario.job = stopping.reset_for_resume(scenario.job)
    scenario.settle()
    assert scenario.job.attempts == 2
    assert scenario.job.asks == 1


def failed_job() -> Scenario:
    """A job without retries whose program has failed, before the decision on it."""
    scenario = Scenario()
    scenario.job = replace(scenario.job, allowance=Allowance(failures=0))
    return scenario.runs().program_fails()


def test_a_failed_job_keeps_its_slice_for_a_resume() -> None:
    scenario = failed_job().verdict()
    assert scenario.status() is Status.FAILED
    assert scenario.did(EffectType.RELEASE) == []
    reason = scenario.job.reason
    scenario.job = stopping.reset_for_resume(scenario.job)
    scenario.settle()
    assert (scenario.job.attempts, scenario.job.asks) == (2, 1)
    again = failed_job().verdict().passes(299)
    assert again.did(EffectType.RELEASE) == []
    again.passes(2)
    assert again.did(EffectType.RELEASE) == ["dl-me-000001-1"]
    assert (again.status(), again.job.reason) == (Status.FAILED, reason)
    assert "not resumed within 5 min" in again.event_texts[-1]


def test_a_delete_releases_the_slice_of_a_failed_job() -> None:
    scenario = failed_job().verdict()
    scenario.job = replace(scenario.job, wish=DesiredState.DELETE)
    scenario.settle()
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]
    assert scenario.status() is Status.FAILED


def test_a_failed_job_that_keeps_no_slice_releases_it_at_once() -> None:
    scenario = failed_job()
    scenario.job = replace(scenario.job, keep_failed=0.0)
    assert scenario.verdict().did(EffectType.RELEASE) == ["dl-me-000001-1"]


def test_a_slice_whose_program_is_not_known_to_be_dead_is_not_kept() -> None:
    scenario = failed_job()
    scenario.host(1, HostPhase.RUNNING).passes(TIMEOUTS.settle + 1).verdict()
    assert scenario.status() is Status.FAILED
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]


def test_a_slice_with_a_bad_host_is_not_kept() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, allowance=Allowance(bad_hosts=0))
    scenario.runs().program_fails(error="Failed to initialize TPU system: open(/dev/vfio/0): busy")
    scenario.look("ACTIVE", "READY").everybody_is_heard()
    assert scenario.status() is Status.FAILED
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]


def test_a_kept_slice_that_is_taken_is_released() -> None:
    scenario = Scenario().runs()
    scenario.job = replace(scenario.job, wish=DesiredState.CANCEL)
    scenario.stopped = True
    scenario.settle().look("SUSPENDED", "PREEMPTED")
    assert scenario.status() is Status.CANCELLED
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]


@pytest.mark.parametrize("wish", [DesiredState.CANCEL, DesiredState.DELETE])
def test_a_job_ended_while_it_waits_leaves_no_request(wish: DesiredState) -> None:
    scenario = Scenario().settle().cloud_takes_the_request()
    scenario.job = replace(scenario.job, wish=wish)
    scenario.settle()
    assert scenario.status() is Status.CANCELLED
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]


def test_delete_stops_the_program_and_releases() -> None:
    scenario = Scenario().runs()
    scenario.job = replace(scenario.job, wish=DesiredState.DELETE)
    scenario.settle()
    scenario.stopped = True
    scenario.settle()
    assert scenario.status() is Status.CANCELLED
    assert scenario.placement is None
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]


def test_an_invalid_request_fails_the_job_with_the_clouds_message() -> None:
    scenario = Scenario().settle().cloud_refuses(3, "Invalid value for acceleratorType")
    assert scenario.status() is Status.FAILED
    assert scenario.outcomes == [EndReason.REFUSED]


_STEPS = st.sampled_from(
    ["taken", "look", "blind", "fail", "silent", "reboot", "short", "run", "time", "heard", "stop"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_STEPS, max_size=40))
def test_every_slice_except_the_current_one_is_released(steps: list[str]) -> None:
    """Check the invariants that cost money or progress when violated."""
    scenario = Scenario(job=replace(Scenario().job, allowance=Allowance(2, 2, 3)))
    for step in steps:
        scenario.settle()
        job = scenario.job
        if scenario.placement is None:
            scenario.passes(30)
            continue
        ready = job.active is not None
        match step:
            case "taken":
                scenario.cloud_takes_the_request().look("SUSPENDED", "PREEMPTED")
            case "look" if not ready:
                scenario.cloud_takes_the_request().look("ACTIVE", "READY")
            case "look":
                scenario.look("ACTIVE", "READY")
            case "blind":
                scenario.passes(1000)
            case "short":
                scenario.cloud_refuses(8, NO_CAPACITY.message)
            case "run" if ready and job.attempt:
                scenario.all_hosts(HostPhase.RUNNING)
            case "fail" if ready and job.attempt and scenario.hosts:
                scenario.program_fails()
            case "reboot" if ready and job.attempt and scenario.hosts:
                scenario.host(1, HostPhase.MISSING).settle()
            case "silent" | "time":
                scenario.passes(400)
            case "heard":
                scenario.everybody_is_heard()
            case "stop":
                scenario.stopped = True
                scenario.settle()
            case _:
                continue
    requested = set(scenario.did(EffectType.REQUEST))
    released = set(scenario.did(EffectType.RELEASE))
    held_names = {scenario.placement.name} if scenario.placement else set()
    assert requested - released == held_names
    assert held_names.isdisjoint(released)


def test_a_failing_set_up_is_a_failure_of_the_set_up_not_of_the_program() -> None:
    scenario = Scenario().slice_is_there()
    error = "setup:2  pip install nope  exit code 1: no matching distribution"
    for last in (False, True):
        scenario.all_hosts(HostPhase.FAILED, exit_code=1, error=error, detail="setup: setup")
        scenario.passes(TIMEOUTS.settle + 1).verdict()
        if not last:
            scenario.passes(60)
    assert scenario.outcomes == [EndReason.SETUP_FAILED] * 2
    assert scenario.status() is Status.FAILED
    where = f"on host 0 of 2: {error}"
    assert scenario.job.reason == f"2 failures, the last of the set-up {where}"
    assert "program" not in " ".join(scenario.event_texts)


def test_events_for_the_code_and_the_set_up_come_when_all_hosts_have_them() -> None:
    scenario = Scenario().slice_is_there()
    scenario.host(0, HostPhase.PREPARING, detail="setup: uv", has_code=True)
    scenario.host(1, HostPhase.PREPARING, detail="code").settle()
    assert "code" not in scenario.events
    scenario.all_hosts(HostPhase.PREPARING, detail="setup: uv", has_code=True)
    assert scenario.events[-1] == "code"
    scenario.passes(30).all_hosts(HostPhase.RUNNING)
    assert scenario.events[-2:] == ["code", "run"]
    scenario.passes(1)
    assert scenario.events.count("code") == 1


@pytest.mark.parametrize("server", ["the same", "a new one"])
def test_other_hosts_are_not_blamed_before_a_rebooted_host_reports(server: str) -> None:
    scenario = Scenario().runs()
    at = scenario.now
    before = (HostPhase.RUNNING, at) if server == "the same" else (HostPhase.CONNECTING, None)
    scenario.host(1, before[0], reported_at=before[1])
    scenario.host(0, HostPhase.EXITED, exit_code=1, error="Connection reset by peer", error_at=at)
    scenario.settle().passes(TIMEOUTS.settle + 1)
    # The host is connected again, but its program's state is still unknown.
    scenario.look("ACTIVE", "READY").host(1, before[0], reported_at=before[1])
    scenario.host(0, HostPhase.EXITED, exit_code=1, error="Connection reset by peer", error_at=at)
    scenario.settle()
    assert scenario.did(EffectType.STOP) == []
    scenario.host(1, HostPhase.MISSING)
    scenario.settle()
    assert scenario.outcomes == [EndReason.BAD_HOST]
    assert scenario.job.failures == 0


def test_a_failed_program_is_diagnosed_without_further_reports_of_its_host() -> None:
    scenario = Scenario().runs()
    at = scenario.now
    for index in range(2):
        error = {"error": "ValueError", "error_at": at, "reported_at": at}
        scenario.host(index, HostPhase.EXITED, exit_code=1, **error)
    scenario.settle().passes(TIMEOUTS.settle + 1).look("ACTIVE", "READY").settle()
    assert scenario.job.attempt is not None
    assert scenario.job.attempt.stopping


def test_a_host_that_ended_its_program_and_is_silent_since_is_a_bad_one() -> None:
    """A program that ended by a signal: the host may be shutting down, so it must report again."""
    scenario = Scenario().runs()
    at = scenario.now
    for index in range(2):
        scenario.host(index, HostPhase.EXITED, exit_code=-15, error_at=at, reported_at=at)
    scenario.settle()
    hosts = tuple(replace(report, heard_at=at) for report in scenario.hosts)
    for _ in range(20):
        scenario.passes(60)
        scenario.hosts = hosts
        scenario.look("ACTIVE", "READY").settle()
        if scenario.outcomes:
            break
    assert scenario.outcomes == [EndReason.BAD_HOST]


def in_maintenance(scenario: Scenario) -> Scenario:
    scenario.look("ACTIVE", "READY")
    assert scenario.node is not None
    scenario.node = replace(scenario.node, health="UNHEALTHY_MAINTENANCE")
    return scenario


def test_a_silent_slice_in_maintenance_is_lost_without_a_bad_host() -> None:
    scenario = in_maintenance(Scenario().runs().passes(TIMEOUTS.silence + 60)).settle()
    assert scenario.outcomes == [EndReason.PREEMPTED]
    assert (scenario.job.bad_hosts, scenario.job.failures) == (0, 0)
    assert scenario.did(EffectType.RELEASE) == ["dl-me-000001-1"]


def test_a_maintenance_that_ended_before_the_newest_poll_explains_the_silence() -> None:
    scenario = Scenario().runs().passes(TIMEOUTS.silence - 30)
    scenario = in_maintenance(scenario).settle().passes(TIMEOUTS.bad_silence)
    assert scenario.outcomes == []
    scenario.look("ACTIVE", "READY")
    assert scenario.outcomes == [EndReason.PREEMPTED]
    assert scenario.job.bad_hosts == 0


def test_a_maintenance_before_the_silence_explains_nothing() -> None:
    scenario = in_maintenance(Scenario().runs()).everybody_is_heard()
    scenario.look("ACTIVE", "READY").everybody_is_heard()
    scenario.passes(TIMEOUTS.bad_silence + 60).look("ACTIVE", "READY")
    assert scenario.outcomes == [EndReason.BAD_HOST]


def test_a_slice_in_maintenance_whose_hosts_report_runs_on() -> None:
    scenario = in_maintenance(Scenario().runs()).everybody_is_heard()
    assert scenario.status() is Status.RUNNING
    assert scenario.outcomes == []
