"""One emulated host: a process that is the ancestor of all processes on the host.

    emulator ── pipe ── host ─┬─ SSH server ── commands
                              └─ daemons that commands have started

The host adopts orphans, so it also ends the daemons that a command has started. When the emulator
dies, even by `kill -9`, the pipe closes and the host ends. The SSH server is a separate process, so
it can hang (`silent`) or die (`reboot`) while the host still carries out orders.

It is forked from a process that has imported this module, so it starts in milliseconds. A file for
each chip stands in for /dev/vfio.
"""

import contextlib
import gc
import os
import shutil
import signal
import socket
import stat
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
from drumline.cloud.emulator.host_messages import ACKNOWLEDGED, Booted, HostSpec, MachineFaults
from drumline.cloud.emulator.sshd import SshSettings, authorized_keys, serve_forever

VFIO_LINE = "Failed to initialize TPU system: open(/dev/vfio/0): Device or resource busy"
STARTUP_LOG = "startup-script.log"
"""The file for the output of a startup script. On the cloud it goes to the system's journal."""
_BACKLOG = 128

# On a slow host, programs run a fifth of the time, in intervals that are too short to notice.
_SLOW_RUN_SECONDS = 0.05
_SLOW_PAUSE_SECONDS = 0.20
# The interval at which ended orphans are reaped.
_REAP_SECONDS = 1.0


def environment(spec: HostSpec) -> Mapping[str, str]:
    """Return the environment of a new command, without the variables that SSH adds."""
    python_folder = str(Path(sys.executable).parent)
    return {
        "HOME": str(spec.home),
        "PATH": os.pathsep.join([python_folder, os.environ.get("PATH", os.defpath)]),
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TMPDIR": str(spec.home / "tmp"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count_devices(spec)}",
        "DRUMLINE_EMULATED": "1",
        "DRUMLINE_EMULATOR": str(spec.emulator),
        "DRUMLINE_BUCKETS": str(spec.buckets),
        # Real hosts have disks of their own. These share one, so that a job on a new slice need
        # not wait again for the files and environments of the job before.
        "DRUMLINE_CACHE": str(spec.emulator / "cache"),
        "DRUMLINE_DEV": str(spec.home / "dev"),
        "DRUMLINE_MACHINE": str(spec.machine),
        "DRUMLINE_HOST_TAG": spec.tag,
    }


def main(spec: HostSpec, pipe: Connection) -> None:
    """Run the host until it is ordered to end, or until the emulator is gone."""
    # Inherited memory stays shared with the other hosts if the garbage collector ignores it.
    gc.freeze()
    os.setsid()
    processes.adopt_orphans()
    host = _Host(spec, pipe)
    try:
        host.create_files()
        host.carry_out_orders()
    except Exception:
        traceback.print_exc()
    finally:
        host.end()


