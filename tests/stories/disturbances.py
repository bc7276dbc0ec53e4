"""Training jobs on the emulator, with disturbances at random moments.

A disturbance waits until the program's heartbeat reports its step, or until the program has started
and a random time has passed. The next one waits until the disturbed attempt has ended.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drumline.cloud.emulator import processes
from tests.compiling import quick_flags
from tests.jobs.installation import Installation

EXAMPLES = Path(__file__).parents[2] / "examples"
HOSTS = 2
_PIDFD_GETFD = 438


@dataclass(frozen=True)
class Disturbance:
    """A disturbance of an attempt, and its time."""

    kind: str
    step: int = 0
    """The step at which it happens; 0 during the startup of the program."""
    wait: float = 0.0
    """Seconds from the program's start."""

    def __str__(self) -> str:
        """Return a text such as `slice taken at step 12`."""
        return f"{self.kind} at " + (f"step {self.step}" if self.step else f"{self.wait:.1f} s")


@dataclass(frozen=True)
class Target:
    """A job to disturb."""

    installation: Installation
    job: str
    rng: random.Random

    def programs(self, *hosts: int) -> list[int]:
        """Return the processes of the job's program on these hosts."""
        home = os.fsencode(self.installation.home / "emulator")
        required = [b"DRUMLINE_EMULATOR=" + home, b"DRUMLINE_JOB_ID=" + self.job.encode()]
        numbers = {b"DRUMLINE_HOST=%d" % host for host in hosts}
        pids = []
        for pid in processes.find_by_environment(f"DRUMLINE_JOB_ID={self.job}"):
            with contextlib.suppress(OSError):
                environment = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
                if environment.issuperset(required) and environment & numbers:
                    pids.append(pid)
        return pids

    def step(self) -> int:
        """Return the last step that the program on host 0 reported, or 0."""
        for pid in self.programs(0):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                path = next(item for item in environment if item.startswith(b"DRUMLINE_HEARTBEAT="))
                fields = json.loads(Path(os.fsdecode(path.partition(b"=")[2])).read_text())
                return int(fields["step"])
        return 0

    def attempts(self) -> list[dict[str, Any]]:
        """Return the job's attempts so far, including the current one."""
        return list(self.installation.client.show(self.job)["attempts"])


def kill_one_host(target: Target) -> None:
    """Send SIGKILL to the program on one host."""
    processes.send(target.programs(target.rng.randrange(HOSTS)), signal.SIGKILL)


def kill_all_hosts(target: Target) -> None:
    """Send SIGKILL to the program on every host."""
    processes.send(target.programs(*range(HOSTS)), signal.SIGKILL)


def send_notice(target: Target) -> None:
    """Send SIGTERM to the program, and preempt the slice two seconds later."""
    target.installation.emulator("preempt", target=target.job, notice=2.0)


def preempt_slice(target: Target) -> None:
    """Preempt the slice without notice."""
    target.installation.emulator("preempt", target=target.job)


def cut_connections(target: Target) -> None:
    """Close all connections of the program on one host."""
    host = target.rng.randrange(HOSTS)
    cut = [_cut_connections(pid) for pid in target.programs(host)]
    if not any(cut):
        # If the kernel forbids this, break the host's connection to the server instead.
        target.installation.emulator("break", target=target.job, host=host, how="silent")


KINDS: dict[str, Callable[[Target], None]] = {
    "one host killed": kill_one_host,
    "all hosts killed": kill_all_hosts,
    "notice": send_notice,
    "connections cut": cut_connections,
    "slice taken": preempt_slice,
}
"""The disturbances, by name."""
STARTUP_SHARE = 0.3
"""The share of disturbances during the startup of the program, of those that may happen then."""
STARTUP_SECONDS = 2.0
"""No program has started within this time."""


def draw_disturbances(count: int, steps: int, rng: random.Random) -> list[Disturbance]:
    """Return disturbances of all kinds, in random order, in the first third of the run.

    In the rest of the run the last disturbance can still happen before a fast program is done.
    """
    kinds = [kind for _ in range(-(-count // len(KINDS))) for kind in _shuffled(rng)]
    at_steps = sorted(rng.sample(range(1, steps // 3), count))
    return [_make_disturbance(kind, step, rng) for kind, step in zip(kinds, at_steps, strict=False)]


def _make_disturbance(kind: str, step: int, rng: random.Random) -> Disturbance:
    # During startup a program has no connections.
    if kind != "connections cut" and rng.random() < STARTUP_SHARE:
        return Disturbance(kind, wait=rng.uniform(0, STARTUP_SECONDS))
    return Disturbance(kind, step)


def _shuffled(rng: random.Random) -> list[str]:
    return rng.sample(list(KINDS), len(KINDS))


def train(installation: Installation, config: str, **settings: int) -> str:
    """Create a job that trains an example on two hosts of four devices, and return its id."""
    words = "".join(f" --set {name}={value}" for name, value in settings.items())
    job = {
        "name": config,
        "accelerator": "v4-16",
        "workdir": str(EXAMPLES),
        "checkpoint": "gs://stories/runs",
        "environment": {
            "XLA_FLAGS": quick_flags(4),
            "JAX_COMPILATION_CACHE_DIR": str(installation.home / "compiled"),
        },
        "retry": {"failures": "unlimited"},
        "stop_grace": 2,
        "run": f"python -m drumline.train {config}.py{words}",
    }
    return str(installation.client.create(job)["id"])


def disturb(
    target: Target, disturbances: list[Disturbance], timeout: float = 120
) -> list[dict[str, Any]]:
    """Disturb a different attempt with each disturbance. Return these attempts after their end."""
    ended: list[dict[str, Any]] = []
    attempt_count = 0
    for disturbance in disturbances:
        target.installation.until(
            partial(_is_due, target, disturbance, attempt_count), timeout, str(disturbance)
        )
        time.sleep(disturbance.wait)
        attempt_count = len(target.attempts())
        KINDS[disturbance.kind](target)
        target.installation.until(
            partial(_has_ended, target, attempt_count), timeout, f"the end by {disturbance}"
        )
        ended.append(target.attempts()[attempt_count - 1])
    return ended


def parameters(installation: Installation, job: str, timeout: float = 180) -> str:
    """Return the fingerprint of the final parameters of a job."""
    shown = installation.end(job, timeout)
    log = b"".join(installation.client.logs(job)).decode()
    assert shown["status"] == "SUCCEEDED", f"{shown['reason']}\n{log[-3000:]}"
    return log.rpartition("\nparameters ")[2].split()[0]


def _is_due(target: Target, disturbance: Disturbance, attempt_count: int) -> bool:
    attempts = len(target.attempts())
    if attempts <= attempt_count or _has_ended(target, attempts):
        return False
    started = all(target.programs(host) for host in range(HOSTS))
    return started and target.step() >= disturbance.step


def _has_ended(target: Target, attempt: int) -> bool:
    return target.attempts()[attempt - 1]["ended"] is not None


def _cut_connections(pid: int) -> bool:
    """Shut down the TCP connections of another process. Return True if there was one."""
    done = False
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            for entry in os.listdir(f"/proc/{pid}/fd"):
                done |= _shut_down(process, int(entry))
        finally:
            os.close(process)
    return done


def _shut_down(process: int, number: int) -> bool:
    descriptor = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, number, 0)
    if descriptor < 0:
        return False
    try:
        with socket.socket(fileno=descriptor) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False
