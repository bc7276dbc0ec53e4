"""What the job manager needs from a cloud: a few calls, and what they raise.

Calls return `observed.placements`, so a cloud of another kind implements this protocol and nothing
else changes. The only implementation is `google.tpu_api.TpuApi`, for Google and for the emulator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from drumline.observed import ListedPlacement, Refusal


@dataclass(frozen=True)
class PlacementRequest:
    """One or more slices to be granted together or not at all."""

    name: str
    zone: str
    accelerator: str
    """The kind of each slice."""
    image: str
    tier: str
    """The provisioning: `spot`, `on-demand` or `reserved`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the hosts; its `ssh-keys` let us log in."""
    slices: int = 1


class CloudError(Exception):
    """A call that did not succeed, after the retries that made sense.

    `code` is the cloud's own error code, None where no answer came; `Cloud.explain` reads it.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        """Keep the code beside the text, so that the error can be classified."""
        super().__init__(message)
        self.code = code


class Cloud(Protocol):
    """Every async call may raise CloudError; each is idempotent."""

    async def placements(self, zone: str) -> list[ListedPlacement]:
        """All placements of the project in a zone, of every owner."""

    async def find(self, zone: str, name: str) -> ListedPlacement | None:
        """The placement of that name, None where the cloud has none."""

    async def ask(self, request: PlacementRequest) -> None:
        """Queue a request; a request that exists under that name already is taken to be ours."""

    async def release(self, zone: str, name: str, slices: Sequence[str] = ()) -> None:
        """Delete a placement and the slices under it; what is gone already is no error.

        `slices` names those that were listed: they may have outlived their request.
        """

    async def host_keys(self, placement: ListedPlacement) -> list[str | None]:
        """The public SSH key of each host, slice by slice, None where it is not published.

        Empty where not even the number of hosts is known.
        """

    async def bucket_location(self, bucket: str) -> str | None:
        """The location of a bucket: `US-CENTRAL2`, `EU`, …; None where it cannot be read."""

    def explain(self, error: CloudError, zone: str) -> Refusal:
        """What an error of a call about that zone means."""

    async def close(self) -> None:
        """Close the connections."""
