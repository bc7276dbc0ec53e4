"""What went wrong, from a code and a text: kind and scope, and with them what follows.

One table holds the texts the cloud has been seen to send, one the consequences of each kind.
RESOURCE_EXHAUSTED (8) covers stockout, quota and rate alike, so the text is asked first and the
code only when no text is known. A text that nobody has seen is UNKNOWN, not the likeliest guess.
Pure; `lifecycle` decides with it, `drumline list` prints what `explain` says.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """Why something did not succeed."""

    STOCKOUT = "stockout"
    QUOTA = "quota"
    RATE = "rate"
    DENIED = "denied"
    """This zone, or this project altogether, is not granted."""
    LOGIN = "login"
    """Credentials that expired or are missing."""
    PREEMPTED = "preempted"
    BAD_HOST = "bad host"
    CONFLICT = "conflict"
    """Something else is under way there: try again."""
    INVALID = "invalid"
    """Our request is wrong."""
    NOT_FOUND = "not found"
    TRANSIENT = "transient"
    """No answer, or the cloud's own error."""
    UNKNOWN = "unknown"


class Scope(StrEnum):
    """How far a fault reaches."""

    ZONE = "zone"
    REGION = "region"
    PROJECT = "project"
    REQUEST = "request"
    HOST = "host"


class Action(StrEnum):
    """What follows when a slice was refused, or a request for one failed."""

    NEXT_CHOICE = "next choice"
    """This zone rests, longer each time, and the job asks for its next choice."""
    RETRY = "retry"
    """The same is asked for again after a pause that grows: another zone would do no better."""
    PREEMPTION = "preemption"
    """The cloud took the slice back before it was ready."""
    GIVE_UP = "give up"
    """Nothing but a change of the job file can help."""


@dataclass(frozen=True)
class _Follows:
    """What a kind leads to."""

    action: Action
    sentence: str
    """For the user; {zone}, and {text} for what the cloud said."""


_FOLLOWS = {
    FaultKind.STOCKOUT: _Follows(Action.NEXT_CHOICE, "no capacity in {zone}"),
    FaultKind.QUOTA: _Follows(Action.NEXT_CHOICE, "quota in {zone} is used up"),
    FaultKind.RATE: _Follows(Action.RETRY, "too many calls to Google, slowing down"),
    FaultKind.DENIED: _Follows(Action.NEXT_CHOICE, "the project may not use {zone}"),
    # The user logs in elsewhere and the job goes on by itself: no reason to end it.
    FaultKind.LOGIN: _Follows(
        Action.RETRY,
        "Google login is missing or expired: run gcloud auth application-default login",
    ),
    FaultKind.PREEMPTED: _Follows(Action.PREEMPTION, "preempted in {zone}"),
    FaultKind.BAD_HOST: _Follows(Action.NEXT_CHOICE, "a host in {zone} is bad"),
    FaultKind.CONFLICT: _Follows(Action.RETRY, "{zone} is busy with another change, trying again"),
    FaultKind.INVALID: _Follows(Action.GIVE_UP, "the request was refused: {text}"),
    FaultKind.NOT_FOUND: _Follows(Action.RETRY, "not found in {zone}: {text}"),
    FaultKind.TRANSIENT: _Follows(
        Action.RETRY, "no answer from the cloud for {zone}, trying again"
    ),
    # Nobody knows what it means, so neither the zone nor the job is given up.
    FaultKind.UNKNOWN: _Follows(Action.NEXT_CHOICE, "{zone} refused: {text}"),
}


@dataclass(frozen=True)
class Fault:
    """What went wrong and how far it reaches."""

    kind: FaultKind
    scope: Scope

    @property
    def action(self) -> Action:
        """What follows for a job that waits for a slice."""
        usual = _FOLLOWS[self.kind].action
        if self.scope is Scope.PROJECT and usual is Action.NEXT_CHOICE:
            # No zone does better, and once somebody has granted it the job goes on by itself.
            return Action.RETRY
        if self.scope is Scope.ZONE and usual is Action.GIVE_UP:
            return Action.NEXT_CHOICE
        return usual

    @property
    def sentence(self) -> str:
        """The sentence of this kind, with {zone} and {text} to fill in; see `explain`."""
        return _FOLLOWS[self.kind].sentence


