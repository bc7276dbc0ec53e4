"""The history of hosts, in memory and in the job database. The rules are in `core.host_history`."""

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from drumline.cloud.protocol import CloudError
from drumline.jobs.controller.tasks import BackgroundTasks
from drumline.jobs.core import host_history as rules
from drumline.jobs.core.host_history import (
    Evidence,
    EvidenceType,
    HostName,
    HostRecord,
    HostState,
    Strength,
)
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Cause,
    Job,
    Placement,
)
from drumline.jobs.store.records import HostTable, Record
from drumline.observed import HostReport

log = logging.getLogger(__name__)

FORGET_SECONDS = 30 * 24 * 3600.0
"""Seconds without a use after which a good host is forgotten."""
HEALTH_SECONDS = 60.0
"""Seconds between two queries of the health source, which has one value per minute."""


@dataclass(frozen=True)
class HostClearance:
    """The decision on a host of a granted slice: use it, test it before its use, or refuse it."""

    refusal: str = ""
    """The reason to refuse the host; empty if it may be used."""
    burn_in_reason: str = ""
    """The reason why the host must pass a long burn-in before its use; empty if it need not."""


class HostHistory:
    """All hosts that the jobs of this home were given."""

    def __init__(self, table: HostTable, wall: Callable[[], float]) -> None:
        """Read the hosts of the database. `wall` is the clock for saved times."""
        self._table = table
        self._wall = wall
        now = wall()
        self._hosts = {
            identity: rules.clamp_times(host, now) for identity, host in table.all().items()
        }
        self._unsaved: set[str] = set()
        """Hosts that could not be saved because the disk was full."""

    def all(self) -> list[HostRecord]:
        """Return every host, sorted by ascending trust and then by descending recency."""
        now, order = self._wall(), [HostState.EXCLUDED, HostState.SUSPECT, HostState.GOOD]
        return sorted(
            self._hosts.values(), key=lambda host: (order.index(host.state(now)), -host.last_seen)
        )

    def now(self) -> float:
        """Return the current time by the clock of the history."""
        return self._wall()

    def find(self, identity: str) -> HostRecord | None:
        """Return the host of that identity; None if it is not known."""
        return self._hosts.get(identity)

    def mass_failure_message(self) -> str:
        """Return a message if too many hosts went bad at once; empty if not."""
        return rules.mass_failure_message(self._hosts.values(), self._wall())

    def record_use(
        self, index: int, identity: Mapping[str, str], placement: Placement, job_id: str
    ) -> HostClearance:
        """Record that a job was given a host with this identity, and decide on its use."""
        now, name = self._wall(), name_of(index, identity, placement)
        host = rules.record_use(self._hosts.get(name.identity), name, job_id, now)
        self._save_if_possible(host)
        state, reason = host.state(now), host.reason(now)
        if host.refused(now):
            return HostClearance(refusal=f"{name.identity} is excluded: {reason}")
        if state is HostState.GOOD:
            return HostClearance()
        return HostClearance(burn_in_reason=f"{name.identity} is {state.value}: {reason}")

    def record_failure(
        self,
        cause: Cause,
        identity: Mapping[str, str],
        placement: Placement,
        job_id: str,
        attempt: int,
    ) -> HostRecord:
        """Record evidence against a host that made an attempt fail."""
        kind = EvidenceType(cause.proof) if cause.proof else EvidenceType.START
        name, location = name_of(cause.host, identity, placement), cause.location
        claimants = [
            host
            for host in self._hosts.values()
            if location and host.name != name and rules.claims_location(host, location)
        ]
        evidence = Evidence(
            kind,
            cause.error,
            self._wall(),
            job_id,
            attempt,
            located=bool(location) and not any(h.name.identity != location for h in claimants),
            claimed=cause.claimed,
            location=location,
        )
        if location and not evidence.located:
            for host in claimants:
                self._save_if_possible(rules.withdraw_location(host, location))
        if evidence.located and name.strength is Strength.POSITION:
            # Both names: the position recognizes the host within hours, and the location whenever
            # the driver reports it.
            chip = HostName(location, Strength.LOCATION, placement.zone, placement.accelerator)
            self._add_evidence(chip, evidence)
        return self._add_evidence(name, evidence)

    def confirm_failed_starts(self, job_id: str) -> None:
        """Let failed starts of a job count, because the job now runs on other hosts."""
        for host in list(self._hosts.values()):
            confirmed = rules.confirm_failed_starts(host, job_id)
            if confirmed is not host:
                self._save_if_possible(confirmed)

    def _add_evidence(self, name: HostName, evidence: Evidence) -> HostRecord:
        host = self._hosts.get(name.identity)
        host = host or rules.record_use(None, name, evidence.job, evidence.at)
        others = [other for other in self._hosts.values() if other.name != name]
        self._save_if_possible(rules.add_evidence(host, evidence, others))
        if evidence.proof is EvidenceType.START:
            self._clear_if_job_is_at_fault(evidence.job)
        return self._hosts[name.identity]

    def _clear_if_job_is_at_fault(self, job_id: str) -> None:
        hosts = [
            host
            for host in self._hosts.values()
            if any(rules.is_failed_start(evidence, job_id) for evidence in host.evidence)
        ]
        if len(hosts) >= rules.HOSTS_TO_CLEAR:
            for host in hosts:
                self._save_if_possible(rules.withdraw_failed_starts(host, job_id))

    def record_pass(
        self, index: int, identity: Mapping[str, str], placement: Placement, job_id: str
    ) -> None:
        """Record that a suspect host passed a long burn-in, which ends its exclusion."""
        now = self._wall()
        host = self._hosts.get(name_of(index, identity, placement).identity)
        if host is not None and host.state(now) is not HostState.GOOD:
            text = f"passed the burn-in of job {job_id}"
            self._save_if_possible(rules.add_pass(host, job_id, text, now))

    def exclude(self, identity: str, reason: str, seconds: float | None) -> HostRecord:
        """Exclude a host for a person, for a number of seconds or until it is forgiven."""
        now = self._wall()
        name = HostName(identity, Strength.MACHINE, "", "")
        host = self._hosts.get(identity) or rules.unused_host(name, now)
        until = None if seconds is None else now + seconds
        host = rules.exclude(host, reason, until, now)
        self._save(host)
        return host

    def forgive(self, identity: str) -> HostRecord | None:
        """Remove all evidence against a host for a person; None if it is not known."""
        host = self._hosts.get(identity)
        if host is None:
            return None
        host = rules.forgive(host)
        self._save(host)
        return host

    def prune(self) -> None:
        """Forget good hosts after a long time without use, and save unsaved hosts."""
        self.save_unsaved()
        now = self._wall()
        for identity, host in list(self._hosts.items()):
            old = host.last_seen < now - FORGET_SECONDS
            if old and host.state(now) is HostState.GOOD:
                del self._hosts[identity]
                self._table.remove(identity)

    def save_unsaved(self) -> None:
        """Save the hosts that could not be saved while the disk was full."""
        for identity in list(self._unsaved):
            self._table.save(self._hosts[identity])
            self._unsaved.discard(identity)

    def _save(self, host: HostRecord) -> None:
        """Save a change by a person, who gets an error if it cannot be saved."""
        self._table.save(host)
        self._hosts[host.name.identity] = host

    def _save_if_possible(self, host: HostRecord) -> None:
        """Save a change by a job, which does not fail because the disk is full."""
        self._hosts[host.name.identity] = host
        self._unsaved.add(host.name.identity)
        try:
            self.save_unsaved()
        except sqlite3.OperationalError as error:
            log.warning("host %s is not saved yet: %s", host.name.identity, error)


