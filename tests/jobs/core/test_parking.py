"""Slices with a bad host: refused, given back or parked, and what that costs the job."""

from dataclasses import replace
from itertools import pairwise

import pytest

from drumline.jobs.core.host_history import EvidenceKind
from drumline.jobs.core.state import Allowance, DesiredState, EffectKind, Outcome, Status
from drumline.observed import HostPhase
from tests.jobs.story import NO_CAPACITY, PATIENCE, Story

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
    assert (story.job.cause.host, story.job.cause.proof) == (1, EvidenceKind.BURN_IN)
    assert "chip 5 of host 1 computes wrong" in story.told[-2]


def test_a_training_that_names_a_chip_is_a_replay() -> None:
    story = Story().runs()
    error = f"train.py:9  drumline.health.HardwareFault: {LIES}"
    fails(story, exit_code=1, error=error)
    assert story.outcomes == [Outcome.BAD_HOST]
    assert story.job.cause is not None
    assert (story.job.cause.host, story.job.cause.proof) == (1, EvidenceKind.REPLAY)


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
    burnt(story.slice_is_there().all_hosts(HostPhase.RUNNING, burn_in="running"))
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-2"], "there is room for one"
    story.slice_is_there().all_hosts(HostPhase.RUNNING, burn_in="running")
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-2"], "this one may be bad as well"
    story.all_hosts(HostPhase.RUNNING, burn_in="pass")
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-2", "dl-me-000001-1"]
    assert story.job.parked == ()


def test_a_slice_on_which_the_program_may_still_run_is_never_parked() -> None:
    story = Story()
    story.job = replace(story.job, parking=1)
    story.runs().host(0, HostPhase.RUNNING, heard_at=story.now)
    story.passes(PATIENCE.bad_silence + 1).look("ACTIVE", "READY")
    assert story.outcomes == [Outcome.BAD_HOST]
    assert story.job.parked == ()
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]


@pytest.mark.parametrize("wish", [DesiredState.CANCEL, DesiredState.DELETE])
def test_nothing_stays_parked_when_the_job_is_over(wish: DesiredState) -> None:
    story = Story()
    story.job = replace(story.job, parking=2, keep=0.0)
    burnt(story.runs())
    story.job = replace(story.job, wish=wish)
    story.settle()
    assert story.status() is Status.CANCELLED
    assert story.did(EffectKind.RELEASE).count("dl-me-000001-1") == 1
    assert story.job.parked == ()


def test_a_burn_in_that_passes_is_told_once_and_proves_the_slice() -> None:
    story = Story().slice_is_there().all_hosts(HostPhase.RUNNING, burn_in="running")
    assert (story.status(), story.job.reason) == (Status.STARTING, "burn-in of its chips")
    story.all_hosts(HostPhase.RUNNING, burn_in="pass", burn_in_seconds=31.2)
    assert story.status() is Status.RUNNING
    assert story.job.placement is not None
    assert story.job.placement.proved
    assert story.events[-2:] == ["burnin", "run"]
    assert story.told[-2] == "passed in 31 s"


def parked(story: Story) -> Story:
    """The first slice is parked, and the job has another one."""
    story.job = replace(story.job, parking=1)
    return burnt(story.runs()).slice_is_there()


def test_a_host_that_runs_nothing_hinders_neither_the_proof_nor_the_release() -> None:
    story = parked(Story())
    story.host(0, HostPhase.RUNNING, burn_in="running")
    story.host(1, HostPhase.EXITED, exit_code=0, rank=None).settle()
    assert story.job.parked
    story.host(0, HostPhase.RUNNING, burn_in="pass").settle()
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]
    assert story.job.placement is not None
    assert story.job.placement.proved


def test_a_new_server_that_has_heard_of_no_host_releases_nothing() -> None:
    story = parked(Story()).all_hosts(HostPhase.RUNNING, burn_in="running")
    story.hosts = ()
    story.settle()
    assert story.did(EffectKind.RELEASE) == []
    assert story.job.parked


def test_a_slice_where_the_program_may_still_run_is_released_and_not_parked() -> None:
    story = Story().runs()
    story.job = replace(story.job, parking=1)
    story.passes(PATIENCE.bad_silence + 1).host(0, HostPhase.RUNNING)
    story.look("ACTIVE", "READY")
    assert story.outcomes == [Outcome.BAD_HOST]
    assert story.did(EffectKind.RELEASE) == ["dl-me-000001-1"]
    assert story.job.parked == ()


