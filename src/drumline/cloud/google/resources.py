"""What the Cloud TPU API lists, with its own words for states: WAITING_FOR_RESOURCES, READY, …"""

from collections.abc import Mapping
from dataclasses import dataclass

from drumline.observed.placements import Endpoint


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
    """Whether the last change of state was asked for (USER) or came from the cloud (SERVICE)."""
    nodes: tuple[str, ...] = ()
    """The names of those it asks for; where it tells none, there is one of its own name."""


@dataclass(frozen=True)
class ListedNode:
    """A node: a slice that exists."""

    name: str
    zone: str
    state: str
    accelerator: str
    labels: Mapping[str, str]
    endpoints: tuple[Endpoint, ...] = ()
    """In worker order."""
    health: str | None = None
    request: str = ""
    """The queued resource that it came from, where the API says so."""
