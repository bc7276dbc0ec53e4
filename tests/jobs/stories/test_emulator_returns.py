"""An emulator that was killed and restarted: new port, new token, empty cloud."""

import os
import signal
import socket

from drumline.cloud.emulator import launch
from tests.jobs.installation import Installation


def test_a_job_continues_after_the_emulator_restarted_on_another_port(
    installation: Installation,
) -> None:
    job = installation.count(20, accelerator="v4-8")
    emulator = installation.home / "emulator"
    installation.until(
        lambda: (installation.saved(job) / "saved-0").exists(), what="the first step"
    )
    server = installation.client.server_status()
    before = launch.find(emulator)
    assert server is not None
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    installation.until(lambda: launch.find(emulator) is None, what="the emulator to be gone")
    # Another process has the port now, and must not receive the token.
    port = int(before.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as stranger:
        installation.start_emulator()
        shown = installation.end(job)
        stranger.setblocking(False)
        try:
            stranger.accept()[0].close()
        except BlockingIOError:
            pass
        else:
            raise AssertionError("the server called where the emulator was")
    assert shown["status"] == "SUCCEEDED"
    assert shown["failures"] == 0
    now = installation.client.server_status()
    assert now is not None
    assert now["pid"] == server["pid"]
    installation.cloud_is_empty()
