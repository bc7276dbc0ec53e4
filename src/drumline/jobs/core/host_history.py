"""What is remembered of hosts: who is accused of what, for how long, and what follows. Pure.

Nobody can tell the cloud to take a bad host away, and it will be granted again. So every host that
a job met is remembered, by the strongest name there is for it, with the evidence against it:

- A *measured* fault, found by a burn-in or a replay, excludes the host for a week. Granted again,
  it has to pass a long burn-in before it is used.
- A failure at the *start* of a program makes it suspect, for it may have been the program. If that
  happens to two jobs within a day it is excluded, and refused without another try: a burn-in may
  well pass on a host that no program can start on.
- Steps that differ again after such a burn-in was passed are what it does not show: then the host
  is refused as well.
- What a person excludes is refused until that person forgives.

Many hosts that go bad at once are a bad version of something, or a bad day of the zone. Then nobody
is excluded: jobs would run out of hosts, and the trouble would have the wrong name.

Times are those of the wall clock: they outlive servers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

HOUR = 3600.0
EXCLUDED_FOR = 7 * 24 * HOUR
"""Seconds that an exclusion lasts: repairs take 3 to 14 days, and a chip does not heal."""
SUSPECT_FOR = 24 * HOUR
WEAK_FOR = 6 * HOUR
"""Seconds that anything is held against a place instead of a machine: after that, another machine
may well stand there."""
JOBS_THAT_EXCLUDE = 2
"""Jobs that fail to start on a host within a day, after which no third one tries."""
HOSTS_THAT_ACQUIT = 3
"""Hosts on which one job fails to start, after which it is the job's own doing: a program that dies
as it is imported does so everywhere."""
MOST_SHARE, MOST_HOSTS = 0.2, 2
"""The share of the hosts seen within a day that may be excluded by themselves, and the number that
may whatever the share is. Beyond both it is no longer about hosts."""
MOST_EVIDENCE = 20
"""The newest pieces of evidence that are kept for a host."""


class HostState(StrEnum):
    """How much a host is trusted."""

    GOOD = "good"
    SUSPECT = "suspect"
    EXCLUDED = "excluded"


class Strength(StrEnum):
    """What a host's name stands for, from the strongest on."""

    LOCATION = "physical location"
    """The chip's own place in the data centre, which only an error of the driver names."""
    MACHINE = "physical host"
    PLACE = "place"
    """A zone, a kind of slice and a host's number in it: all that is known of most spot hosts."""


class Proof(StrEnum):
    """How something was found out."""

    START = "start"
    """A program could not start there, or the host fell silent under it."""
    BURN_IN = "burn-in"
    REPLAY = "replay"
    """A step of a training gave other bits the second time, on this host alone."""
    WITNESS = "witness"
    """The cloud itself calls the host unhealthy."""
    HAND = "hand"
    """A person said so."""
    PASSED = "passed"
    """In its favour: it passed a long burn-in."""


_MEASURED = frozenset({Proof.BURN_IN, Proof.REPLAY, Proof.WITNESS})


@dataclass(frozen=True)
class Evidence:
    """One thing that speaks against a host, or for it."""

    proof: Proof
    text: str
    at: float
    job: str = ""
    attempt: int = 0
    located: bool = False
    """Whether the error named the physical chip: such an accusation needs no second."""
    mass: bool = False
    """Whether so many hosts went bad with it that it was held against none of them."""
    until: float | None = None
    """When what a person said ends; None is never."""


@dataclass(frozen=True)
class HostName:
    """What a host is called, by the strongest name there is for it."""

    identity: str
    strength: Strength
    zone: str
    accelerator: str


