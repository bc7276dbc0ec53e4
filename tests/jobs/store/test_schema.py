"""The database of an older version is migrated in place, completely or not at all."""

import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from drumline.jobs.core.state import PlacementRole
from drumline.jobs.store import schema
from drumline.jobs.store.records import JobFilter, Store
from drumline.jobs.store.schema import SchemaError

BEFORE_MIGRATIONS = Path(__file__).with_name("data") / "jobs-schema-0.sql"
"""Written by the last version that did not count steps: one job each that is done, failed, kept its
slice, runs, and waits.
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.db"
    db = sqlite3.connect(path)
    db.executescript(BEFORE_MIGRATIONS.read_text())
    db.close()
    return path


def test_a_database_from_before_steps_were_counted_is_taken_up_whole(old: Path) -> None:
    for _ in range(2):  # the second migration changes nothing
        store = Store(old)
        assert [r.name for r in store.living()] == ["kept", "runs", "waits"]
        placements = [p for r in store.living() for p in r.job.placements]
        assert [p.role.value for p in placements] == ["active", "active", "requested"]
        assert [p.accepted_at is not None for p in placements] == [True, True, True]
        assert store.find(JobFilter()) == ["000001", "000002", "000003", "000004", "000005"]
        assert store.find(JobFilter(status=("SUCCEEDED", "WAITING"))) == ["000001", "000005"]
        done = store.record("000001")
        assert done is not None
        assert (done.name, done.job.status) == ("done", "SUCCEEDED")
        assert store.metrics.progress("000004") == {"step": 7, "loss": 0.5}
        assert len(store.metrics.points("000001")) > 0
        assert store.unreadable_jobs() == []
        ended = done.job.ended_at
        assert ended is not None
        assert "000001" in store.find(JobFilter(since=ended - 1))
        assert "000001" not in store.find(JobFilter(since=ended + 1))
        store.close()


def test_a_step_that_is_cut_off_leaves_the_file_as_it_was(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM jobs")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(schema, "_MIGRATIONS", (*schema._MIGRATIONS, cut_off))
        with pytest.raises(KeyboardInterrupt):
            Store(old)
    assert len(Store(old).living()) == 3


def test_a_database_of_a_newer_version_is_one_sentence_and_untouched(old: Path) -> None:
    Store(old).close()
    db = sqlite3.connect(old)
    db.execute("PRAGMA user_version = 99")
    db.close()
    before = old.read_bytes()
    with pytest.raises(SchemaError, match="newer drumline"):
        Store(old)
    assert old.read_bytes() == before


def test_a_step_that_another_server_has_taken_meanwhile_is_not_taken_twice(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers of one home start at once, and the second acts between the first's check and
    step.
    """
    begin = schema.transaction

    def behind_another(db: sqlite3.Connection) -> AbstractContextManager[None]:
        monkeypatch.setattr(schema, "transaction", begin)
        Store(old).close()
        return begin(db)

    monkeypatch.setattr(schema, "transaction", behind_another)
    assert [len(record.job.placements) for record in Store(old).living()] == [1, 1, 1]


def test_the_placements_of_a_job_get_roles(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(schema, "_MIGRATIONS", schema._MIGRATIONS[:5])
        Store(old).close()
    db = sqlite3.connect(old)
    bad = '{"name": "bad", "zone": "local-a", "accelerator": "v4-8", "hosts": 1, "asked_at": 1.0}'
    for phase, number in (("asking", 5), ("booting", 4)):
        db.execute(
            "UPDATE jobs SET state = json_set(state, '$.placement.phase', ?, '$.parked',"
            " json(?)) WHERE number = ?",
            (phase, f"[{bad}]", number),
        )
    db.commit()
    db.close()
    jobs = {record.name: record.job for record in Store(old).living()}
    roles = {name: [p.role for p in job.placements] for name, job in jobs.items()}
    assert roles == {
        "kept": [PlacementRole.ACTIVE],
        "runs": [PlacementRole.STARTING, PlacementRole.HELD_BACK],
        "waits": [PlacementRole.REQUESTED, PlacementRole.HELD_BACK],
    }
    (request,) = jobs["waits"].requests
    assert request.accepted_at is None
    assert jobs["runs"].held_back[0].name == "bad"
