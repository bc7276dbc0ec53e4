"""The host itself: its names, its last boot, an announced shutdown, a free port."""

from __future__ import annotations

import contextlib
import os
import socket
import time

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
    while True:
        port = 20_000 + int.from_bytes(os.urandom(2), "big") % 10_000
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("", port))
            return port
