"""A temporary home folder with a server and an emulator, used through the client."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drumline.cloud.emulator import launch
from drumline.jobs.client import Client

# Counts to the number in $STEPS with a checkpoint, and writes down who ran which step when. What it
# must never do: skip a step, or run in two attempts at once. Ends when the file $GATE is there.
COUNTER = """
import json, os, time
from pathlib import Path
folder = Path(os.environ["DRUMLINE_CHECKPOINT"])
folder.mkdir(parents=True, exist_ok=True)
host, attempt = os.environ["DRUMLINE_HOST"], os.environ["DRUMLINE_ATTEMPT"]
saved = folder / f"saved-{host}"
step = int(saved.read_text()) if saved.exists() else 0
history = open(folder / f"history-{host}", "a", buffering=1)
def note(what):
    history.write(json.dumps([what, int(attempt), step, time.time()]) + "\\n")
note("start")
print(f"attempt {attempt} from step {step}", flush=True)
while step < int(os.environ["STEPS"]):
    time.sleep(float(os.environ.get("PACE", "0.05")))
    step += 1
    note("step")
    new = saved.with_suffix(".new")
    new.write_text(str(step))
    new.rename(saved)
while not os.path.exists(os.environ.get("GATE", "/")):
    time.sleep(0.05)
"""


class Installation:
    """A home folder with its server and its emulator.

    The timeouts are generous, because a busy machine is ten times slower.
    """

    def __init__(self, home: Path, jobs: Path) -> None:
        self.home = home
        self.jobs = jobs
        self.client = Client(home)
        jobs.mkdir(parents=True, exist_ok=True)

    def configure(self, **settings: Any) -> None:
        """Write the server's settings. Call this before its first start."""
        (self.home / "config.yaml").write_text(json.dumps(settings))

    def start_emulator(self) -> None:
        launch.ensure_running(self.home / "emulator")

    def emulator(self, verb: str, **fields: Any) -> dict[str, Any]:
        self.start_emulator()
        return launch.control(self.home / "emulator", verb, **fields)

    def resources(self) -> list[Any]:
        """Return all resources of the cloud."""
        resources = self.emulator("resources")
        return [*resources["requests"], *resources["nodes"], *resources["hosts"]]

    def requests(self, *jobs: str) -> list[dict[str, Any]]:
        """Return the requests of these jobs in the cloud."""
        return [one for one in self.emulator("resources")["requests"] if one["job"] in jobs]

    def write_job(self, run: str, **keys: Any) -> Path:
        """Write a job file and a program in the same folder."""
        import yaml

        folder = self.jobs / f"job-{len(list(self.jobs.iterdir()))}"
        folder.mkdir()
        (folder / "count.py").write_text(COUNTER)
        path = folder / "job.yaml"
        spec = {"accelerator": "v4-16", "run": run, "stop_grace": 1} | keys
        path.write_text(yaml.safe_dump(spec))
        return path

    def create(self, run: str, **keys: Any) -> str:
        return str(self.client.create(self.write_job(run, **keys))["id"])

    def count(self, steps: int, pace: float = 0.05, **keys: Any) -> str:
        """Create a job that counts steps and saves them in a checkpoint."""
        keys.setdefault("checkpoint", "gs://counts/here")
        environment = {"STEPS": str(steps), "PACE": str(pace)} | keys.pop("environment", {})
        return self.create("python count.py", environment=environment, **keys)

    def saved(self, job: str) -> Path:
        """Return the folder of a counting job's checkpoint."""
        folder = str(self.client.show(job)["checkpoint"]).removeprefix("gs://")
        return self.home / "emulator" / "buckets" / folder

    def status(self, job: str) -> str:
        return str(self.client.show(job)["status"])

    def end(self, job: str, timeout: float = 240) -> dict[str, Any]:
        """Wait until a job has ended."""
        # An ended job stays ended, so rare polls miss nothing and spare the server.
        ended = partial(self._has_ended, job)
        self.until(ended, timeout, f"{job} to end", every=0.25)
        return self.client.show(job)

    def _has_ended(self, job: str) -> bool:
        return self.client.show(job)["ended"] is not None

    def reaches(self, job: str, *statuses: str, timeout: float = 120) -> None:
        self.until(lambda: self.status(job) in statuses, timeout, f"{job} to be {statuses}")

    def until(
        self,
        condition: Callable[[], bool],
        timeout: float = 120,
        what: str = "",
        every: float = 0.1,
    ) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                path = self.home / "server.log"
                log = path.read_text()[-3000:] if path.exists() else "there is no server.log"
                raise AssertionError(f"waited {timeout} s for {what or condition}\n{log}")
            time.sleep(every)

    def files(self) -> Iterator[Path]:
        """Yield every file under the home and the emulated hosts; some may vanish meanwhile."""
        for folder, _, names in os.walk(self.home):
            yield from (Path(folder) / name for name in names)

    def cloud_is_empty(self, timeout: float = 60) -> None:
        self.until(lambda: not self.resources(), timeout, "the cloud to be empty")

    def clear(self) -> None:
        """Remove all jobs and slices, evidence against hosts, and faults and limits of the cloud.

        The cached environments, the server's log and the next number of a job stay.
        """
        self.emulator("faults", clear=True)
        for zone, pools in self.emulator("status")["capacity"].items():
            for accelerator in pools:
                self.emulator("capacity", zone=zone, accelerator=accelerator, chips=None)
        jobs = [job["id"] for job in self.client.list(all=True)]
        self.client.delete(jobs)
        self.client.clean(jobs, outputs=True)
        for host in self.client.known_hosts():
            if host["state"] != "good":
                self.client.forgive_host(host["identity"])
        self.cloud_is_empty()

    def kill_server(self) -> None:
        """Kill the server with SIGKILL, which resembles a loss of power."""
        status = self.client.server_status()
        if status is not None:
            os.kill(int(status["pid"]), signal.SIGKILL)

    def stop(self) -> None:
        try:
            self.client.stop_server()
        finally:
            launch.stop(self.home / "emulator")


@contextmanager
def temporary_installation(folder: Path) -> Iterator[Installation]:
    # Unix sockets take 100 characters; pytest's folders are longer.
    import tempfile

    home = Path(tempfile.mkdtemp(prefix="dl-"))
    installation = Installation(home, folder / "jobs")
    try:
        yield installation
    finally:
        installation.stop()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def worker_installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """One installation for all tests of a process. Each module clears it after its last test."""
    with temporary_installation(tmp_path_factory.mktemp("installation")) as new:
        yield new