@dataclass(frozen=True)
class KnownHost:
    """A host that was met, and what is known of it."""

    name: HostName
    first_seen: float
    last_seen: float
    times_seen: int = 1
    last_job: str = ""
    evidence: tuple[Evidence, ...] = field(default=())

    def state(self, now: float) -> HostState:
        """How much it is trusted now."""
        return self._judged(now)[0]

    def expires(self, now: float) -> float | None:
        """When it is good again if nothing more comes; None for never, or if it is good."""
        return self._judged(now)[1]

    def refused(self, now: float) -> bool:
        """Whether it is not even examined again: a burn-in would not show what is held against it.

        Never for a place, which another machine may have taken.
        """
        by_hand = self._by_hand(now)
        if by_hand is not None:
            return True
        strong = self.name.strength is not Strength.PLACE
        hidden = self._excluded_by_starts(now) is not None or self._fooled_a_burn_in(now)
        return strong and hidden

    def why(self, now: float) -> str:
        """The newest that speaks against it; empty where nothing does."""
        return next((e.text for e in reversed(self.evidence) if self._counts(e, now)), "")

    def _judged(self, now: float) -> tuple[HostState, float | None]:
        if not self.evidence:
            return HostState.GOOD, None  # nearly always, and thousands are judged at once
        by_hand = self._by_hand(now)
        if by_hand is not None:
            return HostState.EXCLUDED, by_hand.until
        since = self.evidence[self._passed_at() + 1 :]
        measured = [e for e in since if e.proof in _MEASURED and not e.mass]
        ends = [e.at + self._life(EXCLUDED_FOR) for e in measured]
        starts = self._excluded_by_starts(now)
        if starts is not None:
            ends.append(starts)
        if ends and max(ends) > now:
            return HostState.EXCLUDED, max(ends)
        # What a passed burn-in answered, and what was held against nobody, still makes one careful.
        lasting = [self._end(e) for e in self.evidence if self._counts(e, now)]
        return (HostState.SUSPECT, max(lasting)) if lasting else (HostState.GOOD, None)

    def _passed_at(self) -> int:
        """Where among the evidence it last passed; -1 for never. By order: clocks are set back."""
        proofs = [e.proof for e in self.evidence]
        return max((i for i, proof in enumerate(proofs) if proof is Proof.PASSED), default=-1)

    def _fooled_a_burn_in(self, now: float) -> bool:
        """Whether steps differed there, a burn-in found nothing, and steps differed again."""
        passed = self._passed_at()
        before, since = self.evidence[: max(passed, 0)], self.evidence[passed + 1 :]
        return all(
            any(e.proof is Proof.REPLAY and not e.mass and self._end(e) > now for e in part)
            for part in (before, since)
        )

    def _by_hand(self, now: float) -> Evidence | None:
        said = [e for e in self.evidence if e.proof is Proof.HAND]
        return next((e for e in said if e.until is None or e.until > now), None)

    def _excluded_by_starts(self, now: float) -> float | None:
        """Until when failed starts exclude it: those of two jobs in a day, or one that named it."""
        starts = [e for e in self.evidence if e.proof is Proof.START and not e.mass]
        for newest in reversed(starts):
            end = newest.at + self._life(EXCLUDED_FOR)
            near = [e for e in starts if abs(newest.at - e.at) <= SUSPECT_FOR]
            if end <= now:
                return None
            if newest.located or len({e.job for e in near}) >= JOBS_THAT_EXCLUDE:
                return end
        return None

    def _counts(self, evidence: Evidence, now: float) -> bool:
        against = evidence.proof not in {Proof.PASSED, Proof.HAND}
        return (against and self._end(evidence) > now) or (
            evidence.proof is Proof.HAND and (evidence.until is None or evidence.until > now)
        )

    def _end(self, evidence: Evidence) -> float:
        measured = evidence.proof in _MEASURED
        return evidence.at + self._life(EXCLUDED_FOR if measured else SUSPECT_FOR)

    def _life(self, seconds: float) -> float:
        return min(seconds, WEAK_FOR) if self.name.strength is Strength.PLACE else seconds


def met(known: KnownHost | None, name: HostName, job: str, now: float) -> KnownHost:
    """The host after a job was given it once more."""
    if known is None:
        return KnownHost(name, first_seen=now, last_seen=now, last_job=job)
    return replace(
        known,
        name=name,
        last_seen=max(now, known.last_seen),
        times_seen=known.times_seen + 1,
        last_job=job,
    )


def not_met(name: HostName, now: float) -> KnownHost:
    """A host that a person names before any job was given it."""
    return KnownHost(name, first_seen=now, last_seen=now, times_seen=0)


