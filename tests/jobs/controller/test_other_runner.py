"""Jobs on hosts without SSH: the job manager needs nothing but the protocol of a runner."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from drumline.hosts.protocol import Admit, HostAccess, Program, Runner, Session
from drumline.observed import ListedPlacement
from tests.jobs.fakes import FakeSession, ServerHarness, run_scenario


class PodRunner:
    """A runner whose hosts are pods. It needs no login, and knows them by name."""

    login = None

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.hosts: list[str] = []
        self.contacted: set[str] = set()

    async def find_hosts(self, listed: ListedPlacement, access: HostAccess) -> list[str]:
        del access
        return [f"pod-{index}" for index in range(len(listed.endpoints))]

    def session(
        self,
        program: Any,
        placement: str,
        hosts: Any,
        *,
        logs: Path,
        log_limit: int,
        clock: Callable[[], float],
        admit: Admit,
    ) -> Session:
        del logs, log_limit
        self.programs.append(program)
        self.hosts = hosts
        self.contacted.add(placement)
        return cast(Session, FakeSession(program, hosts, clock=clock, admit=admit))

    def was_contacted(self, placement: str) -> bool:
        return placement in self.contacted

    async def logins(
        self, listed: ListedPlacement, access: HostAccess, job_id: str, archive_sha: str | None
    ) -> list[dict[str, Any]]:
        del job_id, archive_sha
        return [{"pod": name} for name in await self.find_hosts(listed, access)]

    def forget(self, placement: str) -> None:
        self.contacted.remove(placement)


def test_a_job_runs_and_stops_on_hosts_without_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = PodRunner()
    runner: Runner = pods
    monkeypatch.setattr("tests.jobs.fakes.make_runner", lambda *_: runner)

    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(
            "python train.py", python={"kind": "docker", "image": "lab/x"}, setup="make data"
        )
        await harness.reaches(job, "RUNNING")
        assert [request.login for request in harness.cloud.asked] == [None]
        assert harness.cloud.count("keys") == 0
        assert pods.hosts == ["pod-0", "pod-1"]
        [program] = pods.programs
        assert (program.run, program.setup) == ("python train.py", "make data")
        assert (program.python.kind, program.python.image) == ("docker", "lab/x")
        assert await harness.service.hosts(job) == [{"pod": "pod-0"}, {"pod": "pod-1"}]
        await harness.restart()
        await harness.until(lambda: len(pods.programs) == 2)
        await harness.service.verb(job, "delete", {})
        await harness.reaches(job, "CANCELLED", within=120)
        assert harness.starts(job)[-1].stopped
        await harness.until(lambda: not pods.contacted, within=120)

    run_scenario(tmp_path, scenario)
