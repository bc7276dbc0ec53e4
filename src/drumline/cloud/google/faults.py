"""Classifies Google's errors by code and text: kind, scope, and a sentence for the user.

A table holds the texts that the cloud has been seen to send. RESOURCE_EXHAUSTED (8) covers
stockout, quota and rate alike, so the text is matched first, and the code only if no text matches.
A text that is not in the table is UNKNOWN, not the likeliest guess. Pure; `drumline list` prints
what `explain` returns, and `jobs.core.refusals` decides what follows.
"""

import re
from dataclasses import dataclass

from drumline.observed import Fault, FaultKind, Refusal, Scope

_SENTENCES = {
    FaultKind.STOCKOUT: "no capacity in {zone}",
    FaultKind.QUOTA: "quota in {zone} is used up",
    FaultKind.RATE: "too many calls to Google, slowing down",
    FaultKind.DENIED: "the project may not use {zone}",
    FaultKind.LOGIN: (
        "Google login is missing or expired: run gcloud auth application-default login"
    ),
    FaultKind.PREEMPTED: "preempted in {zone}",
    FaultKind.CONFLICT: "{zone} is busy with another change, trying again",
    FaultKind.INVALID: "the request was refused: {text}",
    FaultKind.NOT_FOUND: "not found in {zone}: {text}",
    FaultKind.TRANSIENT: "no answer from the cloud for {zone}, trying again",
    FaultKind.UNKNOWN: "{zone} refused: {text}",
}
"""Sentences for the user, with {zone}, and {text} for the cloud's own message."""


@dataclass(frozen=True)
class _Row:
    """A pattern, what it means, and a text that it was seen in."""

    pattern: re.Pattern[str]
    kind: FaultKind
    scope: Scope
    seen: str


def _row(pattern: str, kind: FaultKind, scope: Scope, seen: str) -> _Row:
    return _Row(re.compile(pattern, re.IGNORECASE), kind, scope, seen)


# The first row that matches decides. A place that the text names overrides the scope of QUOTA rows.
_CLOUD: tuple[_Row, ...] = (
    # Before quota, which it mentions: "Quota exceeded for … 'CreateNode requests per minute'".
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
# Resource exhausted, failed precondition and the like with an unknown text.
_UNSEEN = Fault(FaultKind.UNKNOWN, Scope.ZONE)
_NO_ANSWER = Fault(FaultKind.TRANSIENT, Scope.REQUEST)

# Google's own messages fit; a page of HTML or a log need not be read to the end.
_LONGEST = 20_000


def classify(code: int | None, text: str) -> Fault:
    """What an error means; `code` is the google.rpc code, None where no answer came."""
    text = text[:_LONGEST]
    # An expired login is LOGIN, whatever else its text mentions.
    if code == 16:
        return _BY_CODE[16]
    for row in _CLOUD:
        if row.pattern.search(text):
            return Fault(row.kind, _quota_scope(row, text))
    return _NO_ANSWER if code is None else _BY_CODE.get(code, _UNSEEN)


_PLACE = re.compile(r"\bin (?P<what>region|zone) ['\"]?(?P<where>[a-z][a-z0-9-]*[a-z0-9])", re.I)
_LIMIT = re.compile(r"\bLimit:? (?P<limit>\d{1,12})(?:\.0+)?\b", re.I)
_QUOTA_NAME = re.compile(r"Quota (?:limit )?'(?P<name>[^']{1,120})'", re.I)
_TPU_QUOTA = re.compile(
    r"TPUV(?P<number>\d+)(?P<letter>[EP](?![a-z]))?s?(?P<spot>Preemptible)?(?P<lite>Lite)?"
)
_NAMES = {"IN_USE_ADDRESSES": "external addresses"}


def refusal(code: int | None, text: str, zone: str) -> Refusal:
    """What an error about that zone means, with the sentence for it."""
    fault = classify(code, text)
    return Refusal(fault, explain(fault, zone, text))


def explain(fault: Fault, zone: str, text: str) -> str:
    """The sentence that tells the user why a job waits or was refused."""
    if fault.kind is FaultKind.QUOTA:
        return _explain_quota(fault, zone, text[:_LONGEST])
    said = _one_line(text)
    if fault.kind is FaultKind.DENIED and fault.scope is Scope.PROJECT:
        return f"the project may not use Cloud TPU: {said}" if said else _PROJECT_DENIED
    return _SENTENCES[fault.kind].format(zone=zone, text=said or "no reason given")


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
    """The zone or its region, by the scope; a name that is no zone stays as it is."""
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
