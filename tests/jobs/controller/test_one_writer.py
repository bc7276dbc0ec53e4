"""A program starts only when no earlier one can write to the same checkpoints any more."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from drumline.jobs.store.records import Store
from tests.jobs.pretend import UNAVAILABLE, Office, play

CHECKPOINT = "gs://lab/run"


async def lost_to_silence(office: Office, **keys: Any) -> str:
    """A job whose host has become silent, and whose slice the cloud does not delete."""
    office.cloud.buckets["lab"] = "US-CENTRAL2"
    job = await office.create(checkpoint=CHECKPOINT, **keys)
    await office.reaches(job, "RUNNING")
    office.cloud.deaf = True
    office.starts(job)[0].connection(there=False)
    await office.until(lambda: bool(office.desk.store.releasing()), within=900)
    return job


def test_a_slice_that_is_not_listed_and_cannot_be_looked_up_may_still_run(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await lost_to_silence(office)
        old = office.desk.store.releasing()[0].name
        office.cloud.unlisted.add(old)
        office.cloud.no_find = UNAVAILABLE
        await asyncio.sleep(1800)
        assert len(office.starts(job)) == 1
        assert "released" in office.show(job)["reason"]
        office.cloud.no_find = None
        await asyncio.sleep(600)
        assert len(office.starts(job)) == 1
        office.cloud.deaf = False
        office.cloud.unlisted.clear()
        await office.until(lambda: len(office.starts(job)) == 2, within=900)
        first, second = (start.program for start in office.starts(job))
        assert (first.checkpoint, first.owner) == (second.checkpoint, second.owner)
        assert first.fence < second.fence

    play(tmp_path, story)


def test_a_job_that_takes_over_checkpoints_waits_for_the_slice_of_the_job_before(
    tmp_path: Path,
) -> None:
    async def story(office: Office) -> None:
        first = await lost_to_silence(office, retry={"bad_hosts": 0})
        await office.reaches(first, "FAILED", within=900)
        spec = {
            "accelerator": "v4-16", "zones": ["us-central2-b"], "run": "true", "workdir": None,
        }  # fmt: skip
        second = str((await office.desk.create(spec, {}, "lab", {"from": first}))["id"])
        third = await office.create(checkpoint=CHECKPOINT)
        await office.until(lambda: bool(office.starts(third)))
        await asyncio.sleep(1800)
        assert not office.starts(second)
        office.cloud.deaf = False
        await office.until(lambda: bool(office.starts(second)), within=900)
        before, after = office.starts(first)[0].program, office.starts(second)[0].program
        assert before.checkpoint == after.checkpoint
        assert before.fence < after.fence

    play(tmp_path, story)


def test_fencing_numbers_grow_in_an_older_copy_of_the_database_too(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        await office.create()
        job = await office.create()
        await office.reaches(job, "RUNNING")
        before = office.starts(job)[0].program.fence
        # Whoever restores an older copy has given fewer numbers than were used.
        office.desk.store._db.execute("UPDATE meta SET value = '0' WHERE key = 'fence'")
        await office.restart()
        again = await office.create()
        await office.reaches(again, "RUNNING")
        assert office.starts(again)[0].program.fence > before

    play(tmp_path, story)


@pytest.mark.parametrize("last", [0, 5])
def test_every_fencing_number_is_greater_than_all_before(tmp_path: Path, last: int) -> None:
    store = Store(tmp_path / "jobs.db")
    store.skip_fence_to(last)
    numbers = [store.next_fence() for _ in range(3)]
    store.skip_fence_to(2)
    numbers.append(store.next_fence())
    assert numbers == [last + 1, last + 2, last + 3, last + 4]


def test_a_job_of_version_0_1_keeps_its_checkpoint_folder(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        office.cloud.buckets["lab"] = "US-CENTRAL2"
        job = await office.create(checkpoint=CHECKPOINT)
        await office.reaches(job, "RUNNING")
        # What that version wrote: no owner in the job file, no fencing number in the attempt.
        database = office.desk.store._db
        database.execute("UPDATE jobs SET spec = json_remove(spec, '$.checkpoint_owner')")
        database.execute("UPDATE jobs SET state = json_remove(state, '$.attempt.fence')")
        database.execute("DELETE FROM meta WHERE key = 'fence'")
        (office._home / "owners.json").unlink()
        await office.restart()
        assert office.show(job)["checkpoint"] == f"{CHECKPOINT}/{job}"
        name = office.desk.store.slices(job)[0].name
        office.cloud.becomes(name, "SUSPENDED", "PREEMPTED")
        await office.until(lambda: office.starts(job)[-1].program.attempt == 2, within=900)
        program = office.starts(job)[-1].program
        assert program.checkpoint == f"{CHECKPOINT}/{job}"
        assert program.fence > 0
        await office.desk.verb(job, "cancel", {})
        await office.reaches(job, "CANCELLED")
        changed = office.desk.record(job).spec.file | {"setup": "make data"}
        await office.desk.verb(job, "resume", {"spec": changed})
        await office.until(lambda: office.starts(job)[-1].program.attempt == 3, within=900)
        assert office.starts(job)[-1].program.checkpoint == f"{CHECKPOINT}/{job}"

    play(tmp_path, story)
