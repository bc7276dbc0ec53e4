"""Check a host: its chips and their device files, memory, disk, bucket, clock and JAX devices.

The checks use the standard library only. Only the check of the JAX devices opens the chips. Without
a time source or bucket, a check is `not known`, which is no warning.
"""

import errno
import http.client
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from glob import glob
from math import prod
from typing import Any

from drumline.chips import Slice, UnknownName, slice_of
from drumline.health.report import FAIL, WARN, CheckOutcome

GOOGLE = "0x1ae0"
PCI_DEVICES = {
    "v2": "0x0027", "v3": "0x0027", "v4": "0x005e", "v5p": "0x0062",
    "v5e": "0x0063", "v6e": "0x006f", "7x": "0x0076",
}  # fmt: skip
"""The PCI device ids of the generations of vendor `GOOGLE`."""
MIN_MEMORY, MIN_DISK = 1e9, 5e9
MAX_CLOCK_OFFSET = 1.0
"""Seconds. Logs of a slice are merged by the hosts' clocks."""
SERVER_TIMEOUT = 2.0
UNKNOWN = CheckOutcome(message="not known")


@dataclass(frozen=True)
class Device:
    """The properties of a JAX device that the checks use."""

    id: int
    host: int
    kind: str
    platform: str
    coordinates: tuple[int, ...] | None
    """The position in the torus and the core, or None if JAX reports none."""


def describe_device(device: Any) -> Device:
    """Return the properties of a JAX device."""
    return Device(
        device.id,
        device.process_index,
        device.device_kind,
        device.platform,
        torus_coordinates(device),
    )


def torus_coordinates(device: Any) -> tuple[int, ...] | None:
    """Return a JAX device's coordinates in the torus, and its core; None if it reports none."""
    coords = getattr(device, "coords", None)
    if coords is None:
        return None
    return (*map(int, coords), int(getattr(device, "core_on_chip", 0) or 0))


def local_ids(devices: Sequence[Any]) -> list[int]:
    """Return the local hardware ids of the devices that report one."""
    ids = [getattr(device, "local_hardware_id", None) for device in devices]
    return [local_id for local_id in ids if local_id is not None]


def current_slice(env: Mapping[str, str] = os.environ) -> Slice | None:
    """Return the slice that the job runs on, or None outside a job."""
    with suppress(UnknownName):
        name = env.get("DRUMLINE_ACCELERATOR")
        return slice_of(name) if name else None
    return None


def check_host(env: Mapping[str, str] = os.environ) -> dict[str, CheckOutcome]:
    """Check this host and return the outcomes by name."""
    outcomes = {}
    job_slice = current_slice(env)
    if job_slice is not None:
        outcomes["chips"] = _check_chips(job_slice, env)
    outcomes["files"] = _check_device_files(env)
    outcomes["memory"] = _check_free("memory", available_memory(), MIN_MEMORY)
    outcomes["disk"] = _check_free("disk", shutil.disk_usage(os.getcwd()).free, MIN_DISK)
    outcomes["bucket"], server_date = _check_bucket(env)
    outcomes["clock"] = _check_clock(server_date or _metadata_server_date())
    return outcomes


