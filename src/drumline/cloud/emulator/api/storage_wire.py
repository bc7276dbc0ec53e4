"""Requests and answers of the Cloud Storage API: what a caller sent, and how objects are shown."""

import base64
import binascii
import email.message
import email.parser
import email.policy
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drumline.cloud.emulator.buckets import (
    ObjectMetadata,
    Preconditions,
    StorageApiError,
    StoredObject,
    invalid_argument,
)
from drumline.cloud.model.errors import Json

_SETTABLE = (
    "contentType", "metadata", "cacheControl", "contentDisposition", "contentEncoding",
    "contentLanguage", "customTime", "storageClass",
)  # fmt: skip
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(?:(\d+)|\*)")
_RANGE = re.compile(r"bytes=(?:(\d+)-(\d*)|-(\d+))")


# Requests


def path_segments(path: str, prefix: str) -> list[str]:
    """Return the decoded segments of a path after a prefix. A `/` in a name is sent as `%2F`."""
    if not path.startswith(prefix):
        raise StorageApiError(404, "notFound", f"Not Found: {path}")
    return [unquote(segment) for segment in path.removeprefix(prefix).split("/")]


def base_url(request: Request) -> str:
    """Return the URL that a caller uses for this server."""
    host = request.headers.get("host", "127.0.0.1")
    return f"{request.url.scheme}://{host}{request.scope.get('root_path', '')}"


async def json_body(request: Request) -> Json:
    """Return the body of a call, which is a JSON object or empty."""
    return parse_json(await request.body())


def parse_json(body: bytes) -> Json:
    """Parse a JSON object. Nothing is an empty object."""
    try:
        value = json.loads(body) if body.strip() else {}
    except ValueError:
        raise invalid_argument("Parse Error") from None
    if not isinstance(value, dict):
        raise invalid_argument("Parse Error")
    return value


def preconditions(query: Mapping[str, Any], prefix: str = "if") -> Preconditions:
    """Read the preconditions of a call, for its source if the prefix is `ifSource`."""
    return Preconditions(
        integer(query, f"{prefix}GenerationMatch"),
        integer(query, f"{prefix}GenerationNotMatch"),
        integer(query, f"{prefix}MetagenerationMatch"),
        integer(query, f"{prefix}MetagenerationNotMatch"),
    )


def integer(query: Mapping[str, Any], key: str) -> int | None:
    """Return a number, or None if it is absent."""
    value = query.get(key)
    if value is None or value == "":
        return None
    try:
        return int(value)
    except ValueError:
        raise invalid_argument(f"Invalid value '{value}' for {key}") from None


def settable(resource: Json) -> Json:
    """Return the fields of an object's metadata that a client may set."""
    return {key: resource[key] for key in _SETTABLE if key in resource}


def page_start(token: str) -> str:
    """Return the name at which a page begins."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise invalid_argument(f"Invalid page token: '{token}'") from None


def page_token(start: str) -> str:
    """Return the token of the page that begins at a name."""
    return base64.urlsafe_b64encode(start.encode()).decode()


def requested_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the first and last byte that a caller wants, or None for all of them."""
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None:  # Other forms are ignored, as HTTP permits.
        return None
    if match[3] is not None:
        first, last = max(size - int(match[3]), 0), size - 1
    else:
        first, last = int(match[1]), min(int(match[2]) if match[2] else size - 1, size - 1)
    if first >= size or first > last:
        raise StorageApiError(416, "requestedRangeNotSatisfiable", "Request range not satisfiable")
    return first, last


def content_range(header: str | None) -> tuple[int | None, int | None]:
    """Return the first byte of a part of an upload and the size of the whole.

    The first byte is None if the call has no content, the size is None while it is not known.
    """
    if header is None:
        return 0, None
    match = _CONTENT_RANGE.fullmatch(header.strip())
    if match is None:
        raise invalid_argument(f"Failed to parse Content-Range header: '{header}'")
    return int(match[1]) if match[1] else None, int(match[3]) if match[3] else None


def expected_checksums(request: Request, resource: Json) -> dict[str, str]:
    """Return the checksums that a caller has computed, in its headers or in the metadata."""
    header = request.headers.get("x-goog-hash", "")
    pairs = dict(entry.strip().split("=", 1) for entry in header.split(",") if "=" in entry)
    checksums = {"crc32c": pairs.get("crc32c"), "md5Hash": pairs.get("md5")}
    checksums |= {key: resource[key] for key in ("crc32c", "md5Hash") if resource.get(key)}
    return {key: value for key, value in checksums.items() if value}


