"""The processes that compile: started when one is needed, kept for the next program.

A process of its own, as the number of emulated devices is fixed when JAX starts, and as a compiler
that dies takes only that process with it.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drumline.errors import UserError

MOST_DEVICES = 2048
"""The CPU backend has no more."""
SCRIPT = Path(__file__).with_name("worker.py")
TPU_PYTHON = "DRUMLINE_TPU_PYTHON"
"""Names a Python that has libtpu, where this one has not."""


@dataclass(frozen=True)
class Answer:
    """A compiled program's text, and what else the compiler told of it."""

    text: str
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes per device for arguments, outputs, temporaries: of the TPU's compiler alone."""


class Worker:
    """One process that compiles."""

    def __init__(self, python: list[str], arguments: list[str], environment: dict[str, str]):
        """Start it."""
        self._lock = threading.Lock()
        self._asked = 0
        # Here, so that a worker that is killed leaves nothing behind.
        self._folder = tempfile.TemporaryDirectory(prefix="drumline-inspect-")
        try:
            self._process = subprocess.Popen(
                [*python, str(SCRIPT), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # XLA prints a stack for each program whose code it cannot make: all of bf16.
                stderr=subprocess.DEVNULL,
                env=environment | {"DRUMLINE_WORKER_FOLDER": self._folder.name},
            )
        except OSError:
            self._folder.cleanup()
            raise

    @property
    def alive(self) -> bool:
        """Whether it can take another program."""
        return self._process.poll() is None

    def compile(self, request: dict[str, Any], code: bytes) -> Answer:
        """Have a program compiled.

        Raises:
            UserError: the compiler refused it, or died of it.
        """
        with self._lock:
            try:
                answer, text = self._ask(request, code)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                answer, text = {"error": ""}, ""  # it died, or is no worker of ours
            except BaseException:
                # Interrupted, its answer would be taken for that of the next program.
                self.stop()
                raise
        if "error" not in answer:
            return Answer(text, answer.get("memory", {}))
        if answer["error"]:
            raise UserError(f"the compiler refuses the program: {_sentence(answer['error'])}")
        ended = self._process.poll()
        self.stop()
        how = "gave no answer" if ended is None else f"ended with {ended}"
        raise UserError(f"the compiler's process {how} while it compiled the program")

    def _ask(self, request: dict[str, Any], code: bytes) -> tuple[dict[str, Any], str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked += 1
        header = {**request, "number": self._asked, "length": len(code)}
        self._process.stdin.write(json.dumps(header).encode() + b"\n" + code)
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            return {"error": ""}, ""
        answer = json.loads(line)
        if answer["number"] != self._asked:
            raise ValueError(answer["number"])
        return answer, self._process.stdout.read(answer["length"]).decode()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # it never took the last request
                    pipe.close()
        self._process.wait()
        self._folder.cleanup()


def _sentence(error: str) -> str:
    """The first line of what a compiler said: behind it come stacks and graphs."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return lines[0][:400] if lines else "it gave no reason"


_workers: dict[str, tuple[int, Worker]] = {}
_starting = threading.Lock()


def cpu_worker(devices: int) -> Worker:
    """A process with at least so many emulated CPU devices."""
    if devices > MOST_DEVICES:
        raise UserError(
            f"{devices:,} devices are more than the CPU backend can stand for, which is "
            f"{MOST_DEVICES:,}"
        )
    # Devices cost little: with 256 from the start, most meshes share one process.
    wanted = 256 if devices <= 256 else MOST_DEVICES
    flags = f"--xla_force_host_platform_device_count={wanted}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return _worker("cpu", wanted, [sys.executable], ["cpu", str(wanted)], environment)


def tpu_worker() -> Worker:
    """A process with the TPU's compiler.

    Raises:
        UserError: the Python that is named for it cannot be run.
    """
    python = os.environ.get(TPU_PYTHON)
    environment = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        # It drives no TPU: several may compile at once, and beside a program that has the TPU.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    }
    try:
        return _worker("tpu", 0, [python or sys.executable], ["tpu"], environment)
    except OSError as wrong:
        raise UserError(
            f"{python} cannot be run ({wrong.strerror}): name a Python that has libtpu in "
            f"{TPU_PYTHON}, or none"
        ) from wrong


def has_tpu_compiler() -> bool:
    """Whether the TPU's compiler can be asked: libtpu is installed, here or where told."""
    if os.environ.get(TPU_PYTHON):
        return True
    here = platform.system() == "Linux" and platform.machine() == "x86_64"
    return here and find_spec("libtpu") is not None


def _worker(
    kind: str, size: int, python: list[str], arguments: list[str], environment: dict[str, str]
) -> Worker:
    with _starting:
        known = _workers.get(kind)
        if known is not None and known[0] >= size and known[1].alive:
            return known[1]
        if known is not None:
            known[1].stop()
        # A user's settings of JAX and XLA are for the user's program.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", "XLA_"))
        }
        started = Worker(python, arguments, inherited | environment)
        _workers[kind] = (size, started)
        return started


@atexit.register
def stop_workers() -> None:
    """End every process; the next program starts another."""
    with _starting:
        for _, worker in _workers.values():
            worker.stop()
        _workers.clear()