def available_memory() -> int:
    """Return the bytes of host memory that are free or can be freed, or 0 if unknown."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def check_devices(
    devices: Sequence[Device], ids_of_hosts: Sequence[Sequence[int]], expected: int | None
) -> dict[int, CheckOutcome]:
    """Check the number, coordinates and torus of the devices, by host.

    Args:
        devices: The devices of all hosts.
        ids_of_hosts: The local ids of the devices, by host.
        expected: The number of devices per host, by default the maximum.
    """
    counts = Counter(device.host for device in devices)
    expected = expected or max(counts.values())
    coordinate_counts = Counter(device.coordinates for device in devices)
    outcomes = {}
    for host, ids in enumerate(ids_of_hosts):
        duplicates = [
            device.id
            for device in devices
            if device.host == host
            and device.coordinates
            and coordinate_counts[device.coordinates] > 1
        ]
        if counts[host] < expected:
            message = f"{counts[host]} of {expected} devices{_missing_ids(ids, expected)}"
            outcomes[host] = CheckOutcome(FAIL, message)
        elif duplicates:
            message = f"device {', '.join(map(str, duplicates))} has the coordinates of another"
            outcomes[host] = CheckOutcome(FAIL, message)
        else:
            outcomes[host] = CheckOutcome(message=f"{counts[host]} devices")
    hole = _torus_hole(devices)
    if hole and all(outcome.verdict != FAIL for outcome in outcomes.values()):
        outcomes[min(outcomes)] = CheckOutcome(FAIL, hole)
    return outcomes


def _missing_ids(ids: Sequence[int], expected: int) -> str:
    """Return text that names the missing chips, or an empty string if the ids do not show them."""
    if not ids or len(set(ids)) != len(ids) or not set(ids) <= set(range(expected)):
        return ""
    missing = [str(local_id) for local_id in range(expected) if local_id not in ids]
    return f": chip {', '.join(missing)} is missing" if missing else ""


def _torus_hole(devices: Sequence[Device]) -> str:
    """Return a message if the devices do not fill a box of the torus, else an empty string."""
    coordinates = {device.coordinates for device in devices if device.coordinates}
    if len(coordinates) != len(devices):
        return ""
    box = [len(set(axis)) for axis in zip(*coordinates, strict=True)]
    if prod(box) == len(coordinates):
        return ""
    shape = " × ".join(map(str, box[:-1]))
    return f"{len(coordinates)} devices do not fill their box of {shape} chips"


def _check_chips(job_slice: Slice, env: Mapping[str, str]) -> CheckOutcome:
    """Check that the PCI bus has all chips of the host."""
    expected = job_slice.chips_per_host
    emulated_dev = env.get("DRUMLINE_DEV")
    if emulated_dev:
        chips = {
            name for name in _list_folder(os.path.join(emulated_dev, "vfio")) if name.isdigit()
        }
        missing = [str(chip) for chip in range(expected) if str(chip) not in chips]
        suffix = f": chip {', '.join(missing)} is missing" if missing else ""
        count = expected - len(missing)
    else:
        count, suffix = _count_pci_devices(PCI_DEVICES[job_slice.generation]), ""
        if not count:
            return UNKNOWN  # most containers hide the bus
    if count < expected:
        return CheckOutcome(FAIL, f"{count} of {expected} chips{suffix}")
    return CheckOutcome(message=f"{count} chips")


def _count_pci_devices(device: str) -> int:
    folders = glob("/sys/bus/pci/devices/*")
    ids = [(_read_text(f"{folder}/vendor"), _read_text(f"{folder}/device")) for folder in folders]
    return ids.count((GOOGLE, device))


def _check_device_files(env: Mapping[str, str]) -> CheckOutcome:
    """Check that the device files of the chips can be opened."""
    dev = env.get("DRUMLINE_DEV", "/dev")
    vfio = [f"{dev}/vfio/{name}" for name in _list_folder(f"{dev}/vfio") if name.isdigit()]
    busy: list[str] = []
    unusable: list[str] = []
    for path in sorted(vfio or glob(f"{dev}/accel[0-9]*")):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        except OSError as error:
            if _is_open_here(path):
                continue
            (busy if error.errno == errno.EBUSY else unusable).append(f"{path}: {error.strerror}")
    if unusable:
        return CheckOutcome(FAIL, "; ".join(unusable))
    return CheckOutcome(WARN, "; ".join(busy)) if busy else CheckOutcome()


def _is_open_here(path: str) -> bool:
    """Return True if this process has the file open, as it has once JAX is initialized."""
    for descriptor in _list_folder("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == path:
                return True
    return False


def _check_free(name: str, free: float, minimum: float) -> CheckOutcome:
    if not free:
        return UNKNOWN
    message = f"{free / 1e9:,.1f} GB free"
    if free < minimum:
        return CheckOutcome(WARN, f"{name}: {message}, {minimum / 1e9:.0f} needed")
    return CheckOutcome(message=message)


def _check_bucket(
    env: Mapping[str, str],
) -> tuple[CheckOutcome, tuple[str, float] | None]:
    """Return the outcome for the checkpoint bucket, and the date of its server."""
    emulated = env.get("DRUMLINE_BUCKETS")
    if emulated:
        if os.access(emulated, os.W_OK):
            return CheckOutcome(), None
        return CheckOutcome(WARN, f"{emulated} cannot be written"), None
    checkpoint = env.get("DRUMLINE_CHECKPOINT", "")
    if not checkpoint.startswith("gs://"):
        return UNKNOWN, None
    bucket = checkpoint.removeprefix("gs://").partition("/")[0]
    try:
        status, date = _request_head(
            http.client.HTTPSConnection, "storage.googleapis.com", f"/{bucket}"
        )
    except (OSError, http.client.HTTPException) as error:
        return CheckOutcome(WARN, f"gs://{bucket} does not answer: {error}"), None
    # The request has no credentials, so a bucket that exists answers with a refusal.
    if status == http.client.NOT_FOUND:
        return CheckOutcome(WARN, f"gs://{bucket} does not exist"), date
    return CheckOutcome(), date


def _metadata_server_date() -> tuple[str, float] | None:
    """Return the date of the metadata server. Outside Google Cloud its name resolves slowly."""
    if "Google" not in _read_text("/sys/class/dmi/id/product_name"):
        return None
    with suppress(OSError, http.client.HTTPException):
        return _request_head(http.client.HTTPConnection, "metadata.google.internal", "/")[1]
    return None


def _request_head(
    connection_type: type[http.client.HTTPConnection], server: str, path: str
) -> tuple[int, tuple[str, float] | None]:
    """Return the status of a response, and its date with the local time of its arrival."""
    connection = connection_type(server, timeout=SERVER_TIMEOUT)
    try:
        connection.request("HEAD", path)
        response = connection.getresponse()
        date = response.getheader("Date")
        return response.status, None if date is None else (date, time.time())
    finally:
        connection.close()


def _check_clock(date: tuple[str, float] | None) -> CheckOutcome:
    """Compare the clock with a server's date, which has whole seconds."""
    if date is None:
        return UNKNOWN
    server_date, local_time = date
    offset = local_time - parsedate_to_datetime(server_date).timestamp() - 0.5
    message = f"{offset:+.1f} s, to half a second"
    return CheckOutcome(WARN if abs(offset) > MAX_CLOCK_OFFSET + 0.5 else "pass", message)


def _list_folder(folder: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


def _read_text(path: str) -> str:
    with suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""
