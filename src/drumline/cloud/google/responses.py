"""Parses the error responses of Google's REST APIs. Pure functions.

`parse_error` parses an HTTP response. REST maps the sixteen codes of gRPC to fewer HTTP codes: 409
is ABORTED or ALREADY_EXISTS, 400 is INVALID_ARGUMENT or FAILED_PRECONDITION. The `status` in the
body distinguishes them. The HTML page of a proxy has only the HTTP code. `parse_answer` parses what
a person copies: a response, an operation, the output of gcloud or a sentence.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from drumline.cloud.google.errors import MAX_TEXT_LENGTH, Rpc, find_rule
from drumline.observed import FaultType

_CODE_BY_HTTP = {
    400: Rpc.INVALID_ARGUMENT,
    401: Rpc.UNAUTHENTICATED,
    403: Rpc.PERMISSION_DENIED,
    404: Rpc.NOT_FOUND,
    407: Rpc.UNAVAILABLE,  # a proxy that wants a login of its own
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
        rule = find_rule(self.code, self.text)
        return rule is None or rule.kind in {FaultType.RATE, FaultType.TRANSIENT}


def parse_error(http: int, body: bytes, headers: Mapping[str, str], now: datetime) -> ErrorResponse:
    """Parse an HTTP response other than success."""
    value = _parse_json(body)
    error = _error_object(value)
    details = list(_details(error))
    text = error_text(error) or _first_line(body) or f"HTTP {http}"
    retry_after = _retry_after_header(headers.get("retry-after"), now)
    if retry_after is None:
        retry_after = _retry_info(details)
    if value is None and 300 <= http < 500 and http not in _MEANINGFUL_WITHOUT_BODY:
        # A page or nothing comes from a proxy or a front end. The API did not see the request, so
        # 404 does not mean that a slice is gone, and 400 not that the request is wrong.
        return ErrorResponse(http, Rpc.UNAVAILABLE.value, text, retry_after)
    return ErrorResponse(http, _rpc_code(http, error, details, text), text, retry_after)


def error_text(error: Mapping[str, Any]) -> str:
    """Return the message of a google.rpc.Status, with the facts from its details in brackets."""
    texts = [str(error.get("message") or "").strip()]
    for detail in _details(error):
        type_name = str(detail.get("@type", "")).rpartition(".")[2]
        if type_name == "QuotaFailure":
            violations = detail.get("violations")
            for violation in violations if isinstance(violations, list) else []:
                description = violation.get("description") if isinstance(violation, dict) else None
                texts.append(f"QuotaFailure: {description or 'no description'}")
        elif type_name == "ErrorInfo" and detail.get("reason"):
            metadata = detail.get("metadata")
            facts = metadata if isinstance(metadata, dict) else {}
            values = [str(facts[key]) for key in _FACTS if facts.get(key)]
            values = [value for value in values if value not in texts[0]]
            texts.append(f"[{' '.join([str(detail['reason']), *values])}]")
    # Compute Engine and old front ends send a list instead of details.
    errors = error.get("errors")
    for item in errors if isinstance(errors, list) else []:
        if isinstance(item, dict):
            reason = item.get("code") or item.get("reason")
            message = str(item.get("message") or "").strip()
            texts += [message] if message and message not in texts[0] else []
            texts += [f"[{reason}]"] if reason else []
    return " ".join(text for text in texts if text)[:_MAX_MESSAGE_LENGTH]


def parse_answer(text: str, http: int | None, status: str | None) -> tuple[int, str]:
    """Return the gRPC code and the text of an answer that a person has copied.

    It is a response, an operation or a queued resource in JSON, the output of a command, the page
    of a proxy, or a sentence. `http` and `status` are known if the person gave them. The code is
    UNKNOWN if nothing tells it, and OK if the answer is JSON without an error.
    """
    value = _parse_json(text.encode())
    is_json = isinstance(value, (dict, list, int, float)) or text.strip() == "null"
    value = value if is_json else _embedded_json(text)
    error = _error_object(value)
    if http is None:
        http = _http_code(error, text)
    if status is not None:
        return Rpc[status].value, error_text(error) or _plain_text(text) or status
    if isinstance(error.get("code"), int) and 0 < error["code"] <= max(Rpc):
        return error["code"], error_text(error) or Rpc(error["code"]).name
    if http is not None and (error or not _STATUS_NAME.search(text)):
        # A plain sentence is the message of the API. Only a page, or nothing, is not.
        if not error and text.strip() and not _PAGE.search(text):
            error = {"message": _plain_text(text)}
        body = json.dumps({"error": error}).encode() if error else text.encode()
        response = parse_error(http, body, {}, datetime.min)
        return response.code, response.text
    if error:
        return _status_code(error) or Rpc.UNKNOWN.value, error_text(error) or str(
            error.get("status", "")
        )
    line = _plain_text(text)
    name = _STATUS_NAME.search(text)
    if name:
        return Rpc[name[0]].value, line
    if is_json:
        return OK, line
    number = _RPC_CODE.search(text)
    return (int(number["code"]) if number else Rpc.UNKNOWN.value), line


def _plain_text(text: str) -> str:
    """Return a copied text as one line, without the name of the command that printed it."""
    if _PAGE.search(text):
        return _first_line(text.encode())
    return " ".join(_COMMAND_PREFIX.sub("", text).split())[:_MAX_MESSAGE_LENGTH]


OK = 0
"""The code of google.rpc.Code without an error."""
# The metadata of an ErrorInfo that its message may lack.
_FACTS = ("permission", "quota_limit", "location")
_MEANINGFUL_WITHOUT_BODY = frozenset({401, 403, 408, 409, 429})
# UNKNOWN and ABORTED are left out, because a command prints these words for other reasons.
_STATUS_NAME = re.compile(rf"\b(?:{'|'.join(sorted({*Rpc.__members__} - {'UNKNOWN'}))})\b")
_PAGE = re.compile(r"<(?:!doctype|html|head|body)\b", re.IGNORECASE)
_COMMAND_PREFIX = re.compile(r"^\s*ERROR: \([\w.-]+\)\s*")
_RPC_CODE = re.compile(
    r"\b(?:error|return|status|grpc)[ _]code:? ?(?P<code>1[0-6]|[1-9])\b(?!\d)", re.IGNORECASE
)
_HTTP_CODE = re.compile(
    r"\b(?:HTTP(?: ?error| status| code)?|HttpError|googleapi: Error|Error|status)[ :(]{1,2}"
    r"(?P<code>[345]\d\d)\b|^(?P<first>[45]\d\d) [A-Z]",
    re.IGNORECASE,
)


def _http_code(error: Mapping[str, Any], text: str) -> int | None:
    code = error.get("code")
    if isinstance(code, int) and 300 <= code < 600:
        return code
    match = _HTTP_CODE.search(text[:MAX_TEXT_LENGTH])
    return int(match["code"] or match["first"]) if match else None


def _status_code(error: Mapping[str, Any]) -> int:
    status = error.get("status")
    return Rpc[status].value if isinstance(status, str) and status in Rpc.__members__ else 0


def _parse_json(body: bytes) -> object:
    """Return the JSON value of a body, or None if it is not JSON."""
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value


def _embedded_json(text: str) -> object:
    """Return the JSON object that a command printed after its own words, or None."""
    start = text.find("{")
    while 0 <= start < MAX_TEXT_LENGTH:
        try:
            value, _ = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
        else:
            return value if _error_object(value) else None
    return None


def _error_object(value: object) -> Mapping[str, Any]:
    """Return the google.rpc.Status in a response, an operation or a queued resource."""
    # A streaming front end wraps the error into a list.
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, dict):
        return {}
    state = value.get("state")
    failed = state.get("failedData") if isinstance(state, dict) else None
    for holder in (value, failed):
        error = holder.get("error") if isinstance(holder, dict) else None
        if isinstance(error, dict):
            return error
    return value if "message" in value and ({"code", "status"} & value.keys()) else {}


def _details(error: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    details = error.get("details")
    return (item for item in details if isinstance(item, dict)) if isinstance(details, list) else ()


def _rpc_code(
    http: int, error: Mapping[str, Any], details: list[Mapping[str, Any]], text: str
) -> int:
    if code := _status_code(error):
        return code
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
