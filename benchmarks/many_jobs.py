"""What years of use cost the server: 20,000 finished jobs and 1,000 waiting; then 200 that run.

    .venv/bin/python benchmarks/many_jobs.py            both tables
    .venv/bin/python benchmarks/many_jobs.py waiting    the first alone

The finished jobs are written into the database as the server would have, ended over the last 400
days. In the first table the emulator has no capacity and the server keeps the pace it keeps at
Google (two list calls a zone every 10 seconds). In the second every job runs on an emulated host of
its own and prints a step a second, and the server looks at Google's pace too.
"""

import json
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter

from drumline.cloud.emulator import launch
from drumline.jobs.client import Client
from drumline.jobs.connection import SERVER_COMMAND
from drumline.jobs.core.state import Allowance, Candidate, Job, Status
from drumline.jobs.spec import validate
from drumline.jobs.store.records import Store
from processes import cpu_seconds, median_seconds, memory_mb

FINISHED, WAITING, RUNNING = 20_000, 1_000, 200
DAYS = 400
ZONES = [
    "us-central1-a", "us-south1-a", "us-west1-c",
    "us-west4-a", "europe-west4-b", "asia-southeast1-b",
]  # fmt: skip
ACCELERATOR = "v5litepod-8"
SETTLE_SECONDS = 25.0
MEASURE_SECONDS = 30.0
STEPS = "i=0; while true; do i=$((i+1)); echo step $i; sleep 1; done"


def write_history(home: Path) -> None:
    """Finished jobs with an attempt, a slice, events and points each; then those that wait."""
    store = Store(home / "jobs.db")
    owner = store.owner
    store.close()
    spec = validate(
        {"accelerator": [ACCELERATOR], "zones": ZONES, "workdir": None, "run": "python train.py"}
    ).model_dump(mode="json") | {"archive": None}
    choices = tuple(Candidate(ACCELERATOR, zone) for zone in ZONES)
    jobs, now = TypeAdapter(Job), time.time()
    db = sqlite3.connect(home / "jobs.db")
    for number in range(1, FINISHED + WAITING + 1):
        done = number <= FINISHED
        ended = now - DAYS * 86400 * (FINISHED - number) / FINISHED if done else None
        job = Job(
            f"{number:06}", owner, choices, (ended or now) - 3600, Allowance(),
            status=Status.SUCCEEDED if done else Status.QUEUED, attempts=int(done), asks=int(done),
            has_run=done, ended_at=ended,
        )  # fmt: skip
        db.execute(
            "INSERT INTO jobs (number, user, name, spec, state, progress, status, ended, live)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number, "lab", f"job-{number}", json.dumps(spec), jobs.dump_json(job).decode(),
                json.dumps({"step": 1000, "loss": 0.5}) if done else None,
                job.status.value, ended, not done,
            ),
        )  # fmt: skip
        if ended is None:
            continue
        began, zone = ended - 3000, ZONES[number % len(ZONES)]
        db.execute(
            "INSERT INTO attempts (job, number, zone, accelerator, started, running, ended,"
            " outcome) VALUES (?, 1, ?, ?, ?, ?, ?, 'succeeded')",
            (job.id, zone, ACCELERATOR, began, began + 60, ended),
        )
        db.execute(
            "INSERT INTO slices VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (f"dl-{job.id}", job.id, zone, ACCELERATOR, began, began + 30, ended, ended + 5),
        )
        db.executemany(
            "INSERT INTO events (job, time, kind, text) VALUES (?, ?, ?, ?)",
            [(job.id, began + n, "note", f"event {n}") for n in range(6)],
        )
        db.executemany(
            "INSERT INTO points (job, attempt, time, step, metrics) VALUES (?, 1, ?, ?, ?)",
            [(job.id, began + n, n * 100, '{"loss": 0.5}') for n in range(10)],
        )
    db.commit()
    db.close()


