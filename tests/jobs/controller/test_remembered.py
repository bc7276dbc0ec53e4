"""The history of hosts across jobs and servers: reported, saved, refused, cleared."""

from pathlib import Path
from typing import Any

from drumline.cloud.protocol import CloudError
from drumline.jobs.controller.host_history import HealthMonitor
from tests.jobs.fakes import ServerHarness, run_scenario

VFIO = "open(/dev/vfio/0): Device or resource busy"


def hosts(harness: ServerHarness) -> dict[str, Any]:
    return {host["identity"]: host for host in harness.service.host_history.all()}


def test_a_host_that_starts_no_program_fails_two_jobs_and_is_refused_by_the_third(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        first, second = [await harness.create() for _ in range(2)]
        for job in (first, second):
            await harness.reaches(job, "RUNNING")
            harness.starts(job)[0].ends(1, VFIO, chip_error=VFIO)
            await harness.until(lambda job=job: harness.show(job)["bad_hosts"] == 1)  # type: ignore[misc]
        assert hosts(harness)["machine-0"]["state"] == "excluded"
        assert [e["job"] for e in hosts(harness)["machine-0"]["evidence"]] == [first, second]
        await harness.restart()
        assert hosts(harness)["machine-0"]["state"] == "excluded", "it outlives the server"
        third = await harness.create()
        await harness.until(lambda: "refused" in [e["kind"] for e in harness.show(third)["events"]])
        assert harness.show(third)["attempts_made"] == 1
        (reason,) = {e["text"] for e in harness.show(third)["events"] if e["kind"] == "refused"}
        assert reason.startswith("host 0, machine-0 is excluded: open(/dev/vfio/0)")
        for job in (first, second, third):
            harness.service.host_history.apply("forgive", {"identity": "machine-0"})
            await harness.reaches(job, "RUNNING")

    run_scenario(tmp_path, scenario)


def test_the_output_of_programs_alone_excludes_no_host(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        for number in range(4):
            job = await harness.create()
            await harness.reaches(job, "RUNNING")
            harness.starts(job)[0].ends(1, "F0000 Physical location: rack7")
            await harness.until(lambda job=job: harness.show(job)["bad_hosts"] == 1)  # type: ignore[misc]
            states = {host["state"] for host in hosts(harness).values()}
            assert states == {"good", "suspect"}, number
            await harness.service.verb(job, "delete", {})
        assert "rack7" not in hosts(harness)

    run_scenario(tmp_path, scenario)


def test_two_programs_that_start_elsewhere_exclude_the_host_where_they_did_not(
    tmp_path: Path,
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        for number in range(2):
            job = await harness.create()
            await harness.reaches(job, "RUNNING")
            harness.starts(job)[0].move_to("shelf")
            harness.starts(job)[0].ends(1, "Check failed: index_on_host() == i (0 vs. 1)")
            await harness.until(lambda job=job: len(harness.starts(job)) == 2)  # type: ignore[misc]
            assert hosts(harness)["shelf-0"]["state"] == "suspect", number
            await harness.reaches(job, "RUNNING")
            harness.starts(job)[1].send_heartbeat(step=1)
        await harness.until(lambda: hosts(harness)["shelf-0"]["state"] == "excluded")

    run_scenario(tmp_path, scenario)


def test_a_job_that_starts_nowhere_is_at_fault_itself(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        for number in range(3):
            await harness.reaches(job, "RUNNING")
            session = harness.starts(job)[number]
            session.move_to(f"shelf-{number}")
            session.ends(139)
            await harness.until(lambda n=number: harness.show(job)["bad_hosts"] == n + 1)  # type: ignore[misc]
            accused = [name for name, host in hosts(harness).items() if host["state"] != "good"]
            assert len(accused) == (number + 1 if number < 2 else 0)

    run_scenario(tmp_path, scenario)


class Google:
    """A health source that reports the answer of a test, or nothing."""

    def __init__(self) -> None:
        self.says: dict[str, str] | None = None

    async def unhealthy(self) -> dict[str, str]:
        if self.says is None:
            raise CloudError("permission denied", 7)
        return self.says


def test_an_unhealthy_host_gets_evidence_once(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        boss, google = harness.supervisor, Google()
        hearing = HealthMonitor(
            google, boss.records, boss.sessions.reports, boss.host_history, harness.clock
        )
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        await hearing.query()
        google.says = {"i-1": "BAD_TPU_CHIP", "i-99": "BAD_TPU_CHIP"}
        for _ in range(3):
            await hearing.query()
        host_list = hosts(harness)
        assert (host_list["machine-0"]["state"], host_list["machine-1"]["state"]) == (
            "good",
            "excluded",
        )
        (evidence,) = host_list["machine-1"]["evidence"]
        assert (evidence["proof"], evidence["job"]) == ("witness", job)
        assert evidence["text"] == "the cloud calls it unhealthy: BAD_TPU_CHIP"
        assert harness.status(job) == "RUNNING"

    run_scenario(tmp_path, scenario)
