"""The checks of the keys for the network, account, labels and disks of slices.

config.yaml has some of these keys too, as defaults for all jobs, and uses the same checks.
"""

import re
import shlex
from collections.abc import Mapping

from pydantic import BaseModel

from drumline.hosts.ssh import PROXY_ESCAPES, proxy_escapes
from drumline.jobs.spec.checks import (
    InvalidValue,
    as_list,
    check_all,
    choice,
    map_of,
    quoted,
    text,
    unique,
)
from drumline.jobs.spec.yaml_lines import Scalar

MAX_LABELS = 60
"""Google allows 64 labels, and Drumline adds its own."""
MAX_TAGS = 64
MAX_DISKS = 128
MAX_COMMAND = 2000
DISK_MODES = ("read-only", "read-write")
_OWN_LABELS = "drumline-"
_NAME = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME_RULE = "use lower-case letters, digits and hyphens, and start with a letter"
_RESOURCE = re.compile(_NAME)
_URL = re.compile(r"https://(www|compute)\.googleapis\.com/(compute/)?(v1|beta)/")
_PROJECT_PATH = r"projects/[a-z0-9.:-]+/"
_NETWORK = re.compile(rf"{_PROJECT_PATH}global/networks/{_NAME}")
_SUBNETWORK = re.compile(rf"{_PROJECT_PATH}regions/[a-z0-9-]+/subnetworks/{_NAME}")
_DISK = re.compile(rf"{_PROJECT_PATH}zones/[a-z0-9-]+/disks/{_NAME}")
_RESERVATION = re.compile(
    rf"(projects|folders|organizations)/[a-z0-9.:-]+/locations/[a-z0-9-]+/reservations/({_NAME}|-)"
)
_EMAIL = re.compile(r"[^@\s/]+@[a-z0-9.-]+\.gserviceaccount\.com")
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
SCOPE_PREFIX = "https://www.googleapis.com/auth/"
SCOPE_ALIASES = {
    "cloud-platform": "cloud-platform",
    "logging-write": "logging.write",
    "monitoring-write": "monitoring.write",
    "storage-full": "devstorage.full_control",
    "storage-ro": "devstorage.read_only",
    "storage-rw": "devstorage.read_write",
}
"""The aliases of gcloud for the scopes that a training program needs."""


def network(raw: object) -> str:
    """Return the name or path of a network."""
    return _resource(raw, _NETWORK, "a network", "projects/P/global/networks/NAME")


def subnetwork(raw: object) -> str:
    """Return the name or path of a subnetwork."""
    return _resource(raw, _SUBNETWORK, "a subnetwork", "projects/P/regions/R/subnetworks/NAME")


def reservation(raw: object) -> str:
    """Return the name or path of a reservation. `-` is any reservation of the project."""
    if raw == "-":
        return "-"
    path = "projects/P/locations/ZONE/reservations/NAME"
    return _resource(raw, _RESERVATION, "a reservation", path)


def _resource(raw: object, path: re.Pattern[str], noun: str, example: str) -> str:
    """Return a name, or a path without the URL in front of it."""
    name = _URL.sub("", text(raw).strip(), count=1)
    if "/" in name and not path.fullmatch(name):
        raise InvalidValue(f"{quoted(name)} is not the path of {noun}; write {example}")
    if "/" not in name and not _RESOURCE.fullmatch(name):
        raise InvalidValue(f"{quoted(name)} is not the name of {noun}; {_NAME_RULE}")
    return name


def tags(raw: object) -> tuple[str, ...]:
    """Return network tags."""
    if raw in ([], ()):
        return ()
    names = as_list(raw)
    if len(names) > MAX_TAGS:
        raise InvalidValue(f"has {len(names)} tags; Google allows {MAX_TAGS}")
    return unique(check_all(enumerate(names), _tag))


def _tag(raw: object) -> str:
    name = text(raw)
    if not _RESOURCE.fullmatch(name):
        raise InvalidValue(f"{quoted(name)} is not a network tag; {_NAME_RULE}")
    return name


def service_account(raw: object) -> object:
    """Return a map with `email` and `scopes`. An e-mail address alone is enough."""
    return (
        {"email": raw}
        if isinstance(raw, str)
        else map_of(raw, "email: NAME@P.iam.gserviceaccount.com")
    )


def email(raw: object) -> str:
    """Return the e-mail address of a service account."""
    address = text(raw).strip()
    if not _EMAIL.fullmatch(address):
        raise InvalidValue(
            f"{quoted(address)} is not the e-mail address of a service account; "
            "it looks like NAME@PROJECT.iam.gserviceaccount.com"
        )
    return address


