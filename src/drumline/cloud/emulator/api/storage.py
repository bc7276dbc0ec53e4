"""The Cloud Storage JSON API over a folder with buckets.

The emulator mounts it below a path that only its owner knows, because clients of an emulator send
no credentials. `client_environment` returns the variables that direct Google's client, gcsfs and
TensorStore to it.

It can also run alone: `python -m drumline.cloud.emulator.api.storage --folder F --port 0` prints
its URL.
"""

import argparse
import asyncio
import io
import secrets
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qsl, quote, urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from drumline.cloud.emulator.api import storage_wire as wire
from drumline.cloud.emulator.api.uploads import Uploads
from drumline.cloud.emulator.buckets import (
    BucketFolder,
    Preconditions,
    StorageApiError,
    StoredObject,
    invalid_argument,
    listing_start_after,
    no_such_object,
)
from drumline.cloud.emulator.checksums import checksums
from drumline.cloud.model.errors import Json

_OBJECTS = "/storage/v1/b/"
_CHUNK_BYTES = 1 << 20
_MAX_PAGE = 1000
_MAX_COMPOSE = 32


def client_environment(url: str) -> dict[str, str]:
    """Return the variables that direct Cloud Storage clients to a server at this URL."""
    return {
        # google-cloud-storage and gcsfs. With it, Google's client needs no credentials.
        "STORAGE_EMULATOR_HOST": url,
        "FSSPEC_GCS_TOKEN": "anon",
        # Otherwise gcsfs calls another API over gRPC to learn the type of each bucket, and waits.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "TENSORSTORE_GCS_HTTP_URL": url,
        # Otherwise TensorStore looks for credentials, which the emulator does not need.
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    }