@contextmanager
def a_home(settings: str) -> Iterator[Path]:
    """A home with settings, and its emulator; both go in the end."""
    with tempfile.TemporaryDirectory(prefix="dl-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        home.chmod(0o700)
        (home / "config.yaml").write_text(settings)
        launch.ensure_running(home / "emulator")
        try:
            yield home
        finally:
            Client(home).stop_server()
            launch.stop(home / "emulator")


def start_seconds(home: Path) -> float:
    """From starting a server to its first answer."""
    client = Client(home, autostart=False)
    begin = time.perf_counter()
    with (home / "server.log").open("ab") as log:
        subprocess.Popen(
            SERVER_COMMAND, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=home,
            env={"DRUMLINE_HOME": str(home)}, start_new_session=True,
        )  # fmt: skip
    while client.server_status() is None:
        time.sleep(0.005)
    return time.perf_counter() - begin


def spent(home: Path) -> tuple[float, float]:
    """Memory in MB, and CPU as a fraction of one core over a minute."""
    status = Client(home).server_status()
    assert status is not None
    pid = int(status["pid"])
    cpu, began = cpu_seconds(pid), time.perf_counter()
    time.sleep(MEASURE_SECONDS)
    used = (cpu_seconds(pid) - cpu) / (time.perf_counter() - began)
    return memory_mb(pid), used


def waiting_table() -> None:
    """Finished and waiting jobs."""
    settings = f"pace: google\nzones: [{', '.join(ZONES)}]\n"
    starts = []
    with a_home(settings) as home:
        for _ in range(3):
            empty = start_seconds(home)
            Client(home).stop_server()
            starts.append(empty)
    empty, starts = statistics.median(starts), []
    with a_home(settings) as home:
        for zone in ZONES:
            launch.control(
                home / "emulator", "capacity", zone=zone, accelerator=ACCELERATOR, chips=0
            )
        write_history(home)
        for _ in range(3):
            Client(home, autostart=False).stop_server()
            starts.append(start_seconds(home))
        time.sleep(SETTLE_SECONDS)
        memory, cpu = spent(home)
        drumline = str(Path(sys.executable).with_name("drumline"))
        listing = median_seconds([drumline, "list"], home)
        base = median_seconds([sys.executable, "-c", "pass"], home)
        status = Client(home).server_status()
        assert status is not None
        rows = [
            ("jobs, all and active", f"{status['jobs']:,} · {status['living']:,}", ""),
            ("start to first answer", f"{statistics.median(starts):.2f} s", "under 1 s"),
            ("  the same, no job", f"{empty:.2f} s", ""),
            ("memory (PSS)", f"{memory:.0f} MB", "under 100 MB"),
            ("CPU of a core, idle", f"{cpu:.1%}", "under 1 %"),
            ("list", f"{listing * 1000:.0f} ms", ""),
            ("list, times python -c pass", f"{listing / base:.1f}×", "under 10×"),
        ]
    print_table(f"{FINISHED:,} finished, {WAITING:,} waiting", rows)


def running_table() -> None:
    """Jobs that run on one host each."""
    with a_home("pace: google\n") as home:
        for zone in ("local-a", "local-b", "local-c"):
            launch.control(
                home / "emulator", "capacity", zone=zone, accelerator="v4-8", chips=4 * RUNNING
            )
        client = Client(home)
        spec = {
            "accelerator": "v4-8", "workdir": None, "run": STEPS,
            "progress": r"step (?P<step>\d+)",
        }  # fmt: skip
        begin = time.perf_counter()
        for _ in range(RUNNING):
            client.create(spec)
        while (runs := len(client.list(status=["RUNNING"]))) < RUNNING:
            if time.perf_counter() - begin > 1200:
                break
            time.sleep(1)
        until_all = time.perf_counter() - begin
        time.sleep(SETTLE_SECONDS)
        memory, cpu = spent(home)
        status = client.server_status()
        assert status is not None
        rows = [
            ("running", f"{runs:,}", ""),
            ("from create to all running", f"{until_all:.0f} s", ""),
            ("memory (PSS)", f"{memory:.0f} MB", ""),
            ("CPU of a core", f"{cpu:.1%}", ""),
        ]
        for job in client.list():
            client.delete(job["id"])
    print_table(f"{RUNNING} running, one host each", rows)


def print_table(title: str, rows: list[tuple[str, str, str]]) -> None:
    """Three columns: what, measured, wanted."""
    print(title)
    for name, measured, wanted in rows:
        print(f"  {name:28}{measured:>16}  {wanted}".rstrip())


if __name__ == "__main__":
    # So that whoever ends it early leaves no server and no emulator behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen = sys.argv[1:] or ["waiting", "running"]
    for name, table in (("waiting", waiting_table), ("running", running_table)):
        if name in chosen:
            table()
