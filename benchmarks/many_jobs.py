"""Measure the server with 20,000 finished and 1,000 waiting jobs, and with 200 running jobs.

    .venv/bin/python benchmarks/many_jobs.py            both tables
    .venv/bin/python benchmarks/many_jobs.py waiting    the first alone

The finished jobs are written into the database as the server would have, with ends spread over the
last 400 days. In the first table the emulator has no capacity, and the server polls at the rate
that it uses on Google Cloud (two list calls per zone every 10 seconds). In the second table every
job runs on its own emulated host and prints a step per second, and the server polls at the same
rate.
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
    """Write finished jobs with an attempt, a slice, events and points each, and waiting jobs."""
    store = Store(home / "jobs.db")
    owner = store.owner
    store.close()
    spec = validate(
        {"accelerator": [ACCELERATOR], "zones": ZONES, "workdir": None, "run": "python train.py"}
    ).model_dump(mode="json") | {"archive": None}
    choices = tuple(Candidate(ACCELERATOR, zone) for zone in ZONES)
    job_adapter, current_time = TypeAdapter(Job), time.time()
    db = sqlite3.connect(home / "jobs.db")
    for index in range(1, FINISHED + WAITING + 1):
        finished = index <= FINISHED
        ended = current_time - DAYS * 86400 * (FINISHED - index) / FINISHED if finished else None
        job = Job(
            f"{index:06}", owner, choices, (ended or current_time) - 3600, Allowance(),
            status=Status.SUCCEEDED if finished else Status.QUEUED, attempts=int(finished),
            asks=int(finished),
            has_run=finished, ended_at=ended,
        )  # fmt: skip
        db.execute(
            "INSERT INTO jobs (number, user, name, spec, state, progress, status, ended, live)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                index, "lab", f"job-{index}", json.dumps(spec), job_adapter.dump_json(job).decode(),
                json.dumps({"step": 1000, "loss": 0.5}) if finished else None,
                job.status.value, ended, not finished,
            ),
        )  # fmt: skip
        if ended is None:
            continue
        started, zone = ended - 3000, ZONES[index % len(ZONES)]
        db.execute(
            "INSERT INTO attempts (job, number, zone, accelerator, started, running, ended,"
            " outcome) VALUES (?, 1, ?, ?, ?, ?, ?, 'succeeded')",
            (job.id, zone, ACCELERATOR, started, started + 60, ended),
        )
        db.execute(
            "INSERT INTO slices VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (f"dl-{job.id}", job.id, zone, ACCELERATOR, started, started + 30, ended, ended + 5),
        )
        db.executemany(
            "INSERT INTO events (job, time, kind, text) VALUES (?, ?, ?, ?)",
            [(job.id, started + n, "note", f"event {n}") for n in range(6)],
        )
        db.executemany(
            "INSERT INTO points (job, attempt, time, step, metrics) VALUES (?, 1, ?, ?, ?)",
            [(job.id, started + n, n * 100, '{"loss": 0.5}') for n in range(10)],
        )
    db.commit()
    db.close()


@contextmanager
def temporary_home(settings: str) -> Iterator[Path]:
    """Create a home with settings and its emulator, and remove both at the end."""
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


def measure_start(home: Path) -> float:
    """Return the seconds from starting a server to its first response."""
    client = Client(home, autostart=False)
    start = time.perf_counter()
    with (home / "server.log").open("ab") as log:
        subprocess.Popen(
            SERVER_COMMAND, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=home,
            env={"DRUMLINE_HOME": str(home)}, start_new_session=True,
        )  # fmt: skip
    while client.server_status() is None:
        time.sleep(0.005)
    return time.perf_counter() - start


def server_load(home: Path) -> tuple[float, float]:
    """Return the memory in MB and the CPU use as a fraction of one core."""
    status = Client(home).server_status()
    assert status is not None
    pid = int(status["pid"])
    cpu, started = cpu_seconds(pid), time.perf_counter()
    time.sleep(MEASURE_SECONDS)
    cpu_fraction = (cpu_seconds(pid) - cpu) / (time.perf_counter() - started)
    return memory_mb(pid), cpu_fraction


def waiting_table() -> None:
    """Print the table of finished and waiting jobs."""
    settings = f"pace: google\nzones: [{', '.join(ZONES)}]\n"
    start_times = []
    with temporary_home(settings) as home:
        for _ in range(3):
            empty_home_seconds = measure_start(home)
            Client(home).stop_server()
            start_times.append(empty_home_seconds)
    empty_home_seconds, start_times = statistics.median(start_times), []
    with temporary_home(settings) as home:
        for zone in ZONES:
            launch.control(
                home / "emulator", "capacity", zone=zone, accelerator=ACCELERATOR, chips=0
            )
        write_history(home)
        for _ in range(3):
            Client(home, autostart=False).stop_server()
            start_times.append(measure_start(home))
        time.sleep(SETTLE_SECONDS)
        memory, cpu = server_load(home)
        drumline = str(Path(sys.executable).with_name("drumline"))
        list_seconds = median_seconds([drumline, "list"], home)
        python_seconds = median_seconds([sys.executable, "-c", "pass"], home)
        status = Client(home).server_status()
        assert status is not None
        rows = [
            ("jobs, all and active", f"{status['jobs']:,} · {status['living']:,}", ""),
            ("start to first answer", f"{statistics.median(start_times):.2f} s", "under 1 s"),
            ("  the same, no job", f"{empty_home_seconds:.2f} s", ""),
            ("memory (PSS)", f"{memory:.0f} MB", "under 100 MB"),
            ("CPU of a core, idle", f"{cpu:.1%}", "under 1 %"),
            ("list", f"{list_seconds * 1000:.0f} ms", ""),
            ("list, times python -c pass", f"{list_seconds / python_seconds:.1f}×", "under 10×"),
        ]
    print_table(f"{FINISHED:,} finished, {WAITING:,} waiting", rows)


def running_table() -> None:
    """Print the table of running jobs on one host each."""
    with temporary_home("pace: google\n") as home:
        for zone in ("local-a", "local-b", "local-c"):
            launch.control(
                home / "emulator", "capacity", zone=zone, accelerator="v4-8", chips=4 * RUNNING
            )
        client = Client(home)
        spec = {
            "accelerator": "v4-8", "workdir": None, "run": STEPS,
            "progress": r"step (?P<step>\d+)",
        }  # fmt: skip
        start = time.perf_counter()
        for _ in range(RUNNING):
            client.create(spec)
        while (runs := len(client.list(status=["RUNNING"]))) < RUNNING:
            if time.perf_counter() - start > 1200:
                break
            time.sleep(1)
        all_running_seconds = time.perf_counter() - start
        time.sleep(SETTLE_SECONDS)
        memory, cpu = server_load(home)
        status = client.server_status()
        assert status is not None
        rows = [
            ("running", f"{runs:,}", ""),
            ("from create to all running", f"{all_running_seconds:.0f} s", ""),
            ("memory (PSS)", f"{memory:.0f} MB", ""),
            ("CPU of a core", f"{cpu:.1%}", ""),
        ]
        for job in client.list():
            client.delete(job["id"])
    print_table(f"{RUNNING} running, one host each", rows)


def print_table(title: str, rows: list[tuple[str, str, str]]) -> None:
    """Print three columns: name, measurement and target."""
    print(title)
    for name, measured, target in rows:
        print(f"  {name:28}{measured:>16}  {target}".rstrip())


if __name__ == "__main__":
    # SIGTERM exits normally, so that the server and the emulator are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    selected = sys.argv[1:] or ["waiting", "running"]
    for name, table in (("waiting", waiting_table), ("running", running_table)):
        if name in selected:
            table()
