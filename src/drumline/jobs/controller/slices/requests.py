"""Requests for slices, limited to so many a minute."""

from drumline.chips import slice_of
from drumline.cloud.protocol import Cloud, CloudError, PlacementRequest
from drumline.jobs.controller.actions import Budget
from drumline.jobs.controller.slices.releases import LABEL_JOB, LABEL_OWNER
from drumline.jobs.core.state import Placement
from drumline.jobs.store.records import Record
from drumline.observed.faults import Refusal


class Requests:
    """Requests slices with our label, and with our SSH key for their hosts."""

    def __init__(self, cloud: Cloud, owner: str, public_key: str, budget: Budget) -> None:
        """`owner` is the label of all slices of this database."""
        self._cloud = cloud
        self._owner = owner
        self._public_key = public_key
        self._budget = budget

    def may_ask(self) -> bool:
        """Whether one more request may be made now; if so, it is counted."""
        return self._budget.take()

    async def ask(self, record: Record, held: Placement) -> Refusal | None:
        """Ask for a placement; returns why it was refused, if it was."""
        wanted = slice_of(held.accelerator)
        request = PlacementRequest(
            name=held.name,
            zone=held.zone,
            accelerator=held.accelerator,
            image=wanted.runtime_image or "",
            tier=record.spec.capacity,
            labels={LABEL_OWNER: self._owner, LABEL_JOB: record.job.id},
            # With OS Login on, the hosts would not read the key from the metadata.
            metadata={"ssh-keys": f"drumline:{self._public_key}", "enable-oslogin": "FALSE"},
            slices=held.slices,
        )
        try:
            await self._cloud.ask(request)
        except CloudError as error:
            return self._cloud.explain(error, held.zone)
        return None
