import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.jobs.core import lifecycle
from drumline.jobs.core.reasons import EndReason, EventType
from drumline.jobs.core.state import (
    Attempt,
    Candidate,
    Decision,
    Effect,
    EffectType,
    EndedAttempt,
    Event,
    Job,
    Observations,
    Placement,
    PlacementRole,
    Status,
    Timeouts,
)
from drumline.jobs.core.steps import Steps
from drumline.jobs.core.zone_history import MAX_EVENTS, ZoneEvent, ZoneEventType
from drumline.jobs.store.metrics import Point
from drumline.jobs.store.records import SliceRow, Store
from drumline.jobs.store.schema import SchemaError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "jobs.db")


def new_job(job_id: str) -> Job:
    return Job(id=job_id, owner="me", choices=(Candidate("v4-8", "local-a"),), created_at=1.0)


def test_ids_are_six_digits_and_never_given_twice(store: Store) -> None:
    first = store.add("lab", "a", {}, new_job)
    second = store.add("lab", "b", {}, new_job)
    store.remove(second.job.id)
    third = store.add("lab", "c", {}, new_job)
    assert [first.job.id, second.job.id, third.job.id] == ["000001", "000002", "000003"]


def test_a_job_comes_back_as_it_was_written(store: Store, tmp_path: Path) -> None:
    record = store.add("lab", "a $(rm) 'quoted'\n", {"run": "x", "n": 1}, new_job)
    decision = lifecycle.decide(record.job, Observations(), 5.0, Timeouts())
    store.save(decision, 5.0)
    store.close()
    again = Store(tmp_path / "jobs.db")
    (read,) = again.living()
    assert read == replace(record, job=decision.job)
    assert [event["kind"] for event in again.events(record.job.id)] == ["created", "asked"]
    assert again.attempts(record.job.id)[0]["zone"] == "local-a"


def test_the_owner_is_the_same_for_ever_and_different_elsewhere(tmp_path: Path) -> None:
    here = Store(tmp_path / "a.db").owner
    assert Store(tmp_path / "a.db").owner == here
    assert Store(tmp_path / "b.db").owner != here


def test_a_copy_of_a_home_is_refused_while_the_original_is_there(tmp_path: Path) -> None:
    original, copied = tmp_path / "home", tmp_path / "copy"
    original.mkdir()
    with closing_store(original) as store:
        store.require_original(original)
        store.require_original(original)
    shutil.copytree(original, copied)
    (tmp_path / "link").symlink_to(original)
    with closing_store(copied) as store:
        with pytest.raises(SchemaError, match=f"{copied} is a copy of the home {original}"):
            store.require_original(copied)
        with pytest.raises(SchemaError):
            store.require_original(copied)
    for path in (original, tmp_path / "link"):
        with closing_store(path) as store:
            store.require_original(path)


@pytest.mark.parametrize("original", ["removed", "a new database", "damaged"])
def test_a_home_that_was_moved_is_used(original: str, tmp_path: Path) -> None:
    before, after = tmp_path / "home", tmp_path / "moved"
    before.mkdir()
    with closing_store(before) as store:
        store.require_original(before)
    before.rename(after)
    if original != "removed":
        before.mkdir()
        (before / "jobs.db").write_bytes(b"?" * 9000 if original == "damaged" else b"")
    if original == "a new database":
        with closing_store(before) as store:
            store.require_original(before)
    with closing_store(after) as store:
        store.require_original(after)
        store.require_original(after)


@contextmanager
def closing_store(home: Path) -> Iterator[Store]:
    store = Store(home / "jobs.db")
    try:
        yield store
    finally:
        store.close()


