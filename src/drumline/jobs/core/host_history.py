"""The history of hosts: the evidence against each, and the hosts to test or to refuse. Pure.

The cloud offers no way to return a bad host for repair, and will regrant it. So every host that a
job has used is recorded, under its most specific name, with the evidence against it:

- A *measured* fault, found by a burn-in or a replay, excludes the host for a week. If the cloud
  regrants it, it must pass a long burn-in before it is used.
- A failure at the *start* of a program makes the host suspect, because the program may be the
  cause. The output of a program alone excludes no host: it counts once the program runs on other
  hosts. If that happens to two jobs within a day, the host is excluded and refused without a test:
  a burn-in may pass on a host where no program can start.
- A host is also refused if training steps still differ after it passed such a burn-in, because the
  burn-in does not detect its fault.
- A host that a user excluded is refused until a user clears it.

If many hosts go bad at once, the cause is a bad software version or an outage of the zone. Then
none is excluded, because jobs would run out of hosts.

Times are those of the wall clock, because they outlive servers. `HostRecord` is saved as JSON, so
field names and enum values do not change.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

HOUR = 3600.0
EXCLUSION_SECONDS = 7 * 24 * HOUR
"""Duration of an exclusion. Repairs take 3 to 14 days, and a chip does not heal."""
SUSPICION_SECONDS = 24 * HOUR
POSITION_SECONDS = 6 * HOUR
"""The maximum age of evidence against a position instead of a machine. After that, a
different machine may have the position."""
JOBS_TO_EXCLUDE = 2
"""Jobs that fail to start on a host within a day, after which the host is excluded."""
HOSTS_TO_CLEAR = 3
"""Hosts on which one job fails to start, after which the job is the cause: a program that fails at
an import does so everywhere."""
MAX_EXCLUDED_SHARE, MAX_EXCLUDED_HOSTS = 0.2, 2
"""The share of the hosts seen within a day that may be excluded automatically, and the number that
may be at any share. Beyond both, the cause is not the hosts."""
MAX_EVIDENCE = 20
"""The number of newest pieces of evidence that are stored per host."""


class HostState(StrEnum):
    """The trust in a host."""

    GOOD = "good"
    SUSPECT = "suspect"
    EXCLUDED = "excluded"


class Strength(StrEnum):
    """The kind of a host's name, from the most specific on."""

    LOCATION = "physical location"
    """The position of the chip in the data centre, which only an error of the driver reports."""
    MACHINE = "physical host"
    POSITION = "place"
    """A zone, an accelerator and a host index. Most spot hosts have no other name."""


class EvidenceType(StrEnum):
    """The source of a piece of evidence."""

    START = "start"
    """A program failed to start on the host, or the host stopped reporting while it ran."""
    BURN_IN = "burn-in"
    REPLAY = "replay"
    """A repeated training step gave different bits, on this host alone."""
    HEALTH_SOURCE = "witness"
    """The cloud reports the host as unhealthy."""
    MANUAL = "hand"
    """A user excluded the host."""
    PASSED = "passed"
    """The host passed a long burn-in, which counts in its favour."""


_MEASURED = frozenset({EvidenceType.BURN_IN, EvidenceType.REPLAY, EvidenceType.HEALTH_SOURCE})


@dataclass(frozen=True)
class Evidence:
    """One piece of evidence against a host, or in its favour."""

    proof: EvidenceType
    text: str
    at: float
    job: str = ""
    attempt: int = 0
    located: bool = False
    """True if the error named the physical chip. Then one failed start suffices to exclude it."""
    mass: bool = False
    """True if so many hosts went bad together that the evidence counts against no host."""
    until: float | None = None
    """The end of an exclusion by a user; None if it does not end."""
    claimed: bool = False
    """True if only the output of a program says so. Then it makes the host suspect and excludes
    nobody, until the same program runs on other hosts."""
    location: str = ""
    """The physical location of the chip, from libtpu's own log."""


@dataclass(frozen=True)
class HostName:
    """The most specific name of a host."""

    identity: str
    strength: Strength
    zone: str
    accelerator: str


