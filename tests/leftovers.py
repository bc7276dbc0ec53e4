"""What a test run leaves running: every process of ours is to be gone when the last test is.

Whatever a test starts inherits the name of the run and of the test through its environment. A
process whose environment a test made from nothing is known by the run's temporary folder, where its
home lies.
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
# Who was told to end may take a moment on a busy machine.
_PATIENCE = 15.0


@dataclass(frozen=True)
class Leftover:
    """A process that outlived the tests."""

    pid: int
    command: str
    test: str

    def __str__(self) -> str:
        """One line for whoever has to find it."""
        return f"{self.pid} {self.command or '?'} (started by {self.test or 'an unknown test'})"


def find(marks: Sequence[str]) -> list[Leftover]:
    """Every living process with one of these texts in its environment; not this one."""
    wanted = [mark.encode() for mark in marks]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            known = (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if any(mark in known for mark in wanted) and state not in "ZX":
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                entries = dict(line.partition(b"=")[::2] for line in known.split(b"\0"))
                test = entries.get(TEST.encode(), b"").decode()
                found.append(Leftover(int(folder.name), command.strip()[:200], test))
    return [one for one in found if one.pid != os.getpid()]


def wait_for_none(marks: Sequence[str]) -> list[Leftover]:
    """What is left when all that was ending has ended."""
    deadline = time.monotonic() + _PATIENCE
    while (left := find(marks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def end(left: Sequence[Leftover]) -> None:
    """Clear away what was left, so that it does not disturb the next run."""
    for one in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
