"""Reads the error responses of Google's REST APIs. Pure.

REST maps gRPC's sixteen codes to fewer HTTP codes: 409 is ABORTED and ALREADY_EXISTS, 400 is
INVALID_ARGUMENT and FAILED_PRECONDITION. The `status` in the body tells them apart, if the body is
Google's; with a proxy's HTML page there is only the HTTP code.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from enum import IntEnum
from typing import Any


class Rpc(IntEnum):
    """google.rpc.Code."""

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


_FROM_HTTP = {
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
_TRY_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_BUSY = re.compile(r"unable to queue the operation", re.IGNORECASE)
# Seen with 429 and 503, and a retry within seconds will not change them. A limit on calls per
# minute mentions quota too, which is why the word alone is not enough.
_LASTING = re.compile(r"ForTPUAPI|\bcapacity\b|\bQuota limit\b|QuotaFailure", re.IGNORECASE)
_CALLS = re.compile(r"requests? per (?:minute|second|user)|RATE_LIMIT_EXCEEDED", re.IGNORECASE)
_LONGEST_TEXT = 2000


@dataclass(frozen=True)
class ErrorAnswer:
    """An answer that is not success."""

    http: int
    code: int
    text: str
    wait: float | None = None
    """Seconds that the cloud asked us to wait."""

    @property
    def may_pass(self) -> bool:
        """Whether the same call can succeed seconds later."""
        if self.http == 409:
            return bool(_BUSY.search(self.text))
        if self.http not in _TRY_AGAIN:
            return False
        return bool(_CALLS.search(self.text)) or not _LASTING.search(self.text)


def read_refusal(http: int, body: bytes, headers: Mapping[str, str], now: datetime) -> ErrorAnswer:
    """The error in an HTTP response."""
    error = _error_of(body)
    details = list(_details(error))
    text = error_text(error) or _plain(body) or f"HTTP {http}"
    wait = _retry_after(headers.get("retry-after"), now)
    if wait is None:
        wait = _retry_info(details)
    return ErrorAnswer(http, _code(http, error, details, text), text, wait)


def error_text(error: Mapping[str, Any]) -> str:
    """The message of a google.rpc.Status, with what is only in its details."""
    parts = [str(error.get("message") or "").strip()]
    for detail in _details(error):
        kind = str(detail.get("@type", "")).rpartition(".")[2]
        if kind == "QuotaFailure":
            violations = detail.get("violations")
            for violation in violations if isinstance(violations, list) else []:
                said = violation.get("description") if isinstance(violation, dict) else None
                parts.append(f"QuotaFailure: {said or 'no description'}")
        elif kind == "ErrorInfo" and detail.get("reason"):
            parts.append(f"[{detail['reason']}]")
    return " ".join(part for part in parts if part)[:_LONGEST_TEXT]


def _error_of(body: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    # A streaming front end wraps the error into a list.
    if isinstance(answer, list) and answer:
        answer = answer[0]
    error = answer.get("error") if isinstance(answer, dict) else None
    return error if isinstance(error, dict) else {}


def _details(error: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    details = error.get("details")
    return (item for item in details if isinstance(item, dict)) if isinstance(details, list) else ()


def _code(http: int, error: Mapping[str, Any], details: list[Mapping[str, Any]], text: str) -> int:
    status = error.get("status")
    if isinstance(status, str) and status in Rpc.__members__:
        return Rpc[status].value
    if any(str(item.get("@type", "")).endswith("QuotaFailure") for item in details):
        return Rpc.RESOURCE_EXHAUSTED.value
    # Cloud Storage and front ends send no status.
    if http == 409 and "already exists" in text.lower():
        return Rpc.ALREADY_EXISTS.value
    return _FROM_HTTP.get(http, Rpc.INTERNAL if http >= 500 else Rpc.UNKNOWN).value


def _plain(body: bytes) -> str:
    """An HTML or text body as one short line."""
    text = body[:20_000].decode(errors="replace")
    title = re.search(r"<title>([^<]*)</title>", text, re.IGNORECASE)
    text = title[1] if title else re.sub(r"<[^>]*>", " ", text)
    return " ".join(text.split())[:200]


def _retry_after(value: str | None, now: datetime) -> float | None:
    """The seconds of a Retry-After, which is a count or a date; None where it is neither."""
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
