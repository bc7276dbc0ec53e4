"""A thousand jobs that wait in six zones: what the server costs, beside Jobman's figures.

    .venv/bin/python benchmarks/thousand_jobs.py

The emulator has no capacity, and the server keeps the pace it keeps at Google (two list calls a
zone every 10 seconds). Jobman's figures were measured with 10 and 40 jobs on a machine of the same
size; it has one process a job, so a thousand were not tried.
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
            begin = time.perf_counter()
            for _ in range(JOBS):
                client.create(spec)
            creating = time.perf_counter() - begin
            time.sleep(SETTLE_SECONDS)
            status = client.server_status()
            assert status is not None
            pid = int(status["pid"])
            calls, cpu, began = (
                launch.control(emulator, "status")["total"],
                cpu_seconds(pid),
                time.time(),
            )
            time.sleep(MEASURE_SECONDS)
            spent = time.time() - began
            calls = launch.control(emulator, "status")["total"] - calls
            cpu = cpu_seconds(pid) - cpu
            drumline = str(Path(sys.executable).with_name("drumline"))
            listing = median_seconds([drumline, "list"], home)
            base = median_seconds([sys.executable, "-c", "pass"], home)
            waiting = sum(job["status"] in {"QUEUED", "WAITING"} for job in client.list())
            rows = [
                ("jobs waiting", f"{waiting:,}", "40"),
                ("cloud calls a minute", f"{calls * 60 / spent:.0f}", "160"),
                ("memory (PSS)", f"{memory_mb(pid):.0f} MB", "4,041 MB"),
                ("CPU of the server", f"{cpu / spent:.1%}", "–"),
                ("creating them, one by one", f"{creating:.1f} s", "71.1 s"),
                ("list", f"{listing * 1000:.0f} ms", "2,700 ms"),
                ("list, times python -c pass", f"{listing / base:.1f}×", "180×"),
            ]
            print(f"{'':28}{'Drumline':>12}{'Jobman':>12}")
            for name, ours, theirs in rows:
                print(f"{name:28}{ours:>12}{theirs:>12}")
        finally:
            client.stop_server()
            launch.stop(emulator)


if __name__ == "__main__":
    main()