def test_what_is_parked_is_given_back_where_the_quota_allows_no_other_slice() -> None:
    story = Story()
    story.job = replace(story.job, parking=1)
    burnt(story.runs()).settle()
    story.cloud_refuses(8, "Quota limit 'TPUV4sPreemptiblePodPerProjectPerZone' has been exceeded.")
    assert story.did(EffectKind.RELEASE).count("dl-me-000001-1") == 1
    assert "no other slice is available" in story.told[-1]


def test_what_is_parked_is_given_back_when_no_choice_has_capacity() -> None:
    story = Story()
    story.job = replace(story.job, parking=1)
    burnt(story.runs()).settle()
    story.cloud_refuses(8, NO_CAPACITY.message).settle()
    assert story.job.parked, "the other zone may have one"
    story.cloud_refuses(8, NO_CAPACITY.message)
    assert story.job.parked == ()


def test_what_is_parked_is_given_back_when_the_queue_does_not_move() -> None:
    story = Story()
    story.job = replace(story.job, parking=1, choices=story.job.choices[:1])
    burnt(story.runs()).settle().cloud_takes_the_request().look("WAITING_FOR_RESOURCES", None)
    story.passes(PATIENCE.waiting - 60)
    assert story.job.parked
    story.passes(120)
    assert story.job.parked == ()


def test_where_every_machine_is_refused_the_job_asks_less_and_less_and_says_why() -> None:
    story = Story()
    asked: list[float] = []
    for _ in range(8):
        while story.job.turned_down and story.job.placement is None:
            assert story.status() is Status.WAITING
            assert "m-1 is excluded: it lies" in story.job.reason
            story.old_slice_alive = story.now + 1 < story.job.not_before
            story.passes(1)
        asked.append(story.now)
        story.slice_is_there()
        story.host(1, HostPhase.PREPARING, refused="m-1 is excluded: it lies").settle()
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses == sorted(pauses)
    assert 120 <= pauses[-1] <= 130, pauses
    assert "(8 in a row)" in story.job.reason
    assert story.passes(120).runs().job.turned_down == 0


def test_a_slice_that_is_refused_leaves_no_trace_in_the_attempt() -> None:
    story = Story().slice_is_there()
    story.host(0, HostPhase.FAILED, error="setup").settle()
    assert story.job.attempt is not None
    assert story.job.attempt.failed_at is not None
    story.host(1, HostPhase.PREPARING, refused="m-1 is excluded: it lies").settle()
    assert story.job.attempt.failed_at is None
    assert story.job.attempt.number == 1


@pytest.mark.parametrize("host", ["7", "99999999", "9" * 5000, "-1"])
def test_an_accusation_of_a_host_that_is_not_there_is_held_against_nobody(host: str) -> None:
    story = Story().runs()
    fails(story, exit_code=1, error=f"drumline: chip 3 of host {host} computes wrong: x")
    assert Outcome.BAD_HOST not in story.outcomes or story.job.cause is not None
    assert story.job.cause is None or story.job.cause.proof == ""


def test_the_accused_host_is_counted_among_those_that_run_the_program() -> None:
    story = Story().slice_is_there()
    story.host(0, HostPhase.EXITED, exit_code=0, rank=None).host(1, HostPhase.RUNNING, rank=0)
    story.settle()
    said = "drumline: chip 3 of host 0 computes wrong: x"
    story.host(1, HostPhase.EXITED, rank=0, exit_code=86, error_at=1.0, error=said)
    story.passes(PATIENCE.settle + 1).look("ACTIVE", "READY")
    assert story.job.cause is not None
    assert (story.job.cause.host, story.job.cause.proof) == (1, EvidenceKind.BURN_IN)


def test_a_program_that_accuses_chips_that_are_proved_uses_up_the_allowance() -> None:
    story = Story()
    story.job = replace(story.job, allowance=Allowance(bad_hosts=2))
    for _ in range(3):
        assert story.status() is not Status.FAILED
        story.slice_is_there().all_hosts(HostPhase.RUNNING, burn_in="pass")
        story.tells(20, resumed=20, checkpoint=20).tells(30, resumed=20, checkpoint=20)
        fails(story, exit_code=1, error=LIES)
    assert story.status() is Status.FAILED


def test_a_long_burn_in_is_not_a_program_that_is_stuck() -> None:
    story = Story()
    story.job = replace(story.job, stuck_after=60.0, has_stepped=True)
    story.slice_is_there().all_hosts(HostPhase.RUNNING, burn_in="running")
    story.hangs(1000)
    for index in range(2):
        story.host(index, HostPhase.RUNNING, burn_in="pass")
    story.settle().hangs(100)
    assert story.outcomes == []
    assert story.job.cause is None
    story.hangs(100)
    assert story.job.cause is not None
    assert story.job.cause.kind == "stuck"
