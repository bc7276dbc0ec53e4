"""The failures of test_jobman_failures that need a simulated cloud and virtual time."""

import asyncio
from pathlib import Path

import pytest

from drumline.cloud.protocol import CloudError
from drumline.hosts.session import HostPhase
from drumline.jobs.server.verbs import RequestError
from tests.hosts import stand_in
from tests.jobs.fakes import (
    HOUR,
    LOGIN_EXPIRED,
    NO_CAPACITY,
    UNAVAILABLE,
    ZONE,
    ServerHarness,
    run_scenario,
)


def test_04_failed_status_calls_end_no_waiting_job_and_leave_no_request(tmp_path: Path) -> None:
    """One failed status call ends every waiting job and leaves its request behind in the cloud."""

    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("WAITING_FOR_RESOURCES", None)
        jobs = [await harness.create() for _ in range(3)]
        await harness.until(lambda: len(harness.cloud.requested) == 3)
        harness.cloud.error = UNAVAILABLE
        await asyncio.sleep(HOUR)
        assert {harness.status(job) for job in jobs} == {"WAITING"}
        assert f"the cloud failed for {ZONE}" in harness.show(jobs[0])["reason"]
        harness.cloud.error = None
        await asyncio.sleep(60)
        assert {harness.status(job) for job in jobs} == {"WAITING"}
        # Requests that waited for an hour were replaced, and none was left behind.
        requested = [name.split("-")[2] for name in harness.cloud.requested]
        assert sorted(requested) == sorted(jobs)
        for job in jobs:
            await harness.service.verb(job, "delete", {})
        await harness.until(lambda: not harness.cloud.requested)

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize("error", [UNAVAILABLE, LOGIN_EXPIRED], ids=["unavailable", "login"])
def test_05_one_failed_status_call_deletes_no_healthy_slice(
    tmp_path: Path, error: CloudError
) -> None:
    """One failed status call deletes a healthy TPU."""

    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.cloud.error = error
        await asyncio.sleep(15)
        harness.cloud.error = None
        await asyncio.sleep(60)
        harness.cloud.error = error
        await asyncio.sleep(2 * HOUR)
        harness.cloud.error = None
        await asyncio.sleep(60)
        assert harness.status(job) == "RUNNING"
        assert harness.cloud.count("release") == 0
        assert harness.cloud.count("ask") == 1
        assert len(harness.starts(job)) == 1

    run_scenario(tmp_path, scenario)


def test_06_resume_of_a_queued_job_makes_no_burst_of_calls(tmp_path: Path) -> None:
    """`resume` of a queued job spins: over a thousand cloud calls in 12 s."""

    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("WAITING_FOR_RESOURCES", None)
        job = await harness.create()
        await harness.until(lambda: bool(harness.cloud.requested))
        await asyncio.sleep(30)
        since = harness.clock()
        for _ in range(6):
            answer = await harness.service.verb(job, "resume", {})
            assert answer["text"] == f"{job} is already WAITING"
            await asyncio.sleep(2)
        assert harness.cloud.count("ask", since) == 0
        # Two calls per poll, every 10 s.
        assert len([call for call in harness.cloud.calls if call.at >= since]) <= 4
        assert harness.status(job) == "WAITING"

    run_scenario(tmp_path, scenario)


def test_07_no_capacity_makes_few_create_calls_and_the_job_goes_on_waiting(tmp_path: Path) -> None:
    """No capacity: 999 create calls in 10 s, then it gives up."""

    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.refusal = NO_CAPACITY
        began = harness.clock()
        job = await harness.create()
        await asyncio.sleep(10)
        assert harness.cloud.count("ask") == 1
        await asyncio.sleep(4 * HOUR)
        assert harness.status(job) == "WAITING"
        assert f"no capacity in {ZONE}" in harness.show(job)["reason"]
        request_count = harness.cloud.count("ask", began)
        assert 10 <= request_count <= 25, "about four an hour, and not none"
        harness.cloud.refusal = None
        await harness.reaches(job, "RUNNING", within=1000)

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize(
    ("request_state", "node"), [("SUSPENDED", "PREEMPTED"), ("ACTIVE", "TERMINATED")]
)
def test_08_a_node_preempted_while_waited_for_is_replaced_at_the_next_look(
    tmp_path: Path, request_state: str, node: str
) -> None:
    """A node preempted while waited for is polled for seven days."""

    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.given = ("PROVISIONING", "CREATING")
        job = await harness.create()
        await harness.reaches(job, "STARTING")
        [first] = harness.cloud.requested
        harness.cloud.given = ("ACTIVE", "READY")
        harness.cloud.becomes(first, request_state, node)
        await harness.reaches(job, "RUNNING", within=30)
        assert harness.show(job)["slice"]["name"] != first
        assert harness.show(job)["preemptions"] == 1
        await harness.until(lambda: first not in harness.cloud.requested)

    run_scenario(tmp_path, scenario)


