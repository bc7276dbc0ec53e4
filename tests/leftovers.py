"""Find and end the processes that a test run leaves behind.

Every process that a test starts inherits the names of the run and of the test in its environment.
A process with a new environment is recognized by the run's temporary folder, which contains its
home.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RUN = "DRUMLINE_TEST_RUN"
TEST = "DRUMLINE_TEST"
# On a busy machine a process that was signalled may take a moment to end.
_TIMEOUT = 15.0


@dataclass(frozen=True)
class Leftover:
    """A process that outlived the tests."""

    pid: int
    command: str
    test: str

    def __str__(self) -> str:
        """Describe the process in one line."""
        return f"{self.pid} {self.command or '?'} (started by {self.test or 'an unknown test'})"


def find_leftovers(marks: Sequence[str]) -> list[Leftover]:
    """Return the other living processes that have one of these texts in their environment."""
    encoded_marks = [mark.encode() for mark in marks]
    leftovers = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if any(mark in environment for mark in encoded_marks) and state not in "ZX":
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                entries = dict(line.partition(b"=")[::2] for line in environment.split(b"\0"))
                test = entries.get(TEST.encode(), b"").decode()
                leftovers.append(Leftover(int(folder.name), command.strip()[:200], test))
    return [leftover for leftover in leftovers if leftover.pid != os.getpid()]


def wait_for_none(marks: Sequence[str]) -> list[Leftover]:
    """Wait until no such process is left. Return those that do not end in time."""
    deadline = time.monotonic() + _TIMEOUT
    while (leftovers := find_leftovers(marks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return leftovers


def kill(leftovers: Sequence[Leftover]) -> None:
    """Kill the processes, so that they do not disturb the next run."""
    for leftover in leftovers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leftover.pid, signal.SIGKILL)
