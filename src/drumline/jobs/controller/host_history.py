"""The memory of hosts: takes in what is met and accused, and says who may be used.

Kept in the database and, for the rounds of the supervisor, here. The rules are in `core.memory`.
"""

import logging
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from drumline.cloud.protocol import CloudError
from drumline.jobs.controller.actions import Actions
from drumline.jobs.core import host_history as rules
from drumline.jobs.core.host_history import (
    Evidence,
    HostName,
    HostState,
    KnownHost,
    Proof,
    Strength,
)
from drumline.jobs.core.state import Cause, Job, Placement
from drumline.jobs.store.records import HostRows, Record
from drumline.observed import HostReport

log = logging.getLogger(__name__)

FORGOTTEN_AFTER = 30 * 24 * 3600.0
"""Seconds after which a good host that no job met again is forgotten."""
_LOCATION = re.compile(r"Physical location: (\S+)", re.IGNORECASE)


@dataclass(frozen=True)
class Welcome:
    """What is to be done with a host that a job was given."""

    refused: str = ""
    """Why it is not to be used at all; empty where it may."""
    examined: str = ""
    """Why it has to pass a long burn-in first; empty where nothing is known against it."""


NOTHING_KNOWN = Welcome()


class HostMemory:
    """All hosts that the jobs of this home have met."""

    def __init__(self, rows: HostRows, wall: Callable[[], float]) -> None:
        """Read what is known; `wall` gives the times to save."""
        self._rows = rows
        self._wall = wall
        now = wall()
        self._known = {identity: rules.by(host, now) for identity, host in rows.all().items()}
        self._unsaved: set[str] = set()
        """Hosts that could not be written: the disk was full."""

    def all(self) -> list[KnownHost]:
        """Every host, the least trusted first, then the one seen last."""
        now, order = self._wall(), [HostState.EXCLUDED, HostState.SUSPECT, HostState.GOOD]
        return sorted(
            self._known.values(), key=lambda host: (order.index(host.state(now)), -host.last_seen)
        )

    def now(self) -> float:
        """The time by which it judges."""
        return self._wall()

    def find(self, identity: str) -> KnownHost | None:
        """The host of that identity."""
        return self._known.get(identity)

    def mass_event(self) -> str:
        """What to tell where too many hosts went bad at once; empty where they did not."""
        return rules.mass_event(self._known.values(), self._wall())

    def met(self, index: int, told: Mapping[str, str], held: Placement, job: str) -> Welcome:
        """A job was given a host, which told this about itself: may it be used?"""
        now, name = self._wall(), name_of(index, told, held)
        known = rules.met(self._known.get(name.identity), name, job, now)
        self._save(known)
        state, why = known.state(now), known.why(now)
        if known.refused(now):
            return Welcome(refused=f"{name.identity} is excluded: {why}")
        if state is HostState.GOOD:
            return NOTHING_KNOWN
        return Welcome(examined=f"{name.identity} is {state.value}: {why}")

    def accuse(
        self, cause: Cause, told: Mapping[str, str], held: Placement, job: str, attempt: int
    ) -> KnownHost:
        """Hold against a host that it made an attempt fail."""
        now = self._wall()
        found = _LOCATION.search("\n".join((cause.error, *cause.tail)))
        proof = Proof(cause.proof) if cause.proof else Proof.START
        evidence = Evidence(proof, cause.error, now, job, attempt, located=found is not None)
        name = name_of(cause.host, told, held)
        if found and name.strength is Strength.PLACE:
            # Both: by the place it is known again within hours, by the location whenever the
            # driver names it.
            located = HostName(found[1], Strength.LOCATION, held.zone, held.accelerator)
            self._accuse(located, evidence, job)
        return self._accuse(name, evidence, job)

    def _accuse(self, name: HostName, evidence: Evidence, job: str) -> KnownHost:
        known = self._known.get(name.identity) or rules.met(None, name, job, evidence.at)
        others = [host for host in self._known.values() if host.name != name]
        judged = rules.accused(known, evidence, others)
        self._save(judged)
        if evidence.proof is Proof.START:
            self._acquit_where_the_job_is_at_fault(job)
        return self._known[name.identity]

    def _acquit_where_the_job_is_at_fault(self, job: str) -> None:
        accused = [
            host
            for host in self._known.values()
            if any(rules.failed_start_of(evidence, job) for evidence in host.evidence)
        ]
        if len(accused) >= rules.HOSTS_THAT_ACQUIT:
            for host in accused:
                self._save(rules.withdrawn(host, job))

    def passed(
        self, index: int, told: Mapping[str, str], held: Placement, job: str, text: str
    ) -> None:
        """A host passed a long burn-in: what was measured earlier no longer excludes it."""
        now = self._wall()
        known = self._known.get(name_of(index, told, held).identity)
        if known is not None and known.state(now) is not HostState.GOOD:
            self._save(rules.passed(known, job, text, now))

    def exclude(self, identity: str, why: str, seconds: float | None) -> KnownHost:
        """A person excludes a host, for so long or until it is forgiven."""
        now = self._wall()
        unmet = HostName(identity, Strength.MACHINE, "", "")
        known = self._known.get(identity) or rules.not_met(unmet, now)
        judged = rules.excluded(known, why, None if seconds is None else now + seconds, now)
        self._keep(judged)
        return judged

    def forgive(self, identity: str) -> KnownHost | None:
        """A person forgives a host; None where none of that identity is known."""
        known = self._known.get(identity)
        if known is None:
            return None
        forgiven = rules.forgiven(known)
        self._keep(forgiven)
        return forgiven

    def prune(self) -> None:
        """Forget good hosts that nobody met for long; write what could not be written before."""
        self.write()
        now = self._wall()
        for identity, host in list(self._known.items()):
            old = host.last_seen < now - FORGOTTEN_AFTER
            if old and host.state(now) is HostState.GOOD:
                del self._known[identity]
                self._rows.remove(identity)

    def write(self) -> None:
        """Write what could not be written while the disk was full."""
        for identity in list(self._unsaved):
            self._rows.save(self._known[identity])
            self._unsaved.discard(identity)

    def _keep(self, known: KnownHost) -> None:
        """For a person, who is told where it cannot be written, and that nothing was done."""
        self._rows.save(known)
        self._known[known.name.identity] = known

    def _save(self, known: KnownHost) -> None:
        """For a job, which a full disk of ours is no reason to end."""
        self._known[known.name.identity] = known
        self._unsaved.add(known.name.identity)
        try:
            self.write()
        except sqlite3.OperationalError as trouble:
            log.warning("host %s is not written down yet: %s", known.name.identity, trouble)


def name_of(index: int, told: Mapping[str, str], held: Placement) -> HostName:
    """What a host is called, by the strongest name that it told, or by its place."""
    machine = told.get("physical_host", "")
    if machine:
        return HostName(machine, Strength.MACHINE, held.zone, held.accelerator)
    place = f"{held.zone}/{held.accelerator}/{index}"
    return HostName(place, Strength.PLACE, held.zone, held.accelerator)


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
        reports: Callable[[Job], Sequence[HostReport]],
        memory: HostMemory,
        clock: Callable[[], float],
    ) -> None:
        """Nothing is asked yet."""
        self._witness = witness
        self._records = records
        self._reports = reports
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
            for report in self._reports(record.job) if held else ():
                instance = report.identity.get("instance_id", "")
                said = unhealthy.get(instance)
                if held is None or said is None or (instance, record.job.id) in self._told:
                    continue
                self._told.add((instance, record.job.id))
                text = f"the cloud calls it unhealthy: {said}"
                cause = Cause("bad host", report.index, held.hosts, text, proof=Proof.WITNESS)
                number = record.job.attempt.number if record.job.attempt else 0
                self._memory.accuse(cause, report.identity, held, record.job.id, number)