def scopes(raw: object) -> tuple[str, ...]:
    """Return the URLs of scopes, which may be written with the aliases of gcloud."""
    if raw in ([], ()):
        return ()
    return unique(check_all(enumerate(as_list(raw)), _scope))


def _scope(raw: object) -> str:
    name = text(raw).strip()
    if name in SCOPE_ALIASES:
        return SCOPE_PREFIX + SCOPE_ALIASES[name]
    if name.startswith(SCOPE_PREFIX) and re.fullmatch(r"[a-z0-9._-]+", name[len(SCOPE_PREFIX) :]):
        return name
    raise InvalidValue(
        f"{quoted(name)} is not a scope; use {', '.join(SCOPE_ALIASES)}, "
        f"or a URL that starts with {SCOPE_PREFIX}"
    )


def labels(raw: object) -> dict[str, str]:
    """Return labels by the rules of Google. The labels of Drumline itself are reserved."""
    entries = map_of(raw, "team: vision")
    if len(entries) > MAX_LABELS:
        raise InvalidValue(f"has {len(entries)} labels; the maximum is {MAX_LABELS}")
    pairs = check_all(((key, (key, value)) for key, value in entries.items()), _label)
    return dict(pairs)


def _label(item: tuple[str, object]) -> tuple[str, str]:
    key, raw = item
    if not _LABEL_KEY.fullmatch(key):
        raise InvalidValue(
            f"{quoted(key)} is not a label; use at most 63 lower-case letters, digits, _ and -, "
            "and start with a letter"
        )
    if key.startswith(_OWN_LABELS):
        raise InvalidValue(f"{quoted(key)}: labels that begin with {_OWN_LABELS} are reserved")
    # An empty value is a label without a value. A number keeps its spelling.
    value = raw.text if isinstance(raw, Scalar) else "" if raw is None else raw
    if isinstance(value, bool | int | float):
        value = quoted(value)
    if not isinstance(value, str):
        raise InvalidValue(f"is {quoted(value)}; expected text")
    if not _LABEL_VALUE.fullmatch(value):
        raise InvalidValue(
            f"{quoted(value)} is not a value of a label; use at most 63 lower-case letters, "
            "digits, _ and -"
        )
    return key, value


def proxy_command(raw: object) -> str:
    """Return a command that connects to the SSH port of a host."""
    command = text(raw).strip()
    if not command.isprintable() or len(command) > MAX_COMMAND:
        raise InvalidValue(f"is not a command on one line of at most {MAX_COMMAND:,} characters")
    try:
        words = shlex.split(command)
    except ValueError:
        raise InvalidValue(f"{quoted(command)} has a quote that is never closed") from None
    if words[:1] == ["exec"]:
        raise InvalidValue("starts with exec; no shell runs it, so write the program alone")
    for letter in proxy_escapes(command):
        if letter not in PROXY_ESCAPES:
            known = ", ".join(f"%{name} ({meaning})" for name, meaning in PROXY_ESCAPES.items())
            raise InvalidValue(f"%{letter} is not known; use {known}")
    return command


def ssh(raw: object) -> dict[str, object]:
    """Return a map with `proxy_command`."""
    return map_of(raw, "proxy_command: ssh -W %h:%p bastion")


def data_disks(raw: object) -> object:
    """Return a list of maps with `source` and `mode`. A name or path alone is enough."""
    if raw is None or raw in ([], ()):
        return ()
    # A single map is a list of one.
    items = [raw] if isinstance(raw, Mapping) else as_list(raw)
    if len(items) > MAX_DISKS:
        raise InvalidValue(f"has {len(items)} disks; Google allows {MAX_DISKS}")
    return tuple(check_all(enumerate(items), _disk))


def _disk(raw: object) -> object:
    if isinstance(raw, Mapping | BaseModel):
        return raw
    if isinstance(raw, str):
        return {"source": raw}
    raise InvalidValue(f"is {quoted(raw)}; write {{source: NAME, mode: read-only}}")


def disk_source(raw: object) -> str:
    """Return the name or path of a disk."""
    return _resource(raw, _DISK, "a disk", "projects/P/zones/ZONE/disks/NAME")


def disk_mode(raw: object) -> str:
    """Return `read-only` or `read-write`."""
    aliases = {"ro": "read-only", "rw": "read-write", "READ_ONLY": "read-only"}
    return choice(raw, DISK_MODES, aliases | {"READ_WRITE": "read-write"})
