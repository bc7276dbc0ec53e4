"""Measure the server while it reads a long log: its memory, and the latency of other requests.

    python benchmarks/long_log.py

The benchmark creates a home with one finished job, and replaces the job's log with one of 500 MB.
The measurements that process every line use 50 MB.
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

LOG_MEGABYTES, LINEWISE_MEGABYTES = 500, 50
LINE = b"step 18400 loss 2.9134 grad 0.412 tokens/s 194989\n"
JOB = {"accelerator": "v4-8", "run": "echo hello", "workdir": None, "name": "long"}


def peak_megabytes(pid: int) -> float:
    """Return the peak memory of a process, in MB."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) / 1000


class ListRequests:
    """A client that requests the job list continuously and records the latencies."""

    def __init__(self, home: Path) -> None:
        """Create the client without starting it."""
        self._client = Client(home)
        self._stopped = threading.Event()
        self.latencies: list[float] = []
        self._thread = threading.Thread(target=self._request_lists)

    def _request_lists(self) -> None:
        while not self._stopped.is_set():
            start = time.perf_counter()
            self._client.list(all=True)
            self.latencies.append(time.perf_counter() - start)

    def __enter__(self) -> "ListRequests":
        """Start the requests."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the requests."""
        self._stopped.set()
        self._thread.join()


def measure(client: Client, job: str, name: str, options: dict[str, Any]) -> None:
    """Print a row."""
    start = time.perf_counter()
    with ListRequests(client.home) as list_requests:
        size = sum(len(chunk) for chunk in client.logs(job, **options))
    duration = time.perf_counter() - start
    status = client.server_status()
    assert status is not None
    latency = f"{max(list_requests.latencies) * 1000:11.0f} ms"
    print(
        f"{name:34}{size / 1e6:6.0f} MB{duration:7.1f} s{peak_megabytes(status['pid']):6.0f} MB"
        f"{latency}"
    )


def main() -> None:
    """Print the table."""
    home = Path(tempfile.mkdtemp(prefix="dl-log-"))
    client = Client(home)
    try:
        job = client.create(JOB)["id"]
        client.wait([job])
        log_folder = home / "logs" / job / "1"
        with (log_folder / "host-0.log").open("wb") as log:
            for _ in range(LOG_MEGABYTES):
                log.write(LINE * (1_000_000 // len(LINE)))
        status = client.server_status()
        assert status is not None
        print(f"{'':34}{'read':>9}{'time':>9}{'memory':>9}{'longest list':>14}")
        with ListRequests(home) as list_requests:
            time.sleep(1)
        idle_peak = peak_megabytes(status["pid"])
        print(
            f"{'no reader':34}{'':18}{idle_peak:6.0f} MB"
            f"{max(list_requests.latencies) * 1000:11.0f} ms"
        )
        measure(client, job, "logs", {})
        measure(client, job, "logs --tail 1000", {"tail": 1000})
        os.truncate(log_folder / "host-0.log", LINEWISE_MEGABYTES * 1_000_000)
        shutil.copyfile(log_folder / "host-0.log", log_folder / "host-1.log")
        measure(client, job, "logs --timestamps", {"times": True})
        measure(client, job, "logs --host all (2 hosts)", {"host": "all"})
    finally:
        client.stop_server()
        launch.stop(home / "emulator")
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