@dataclass(frozen=True)
class HostRecord:
    """A host that a job has used, and the evidence about it."""

    name: HostName
    first_seen: float
    last_seen: float
    times_seen: int = 1
    last_job: str = ""
    evidence: tuple[Evidence, ...] = field(default=())

    def state(self, now: float) -> HostState:
        """Return the trust in the host now."""
        return self._state_and_expiry(now)[0]

    def expires(self, now: float) -> float | None:
        """Return when the host is good again without new evidence; None for never or if good."""
        return self._state_and_expiry(now)[1]

    def refused(self, now: float) -> bool:
        """Return True if jobs refuse the host without a test, which would not detect its fault.

        Positions are refused only if a person excluded them: another machine may have taken them.
        """
        if self._manual_exclusion(now) is not None:
            return True
        undetectable = self._excluded_by_starts(now) is not None or self._misled_a_burn_in(now)
        return undetectable and self.name.strength is not Strength.POSITION

    def reason(self, now: float) -> str:
        """Return the newest evidence against the host; empty if there is none."""
        return next((e.text for e in reversed(self.evidence) if self._counts(e, now)), "")

    def _state_and_expiry(self, now: float) -> tuple[HostState, float | None]:
        if not self.evidence:
            return HostState.GOOD, None  # nearly always, and thousands are checked at once
        manual = self._manual_exclusion(now)
        if manual is not None:
            return HostState.EXCLUDED, manual.until
        since_pass = self.evidence[self._last_pass() + 1 :]
        measured = [e for e in since_pass if e.proof in _MEASURED and not e.mass]
        ends = [e.at + self._duration(EXCLUSION_SECONDS) for e in measured]
        by_starts = self._excluded_by_starts(now)
        if by_starts is not None:
            ends.append(by_starts)
        if ends and max(ends) > now:
            return HostState.EXCLUDED, max(ends)
        # Evidence from before a passed burn-in or a mass failure still makes the host suspect.
        suspicions = [self._end(e) for e in self.evidence if self._counts(e, now)]
        return (HostState.SUSPECT, max(suspicions)) if suspicions else (HostState.GOOD, None)

    def _last_pass(self) -> int:
        """Return the index of the last passed burn-in; -1 for none. Clocks may go back."""
        passes = [i for i, e in enumerate(self.evidence) if e.proof is EvidenceType.PASSED]
        return max(passes, default=-1)

    def _misled_a_burn_in(self, now: float) -> bool:
        """Return True if steps differed both before and after the host passed a burn-in."""
        last_pass = self._last_pass()
        before, after = self.evidence[: max(last_pass, 0)], self.evidence[last_pass + 1 :]
        return all(
            any(e.proof is EvidenceType.REPLAY and not e.mass and self._end(e) > now for e in part)
            for part in (before, after)
        )

    def _manual_exclusion(self, now: float) -> Evidence | None:
        manual = [e for e in self.evidence if e.proof is EvidenceType.MANUAL]
        return next((e for e in manual if e.until is None or e.until > now), None)

    def _excluded_by_starts(self, now: float) -> float | None:
        """Return until when failed starts exclude the host: two jobs in a day, or a named chip."""
        starts = [
            e
            for e in self.evidence
            if e.proof is EvidenceType.START and not e.mass and not e.claimed
        ]
        for newest in reversed(starts):
            end = newest.at + self._duration(EXCLUSION_SECONDS)
            if end <= now:
                return None
            same_day = [e for e in starts if abs(newest.at - e.at) <= SUSPICION_SECONDS]
            if newest.located or len({e.job for e in same_day}) >= JOBS_TO_EXCLUDE:
                return end
        return None

    def _counts(self, evidence: Evidence, now: float) -> bool:
        if evidence.proof is EvidenceType.PASSED:
            return False
        if evidence.proof is EvidenceType.MANUAL:
            return evidence.until is None or evidence.until > now
        return self._end(evidence) > now

    def _end(self, evidence: Evidence) -> float:
        measured = evidence.proof in _MEASURED
        seconds = EXCLUSION_SECONDS if measured else SUSPICION_SECONDS
        return evidence.at + self._duration(seconds)

    def _duration(self, seconds: float) -> float:
        is_position = self.name.strength is Strength.POSITION
        return min(seconds, POSITION_SECONDS) if is_position else seconds


def record_use(host: HostRecord | None, name: HostName, job: str, now: float) -> HostRecord:
    """Return the host after a job was given it once more."""
    if host is None:
        return HostRecord(name, first_seen=now, last_seen=now, last_job=job)
    return replace(
        host,
        name=name,
        last_seen=max(now, host.last_seen),
        times_seen=host.times_seen + 1,
        last_job=job,
    )


def unused_host(name: HostName, now: float) -> HostRecord:
    """Return a host that a user names before any job has used it."""
    return HostRecord(name, first_seen=now, last_seen=now, times_seen=0)


def clamp_times(host: HostRecord, now: float) -> HostRecord:
    """Move times in the future to `now`, because the clock of a previous server may differ.

    Otherwise an exclusion would last until then, and a week more.
    """
    if host.last_seen <= now and all(e.at <= now for e in host.evidence):
        return host
    return replace(
        host,
        first_seen=min(host.first_seen, now),
        last_seen=min(host.last_seen, now),
        evidence=tuple(replace(e, at=min(e.at, now)) for e in host.evidence),
    )