class StorageApi:
    """The API over one folder, as an ASGI application."""

    def __init__(self, folder: Path) -> None:
        """Serve the buckets in this folder."""
        self._store = BucketFolder(folder)
        self._uploads = Uploads(self._store)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        # The decoded path does not tell a separator from a slash in a name.
        path = scope["raw_path"].decode("ascii", "replace")
        path = path.removeprefix(quote(scope.get("root_path", "")))
        try:
            response = await self._answer(request, path)
        except StorageApiError as error:
            response = wire.refusal(error)
        except ClientDisconnect:
            return
        except OSError as error:
            response = wire.refusal(StorageApiError(500, "backendError", str(error)))
        await response(scope, receive, send)

    async def _answer(self, request: Request, path: str) -> Response:
        method, query = request.method, request.query_params
        if path.startswith(f"/upload{_OBJECTS}"):
            return await self._uploads.answer(
                request, wire.path_segments(path, f"/upload{_OBJECTS}")
            )
        if method == "POST" and path == "/batch/storage/v1":
            return await self._batch(request)
        if method == "GET" and path.startswith(f"/download{_OBJECTS}"):
            return self._download(request, wire.path_segments(path, f"/download{_OBJECTS}"))
        if method == "GET" and query.get("alt") == "media":
            return self._download(request, wire.path_segments(path, _OBJECTS))
        body = await wire.json_body(request) if method in ("POST", "PATCH", "PUT") else {}
        return await self._call(method, path, query, body, wire.base_url(request))

    async def _call(
        self, method: str, path: str, query: Mapping[str, str], body: Json, base: str
    ) -> Response:
        """Answer a call that consists of JSON."""
        match method, wire.path_segments(f"{path.rstrip('/')}/", _OBJECTS)[:-1]:
            case "GET", []:
                items = [self._bucket_json(bucket, base) for bucket in self._store.buckets()]
                return JSONResponse({"kind": "storage#buckets", "items": items})
            case "POST", []:
                bucket = str(body.get("name", ""))
                self._store.create_bucket(bucket)
                return JSONResponse(self._bucket_json(bucket, base))
            case "GET" | "PATCH", [bucket]:
                return JSONResponse(self._bucket_json(bucket, base))
            case "DELETE", [bucket]:
                self._store.delete_bucket(bucket)
                return Response(status_code=204)
            case "GET", [bucket, "o"]:
                return JSONResponse(self._list(bucket, query, base))
            case "GET", [bucket, "o", name]:
                return JSONResponse(await self._get(bucket, name, query, base))
            case "PATCH" | "PUT", [bucket, "o", name]:
                return JSONResponse(self._patch(bucket, name, query, body, base))
            case "DELETE", [bucket, "o", name]:
                _check_generation(self._store.get(bucket, name), query.get("generation"))
                self._store.delete(bucket, name, wire.preconditions(query))
                return Response(status_code=204)
            case "POST", [bucket, "o", name, "compose"]:
                stored = await self._compose(bucket, name, query, body)
                return JSONResponse(self._object_json(stored, base))
            case "POST", [bucket, "o", name, "copyTo", "b", to_bucket, "o", to]:
                stored = await self._copy(bucket, name, to_bucket, to, query, body)
                return JSONResponse(self._object_json(stored, base))
            case "POST", [bucket, "o", name, "moveTo", "o", to]:
                source = self._store.get(bucket, name)
                stored = await self._copy(bucket, name, bucket, to, query, body)
                self._store.delete(bucket, name, Preconditions(generation_match=source.generation))
                return JSONResponse(self._object_json(stored, base))
            case "POST", [bucket, "o", name, "rewriteTo", "b", to_bucket, "o", to]:
                stored = await self._copy(bucket, name, to_bucket, to, query, body)
                size = str(stored.size)
                answer = {
                    "kind": "storage#rewriteResponse",
                    "totalBytesRewritten": size,
                    "objectSize": size,
                    "done": True,
                    "resource": self._object_json(stored, base),
                }
                return JSONResponse(answer)
        raise StorageApiError(404, "notFound", f"Not Found: {method} {path}")

    # Buckets and lists

    def _bucket_json(self, bucket: str, base: str) -> Json:
        created = self._store.bucket_folder(bucket).stat().st_mtime_ns // 1000
        return wire.bucket_json(bucket, created, base)

    def _list(self, bucket: str, query: Mapping[str, str], base: str) -> Json:
        if "matchGlob" in query:
            raise invalid_argument("This emulator does not support matchGlob")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        end = query.get("endOffset", "")
        limit = min(wire.integer(query, "maxResults") or _MAX_PAGE, _MAX_PAGE)
        trailing = query.get("includeTrailingDelimiter", "").lower() == "true"
        start = max(wire.page_start(query.get("pageToken", "")), query.get("startOffset", ""))
        objects = self._store.objects(bucket, prefix, start)
        items: list[Json] = []
        prefixes: list[str] = []
        answer: Json = {"kind": "storage#objects"}
        next_start = ""
        for stored in objects:
            if end and stored.name >= end:
                break
            if len(items) + len(prefixes) >= limit:
                answer["nextPageToken"] = wire.page_token(next_start)
                break
            cut = stored.name.find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                items.append(self._object_json(stored, base))
                next_start = f"{stored.name}\0"
                continue
            common = stored.name[: cut + len(delimiter)]
            if trailing and stored.name == common:
                items.append(self._object_json(stored, base))
            prefixes.append(common)
            next_start = listing_start_after(common)
            objects.skip_to(next_start)
        return (
            answer
            | ({"items": items} if items else {})
            | ({"prefixes": prefixes} if prefixes else {})
        )

    # Objects

    def _object_json(self, stored: StoredObject, base: str) -> Json:
        return wire.object_json(stored, self._store.metadata(stored), base)

    def _readable(self, bucket: str, name: str, query: Mapping[str, str]) -> StoredObject:
        stored = self._store.get(bucket, name)
        _check_generation(stored, query.get("generation"))
        self._store.check(stored, wire.preconditions(query), reads=True)
        return stored

    async def _get(self, bucket: str, name: str, query: Mapping[str, str], base: str) -> Json:
        stored = self._readable(bucket, name, query)
        metadata = self._store.metadata(stored)
        # A file that a host wrote has no checksums yet.
        if metadata.checksums is None and not name.endswith("/"):
            try:
                metadata.checksums = await asyncio.to_thread(checksums, stored.path)
            except FileNotFoundError:
                raise no_such_object(bucket, name) from None
            if self._store.find(bucket, name) != stored:
                return await self._get(bucket, name, query, base)
        return self._object_json(stored, base)

    def _patch(
        self, bucket: str, name: str, query: Mapping[str, str], body: Json, base: str
    ) -> Json:
        stored = self._store.get(bucket, name)
        _check_generation(stored, query.get("generation"))
        self._store.check(stored, wire.preconditions(query))
        metadata = self._store.metadata(stored)
        changes = wire.settable(body)
        if isinstance(changes.get("metadata"), dict):
            custom = metadata.fields.get("metadata", {}) | changes["metadata"]
            changes["metadata"] = {k: v for k, v in custom.items() if v is not None}
        fields = metadata.fields | changes
        metadata.fields = {key: value for key, value in fields.items() if value is not None}
        metadata.metageneration += 1
        return self._object_json(stored, base)

    def _download(self, request: Request, segments: list[str]) -> Response:
        match segments:
            case [bucket, "o", name]:
                stored = self._readable(bucket, name, request.query_params)
            case _:
                raise StorageApiError(404, "notFound", "Not Found")
        metadata = self._store.metadata(stored)
        headers = {
            "accept-ranges": "bytes",
            "cache-control": "no-cache, no-store, max-age=0, must-revalidate",
            "content-type": metadata.fields.get("contentType", "application/octet-stream"),
            "etag": wire.etag(stored, metadata),
            "x-goog-generation": str(stored.generation),
            "x-goog-metageneration": str(metadata.metageneration),
            "x-goog-storage-class": "STANDARD",
            "x-goog-stored-content-encoding": "identity",
            "x-goog-stored-content-length": str(stored.size),
        }
        if (sums := metadata.checksums) is not None:
            crc32c = f"crc32c={sums.crc32c}," if sums.crc32c else ""
            headers["x-goog-hash"] = f"{crc32c}md5={sums.md5}"
        interval = wire.requested_range(request.headers.get("range"), stored.size)
        first, last = interval or (0, stored.size - 1)
        if interval:
            headers["content-range"] = f"bytes {first}-{last}/{stored.size}"
        headers["content-length"] = str(last - first + 1)
        content = _content(_open(stored), first, last - first + 1)
        return StreamingResponse(content, 206 if interval else 200, headers)

    async def _compose(
        self, bucket: str, name: str, query: Mapping[str, str], body: Json
    ) -> StoredObject:
        sources = []
        for source in body.get("sourceObjects", []):
            stored = self._store.get(bucket, str(source.get("name", "")))
            _check_generation(stored, source.get("generation"))
            conditions = wire.preconditions(source.get("objectPreconditions") or {})
            self._store.check(stored, conditions)
            sources.append(stored)
        if not 0 < len(sources) <= _MAX_COMPOSE:
            message = f"The number of source components must be between 1 and {_MAX_COMPOSE}"
            raise invalid_argument(message)
        conditions = wire.preconditions(query)
        resource = body.get("destination") or {}
        return await self._write_copy(bucket, name, sources, conditions, resource)

    async def _copy(
        self, bucket: str, name: str, to_bucket: str, to: str, query: Mapping[str, str], body: Json
    ) -> StoredObject:
        stored = self._store.get(bucket, name)
        _check_generation(stored, query.get("sourceGeneration"))
        self._store.check(stored, wire.preconditions(query, "ifSource"))
        resource = wire.settable(body) or dict(self._store.metadata(stored).fields)
        return await self._write_copy(to_bucket, to, [stored], wire.preconditions(query), resource)

    async def _write_copy(
        self,
        bucket: str,
        name: str,
        sources: list[StoredObject],
        conditions: Preconditions,
        resource: Json,
    ) -> StoredObject:
        self._store.check(self._store.find(bucket, name), conditions)
        draft = self._store.new_draft()
        try:
            with ExitStack() as stack:
                # Opened at once, so they are the generations whose preconditions were checked.
                files = [stack.enter_context(_open(source)) for source in sources]
                await asyncio.to_thread(_concatenate, files, draft)
            return await self._uploads.commit(bucket, name, draft, conditions, resource)
        finally:
            draft.unlink(missing_ok=True)

    # Batches

    async def _batch(self, request: Request) -> Response:
        """Answer the calls in a `multipart/mixed` body, one after the other."""
        boundary = f"batch_{secrets.token_hex(16)}"
        content = b""
        calls = wire.batch_calls(request.headers.get("content-type", ""), await request.body())
        for identity, call in calls:
            response = await self._batch_call(call, wire.base_url(request))
            body = bytes(response.body)
            status = HTTPStatus(response.status_code)
            head = (
                f"--{boundary}\r\nContent-Type: application/http\r\n"
                f"Content-ID: <response-{identity}>\r\n\r\n"
                f"HTTP/1.1 {status.value} {status.phrase}\r\n"
                f"Content-Type: application/json; charset=UTF-8\r\nContent-Length: {len(body)}\r\n"
            )
            content += head.encode() + b"\r\n" + body + b"\r\n"
        content += f"--{boundary}--\r\n".encode()
        return Response(content, 200, {"content-type": f"multipart/mixed; boundary={boundary}"})

    async def _batch_call(self, call: bytes, base: str) -> Response:
        head, _, body = call.replace(b"\r\n", b"\n").partition(b"\n\n")
        method, target = head.decode("ascii", "replace").split("\n")[0].split(" ")[:2]
        url = urlsplit(target)
        # Some clients send the whole URL, some only the path.
        path = url.path[max(0, url.path.find(_OBJECTS)) :]
        try:
            resource = wire.parse_json(body)
            return await self._call(method, path, dict(parse_qsl(url.query)), resource, base)
        except StorageApiError as error:
            return wire.refusal(error)


