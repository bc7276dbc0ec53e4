"""The cloud as a witness: hosts that it calls unhealthy itself are held to be bad.

Only what it says is taken in; a program that runs there goes on, and the next job is warned.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from drumline.cloud.protocol import CloudError
from drumline.jobs.controller.actions import Actions
from drumline.jobs.controller.memory import HostMemory
from drumline.jobs.controller.slices.sessions import Sessions
from drumline.jobs.core.memory import Proof
from drumline.jobs.core.state import Cause
from drumline.jobs.store.records import Record

log = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds between two questions: the metric has a point a minute."""


class Witness(Protocol):
    """Somebody who knows which hosts are unhealthy."""

    async def unhealthy(self) -> dict[str, str]:
        """Why, by the id of the instance. May raise CloudError."""


class Hearing:
    """Asks the witness now and then, and remembers what it says of the hosts of jobs."""

    def __init__(
        self,
        witness: Witness,
        records: Mapping[str, Record],
        sessions: Sessions,
        memory: HostMemory,
        clock: Callable[[], float],
    ) -> None:
        """Nothing is asked yet."""
        self._witness = witness
        self._records = records
        self._sessions = sessions
        self._memory = memory
        self._clock = clock
        self._next = clock()
        self._told: set[tuple[str, str]] = set()
        """Instances and jobs of which it has been said before."""

    def ask_if_due(self, actions: Actions) -> None:
        """Ask, if the last time was long enough ago and there is anybody to ask about."""
        if self._records and self._clock() >= self._next:
            self._next = self._clock() + EVERY
            actions.start("witness", self.ask)

    async def ask(self) -> None:
        """Hold against hosts what the witness says of them."""
        try:
            unhealthy = await self._witness.unhealthy()
        except CloudError as trouble:
            log.info("the health of hosts cannot be read: %s", trouble)
            return
        if not unhealthy:
            return
        for record in list(self._records.values()):
            held = record.job.placement
            for report in self._sessions.reports(record.job) if held else ():
                instance = report.identity.get("instance_id", "")
                said = unhealthy.get(instance)
                if held is None or said is None or (instance, record.job.id) in self._told:
                    continue
                self._told.add((instance, record.job.id))
                text = f"the cloud calls it unhealthy: {said}"
                cause = Cause("bad host", report.index, held.hosts, text, proof=Proof.WITNESS)
                number = record.job.attempt.number if record.job.attempt else 0
                self._memory.accuse(cause, report.identity, held, record.job.id, number)