def related_parts(content_type: str, body: bytes) -> tuple[Json, bytes]:
    """Split a `multipart/related` upload into the metadata and the content.

    Not with the email package: it would change the line ends of the content.
    """
    delimiter = b"--" + _boundary(content_type).encode()
    begin = body.find(delimiter) + len(delimiter)
    newline = b"\r\n" if body[begin : begin + 2] == b"\r\n" else b"\n"
    middle = body.find(newline + delimiter, begin)
    # The content may contain the delimiter, but nothing follows the last one.
    end = body.rfind(newline + delimiter + b"--")
    if min(begin, middle, end) < len(delimiter) or end <= middle:
        raise invalid_argument("Malformed multipart body")
    first = body[begin:middle].partition(newline * 2)[2]
    head, _, content = body[middle + len(newline + delimiter) : end].partition(newline * 2)
    resource = parse_json(first)
    headers = email.parser.BytesHeaderParser(policy=email.policy.HTTP).parsebytes(head.strip())
    if headers.get("Content-Type"):
        resource = {"contentType": str(headers["Content-Type"])} | resource
    return resource, content


def batch_calls(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """Return the id and the content of each call in a `multipart/mixed` body."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
    if not message.is_multipart():
        raise invalid_argument("Failed to parse batch request")
    calls = []
    for part in message.walk():
        content = part.get_payload(decode=True)
        if isinstance(content, bytes):
            calls.append((str(part.get("Content-ID", "")).strip("<>"), content))
    return calls


def _boundary(content_type: str) -> str:
    message = email.message.EmailMessage(policy=email.policy.HTTP)
    message["Content-Type"] = content_type
    boundary = message.get_boundary()
    if not boundary:
        raise invalid_argument("Missing multipart boundary")
    return str(boundary)


# Answers


def refusal(error: StorageApiError) -> Response:
    """Return the answer for an error."""
    if error.status == 304:
        return Response(status_code=304)
    return JSONResponse(error.as_json(), error.status)


def timestamp(microseconds: int) -> str:
    """Return a time as the API shows it."""
    seconds, fraction = divmod(microseconds, 1_000_000)
    whole = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{fraction // 1000:03}Z"


def etag(stored: StoredObject, metadata: ObjectMetadata) -> str:
    """Return a text that differs for each generation and metageneration."""
    return base64.b64encode(f"{stored.generation}/{metadata.metageneration}".encode()).decode()


def object_json(stored: StoredObject, metadata: ObjectMetadata, base: str) -> Json:
    """Return the resource of an object."""
    time = timestamp(stored.generation)
    path = f"b/{stored.bucket}/o/{quote(stored.name, safe='')}"
    generation = str(stored.generation)
    shown: Json = {
        "kind": "storage#object",
        "id": f"{stored.bucket}/{stored.name}/{generation}",
        "selfLink": f"{base}/storage/v1/{path}",
        "mediaLink": f"{base}/download/storage/v1/{path}?generation={generation}&alt=media",
        "name": stored.name,
        "bucket": stored.bucket,
        "generation": generation,
        "metageneration": str(metadata.metageneration),
        "storageClass": "STANDARD",
        "size": str(stored.size),
        "etag": etag(stored, metadata),
        "timeCreated": time,
        "updated": time,
        "timeStorageClassUpdated": time,
        **metadata.fields,
    }
    if metadata.checksums is not None:
        shown["md5Hash"] = metadata.checksums.md5
        if metadata.checksums.crc32c is not None:
            shown["crc32c"] = metadata.checksums.crc32c
    return shown


def bucket_json(bucket: str, created: int, base: str) -> Json:
    """Return the resource of a bucket."""
    return {
        "kind": "storage#bucket",
        "id": bucket,
        "name": bucket,
        "selfLink": f"{base}/storage/v1/b/{bucket}",
        "location": "LOCAL",
        "locationType": "region",
        "storageClass": "STANDARD",
        "timeCreated": timestamp(created),
        "updated": timestamp(created),
        "metageneration": "1",
        "etag": "CAE=",
    }
