"""Slices that the cloud refuses, and requests that are never created."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.cloud.google.placements import RpcError
from drumline.cloud.protocol import CloudError
from drumline.jobs.core.state import Candidate, EffectType, Status, ZoneStatus
from tests.jobs.fakes import HOUR, LOGIN_EXPIRED, UNAVAILABLE, ServerHarness, run_scenario
from tests.jobs.scenario import TIMEOUTS, A, B, Scenario

STRANGE = "The frobnicator of this cell is out of phase."


@pytest.mark.parametrize(
    ("code", "text"), [(9, STRANGE), (8, STRANGE), (2, ""), (13, "Internal error"), (14, "down")]
)
def test_a_request_that_fails_for_no_known_reason_is_made_again_less_and_less(
    tmp_path: Path, code: int, text: str
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("FAILED", None)
        harness.cloud.request_error = RpcError(code, text)
        job = await harness.create()
        await asyncio.sleep(HOUR)
        shown = harness.show(job)
        assert (shown["preemptions"], shown["ended"]) == (0, None)
        assert 3 <= harness.cloud.count("ask") < 60
        in_the_last_half = harness.cloud.count("ask", since=harness.clock() - HOUR / 2)
        assert in_the_last_half <= harness.cloud.count("ask") / 2
        await harness.until(lambda: len(harness.cloud.requested) <= 1, within=1200)

    run_scenario(tmp_path, scenario)


def test_a_request_that_was_refused_is_made_again_less_and_less(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.refusal = LOGIN_EXPIRED
        job = await harness.create()
        await asyncio.sleep(HOUR)
        assert 20 <= harness.cloud.count("ask") < 45
        assert "gcloud auth application-default login" in harness.show(job)["reason"]
        harness.cloud.refusal = None
        await harness.reaches(job, "RUNNING", within=150)
        assert len({call.name for call in harness.cloud.calls if call.verb == "ask"}) == 1

    run_scenario(tmp_path, scenario)


def test_a_cloud_that_takes_every_request_back_is_asked_less_and_less(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("SUSPENDED", None)
        await harness.create()
        await asyncio.sleep(HOUR)
        assert harness.cloud.count("ask") < 45

    run_scenario(tmp_path, scenario)


def test_a_zone_that_refuses_for_no_known_reason_gives_way_to_the_next() -> None:
    scenario = Scenario().settle()
    scenario.zones = {A: ZoneStatus(open=False, reason="resting"), B: ZoneStatus()}
    scenario.cloud_refuses(9, STRANGE)
    assert scenario.did(EffectType.NO_CAPACITY) == ["dl-me-000001-1"]
    scenario.settle()
    assert scenario.placement is not None
    assert scenario.placement.zone == B.zone
    assert STRANGE in " ".join(scenario.event_texts)
    assert (scenario.job.preemptions, scenario.job.failures) == (0, 0)


def test_a_second_kind_of_slice_in_the_same_zone_is_tried() -> None:
    first, second = Candidate("v4-128", "us-central2-b"), Candidate("v4-64", "us-central2-b")
    scenario = Scenario(job=replace(Scenario().job, choices=(first, second)))
    scenario.zones = {first: ZoneStatus(), second: ZoneStatus()}
    scenario.settle().cloud_takes_the_request()
    scenario.look("WAITING_FOR_RESOURCES", None)
    scenario.zones = {first: ZoneStatus(open=False, reason="short"), second: ZoneStatus()}
    scenario.passes(TIMEOUTS.waiting + 1)
    assert scenario.placement is not None
    assert scenario.placement.accelerator == "v4-64"
    assert scenario.status() is Status.WAITING


def test_an_ask_under_way_takes_no_further_token(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.slow = 40.0
        slow = await harness.create()
        for _ in range(600):
            harness.supervisor.wake()
            await asyncio.sleep(0.05)
        assert harness.cloud.count("ask") == 1
        others = [await harness.create() for _ in range(7)]
        await harness.until(lambda: harness.cloud.count("ask") == 1 + len(others), within=5)
        assert slow not in others

    run_scenario(tmp_path, scenario)


def test_failing_polls_do_not_make_the_loop_spin(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.cloud.error = UNAVAILABLE
        await harness.service.verb(job, "delete", {})
        harness.starts(job)[0].ends(0)
        rounds, before = harness.rounds(), harness.cloud.count("nodes")
        await asyncio.sleep(600)
        assert rounds() < 300
        assert harness.cloud.count("nodes") - before < 30
        assert harness.cloud.count("release", since=harness.clock() - 600) < 20
        harness.cloud.error = None
        await harness.until(lambda: not harness.cloud.held, within=400)

    run_scenario(tmp_path, scenario)


def test_a_new_server_does_not_spin_while_its_polls_fail(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.error = UNAVAILABLE
        await harness.create()
        rounds = harness.rounds()
        await asyncio.sleep(600)
        assert rounds() < 300
        assert harness.cloud.count("nodes") < 30

    run_scenario(tmp_path, scenario)


def test_a_new_server_that_has_not_seen_its_running_slice_does_not_spin(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.cloud.error = LOGIN_EXPIRED
        await harness.restart()
        rounds = harness.rounds()
        await asyncio.sleep(600)
        assert rounds() < 300
        harness.cloud.error = None
        await harness.until(lambda: len(harness.starts(job)) == 2, within=120)
        assert harness.status(job) == "RUNNING", "the new server listens to its hosts"

    run_scenario(tmp_path, scenario)


def test_a_new_server_whose_slice_is_listed_without_hosts_does_not_spin(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        ((name, node),) = harness.cloud.held.items()
        harness.cloud.held[name] = replace(node, endpoints=())
        await harness.restart()
        rounds = harness.rounds()
        await asyncio.sleep(600)
        assert rounds() < 300
        harness.cloud.held[name] = node
        await harness.until(lambda: len(harness.starts(job)) == 2, within=120)

    run_scenario(tmp_path, scenario)


def test_a_start_that_raises_backs_off_and_is_shown_as_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the archive is nowhere")

    monkeypatch.setattr("drumline.jobs.controller.sessions.build_program", broken)

    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        with caplog.at_level(logging.INFO):
            await asyncio.sleep(60)
        tracebacks = [r for r in caplog.records if r.exc_info]
        assert len(tracebacks) == 1
        assert len(caplog.records) < 40
        assert "the archive is nowhere" in harness.show(job)["reason"]
        assert "trying again" in harness.show(job)["reason"]
        monkeypatch.undo()
        monkeypatch.setattr("drumline.hosts.session.SliceSession", type(harness).sessions)
        await harness.reaches(job, "RUNNING", within=120)
        assert harness.show(job)["reason"] == ""

    run_scenario(tmp_path, scenario)


def test_a_refused_release_backs_off_and_is_shown(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.cloud.no_release = CloudError("Permission 'tpu.nodes.delete' denied on 'x'", 7)
        await harness.service.verb(job, "delete", {})
        await harness.reaches(job, "CANCELLED")
        began = harness.clock()
        await asyncio.sleep(HOUR)
        assert harness.cloud.count("release", since=began) < 25
        assert "tpu.nodes.delete is missing" in harness.show(job)["reason"]
        harness.cloud.no_release = None
        await harness.until(lambda: not harness.cloud.held, within=400)
        await harness.until(lambda: "is missing" not in harness.show(job)["reason"])

    run_scenario(tmp_path, scenario)


def test_a_listing_that_leaves_a_slice_out_moves_no_job(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        (name,) = harness.cloud.held
        harness.cloud.unlisted.add(name)
        await asyncio.sleep(HOUR)
        assert harness.status(job) == "RUNNING"
        assert harness.cloud.count("ask") == 1
        harness.cloud.requested.clear()
        harness.cloud.held.clear()
        await harness.until(lambda: harness.show(job)["preemptions"] == 1)
        assert len(harness.cloud.held) <= 1

    run_scenario(tmp_path, scenario)


def test_a_listing_that_leaves_a_slice_out_does_not_end_its_release(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        (name,) = harness.cloud.held
        harness.cloud.unlisted.add(name)
        harness.cloud.ignores_deletes = True
        await harness.service.verb(job, "delete", {})
        await harness.reaches(job, "CANCELLED", within=120)
        await asyncio.sleep(600)
        assert [row.name for row in harness.supervisor.store.releasing()] == [name]
        harness.cloud.ignores_deletes = False
        await harness.until(lambda: not harness.supervisor.store.releasing(), within=60)

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize("fault", ["denied", "without effect"])
def test_requests_do_not_add_up_while_deletes_fail(tmp_path: Path, fault: str) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("WAITING_FOR_RESOURCES", None)
        if fault == "denied":
            harness.cloud.no_release = CloudError("Permission denied", 7)
        harness.cloud.ignores_deletes = True
        await harness.create()
        await asyncio.sleep(6 * HOUR)
        assert len(harness.cloud.requested) == 2, "a request and the one that it replaces"
        harness.cloud.no_release, harness.cloud.ignores_deletes = None, False
        await harness.until(lambda: len(harness.cloud.requested) == 1, within=HOUR)

    run_scenario(tmp_path, scenario)
