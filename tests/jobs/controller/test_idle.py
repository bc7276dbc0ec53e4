"""A server with nothing to do leaves by itself, and the next command starts another."""

from pathlib import Path

import pytest

from tests.jobs.pretend import UNAVAILABLE, Office, play
from tests.jobs.world import World


@pytest.fixture
def restless(world: World) -> World:
    """A server that leaves within a second."""
    (world.home / "config.yaml").write_text("idle_minutes: 0.01\n")
    return world


def test_a_server_with_nothing_to_do_leaves_and_the_next_command_starts_it_again(
    restless: World,
) -> None:
    assert restless.client.list() == []
    first = restless.client.server_status()
    assert first is not None
    assert 0 <= first["leaves_in"] <= 0.6
    restless.until(lambda: restless.client.server_status() is None, what="the server to leave")
    assert not (restless.home / "server.sock").exists()
    job = restless.create("sleep 600")
    restless.reaches(job, "RUNNING")
    second = restless.client.server_status()
    assert second is not None
    assert second["pid"] != first["pid"]
    assert (second["leaves_in"], second["stays"]) == (None, True)
    restless.client.delete(job)
    restless.until(lambda: restless.client.server_status() is None, what="the server to leave")
    # It did not leave before the slice was gone.
    assert restless.resources() == []


def test_what_needs_the_server(tmp_path: Path) -> None:
    async def story(office: Office) -> None:
        assert not office.supervisor.busy()
        job = await office.create()
        assert office.supervisor.busy()
        await office.reaches(job, "RUNNING")
        await office.desk.verb(job, "cancel", {})
        await office.reaches(job, "CANCELLED")
        assert office.supervisor.busy()  # by the slice that is kept
        office.cloud.trouble = UNAVAILABLE
        await office.desk.verb(job, "delete", {})
        await office.until(lambda: office.show(job)["slice"] is None)
        assert office.supervisor.busy()  # by the slice that is to go
        office.cloud.trouble = None
        await office.until(lambda: not office.supervisor.busy(), within=600)

    play(tmp_path, story)
