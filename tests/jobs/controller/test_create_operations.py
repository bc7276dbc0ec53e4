"""Requests that the cloud accepts, with a create operation that succeeds or fails later."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from drumline.cloud.protocol import CloudError, OperationState
from tests.jobs.fakes import NO_CAPACITY, UNAVAILABLE, ServerHarness, run_scenario

VISIBLE = 60.0
INVALID = CloudError("Invalid value for runtimeVersion.", 3)


def test_a_creation_that_fails_later_is_a_refusal_with_its_own_message(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.creates = False
        harness.cloud.creation = OperationState(False)
        job = await harness.create()
        await asyncio.sleep(10)
        assert harness.cloud.count("ask") == 1
        harness.cloud.creation = OperationState(True, INVALID)
        await harness.reaches(job, "FAILED", within=30)
        shown = harness.show(job)
        assert "Invalid value for runtimeVersion." in shown["reason"]
        assert shown["preemptions"] == 0

    run_scenario(tmp_path, scenario)


def test_a_creation_without_capacity_is_repeated_and_no_preemption(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.creates = False
        harness.cloud.creation = OperationState(True, NO_CAPACITY)
        job = await harness.create()
        await asyncio.sleep(600)
        shown = harness.show(job)
        assert (shown["preemptions"], shown["ended"]) == (0, None)
        assert "no capacity" in shown["reason"]
        harness.cloud.creates, harness.cloud.creation = True, None
        await harness.reaches(job, "RUNNING", within=600)

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize("creation", [None, OperationState(True)])
def test_an_operation_without_a_result_leaves_the_request_a_minute(
    tmp_path: Path, creation: OperationState | None
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.creates, harness.cloud.creation = False, creation
        job = await harness.create()
        await harness.until(lambda: harness.cloud.count("ask") == 1)
        await asyncio.sleep(VISIBLE - 10)
        assert harness.cloud.count("ask") == 1
        harness.cloud.creates = True
        await harness.until(lambda: harness.cloud.count("ask") == 2, within=60)
        await harness.reaches(job, "RUNNING")

    run_scenario(tmp_path, scenario)


def test_an_unreadable_operation_causes_no_second_request(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.creates, harness.cloud.no_operation = False, UNAVAILABLE
        await harness.create()
        await asyncio.sleep(10 * VISIBLE)
        assert harness.cloud.count("ask") == 1
        harness.cloud.no_operation = None
        await harness.until(lambda: harness.cloud.count("ask") == 2)

    run_scenario(tmp_path, scenario)


def test_a_read_of_the_operation_that_fails_is_repeated_soon(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.creates, harness.cloud.creation = False, OperationState(False)
        job = await harness.create()
        await asyncio.sleep(10 * VISIBLE)
        harness.cloud.no_operation = UNAVAILABLE
        reads = harness.cloud.count("operation")
        await harness.until(lambda: harness.cloud.count("operation") > reads, within=20 * VISIBLE)
        harness.cloud.no_operation, harness.cloud.creation = None, OperationState(True, INVALID)
        await harness.reaches(job, "FAILED", within=30)

    run_scenario(tmp_path, scenario)


def test_the_operation_is_known_to_the_next_server(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.creates, harness.cloud.creation = False, OperationState(False)
        job = await harness.create()
        await harness.until(lambda: harness.cloud.count("operation") > 0)
        await harness.restart()
        harness.cloud.creation = OperationState(True, INVALID)
        await harness.reaches(job, "FAILED", within=30)

    run_scenario(tmp_path, scenario)


def test_the_operation_of_a_listed_request_is_not_read(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("WAITING_FOR_RESOURCES", None)
        await harness.create()
        await asyncio.sleep(600)
        assert harness.cloud.count("operation") == 0

    run_scenario(tmp_path, scenario)


def test_a_thousand_jobs_whose_requests_do_not_appear_cause_few_calls(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.creates, harness.cloud.creation = False, OperationState(False)
        zones = ["us-central2-b", "us-central1-a", "us-west4-a", "us-west1-c", "europe-west4-b"]
        for number in range(1000):
            kind: dict[str, Any] = {"accelerator": "v5litepod-16", "zones": [zones[1 + number % 4]]}
            await harness.create(**({} if number % 5 == 0 else kind))
        await asyncio.sleep(60)
        since = harness.clock()
        await asyncio.sleep(300)
        # A lookup by name is two calls, one for the request and one for its node.
        calls = sum(1 + (call.verb == "find") for call in harness.cloud.calls if call.at >= since)
        assert calls / 5 < 100

    run_scenario(tmp_path, scenario)


def test_a_released_request_that_may_still_appear_is_not_forgotten(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.creates = False
        job = await harness.create()
        await harness.until(lambda: harness.cloud.count("ask") == 1)
        await harness.service.verb(job, "delete", {})
        await asyncio.sleep(VISIBLE / 2)
        assert harness.service.store.releasing()
        await harness.until(lambda: not harness.service.store.releasing(), within=VISIBLE)

    run_scenario(tmp_path, scenario)


def test_a_release_is_not_done_while_its_slice_is_neither_listed_nor_gone(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        name = harness.show(job)["slice"]["name"]
        harness.cloud.ignores_deletes = True
        harness.cloud.unlisted.add(name)
        harness.cloud.no_find = UNAVAILABLE
        await harness.service.verb(job, "delete", {})
        await harness.reaches(job, "CANCELLED")
        await asyncio.sleep(600)
        assert [row.name for row in harness.service.store.releasing()] == [name]
        harness.cloud.ignores_deletes, harness.cloud.no_find = False, None
        await harness.until(lambda: not harness.service.store.releasing(), within=60)

    run_scenario(tmp_path, scenario)