def by(known: KnownHost, now: float) -> KnownHost:
    """The host as an earlier server knew it, whose clock may have been ahead: nothing after `now`.

    Otherwise it would be excluded until then, and a week more.
    """
    ahead = known.last_seen > now or any(e.at > now for e in known.evidence)
    if not ahead:
        return known
    return replace(
        known,
        first_seen=min(known.first_seen, now),
        last_seen=min(known.last_seen, now),
        evidence=tuple(replace(e, at=min(e.at, now)) for e in known.evidence),
    )


def accused(known: KnownHost, evidence: Evidence, others: Iterable[KnownHost]) -> KnownHost:
    """The host with this against it, unless too many went bad at once: then it is only noted."""
    noted = _with(known, evidence)
    if noted.state(evidence.at) is HostState.EXCLUDED and too_many([*others, noted], evidence.at):
        return _with(known, replace(evidence, mass=True))
    return noted


def passed(known: KnownHost, job: str, text: str, now: float) -> KnownHost:
    """The host after it passed a long burn-in; what it passed right before makes room."""
    last = known.evidence[-1:]
    kept = known.evidence[:-1] if last and last[0].proof is Proof.PASSED else known.evidence
    return _with(replace(known, evidence=kept), Evidence(Proof.PASSED, text, now, job))


def excluded(known: KnownHost, why: str, until: float | None, now: float) -> KnownHost:
    """The host after a person excluded it."""
    kept = tuple(e for e in known.evidence if e.proof is not Proof.HAND)
    return _with(replace(known, evidence=kept), Evidence(Proof.HAND, why, now, until=until))


def withdrawn(known: KnownHost, job: str) -> KnownHost:
    """The host without the failed starts of a job, save those that named the chip itself."""
    kept = tuple(e for e in known.evidence if not failed_start_of(e, job))
    return replace(known, evidence=kept)


def failed_start_of(evidence: Evidence, job: str) -> bool:
    """Whether it is a start of this job that failed, and may have been the job's own fault."""
    return evidence.proof is Proof.START and evidence.job == job and not evidence.located


def forgiven(known: KnownHost) -> KnownHost:
    """The host after a person forgave it: nothing is held against it."""
    return replace(known, evidence=())


def too_many(hosts: Iterable[KnownHost], now: float) -> bool:
    """Whether more hosts are excluded than can be bad by themselves; people's word is not counted.

    Counted are hosts of which something was heard within a day.
    """
    recent = [host for host in hosts if host.last_seen > now - SUSPECT_FOR]
    bad = sum(
        1 for host in recent if host.state(now) is HostState.EXCLUDED and host._by_hand(now) is None
    )
    return bad > max(MOST_HOSTS, MOST_SHARE * len(recent))


def mass_event(hosts: Iterable[KnownHost], now: float) -> str:
    """What to tell where many went bad within a day and it was held against none; else empty."""
    recent = [host for host in hosts if host.last_seen > now - SUSPECT_FOR]
    noted = [h for h in recent if any(e.mass and e.at > now - SUSPECT_FOR for e in h.evidence)]
    if not noted:
        return ""
    bad = [h for h in recent if any(_went_bad(e, now) for e in h.evidence)]
    zones = sorted({host.name.zone for host in noted})
    return (
        f"{len(bad)} of {len(recent)} hosts went bad within a day, in {', '.join(zones)}: that is "
        "a bad version of something or a bad day of the zone, not so many bad hosts; no more are "
        "excluded"
    )


def _went_bad(evidence: Evidence, now: float) -> bool:
    """Whether this was found within a day, by no person."""
    return evidence.proof not in {Proof.PASSED, Proof.HAND} and evidence.at > now - SUSPECT_FOR


def _with(known: KnownHost, evidence: Evidence) -> KnownHost:
    """With one more piece of evidence; the oldest goes, but never what a person said."""
    every = (*known.evidence, evidence)
    newest = set(range(len(every)))
    old = [i for i, each in enumerate(every) if each.proof is not Proof.HAND]
    newest -= set(old[: max(0, len(every) - MOST_EVIDENCE)])
    return replace(
        known,
        last_seen=max(known.last_seen, evidence.at),
        evidence=tuple(each for i, each in enumerate(every) if i in newest),
    )
