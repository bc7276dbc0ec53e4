"""A long history slows down neither the start, nor the loop, nor `list`."""

import asyncio
import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.jobs.core import lifecycle
from drumline.jobs.core.reasons import EventType
from drumline.jobs.core.state import (
    Candidate,
    Decision,
    Effect,
    EffectType,
    Event,
    Job,
    Placement,
    Status,
)
from drumline.jobs.server.verbs import RequestError
from drumline.jobs.store import pruning
from drumline.jobs.store.records import JobFilter, Store, UnreadableJobError
from tests.jobs.fakes import ServerHarness, run_scenario

DAY = 86400.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "jobs.db")


def add(
    store: Store, name: str = "a", user: str = "lab", ended: float | None = None, **facts: Any
) -> str:
    def make(job_id: str) -> Job:
        return Job(job_id, "me", (Candidate("v4-8", "local-a"),), created_at=1.0, **facts)

    job = store.add(user, name, {"run": "x"}, make).job
    if ended is not None:
        store.save(Decision(replace(job, status=Status.SUCCEEDED, ended_at=ended)), ended)
    return job.id


def test_an_ended_job_without_a_slice_leaves_the_loop(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        (session,) = harness.starts(job)
        session.send_heartbeat(step=3, loss=0.5)
        await asyncio.sleep(1)
        session.ends(0)
        await harness.until(lambda: job not in harness.supervisor.records)
        shown = harness.show(job)
        assert (shown["status"], shown["progress"]) == ("SUCCEEDED", {"step": 3, "loss": 0.5})
        assert [row["id"] for row in harness.service.overview()] == [job]
        assert len(harness.service.history(job)["points"]) == 1
        assert (await harness.service.events(job, after=10**9, wait=60))["job"]["id"] == job
        assert harness.service.status()["living"] == 0
        assert harness.service.status()["jobs"] == 1

    run_scenario(tmp_path, scenario)


def test_a_job_that_left_the_loop_comes_back_with_a_resume(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(retry={"failures": 0}, keep=0)
        await harness.reaches(job, "RUNNING")
        harness.starts(job)[0].ends(3)
        await harness.reaches(job, "FAILED", within=120)
        assert job not in harness.supervisor.records
        await harness.service.verb(job, "resume", {})
        await harness.reaches(job, "RUNNING")
        assert len(harness.starts(job)) == 2
        await harness.service.verb(job, "clean", {})
        with pytest.raises(RequestError, match="no job"):
            harness.show(job)

    run_scenario(tmp_path, scenario)


def test_a_job_that_keeps_its_slice_stays_in_the_loop(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        await harness.service.verb(job, "cancel", {})
        await harness.reaches(job, "CANCELLED")
        assert job in harness.supervisor.records
        await harness.service.verb(job, "delete", {})
        await harness.until(lambda: job not in harness.supervisor.records)

    run_scenario(tmp_path, scenario)


def test_lists_are_filtered(store: Store) -> None:
    old = add(store, "sweep/1", ended=10.0)
    new = add(store, "sweep/2", ended=100.0)
    other = add(store, "llama[x]", user="ann")
    assert store.find(JobFilter()) == [old, new, other]
    assert store.find(JobFilter(since=50.0)) == [new, other]
    assert store.find(JobFilter(status=("SUCCEEDED",))) == [old, new]
    assert store.find(JobFilter(status=("QUEUED", "FAILED"))) == [other]
    assert store.find(JobFilter(name="sweep")) == [old, new]
    assert store.find(JobFilter(name="*/2")) == [new]
    assert store.find(JobFilter(name="ma[x")) == [other]
    assert store.find(JobFilter(name="%")) == []
    assert store.find(JobFilter(user="ann")) == [other]


def test_lists_come_in_pages(store: Store) -> None:
    jobs = [add(store, ended=1.0) for _ in range(5)]
    first = store.find(JobFilter(limit=2))
    second = store.find(JobFilter(limit=2, before=first[0]))
    third = store.find(JobFilter(limit=2, before=second[0]))
    assert [*third, *second, *first] == jobs


def test_a_list_without_a_limit_leaves_out_no_job_that_lives(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.jobs.store.records.MAX_ENDED", 2)
    lives = add(store)
    ended = [add(store, ended=1.0) for _ in range(4)]
    assert store.find(JobFilter()) == [lives, *ended[-2:]]


def damaged(home: Path, job: str, column: str = "state", text: str = '{"id": 3}') -> None:
    db = sqlite3.connect(home / "jobs.db")
    db.execute(f"UPDATE jobs SET {column} = ? WHERE number = ?", (text, int(job)))  # noqa: S608
    db.commit()
    db.close()


@pytest.mark.parametrize(("column", "text"), [("state", '{"id": 3}'), ("state", "{"), ("spec", "")])
def test_a_row_that_cannot_be_read_is_set_aside_and_the_others_go_on(
    tmp_path: Path, column: str, text: str
) -> None:
    store = Store(tmp_path / "jobs.db")
    bad, good = add(store, "bad"), add(store, "good")
    whole = sqlite3.connect(tmp_path / "jobs.db").execute(
        f"SELECT {column} FROM jobs WHERE number = {int(bad)}"  # noqa: S608
    )
    (before,) = whole.fetchone()
    store.close()
    damaged(tmp_path, bad, column, text)
    store = Store(tmp_path / "jobs.db")
    assert [record.name for record in store.living()] == ["good"]
    (aside,) = store.unreadable_jobs()
    assert (aside.id, aside.name) == (bad, "bad")
    assert aside.reason
    with pytest.raises(UnreadableJobError):
        store.record(bad)
    assert store.find(JobFilter(since=1e12)) == [bad, good], "it is always listed"
    damaged(tmp_path, bad, column, before)
    assert [record.name for record in store.living()] == ["bad", "good"], "a newer version reads it"
    assert store.unreadable_jobs() == []


def test_an_unreadable_job_keeps_its_slice_and_can_be_deleted(tmp_path: Path) -> None:
    job = ""

    async def before(harness: ServerHarness) -> None:
        nonlocal job
        job = await harness.create(name="bad")
        await harness.reaches(job, "RUNNING")

    async def after(harness: ServerHarness) -> None:
        name = f"dl-{harness.service.store.owner}-{job}-1"
        from drumline.cloud.google.placements import ListedNode, ListedRequest

        labels = {"drumline-owner": harness.service.store.owner, "drumline-job": job}
        zone = "us-central2-b"
        harness.cloud.requested[name] = ListedRequest(name, zone, "ACTIVE", "v4-16", labels)
        harness.cloud.held[name] = ListedNode(name, zone, "READY", "v4-16", labels, ())
        await asyncio.sleep(700)
        assert name in harness.cloud.held, "nobody knows whether it is still wanted"
        (row,) = harness.service.overview()
        assert (row["id"], row["name"], row["status"]) == (job, "bad", "UNREADABLE")
        assert "cannot be read" in row["reason"]
        assert [one["id"] for one in harness.service.status()["unreadable"]] == [job]
        with pytest.raises(RequestError, match=f"cannot be read.*drumline delete {job}"):
            harness.show(job)
        with pytest.raises(RequestError, match="cannot be read"):
            await harness.service.verb(job, "resume", {})
        answer = await harness.service.verb(job, "delete", {})
        assert "1 slice of" in answer["text"]
        await harness.until(lambda: name not in harness.cloud.held)
        await harness.service.verb(job, "clean", {})
        assert harness.service.overview() == []

    run_scenario(tmp_path, before)
    damaged(tmp_path, job)
    run_scenario(tmp_path, after)


def test_a_dry_run_writes_no_archive(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    spec = {"accelerator": "v4-8", "run": "python train.py", "workdir": str(folder)}
    home = tmp_path / "home"

    async def scenario(harness: ServerHarness) -> None:
        lines = (await harness.service.plan(spec))["lines"]
        assert "would send 1 file (1 kB)" in lines
        assert [*(home / "code").iterdir()] == []

    run_scenario(home, scenario)


def test_the_newest_events_of_a_job_stay_and_its_first(store: Store) -> None:
    job, old = add(store), add(store, ended=5.0)
    for number in range(1500):
        store.add_event(job, Event(EventType.NOTE, str(number)), 10.0)
        if number < 300:
            store.add_event(old, Event(EventType.NOTE, str(number)), 10.0)
    asyncio.run(pruning.prune_rows(store, 10.0))
    texts = [event["text"] for event in store.events(job)]
    assert texts == ["a", *map(str, range(500, 1500))]
    assert len(store.events(old)) == 301, "it ended a moment ago"
    asyncio.run(pruning.prune_rows(store, 40 * DAY))
    assert [event["text"] for event in store.events(old)] == ["a", *map(str, range(200, 300))]
    assert len(store.events(job)) == 1001


def test_slices_that_never_came_are_forgotten_and_those_that_cost_are_not(store: Store) -> None:
    job = store.record(add(store))
    assert job is not None
    for number in range(30):
        for kind in ("cost", "free"):
            ready = 2.0 if kind == "cost" else None
            name = f"{kind}-{number:02}"
            placement = Placement(
                name, "local-a", "v4-8", 1, asked_at=float(number), ready_at=ready
            )
            store.save(Decision(job.job, effects=(Effect(EffectType.RELEASE, placement),)), 3.0)
            store.gone(name, 4.0)
    store.prune_slices(20, before=3.0)
    assert len(store.slices(job.job.id)) == 60, "not old enough"
    store.prune_slices(20, before=5.0)
    kept = [row.name for row in store.slices(job.job.id)]
    assert sum(name.startswith("cost") for name in kept) == 30
    assert sorted(name for name in kept if name.startswith("free"))[0] == "free-10"
    store.remove(job.job.id)
    store.prune_slices(20, before=5.0)
    assert store.slices(job.job.id) == []


def test_code_that_no_job_will_ask_for_goes_after_a_week(tmp_path: Path) -> None:
    now = 100 * DAY
    ages = {"used": 50, "new": 1, "old": 8}
    for name, days in ages.items():
        path = tmp_path / f"{name}.tar.gz"
        path.write_bytes(b"x")
        os.utime(path, (now - days * DAY,) * 2)
    pruning.prune_code(tmp_path, {"used.tar.gz"}, now)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.tar.gz", "used.tar.gz"]


def test_an_archive_that_is_being_packed_is_not_removed(
    tmp_path: Path,
) -> None:
    draft = tmp_path / ".packing-1"
    draft.mkdir()
    (draft / "code.tar.gz").write_bytes(b"x")
    os.utime(draft, (0, 0))
    pruning.prune_code(tmp_path, (), 100 * DAY)
    assert draft.exists()
    pruning.remove_drafts(tmp_path)
    assert not draft.exists()


def test_code_that_no_job_will_ask_for_takes_so_much_room_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "MAX_ARCHIVE_BYTES", 25)
    now = 100 * DAY
    for hours in (0, 2, 3, 4):
        path = tmp_path / f"{hours}.tar.gz"
        path.write_bytes(b"0123456789")
        os.utime(path, (now - hours * 3600,) * 2)
    pruning.prune_code(tmp_path, (), now)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.tar.gz", "2.tar.gz"]


def test_the_server_prunes_of_itself(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("WAITING_FOR_RESOURCES", None)
        job = await harness.create()
        for number in range(1100):
            harness.service.store.add_event(
                job, Event(EventType.NOTE, str(number)), harness.clock()
            )
        await asyncio.sleep(90)
        assert len(harness.service.store.events(job)) <= 1001 + 5

    run_scenario(tmp_path, scenario)


def test_jobs_that_wait_are_decided_on_when_something_changed_and_not_at_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided_jobs: list[str] = []
    decide = lifecycle.decide

    def counted(job: Job, *arguments: Any) -> Decision:
        if not job.placements:
            decided_jobs.append(job.id)
        return decide(job, *arguments)

    monkeypatch.setattr(lifecycle, "decide", counted)

    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("WAITING_FOR_RESOURCES", None)
        jobs = [await harness.create() for _ in range(40)]
        await asyncio.sleep(300)
        decided_jobs.clear()
        await asyncio.sleep(3600)
        assert len(decided_jobs) < 2 * len(jobs), "some 360 rounds went by"
        assert sum(harness.status(job) == "WAITING" for job in jobs) == 8
        harness.cloud.given = ("ACTIVE", "READY")
        for name in [*harness.cloud.requested]:
            await harness.cloud.release("", name)
        await harness.until(
            lambda: all(harness.status(job) == "RUNNING" for job in jobs), within=3600
        )

    run_scenario(tmp_path, scenario)


def test_a_waiting_job_whose_change_could_not_be_written_is_decided_on_again(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        save, failed = harness.service.store.save, 0

        def full(*arguments: Any) -> None:
            nonlocal failed
            if failed < 3:
                failed += 1
                raise sqlite3.OperationalError("database or disk is full")
            save(*arguments)

        harness.service.store.save = full  # type: ignore[method-assign,assignment]
        job = await harness.create()
        await harness.reaches(job, "RUNNING", within=120)
        assert failed == 3

    run_scenario(tmp_path, scenario)
