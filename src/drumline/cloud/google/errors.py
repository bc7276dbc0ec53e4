"""Parses and classifies the errors of Google's REST APIs. Pure functions.

`parse_error` parses an HTTP response. REST maps the sixteen codes of gRPC to fewer HTTP codes: 409
is ABORTED or ALREADY_EXISTS, 400 is INVALID_ARGUMENT or FAILED_PRECONDITION. The `status` in the
body distinguishes them. The HTML page of a proxy has only the HTTP code.

`classify` and `refusal` give an error its kind, its scope and a sentence for the user. A table has
the texts that the cloud is known to send. RESOURCE_EXHAUSTED (8) means stockout, quota or rate, so
the text is matched first, and the code decides only if no pattern matches. An unknown text is
UNKNOWN, not the most likely kind. `drumline list` prints the sentence, and `jobs.core.refusals`
decides the reaction.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from enum import IntEnum
from typing import Any

from drumline.observed import Fault, FaultKind, Refusal, Scope


class Rpc(IntEnum):
    """The codes of google.rpc.Code."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


# Error responses ---------------------------------------------------------------------------------

_CODE_BY_HTTP = {
    400: Rpc.INVALID_ARGUMENT,
    401: Rpc.UNAUTHENTICATED,
    403: Rpc.PERMISSION_DENIED,
    404: Rpc.NOT_FOUND,
    408: Rpc.DEADLINE_EXCEEDED,
    409: Rpc.ABORTED,
    412: Rpc.FAILED_PRECONDITION,
    416: Rpc.OUT_OF_RANGE,
    429: Rpc.RESOURCE_EXHAUSTED,
    499: Rpc.CANCELLED,
    500: Rpc.INTERNAL,
    501: Rpc.UNIMPLEMENTED,
    502: Rpc.UNAVAILABLE,
    503: Rpc.UNAVAILABLE,
    504: Rpc.DEADLINE_EXCEEDED,
}
_RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
_BUSY = re.compile(r"unable to queue the operation", re.IGNORECASE)
# Texts seen with 429 and 503 that a retry within seconds does not change. The word quota alone is
# not enough, because a limit on calls per minute mentions it too.
_PERSISTENT = re.compile(r"ForTPUAPI|\bcapacity\b|\bQuota limit\b|QuotaFailure", re.IGNORECASE)
_RATE_LIMIT = re.compile(r"requests? per (?:minute|second|user)|RATE_LIMIT_EXCEEDED", re.IGNORECASE)
_MAX_MESSAGE_LENGTH = 2000


@dataclass(frozen=True)
class ErrorResponse:
    """A response other than success."""

    http: int
    code: int
    text: str
    retry_after: float | None = None
    """The seconds that the cloud asks the caller to wait."""

    @property
    def is_transient(self) -> bool:
        """True if the same call may succeed seconds later."""
        if self.http == 409:
            return bool(_BUSY.search(self.text))
        if self.http not in _RETRYABLE:
            return False
        return bool(_RATE_LIMIT.search(self.text)) or not _PERSISTENT.search(self.text)


def parse_error(http: int, body: bytes, headers: Mapping[str, str], now: datetime) -> ErrorResponse:
    """Parse an HTTP response other than success."""
    error = _error_object(body)
    details = list(_details(error))
    text = error_text(error) or _first_line(body) or f"HTTP {http}"
    retry_after = _retry_after_header(headers.get("retry-after"), now)
    if retry_after is None:
        retry_after = _retry_info(details)
    return ErrorResponse(http, _rpc_code(http, error, details, text), text, retry_after)


