"""An emulator that was killed and started again: another port, another token, an empty cloud."""

import os
import signal
import socket

from drumline.cloud.emulator import launch
from tests.jobs.world import World


def test_a_job_goes_on_in_an_emulator_that_came_back_on_another_port(world: World) -> None:
    job = world.count(20, accelerator="v4-8")
    emulator = world.home / "emulator"
    world.until(lambda: (world.saved(job) / "saved-0").exists(), what="the first step")
    server = world.client.server_status()
    before = launch.find(emulator)
    assert server is not None
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    world.until(lambda: launch.find(emulator) is None, what="the emulator to be gone")
    # Somebody else has the port now, and is not to be shown the token.
    port = int(before.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as stranger:
        world.start_emulator()
        shown = world.end(job)
        stranger.setblocking(False)
        try:
            stranger.accept()[0].close()
        except BlockingIOError:
            pass
        else:
            raise AssertionError("the server called where the emulator was")
    assert shown["status"] == "SUCCEEDED"
    assert shown["failures"] == 0
    now = world.client.server_status()
    assert now is not None
    assert now["pid"] == server["pid"]
    world.cloud_is_empty()
