"""One emulated host: a process that is the ancestor of everything that runs there.

    emulator ── pipe ── host ─┬─ SSH server ── commands
                              └─ what commands left behind

The host adopts orphans, so a daemon that a command started is found and ended with it. It lives as
long as the pipe: when the emulator dies, even by `kill -9`, the pipe closes and the host ends. The
SSH server is a separate process, so that it can hang (`silent`) or die (`reboot`) while the host
still takes orders.

It is forked from a process that has imported this module, so it starts in milliseconds.
"""

import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import asyncssh

from drumline.cloud.emulator import processes
from drumline.cloud.emulator.hosts import devices
from drumline.cloud.emulator.hosts.sshd import Door, authorized_keys, serve_forever
from drumline.cloud.emulator.hosts.terms import ACKNOWLEDGED, HostSpec, MachineFaults, Up

VFIO_LINE = "Failed to initialize TPU system: open(/dev/vfio/0): Device or resource busy"
STARTUP_LOG = "startup-script.log"
"""The file for a startup script's output; the cloud has it in the system's journal."""
_BACKLOG = 128

# A slow host's programs run a fifth of the time, in slices short enough to look steady.
_SLOW_RUNS = 0.05
_SLOW_RESTS = 0.20
# How often ended orphans are reaped when nothing else happens.
_REAP_EVERY = 1.0


def environment(spec: HostSpec) -> Mapping[str, str]:
    """The environment of a command that is started now, without what SSH adds."""
    here = str(Path(sys.executable).parent)
    return {
        "HOME": str(spec.home),
        "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TMPDIR": str(spec.home / "tmp"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices.present(spec)}",
        "DRUMLINE_EMULATED": "1",
        "DRUMLINE_EMULATOR": str(spec.emulator),
        "DRUMLINE_BUCKETS": str(spec.buckets),
        "DRUMLINE_DEV": str(spec.home / "dev"),
        "DRUMLINE_MACHINE": str(spec.machine),
        "DRUMLINE_HOST_TAG": spec.mark,
    }


def main(spec: HostSpec, pipe: Connection) -> None:
    """Run the host until ordered to end, or until the emulator is gone."""
    # Inherited memory stays shared with the other hosts if the garbage collector ignores it.
    gc.freeze()
    os.setsid()
    processes.adopt_orphans()
    host = _Host(spec, pipe)
    try:
        host.furnish()
        host.obey()
    except Exception:
        traceback.print_exc()
    finally:
        host.end()


