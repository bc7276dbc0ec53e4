"""Waits that end with the server, the names of jobs, and the login to hosts."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.hosts.connection import KnownHosts
from drumline.hosts.values import Address
from drumline.jobs.server.verbs import RequestError
from tests.jobs.fakes import ServerHarness, run_scenario

WAITS: dict[str, Callable[[ServerHarness, str], Awaitable[Any]]] = {
    "events": lambda harness, job: harness.service.events(job, after=10**9, wait=3600),
    "clean": lambda harness, job: harness.service.verb(job, "clean", {}),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_cancelled_wait_for_events_stops(tmp_path: Path, wait: str) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.running.cancel()  # from here on, only the test runs rounds
        await asyncio.wait({harness.running})
        waiting = asyncio.ensure_future(WAITS[wait](harness, job))
        await asyncio.sleep(0.1)
        async with harness.supervisor.changed:
            harness.supervisor.changed.notify_all()
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=30)
        assert waiting.cancelled()

    run_scenario(tmp_path, scenario)


def test_a_name_stands_for_the_one_job_that_has_it(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        service = harness.service
        first = await harness.create(name="llama 1b/ä")
        number = await harness.create(name="2024")
        assert service.ids(["llama 1b/ä", "2024"]) == [first, number]
        with pytest.raises(RequestError, match=r"there is no job llama; drumline list --all"):
            service.ids(["llama"])
        hint = f"there is no job 002024; a number is always an id; .* this name is {number}"
        with pytest.raises(RequestError, match=hint):
            service.show("002024")
        second = await harness.create(name="llama 1b/ä")
        await harness.reaches(first, "RUNNING")
        await harness.reaches(second, "RUNNING")
        with pytest.raises(RequestError) as error:
            service.ids(["llama 1b/ä", "x", "2024"])
        assert str(error.value).splitlines() == [
            "2 jobs are named llama 1b/ä; give one of their ids instead:",
            f"  {second} RUNNING",
            f"  {first} RUNNING",
            "there is no job x; drumline list --all lists all jobs",
        ]
        # A deleted job keeps its name only if no other job has it.
        await service.verb(first, "delete", {})
        assert service.ids(["llama 1b/ä"]) == [second]
        await service.verb(second, "clean", {})
        assert service.ids(["llama 1b/ä"]) == [first]

    run_scenario(tmp_path, scenario)


def test_the_login_to_a_host_says_if_its_key_is_known(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        hosts = await harness.service.hosts(job)
        assert [host["has_host_key"] for host in hosts] == [False, False]
        address = Address(hosts[1]["ssh_ip"], hosts[1]["ssh_port"], hosts[1]["ip"])
        KnownHosts(Path(hosts[1]["known_hosts"])).pin(address, "ssh-ed25519 AAAA")
        hosts = await harness.service.hosts(job)
        assert [host["has_host_key"] for host in hosts] == [False, True]

    run_scenario(tmp_path, scenario)
