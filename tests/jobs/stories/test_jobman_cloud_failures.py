"""The failures of test_jobman_failures that need a cloud and hours: both are pretended here."""

import asyncio
from pathlib import Path

import pytest

from drumline.cloud.protocol import CloudError
from drumline.hosts.session import HostPhase
from drumline.jobs.server.verbs import RequestError
from tests.hosts import stand_in
from tests.jobs.pretend import (
    HOUR,
    LOGIN_EXPIRED,
    NO_CAPACITY,
    UNAVAILABLE,
    ZONE,
    Office,
    play,
)


def test_04_failed_status_calls_end_no_waiting_job_and_leave_no_request(tmp_path: Path) -> None:
    """One failed status call ends every waiting job and leaves its request behind in the cloud."""

    async def story(office: Office) -> None:
        office.cloud.given = ("WAITING_FOR_RESOURCES", None)
        jobs = [await office.create() for _ in range(3)]
        await office.until(lambda: len(office.cloud.requested) == 3)
        asked = set(office.cloud.requested)
        office.cloud.trouble = UNAVAILABLE
        await asyncio.sleep(HOUR)
        assert {office.status(job) for job in jobs} == {"WAITING"}
        assert "no answer from the cloud" in office.show(jobs[0])["reason"]
        office.cloud.trouble = None
        await asyncio.sleep(60)
        assert {office.status(job) for job in jobs} == {"WAITING"}
        assert set(office.cloud.requested) == asked
        for job in jobs:
            await office.desk.verb(job, "delete", {})
        await office.until(lambda: not office.cloud.requested)

    play(tmp_path, story)


@pytest.mark.parametrize("error", [UNAVAILABLE, LOGIN_EXPIRED], ids=["unavailable", "login"])
def test_05_one_failed_status_call_deletes_no_healthy_slice(
    tmp_path: Path, error: CloudError
) -> None:
    """One failed status call deletes a healthy TPU."""

    async def story(office: Office) -> None:
        job = await office.create()
        await office.reaches(job, "RUNNING")
        office.cloud.trouble = error
        await asyncio.sleep(15)
        office.cloud.trouble = None
        await asyncio.sleep(60)
        office.cloud.trouble = error
        await asyncio.sleep(2 * HOUR)
        office.cloud.trouble = None
        await asyncio.sleep(60)
        assert office.status(job) == "RUNNING"
        assert office.cloud.count("release") == 0
        assert office.cloud.count("ask") == 1
        assert len(office.starts(job)) == 1

    play(tmp_path, story)


def test_06_resume_of_a_queued_job_makes_no_burst_of_calls(tmp_path: Path) -> None:
    """`resume` of a queued job spins: over a thousand cloud calls in 12 s."""

    async def story(office: Office) -> None:
        office.cloud.given = ("WAITING_FOR_RESOURCES", None)
        job = await office.create()
        await office.until(lambda: bool(office.cloud.requested))
        await asyncio.sleep(30)
        since = office.clock()
        for _ in range(6):
            told = await office.desk.verb(job, "resume", {})
            assert told["text"] == f"{job} is already WAITING"
            await asyncio.sleep(2)
        assert office.cloud.count("ask", since) == 0
        # Two calls a look, every 10 s.
        assert len([call for call in office.cloud.calls if call.at >= since]) <= 4
        assert office.status(job) == "WAITING"

    play(tmp_path, story)


def test_07_no_capacity_makes_few_create_calls_and_the_job_goes_on_waiting(tmp_path: Path) -> None:
    """No capacity: 999 create calls in 10 s, then it gives up."""

    async def story(office: Office) -> None:
        office.cloud.refusal = NO_CAPACITY
        began = office.clock()
        job = await office.create()
        await asyncio.sleep(10)
        assert office.cloud.count("ask") == 1
        await asyncio.sleep(4 * HOUR)
        assert office.status(job) == "WAITING"
        assert f"no capacity in {ZONE}" in office.show(job)["reason"]
        asked = office.cloud.count("ask", began)
        assert 10 <= asked <= 25, "about four an hour, and not none"
        office.cloud.refusal = None
        await office.reaches(job, "RUNNING", within=1000)

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("request_state", "node"), [("SUSPENDED", "PREEMPTED"), ("ACTIVE", "TERMINATED")]
)
def test_08_a_node_preempted_while_waited_for_is_replaced_at_the_next_look(
    tmp_path: Path, request_state: str, node: str
) -> None:
    """A node preempted while waited for is polled for seven days."""

    async def story(office: Office) -> None:
        office.cloud.given = ("PROVISIONING", "CREATING")
        job = await office.create()
        await office.reaches(job, "STARTING")
        [first] = office.cloud.requested
        office.cloud.given = ("ACTIVE", "READY")
        office.cloud.becomes(first, request_state, node)
        await office.reaches(job, "RUNNING", within=30)
        assert office.show(job)["slice"]["name"] != first
        assert office.show(job)["preemptions"] == 1
        await office.until(lambda: first not in office.cloud.requested)

    play(tmp_path, story)


def test_09_an_expired_login_fails_no_job_and_all_go_on_after_the_next(tmp_path: Path) -> None:
    """When the cloud login expires, every task in the queue is failed one by one and the worker
    idles."""

    async def story(office: Office) -> None:
        running = await office.create()
        await office.reaches(running, "RUNNING")
        office.cloud.trouble = LOGIN_EXPIRED
        queued = [await office.create() for _ in range(5)]
        await asyncio.sleep(6 * HOUR)
        assert office.status(running) == "RUNNING"
        assert {office.status(job) for job in queued} == {"WAITING"}
        told = office.show(queued[0])["reason"]
        assert told.count("gcloud auth application-default login") == 1
        office.cloud.trouble = None
        for job in queued:
            await office.reaches(job, "RUNNING", within=120)
        assert {office.show(job)["failures"] for job in queued} == {0}
        assert len(office.starts(running)) == 1

    play(tmp_path, story)


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

    async def story(office: Office) -> None:
        job = await office.create(retry={"failures": 2})
        for attempt in range(1, 4):
            await office.until(lambda n=attempt: len(office.starts(job)) == n, 300)  # type: ignore[misc]
            await office.reaches(job, "RUNNING")
            session = office.starts(job)[-1]
            session.connection(there=False)
            await asyncio.sleep(60)
            session.connection(there=True)
            session.ends(3, "ValueError: batch 250")
        await office.reaches(job, "FAILED", 300)
        await asyncio.sleep(HOUR)
        assert len(office.starts(job)) == 3
        assert office.show(job)["failures"] == 3
        assert not office.cloud.requested

    play(tmp_path / "office", story)

    # Values in shells: test_nasty_names.py; tokens in logs: test_secrets.py.


def test_17_a_multi_region_bucket_is_refused_with_its_cost(tmp_path: Path) -> None:
    """A multi-region bucket passes the region check."""

    async def story(office: Office) -> None:
        office.cloud.buckets = {"lab-data": "US", "lab-near": "US-CENTRAL2"}
        with pytest.raises(RequestError, match=r"gs://lab-data is in US, .*1 TB costs about \$\d+"):
            await office.create(mounts={"/data": "gs://lab-data/c4"})
        assert office.desk.overview() == []
        await asyncio.sleep(60)
        assert office.cloud.count("ask") == 0
        near = await office.create(mounts={"/data": "gs://lab-near/c4"})
        await office.reaches(near, "RUNNING")

    play(tmp_path, story)
