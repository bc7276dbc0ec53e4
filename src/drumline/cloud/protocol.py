"""The interface between the job manager and a cloud.

The calls return values of `drumline.observed`, so another cloud only has to implement this
protocol. The only implementation is `google.tpu_api.TpuApi`, for Google and for the emulator. A
runner (`drumline.hosts.protocol`) runs programs on the hosts of a placement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from drumline.errors import CloudError
from drumline.hosts.protocol import SshLogin
from drumline.observed import ListedPlacement, Refusal

__all__ = [
    "Cloud",
    "CloudError",
    "DataDisk",
    "OperationState",
    "PlacementRequest",
    "SliceOptions",
    "SshLogin",
]


@dataclass(frozen=True)
class DataDisk:
    """A disk that is attached to every host of a slice."""

    source: str
    """The name of the disk, or `projects/P/zones/Z/disks/NAME`."""
    mode: Literal["read-only", "read-write"]


@dataclass(frozen=True)
class SliceOptions:
    """The network, account, reservation and disks of a slice. The default leaves them to Google."""

    network: str | None = None
    subnetwork: str | None = None
    external_ip: bool = True
    """False if the hosts get internal addresses only."""
    tags: tuple[str, ...] = ()
    """The network tags of the hosts, which firewall rules refer to."""
    service_account: str | None = None
    """The e-mail address of the account of the hosts."""
    scopes: tuple[str, ...] = ()
    """The URLs of the scopes of that account."""
    reservation: str | None = None
    """The reservation of the `reserved` tier: its name, or its path. None is any of the project."""
    data_disks: tuple[DataDisk, ...] = ()


@dataclass(frozen=True)
class PlacementRequest:
    """A request for one or more slices, granted together or not at all."""

    name: str
    zone: str
    accelerator: str
    """The accelerator of each slice, such as `v4-8`."""
    tier: str
    """The capacity tier: `spot`, `on-demand` or `reserved`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    login: SshLogin | None = None
    """The login that the hosts accept; None if their runner does not use SSH."""
    slices: int = 1
    options: SliceOptions = SliceOptions()


@dataclass(frozen=True)
class OperationState:
    """The state of a long-running operation, such as the creation of a placement."""

    done: bool
    error: CloudError | None = None
    """The error of the operation; None while it runs and after a success."""


class Cloud(Protocol):
    """The calls of a cloud. All are idempotent, and every async call may raise CloudError."""

    async def placements(self, zone: str) -> list[ListedPlacement]:
        """Return all placements of the project in a zone, of every owner."""

    async def find(self, zone: str, name: str) -> ListedPlacement | None:
        """Return a placement by its name, or None if it does not exist."""

    async def ask(self, request: PlacementRequest) -> str:
        """Queue a request. If a request of that name exists, assume that it is this one.

        Return the name of the operation that creates it, which may still fail; empty if the cloud
        did not name it.
        """

    async def operation(self, name: str) -> OperationState | None:
        """Return the state of an operation, or None if the cloud does not know it."""

    async def release(self, zone: str, name: str, slices: Sequence[str] = ()) -> None:
        """Delete a placement and its slices. A placement that does not exist is no error.

        `slices` are the names of the listed slices, which may exist without their request.
        """

    async def check_login(self) -> None:
        """Raise CloudError if the login is missing or expired. Make no call about a resource."""

    async def bucket_location(self, bucket: str) -> str | None:
        """Return the location of a bucket, such as `US-CENTRAL2`, or None if it is not readable."""

    def explain(self, error: CloudError, zone: str) -> Refusal:
        """Classify an error of a call about a zone."""

    async def close(self) -> None:
        """Close the connections."""
