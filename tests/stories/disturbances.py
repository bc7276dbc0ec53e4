"""A training job on the emulator that is disturbed at random moments, and one that is not.

Each blow waits until the program's own heartbeat says that its step has come, or until the program
has started and a moment that was drawn has passed, and then until the attempt it fell on has ended.
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
from tests.jobs.world import World

EXAMPLES = Path(__file__).parents[2] / "examples"
HOSTS = 2
_PIDFD_GETFD = 438


@dataclass(frozen=True)
class Blow:
    """What happens to an attempt, and when."""

    kind: str
    step: int = 0
    """The step at which it falls; 0 while the program starts."""
    wait: float = 0.0
    """Seconds from the program's start."""

    def __str__(self) -> str:
        """`slice taken at step 12`."""
        return f"{self.kind} at " + (f"step {self.step}" if self.step else f"{self.wait:.1f} s")


@dataclass(frozen=True)
class Target:
    """A job on a world, and the dice that aim."""

    world: World
    job: str
    chance: random.Random

    def programs(self, *hosts: int) -> list[int]:
        """The processes of the job's program on these hosts."""
        home = os.fsencode(self.world.home / "emulator")
        wanted = [b"DRUMLINE_EMULATOR=" + home, b"DRUMLINE_JOB_ID=" + self.job.encode()]
        numbers = {b"DRUMLINE_HOST=%d" % host for host in hosts}
        found = []
        for pid in processes.find_by_environment(f"DRUMLINE_JOB_ID={self.job}"):
            with contextlib.suppress(OSError):
                known = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
                if known.issuperset(wanted) and known & numbers:
                    found.append(pid)
        return found

    def step(self) -> int:
        """The step that the program on host 0 told last; 0 where it has told none."""
        for pid in self.programs(0):
            with contextlib.suppress(OSError):
                known = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                path = next(one for one in known if one.startswith(b"DRUMLINE_HEARTBEAT="))
                told = json.loads(Path(os.fsdecode(path.partition(b"=")[2])).read_text())
                return int(told["step"])
        return 0

    def attempts(self) -> list[dict[str, Any]]:
        """The job's attempts so far, the last of them perhaps under way."""
        return list(self.world.client.show(self.job)["attempts"])


def kill_a_host(target: Target) -> None:
    """SIGKILL to all that the program is on one host; the others find out by themselves."""
    processes.send(target.programs(target.chance.randrange(HOSTS)), signal.SIGKILL)


def kill_all_hosts(target: Target) -> None:
    """SIGKILL to the program on every host."""
    processes.send(target.programs(*range(HOSTS)), signal.SIGKILL)


def give_notice(target: Target) -> None:
    """SIGTERM to the program, and two seconds later the slice is gone."""
    target.world.emulator("preempt", target=target.job, notice=2.0)


def take_the_slice(target: Target) -> None:
    """No word of warning."""
    target.world.emulator("preempt", target=target.job)


def cut_the_connections(target: Target) -> None:
    """One host loses every connection that its program has."""
    host = target.chance.randrange(HOSTS)
    cut = [_cut(pid) for pid in target.programs(host)]
    if not any(cut):
        # Where the kernel keeps us from it, the host's connection to the server goes instead.
        target.world.emulator("break", target=target.job, host=host, how="silent")


KINDS: dict[str, Callable[[Target], None]] = {
    "one host killed": kill_a_host,
    "all hosts killed": kill_all_hosts,
    "notice": give_notice,
    "connections cut": cut_the_connections,
    "slice taken": take_the_slice,
}
"""What can happen."""
AT_THE_START = 0.3
"""How often a blow falls while the program is still starting, of those that can."""
STARTING = 2.0
"""Seconds in which no program is done with starting."""


def draw(count: int, steps: int, chance: random.Random) -> list[Blow]:
    """Blows of all kinds, in any order, at moments spread over the first third of the run.

    The rest is there for the last blow to fall before a fast program is done.
    """
    kinds = [kind for _ in range(-(-count // len(KINDS))) for kind in _shuffled(chance)]
    moments = sorted(chance.sample(range(1, steps // 3), count))
    return [_blow(kind, step, chance) for kind, step in zip(kinds, moments, strict=False)]


def _blow(kind: str, step: int, chance: random.Random) -> Blow:
    # A program that starts has no connections yet.
    if kind != "connections cut" and chance.random() < AT_THE_START:
        return Blow(kind, wait=chance.uniform(0, STARTING))
    return Blow(kind, step)


def _shuffled(chance: random.Random) -> list[str]:
    return chance.sample(list(KINDS), len(KINDS))


def train(world: World, config: str, **settings: int) -> str:
    """A job that trains an example on two hosts of four devices; returns its id."""
    words = "".join(f" --set {name}={value}" for name, value in settings.items())
    job = {
        "name": config,
        "accelerator": "v4-16",
        "workdir": str(EXAMPLES),
        "checkpoint": "gs://stories/runs",
        "environment": {
            "XLA_FLAGS": quick_flags(4),
            "JAX_COMPILATION_CACHE_DIR": str(world.home / "compiled"),
        },
        "retry": {"failures": "unlimited"},
        "stop_grace": 2,
        "run": f"python -m drumline.train {config}.py{words}",
    }
    return str(world.client.create(job)["id"])


def disturb(target: Target, blows: list[Blow], timeout: float = 120) -> list[dict[str, Any]]:
    """Let the blows fall, each on an attempt of its own; returns those attempts as they ended."""
    ended: list[dict[str, Any]] = []
    struck = 0
    for blow in blows:
        target.world.until(partial(_has_come, target, blow, struck), timeout, str(blow))
        time.sleep(blow.wait)
        struck = len(target.attempts())
        KINDS[blow.kind](target)
        target.world.until(partial(_has_ended, target, struck), timeout, f"the end by {blow}")
        ended.append(target.attempts()[struck - 1])
    return ended


def parameters(world: World, job: str, timeout: float = 180) -> str:
    """The fingerprint of the parameters that a job ended with."""
    shown = world.end(job, timeout)
    log = b"".join(world.client.logs(job)).decode()
    assert shown["status"] == "SUCCEEDED", f"{shown['reason']}\n{log[-3000:]}"
    return log.rpartition("\nparameters ")[2].split()[0]


def _has_come(target: Target, blow: Blow, struck: int) -> bool:
    attempts = len(target.attempts())
    if attempts <= struck or _has_ended(target, attempts):
        return False
    started = all(target.programs(host) for host in range(HOSTS))
    return started and target.step() >= blow.step


def _has_ended(target: Target, attempt: int) -> bool:
    return target.attempts()[attempt - 1]["ended"] is not None


def _cut(pid: int) -> bool:
    """Shut down the TCP connections of another process; whether there was one that we could."""
    done = False
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            for entry in os.listdir(f"/proc/{pid}/fd"):
                done |= _shut(process, int(entry))
        finally:
            os.close(process)
    return done


def _shut(process: int, number: int) -> bool:
    theirs = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, number, 0)
    if theirs < 0:
        return False
    try:
        with socket.socket(fileno=theirs) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False