@dataclass(frozen=True)
class _Row:
    """A pattern, what it means, and a text it was seen in."""

    pattern: re.Pattern[str]
    kind: FaultKind
    scope: Scope
    seen: str


def _row(pattern: str, kind: FaultKind, scope: Scope, seen: str) -> _Row:
    return _Row(re.compile(pattern, re.IGNORECASE), kind, scope, seen)


# The first row that fits decides. Scopes of QUOTA rows give way to a place that the text names.
_CLOUD: tuple[_Row, ...] = (
    # Before quota, of which it speaks: "Quota exceeded for … 'CreateNode requests per minute'".
    _row(
        r"requests? per (?:minute|second|user|\d+ seconds)|RATE_LIMIT_EXCEEDED",
        FaultKind.RATE,
        Scope.PROJECT,
        "Maximum number of CreateNode requests per minute",
    ),
    _row(
        r"\bno more capacity\b",
        FaultKind.STOCKOUT,
        Scope.ZONE,
        'There is no more capacity in the zone "us-central2-b"; you can try in another zone',
    ),
    _row(
        r"\binsufficient (?:reserved )?capacity\b",
        FaultKind.STOCKOUT,
        Scope.ZONE,
        "Insufficient reserved capacity. Contact customer support to increase your reservation.",
    ),
    _row(
        r"RESOURCE_POOL_EXHAUSTED|does not have enough resources available",
        FaultKind.STOCKOUT,
        Scope.ZONE,
        "The zone 'us-central1-a' does not have enough resources available",
    ),
    _row(
        r"Quota (?:limit )?'[^']{0,150}PerZone[^']{0,150}'",
        FaultKind.QUOTA,
        Scope.ZONE,
        "Quota 'TPUV6EPerProjectPerZoneForTPUAPI' exhausted. Limit 64 in zone europe-west4-a",
    ),
    _row(
        r"Quota (?:limit )?'[^']{0,150}PerRegion[^']{0,150}'",
        FaultKind.QUOTA,
        Scope.REGION,
        "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0",
    ),
    # No place in the text: addresses and disks are counted by region.
    _row(
        r"QuotaFailure|\bQuota (?:limit )?'[^']*' (?:exhausted|exceeded|has been exceeded)"
        r"|\bquota exceeded\b|\binsufficient quota\b",
        FaultKind.QUOTA,
        Scope.REGION,
        "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8.0 in region us-central1.",
    ),
    _row(
        r"in state PREEMPTED\b|\b(?:was|been) preempted\b",
        FaultKind.PREEMPTED,
        Scope.ZONE,
        "update is not supported while in state PREEMPTED",
    ),
    _row(
        r"\bLocation\b.{0,200}\bis not found or access is unauthorized",
        FaultKind.DENIED,
        Scope.ZONE,
        "Location us-central2-b is not found or access is unauthorized.",
    ),
    _row(
        r"not have permission to submit requests",
        FaultKind.DENIED,
        Scope.ZONE,
        "User does not have permission to submit requests into this queue for accelerator type "
        "v5p-8 in location us-east1-d.",
    ),
    _row(
        r"SERVICE_DISABLED|API has not been used in project|billing (?:to be|is not|must be)"
        r"|BILLING_DISABLED|Constraint constraints/",
        FaultKind.DENIED,
        Scope.PROJECT,
        "Cloud TPU API has not been used in project 1 before or it is disabled.",
    ),
    _row(
        r"Permission '[^']*' denied on (?:resource )?['\"]?(?://[^/\s]*/)?projects/[^/'\"\s]+"
        r"(?=['\"\s(.,]|$)",
        FaultKind.DENIED,
        Scope.PROJECT,
        "Permission 'tpu.nodes.list' denied on 'projects/p'",
    ),
    _row(
        r"Permission '[^']*' denied on",
        FaultKind.DENIED,
        Scope.ZONE,
        "Permission 'tpu.nodes.list' denied on 'projects/p/locations/us-central2-b'",
    ),
    _row(
        r"\binvalid_grant\b|Reauthentication (?:is )?(?:needed|required)|ACCESS_TOKEN_EXPIRED"
        r"|no Google credentials|Google credentials have expired|invalid authentication credential",
        FaultKind.LOGIN,
        Scope.PROJECT,
        "no Google credentials: run gcloud auth application-default login",
    ),
    _row(
        r"unable to queue the operation",
        FaultKind.CONFLICT,
        Scope.REQUEST,
        "unable to queue the operation",
    ),
    _row(
        r"\baccelerator\b.{0,100}\bnot (?:found|available|supported|offered) in\b",
        FaultKind.INVALID,
        Scope.ZONE,
        "Cloud TPU received a bad request. the accelerator v4-128 was not found in zone us-x1-b",
    ),
)