class _Host:
    """The state of the host, and its reactions to orders."""

    def __init__(self, spec: HostSpec, pipe: Connection) -> None:
        self._spec = spec
        self._pipe = pipe
        self._sshd: int | None = None
        self._boot_at: float | None = time.monotonic() + spec.boot_seconds
        self._faults = spec.faults
        self._paused = False
        self._end_ordered = False
        public = asyncssh.import_private_key(spec.host_key).export_public_key().decode()
        self.public_key = " ".join(public.split()[:2])
        self._ssh_settings = SshSettings(
            home=str(spec.home),
            environment=partial(environment, spec),
            authorized=authorized_keys(spec.metadata.get("ssh-keys", "")),
            host_key=spec.host_key,
        )
        # Bound but not listening: the host keeps its port through every reboot, and refuses
        # connections until it has booted.
        self._reserved_socket = _bind_socket(0)
        self.port: int = self._reserved_socket.getsockname()[1]

    def create_files(self) -> None:
        """Create the home folder and the device files."""
        home = self._spec.home
        home.mkdir(parents=True, mode=0o700, exist_ok=True)
        (home / "tmp").mkdir(exist_ok=True)
        create_devices(self._spec, self._faults)

    def carry_out_orders(self) -> None:
        """Carry out the emulator's orders, boot and reap, until the pipe closes."""
        while True:
            self._boot_if_due()
            processes.reap()
            with contextlib.suppress(InterruptedError):
                if self._pipe.poll(self._seconds_to_next_action()):
                    try:
                        order = self._pipe.recv()
                    except (EOFError, OSError):
                        return
                    if order == "end":
                        self._end_ordered = True
                        return
                    if isinstance(order, MachineFaults):
                        self._set_faults(order)
                    else:
                        self._carry_out(order)
                    with contextlib.suppress(OSError):
                        self._pipe.send(ACKNOWLEDGED)
            self._toggle_pause()

    def end(self) -> None:
        """Kill all processes. Remove the disk unless the emulator, which ordered this, does so."""
        self._reserved_socket.close()
        if not processes.kill_all(lambda: processes.descendants(os.getpid())):
            print(f"{self._spec.home}: some processes cannot be killed", file=sys.stderr)
        if not self._end_ordered:
            shutil.rmtree(self._spec.home, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._spec.home.parent.rmdir()

    def _seconds_to_next_action(self) -> float:
        if self._faults.slow:
            return _SLOW_PAUSE_SECONDS if self._paused else _SLOW_RUN_SECONDS
        if self._boot_at is not None:
            return max(0.0, self._boot_at - time.monotonic())
        return _REAP_SECONDS

    def _boot_if_due(self) -> None:
        if self._boot_at is None or time.monotonic() < self._boot_at:
            return
        self._boot_at = None
        # Stands in for the kernel's boot_id, which changes with every boot.
        (self._spec.home / "dev" / "boot_id").write_text(uuid.uuid4().hex)
        listening = _bind_socket(self.port)
        listening.listen(_BACKLOG)
        host = os.getpid()
        read_end, write_end = os.pipe()
        self._sshd = os.fork()
        if self._sshd == 0:
            os.close(read_end)
            self._become_sshd(listening, host, write_end)
        listening.close()
        os.close(write_end)
        with open(read_end, "rb") as signal_file:
            if not signal_file.read(1):
                raise RuntimeError("the SSH server did not start")
        # Only now, because callers log in as soon as they know that the host has booted.
        # If the emulator is gone, `carry_out_orders` returns next.
        with contextlib.suppress(OSError):
            self._pipe.send(Booted(self.port, self.public_key))
        self._run_startup_script()

    def _run_startup_script(self) -> None:
        """Start the script without waiting, as the cloud's guest agent does after each boot."""
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
            except OSError as error:
                log.write(f"startup-script: {error.strerror}\n".encode())
            else:
                program.returncode = 0  # `carry_out_orders` reaps it

    def _become_sshd(self, listening: socket.socket, host: int, ready: int) -> NoReturn:
        try:
            processes.die_with_parent()
            if os.getppid() == host:
                self._reserved_socket.close()
                serve_forever(listening, self._ssh_settings, ready)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _carry_out(self, order: str) -> None:
        match order:
            case "silent":
                self._signal_sshd(signal.SIGSTOP)
            case "reboot":
                self._heal()
                self._sshd = None
                processes.kill_all(lambda: processes.descendants(os.getpid()))
                shutil.rmtree(self._spec.home / "tmp", ignore_errors=True)
                (self._spec.home / "tmp").mkdir()
                self._boot_at = time.monotonic() + self._spec.boot_seconds
            case "notice":
                # The shutdown is announced before any program ends, so that no reader takes the
                # end of a program for a failure on a healthy host.
                (self._spec.home / "dev" / "going_down").write_text("preempted")
                processes.send(self._job_processes(), signal.SIGTERM)
            case "heal":
                self._heal()

    def _heal(self) -> None:
        """End the faults of the host. The faults of its machine stay."""
        (self._spec.home / "dev" / "going_down").unlink(missing_ok=True)
        self._pause_programs(False)
        self._signal_sshd(signal.SIGCONT)

    def _set_faults(self, faults: MachineFaults) -> None:
        previous, self._faults = self._faults, faults
        create_devices(self._spec, faults)
        if faults.vfio and not previous.vfio:
            self._fail_programs()
        if not faults.slow:
            self._pause_programs(False)

    def _signal_sshd(self, signum: signal.Signals) -> None:
        if self._sshd is not None:
            processes.send([self._sshd], signum)

    def _fail_programs(self) -> None:
        """Make the programs fail with the error of a chip that cannot be opened."""
        programs = self._job_processes()
        processes.send(programs, signal.SIGSTOP)
        for log in {processes.output_file(pid) for pid in programs}:
            if log is not None:
                with log.open("a") as file:
                    file.write(f"{VFIO_LINE}\n")
        processes.send(programs, signal.SIGKILL)

    def _job_processes(self) -> list[int]:
        """Return the processes whose output is a file: the programs of jobs, without the agent."""
        return [
            pid
            for pid in self._processes_except_sshd()
            if processes.output_file(pid) and ".drumline/agent-" not in processes.command_line(pid)
        ]

    def _processes_except_sshd(self) -> list[int]:
        return [pid for pid in processes.descendants(os.getpid()) if pid != self._sshd]

    def _toggle_pause(self) -> None:
        if self._faults.slow:
            self._pause_programs(not self._paused)

    def _pause_programs(self, paused: bool) -> None:
        if paused or self._paused:
            signum = signal.SIGSTOP if paused else signal.SIGCONT
            processes.send(self._processes_except_sshd(), signum)
        self._paused = paused


def _bind_socket(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


# Devices -----------------------------------------------------------------------------------------


def device_path(spec: HostSpec, chip: int) -> Path:
    """Return the path of a chip's device file."""
    return spec.home / "dev" / "vfio" / str(chip)


def create_devices(spec: HostSpec, faults: MachineFaults) -> None:
    """Create and remove device files to match the faults of the machine."""
    device_path(spec, 0).parent.mkdir(parents=True, exist_ok=True)
    for chip in range(spec.chips):
        if chip in faults.missing:
            device_path(spec, chip).unlink(missing_ok=True)
        else:
            _create_device(device_path(spec, chip), opens=not (faults.vfio and chip == 0))


def count_devices(spec: HostSpec) -> int:
    """Return the number of chips that programs find."""
    return sum(os.path.lexists(device_path(spec, chip)) for chip in range(spec.chips))


def _create_device(path: Path, *, opens: bool) -> None:
    if os.path.lexists(path) and stat.S_ISREG(path.lstat().st_mode) == opens:
        return
    # Replaced by a rename, so that a program that counts the chips always finds this one.
    draft = path.parents[1] / "draft"
    draft.unlink(missing_ok=True)
    if opens:
        draft.touch()
    else:
        try:
            # A socket cannot be opened, not even by root, who ignores file modes.
            os.mknod(draft, stat.S_IFSOCK | 0o600)
        except OSError:
            draft.symlink_to(path.name)
    draft.replace(path)