def name_of(index: int, identity: Mapping[str, str], placement: Placement) -> HostName:
    """Return the most specific name of a host: the machine that it reports, or its position."""
    zone, accelerator = placement.zone, placement.accelerator
    machine = identity.get("physical_host", "")
    if machine:
        return HostName(machine, Strength.MACHINE, zone, accelerator)
    return HostName(f"{zone}/{accelerator}/{index}", Strength.POSITION, zone, accelerator)


class HealthSource(Protocol):
    """A source of the health of hosts, such as a metric of the cloud."""

    async def unhealthy(self) -> dict[str, str]:
        """Return the reasons by instance id. May raise CloudError."""


class HealthMonitor:
    """Queries the health source regularly and records its reports in the host history.

    A program on an unhealthy host continues. The next job there is warned.
    """

    def __init__(
        self,
        source: HealthSource,
        records: Mapping[str, Record],
        reports: Callable[[Job], Sequence[HostReport]],
        host_history: HostHistory,
        clock: Callable[[], float],
    ) -> None:
        """`reports` returns the reports of a job's hosts."""
        self._source = source
        self._records = records
        self._reports = reports
        self._host_history = host_history
        self._clock = clock
        self._next_at = clock()
        self._recorded: set[tuple[str, str]] = set()
        """The pairs of an instance and a job that were recorded before."""

    def start_if_due(self, tasks: BackgroundTasks) -> None:
        """Start a query if one is due and there are jobs."""
        if self._records and self._clock() >= self._next_at:
            self._next_at = self._clock() + HEALTH_SECONDS
            tasks.start("witness", self.query)

    async def query(self) -> None:
        """Query the source and record evidence against unhealthy hosts of jobs."""
        try:
            unhealthy = await self._source.unhealthy()
        except CloudError as error:
            log.info("the health of hosts cannot be read: %s", error)
            return
        if not unhealthy:
            return
        for record in list(self._records.values()):
            job = record.job
            placement = job.active
            for report in self._reports(job) if placement else ():
                instance = report.identity.get("instance_id", "")
                reason = unhealthy.get(instance)
                if placement is None or reason is None or (instance, job.id) in self._recorded:
                    continue
                self._recorded.add((instance, job.id))
                cause = Cause(
                    EndReason.BAD_HOST,
                    report.index,
                    placement.hosts,
                    f"the cloud calls it unhealthy: {reason}",
                    proof=EvidenceType.HEALTH_SOURCE,
                )
                attempt = job.attempt.number if job.attempt else 0
                self._host_history.record_failure(
                    cause, report.identity, placement, job.id, attempt
                )
