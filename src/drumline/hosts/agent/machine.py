"""The host itself: its names, its last boot, an announced shutdown, a free port, its chips."""

from __future__ import annotations

import contextlib
import functools
import os
import time

from .chips import chips_error, holds_chip
from .containers import end_container
from .files import ROOT, remove
from .processes import (
    POLL_SECONDS,
    all_pids,
    attempt_processes,
    process_environment,
    terminate,
)
from .wire import FreePort, send

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]


METADATA_ATTRIBUTES = {
    "physical_host": "attributes/physical_host",
    "physical_host_topology": "attributes/physical_host_topology",
    "instance_id": "id",
}
"""Paths on the metadata server, by Drumline's name. `physical_host` names the machine under the
virtual one and does not change. Google documents it for some kinds of capacity only."""
METADATA_ROOT = "/computeMetadata/v1/instance/"
METADATA_INTERVAL = 5.0
"""The minimum seconds between two requests for `preempted`."""

_preemption: Json = {"checked_at": None, "preempted": False}


def boot_id() -> str:
    """Return an id that changes with every boot, or an empty text if the system has none."""
    emulated = os.environ.get("DRUMLINE_DEV")
    path = emulated + "/boot_id" if emulated else "/proc/sys/kernel/random/boot_id"
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def machine_identity() -> dict[str, str]:
    """Return the known names of this machine. Most of them change with every slice."""
    machine = os.environ.get("DRUMLINE_MACHINE")
    if machine:
        path = os.path.join(machine, "physical_host")
        with contextlib.suppress(OSError), open(path, errors="replace") as file:
            return {"physical_host": file.read(1000).strip()}
        return {}
    if not on_google():
        return {}
    values = {name: read_metadata(path, 1.0) for name, path in METADATA_ATTRIBUTES.items()}
    return {name: value for name, value in values.items() if value}


def announced_shutdown() -> str:
    """Return the reason if this host is about to go down, else an empty text."""
    emulated = os.environ.get("DRUMLINE_DEV")
    if emulated:
        try:
            with open(emulated + "/going_down") as file:
                return file.read().strip()
        except OSError:
            return ""
    if preemption_announced():
        return "preempted"
    # When systemd shuts down, it first forbids new logins.
    return "shutting down" if os.path.exists("/run/nologin") else ""


def preemption_announced() -> bool:
    """Return True if Google has announced the preemption of this machine."""
    checked_at = _preemption["checked_at"]
    if _preemption["preempted"] or (
        checked_at and time.monotonic() < checked_at + METADATA_INTERVAL
    ):
        return bool(_preemption["preempted"])
    _preemption["checked_at"] = time.monotonic()
    if on_google():
        _preemption["preempted"] = read_metadata("preempted", 0.5) == "TRUE"
    return bool(_preemption["preempted"])


def on_google() -> bool:
    """Return True on a machine of Google. Elsewhere a lookup of the metadata server is slow."""
    try:
        with open("/sys/class/dmi/id/product_name") as file:
            return "Google" in file.read()
    except OSError:
        return False


def read_metadata(path: str, timeout: float) -> str:
    """Return an attribute of this instance from the metadata server, or an empty text."""
    import http.client  # takes as long to import as the whole agent

    with contextlib.suppress(OSError, http.client.HTTPException):
        server = http.client.HTTPConnection("metadata.google.internal", timeout=timeout)
        try:
            server.request("GET", METADATA_ROOT + path, headers={"Metadata-Flavor": "Google"})
            response = server.getresponse()
            text = response.read(1000).decode("utf-8", "replace").strip()
            return text if response.status == 200 else ""
        finally:
            server.close()
    return ""


def free_port() -> int:
    """Return a free port below the range that the system assigns to outgoing connections.

    That range starts at 32768 or 49152. A port in it could be taken during the seconds until the
    program listens.
    """
    import socket

    while True:
        port = 20_000 + int.from_bytes(os.urandom(2), "big") % 10_000
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("", port))
            return port


def choose_port() -> None:
    """Report a port where rank 0 can listen."""
    send(FreePort(port=free_port()))


# Chips -------------------------------------------------------------------------------------------


def free_chips(folder: str, timeout: float) -> str:
    """Stop the programs of previous attempts and wait until the chips can be opened.

    Return the error if they cannot be opened within `timeout` seconds, else an empty text.
    """
    import glob

    deadline = time.monotonic() + timeout
    for attempt in glob.glob(os.path.join(ROOT, "jobs", "*", "*")):
        if attempt != folder:
            end_container(attempt)
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
        error = chips_error(devices)
        if not error or time.monotonic() > deadline:
            return error
        # After the exit of its holder, the kernel takes seconds to release a chip.
        time.sleep(POLL_SECONDS)


def chip_holders(devices: str, folder: str) -> set[int]:
    """Return the processes of previous attempts that hold a chip."""
    heartbeat = os.path.join(folder, "heartbeat.json").encode()
    pids = set()
    for pid in all_pids():
        environment = process_environment(pid)
        if b"DRUMLINE_JOB_ID=" not in environment or heartbeat in environment or pid == os.getpid():
            continue
        if holds_chip(pid, devices):
            pids.add(pid)
    return pids