_STALE_HOLDER: tuple[_Row, ...] = (
    _row(
        r"libtpu\.so already in use|libtpu_lockfile|TPU is already in use by process",
        FaultKind.CONFLICT,
        Scope.HOST,
        "libtpu.so already in use by another process",
    ),
)
_BAD_HOST: tuple[_Row, ...] = tuple(
    _row(re.escape(seen), FaultKind.BAD_HOST, Scope.HOST, seen)
    for seen in (
        "Couldn't open iommu group",
        "open(/dev/vfio",
        "Failed to initialize TPU system",
        "TPU initialization failed",
        "No accelerator found",
    )
)

_BY_CODE = {
    1: Fault(FaultKind.TRANSIENT, Scope.REQUEST),  # CANCELLED
    3: Fault(FaultKind.INVALID, Scope.REQUEST),  # INVALID_ARGUMENT
    4: Fault(FaultKind.TRANSIENT, Scope.REQUEST),  # DEADLINE_EXCEEDED
    5: Fault(FaultKind.NOT_FOUND, Scope.REQUEST),  # NOT_FOUND
    6: Fault(FaultKind.CONFLICT, Scope.REQUEST),  # ALREADY_EXISTS
    7: Fault(FaultKind.DENIED, Scope.PROJECT),  # PERMISSION_DENIED
    10: Fault(FaultKind.CONFLICT, Scope.REQUEST),  # ABORTED
    11: Fault(FaultKind.INVALID, Scope.REQUEST),  # OUT_OF_RANGE
    12: Fault(FaultKind.INVALID, Scope.REQUEST),  # UNIMPLEMENTED
    13: Fault(FaultKind.TRANSIENT, Scope.REQUEST),  # INTERNAL
    14: Fault(FaultKind.TRANSIENT, Scope.REQUEST),  # UNAVAILABLE
    16: Fault(FaultKind.LOGIN, Scope.PROJECT),  # UNAUTHENTICATED
}
# Resource exhausted, failed precondition and the like with a text that nobody has seen.
_UNSEEN = Fault(FaultKind.UNKNOWN, Scope.ZONE)
_NO_ANSWER = Fault(FaultKind.TRANSIENT, Scope.REQUEST)

# Google's own messages fit; a page of HTML or a log need not be read to its end.
_LONGEST = 20_000
_LAST_OF_A_LOG = 200_000


def classify(code: int | None, text: str) -> Fault:
    """What an error means; `code` is the google.rpc code, None where no answer came."""
    text = text[:_LONGEST]
    # An expired login is one whatever else its text speaks of.
    if code == 16:
        return _BY_CODE[16]
    rows: Iterable[_Row] = _CLOUD
    if code is None:
        # Only what came from a host, not from the API, speaks of devices.
        rows = (*_CLOUD, *_STALE_HOLDER, *_BAD_HOST)
    for row in rows:
        if row.pattern.search(text):
            return Fault(row.kind, _quota_scope(row, text))
    return _NO_ANSWER if code is None else _BY_CODE.get(code, _UNSEEN)