def error_text(error: Mapping[str, Any]) -> str:
    """Return the message of a google.rpc.Status, with the quota and reason from its details."""
    texts = [str(error.get("message") or "").strip()]
    for detail in _details(error):
        type_name = str(detail.get("@type", "")).rpartition(".")[2]
        if type_name == "QuotaFailure":
            violations = detail.get("violations")
            for violation in violations if isinstance(violations, list) else []:
                description = violation.get("description") if isinstance(violation, dict) else None
                texts.append(f"QuotaFailure: {description or 'no description'}")
        elif type_name == "ErrorInfo" and detail.get("reason"):
            texts.append(f"[{detail['reason']}]")
    return " ".join(text for text in texts if text)[:_MAX_MESSAGE_LENGTH]


def _error_object(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    # A streaming front end wraps the error into a list.
    if isinstance(value, list) and value:
        value = value[0]
    error = value.get("error") if isinstance(value, dict) else None
    return error if isinstance(error, dict) else {}


def _details(error: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    details = error.get("details")
    return (item for item in details if isinstance(item, dict)) if isinstance(details, list) else ()


def _rpc_code(
    http: int, error: Mapping[str, Any], details: list[Mapping[str, Any]], text: str
) -> int:
    status = error.get("status")
    if isinstance(status, str) and status in Rpc.__members__:
        return Rpc[status].value
    if any(str(item.get("@type", "")).endswith("QuotaFailure") for item in details):
        return Rpc.RESOURCE_EXHAUSTED.value
    # Cloud Storage and front ends send no status.
    if http == 409 and "already exists" in text.lower():
        return Rpc.ALREADY_EXISTS.value
    return _CODE_BY_HTTP.get(http, Rpc.INTERNAL if http >= 500 else Rpc.UNKNOWN).value


def _first_line(body: bytes) -> str:
    """Return an HTML or text body as one short line."""
    text = body[:20_000].decode(errors="replace")
    title = re.search(r"<title>([^<]*)</title>", text, re.IGNORECASE)
    text = title[1] if title else re.sub(r"<[^>]*>", " ", text)
    return " ".join(text.split())[:200]


def _retry_after_header(value: str | None, now: datetime) -> float | None:
    """Return the seconds of a Retry-After header, which has a number or a date."""
    if value is None:
        return None
    if re.fullmatch(r"\s*\d{1,9}\s*", value, re.ASCII):
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
    except (TypeError, ValueError, OverflowError):
        return None


def _retry_info(details: Iterable[Mapping[str, Any]]) -> float | None:
    for detail in details:
        if str(detail.get("@type", "")).endswith("RetryInfo"):
            delay = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)s", str(detail.get("retryDelay")))
            if delay:
                return float(delay[1])
    return None


# Classification ----------------------------------------------------------------------------------

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
"""Sentences for the user, with {zone}, and {text} for the message of the cloud."""


@dataclass(frozen=True)
class _Pattern:
    """A pattern for the text of an error, its meaning, and an example."""

    regex: re.Pattern[str]
    kind: FaultKind
    scope: Scope
    example: str


def _pattern(regex: str, kind: FaultKind, scope: Scope, example: str) -> _Pattern:
    return _Pattern(re.compile(regex, re.IGNORECASE), kind, scope, example)


# The first pattern that matches decides. A zone or region in the text sets the scope of QUOTA.
_PATTERNS: tuple[_Pattern, ...] = (
    # Before quota, because the text is "Quota exceeded for … 'CreateNode requests per minute'".
    _pattern(
        r"requests? per (?:minute|second|user|\d+ seconds)|RATE_LIMIT_EXCEEDED",
        FaultKind.RATE,
        Scope.PROJECT,
        "Maximum number of CreateNode requests per minute",
    ),
    _pattern(
        r"\bno more capacity\b",
        FaultKind.STOCKOUT,
        Scope.ZONE,
        'There is no more capacity in the zone "us-central2-b"; you can try in another zone',
    ),
    _pattern(
        r"\binsufficient (?:reserved )?capacity\b",
        FaultKind.STOCKOUT,
        Scope.ZONE,
        "Insufficient reserved capacity. Contact customer support to increase your reservation.",
    ),
    _pattern(
        r"RESOURCE_POOL_EXHAUSTED|does not have enough resources available",
        FaultKind.STOCKOUT,
        Scope.ZONE,
        "The zone 'us-central1-a' does not have enough resources available",
    ),
    _pattern(
        r"Quota (?:limit )?'[^']{0,150}PerZone[^']{0,150}'",
        FaultKind.QUOTA,
        Scope.ZONE,
        "Quota 'TPUV6EPerProjectPerZoneForTPUAPI' exhausted. Limit 64 in zone europe-west4-a",
    ),
    _pattern(
        r"Quota (?:limit )?'[^']{0,150}PerRegion[^']{0,150}'",
        FaultKind.QUOTA,
        Scope.REGION,
        "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0",
    ),
    # Without zone or region in the text: addresses and disks are counted per region.
    _pattern(
        r"QuotaFailure|\bQuota (?:limit )?'[^']*' (?:exhausted|exceeded|has been exceeded)"
        r"|\bquota exceeded\b|\binsufficient quota\b",
        FaultKind.QUOTA,
        Scope.REGION,
        "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8.0 in region us-central1.",
    ),
    _pattern(
        r"in state PREEMPTED\b|\b(?:was|been) preempted\b",
        FaultKind.PREEMPTED,
        Scope.ZONE,
        "update is not supported while in state PREEMPTED",
    ),
    _pattern(
        r"\bLocation\b.{0,200}\bis not found or access is unauthorized",
        FaultKind.DENIED,
        Scope.ZONE,
        "Location us-central2-b is not found or access is unauthorized.",
    ),
    _pattern(
        r"not have permission to submit requests",
        FaultKind.DENIED,
        Scope.ZONE,
        "User does not have permission to submit requests into this queue for accelerator type "
        "v5p-8 in location us-east1-d.",
    ),
    _pattern(
        r"SERVICE_DISABLED|API has not been used in project|billing (?:to be|is not|must be)"
        r"|BILLING_DISABLED|Constraint constraints/",
        FaultKind.DENIED,
        Scope.PROJECT,
        "Cloud TPU API has not been used in project 1 before or it is disabled.",
    ),
    _pattern(
        r"Permission '[^']*' denied on (?:resource )?['\"]?(?://[^/\s]*/)?projects/[^/'\"\s]+"
        r"(?=['\"\s(.,]|$)",
        FaultKind.DENIED,
        Scope.PROJECT,
        "Permission 'tpu.nodes.list' denied on 'projects/p'",
    ),
    _pattern(
        r"Permission '[^']*' denied on",
        FaultKind.DENIED,
        Scope.ZONE,
        "Permission 'tpu.nodes.list' denied on 'projects/p/locations/us-central2-b'",
    ),
    _pattern(
        r"\binvalid_grant\b|Reauthentication (?:is )?(?:needed|required)|ACCESS_TOKEN_EXPIRED"
        r"|no Google credentials|Google credentials have expired|invalid authentication credential",
        FaultKind.LOGIN,
        Scope.PROJECT,
        "no Google credentials: run gcloud auth application-default login",
    ),
    _pattern(
        r"unable to queue the operation",
        FaultKind.CONFLICT,
        Scope.REQUEST,
        "unable to queue the operation",
    ),
    _pattern(
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
# An unknown text with RESOURCE_EXHAUSTED, FAILED_PRECONDITION and the like.
_UNKNOWN = Fault(FaultKind.UNKNOWN, Scope.ZONE)
_NO_ANSWER = Fault(FaultKind.TRANSIENT, Scope.REQUEST)

# Longer than any message of Google; limits the time for a page of HTML or a log.
_MAX_TEXT_LENGTH = 20_000


def classify(code: int | None, text: str) -> Fault:
    """Return the kind and scope of an error. `code` is None if no answer came."""
    text = text[:_MAX_TEXT_LENGTH]
    # UNAUTHENTICATED is always LOGIN, even if the text mentions something else.
    if code == 16:
        return _BY_CODE[16]
    for pattern in _PATTERNS:
        if pattern.regex.search(text):
            return Fault(pattern.kind, _quota_scope(pattern, text))
    return _NO_ANSWER if code is None else _BY_CODE.get(code, _UNKNOWN)


_LOCATION = re.compile(r"\bin (?P<type>region|zone) ['\"]?(?P<name>[a-z][a-z0-9-]*[a-z0-9])", re.I)
_LIMIT = re.compile(r"\bLimit:? (?P<limit>\d{1,12})(?:\.0+)?\b", re.I)
_QUOTA_NAME = re.compile(r"Quota (?:limit )?'(?P<name>[^']{1,120})'", re.I)
_TPU_QUOTA = re.compile(
    r"TPUV(?P<number>\d+)(?P<letter>[EP](?![a-z]))?s?(?P<spot>Preemptible)?(?P<lite>Lite)?"
)
_QUOTA_UNITS = {"IN_USE_ADDRESSES": "external addresses"}


def refusal(code: int | None, text: str, zone: str) -> Refusal:
    """Classify an error about a zone and explain it."""
    fault = classify(code, text)
    return Refusal(fault, explain(fault, zone, text))


def explain(fault: Fault, zone: str, text: str) -> str:
    """Return the sentence that tells the user why a job waits or was rejected."""
    if fault.kind is FaultKind.QUOTA:
        return _explain_quota(fault, zone, text[:_MAX_TEXT_LENGTH])
    line = _one_line(text)
    if fault.kind is FaultKind.DENIED and fault.scope is Scope.PROJECT:
        return f"the project may not use Cloud TPU: {line}" if line else _PROJECT_DENIED
    return _SENTENCES[fault.kind].format(zone=zone, text=line or "no reason given")


_PROJECT_DENIED = "the project may not use Cloud TPU"


def _explain_quota(fault: Fault, zone: str, text: str) -> str:
    location_match = _LOCATION.search(text)
    location = location_match["name"] if location_match else _location(fault.scope, zone)
    limit = _LIMIT.search(text)
    name = _QUOTA_NAME.search(text)
    unit = _quota_unit(name["name"]) if name else ""
    if limit and int(limit["limit"]) == 0:
        return f"no quota of {unit or 'chips'} in {location}: its limit is 0"
    if limit and unit:
        return f"quota of {limit['limit']} {unit} in {location} is used up"
    if limit or unit:
        return f"quota of {limit['limit'] if limit else unit} in {location} is used up"
    return f"quota in {location} is used up"


def _quota_unit(name: str) -> str:
    """Return the unit of a quota: `spot v5e chips` for TPUV5sPreemptibleLitepodPerProject…"""
    tpu = _TPU_QUOTA.match(name)
    if tpu is None:
        return _QUOTA_UNITS.get(name, name)
    letter = "e" if tpu["lite"] else (tpu["letter"] or "").lower()
    return f"{'spot ' if tpu['spot'] else ''}v{tpu['number']}{letter} chips"


def _location(scope: Scope, zone: str) -> str:
    """Return the zone or its region, by the scope. Leave a name that is not a zone unchanged."""
    region, dash, suffix = zone.rpartition("-")
    return region if scope is Scope.REGION and dash and len(suffix) == 1 else zone


def _quota_scope(pattern: _Pattern, text: str) -> Scope:
    if pattern.kind is not FaultKind.QUOTA:
        return pattern.scope
    location = _LOCATION.search(text)
    if location is None:
        return pattern.scope
    return Scope.REGION if location["type"].lower() == "region" else Scope.ZONE


def _one_line(text: str) -> str:
    line = " ".join(text[:_MAX_TEXT_LENGTH].split())
    return line if len(line) <= 160 else f"{line[:159]}…"
