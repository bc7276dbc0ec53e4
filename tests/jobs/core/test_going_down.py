"""Programs that end because their host is told to go: no failure of theirs."""

from dataclasses import replace
from pathlib import Path

import pytest

from drumline.jobs.core.state import Allowance, EffectKind, Outcome
from drumline.observed import HostPhase
from tests.jobs.pretend import Office, play
from tests.jobs.story import PATIENCE, Story


@pytest.mark.parametrize("code", [-15, 143])
def test_a_program_ended_by_a_sigterm_of_the_host_is_a_preemption(code: int) -> None:
    story = Story(job=replace(Story().job, allowance=Allowance(failures=0))).runs()
    story.program_fails(code=code, error="Terminated")
    story.look("SUSPENDED", "PREEMPTED")
    assert story.outcomes == [Outcome.PREEMPTED]
    assert story.job.failures == 0


@pytest.mark.parametrize("code", [-15, 143])
def test_a_sigterm_that_we_did_not_send_counts_as_no_failure_on_a_slice_that_stays(
    code: int,
) -> None:
    story = Story().runs().program_fails(code=code, error="Terminated")
    story.look("ACTIVE", "READY").everybody_is_heard()
    assert story.outcomes == [], "the host may be going down"
    story.passes(PATIENCE.shutdown + 1).verdict()
    assert story.outcomes == [Outcome.RESTARTED]
    assert (story.job.failures, story.job.preemptions) == (0, 0)
    assert "SIGTERM" in story.told[-1]


def test_a_host_that_says_it_goes_down_is_not_started_on_again() -> None:
    story = Story().runs()
    for index in (0, 1):
        story.host(index, HostPhase.EXITED, exit_code=143, error="", shutdown_reason="preempted")
    story.settle().passes(1)
    assert story.outcomes == [Outcome.PREEMPTED], "though the cloud still says READY"
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]
    assert any("host 0 is going down: preempted" in told for told in story.told)


def test_one_host_that_goes_down_takes_its_siblings_errors_with_it() -> None:
    story = Story().runs()
    story.host(0, HostPhase.EXITED, exit_code=134, error="closed by peer", error_at=story.now)
    story.host(1, HostPhase.EXITED, exit_code=-15, error="", shutdown_reason="preempted")
    story.settle().passes(1)
    assert story.outcomes == [Outcome.PREEMPTED]


def test_a_program_that_saves_its_work_on_a_host_that_goes_is_let_finish() -> None:
    story = Story().runs()
    for index in (0, 1):
        story.host(index, HostPhase.RUNNING, shutdown_reason="preempted")
    story.settle()
    assert story.outcomes == []
    assert story.job.reason == "host 0 is going down: preempted"


def test_a_job_without_allowance_survives_a_notice(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create(retry={"failures": 0})
        await office.reaches(job, "RUNNING")
        (session,) = office.starts(job)
        session.goes_down("preempted")
        session.ends(-15)
        await office.until(lambda: len(office.starts(job)) == 2, within=120)
        shown = office.show(job)
        assert (shown["failures"], shown["preemptions"]) == (0, 1)
        assert office.cloud.count("ask") == 2

    play(tmp_path, story)
