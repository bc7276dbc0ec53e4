"""What the Cloud TPU API lists, with its own names of states: WAITING_FOR_RESOURCES, READY, …"""

from collections.abc import Mapping
from dataclasses import dataclass

from drumline.observed import Endpoint


@dataclass(frozen=True)
class Trouble:
    """An error the cloud reported: a google.rpc code and its text."""

    code: int
    message: str


@dataclass(frozen=True)
class ListedRequest:
    """A queued resource."""

    name: str
    zone: str
    state: str
    accelerator: str
    labels: Mapping[str, str]
    trouble: Trouble | None = None
    by_user: bool = False
    """Whether the last change of state was requested (USER), or the cloud's own (SERVICE)."""
    nodes: tuple[str, ...] = ()
    """The names of the requested nodes; where it lists none, there is one of the same name."""


@dataclass(frozen=True)
class ListedNode:
    """A node: a slice that exists."""

    name: str
    zone: str
    state: str
    accelerator: str
    labels: Mapping[str, str]
    endpoints: tuple[Endpoint, ...] = ()
    """The hosts in worker order."""
    health: str | None = None
    request: str = ""
    """The queued resource that the node came from, where the API says so."""
