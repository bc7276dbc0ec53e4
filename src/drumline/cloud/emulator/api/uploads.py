"""Uploads to Cloud Storage: in one call, with metadata in the same call, and resumable."""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drumline.cloud.emulator.api import storage_wire as wire
from drumline.cloud.emulator.buckets import (
    BucketFolder,
    Preconditions,
    StorageApiError,
    StoredObject,
    invalid_argument,
)
from drumline.cloud.emulator.checksums import checksums
from drumline.cloud.model.errors import Json

_MAX_FINISHED = 1000
"""The number of finished uploads whose answer is stored for callers that did not receive it."""
_CANCELLED = 499


@dataclass
class _Upload:
    """A resumable upload."""

    bucket: str
    name: str
    resource: Json
    """The metadata that the caller sent, as a resource of the API."""
    conditions: Preconditions
    draft: Path
    received: int = 0
    answer: Json | None = None
    """The resource of the object once the upload is complete."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Uploads:
    """The uploads to one folder. Resumable uploads are lost when the process ends."""

    def __init__(self, store: BucketFolder) -> None:
        """Writing starts with the first upload."""
        self._store = store
        self._uploads: dict[str, _Upload] = {}

    async def answer(self, request: Request, segments: list[str]) -> Response:
        """Answer a call below `/upload/storage/v1/b/`."""
        match segments:
            case [bucket, "o"]:
                self._store.bucket_folder(bucket)
            case _:
                raise StorageApiError(404, "notFound", "Not Found")
        query = request.query_params
        if upload_id := query.get("upload_id"):
            return await self._continue(request, upload_id)
        match query.get("uploadType"):
            case "media":
                content_type = request.headers.get("content-type")
                resource: Json = {"contentType": content_type} if content_type else {}
                return await self._insert(request, bucket, resource)
            case "multipart":
                header = request.headers.get("content-type", "")
                resource, content = wire.related_parts(header, await request.body())
                return await self._insert(request, bucket, resource, content)
            case "resumable":
                return self._begin(request, bucket, await wire.json_body(request))
        raise invalid_argument("uploadType must be media, multipart or resumable")

    async def commit(
        self,
        bucket: str,
        name: str,
        draft: Path,
        conditions: Preconditions,
        resource: Json,
        expected: Mapping[str, str] | None = None,
        *,
        need_crc32c: bool = False,
    ) -> StoredObject:
        """Compare the checksums that a caller computed and make a draft an object."""
        expected = expected or {}
        need_crc32c = need_crc32c or "crc32c" in expected
        computed = await asyncio.to_thread(checksums, draft, need_crc32c=need_crc32c)
        for key, title, value in (
            ("md5Hash", "MD5 hash", computed.md5),
            ("crc32c", "CRC32C", computed.crc32c),
        ):
            if expected.get(key, value) != value:
                raise invalid_argument(
                    f'Provided {title} "{expected[key]}" doesn\'t match '
                    f'calculated {title} "{value}".'
                )
        # There is no await between the check of the preconditions and the write.
        return self._store.commit(
            bucket, name, draft, conditions, wire.settable(resource), computed
        )

    async def _insert(
        self, request: Request, bucket: str, resource: Json, content: bytes | None = None
    ) -> Response:
        """Create an object from the body of one call."""
        name = request.query_params.get("name") or str(resource.get("name", ""))
        conditions = wire.preconditions(request.query_params)
        draft = self._store.new_draft()
        try:
            with draft.open("wb") as file:
                if content is None:
                    async for data in request.stream():
                        file.write(data)
                else:
                    file.write(content)
            expected = wire.expected_checksums(request, resource)
            stored = await self.commit(bucket, name, draft, conditions, resource, expected)
        finally:
            draft.unlink(missing_ok=True)
        return JSONResponse(self._resource(stored, request))

    def _begin(self, request: Request, bucket: str, resource: Json) -> Response:
        """Begin a resumable upload. The answer has the URL for the content."""
        name = request.query_params.get("name") or str(resource.get("name", ""))
        conditions = wire.preconditions(request.query_params)
        self._store.check(self._store.find(bucket, name), conditions)
        if content_type := request.headers.get("x-upload-content-type"):
            resource = {"contentType": content_type} | resource
        upload_id = secrets.token_urlsafe(32)
        draft = self._store.new_draft()
        self._uploads[upload_id] = _Upload(bucket, name, resource, conditions, draft)
        finished = [key for key, upload in self._uploads.items() if upload.answer is not None]
        for key in finished[:-_MAX_FINISHED]:
            del self._uploads[key]
        url = f"{wire.base_url(request)}/upload/storage/v1/b/{bucket}/o?uploadType=resumable"
        location = f"{url}&name={quote(name, safe='')}&upload_id={upload_id}"
        return Response(b"", 200, {"location": location, "x-guploader-uploadid": upload_id})

    async def _continue(self, request: Request, upload_id: str) -> Response:
        """Store a part of a resumable upload, or report how much of it has arrived."""
        upload = self._uploads.get(upload_id)
        if upload is None:
            raise StorageApiError(404, "notFound", "The upload does not exist.")
        async with upload.lock:
            if request.method == "DELETE":
                self._forget(upload_id)
                return Response(b"", _CANCELLED)
            if upload.answer is not None:
                return JSONResponse(upload.answer)
            header = request.headers.get("content-range")
            first, size = wire.content_range(header)
            if first is not None:
                await _receive(request, upload, first)
            if header is None:
                size = upload.received
            if size is None or upload.received < size:
                last = upload.received - 1
                headers = {"range": f"bytes=0-{last}"} if upload.received else {}
                return Response(b"", 308, headers)
            try:
                stored = await self._finish(request, upload, size)
            except StorageApiError:
                self._forget(upload_id)
                raise
            upload.answer = self._resource(stored, request)
            return JSONResponse(upload.answer)

    async def _finish(self, request: Request, upload: _Upload, size: int) -> StoredObject:
        if upload.received > size:
            raise invalid_argument(f"{upload.received} bytes have arrived instead of {size}")
        upload.draft.touch()
        return await self.commit(
            upload.bucket,
            upload.name,
            upload.draft,
            upload.conditions,
            upload.resource,
            wire.expected_checksums(request, upload.resource),
            need_crc32c=True,
        )

    def _forget(self, upload_id: str) -> None:
        upload = self._uploads.pop(upload_id, None)
        if upload is not None:
            upload.draft.unlink(missing_ok=True)

    def _resource(self, stored: StoredObject, request: Request) -> Json:
        return wire.object_json(stored, self._store.metadata(stored), wire.base_url(request))


async def _receive(request: Request, upload: _Upload, first: int) -> None:
    """Append the content of a call to an upload.

    A caller that did not receive an answer may resend bytes that have already arrived.
    """
    if first > upload.received:
        raise invalid_argument(
            f"The part begins at byte {first}, but only {upload.received} bytes have arrived"
        )
    repeated = upload.received - first
    with upload.draft.open("ab") as file:
        async for data in request.stream():
            new = data[repeated:]
            repeated = max(0, repeated - len(data))
            file.write(new)
            upload.received += len(new)