def test_a_released_slice_is_known_until_it_is_gone(store: Store) -> None:
    job = store.add("lab", "a", {}, new_job).job
    placement = Placement("dl-me-000001-1", "local-a", "v4-8", 1, asked_at=2.0, ready_at=3.0)
    release = Effect(EffectType.RELEASE, placement)
    store.save(Decision(job.put(placement)), 3.0)
    store.save(Decision(job, effects=(release,)), 10.0)
    (row,) = store.releasing()
    assert (row.name, row.ready, row.released) == (placement.name, 3.0, 10.0)
    store.remove(job.id)
    assert [r.name for r in store.releasing()] == [placement.name]
    store.gone(placement.name, 12.0)
    assert store.releasing() == []


def test_an_attempt_keeps_its_zone_while_a_slice_in_another_zone_follows(store: Store) -> None:
    job = store.add("lab", "a", {}, new_job).job
    attempt = Attempt(1, started_at=2.0, running_at=3.0)
    old = Placement("s", "local-a", "v4-8", 1, 2.0, PlacementRole.ACTIVE)
    cheaper = Placement("t", "local-b", "v4-8", 1, 2.0, PlacementRole.STARTING)
    store.save(Decision(replace(job, attempt=attempt).put(old).put(cheaper)), 3.0)
    moved = EndedAttempt(attempt, EndReason.MOVED, "")
    store.save(Decision(job.put(cheaper), ended=(moved,)), 9.0)
    (row,) = store.attempts(job.id)
    assert (row["zone"], row["outcome"]) == ("local-a", "moved")


def test_the_newest_events_of_each_zone_are_kept(store: Store) -> None:
    candidate, other = Candidate("v4-8", "local-a"), Candidate("v4-8", "local-b")
    store.add_zone_event(other, ZoneEvent(1.0, ZoneEventType.REFUSED, 0.0))
    for number in range(MAX_EVENTS + 3):
        store.add_zone_event(candidate, ZoneEvent(float(number), ZoneEventType.GRANTED, 60.0))
    events = store.zone_events()
    assert [event.at for event in events[candidate]] == [3.0 + n for n in range(MAX_EVENTS)]
    assert events[other] == [ZoneEvent(1.0, ZoneEventType.REFUSED, 0.0)]


def test_a_stray_that_was_thought_gone_is_released_again(store: Store) -> None:
    stray = SliceRow("dl-me-000009-1", "000009", "local-a", "v4-8", 1.0, None, 1.0, None)
    store.adopt_orphan(stray)
    store.gone(stray.name, 2.0)
    store.adopt_orphan(stray)
    assert [row.name for row in store.releasing()] == [stray.name]


def test_an_attempt_keeps_its_zone_after_the_slice_is_let_go(store: Store) -> None:
    job = store.add("lab", "a", {}, new_job).job
    attempt = Attempt(1, started_at=2.0, running_at=3.0)
    placement = Placement("s", "local-a", "v4-8", 1, asked_at=2.0)
    store.save(Decision(replace(job, attempt=attempt).put(placement)), 3.0)
    done = replace(job, status=Status.SUCCEEDED)
    store.save(Decision(done, ended=(EndedAttempt(attempt, EndReason.SUCCEEDED, ""),)), 9.0)
    (row,) = store.attempts(job.id)
    assert (row["zone"], row["outcome"], row["running"], row["ended"]) == (
        "local-a", "succeeded", 3.0, 9.0,
    )  # fmt: skip


def test_acknowledged_changes_survive_kill_9(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from drumline.jobs.store.records import Store; from drumline.jobs.core.state import *\n"
        "store = Store(Path(sys.argv[1]))\n"
        "make = lambda i: Job(id=i, owner='me', choices=(), created_at=1.0)\n"
        "while True:\n"
        "    print(store.add('lab', 'x', {}, make).job.id, flush=True)\n"
    )
    path = tmp_path / "jobs.db"
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            last = writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        last = [last, *writer.stdout][-1]
    ids = [record.job.id for record in Store(path).living()]
    assert last.strip() in ids
    assert ids == [f"{n:06}" for n in range(1, len(ids) + 1)]


