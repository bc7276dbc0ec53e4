"""Failed starts caused by the host or by the program, and hosts that block others."""

from dataclasses import replace

import pytest

from drumline.jobs.core.causes import find_cause
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Allowance,
    EffectType,
    Status,
)
from drumline.observed import HostPhase, HostReport
from tests.jobs.scenario import TIMEOUTS, Scenario

BACKEND = "RuntimeError: Unable to initialize backend 'tpu': "
TEXTS = [
    BACKEND + "INTERNAL: Failed to get global TPU topology.",
    BACKEND + "UNKNOWN: TPU initialization failed: No ba16c7433 device found.",
    BACKEND + "UNKNOWN: TPU initialization failed: open(/dev/vfio/0): Device or resource busy: "
    "Device or resource busy; Couldn't open iommu group /dev/vfio/0",
    BACKEND + "UNAVAILABLE: TPU backend setup/compile error (Unavailable).",
]


def start_fails(scenario: Scenario, error: str, rack: str = "") -> Scenario:
    """Let a program fail at its start on a slice, on machines of this rack."""
    if scenario.job.active is None:
        scenario.runs()
    else:
        scenario.passes(TIMEOUTS.rest * 8).all_hosts(HostPhase.RUNNING)
    for index in range(2):
        scenario.host(
            index,
            HostPhase.EXITED,
            exit_code=1,
            error=error,
            error_at=scenario.now,
            identity={"physical_host": f"{rack}-{index}"} if rack else {},
        )
    return scenario.settle().verdict()


@pytest.mark.parametrize("text", TEXTS)
def test_the_same_error_on_two_machines_is_a_failure_of_the_program(text: str) -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, allowance=Allowance(failures=0))
    start_fails(scenario, text)
    assert (scenario.outcomes, scenario.job.failures) == ([EndReason.AMBIGUOUS_START], 0)
    assert len(scenario.did(EffectType.RELEASE)) == 1
    assert not scenario.status().ended
    start_fails(scenario, text.replace("vfio/0", "vfio/3"))
    assert scenario.outcomes == [EndReason.AMBIGUOUS_START, EndReason.PROGRAM_FAILED]
    assert scenario.status() is Status.FAILED
    assert "2 machines" in scenario.job.reason
    assert scenario.job.bad_hosts == 0


def test_the_same_machine_twice_is_no_second_machine() -> None:
    scenario = Scenario()
    for rack, outcome in [
        ("a", EndReason.AMBIGUOUS_START),
        ("a", EndReason.AMBIGUOUS_START),
        ("a", EndReason.PROGRAM_FAILED),
    ]:
        start_fails(scenario, TEXTS[0], rack)
        assert scenario.outcomes[-1] is outcome, rack
    assert len(scenario.did(EffectType.RELEASE)) == 2


def test_different_errors_on_each_slice_end_after_two_other_slices() -> None:
    scenario = Scenario()
    for text in TEXTS[:3]:
        start_fails(scenario, text)
    assert scenario.outcomes == [EndReason.AMBIGUOUS_START] * 2 + [EndReason.PROGRAM_FAILED]


def test_after_the_verdict_each_further_start_on_the_slice_counts() -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, allowance=Allowance(failures=2))
    start_fails(start_fails(scenario, TEXTS[0]), TEXTS[0])
    request_number = scenario.job.asks
    start_fails(scenario, TEXTS[0])
    assert (scenario.job.failures, scenario.job.asks) == (2, request_number)
    start_fails(scenario, TEXTS[0])
    assert scenario.status() is Status.FAILED


def test_a_step_forgets_earlier_starts() -> None:
    scenario = start_fails(Scenario(), TEXTS[0]).runs()
    scenario.send_heartbeat(step=1)
    assert (scenario.job.unclear_starts, scenario.job.unclear_on) == (0, ())


def test_the_same_error_in_a_running_training_is_a_failure_of_the_program() -> None:
    scenario = Scenario().runs()
    scenario.send_heartbeat(step=5)
    start_fails(scenario, TEXTS[0])
    assert scenario.outcomes == [EndReason.PROGRAM_FAILED]


