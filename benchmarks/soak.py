"""Fifty counting jobs while the server is killed (kill -9) again and again and slices are taken.

    .venv/bin/python benchmarks/soak.py [JOBS] [SEED]

Every job must succeed; a program may start again only because its slice was taken, never because
the server died; nothing may be left in the cloud. Exits 1 where that does not hold.
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from drumline.cloud.emulator import launch
from drumline.jobs.client import Client

PROGRAM = """
import os, time
from pathlib import Path
folder = Path(os.environ["DRUMLINE_CHECKPOINT"])
saved = folder / "saved"
step = int(saved.read_text()) if saved.exists() else 0
with open(folder / "starts", "a") as starts:
    print(os.environ["DRUMLINE_ATTEMPT"], file=starts)
with open(folder / "steps", "a", buffering=1) as steps:
    while step < 200:
        time.sleep(0.1)
        step += 1
        print(step, file=steps)
        new = folder / "new"
        new.write_text(str(step))
        new.rename(saved)
"""


def kill_server(client: Client) -> bool:
    """kill -9, as a machine that loses power would."""
    status = client.server_status()
    if status is None:
        return False
    os.kill(int(status["pid"]), signal.SIGKILL)
    return True


def wrong_with(job: dict[str, object], saved: Path) -> str | None:
    """What did not hold for a job."""
    if job["status"] != "SUCCEEDED":
        return f"{job['status']}: {job['reason']}"
    starts = (saved / "starts").read_text().split()
    if len(starts) != len(set(starts)):
        return f"an attempt was started twice: {starts}"
    if len(starts) > 1 + int(str(job["preemptions"])):
        return f"{len(starts)} starts after {job['preemptions']} preemptions"
    if {int(step) for step in (saved / "steps").read_text().split()} != set(range(1, 201)):
        return "a step is missing"
    return None


def held(emulator: Path) -> int:
    """How many things the cloud holds."""
    return sum(map(len, launch.control(emulator, "resources").values()))


def main() -> int:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    chance = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)  # noqa: S311
    with tempfile.TemporaryDirectory(prefix="dl-") as folder:
        home, code = Path(folder) / "home", Path(folder) / "code"
        code.mkdir()
        (code / "count.py").write_text(PROGRAM)
        emulator = home / "emulator"
        launch.ensure_running(emulator)
        client = Client(home)
        spec = {
            "name": "counts", "accelerator": ["v4-8"], "workdir": str(code),
            "checkpoint": "gs://soak/counts", "run": "python count.py",
        }  # fmt: skip
        begin, kills, preemptions = time.monotonic(), 0, 0
        try:
            jobs = [str(client.create(spec)["id"]) for _ in range(count)]
            while any(job["ended"] is None for job in client.list(all=True)):
                time.sleep(chance.uniform(0.5, 4.0))
                kills += kill_server(client)
                if preemptions < count // 2 and chance.random() < 0.7:
                    with contextlib.suppress(launch.EmulatorError):
                        launch.control(emulator, "preempt", target=chance.choice(jobs))
                        preemptions += 1
                if time.monotonic() - begin > 60 + 10 * count:
                    break
            ended = {str(job["id"]): job for job in client.list(all=True)}
            saved = home / "emulator" / "buckets" / "soak" / "counts"
            wrong = {job: why for job in jobs if (why := wrong_with(ended[job], saved / job))}
            deadline = time.monotonic() + 30
            while (
                any(launch.control(emulator, "resources").values()) and time.monotonic() < deadline
            ):
                time.sleep(0.2)
            left = sum(map(len, launch.control(emulator, "resources").values()))
            print(f"{'jobs':32}{count:>6}")
            print(f"{'succeeded, nothing lost or doubled':32}{count - len(wrong):>6}")
            print(f"{'kill -9 of the server':32}{kills:>6}")
            print(f"{'slices taken':32}{preemptions:>6}")
            print(f"{'left in the cloud':32}{left:>6}")
            print(f"{'seconds':32}{time.monotonic() - begin:>6.0f}")
            for job, why in wrong.items():
                print(f"{job}: {why}")
            return 1 if wrong or left else 0
        finally:
            client.stop_server()
            launch.stop(home / "emulator")


if __name__ == "__main__":
    sys.exit(main())
