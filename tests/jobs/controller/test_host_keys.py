"""Published host keys and instance names that cannot be read."""

from pathlib import Path
from typing import Any

import pytest

from drumline.cloud.protocol import CloudError
from drumline.hosts.connection import KnownHosts
from drumline.hosts.values import Address
from tests.jobs.fakes import HOUR, LOGIN_EXPIRED, UNAVAILABLE, ServerHarness, run_scenario

DENIED = CloudError(
    "Permission 'tpu.nodes.get' denied on 'projects/lab/locations/us-central2-b/nodes/n'", 7
)
THROUGH_IAP: dict[str, Any] = {
    "ssh": {"proxy_command": "gcloud compute start-iap-tunnel %n %p --zone %z"}
}


def test_no_data_is_sent_to_hosts_with_unreadable_keys(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.no_keys = UNAVAILABLE
        job = await harness.create()
        await harness.until(lambda: harness.cloud.count("keys") >= 3, within=600)
        assert harness.starts(job) == []
        note = str(harness.show(job))
        assert "the SSH host keys of dl-" in note
        assert "nothing is sent to its hosts" in note
        harness.cloud.no_keys = None
        await harness.reaches(job, "RUNNING", within=120)

    run_scenario(tmp_path, scenario)


def test_keys_that_were_pinned_before_are_enough(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        name = str(next(iter(harness.cloud.held)))
        known_hosts = KnownHosts(harness.supervisor.folders.known_hosts / name)
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


def test_a_missing_permission_ends_the_job_with_its_name(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.no_keys = DENIED
        job = await harness.create()
        await harness.reaches(job, "FAILED", within=900)
        reason = harness.show(job)["reason"]
        assert "the SSH host keys of dl-" in reason
        assert "the permission tpu.nodes.get is missing" in reason
        assert "roles/tpu.viewer" in reason
        assert harness.starts(job) == []
        await harness.until(lambda: not harness.cloud.held)

    run_scenario(tmp_path, scenario)


def test_a_permission_that_is_granted_in_time_lets_the_job_run(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.no_keys = DENIED
        job = await harness.create()
        await harness.until(lambda: harness.cloud.count("keys") >= 3, within=300)
        harness.cloud.no_keys = None
        await harness.reaches(job, "RUNNING", within=120)
        assert len(harness.cloud.asked) == 1

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize("error", [UNAVAILABLE, LOGIN_EXPIRED])
def test_an_outage_or_an_expired_login_does_not_end_the_job(
    tmp_path: Path, error: CloudError
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.no_keys = error
        job = await harness.create()
        await harness.until(lambda: harness.cloud.count("keys") >= 60, within=2 * HOUR)
        harness.cloud.no_keys = None
        await harness.reaches(job, "RUNNING", within=120)
        assert len(harness.cloud.asked) == 1

    run_scenario(tmp_path, scenario)


def test_a_permission_that_is_taken_away_does_not_end_a_running_program(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        harness.cloud.no_keys = DENIED
        await harness.restart()
        await harness.until(lambda: harness.cloud.count("keys") >= 60, within=2 * HOUR)
        assert harness.status(job) == "RUNNING"
        assert "the permission tpu.nodes.get is missing" in str(harness.show(job))
        harness.cloud.no_keys = None
        await harness.until(lambda: len(harness.starts(job)) == 2, within=120)

    run_scenario(tmp_path, scenario)


def test_instance_names_that_are_not_published_end_the_job(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.names_published = False
        job = await harness.create(**THROUGH_IAP)
        await harness.reaches(job, "FAILED", within=900)
        reason = harness.show(job)["reason"]
        assert "the cloud publishes no names of the instances" in reason
        assert "compute.disableGuestAttributesAccess" in reason
        await harness.until(lambda: not harness.cloud.held)

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize("error", [UNAVAILABLE, DENIED, None])
def test_a_job_whose_instance_names_are_unknown_is_cancelled(
    tmp_path: Path, error: CloudError | None
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        harness.cloud.no_names, harness.cloud.names_published = error, False
        job = await harness.create(**THROUGH_IAP)
        await harness.until(lambda: harness.cloud.count("names") >= 1)
        await harness.service.verb(job, "cancel", {})
        await harness.reaches(job, "CANCELLED", within=120)

    run_scenario(tmp_path, scenario)