def test_history_is_read_from_an_event_on(store: Store) -> None:
    job = store.add("lab", "a", {}, new_job).job
    first = store.events(job.id)[-1]["id"]
    store.add_event(job.id, Event(EventType.NOTE, "hello"), 2.0)
    assert [event["text"] for event in store.events(job.id, first)] == ["hello"]


OLD_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    user TEXT NOT NULL, name TEXT NOT NULL, spec TEXT NOT NULL, state TEXT NOT NULL,
    progress TEXT
) STRICT;
CREATE TABLE attempts (
    job TEXT NOT NULL, number INTEGER NOT NULL,
    zone TEXT, accelerator TEXT, started REAL NOT NULL, running REAL, ended REAL,
    outcome TEXT, detail TEXT NOT NULL DEFAULT '', hosts TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (job, number)
) STRICT;
INSERT INTO jobs VALUES (1, 'lab', 'old', '{"run": "x"}', '{"id": "000001", "owner": "me",
    "choices": [{"accelerator": "v4-8", "zone": "local-a"}], "created_at": 1.0,
    "allowance": {"failures": 3, "bad_hosts": 10, "preemptions": null}, "status": "RUNNING",
    "attempts": 1, "attempt": {"number": 1, "started_at": 2.0, "running_at": 3.0,
    "failed_at": null, "stopping": false}}', '{"step": 3}');
INSERT INTO attempts (job, number, started) VALUES ('000001', 1, 2.0);
"""


def test_a_home_of_an_earlier_version_is_taken_up(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "jobs.db") as old:
        old.executescript(OLD_SCHEMA)
    old.close()
    for _ in range(2):  # the second migration changes nothing
        store = Store(tmp_path / "jobs.db")
        (record,) = store.living()
        assert record.job.choices == (Candidate("v4-8", "local-a"),)
        assert record.job.stuck_after is None, "what the job file did not say is not made up"
        assert store.attempts("000001")[0]["course"] is None
        assert store.metrics.progress("000001") == {"step": 3}
        store.close()
    store = Store(tmp_path / "jobs.db")
    store.metrics.save("000001", {"step": 4}, {1: Steps(4, 9.0)}, [Point(1, 9.0, 4, {"loss": 0.5})])
    store.save(Decision(record.job), 10.0)
    assert store.metrics.steps("000001", 1) == Steps(4, 9.0)
    assert [one.job.choices for one in store.living()] == [record.job.choices]
    store.close()


def test_metrics_are_deleted_with_their_job(store: Store) -> None:
    job = store.add("lab", "a", {}, new_job).job
    point = Point(1, 2.0, 3.0, {"loss": 0.5})
    store.metrics.save(job.id, {"step": 3}, {}, [point])
    assert store.metrics.points(job.id) == [point]
    store.remove(job.id)
    assert store.metrics.points(job.id) == []


def test_a_store_that_was_full_can_be_written_again(store: Store) -> None:
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.add("lab", "a", {"run": "x" * 100_000}, new_job)
    store._db.execute("PRAGMA max_page_count = 1000000")
    assert store.add("lab", "a", {"run": "x" * 100_000}, new_job).job.id
    store.check_writable()


@pytest.mark.parametrize("kind", ["garbage", "short", "header", "page", "folder", "pipe", "link"])
def test_a_database_that_cannot_be_read_is_a_sentence_and_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "jobs.db"
    Store(path).close()
    content = bytearray(path.read_bytes())
    match kind:
        case "garbage":
            content[:] = os.urandom(len(content))
        case "short":
            content[:] = b"not a database"
        case "header":
            content[16:100] = b"\xff" * 84
        case "page":
            content[100:4096] = b"\xff" * 3996
    for name in ("jobs.db-wal", "jobs.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    path.write_bytes(content)
    if kind in {"folder", "pipe", "link"}:
        path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/dev/zero")
    with pytest.raises(SchemaError) as caught:
        Store(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    if kind not in {"folder", "pipe", "link"}:
        assert path.read_bytes() == content
