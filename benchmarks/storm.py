"""Fifty counting jobs in a storm: servers and clouds that die, slices taken, clocks, a full disk.

    .venv/bin/python benchmarks/storm.py [JOBS] [SEED]

Drawn at random, again and again: kill -9 of the server; kill -9 of the emulator, with which every
slice is gone; slices taken with notice and without; the server's wall clock set back and forth by
hours; and, as root, a disk that is full for some seconds (a tmpfs holds the server's home).

Every job must succeed without one failure of its program being counted; no attempt may start twice,
no two attempts may run at once, no step may be missing; nothing may be left in the cloud. Exits 1
where that does not hold.
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
from pathlib import Path
from typing import Any

from drumline.cloud.emulator import launch
from drumline.jobs import connection
from drumline.jobs.client import Client

STEPS = 300
# Monotonic time is the same for all processes of a machine, whatever its wall clock does.
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
# The server with a wall clock that this benchmark sets: it stands in a file.
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
    """The faults, each as often as it was drawn."""

    def __init__(self, home: Path, clock: Path, chance: random.Random) -> None:
        """Nothing has happened yet."""
        self.home = home
        self.client = Client(home)
        self.done: Counter[str] = Counter()
        self._clock = clock
        self._chance = chance

    def strike(self, jobs: list[str]) -> None:
        """One fault, drawn at random."""
        faults: list[tuple[float, Callable[[list[str]], None]]] = [
            (5, self.kill_server),
            (0.5, self.kill_emulator),
            (3, self.take_slice),
            (3, self.take_slice_with_notice),
            (2, self.step_clock),
        ]
        if self.disk_can_fill:
            faults.append((0.7, self.fill_disk))
        weights = [weight for weight, _ in faults]
        ((_, fault),) = self._chance.choices(faults, weights)
        with contextlib.suppress(launch.EmulatorError, connection.NoServer, OSError):
            fault(jobs)

    @property
    def disk_can_fill(self) -> bool:
        """Whether the home is a small file system of its own."""
        return self.home.is_mount()

    def kill_server(self, _: list[str]) -> None:
        """As a machine that loses power would."""
        status = self.client.server_status()
        if status is not None:
            os.kill(int(status["pid"]), signal.SIGKILL)
            self.done["kill -9 of the server"] += 1

    def kill_emulator(self, _: list[str]) -> None:
        """All slices are gone at once, and the cloud comes back empty."""
        found = launch.find(self.home / "emulator")
        if found is not None:
            os.kill(found.pid, signal.SIGKILL)
            self.done["kill -9 of the cloud"] += 1

    def take_slice(self, jobs: list[str]) -> None:
        """Without a word."""
        self._preempt(jobs, 0.0)

    def take_slice_with_notice(self, jobs: list[str]) -> None:
        """The program, which has no handler, dies first."""
        self._preempt(jobs, self._chance.uniform(0.2, 4.0))

    def _preempt(self, jobs: list[str], notice: float) -> None:
        target = self._chance.choice(jobs)
        launch.control(self.home / "emulator", "preempt", target=target, notice=notice)
        self.done["slices taken, with notice" if notice else "slices taken"] += 1

    def step_clock(self, _: list[str]) -> None:
        """By hours, either way."""
        self._clock.write_text(str(self._chance.uniform(-5, 5) * 3600))
        self.done["steps of the clock"] += 1

    def fill_disk(self, _: list[str]) -> None:
        """For some seconds nothing can be written, and perhaps the server is killed meanwhile."""
        ballast = self.home / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
            if self._chance.random() < 0.3:
                self.kill_server([])
            time.sleep(self._chance.uniform(1, 6))
        finally:
            ballast.unlink()
        self.done["disk full"] += 1


def patiently(ask: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Ask again while the server cannot answer: it was just killed, or its disk is full."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


def wrong_with(job: dict[str, Any], saved: Path) -> str | None:
    """What did not hold for a job."""
    if job["status"] != "SUCCEEDED":
        return f"{job['status']}: {job['reason']}"
    if job["failures"]:
        return f"{job['failures']} failures were counted"
    lines = [json.loads(line) for line in (saved / "history").read_text().splitlines()]
    starts = [attempt for what, attempt, _, _ in lines if what == "start"]
    if len(starts) != len(set(starts)):
        return f"an attempt was started twice: {starts}"
    if {step for what, _, step, _ in lines if what == "step"} != set(range(1, STEPS + 1)):
        return "a step is missing"
    moments: dict[str, list[float]] = {}
    for _, attempt, _, at in lines:
        moments.setdefault(attempt, []).append(at)
    spans = sorted((min(times), max(times)) for times in moments.values())
    if any(earlier[1] > later[0] for earlier, later in itertools.pairwise(spans)):
        return "two attempts ran at once"
    return None


def held(home: Path) -> int:
    """How many things the cloud holds."""
    return sum(map(len, launch.control(home / "emulator", "resources").values()))


@contextlib.contextmanager
def a_home() -> Iterator[Path]:
    """A home on a small file system of its own, where this can be had, its cloud beside it."""
    with tempfile.TemporaryDirectory(prefix="dl-", ignore_cleanup_errors=True) as folder:
        home, cloud = Path(folder) / "home", Path(folder) / "cloud"
        for path in (home, cloud):
            path.mkdir(mode=0o700)
        mounts = [
            ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "storm", str(home)],
            ["mount", "--bind", str(cloud), str(home / "emulator")],
        ]
        mounted = []
        for command in mounts if os.geteuid() == 0 else []:
            Path(command[-1]).mkdir(mode=0o700, exist_ok=True)
            if subprocess.run(command, check=False).returncode == 0:
                mounted.append(command[-1])
        try:
            yield home
        finally:
            for place in reversed(mounted):
                subprocess.run(["umount", "--lazy", place], check=False)  # noqa: S607


def main() -> int:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    chance = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)  # noqa: S311
    with a_home() as home, tempfile.TemporaryDirectory(prefix="dl-") as folder:
        code, clock, server = (Path(folder) / name for name in ("code", "clock", "server.py"))
        code.mkdir()
        (code / "count.py").write_text(PROGRAM)
        clock.write_text("0")
        server.write_text(SERVER)
        connection.SERVER_COMMAND = (sys.executable, str(server), str(clock))
        launch.ensure_running(home / "emulator")
        storm = Storm(home, clock, chance)
        client = storm.client
        spec = {
            "name": "counts", "accelerator": ["v4-8"], "workdir": str(code),
            "checkpoint": "gs://storm/counts", "run": "python count.py",
            "retry": {"failures": 0},
        }  # fmt: skip
        begin = time.monotonic()
        try:
            jobs = [str(client.create(spec)["id"]) for _ in range(count)]
            calm_after = begin + 60 + 4 * count
            while any(job["ended"] is None for job in patiently(lambda: client.list(all=True))):
                time.sleep(chance.uniform(0.5, 3.0))
                if time.monotonic() < calm_after:
                    storm.strike(jobs)
                elif time.monotonic() > calm_after + 10 * count:
                    break
            ended = {str(job["id"]): job for job in patiently(lambda: client.list(all=True))}
            saved = home / "emulator" / "buckets" / "storm" / "counts"
            wrong = {job: why for job in jobs if (why := wrong_with(ended[job], saved / job))}
            deadline = time.monotonic() + 60
            while held(home) and time.monotonic() < deadline:
                time.sleep(0.2)
            left = held(home)
            rows = [("jobs", count), ("succeeded, nothing lost or doubled", count - len(wrong))]
            rows += sorted(storm.done.items())
            rows += [("left in the cloud", left), ("seconds", round(time.monotonic() - begin))]
            for name, figure in rows:
                print(f"{name:36}{figure:>6}")
            if not storm.disk_can_fill:
                print("the disk was never full: that takes root, to mount one")
            for job, why in wrong.items():
                print(f"{job}: {why}")
            return 1 if wrong or left else 0
        finally:
            client.stop_server()
            launch.stop(home / "emulator")


if __name__ == "__main__":
    sys.exit(main())