def test_09_an_expired_login_fails_no_job_and_all_go_on_after_the_next(tmp_path: Path) -> None:
    """When the cloud login expires, every task in the queue is failed one by one and the worker
    idles."""

    async def scenario(harness: ServerHarness) -> None:
        running = await harness.create()
        await harness.reaches(running, "RUNNING")
        harness.cloud.error = LOGIN_EXPIRED
        queued = [await harness.create() for _ in range(5)]
        await asyncio.sleep(2 * HOUR)
        assert harness.status(running) == "RUNNING"
        assert {harness.status(job) for job in queued} == {"WAITING"}
        reason = harness.show(queued[0])["reason"]
        assert reason.count("gcloud auth application-default login") == 1
        harness.cloud.error = None
        for job in queued:
            await harness.reaches(job, "RUNNING", within=120)
        assert {harness.show(job)["failures"] for job in queued} == {0}
        assert len(harness.starts(running)) == 1

    run_scenario(tmp_path, scenario)


def test_13_real_failures_are_counted_however_often_a_connection_was_lost(tmp_path: Path) -> None:
    """After one SSH retry, real failures are retried without end."""

    async def on_the_hosts() -> None:
        async with asyncio.timeout(120), stand_in.Slice(tmp_path / "hosts", 1) as slice_:
            run = 'echo up; while [ ! -e "$HOME/go" ]; do sleep 0.05; done; exit 3'
            session = slice_.session(stand_in.program(run=run))
            session.start()
            await stand_in.until(lambda: slice_.log(0) == b"up\n", "it runs")
            slice_.hosts[0].cut()
            (slice_.hosts[0].home / "go").touch()
            await stand_in.until(
                lambda: session.reports()[0].phase is HostPhase.EXITED, "the exit is seen"
            )
            assert session.reports()[0].exit_code == 3
            assert slice_.log(0) == b"up\n"

    asyncio.run(on_the_hosts())

    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(retry={"failures": 2})
        for attempt in range(1, 4):
            await harness.until(lambda n=attempt: len(harness.starts(job)) == n, 300)  # type: ignore[misc]
            await harness.reaches(job, "RUNNING")
            session = harness.starts(job)[-1]
            session.connection(there=False)
            await asyncio.sleep(60)
            session.connection(there=True)
            session.ends(3, "ValueError: batch 250")
        await harness.reaches(job, "FAILED", 300)
        await asyncio.sleep(HOUR)
        assert len(harness.starts(job)) == 3
        assert harness.show(job)["failures"] == 3
        assert not harness.cloud.requested

    run_scenario(tmp_path / "office", scenario)

    # Values in shells: test_nasty_names.py; tokens in logs: test_secrets.py.


def test_17_a_multi_region_bucket_is_refused_with_its_cost(tmp_path: Path) -> None:
    """A multi-region bucket passes the region check."""

    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.buckets = {"lab-data": "US", "lab-near": "US-CENTRAL2"}
        with pytest.raises(RequestError, match=r"gs://lab-data is in US, .*1 TB costs about \$\d+"):
            await harness.create(mounts={"/data": "gs://lab-data/c4"})
        assert harness.service.overview() == []
        await asyncio.sleep(60)
        assert harness.cloud.count("ask") == 0
        near = await harness.create(mounts={"/data": "gs://lab-near/c4"})
        await harness.reaches(near, "RUNNING")

    run_scenario(tmp_path, scenario)
