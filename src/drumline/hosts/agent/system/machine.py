"""The host itself: since when it is up, whether it is going down, a free port."""

from __future__ import annotations

import contextlib
import os
import socket
import time

TYPE_CHECKING = False  # spares each call the import of typing
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]


def boot() -> str:
    """Differs after a restart of the host; empty where the system does not say."""
    emulated = os.environ.get("DRUMLINE_DEV")
    place = emulated + "/boot_id" if emulated else "/proc/sys/kernel/random/boot_id"
    try:
        with open(place) as file:
            return file.read().strip()
    except OSError:
        return ""


INSTANCE = "/computeMetadata/v1/instance/"

METADATA_EVERY = 5.0

_asked_metadata: Json = {"at": None, "preempted": False}


def going_down() -> str:
    """Why this host will be gone in a moment, as far as it knows itself; empty where it stays."""
    emulated = os.environ.get("DRUMLINE_DEV")
    if emulated:
        try:
            with open(emulated + "/going_down") as file:
                return file.read().strip()
        except OSError:
            return ""
    if preempted():
        return "preempted"
    # systemd forbids new logins as the first thing it does when it shuts down.
    return "shutting down" if os.path.exists("/run/nologin") else ""


def preempted() -> bool:
    """Whether Google has announced that it takes this machine; asked every few seconds at most."""
    last = _asked_metadata["at"]
    if _asked_metadata["preempted"] or (last and time.monotonic() < last + METADATA_EVERY):
        return bool(_asked_metadata["preempted"])
    _asked_metadata["at"] = time.monotonic()
    if on_google():
        _asked_metadata["preempted"] = metadata("preempted", 0.5) == "TRUE"
    return bool(_asked_metadata["preempted"])


def on_google() -> bool:
    """Whether this is a machine of Google's: elsewhere the server's name would cost a wait."""
    try:
        with open("/sys/class/dmi/id/product_name") as file:
            return "Google" in file.read()
    except OSError:
        return False


def metadata(name: str, timeout: float) -> str:
    """What the metadata server says of this instance under a name; empty where it says nothing."""
    import http.client  # only here: it takes as long to load as all the rest

    with contextlib.suppress(OSError, http.client.HTTPException):
        server = http.client.HTTPConnection("metadata.google.internal", timeout=timeout)
        try:
            server.request("GET", INSTANCE + name, headers={"Metadata-Flavor": "Google"})
            answer = server.getresponse()
            text = answer.read(1000).decode("utf-8", "replace").strip()
            return text if answer.status == 200 else ""
        finally:
            server.close()
    return ""


def free_port() -> int:
    """A port nobody uses, and that no connection gets by chance before the program listens there.

    The system gives connections ports from 32768 on, or from 49152, and a program takes seconds
    until it listens.
    """
    while True:
        port = 20_000 + int.from_bytes(os.urandom(2), "big") % 10_000
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            return port
