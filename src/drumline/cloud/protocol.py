"""What the job manager needs of a cloud: a few calls, and the values they carry.

`tpu_api.TpuApi` is the one implementation; it speaks to Google and to the emulator alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class SliceRequest:
    """A slice to ask for. The node under the request bears the same name."""

    name: str
    zone: str
    accelerator: str
    image: str
    tier: str
    """`spot`, `on-demand` or `reserved`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    """`ssh-keys` lets us log in to the hosts."""


@dataclass(frozen=True)
class Trouble:
    """An error the cloud reported: a google.rpc code and its text."""

    code: int
    message: str


@dataclass(frozen=True)
class Request:
    """A queued resource as the cloud lists it. States as in the API: WAITING_FOR_RESOURCES, …"""

    name: str
    zone: str
    state: str
    accelerator: str
    labels: Mapping[str, str]
    trouble: Trouble | None = None
    by_user: bool = False
    """Whether the last change of state was asked for (USER) or came from the cloud (SERVICE)."""


@dataclass(frozen=True)
class Endpoint:
    """One host of a node: where its siblings and where we reach it."""

    internal_ip: str
    ssh_ip: str
    ssh_port: int = 22


@dataclass(frozen=True)
class Node:
    """A slice that exists, as the cloud lists it. States as in the API: READY, PREEMPTED, …"""

    name: str
    zone: str
    state: str
    accelerator: str
    labels: Mapping[str, str]
    endpoints: tuple[Endpoint, ...] = ()
    """In worker order."""
    health: str | None = None


class CloudError(Exception):
    """A call that did not succeed, after the retries that made sense.

    `code` is the google.rpc code (8 is RESOURCE_EXHAUSTED), None where no answer came.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        """Keep the code beside the text, for whoever classifies it."""
        super().__init__(message)
        self.code = code


class Cloud(Protocol):
    """Every call may raise CloudError; each can be repeated without harm."""

    async def requests(self, zone: str) -> list[Request]:
        """All queued resources of the project in a zone, all pages."""

    async def nodes(self, zone: str) -> list[Node]:
        """All nodes of the project in a zone, all pages."""

    async def find(self, zone: str, name: str) -> tuple[Request | None, Node | None]:
        """The request and the node of that name, None where the cloud knows of none."""

    async def ask(self, request: SliceRequest) -> None:
        """Queue a request; one that exists already under that name is taken for ours."""

    async def release(self, zone: str, name: str) -> None:
        """Delete the request and the node under it; what is gone already is no error."""

    async def remove_node(self, zone: str, name: str) -> None:
        """Delete a node that has no request; what is gone already is no error."""

    async def host_keys(self, zone: str, node: str) -> list[str | None]:
        """The public SSH host key of each host in worker order, None where it is not published."""

    async def bucket_location(self, bucket: str) -> str | None:
        """`US-CENTRAL2`, `EU`, …; None where it cannot be known."""

    async def close(self) -> None:
        """Let go of the connections."""