def add_evidence(host: HostRecord, evidence: Evidence, others: Iterable[HostRecord]) -> HostRecord:
    """Return the host with evidence against it, which does not count if too many hosts went bad."""
    updated = _append(host, evidence)
    excluded = updated.state(evidence.at) is HostState.EXCLUDED
    if excluded and too_many_excluded([*others, updated], evidence.at):
        return _append(host, replace(evidence, mass=True))
    return updated


def add_pass(host: HostRecord, job: str, text: str, now: float) -> HostRecord:
    """Return the host after it passed a long burn-in. A directly preceding pass is replaced."""
    last = host.evidence[-1:]
    kept = host.evidence[:-1] if last and last[0].proof is EvidenceType.PASSED else host.evidence
    passed = Evidence(EvidenceType.PASSED, text, now, job)
    return _append(replace(host, evidence=kept), passed)


def exclude(host: HostRecord, reason: str, until: float | None, now: float) -> HostRecord:
    """Return the host after a user excluded it."""
    kept = tuple(e for e in host.evidence if e.proof is not EvidenceType.MANUAL)
    exclusion = Evidence(EvidenceType.MANUAL, reason, now, until=until)
    return _append(replace(host, evidence=kept), exclusion)


def withdraw_failed_starts(host: HostRecord, job: str) -> HostRecord:
    """Return the host without the failed starts of a job, unless they named the chip."""
    return replace(host, evidence=tuple(e for e in host.evidence if not is_failed_start(e, job)))


def is_failed_start(evidence: Evidence, job: str) -> bool:
    """Return True for a failed start of this job that the job itself may have caused."""
    return evidence.proof is EvidenceType.START and evidence.job == job and not evidence.located


def confirm_failed_starts(host: HostRecord, job: str) -> HostRecord:
    """Return the host after a job that failed to start there runs on other hosts."""
    evidence = tuple(
        replace(e, claimed=False) if e.job == job and e.claimed else e for e in host.evidence
    )
    return host if evidence == host.evidence else replace(host, evidence=evidence)


def claims_location(host: HostRecord, location: str) -> bool:
    """Return True if evidence against a host names this physical location."""
    return any(e.location == location for e in host.evidence)


def withdraw_location(host: HostRecord, location: str) -> HostRecord:
    """Return the host without a location that multiple machines claim: at most one is there.

    A host that is known by this location becomes good if no other evidence remains.
    """
    if host.name.strength is Strength.LOCATION:
        return replace(host, evidence=tuple(e for e in host.evidence if e.location != location))
    return replace(
        host,
        evidence=tuple(
            replace(e, located=False) if e.location == location else e for e in host.evidence
        ),
    )


def forgive(host: HostRecord) -> HostRecord:
    """Return the host without any evidence, after a user cleared it."""
    return replace(host, evidence=())


def too_many_excluded(hosts: Iterable[HostRecord], now: float) -> bool:
    """Return True if more hosts are excluded automatically than can be bad by themselves.

    Only hosts that were used or reported within a day count.
    """
    recent = [host for host in hosts if host.last_seen > now - SUSPICION_SECONDS]
    excluded = sum(
        1
        for host in recent
        if host.state(now) is HostState.EXCLUDED and host._manual_exclusion(now) is None
    )
    return excluded > max(MAX_EXCLUDED_HOSTS, MAX_EXCLUDED_SHARE * len(recent))


def mass_failure_message(hosts: Iterable[HostRecord], now: float) -> str:
    """Return a message if many hosts went bad within a day and none was excluded; else empty."""
    day_ago = now - SUSPICION_SECONDS
    recent = [host for host in hosts if host.last_seen > day_ago]
    affected = [h for h in recent if any(e.mass and e.at > day_ago for e in h.evidence)]
    if not affected:
        return ""
    bad = [h for h in recent if any(_went_bad(e) and e.at > day_ago for e in h.evidence)]
    zones = sorted({host.name.zone for host in affected})
    return (
        f"{len(bad)} of {len(recent)} hosts went bad within a day, in {', '.join(zones)}; the "
        "cause is probably a software version or an outage of the zone, so no "
        "more hosts are excluded"
    )


def _went_bad(evidence: Evidence) -> bool:
    return evidence.proof not in {EvidenceType.PASSED, EvidenceType.MANUAL}


def _append(host: HostRecord, evidence: Evidence) -> HostRecord:
    """Add evidence and drop the oldest beyond the limit, but never an exclusion by a user."""
    entries = (*host.evidence, evidence)
    removable = [i for i, e in enumerate(entries) if e.proof is not EvidenceType.MANUAL]
    removed = set(removable[: max(0, len(entries) - MAX_EVIDENCE)])
    return replace(
        host,
        last_seen=max(host.last_seen, evidence.at),
        evidence=tuple(e for i, e in enumerate(entries) if i not in removed),
    )
