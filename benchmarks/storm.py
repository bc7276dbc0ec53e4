"""Run fifty counting jobs under random faults of servers, clouds, slices, clocks and disks.

    .venv/bin/python benchmarks/storm.py [JOBS] [SEED]

The benchmark repeatedly draws a fault at random: kill -9 of the server; kill -9 of the emulator,
which deletes every slice; preemption of a slice with or without notice; a step of the server's wall
clock by hours in either direction; and, as root, a disk that is full for some seconds (a tmpfs
holds the server's home).

Every job must succeed without a counted failure of its program. No attempt may start twice, no two
attempts may run at once, no step may be missing, and no cloud resource may remain. The exit code is
1 otherwise.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from drumline.cloud.emulator import launch
from drumline.jobs import connection
from drumline.jobs.client import Client

STEPS = 300
# Monotonic time is the same for all processes of a machine, regardless of its wall clock.
PROGRAM = f"""
import json, os, time
from pathlib import Path
folder = Path(os.environ["DRUMLINE_CHECKPOINT"])
saved = folder / "saved"
step = int(saved.read_text()) if saved.exists() else 0
with open(folder / "history", "a", buffering=1) as history:
    def note(what):
        history.write(json.dumps([what, os.environ["DRUMLINE_ATTEMPT"], step, time.monotonic()]))
        history.write("\\n")
    note("start")
    while step < {STEPS}:
        time.sleep(0.1)
        step += 1
        note("step")
        new = folder / "new"
        new.write_text(str(step))
        new.rename(saved)
