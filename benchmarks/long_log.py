"""What reading a long log costs the server: its memory, and how long others wait meanwhile.

    python benchmarks/long_log.py

A home of its own, one job that has ended, and a log of 500 MB in the place of its own; of 50 MB
where every line is handled.
"""

import os
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from drumline.cloud.emulator import launch
from drumline.jobs.client import Client

MEGABYTES, BY_LINES = 500, 50
LINE = b"step 18400 loss 2.9134 grad 0.412 tokens/s 194989\n"
JOB = {"accelerator": "v4-8", "run": "echo hello", "workdir": None, "name": "long"}


def peak(pid: int) -> float:
    """The most memory a process has had, in MB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


class Others:
    """Somebody who asks for the list all the time."""

    def __init__(self, home: Path) -> None:
        """Not yet."""
        self._client = Client(home)
        self._done = threading.Event()
        self.waits: list[float] = []
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._done.is_set():
            begin = time.perf_counter()
            self._client.list(all=True)
            self.waits.append(time.perf_counter() - begin)

    def __enter__(self) -> "Others":
        """Begin to ask."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop asking."""
        self._done.set()
        self._thread.join()


def measure(client: Client, job: str, name: str, wanted: dict[str, Any]) -> None:
    """Print a row."""
    begin = time.perf_counter()
    with Others(client.home) as others:
        size = sum(len(piece) for piece in client.logs(job, **wanted))
    took = time.perf_counter() - begin
    status = client.server_status()
    assert status is not None
    waited = f"{max(others.waits) * 1000:11.0f} ms"
    print(f"{name:34}{size / 1e6:6.0f} MB{took:7.1f} s{peak(status['pid']):6.0f} MB{waited}")


def main() -> None:
    """Print the table."""
    home = Path(tempfile.mkdtemp(prefix="dl-log-"))
    client = Client(home)
    try:
        job = client.create(JOB)["id"]
        client.wait([job])
        folder = home / "logs" / job / "1"
        with (folder / "host-0.log").open("wb") as log:
            for _ in range(MEGABYTES):
                log.write(LINE * (1_000_000 // len(LINE)))
        status = client.server_status()
        assert status is not None
        print(f"{'':34}{'read':>9}{'time':>9}{'memory':>9}{'longest list':>14}")
        with Others(home) as others:
            time.sleep(1)
        before = peak(status["pid"])
        print(f"{'no reader':34}{'':18}{before:6.0f} MB{max(others.waits) * 1000:11.0f} ms")
        measure(client, job, "logs", {})
        measure(client, job, "logs --tail 1000", {"tail": 1000})
        os.truncate(folder / "host-0.log", BY_LINES * 1_000_000)
        shutil.copyfile(folder / "host-0.log", folder / "host-1.log")
        measure(client, job, "logs --timestamps", {"times": True})
        measure(client, job, "logs --host all (2 hosts)", {"host": "all"})
    finally:
        client.stop_server()
        launch.stop(home / "emulator")
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