def _check_generation(stored: StoredObject, generation: object) -> None:
    """Raise 404 if a caller asks for another generation, because only the newest exists."""
    if generation and str(generation) != str(stored.generation):
        raise no_such_object(stored.bucket, f"{stored.name}#{generation}")


def _open(stored: StoredObject) -> BinaryIO:
    """Open an object for reading. A later write does not change what the file contains."""
    try:
        return io.BytesIO() if stored.name.endswith("/") else stored.path.open("rb")
    except FileNotFoundError:
        raise no_such_object(stored.bucket, stored.name) from None


async def _content(file: BinaryIO, first: int, size: int) -> AsyncIterator[bytes]:
    """Read a range of a file, and close it."""
    with file:
        file.seek(first)
        while size and (data := file.read(min(size, _CHUNK_BYTES))):
            size -= len(data)
            yield data


def _concatenate(files: list[BinaryIO], draft: Path) -> None:
    with draft.open("wb") as target:
        for file in files:
            shutil.copyfileobj(file, target, _CHUNK_BYTES)


def mount(folder: Path) -> tuple[str, Mount]:
    """Return a path that cannot be guessed, and the API below it."""
    path = f"/storage-{secrets.token_urlsafe(32)}"
    return path, Mount(path, StorageApi(folder))


def main() -> int:
    """Serve a folder until stopped."""
    parser = argparse.ArgumentParser(prog="python -m drumline.cloud.emulator.api.storage")
    parser.add_argument("--folder", type=Path, required=True, help="the folder with the buckets")
    parser.add_argument("--port", type=int, default=0, help="any free port by default")
    arguments = parser.parse_args()
    path, route = mount(arguments.folder)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", arguments.port))
        listener.listen(512)
        print(f"http://127.0.0.1:{listener.getsockname()[1]}{path}", flush=True)
        config = uvicorn.Config(
            Starlette(routes=[route]), log_level="warning", lifespan="off", timeout_keep_alive=600
        )
        uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
