"""Compiler processes, started on first use and kept for further programs.

Compilers run in separate processes because the number of emulated devices is fixed when JAX starts,
and because a compiler that crashes must not end the user's process.
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

MAX_DEVICES = 2048
"""The largest number of devices of the CPU backend."""
SCRIPT = Path(__file__).with_name("worker.py")
TPU_PYTHON = "DRUMLINE_TPU_PYTHON"
"""The environment variable with a Python that has libtpu."""


@dataclass(frozen=True)
class CompilerAnswer:
    """A compiled program."""

    text: str
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes per device of arguments, outputs and temporaries, from the TPU's compiler only."""


class Worker:
    """A compiler process."""

    def __init__(self, python: list[str], arguments: list[str], environment: dict[str, str]):
        """Start the process."""
        self._lock = threading.Lock()
        self._request_count = 0
        # Created by this process, so that it is removed even if the worker is killed.
        self._folder = tempfile.TemporaryDirectory(prefix="drumline-inspect-")
        try:
            self._process = subprocess.Popen(
                [*python, str(SCRIPT), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # XLA prints a stack trace when code generation fails, as it does for bf16.
                stderr=subprocess.DEVNULL,
                env=environment | {"DRUMLINE_WORKER_FOLDER": self._folder.name},
            )
        except OSError:
            self._folder.cleanup()
            raise

    @property
    def alive(self) -> bool:
        """True if the process is running."""
        return self._process.poll() is None

    def compile(self, request: dict[str, Any], code: bytes) -> CompilerAnswer:
        """Compile a program.

        Raises:
            UserError: the compiler rejected the program or crashed.
        """
        with self._lock:
            try:
                answer, text = self._send(request, code)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                answer, text = {"error": ""}, ""  # it crashed, or is not a Drumline worker
            except BaseException:
                # After an interrupt, the next program would receive this program's answer.
                self.stop()
                raise
        if "error" not in answer:
            return CompilerAnswer(text, answer.get("memory", {}))
        if answer["error"]:
            raise UserError(f"the compiler refuses the program: {_first_line(answer['error'])}")
        exit_code = self._process.poll()
        self.stop()
        event = "gave no answer" if exit_code is None else f"ended with {exit_code}"
        raise UserError(f"the compiler's process {event} while it compiled the program")

    def _send(self, request: dict[str, Any], code: bytes) -> tuple[dict[str, Any], str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._request_count += 1
        header = {**request, "number": self._request_count, "length": len(code)}
        self._process.stdin.write(json.dumps(header).encode() + b"\n" + code)
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            return {"error": ""}, ""
        answer = json.loads(line)
        if answer["number"] != self._request_count:
            raise ValueError(answer["number"])
        return answer, self._process.stdout.read(answer["length"]).decode()

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # it did not read the last request
                    pipe.close()
        self._process.wait()
        self._folder.cleanup()


def _first_line(error: str) -> str:
    """Return the first line of a compiler's error, which stack traces and graphs follow."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return lines[0][:400] if lines else "it gave no reason"


_workers: dict[str, tuple[int, Worker]] = {}
"""The worker of each compiler, with its number of devices."""
_workers_lock = threading.Lock()


def cpu_worker(device_count: int) -> Worker:
    """Return a worker with at least this number of emulated CPU devices.

    Raises:
        UserError: the CPU backend does not support this number.
    """
    if device_count > MAX_DEVICES:
        raise UserError(
            f"{device_count:,} devices are more than the CPU backend can emulate, which is "
            f"{MAX_DEVICES:,}"
        )
    # Devices cost little. With at least 256, most meshes share one process.
    device_count = 256 if device_count <= 256 else MAX_DEVICES
    flags = f"--xla_force_host_platform_device_count={device_count}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    arguments = ["cpu", str(device_count)]
    return _get_worker("cpu", device_count, [sys.executable], arguments, environment)


def tpu_worker() -> Worker:
    """Return a worker with the TPU's compiler.

    Raises:
        UserError: the Python in `DRUMLINE_TPU_PYTHON` cannot be run.
    """
    python = os.environ.get(TPU_PYTHON)
    environment = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        # The worker uses no TPU, so it may run beside other workers and programs that do.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    }
    try:
        return _get_worker("tpu", 0, [python or sys.executable], ["tpu"], environment)
    except OSError as error:
        raise UserError(
            f"{python} cannot be run ({error.strerror}): set {TPU_PYTHON} to a Python that has "
            "libtpu, or unset it"
        ) from error


def has_tpu_compiler() -> bool:
    """Return True if libtpu is installed, in this Python or in `DRUMLINE_TPU_PYTHON`."""
    if os.environ.get(TPU_PYTHON):
        return True
    supported = platform.system() == "Linux" and platform.machine() == "x86_64"
    return supported and find_spec("libtpu") is not None


def _get_worker(
    compiler: str,
    device_count: int,
    python: list[str],
    arguments: list[str],
    environment: dict[str, str],
) -> Worker:
    with _workers_lock:
        current = _workers.get(compiler)
        if current is not None:
            current_devices, worker = current
            if current_devices >= device_count and worker.alive:
                return worker
            worker.stop()
        # A user's settings of JAX and XLA are for the user's program.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", "XLA_"))
        }
        worker = Worker(python, arguments, inherited | environment)
        _workers[compiler] = (device_count, worker)
        return worker


@atexit.register
def stop_workers() -> None:
    """Stop all workers. The next program starts a new one."""
    with _workers_lock:
        for _, worker in _workers.values():
            worker.stop()
        _workers.clear()