_TRACEBACK = "Traceback (most recent call last)"
_BACKEND = re.compile(r"Unable to initialize backend 'tpu'", re.IGNORECASE)


def classify_host_output(exit_code: int | None, text: str) -> Fault | None:
    """BAD_HOST where a program ended because its host is bad, None for all else.

    A phrase in the log of a program that exited 0, or still runs, means nothing. Nor does one that
    was logged before a traceback about something else: the program went on after it. A stale
    holder of the chips is no bad host either; the agent ends it.
    """
    if exit_code is None or exit_code == 0:
        return None
    text = text[-_LAST_OF_A_LOG:]
    start = text.find(_TRACEBACK)
    if start >= 0 and not _BACKEND.search(text, start):
        text = text[start:]
    if any(row.pattern.search(text) for row in _STALE_HOLDER):
        return None
    for row in _BAD_HOST:
        if row.pattern.search(text):
            return Fault(row.kind, row.scope)
    return None


_PLACE = re.compile(r"\bin (?P<what>region|zone) ['\"]?(?P<where>[a-z][a-z0-9-]*[a-z0-9])", re.I)
_LIMIT = re.compile(r"\bLimit:? (?P<limit>\d{1,12})(?:\.0+)?\b", re.I)
_QUOTA_NAME = re.compile(r"Quota (?:limit )?'(?P<name>[^']{1,120})'", re.I)
_TPU_QUOTA = re.compile(
    r"TPUV(?P<number>\d+)(?P<letter>[EP](?![a-z]))?s?(?P<spot>Preemptible)?(?P<lite>Lite)?"
)
_NAMES = {"IN_USE_ADDRESSES": "external addresses"}


def explain(fault: Fault, zone: str, text: str) -> str:
    """One sentence that says why a job waits or was refused, for the user."""
    if fault.kind is FaultKind.QUOTA:
        return _explain_quota(fault, zone, text[:_LONGEST])
    said = _one_line(text)
    if fault.kind is FaultKind.DENIED and fault.scope is Scope.PROJECT:
        return f"the project may not use Cloud TPU: {said}" if said else _PROJECT_DENIED
    return fault.sentence.format(zone=zone, text=said or "no reason given")


_PROJECT_DENIED = "the project may not use Cloud TPU"


def _explain_quota(fault: Fault, zone: str, text: str) -> str:
    place = _PLACE.search(text)
    where = place["where"] if place else _around(fault.scope, zone)
    limit = _LIMIT.search(text)
    named = _QUOTA_NAME.search(text)
    what = _counted(named["name"]) if named else ""
    if limit and int(limit["limit"]) == 0:
        return f"no quota of {what or 'chips'} in {where}: its limit is 0"
    if limit and what:
        return f"quota of {limit['limit']} {what} in {where} is used up"
    if limit or what:
        return f"quota of {limit['limit'] if limit else what} in {where} is used up"
    return f"quota in {where} is used up"


def _counted(name: str) -> str:
    """What a quota counts: `spot v5e chips` for TPUV5sPreemptibleLitepodPerProjectPerZone…"""
    tpu = _TPU_QUOTA.match(name)
    if tpu is None:
        return _NAMES.get(name, name)
    letter = "e" if tpu["lite"] else (tpu["letter"] or "").lower()
    return f"{'spot ' if tpu['spot'] else ''}v{tpu['number']}{letter} chips"


def _around(scope: Scope, zone: str) -> str:
    """The zone, or its region; a name that is no zone stays as it is."""
    region, dash, last = zone.rpartition("-")
    return region if scope is Scope.REGION and dash and len(last) == 1 else zone


def _quota_scope(row: _Row, text: str) -> Scope:
    if row.kind is not FaultKind.QUOTA:
        return row.scope
    place = _PLACE.search(text)
    if place is None:
        return row.scope
    return Scope.REGION if place["what"].lower() == "region" else Scope.ZONE


def _one_line(text: str) -> str:
    line = " ".join(text[:_LONGEST].split())
    return line if len(line) <= 160 else f"{line[:159]}…"
