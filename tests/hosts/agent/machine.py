"""A machine for the agent: its own folder, and the processes started there."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.hosts.agent.processes import all_pids, process_environment
from drumline.hosts.agent.status import has_waiter
from drumline.hosts.host_files import AGENT_FILE
from drumline.hosts.values import (
    Address,
    HostAssignment,
    attempt_folder,
    program_message,
    work_folder,
)
from tests.hosts.installed_agent import installed_agent
from tests.hosts.stand_in import program


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return value


class Machine:
    """A host reached without SSH."""

    prepared: dict[str, Any]

    def __init__(self, home: Path) -> None:
        self.home = home
        self.agent = home.with_name(AGENT_FILE)
        self.agent.write_bytes(installed_agent())
        self.environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
        self.what = program()
        self.folder = home / ".drumline" / attempt_folder(self.what)

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-I", "-S", str(self.agent), *words]

    def call(self, *words: str, sent: object = None) -> dict[str, Any]:
        done = subprocess.run(
            self.words(*words),
            input=json.dumps(sent).encode(),
            capture_output=True,
            env=self.environment,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        answer = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(answer, dict)
        return answer

    def attempt(self, verb: str, *words: str, sent: object = None) -> dict[str, Any]:
        return self.call(verb, attempt_folder(self.what), *words, sent=sent)

    def put(self, run: str, **parts: Any) -> None:
        self.what = program(run=run, **parts)
        self.folder = self.home / ".drumline" / attempt_folder(self.what)
        place = HostAssignment(0, Address("", 0, "10.0.0.1"), 0, 2)
        self.prepared = self.attempt("prepare", "0.2", sent=vars(program_message(self.what, place)))

    def start(self) -> dict[str, Any]:
        return self.attempt("start", sent={"coordinator": "10.0.0.1:8476"})

    def finish(self, run: str, **parts: Any) -> dict[str, Any]:
        self.put(run, **parts)
        self.start()
        return self.ended()

    def ended(self) -> dict[str, Any]:
        """Wait for the end of the program. Return its status."""

        def exited() -> dict[str, Any] | None:
            status = self.attempt("status")
            return status if status["state"] == "exited" else None

        # Each `status` is a process, so the first is sent when the waiter has ended.
        wait_for(lambda: not has_waiter(str(self.folder)), "the waiter ended")
        status: dict[str, Any] = wait_for(exited, "the program ended")
        return status

    def log(self) -> str:
        """Return the log so far. The program may write before or after the answer to `start`."""
        file = self.folder / "log"
        return file.read_text() if file.exists() else ""

    def leader(self) -> int:
        file = self.folder / "pid.json"
        wait_for(file.exists, "the leader is written down")
        return int(json.loads(file.read_text())["pid"])

    def written(self, name: str) -> str:
        file = self.file(name)
        return file.read_text() if file.exists() else ""

    def file(self, name: str) -> Path:
        return self.home / ".drumline" / work_folder(self.what) / name


def processes_with(variable: str) -> list[int]:
    return [pid for pid in all_pids() if variable.encode() in process_environment(pid)]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
