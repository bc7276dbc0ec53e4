"""The host itself, before any chip is used: its chips are there and open, it has room, and a clock.

Standard library only. What cannot be known here (no time source, no bucket) is said to be not
known, which is no reason to warn.
"""

import errno
import http.client
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from glob import glob

from drumline.chips import Slice, UnknownName, slice_of
from drumline.health.checks.sizes import available_memory
from drumline.health.report import FAIL, WARN, CheckOutcome

GOOGLE = "0x1ae0"
PCI_DEVICES = {
    "v2": "0x0027", "v3": "0x0027", "v4": "0x005e", "v5p": "0x0062",
    "v5e": "0x0063", "v6e": "0x006f", "7x": "0x0076",
}  # fmt: skip
"""The PCI device id of each generation; all have the vendor above."""
LEAST_MEMORY, LEAST_DISK = 1e9, 5e9
LARGEST_OFFSET = 1.0
"""Seconds that a clock may be wrong: logs of several hosts are ordered by it."""
PATIENCE = 2.0
"""Seconds for a server to answer."""
NOT_KNOWN = CheckOutcome(said="not known")


def slice_here(environment: Mapping[str, str] = os.environ) -> Slice | None:
    """The slice that the job says it runs on; None outside a job."""
    with suppress(UnknownName):
        name = environment.get("DRUMLINE_ACCELERATOR")
        return slice_of(name) if name else None
    return None


def check_machine(environment: Mapping[str, str] = os.environ) -> dict[str, CheckOutcome]:
    """The tests of this host, by name."""
    tests = {}
    here = slice_here(environment)
    if here is not None:
        tests["chips"] = _chips(here, environment)
    tests["files"] = _files(environment)
    tests["memory"] = _room("memory", available_memory(), LEAST_MEMORY)
    tests["disk"] = _room("disk", shutil.disk_usage(os.getcwd()).free, LEAST_DISK)
    tests["bucket"], date = _bucket(environment)
    tests["clock"] = _clock(date or _metadata_date())
    return tests


def _chips(here: Slice, environment: Mapping[str, str]) -> CheckOutcome:
    """Whether all chips that such a host has are on its bus."""
    expected = here.chips_per_host
    emulated = environment.get("DRUMLINE_DEV")
    if emulated:
        numbers = {number for number in _listed(os.path.join(emulated, "vfio")) if number.isdigit()}
        missing = [str(chip) for chip in range(expected) if str(chip) not in numbers]
        named = f": chip {', '.join(missing)} is missing" if missing else ""
        found = expected - len(missing)
    else:
        found, named = _on_the_bus(PCI_DEVICES[here.generation]), ""
        if not found:
            return NOT_KNOWN  # a container, as a rule, from which the bus cannot be seen
    if found < expected:
        return CheckOutcome(FAIL, f"{found} of {expected} chips{named}")
    return CheckOutcome(said=f"{found} chips")


def _on_the_bus(device: str) -> int:
    ids = [(_text(f"{path}/vendor"), _text(f"{path}/device")) for path in glob(_PCI)]
    return ids.count((GOOGLE, device))


_PCI = "/sys/bus/pci/devices/*"


def _files(environment: Mapping[str, str]) -> CheckOutcome:
    """Whether each chip's file can be opened."""
    folder = environment.get("DRUMLINE_DEV", "/dev")
    vfio = [f"{folder}/vfio/{name}" for name in _listed(f"{folder}/vfio") if name.isdigit()]
    busy: list[str] = []
    shut: list[str] = []
    for path in sorted(vfio or glob(f"{folder}/accel[0-9]*")):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        except OSError as trouble:
            if _is_ours(path):
                continue
            (busy if trouble.errno == errno.EBUSY else shut).append(f"{path}: {trouble.strerror}")
    if shut:
        return CheckOutcome(FAIL, "; ".join(shut))
    return CheckOutcome(WARN, "; ".join(busy)) if busy else CheckOutcome()


def _is_ours(path: str) -> bool:
    """Whether this very process holds a file, as it does after JAX has begun."""
    for number in _listed("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == path:
                return True
    return False


def _room(name: str, free: float, least: float) -> CheckOutcome:
    if not free:
        return NOT_KNOWN
    said = f"{free / 1e9:,.1f} GB free"
    return (
        CheckOutcome(WARN, f"{name}: {said}, {least / 1e9:.0f} wanted")
        if free < least
        else CheckOutcome(said=said)
    )


def _bucket(environment: Mapping[str, str]) -> tuple[CheckOutcome, tuple[str, float] | None]:
    """Whether the checkpoints' bucket answers, and the time that it told."""
    emulated = environment.get("DRUMLINE_BUCKETS")
    if emulated:
        well = os.access(emulated, os.W_OK)
        return CheckOutcome() if well else CheckOutcome(WARN, f"{emulated} cannot be written"), None
    name = environment.get("DRUMLINE_CHECKPOINT", "")
    if not name.startswith("gs://"):
        return NOT_KNOWN, None
    bucket = name.removeprefix("gs://").partition("/")[0]
    try:
        status, date = _asked(http.client.HTTPSConnection, "storage.googleapis.com", f"/{bucket}")
    except (OSError, http.client.HTTPException) as trouble:
        return CheckOutcome(WARN, f"gs://{bucket} does not answer: {trouble}"), None
    # Without a login it refuses, which is an answer; but not to know it at all is a mistake.
    if status == http.client.NOT_FOUND:
        return CheckOutcome(WARN, f"gs://{bucket} does not exist"), date
    return CheckOutcome(), date


def _metadata_date() -> tuple[str, float] | None:
    """What the metadata server says the time is; elsewhere its name would cost a wait."""
    if "Google" not in _text("/sys/class/dmi/id/product_name"):
        return None
    with suppress(OSError, http.client.HTTPException):
        return _asked(http.client.HTTPConnection, "metadata.google.internal", "/")[1]
    return None


def _asked(
    kind: type[http.client.HTTPConnection], server: str, path: str
) -> tuple[int, tuple[str, float] | None]:
    """The status of an answer, and its date beside the time by our own clock."""
    connection = kind(server, timeout=PATIENCE)
    try:
        connection.request("HEAD", path)
        answer = connection.getresponse()
        date = answer.getheader("Date")
        return answer.status, None if date is None else (date, time.time())
    finally:
        connection.close()


def _clock(date: tuple[str, float] | None) -> CheckOutcome:
    """How far the clock is off, as far as a date in whole seconds can tell."""
    if date is None:
        return NOT_KNOWN
    told, ours = date
    offset = ours - parsedate_to_datetime(told).timestamp() - 0.5
    said = f"{offset:+.1f} s, to half a second"
    return CheckOutcome(WARN if abs(offset) > LARGEST_OFFSET + 0.5 else "pass", said)


def _listed(folder: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


def _text(path: str) -> str:
    with suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""
