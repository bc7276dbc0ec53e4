"""The chips of the host: the processes that hold them, and a test that they can be opened."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import os
import time

from .files import ROOT, remove
from .processes import (
    POLL_SECONDS,
    all_pids,
    attempt_processes,
    process_environment,
    terminate,
)


def free_chips(folder: str, timeout: float) -> str:
    """Stop the programs of earlier attempts and wait until the chips can be opened.

    Return the error if they cannot be opened within `timeout` seconds, else an empty text.
    """
    deadline = time.monotonic() + timeout
    for attempt in glob.glob(os.path.join(ROOT, "jobs", "*", "*")):
        if attempt != folder:
            terminate(functools.partial(attempt_processes, attempt), grace=3)
    devices = os.environ.get("DRUMLINE_DEV", "/dev")
    terminate(lambda: chip_holders(devices, folder), grace=3)
    emulated = "DRUMLINE_DEV" in os.environ
    lockfile = os.path.join(devices if emulated else "/tmp", "libtpu_lockfile")  # noqa: S108
    if os.path.exists(lockfile):
        remove(lockfile)
        if os.path.exists(lockfile):
            import subprocess

            # Another user, usually root, has created it. On a TPU VM the agent may use sudo.
            command = ["sudo", "-n", "rm", "-f", lockfile]
            with contextlib.suppress(OSError):
                subprocess.run(command, check=False, capture_output=True, timeout=10)
    while True:
        error = device_error(os.path.join(devices, "vfio", "0"))
        if not error or time.monotonic() > deadline:
            return error
        # After its holder has ended, the kernel takes seconds to release a chip.
        time.sleep(POLL_SECONDS)


def chip_holders(devices: str, folder: str) -> set[int]:
    """Return the processes of earlier attempts that hold a chip."""
    heartbeat = os.path.join(folder, "heartbeat.json").encode()
    patterns = (os.path.join(devices, "accel"), os.path.join(devices, "vfio") + os.sep)
    pids = set()
    for pid in all_pids():
        environment = process_environment(pid)
        if b"DRUMLINE_JOB_ID=" not in environment or heartbeat in environment or pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(patterns):
                    pids.add(pid)
    return pids


def device_error(path: str) -> str:
    """Return the error of opening the first chip; empty if it opens or does not exist."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return ""
        return f"open(/dev/vfio/0): {os.strerror(error.errno or errno.EBUSY)}"
    return ""
