"""The chips of a host: their device files, the processes that hold them, and libtpu's own log."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time

from .containers import container_processes
from .files import open_file
from .log import log_size, read_log
from .processes import POLL_SECONDS, program_processes, terminate

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

DEVICE_PATTERNS = ("vfio/[0-9]*", "accel[0-9]*", "accel/accel[0-9]*")
"""The device files of chips: vfio since v5e, accel for v2 to v4."""
RELEASE_SECONDS = 5.0
"""Seconds that the kernel may take to release a chip after the exit of its process."""
TAIL_BYTES = 16_384
CHIP_ERROR = (
    rb"/dev/(?:vfio|accel)|iommu group|TPU initialization failed|initialize backend .?tpu"
    rb"|Failed to initialize TPU|No accelerator found|TPU is already in use"
)
"""Output of a program that could not open the chips."""
BUSY = rb"Device or resource busy|already in use"
LOCATION = rb"(?m)^[EF]\d{4}\b.*Physical location: (\S+)"


def device_folder() -> str:
    """Return the folder of device files, which is a folder of the home on an emulated host."""
    return os.environ.get("DRUMLINE_DEV", "/dev")


def chip_devices(devices: str) -> list[str]:
    """Return the device files of all chips."""
    import glob  # `status` needs none

    return [
        path
        for pattern in DEVICE_PATTERNS
        for path in sorted(glob.glob(os.path.join(devices, pattern)))
    ]


def chips_error(devices: str) -> str:
    """Return the error of the first chip that cannot be opened; empty if there is none.

    A file that only a different user may open is no evidence about the chip.
    """
    for path in chip_devices(devices):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM):
                name = os.path.relpath(path, devices)
                return f"open(/dev/{name}): {os.strerror(error.errno or errno.EBUSY)}"
    return ""


def holds_chip(pid: int, devices: str) -> bool:
    """Return True if a process has a device file of a chip open."""
    patterns = (os.path.join(devices, "accel"), os.path.join(devices, "vfio") + os.sep)
    return any(path.startswith(patterns) for path in open_files(pid))


def open_files(pid: int) -> list[str]:
    """Return the open files of a process. On a TPU VM, sudo reads those of other users."""
    folder = f"/proc/{pid}/fd"
    files = []
    try:
        for descriptor in os.listdir(folder):
            with contextlib.suppress(OSError):
                files.append(os.readlink(os.path.join(folder, descriptor)))
    except PermissionError:
        import subprocess

        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["sudo", "-n", "ls", "-l", folder]
            listing = subprocess.run(command, check=False, capture_output=True, timeout=10)
            lines = listing.stdout.decode("utf-8", "replace").splitlines()
            files = [line.rpartition(" -> ")[2] for line in lines if " -> " in line]
    except OSError:
        pass
    return files


class ChipMonitor:
    """Finds out, while a program runs and after it failed, who keeps it from its chips."""

    def __init__(self, folder: str, log_from: int, container: str) -> None:
        """`log_from` is the offset of the program's output, `container` its container, if any."""
        self.folder = folder
        self.log_from = log_from
        self.container = container
        self.size = log_from
        self.holder = ""

    def update(self) -> None:
        """Look for a process of the program that holds a chip, while its error is fresh."""
        size = log_size(self.folder)
        if size != self.size and not self.holder and re.search(BUSY, self._tail()):
            self.holder = self._find_holder()
        self.size = size

    def after_failure(self) -> Json:
        """Return the facts about the chips, after a program failed."""
        tail = self._tail()
        if not re.search(CHIP_ERROR, tail):
            return {}
        if re.search(BUSY, tail):
            self.holder = self.holder or self._find_holder()
        facts = {"chip_holder": self.holder, "location": self._location(), "chip_error": ""}
        if not self.holder:
            terminate(lambda: program_processes(self.folder), grace=5)
            deadline = time.monotonic() + RELEASE_SECONDS
            while chips_error(device_folder()) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            facts["chip_error"] = chips_error(device_folder())
        return facts

    def _tail(self) -> bytes:
        size = log_size(self.folder)
        return read_log(self.folder, max(self.log_from, size - TAIL_BYTES), TAIL_BYTES)

    def _find_holder(self) -> str:
        devices = device_folder()
        own = program_processes(self.folder) | container_processes(self.container)
        for pid in sorted(own):
            if holds_chip(pid, devices):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                    command = file.read(200).replace(b"\0", b" ").decode("utf-8", "replace")
                    return f"process {pid} of the program ({command.strip()})"
                return f"process {pid} of the program"
        return ""

    def _location(self) -> str:
        """Return the chip that libtpu's own log blames since the program started."""
        import glob

        emulated = os.environ.get("DRUMLINE_DEV")
        logs = os.path.join(emulated or "/tmp", "tpu_logs", "tpu_driver.*")  # noqa: S108
        started_at = os.stat(os.path.join(self.folder, "started.json")).st_mtime
        for path in sorted(glob.glob(logs))[-20:]:
            with contextlib.suppress(OSError):
                if os.path.islink(path) or os.stat(path).st_mtime < started_at:
                    continue
                with open_file(path) as file:
                    file.seek(max(0, os.stat(path).st_size - (1 << 18)))
                    match = re.search(LOCATION, file.read(1 << 18))
                if match:
                    return match.group(1).decode("utf-8", "replace")[:100]
        return ""
