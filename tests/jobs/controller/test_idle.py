"""An idle server exits, and the next command starts another."""

from pathlib import Path

import pytest

from tests.jobs.fakes import UNAVAILABLE, ServerHarness, run_scenario
from tests.jobs.installation import Installation


@pytest.fixture
def restless(installation: Installation) -> Installation:
    """An installation whose server exits within a second."""
    (installation.home / "config.yaml").write_text("idle_minutes: 0.01\n")
    return installation


def test_an_idle_server_exits_and_the_next_command_starts_it_again(
    restless: Installation,
) -> None:
    assert restless.client.list() == []
    first = restless.client.server_status()
    assert first is not None
    assert 0 <= first["leaves_in"] <= 0.6
    restless.until(lambda: restless.client.server_status() is None, what="the server to leave")
    assert not (restless.home / "server.sock").exists()
    job = restless.create("sleep 600", accelerator="v4-8")
    restless.reaches(job, "RUNNING")
    second = restless.client.server_status()
    assert second is not None
    assert second["pid"] != first["pid"]
    assert (second["leaves_in"], second["stays"]) == (None, True)
    restless.client.delete(job)
    restless.until(lambda: restless.client.server_status() is None, what="the server to leave")
    # It did not exit before the slice was deleted.
    assert restless.resources() == []


def test_a_job_and_its_slice_keep_the_server_busy(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        assert not harness.supervisor.busy()
        job = await harness.create()
        assert harness.supervisor.busy()
        await harness.reaches(job, "RUNNING")
        await harness.service.verb(job, "cancel", {})
        await harness.reaches(job, "CANCELLED")
        assert harness.supervisor.busy()  # busy with the slice that is kept
        harness.cloud.error = UNAVAILABLE
        await harness.service.verb(job, "delete", {})
        await harness.until(lambda: harness.show(job)["slice"] is None)
        assert harness.supervisor.busy()  # busy with the slice that is being released
        harness.cloud.error = None
        await harness.until(lambda: not harness.supervisor.busy(), within=600)

    run_scenario(tmp_path, scenario)
