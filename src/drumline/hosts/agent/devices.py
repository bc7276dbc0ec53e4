"""The host's chips: who holds them, and whether they can be opened."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import os
import time

from .stopping import everyone
from .system.files import ROOT, remove
from .system.processes import POLL, end, every_pid


def clear(folder: str, limit: float) -> str:
    """End earlier attempts' programs, wait until the chips can be opened; why they cannot."""
    deadline = time.monotonic() + limit
    for other in glob.glob(os.path.join(ROOT, "jobs", "*", "*")):
        if other != folder:
            end(functools.partial(everyone, other), grace=3)
    devices = os.environ.get("DRUMLINE_DEV", "/dev")
    end(lambda: holders(devices, folder), grace=3)
    emulated = "DRUMLINE_DEV" in os.environ
    lockfile = os.path.join(devices if emulated else "/tmp", "libtpu_lockfile")  # noqa: S108
    if os.path.exists(lockfile):
        remove(lockfile)
        if os.path.exists(lockfile):
            import subprocess

            # Made by another user (root, as a rule). Ours may use sudo on a TPU VM.
            command = ["sudo", "-n", "rm", "-f", lockfile]
            with contextlib.suppress(OSError):
                subprocess.run(command, check=False, capture_output=True, timeout=10)
    while True:
        trouble = device_trouble(os.path.join(devices, "vfio", "0"))
        if not trouble or time.monotonic() > deadline:
            return trouble
        # The kernel takes seconds to let go of a chip after its holder ended.
        time.sleep(POLL)


def holders(devices: str, folder: str) -> set[int]:
    """Processes of earlier attempts that hold a chip."""
    ours = os.path.join(folder, "heartbeat.json").encode()
    patterns = (os.path.join(devices, "accel"), os.path.join(devices, "vfio") + os.sep)
    found = set()
    for pid in every_pid():
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                environ = file.read()
            if b"DRUMLINE_JOB_ID=" not in environ or ours in environ or pid == os.getpid():
                continue
            for number in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith(patterns):
                    found.add(pid)
    return found


def device_trouble(path: str) -> str:
    """Why the first chip cannot be opened; empty when it can or there is no such device."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    except OSError as trouble:
        if trouble.errno in (errno.ENOENT, errno.ENOTDIR):
            return ""
        return f"open(/dev/vfio/0): {os.strerror(trouble.errno or errno.EBUSY)}"
    return ""
