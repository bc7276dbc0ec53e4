"""Measure the server with a thousand waiting jobs in six zones, next to Jobman's figures.

    .venv/bin/python benchmarks/thousand_jobs.py

The emulator has no capacity, and the server polls at the rate that it uses on Google Cloud (two
list calls per zone every 10 seconds). Jobman's figures were measured with 10 and 40 jobs on a
machine of the same size. Jobman runs one process per job, so it was not tried with a thousand.
"""

import sys
import tempfile
import time
from pathlib import Path

from drumline.cloud.emulator import launch
from drumline.jobs.client import Client
from many_jobs import ACCELERATOR, ZONES
from processes import cpu_seconds, median_seconds, memory_mb

JOBS = 1000
SETTLE_SECONDS = 20.0
MEASURE_SECONDS = 60.0


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="dl-") as folder:
        home = Path(folder)
        home.chmod(0o700)
        zones = ", ".join(ZONES)
        (home / "config.yaml").write_text(f"pace: google\nzones: [{zones}]\n")
        emulator = home / "emulator"
        launch.ensure_running(emulator)
        client = Client(home)
        try:
            for zone in ZONES:
                launch.control(emulator, "capacity", zone=zone, accelerator=ACCELERATOR, chips=0)
            spec = {
                "name": "waits", "accelerator": [ACCELERATOR], "zones": ZONES,
                "workdir": None, "run": "true",
            }  # fmt: skip
            start = time.perf_counter()
            for _ in range(JOBS):
                client.create(spec)
            creation_seconds = time.perf_counter() - start
            time.sleep(SETTLE_SECONDS)
            status = client.server_status()
            assert status is not None
            pid = int(status["pid"])
            call_count, server_cpu, interval_start = (
                launch.control(emulator, "status")["total"],
                cpu_seconds(pid),
                time.time(),
            )
            time.sleep(MEASURE_SECONDS)
            interval = time.time() - interval_start
            call_count = launch.control(emulator, "status")["total"] - call_count
            server_cpu = cpu_seconds(pid) - server_cpu
            drumline = str(Path(sys.executable).with_name("drumline"))
            list_seconds = median_seconds([drumline, "list"], home)
            python_seconds = median_seconds([sys.executable, "-c", "pass"], home)
            waiting_count = sum(job["status"] in {"QUEUED", "WAITING"} for job in client.list())
            rows = [
                ("jobs waiting", f"{waiting_count:,}", "40"),
                ("cloud calls a minute", f"{call_count * 60 / interval:.0f}", "160"),
                ("memory (PSS)", f"{memory_mb(pid):.0f} MB", "4,041 MB"),
                ("CPU of the server", f"{server_cpu / interval:.1%}", "–"),
                ("creating them, one by one", f"{creation_seconds:.1f} s", "71.1 s"),
                ("list", f"{list_seconds * 1000:.0f} ms", "2,700 ms"),
                ("list, times python -c pass", f"{list_seconds / python_seconds:.1f}×", "180×"),
            ]
            print(f"{'':28}{'Drumline':>12}{'Jobman':>12}")
            for name, drumline_value, jobman_value in rows:
                print(f"{name:28}{drumline_value:>12}{jobman_value:>12}")
        finally:
            client.stop_server()
            launch.stop(emulator)


if __name__ == "__main__":
    main()
