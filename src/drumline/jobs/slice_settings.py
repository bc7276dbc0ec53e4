"""The settings of slices beyond their size: network, account, labels, disks, and the way to SSH.

A job file sets them for one job and config.yaml for all jobs of a home. Both are merged whenever a
slice is requested or a connection is opened, so a change of config.yaml applies to running jobs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath

from drumline.chips import LOCAL_ZONES, region_of
from drumline.cloud.protocol import DataDisk, SliceOptions
from drumline.hosts.protocol import HostAccess
from drumline.jobs.core.state import Candidate

NO_PROXY = "none"
"""The proxy command of a job that connects directly although config.yaml has a proxy."""


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """The account of the hosts. Without an e-mail address, the default of the project."""

    email: str | None = None
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ssh:
    """The way to connect to the hosts."""

    proxy_command: str | None = None


@dataclass(frozen=True, slots=True)
class SliceSettings:
    """The settings of a job file or of config.yaml. None is a key that is not set."""

    network: str | None = None
    subnetwork: str | None = None
    external_ip: bool | None = None
    tags: tuple[str, ...] | None = None
    service_account: ServiceAccount | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ssh: Ssh | None = None
    reservation: str | None = None
    data_disks: tuple[DataDisk, ...] = ()

    def over(self, defaults: "SliceSettings") -> "SliceSettings":
        """Return these settings, with the defaults for the keys that are not set."""
        proxy = self.ssh.proxy_command if self.ssh else None
        return SliceSettings(
            network=self.network or defaults.network,
            # A subnetwork belongs to its network.
            subnetwork=self.subnetwork or (None if self.network else defaults.subnetwork),
            external_ip=defaults.external_ip if self.external_ip is None else self.external_ip,
            tags=defaults.tags if self.tags is None else self.tags,
            service_account=self.service_account or defaults.service_account,
            labels={**defaults.labels, **self.labels},
            ssh=self.ssh if proxy else defaults.ssh,
            reservation=self.reservation,
            data_disks=self.data_disks,
        )

    def options(self) -> SliceOptions:
        """Return the options of a request for slices."""
        account = self.service_account or ServiceAccount()
        return SliceOptions(
            network=self.network,
            subnetwork=self.subnetwork,
            external_ip=self.external_ip is not False,
            tags=self.tags or (),
            service_account=account.email,
            scopes=account.scopes,
            reservation=self.reservation,
            data_disks=self.data_disks,
        )

    def access(self) -> HostAccess:
        """Return the settings for reaching the hosts."""
        return HostAccess(self.proxy_command)

    @property
    def proxy_command(self) -> str | None:
        """The command to connect through, or None to connect directly."""
        command = self.ssh.proxy_command if self.ssh else None
        return None if command == NO_PROXY else command

    def lines(self) -> list[str]:
        """Return one line for each setting that is not Google's default."""
        account = self.service_account or ServiceAccount()
        scopes = ", ".join(scope.rpartition("/")[2] for scope in account.scopes)
        lines = {
            "network": self.network,
            "subnetwork": self.subnetwork,
            "addresses": "internal only" if self.external_ip is False else None,
            "tags": ", ".join(self.tags or ()),
            "service account": account.email or ("default" if scopes else None),
            "scopes": scopes,
            "labels": ", ".join(f"{key}={value}" for key, value in self.labels.items()),
            "reservation": self.reservation,
            "data disks": ", ".join(f"{disk.source} ({disk.mode})" for disk in self.data_disks),
            "SSH through": self.proxy_command,
        }
        return [f"{name}: {value}" for name, value in lines.items() if value]


NO_SETTINGS = SliceSettings()
SLICE_KEYS = (
    "network",
    "subnetwork",
    "external_ip",
    "tags",
    "service_account",
    "reservation",
    "data_disks",
)
"""The keys that a slice is requested with. A change of them needs another slice."""


# --- the zones that the settings allow --------------------------------------------------------


def zone_error(settings: SliceSettings, zone: str) -> str | None:
    """Return a message if a slice in this zone cannot have these settings, else None."""
    if zone in LOCAL_ZONES:
        return None
    for key, path in _paths(settings):
        parts = PurePosixPath(path).parts
        named = dict(pairwise(parts))
        location = named.get("zones") or named.get("locations") or named.get("regions")
        if location and location not in {zone, region_of(zone)}:
            return f"{key}: {path} is in {location}, the slice would be in {zone}"
    return None


def _paths(settings: SliceSettings) -> Iterable[tuple[str, str]]:
    """Yield the paths of resources in a zone or region, with their keys."""
    if settings.subnetwork:
        yield "subnetwork", settings.subnetwork
    if settings.reservation:
        yield "reservation", settings.reservation
    for disk in settings.data_disks:
        yield "data_disks", disk.source


def check_zones(
    settings: SliceSettings, choices: Sequence[Candidate], *, any_zone: bool
) -> tuple[tuple[Candidate, ...], str | None]:
    """Return the candidates that can have these settings, and a message if the job cannot run.

    A zone that the user named is never dropped silently. `any` stands for the possible zones.
    """
    errors = {choice: zone_error(settings, choice.zone) for choice in choices}
    possible = tuple(choice for choice in choices if errors[choice] is None)
    message = next(filter(None, errors.values()), None)
    if message is None or (possible and any_zone):
        return possible, None
    zones = [choice.zone for choice in choices if errors[choice]]
    fix = f"remove {zones[0]} from zones" if possible else "name a zone there, or another resource"
    return possible, f"{message}; {fix}"