"""
# The server with a wall clock that this benchmark sets through a file.
SERVER = """
import sys, time
from pathlib import Path
offset, true = Path(sys.argv[1]), time.time
time.time = lambda: true() + float(offset.read_text() or 0)
from drumline.jobs.server.process import main
main()
"""
DISK = 48 << 20


class Storm:
    """The faults, with a count of each."""

    def __init__(self, home: Path, clock: Path, random_source: random.Random) -> None:
        """Start with no faults."""
        self.home = home
        self.client = Client(home)
        self.fault_counts: Counter[str] = Counter()
        self._clock = clock
        self._random = random_source

    def inject_fault(self, jobs: list[str]) -> None:
        """Inject one random fault."""
        faults: list[tuple[float, Callable[[list[str]], None]]] = [
            (5, self.kill_server),
            (0.5, self.kill_emulator),
            (3, self.preempt_slice),
            (3, self.preempt_slice_with_notice),
            (2, self.step_clock),
        ]
        if self.disk_can_fill:
            faults.append((0.7, self.fill_disk))
        weights = [weight for weight, _ in faults]
        ((_, fault),) = self._random.choices(faults, weights)
        with contextlib.suppress(launch.EmulatorError, connection.NoServer, OSError):
            fault(jobs)

    @property
    def disk_can_fill(self) -> bool:
        """True if the home is a small file system of its own."""
        return self.home.is_mount()

    def kill_server(self, _: list[str]) -> None:
        """Kill the server like a machine that loses power."""
        status = self.client.server_status()
        if status is not None:
            os.kill(int(status["pid"]), signal.SIGKILL)
            self.fault_counts["kill -9 of the server"] += 1

    def kill_emulator(self, _: list[str]) -> None:
        """Kill the emulator. All its slices disappear, and it restarts empty."""
        emulator = launch.find(self.home / "emulator")
        if emulator is not None:
            os.kill(emulator.pid, signal.SIGKILL)
            self.fault_counts["kill -9 of the cloud"] += 1

    def preempt_slice(self, jobs: list[str]) -> None:
        """Preempt a slice without notice."""
        self._preempt(jobs, 0.0)

    def preempt_slice_with_notice(self, jobs: list[str]) -> None:
        """Preempt a slice with notice. The program has no handler and exits first."""
        self._preempt(jobs, self._random.uniform(0.2, 4.0))

    def _preempt(self, jobs: list[str], notice: float) -> None:
        target = self._random.choice(jobs)
        launch.control(self.home / "emulator", "preempt", target=target, notice=notice)
        self.fault_counts["slices taken, with notice" if notice else "slices taken"] += 1

    def step_clock(self, _: list[str]) -> None:
        """Step the wall clock by hours in either direction."""
        self._clock.write_text(str(self._random.uniform(-5, 5) * 3600))
        self.fault_counts["steps of the clock"] += 1

    def fill_disk(self, _: list[str]) -> None:
        """Fill the disk for some seconds, and sometimes kill the server during that time."""
        ballast = self.home / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
            if self._random.random() < 0.3:
                self.kill_server([])
            time.sleep(self._random.uniform(1, 6))
        finally:
            ballast.unlink()
        self.fault_counts["disk full"] += 1


def retry(call: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Retry while the server cannot answer because it was killed or its disk is full."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


def violation(job: dict[str, Any], saved: Path) -> str | None:
    """Return the first violated requirement of a job, or None."""
    if job["status"] != "SUCCEEDED":
        return f"{job['status']}: {job['reason']}"
    if job["failures"]:
        return f"{job['failures']} failures were counted"
    records = [json.loads(line) for line in (saved / "history").read_text().splitlines()]
    starts = [attempt for what, attempt, _, _ in records if what == "start"]
    if len(starts) != len(set(starts)):
        return f"an attempt was started twice: {starts}"
    if {step for what, _, step, _ in records if what == "step"} != set(range(1, STEPS + 1)):
        return "a step is missing"
    times_by_attempt: dict[str, list[float]] = {}
    for _, attempt, _, timestamp in records:
        times_by_attempt.setdefault(attempt, []).append(timestamp)
    intervals = sorted(
        (min(timestamps), max(timestamps)) for timestamps in times_by_attempt.values()
    )
    if any(first[1] > second[0] for first, second in itertools.pairwise(intervals)):
        return "two attempts ran at once"
    return None


def resource_count(home: Path) -> int:
    """Return the number of resources in the cloud."""
    return sum(map(len, launch.control(home / "emulator", "resources").values()))


@contextlib.contextmanager
def temporary_home() -> Iterator[Path]:
    """Create a home, as root on a small file system of its own, with its cloud beside it."""
    with tempfile.TemporaryDirectory(prefix="dl-", ignore_cleanup_errors=True) as folder:
        home, cloud = Path(folder) / "home", Path(folder) / "cloud"
        for path in (home, cloud):
            path.mkdir(mode=0o700)
        mounts = [
            ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "storm", str(home)],
            ["mount", "--bind", str(cloud), str(home / "emulator")],
        ]
        mount_points = []
        for command in mounts if os.geteuid() == 0 else []:
            Path(command[-1]).mkdir(mode=0o700, exist_ok=True)
            if subprocess.run(command, check=False).returncode == 0:
                mount_points.append(command[-1])
        try:
            yield home
        finally:
            for mount_point in reversed(mount_points):
                subprocess.run(["umount", "--lazy", mount_point], check=False)  # noqa: S607


def main() -> int:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    random_source = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)  # noqa: S311
    with temporary_home() as home, tempfile.TemporaryDirectory(prefix="dl-") as folder:
        code, clock, server = (Path(folder) / name for name in ("code", "clock", "server.py"))
        code.mkdir()
        (code / "count.py").write_text(PROGRAM)
        clock.write_text("0")
        server.write_text(SERVER)
        connection.SERVER_COMMAND = (sys.executable, str(server), str(clock))
        launch.ensure_running(home / "emulator")
        storm = Storm(home, clock, random_source)
        client = storm.client
        spec = {
            "name": "counts", "accelerator": ["v4-8"], "workdir": str(code),
            "checkpoint": "gs://storm/counts", "run": "python count.py",
            "retry": {"failures": 0},
        }  # fmt: skip
        start = time.monotonic()
        try:
            jobs = [str(client.create(spec)["id"]) for _ in range(count)]
            faults_end = start + 60 + 4 * count
            while any(job["ended"] is None for job in retry(lambda: client.list(all=True))):
                time.sleep(random_source.uniform(0.5, 3.0))
                if time.monotonic() < faults_end:
                    storm.inject_fault(jobs)
                elif time.monotonic() > faults_end + 60 + 10 * count:
                    break
            final_jobs = {str(job["id"]): job for job in retry(lambda: client.list(all=True))}
            buckets = home / "emulator" / "buckets"
            violations = {}
            for job in jobs:
                folder_name = str(retry(partial(client.show, job))["checkpoint"])
                saved = buckets / folder_name.removeprefix("gs://")
                reason = violation(final_jobs[job], saved)
                if reason is not None:
                    violations[job] = reason
            deadline = time.monotonic() + 60
            while resource_count(home) and time.monotonic() < deadline:
                time.sleep(0.2)
            remaining = resource_count(home)
            table = [
                ("jobs", count),
                ("succeeded, nothing lost or doubled", count - len(violations)),
            ]
            table += sorted(storm.fault_counts.items())
            table += [
                ("left in the cloud", remaining),
                ("seconds", round(time.monotonic() - start)),
            ]
            for name, figure in table:
                print(f"{name:36}{figure:>6}")
            if not storm.disk_can_fill:
                print("the disk was never full, because mounting one requires root")
            for job, reason in violations.items():
                print(f"{job}: {reason}")
            return 1 if violations or remaining else 0
        finally:
            client.stop_server()
            launch.stop(home / "emulator")


if __name__ == "__main__":
    sys.exit(main())
