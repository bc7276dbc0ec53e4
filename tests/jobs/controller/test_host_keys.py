"""Published host keys that cannot be read for a while."""

from pathlib import Path

from drumline.hosts.connection import KnownHosts
from drumline.hosts.values import Address
from tests.jobs.fakes import UNAVAILABLE, ServerHarness, run_scenario


def test_no_data_is_sent_to_hosts_with_unreadable_keys(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.no_keys = UNAVAILABLE
        job = await harness.create()
        await harness.until(lambda: harness.cloud.count("keys") >= 3, within=600)
        assert harness.starts(job) == []
        note = str(harness.show(job))
        assert "the SSH host keys of dl-" in note
        assert "nothing is sent to its hosts yet" in note
        harness.cloud.no_keys = None
        await harness.reaches(job, "RUNNING", within=120)

    run_scenario(tmp_path, scenario)


def test_keys_that_were_pinned_before_are_enough(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        name = str(next(iter(harness.cloud.held)))
        known_hosts = KnownHosts(harness.supervisor.folders.known_hosts(name))
        for index in range(2):
            address = Address(f"34.0.0.{index}", 22, f"10.0.0.{index}")
            known_hosts.pin(address, f"ssh-ed25519 AAAA{index}")
        harness.cloud.no_keys = UNAVAILABLE
        await harness.restart()
        await harness.until(lambda: len(harness.starts(job)) == 2)

    run_scenario(tmp_path, scenario)


def test_a_job_that_was_never_sent_is_cancelled_at_once(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.no_keys = UNAVAILABLE
        job = await harness.create()
        await harness.until(lambda: harness.cloud.count("keys") >= 1)
        await harness.service.verb(job, "delete", {})
        await harness.until(lambda: harness.show(job)["ended"] is not None, within=120)

    run_scenario(tmp_path, scenario)


def test_a_running_job_is_not_cancelled_while_nobody_confirms_the_stop(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.cloud.no_keys = UNAVAILABLE
        await harness.restart()
        await harness.service.verb(job, "cancel", {})
        await harness.until(lambda: "cannot be reached" in str(harness.show(job)), within=120)
        assert harness.show(job)["ended"] is None

    run_scenario(tmp_path, scenario)