class _Host:
    def __init__(self, spec: HostSpec, pipe: Connection) -> None:
        self._spec = spec
        self._pipe = pipe
        self._sshd: int | None = None
        self._boots_at: float | None = time.monotonic() + spec.boot_seconds
        self._faults = spec.faults
        self._resting = False
        self._told_to_end = False
        public = asyncssh.import_private_key(spec.host_key).export_public_key().decode()
        self.public_key = " ".join(public.split()[:2])
        self._door = Door(
            home=str(spec.home),
            environment=partial(environment, spec),
            authorized=authorized_keys(spec.metadata.get("ssh-keys", "")),
            host_key=spec.host_key,
        )
        # Bound but not listening: the host keeps its port through every reboot, and connections
        # are refused meanwhile.
        self._reserved = _socket(0)
        self.port: int = self._reserved.getsockname()[1]

    def furnish(self) -> None:
        """Create the home folder and the stand-in for /dev."""
        home = self._spec.home
        home.mkdir(parents=True, mode=0o700, exist_ok=True)
        (home / "tmp").mkdir(exist_ok=True)
        devices.lay(self._spec, self._faults)

    def obey(self) -> None:
        """Carry out the emulator's orders and what is due, until the pipe closes."""
        while True:
            self._boot_if_due()
            processes.reap()
            with contextlib.suppress(InterruptedError):
                if self._pipe.poll(self._patience()):
                    try:
                        order = self._pipe.recv()
                    except (EOFError, OSError):
                        return
                    if order == "end":
                        self._told_to_end = True
                        return
                    if isinstance(order, MachineFaults):
                        self._take_faults(order)
                    else:
                        self._break(order)
                    with contextlib.suppress(OSError):
                        self._pipe.send(ACKNOWLEDGED)
            self._keep_slow()

    def end(self) -> None:
        """Kill everything. The emulator, if it still runs, keeps or removes the disk."""
        self._reserved.close()
        if not processes.end_all(lambda: processes.descendants(os.getpid())):
            print(f"{self._spec.home}: some processes do not end", file=sys.stderr)
        if not self._told_to_end:
            shutil.rmtree(self._spec.home, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._spec.home.parent.rmdir()

    def _patience(self) -> float:
        if self._faults.slow:
            return _SLOW_RESTS if self._resting else _SLOW_RUNS
        if self._boots_at is not None:
            return max(0.0, self._boots_at - time.monotonic())
        return _REAP_EVERY

    def _boot_if_due(self) -> None:
        if self._boots_at is None or time.monotonic() < self._boots_at:
            return
        self._boots_at = None
        # As the kernel's boot_id: distinguishes what was started before and after a reboot.
        (self._spec.home / "dev" / "boot_id").write_text(uuid.uuid4().hex)
        listening = _socket(self.port)
        listening.listen(_BACKLOG)
        host = os.getpid()
        heard, answers = os.pipe()
        self._sshd = os.fork()
        if self._sshd == 0:
            os.close(heard)
            self._become_sshd(listening, host, answers)
        listening.close()
        os.close(answers)
        with open(heard, "rb") as first:
            if not first.read(1):
                raise RuntimeError("the SSH server did not start")
        # Only now: callers log in as soon as we are up.
        with contextlib.suppress(OSError):  # the emulator is gone; `obey` will notice
            self._pipe.send(Up(self.port, self.public_key))
        self._run_startup_script()

    def _run_startup_script(self) -> None:
        """Start the script after each boot without waiting, as the cloud's guest agent does."""
        script = self._spec.metadata.get("startup-script")
        if not script:
            return
        home = self._spec.home
        file = home / "dev" / "startup-script"
        file.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}")
        file.chmod(0o700)
        with (home / STARTUP_LOG).open("ab") as log:
            try:
                program = subprocess.Popen(
                    [file],
                    cwd=home,
                    env=environment(self._spec),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as wrong:
                log.write(f"startup-script: {wrong.strerror}\n".encode())
            else:
                program.returncode = 0  # `obey` reaps what ends

    def _become_sshd(self, listening: socket.socket, host: int, answers: int) -> NoReturn:
        try:
            processes.die_with_parent()
            if os.getppid() == host:
                self._reserved.close()
                serve_forever(listening, self._door, answers)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _break(self, how: str) -> None:
        match how:
            case "silent":
                self._signal_sshd(signal.SIGSTOP)
            case "reboot":
                self._heal()
                self._sshd = None
                processes.end_all(lambda: processes.descendants(os.getpid()))
                shutil.rmtree(self._spec.home / "tmp", ignore_errors=True)
                (self._spec.home / "tmp").mkdir()
                self._boots_at = time.monotonic() + self._spec.boot_seconds
            case "notice":
                # As a machine that shuts down. Announced first, so that nobody who sees a program
                # end still believes that the host stays.
                (self._spec.home / "dev" / "going_down").write_text("preempted")
                processes.send(self._programs(), signal.SIGTERM)
            case "heal":
                self._heal()

    def _heal(self) -> None:
        """End what is wrong with the host; what is wrong with its machine stays."""
        (self._spec.home / "dev" / "going_down").unlink(missing_ok=True)
        self._rest(False)
        self._signal_sshd(signal.SIGCONT)

    def _take_faults(self, faults: MachineFaults) -> None:
        before, self._faults = self._faults, faults
        devices.lay(self._spec, faults)
        if faults.vfio and not before.vfio:
            self._fail_programs()
        if not faults.slow:
            self._rest(False)

    def _signal_sshd(self, what: signal.Signals) -> None:
        if self._sshd is not None:
            processes.send([self._sshd], what)

    def _fail_programs(self) -> None:
        """Have the programs fail with the error for a chip that cannot be opened."""
        programs = self._programs()
        processes.send(programs, signal.SIGSTOP)
        for log in {processes.stdout_of(pid) for pid in programs}:
            if log is not None:
                with log.open("a") as out:
                    out.write(f"{VFIO_LINE}\n")
        processes.send(programs, signal.SIGKILL)

    def _programs(self) -> list[int]:
        """Processes whose output is a file: a job's program, but not its agent."""
        return [
            pid
            for pid in self._all_but_sshd()
            if processes.stdout_of(pid) and ".drumline/agent-" not in processes.command_line(pid)
        ]

    def _all_but_sshd(self) -> list[int]:
        return [pid for pid in processes.descendants(os.getpid()) if pid != self._sshd]

    def _keep_slow(self) -> None:
        if self._faults.slow:
            self._rest(not self._resting)

    def _rest(self, resting: bool) -> None:
        if resting or self._resting:
            what = signal.SIGSTOP if resting else signal.SIGCONT
            processes.send(self._all_but_sshd(), what)
        self._resting = resting


def _socket(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock
