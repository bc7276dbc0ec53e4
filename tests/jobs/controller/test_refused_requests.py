"""What follows when the cloud refuses a slice, or a request for one comes to nothing."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.cloud.google.placements import RpcError
from drumline.cloud.protocol import CloudError
from drumline.jobs.core.state import Choice, EffectKind, Status, Zone
from tests.jobs.pretend import HOUR, LOGIN_EXPIRED, UNAVAILABLE, Office, play
from tests.jobs.story import PATIENCE, A, B, Story

STRANGE = "The frobnicator of this cell is out of phase."


@pytest.mark.parametrize(
    ("code", "text"), [(9, STRANGE), (8, STRANGE), (2, ""), (13, "Internal error"), (14, "down")]
)
def test_a_request_that_fails_for_no_known_reason_is_made_again_less_and_less(
    tmp_path: Path, code: int, text: str
) -> None:
    async def story(office: Office) -> None:
        office.cloud.given = ("FAILED", None)
        office.cloud.given_trouble = RpcError(code, text)
        job = await office.create()
        await asyncio.sleep(HOUR)
        shown = office.show(job)
        assert (shown["preemptions"], shown["ended"]) == (0, None)
        assert 3 <= office.cloud.count("ask") < 60
        in_the_last_half = office.cloud.count("ask", since=office.clock() - HOUR / 2)
        assert in_the_last_half <= office.cloud.count("ask") / 2
        await office.until(lambda: len(office.cloud.requested) <= 1, within=1200)

    play(tmp_path, story)


def test_a_request_that_was_refused_is_made_again_less_and_less(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        office.cloud.refusal = LOGIN_EXPIRED
        job = await office.create()
        await asyncio.sleep(HOUR)
        assert 20 <= office.cloud.count("ask") < 45
        assert "gcloud auth application-default login" in office.show(job)["reason"]
        office.cloud.refusal = None
        await office.reaches(job, "RUNNING", within=150)
        assert len({call.name for call in office.cloud.calls if call.verb == "ask"}) == 1

    play(tmp_path, story)


def test_a_cloud_that_takes_every_request_back_is_asked_less_and_less(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        office.cloud.given = ("SUSPENDED", None)
        await office.create()
        await asyncio.sleep(HOUR)
        assert office.cloud.count("ask") < 45

    play(tmp_path, story)


def test_a_zone_that_refuses_for_no_known_reason_gives_way_to_the_next() -> None:
    story = Story().settle()
    story.zones = {A: Zone(open=False, why="resting"), B: Zone()}
    story.cloud_refuses(9, STRANGE)
    assert story.did(EffectKind.SHORT) == ["dl-me-000001-1"]
    story.settle()
    assert story.job.placement is not None
    assert story.job.placement.zone == B.zone
    assert STRANGE in " ".join(story.told)
    assert (story.job.preemptions, story.job.failures) == (0, 0)


def test_a_second_kind_of_slice_in_the_same_zone_is_tried() -> None:
    first, second = Choice("v4-128", "us-central2-b"), Choice("v4-64", "us-central2-b")
    story = Story(job=replace(Story().job, choices=(first, second)))
    story.zones = {first: Zone(), second: Zone()}
    story.settle().cloud_takes_the_request()
    story.look("WAITING_FOR_RESOURCES", None)
    story.zones = {first: Zone(open=False, why="short"), second: Zone()}
    story.passes(PATIENCE.waiting + 1)
    assert story.job.placement is not None
    assert story.job.placement.accelerator == "v4-64"
    assert story.status() is Status.WAITING


def test_an_ask_under_way_takes_no_further_token(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        office.cloud.slow = 40.0
        slow = await office.create()
        for _ in range(600):
            office.supervisor.wake()
            await asyncio.sleep(0.05)
        assert office.cloud.count("ask") == 1
        others = [await office.create() for _ in range(7)]
        await office.until(lambda: office.cloud.count("ask") == 1 + len(others), within=5)
        assert slow not in others

    play(tmp_path, story)


def test_looks_that_fail_do_not_make_the_loop_spin(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        office.cloud.trouble = UNAVAILABLE
        await office.desk.verb(job, "delete", {})
        office.starts(job)[0].ends(0)
        rounds, before = office.rounds(), office.cloud.count("nodes")
        await asyncio.sleep(600)
        assert rounds() < 300
        assert office.cloud.count("nodes") - before < 30
        assert office.cloud.count("release", since=office.clock() - 600) < 20
        office.cloud.trouble = None
        await office.until(lambda: not office.cloud.held, within=400)

    play(tmp_path, story)


def test_a_new_server_whose_looks_fail_does_not_spin_either(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        office.cloud.trouble = UNAVAILABLE
        await office.create()
        rounds = office.rounds()
        await asyncio.sleep(600)
        assert rounds() < 300
        assert office.cloud.count("nodes") < 30

    play(tmp_path, story)


def test_a_new_server_that_has_not_seen_its_running_slice_does_not_spin(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        office.cloud.trouble = LOGIN_EXPIRED
        await office.restart()
        rounds = office.rounds()
        await asyncio.sleep(600)
        assert rounds() < 300
        office.cloud.trouble = None
        await office.until(lambda: len(office.starts(job)) == 2, within=120)
        assert office.status(job) == "RUNNING", "the new server listens to its hosts"

    play(tmp_path, story)


def test_a_new_server_whose_slice_is_listed_without_hosts_does_not_spin(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        ((name, node),) = office.cloud.held.items()
        office.cloud.held[name] = replace(node, endpoints=())
        await office.restart()
        rounds = office.rounds()
        await asyncio.sleep(600)
        assert rounds() < 300
        office.cloud.held[name] = node
        await office.until(lambda: len(office.starts(job)) == 2, within=120)

    play(tmp_path, story)


def test_a_start_that_raises_rests_and_is_told_in_the_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the archive is nowhere")

    monkeypatch.setattr("drumline.jobs.controller.slices.sessions.program_of", broken)

    async def story(office: Office) -> None:
        job = await office.create()
        with caplog.at_level(logging.INFO):
            await asyncio.sleep(600)
        tracebacks = [r for r in caplog.records if r.exc_info]
        assert len(tracebacks) == 1
        assert len(caplog.records) < 40
        assert "the archive is nowhere" in office.show(job)["reason"]
        assert "trying again" in office.show(job)["reason"]
        monkeypatch.undo()
        monkeypatch.setattr("drumline.hosts.session.SliceSession", type(office).sessions)
        await office.reaches(job, "RUNNING", within=120)
        assert office.show(job)["reason"] == ""

    play(tmp_path, story)


def test_a_release_that_is_refused_is_tried_less_and_less_and_told(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        office.cloud.no_release = CloudError("Permission 'tpu.nodes.delete' denied on 'x'", 7)
        await office.desk.verb(job, "delete", {})
        await office.reaches(job, "CANCELLED")
        began = office.clock()
        await asyncio.sleep(HOUR)
        assert office.cloud.count("release", since=began) < 25
        assert "may not use" in office.show(job)["reason"]
        office.cloud.no_release = None
        await office.until(lambda: not office.cloud.held, within=400)
        await office.until(lambda: "may not" not in office.show(job)["reason"])

    play(tmp_path, story)


def test_a_listing_that_leaves_a_slice_out_moves_no_job(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        (name,) = office.cloud.held
        office.cloud.unlisted.add(name)
        await asyncio.sleep(HOUR)
        assert office.status(job) == "RUNNING"
        assert office.cloud.count("ask") == 1
        office.cloud.requested.clear()
        office.cloud.held.clear()
        await office.until(lambda: office.show(job)["preemptions"] == 1)
        assert len(office.cloud.held) <= 1

    play(tmp_path, story)


def test_a_listing_that_leaves_a_slice_out_does_not_end_its_release(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        (name,) = office.cloud.held
        office.cloud.unlisted.add(name)
        office.cloud.deaf = True
        await office.desk.verb(job, "delete", {})
        await office.reaches(job, "CANCELLED", within=120)
        await asyncio.sleep(600)
        assert [row.name for row in office.supervisor.store.releasing()] == [name]
        office.cloud.deaf = False
        await office.until(lambda: not office.supervisor.store.releasing(), within=60)

    play(tmp_path, story)
