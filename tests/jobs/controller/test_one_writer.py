"""A program starts only when no earlier one can still write to the same checkpoints."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from drumline.jobs.store.records import Store
from tests.jobs.fakes import UNAVAILABLE, ServerHarness, run_scenario

CHECKPOINT = "gs://lab/run"


async def lost_to_silence(harness: ServerHarness, **keys: Any) -> str:
    """Create a job with a silent host and a slice that the cloud does not delete."""
    harness.cloud.buckets["lab"] = "US-CENTRAL2"
    job = await harness.create(checkpoint=CHECKPOINT, **keys)
    await harness.reaches(job, "RUNNING")
    harness.cloud.ignores_deletes = True
    harness.starts(job)[0].connection(there=False)
    await harness.until(lambda: bool(harness.service.store.releasing()), within=900)
    return job


def test_a_slice_that_is_not_listed_and_cannot_be_looked_up_may_still_run(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await lost_to_silence(harness)
        old = harness.service.store.releasing()[0].name
        harness.cloud.unlisted.add(old)
        harness.cloud.no_find = UNAVAILABLE
        await asyncio.sleep(1800)
        assert len(harness.starts(job)) == 1
        assert "previous slice to be deleted" in harness.show(job)["reason"]
        harness.cloud.no_find = None
        await asyncio.sleep(600)
        assert len(harness.starts(job)) == 1
        harness.cloud.ignores_deletes = False
        harness.cloud.unlisted.clear()
        await harness.until(lambda: len(harness.starts(job)) == 2, within=900)
        first, second = (start.program for start in harness.starts(job))
        assert (first.checkpoint, first.owner) == (second.checkpoint, second.owner)
        assert first.fence < second.fence

    run_scenario(tmp_path, scenario)


def test_a_poll_in_the_round_that_gives_up_a_slice_looks_it_up(tmp_path: Path) -> None:
    """Otherwise a listing with a hole would show that the slice is gone."""

    async def scenario(harness: ServerHarness) -> None:
        await lost_to_silence(harness)
        supervisor = harness.service.supervisor
        released = harness.service.store.releasing()[0]
        supervisor.releases.rows = []  # as of the beginning of that round
        harness.cloud.unlisted.add(released.name)
        harness.cloud.no_find = UNAVAILABLE
        await supervisor.zones._poll(released.zone)
        poll = supervisor.polls.newest(released.zone)
        assert poll is not None
        assert released.name in poll.unknown

    run_scenario(tmp_path, scenario)


def test_a_job_that_takes_over_checkpoints_waits_for_the_slice_of_the_job_before(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        first = await lost_to_silence(harness, retry={"bad_hosts": 0})
        await harness.reaches(first, "FAILED", within=900)
        spec = {
            "accelerator": "v4-16", "zones": ["us-central2-b"], "run": "true", "workdir": None,
        }  # fmt: skip
        second = str((await harness.service.create(spec, {}, "lab", {"from": first}))["id"])
        third = await harness.create(checkpoint=CHECKPOINT)
        await harness.until(lambda: bool(harness.starts(third)))
        await asyncio.sleep(1800)
        assert not harness.starts(second)
        harness.cloud.ignores_deletes = False
        await harness.until(lambda: bool(harness.starts(second)), within=900)
        before, after = harness.starts(first)[0].program, harness.starts(second)[0].program
        assert before.checkpoint == after.checkpoint
        assert before.fence < after.fence

    run_scenario(tmp_path, scenario)


def test_fencing_numbers_grow_in_an_older_copy_of_the_database_too(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        await harness.create()
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        before = harness.starts(job)[0].program.fence
        # A restored older copy has assigned fewer numbers than were used.
        harness.service.store._db.execute("UPDATE meta SET value = '0' WHERE key = 'fence'")
        await harness.restart()
        again = await harness.create()
        await harness.reaches(again, "RUNNING")
        assert harness.starts(again)[0].program.fence > before

    run_scenario(tmp_path, scenario)


def test_a_home_from_a_backup_gives_no_job_the_checkpoints_of_a_forgotten_one(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.buckets["lab"] = "US-CENTRAL2"
        job = await harness.create(checkpoint=CHECKPOINT)
        await harness.reaches(job, "RUNNING")
        folder = harness.show(job)["checkpoint"]
        await harness.service.verb(job, "delete", {})
        await harness.reaches(job, "CANCELLED")
        # The backup is older than the job.
        harness.service.store._db.executescript(
            "DELETE FROM jobs; DELETE FROM sqlite_sequence; DELETE FROM slices"
        )
        (harness._home / "owners.json").unlink()
        await harness.restart()
        again = await harness.create(checkpoint=CHECKPOINT)
        assert again == job
        assert harness.show(again)["checkpoint"] != folder

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize("last", [0, 5])
def test_every_fencing_number_is_greater_than_all_before(tmp_path: Path, last: int) -> None:
    store = Store(tmp_path / "jobs.db")
    store.skip_fence_to(last)
    numbers = [store.next_fence() for _ in range(3)]
    store.skip_fence_to(2)
    numbers.append(store.next_fence())
    assert numbers == [last + 1, last + 2, last + 3, last + 4]


def test_a_job_of_version_0_1_keeps_its_checkpoint_folder(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.buckets["lab"] = "US-CENTRAL2"
        job = await harness.create(checkpoint=CHECKPOINT)
        await harness.reaches(job, "RUNNING")
        # Records of that version: no owner in the job file, no fencing number in the attempt.
        database = harness.service.store._db
        database.execute("UPDATE jobs SET spec = json_remove(spec, '$.checkpoint_owner')")
        database.execute("UPDATE jobs SET state = json_remove(state, '$.attempt.fence')")
        database.execute("DELETE FROM meta WHERE key = 'fence'")
        (harness._home / "owners.json").unlink()
        await harness.restart()
        assert harness.show(job)["checkpoint"] == f"{CHECKPOINT}/{job}"
        name = harness.service.store.slices(job)[0].name
        harness.cloud.becomes(name, "SUSPENDED", "PREEMPTED")
        await harness.until(lambda: harness.starts(job)[-1].program.attempt == 2, within=900)
        program = harness.starts(job)[-1].program
        assert program.checkpoint == f"{CHECKPOINT}/{job}"
        assert program.fence > 0
        await harness.service.verb(job, "cancel", {})
        await harness.reaches(job, "CANCELLED")
        changed = harness.service.record(job).spec.file | {"setup": "make data"}
        await harness.service.verb(job, "resume", {"spec": changed})
        await harness.until(lambda: harness.starts(job)[-1].program.attempt == 3, within=900)
        assert harness.starts(job)[-1].program.checkpoint == f"{CHECKPOINT}/{job}"

    run_scenario(tmp_path, scenario)


async def deletion_that_does_not_end(harness: ServerHarness, **heartbeat: object) -> str:
    """Return a job that lost its slice to silence; the cloud deletes the slice for days."""
    harness.cloud.buckets["lab"] = "US-CENTRAL2"
    job = await harness.create(checkpoint=CHECKPOINT)
    await harness.reaches(job, "RUNNING")
    harness.starts(job)[0].send_heartbeat(step=1, **heartbeat)
    await asyncio.sleep(20)
    harness.cloud.ignores_deletes = True
    harness.starts(job)[0].connection(there=False)
    await harness.until(lambda: bool(harness.service.store.releasing()), within=900)
    (old,) = harness.service.store.releasing()
    harness.cloud.becomes(old.name, "DELETING", "DELETING")
    return job


def test_a_job_does_not_wait_for_a_deletion_without_end_if_its_program_is_fenced_off(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await deletion_that_does_not_end(harness, fenced=True)
        await asyncio.sleep(1500)
        assert len(harness.starts(job)) == 1, "a deletion usually takes minutes"
        await harness.until(lambda: len(harness.starts(job)) == 2, within=900)
        first, second = (start.program for start in harness.starts(job))
        assert first.fence < second.fence
        since = harness.clock()
        await asyncio.sleep(600)
        assert harness.cloud.count("release", since) > 0, "it is still being released"
        assert harness.service.store.releasing()

    run_scenario(tmp_path, scenario)


def test_a_program_that_was_fenced_before_is_fenced_off_before_its_first_report(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.buckets["lab"] = "US-CENTRAL2"
        job = await harness.create(checkpoint=CHECKPOINT)
        await harness.reaches(job, "RUNNING")
        harness.starts(job)[0].send_heartbeat(step=1, fenced=True)
        await asyncio.sleep(20)
        harness.starts(job)[0].ends(1, "ValueError: shapes")
        await harness.until(lambda: len(harness.starts(job)) == 2)
        await harness.reaches(job, "RUNNING")
        harness.cloud.ignores_deletes = True
        harness.starts(job)[1].connection(there=False)
        await harness.until(lambda: bool(harness.service.store.releasing()), within=900)
        (old,) = harness.service.store.releasing()
        harness.cloud.becomes(old.name, "DELETING", "DELETING")
        await harness.until(lambda: len(harness.starts(job)) == 3, within=2400)
        assert harness.service.store.releasing()

    run_scenario(tmp_path, scenario)


def test_a_resumed_job_may_run_a_program_without_a_fence(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.buckets["lab"] = "US-CENTRAL2"
        job = await harness.create(checkpoint=CHECKPOINT)
        await harness.reaches(job, "RUNNING")
        harness.starts(job)[0].send_heartbeat(step=1, fenced=True)
        await asyncio.sleep(20)
        await harness.service.verb(job, "cancel", {})
        await harness.reaches(job, "CANCELLED")
        await harness.service.verb(job, "resume", {})
        await harness.until(lambda: len(harness.starts(job)) == 2)
        await harness.reaches(job, "RUNNING")
        harness.cloud.ignores_deletes = True
        harness.starts(job)[1].connection(there=False)
        await harness.until(lambda: bool(harness.service.store.releasing()), within=900)
        (old,) = harness.service.store.releasing()
        harness.cloud.becomes(old.name, "DELETING", "DELETING")
        await asyncio.sleep(6 * 3600)
        assert len(harness.starts(job)) == 2

    run_scenario(tmp_path, scenario)


def test_a_job_does_not_wait_for_a_slice_to_which_nothing_was_ever_sent(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.buckets["lab"] = "US-CENTRAL2"
        harness.cloud.no_keys = UNAVAILABLE
        job = await harness.create(checkpoint=CHECKPOINT)
        await harness.until(lambda: harness.cloud.count("keys") >= 1)
        harness.cloud.ignores_deletes = True
        (old,) = harness.cloud.held
        harness.cloud.becomes(old, "DELETING", "DELETING")
        await harness.until(lambda: bool(harness.service.store.releasing()), within=120)
        harness.cloud.no_keys = None
        await harness.until(lambda: bool(harness.starts(job)), within=2400)
        assert harness.service.store.releasing()

    run_scenario(tmp_path, scenario)


def test_a_job_waits_for_a_program_that_may_still_write(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await deletion_that_does_not_end(harness, checkpoint=1)
        await asyncio.sleep(6 * 3600)
        assert len(harness.starts(job)) == 1
        assert "previous slice to be deleted" in harness.show(job)["reason"]

    run_scenario(tmp_path, scenario)


def test_no_program_starts_while_the_deletion_of_a_preempted_slice_hangs(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        (name,) = harness.cloud.held
        harness.cloud.ignores_deletes = True
        harness.cloud.becomes(name, "SUSPENDED", "PREEMPTED")
        await harness.until(lambda: bool(harness.service.store.releasing()))
        harness.cloud.becomes(name, "DELETING", "DELETING")
        await harness.until(lambda: len(harness.starts(job)) == 2, within=3600)

    run_scenario(tmp_path, scenario)
