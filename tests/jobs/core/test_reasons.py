"""What follows from each reason for which an attempt ended, as the table says it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from drumline.jobs.core.reasons import END_RULES, EndReason, Next
from drumline.jobs.core.state import Allowance, DesiredState
from drumline.observed import HostPhase
from tests.jobs.scenario import TIMEOUTS, Scenario


def program_fails(scenario: Scenario) -> None:
    scenario.runs().program_fails().verdict()


def setup_fails(scenario: Scenario) -> None:
    scenario.slice_is_there().host(0, HostPhase.FAILED, error="pip failed", detail="setup")
    scenario.host(1, HostPhase.READY).settle()
    scenario.passes(TIMEOUTS.settle + 1).look("ACTIVE", "READY").everybody_is_heard()
    scenario.stopped = True
    scenario.settle()


def program_is_stuck(scenario: Scenario) -> None:
    scenario.job = replace(scenario.job, stuck_after=60.0)
    scenario.runs().send_heartbeat(1).passes(1).send_heartbeat(2)
    scenario.hangs(200)
    scenario.stopped = True
    scenario.settle()


def slice_is_preempted(scenario: Scenario) -> None:
    scenario.runs().look("SUSPENDED", "PREEMPTED")


def host_reboots(scenario: Scenario) -> None:
    scenario.runs().host(1, HostPhase.MISSING).settle()
    scenario.passes(TIMEOUTS.settle + 1).look("ACTIVE", "READY").everybody_is_heard()


def program_succeeds(scenario: Scenario) -> None:
    scenario.runs().all_hosts(HostPhase.EXITED, exit_code=0)


def user_cancels(scenario: Scenario) -> None:
    scenario.runs()
    scenario.job = replace(scenario.job, wish=DesiredState.CANCEL)
    scenario.stopped = True
    scenario.settle()


@pytest.mark.parametrize(
    ("reason", "happens"),
    [
        (EndReason.PROGRAM_FAILED, program_fails),
        (EndReason.SETUP_FAILED, setup_fails),
        (EndReason.STUCK, program_is_stuck),
        (EndReason.RESTART_REQUESTED, lambda scenario: scenario.runs().leaves()),
        (EndReason.PREEMPTED, slice_is_preempted),
        (EndReason.BAD_HOST, host_reboots),
        (EndReason.SUCCEEDED, program_succeeds),
        (EndReason.CANCELLED, user_cancels),
    ],
)
def test_the_job_does_what_the_table_says(
    reason: EndReason, happens: Callable[[Scenario], object]
) -> None:
    scenario = Scenario()
    scenario.job = replace(scenario.job, allowance=Allowance(3, 3, 3))
    happens(scenario)
    rule = END_RULES[reason]
    assert scenario.outcomes == [reason]
    counts = {
        name: getattr(scenario.job, name) for name in ("failures", "bad_hosts", "preemptions")
    }
    assert counts == {name: int(name == rule.counts) for name in counts}
    assert scenario.job.status.ended == (rule.next is Next.END)
    held = [p.name for p in (scenario.job.active,) if p]
    if rule.next is Next.SAME_SLICE:
        assert held == ["dl-me-000001-1"]
    elif rule.next is Next.OTHER_SLICE:
        assert held == []


def test_every_count_of_the_table_can_be_limited_in_the_job_file() -> None:
    counts = {rule.counts for rule in END_RULES.values()} - {None}
    assert counts == set(vars(Allowance()))
