"""Slices with a bad host: refused, given back or parked, and what that costs the job."""

from dataclasses import replace

import pytest

from drumline.jobs.core.memory import Proof
from drumline.jobs.core.state import Allowance, EffectKind, Outcome, Status, Wish
from drumline.observed.hosts import HostPhase
from tests.jobs.story import PATIENCE, Story

LIES = "drumline: chip 5 of host 1 computes wrong: its product differs from 7 others"


def burnt(story: Story) -> Story:
    """Every host ends with the verdict of the burn-in, which names host 1."""
    return fails(story, exit_code=86, error=LIES)


def fails(story: Story, **how: object) -> Story:
    """Every host ends like this, and the cloud still calls the slice ready."""
    story.all_hosts(HostPhase.EXITED, error_at=1.0, **how)
    return story.passes(PATIENCE.settle + 1).look("ACTIVE", "READY")


def test_the_host_that_a_burn_in_names_is_blamed_whoever_reports_it() -> None:
    story = burnt(Story().runs())
    assert story.outcomes == [Outcome.BAD_HOST]
    assert story.job.cause is not None
    assert (story.job.cause.host, story.job.cause.proof) == (1, Proof.BURN_IN)
    assert "chip 5 of host 1 computes wrong" in story.told[-2]


def test_a_training_that_names_a_chip_is_a_replay() -> None:
    story = Story().runs()
    error = f"train.py:9  drumline.health.HardwareFault: {LIES}"
    fails(story, exit_code=1, error=error)
    assert story.outcomes == [Outcome.BAD_HOST]
    assert story.job.cause is not None
    assert (story.job.cause.host, story.job.cause.proof) == (1, Proof.REPLAY)


def test_where_no_host_could_be_told_nobody_is_remembered() -> None:
    story = Story().runs()
    error = "drumline: a chip of this slice computes wrong: two runs differ"
    fails(story, exit_code=1, error=error)
    assert story.outcomes == [Outcome.BAD_HOST]
    assert story.job.cause is not None
    assert story.job.cause.proof == ""


def test_a_measured_fault_uses_up_no_allowance() -> None:
    story = Story()
    story.job = replace(story.job, allowance=Allowance(failures=0, bad_hosts=0))
    burnt(story.runs())
    assert story.status() is Status.RECOVERING
    assert (story.job.bad_hosts, story.job.bad_in_a_row, story.job.failures) == (1, 0, 0)


def test_failed_starts_in_a_row_use_it_up_but_not_once_a_step_was_made() -> None:
    story = Story()
    story.job = replace(story.job, allowance=Allowance(bad_hosts=1))
    vfio = {"exit_code": 1, "error": "open(/dev/vfio/0): Device or resource busy"}
    fails(story.runs(), **vfio)
    assert story.job.bad_in_a_row == 1
    story.runs().tells(1)
    assert story.job.bad_in_a_row == 0
    fails(story, **vfio)
    assert story.status() is Status.RECOVERING
    fails(story.runs(), **vfio)
    assert story.status() is Status.FAILED


def test_a_refused_slice_is_given_back_and_the_attempt_goes_on() -> None:
    story = (
        Story()
        .slice_is_there()
        .host(1, HostPhase.PREPARING, refused="m-1 is excluded: it lies")
        .settle()
    )
    assert story.outcomes == []
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]
    assert "refused" in story.events
    assert (story.job.attempts, story.job.bad_hosts, story.job.failures) == (1, 0, 0)
    story.passes(60)
    assert story.job.placement is not None
    assert story.job.placement.name == "dl-me-000001-2"
    assert story.job.attempts == 1


def test_a_parked_slice_stays_until_the_program_runs_elsewhere() -> None:
    story = Story()
    story.job = replace(story.job, parking=1)
    burnt(story.runs())
    assert story.did(EffectKind.RELEASE) == []
    assert [each.name for each in story.job.parked] == ["dl-me-000001-1"]
    burnt(story.slice_is_there().all_hosts(HostPhase.RUNNING, examined="running"))
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-2"], "there is room for one"
    story.slice_is_there().all_hosts(HostPhase.RUNNING, examined="running")
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-2"], "this one may be bad as well"
    story.all_hosts(HostPhase.RUNNING, examined="pass")
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-2", "dl-me-000001-1"]
    assert story.job.parked == ()


def test_a_slice_on_which_the_program_may_still_run_is_never_parked() -> None:
    story = Story()
    story.job = replace(story.job, parking=1)
    story.runs().host(0, HostPhase.RUNNING, heard=story.now)
    story.passes(PATIENCE.bad_silence + 1).look("ACTIVE", "READY")
    assert story.outcomes == [Outcome.BAD_HOST]
    assert story.job.parked == ()
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]


@pytest.mark.parametrize("wish", [Wish.CANCEL, Wish.DELETE])
def test_nothing_stays_parked_when_the_job_is_over(wish: Wish) -> None:
    story = Story()
    story.job = replace(story.job, parking=2, keep=0.0)
    burnt(story.runs())
    story.job = replace(story.job, wish=wish)
    story.settle()
    assert story.status() is Status.CANCELLED
    assert story.did(EffectKind.RELEASE).count("dl-me-000001-1") == 1
    assert story.job.parked == ()


def test_a_burn_in_that_passes_is_told_once_and_proves_the_slice() -> None:
    story = Story().slice_is_there().all_hosts(HostPhase.RUNNING, examined="running")
    assert (story.status(), story.job.reason) == (Status.STARTING, "burn-in of its chips")
    story.all_hosts(HostPhase.RUNNING, examined="pass", examined_seconds=31.2)
    assert story.status() is Status.RUNNING
    assert story.job.placement is not None
    assert story.job.placement.proved
    assert story.events[-2:] == ["burnin", "run"]
    assert story.told[-2] == "passed in 31 s"