def test_a_chip_held_by_the_programs_own_process_is_its_failure() -> None:
    scenario = Scenario().runs()
    busy = "open(/dev/vfio/1): Device or resource busy"
    for index in range(2):
        scenario.host(
            index, HostPhase.EXITED, exit_code=1, error=busy, error_at=scenario.now,
            chip_holder="process 4242 (python serve.py)",
        )  # fmt: skip
    scenario.settle().verdict()
    assert scenario.outcomes == [EndReason.PROGRAM_FAILED]
    assert "4242" in scenario.event_texts[-1]


def test_a_chip_that_the_agent_cannot_open_either_is_a_bad_host() -> None:
    scenario = Scenario().runs()
    busy = "open(/dev/vfio/1): Device or resource busy"
    scenario.host(0, HostPhase.RUNNING)
    scenario.host(
        1, HostPhase.EXITED, exit_code=1, error=busy, error_at=scenario.now, chip_error=busy
    )
    scenario.settle()
    scenario.now += TIMEOUTS.settle + 1
    scenario.look("ACTIVE", "READY").everybody_is_heard()
    assert scenario.outcomes == [EndReason.BAD_HOST]
    assert scenario.job.cause is not None
    assert (scenario.job.cause.host, scenario.job.cause.claimed) == (1, False)


# --- Hosts that block others ----------------------------------------------------------------

POLL = (
    "F0929 17:42:48.594200 1044529 client.h:77] Terminating process because the JAX distributed "
    "service detected fatal errors. This most likely indicates that another task died"
)
GAVE_UP = [
    POLL,
    "UNAVAILABLE: Error received while calling /tensorflow.CoordinationService/PollForError",
    "DEADLINE_EXCEEDED: Barrier timed out. Timed out task names: /job:jax_worker/replica:0/task:2",
    "UNAVAILABLE: Task /job:jax_worker/replica:0/task:2 heartbeat timeout",
]


def slice_where_host_2_hangs(error: str, **of_host_2: object) -> list[HostReport]:
    gone = [
        HostReport(i, HostPhase.EXITED, 9.0, exit_code=-6, error=error, error_at=i + 5.0, rank=i)
        for i in (0, 1, 3)
    ]
    hanging = replace(HostReport(2, HostPhase.RUNNING, 9.0, rank=2), **of_host_2)  # type: ignore[arg-type]
    return [*gone[:2], hanging, gone[2]]


@pytest.mark.parametrize("error", GAVE_UP)
def test_the_host_that_still_hangs_is_suspect_and_not_its_siblings(error: str) -> None:
    reports = slice_where_host_2_hangs(error)
    cause = find_cause([r for r in reports if r.phase is HostPhase.EXITED], reports)
    assert (cause.kind, cause.host, cause.claimed) == ("bad host", 2, True)


def test_a_sibling_with_an_error_of_its_own_is_the_cause() -> None:
    reports = slice_where_host_2_hangs(POLL)
    reports[0] = replace(reports[0], error="train.py:3  ValueError: no", exit_code=1, error_at=1.0)
    cause = find_cause([r for r in reports if r.phase is HostPhase.EXITED], reports)
    assert (cause.kind, cause.host) == ("program failed", 0)


def test_a_host_whose_program_raised_and_waits_at_the_exit_does_not_hang() -> None:
    raised = ("Traceback (most recent call last):", "ValueError: no")
    reports = slice_where_host_2_hangs(POLL, tail=raised)
    cause = find_cause([r for r in reports if r.phase is HostPhase.EXITED], reports)
    assert cause.kind == "program failed"


def test_if_two_hosts_hang_neither_is_suspect_and_the_slice_is_replaced() -> None:
    reports = slice_where_host_2_hangs(POLL)
    reports[3] = HostReport(3, HostPhase.RUNNING, 9.0, rank=3)
    cause = find_cause(reports[:2], reports)
    assert (cause.kind, cause.proof) == ("bad host", "")
    named = slice_where_host_2_hangs(GAVE_UP[2])
    named[3] = HostReport(3, HostPhase.RUNNING, 9.0, rank=3)
    assert find_cause(named[:2], named).host == 2


def test_after_a_step_the_program_is_the_cause() -> None:
    reports = slice_where_host_2_hangs(POLL)
    failed = [r for r in reports if r.phase is HostPhase.EXITED]
    assert find_cause(failed, reports, starting=False).kind == "program failed"
