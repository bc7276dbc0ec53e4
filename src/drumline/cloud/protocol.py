"""What the job manager needs of a cloud: a few calls, and what they raise.

What is seen there comes back as `observed.placements`, so a cloud of another kind implements this
protocol and nothing else changes. `google.tpu_api.TpuApi` is the one there is; it speaks to Google
and to the emulator alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from drumline.observed.faults import Refusal
from drumline.observed.placements import ListedPlacement


@dataclass(frozen=True)
class PlacementRequest:
    """One or more slices to ask for, all of them or none."""

    name: str
    zone: str
    accelerator: str
    """Of each slice."""
    image: str
    tier: str
    """`spot`, `on-demand` or `reserved`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    """`ssh-keys` lets us log in to the hosts."""
    slices: int = 1


class CloudError(Exception):
    """A call that did not succeed, after the retries that made sense.

    `code` is the cloud's own number for it, None where no answer came; `Cloud.explain` reads it.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        """Keep the code beside the text, for whoever classifies it."""
        super().__init__(message)
        self.code = code


class Cloud(Protocol):
    """Every call that waits may raise CloudError; each can be repeated without harm."""

    async def placements(self, zone: str) -> list[ListedPlacement]:
        """All placements of the project in a zone, whoever asked for them."""

    async def find(self, zone: str, name: str) -> ListedPlacement | None:
        """The placement of that name, None where the cloud knows of none."""

    async def ask(self, request: PlacementRequest) -> None:
        """Queue a request; one that exists already under that name is taken for ours."""

    async def release(self, zone: str, name: str, slices: Sequence[str] = ()) -> None:
        """Delete a placement and the slices under it; what is gone already is no error.

        `slices` names those that were seen: they may have outlived the request for them.
        """

    async def host_keys(self, placement: ListedPlacement) -> list[str | None]:
        """The public SSH key of each host, slice by slice, None where it is not published.

        Empty where not even the number of hosts can be learnt.
        """

    async def bucket_location(self, bucket: str) -> str | None:
        """`US-CENTRAL2`, `EU`, …; None where it cannot be known."""

    def explain(self, error: CloudError, zone: str) -> Refusal:
        """What an error of a call about that zone means."""

    async def close(self) -> None:
        """Let go of the connections."""
