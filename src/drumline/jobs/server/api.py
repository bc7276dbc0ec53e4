"""The HTTP API. Each handler translates a request into one call of the service.

The answer to an invalid request is `{"error": message}`. Every answer has headers about the server
itself, so that a command needs no second request to warn its user.
"""

import asyncio
import math
import os
import sqlite3
import time
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drumline import __version__
from drumline.jobs.connection import ORPHANS_HEADER, VERSION_HEADER
from drumline.jobs.controller.tasks import is_disk_error
from drumline.jobs.core.state import Status
from drumline.jobs.server.execution import Exchange, LinesResponse
from drumline.jobs.server.job_files import PackingOptions
from drumline.jobs.server.logs import LogQuery, stream_logs
from drumline.jobs.server.request_bodies import read_body
from drumline.jobs.server.service import MAX_ID_DIGITS, RECENT_SECONDS, JobService
from drumline.jobs.server.verbs import RequestError
from drumline.jobs.store.records import UNREADABLE, JobFilter

MAX_WAIT_SECONDS = 30.0


class JobsApi:
    """The handlers of the API."""

    def __init__(
        self,
        service: JobService,
        stop: Callable[[], None],
        seconds_to_exit: Callable[[], float | None],
        before_create: Callable[[], None] = lambda: None,
    ) -> None:
        """`seconds_to_exit` returns the time until an idle server exits, or None.

        `before_create` runs in a thread before each job is created.
        """
        self._service, self._stop = service, stop
        self._seconds_to_exit, self._before_create = seconds_to_exit, before_create
        self._started = time.time()

    def application(self) -> ASGIApp:
        """Return the ASGI application."""
        app = Starlette(
            routes=[
                Route("/jobs", self.list_jobs),
                Route("/jobs", self.create, methods=["POST"]),
                Route("/packing/{token}", self.packing),
                Route("/packing/{token}/cancel", self.cancel_packing, methods=["POST"]),
                Route("/plan", self.plan, methods=["POST"]),
                Route("/ids", self.ids),
                Route("/jobs/{id}", self.show),
                Route("/jobs/{id}/history", self.history),
                Route("/jobs/{id}/events", self.events),
                Route("/jobs/{id}/logs", self.logs),
                Route("/jobs/{id}/hosts", self.hosts),
                Route("/jobs/{id}/exec", self.run_command, methods=["POST"]),
                Route("/jobs/{id}/{verb}", self.verb, methods=["POST"]),
                Route("/strays", self.orphans),
                Route("/strays/{verb}", self.apply_to_orphans, methods=["POST"]),
                Route("/hosts", self.known_hosts),
                Route("/hosts/{verb}", self.apply_to_host, methods=["POST"]),
                Route("/status", self.status),
                Route("/stop", self.stop_server, methods=["POST"]),
            ],
            exception_handlers={
                RequestError: _request_error,
                HTTPException: _http_error,
                sqlite3.DatabaseError: _storage_error,
                OSError: _storage_error,
            },
        )
        return ServerHeaders(app, self._service)

    async def list_jobs(self, request: Request) -> Response:
        """`GET /jobs?all=&status=&name=&user=&limit=&before=`."""
        return JSONResponse(self._service.overview(parse_search(request.query_params)))

    async def create(self, request: Request) -> Response:
        """`POST /jobs {spec, secrets, user, origin, interpreter, allow_large, packing}`."""
        body = await _body(request)
        await asyncio.to_thread(self._before_create)
        job = await self._service.create(
            _field(body, "spec"),
            body.get("secrets", {}),
            body.get("user", ""),
            body.get("origin"),
            body.get("interpreter"),
            PackingOptions.from_body(body),
        )
        return JSONResponse(job, status_code=201)

    async def packing(self, request: Request) -> Response:
        """`GET /packing/{token}`: the progress of the packing for a `create` or `resume`."""
        return JSONResponse(self._service.files.progress(request.path_params["token"]))

    async def cancel_packing(self, request: Request) -> Response:
        """`POST /packing/{token}/cancel`: give up a `create` or `resume` that packs code."""
        return JSONResponse(self._service.files.cancel(request.path_params["token"]))

    async def plan(self, request: Request) -> Response:
        """`POST /plan {spec, origin}`: the dry run of `create`."""
        body = await _body(request)
        return JSONResponse(await self._service.plan(_field(body, "spec"), body.get("origin")))

    async def ids(self, request: Request) -> Response:
        """`GET /ids?name=&name=`: the ids of jobs by their names."""
        return JSONResponse(self._service.ids(request.query_params.getlist("name")))

    async def show(self, request: Request) -> Response:
        """`GET /jobs/{id}`."""
        return JSONResponse(self._service.show(_job_id(request)))

    async def history(self, request: Request) -> Response:
        """`GET /jobs/{id}/history`: the metrics over the steps."""
        return JSONResponse(self._service.history(_job_id(request)))

    async def events(self, request: Request) -> Response:
        """`GET /jobs/{id}/events?after=&wait=`: wait up to `wait` seconds for new events."""
        after = int(_query_value(request, "after"))
        wait = min(_query_value(request, "wait"), MAX_WAIT_SECONDS)
        return JSONResponse(await self._service.events(_job_id(request), after, wait))

    async def logs(self, request: Request) -> Response:
        """`GET /jobs/{id}/logs?…`: a stream of text."""
        query = LogQuery.parse(request.query_params)
        text = stream_logs(self._service, _job_id(request), query)
        return StreamingResponse(text, media_type="text/plain; charset=utf-8")

    async def verb(self, request: Request) -> Response:
        """`POST /jobs/{id}/{cancel, resume, delete, clean, …}`."""
        verb = str(request.path_params["verb"])
        return JSONResponse(await self._service.verb(_job_id(request), verb, await _body(request)))

    async def run_command(self, request: Request) -> Response:
        """`POST /jobs/{id}/exec`: stream input and output while the command runs."""
        exchange = Exchange(request.receive)
        options = await exchange.first_line()
        has_input = request.headers.get("content-type") == "application/octet-stream"
        stdin = exchange.input() if has_input else None
        execution = self._service.execution(
            _job_id(request), options.get("host", 0), _field(options, "command"), stdin
        )
        return LinesResponse(exchange, execution.frames())

    async def hosts(self, request: Request) -> Response:
        """`GET /jobs/{id}/hosts`."""
        return JSONResponse(await self._service.hosts(_job_id(request)))

    async def status(self, _: Request) -> Response:
        """`GET /status`: the state of the server."""
        status = {"pid": os.getpid(), "version": __version__, "started": self._started}
        status |= {"leaves_in": self._seconds_to_exit(), "stays": self._service.supervisor.busy()}
        return JSONResponse(status | self._service.status())

    async def orphans(self, _: Request) -> Response:
        """`GET /strays`: the slices in the cloud that belong to lost databases."""
        return JSONResponse(await self._service.orphans.find())

    async def apply_to_orphans(self, request: Request) -> Response:
        """`POST /strays/{verb} {names, user}`."""
        body = await _body(request)
        verb = str(request.path_params["verb"])
        names, user = body.get("names", ()), body.get("user", "")
        return JSONResponse(await self._service.orphans.apply(verb, names, user))

    async def known_hosts(self, request: Request) -> Response:
        """`GET /hosts?identity=`: the host history, or one host of it."""
        identity = request.query_params.get("identity")
        history = self._service.host_history
        return JSONResponse(history.all() if identity is None else history.show(identity))

    async def apply_to_host(self, request: Request) -> Response:
        """`POST /hosts/{exclude, forgive} {identity, why, seconds}`."""
        verb = str(request.path_params["verb"])
        return JSONResponse(self._service.host_history.apply(verb, await _body(request)))

    async def stop_server(self, _: Request) -> Response:
        """`POST /stop`."""
        self._stop()
        return JSONResponse({"text": "the server stops; programs keep running and slices are kept"})


def _job_id(request: Request) -> str:
    return str(request.path_params["id"])


async def _body(request: Request) -> dict[str, Any]:
    body = await request.body()
    return read_body(body) if body else {}


def _field(body: dict[str, Any], key: str) -> Any:
    if key not in body:
        raise RequestError(f"the request's body has no {key!r}")
    return body[key]


def _query_value(request: Request, key: str) -> float:
    text = request.query_params.get(key, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 2**63:
        raise RequestError(f"{key}: {text!r:.40} is not a number of at least 0")
    return value


def parse_search(query: QueryParams) -> JobFilter:
    """Read the query of `GET /jobs`: all, status, name, user, limit, before."""
    numbers = {}
    for key in ("limit", "before"):
        text = query.get(key)
        if text is not None:
            is_number = text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS
            if not is_number or int(text) == 0:
                raise RequestError(
                    f"{key}: {text!r:.40} is not a number above 0 that a job can have"
                )
        numbers[key] = text
    status = [name.strip().upper() for text in query.getlist("status") for name in text.split(",")]
    unknown = set(status) - {*Status, UNREADABLE}
    if unknown:
        names = ", ".join([*Status, UNREADABLE])
        raise RequestError(f"status: {min(unknown)!r} is not a status; use one of {names}")
    list_all = query.get("all") == "1" or bool(status) or numbers["before"] is not None
    return JobFilter(
        since=None if list_all else time.time() - RECENT_SECONDS,
        status=tuple(dict.fromkeys(status)),
        name=query.get("name"),
        user=query.get("user"),
        limit=int(numbers["limit"]) if numbers["limit"] else None,
        before=numbers["before"],
    )


class ServerHeaders:
    """Middleware that adds headers about the server to each answer."""

    def __init__(self, app: ASGIApp, service: JobService) -> None:
        """The headers come from `service`."""
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the call and add the headers to the answer."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[VERSION_HEADER] = __version__
                headers[ORPHANS_HEADER] = str(len(self._service.orphans.known()))
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse({"error": str(error)}, status_code=error.http_status)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code)


async def _storage_error(_: Request, error: Exception) -> Response:
    if isinstance(error, sqlite3.DatabaseError) and "malformed" in str(error):
        text = f"jobs.db is damaged ({error}); restore a copy of it"
        return JSONResponse({"error": text}, status_code=507)
    if not is_disk_error(error):
        raise error
    text = f"cannot write to the Drumline home: {error}; free disk space and try again"
    return JSONResponse({"error": text}, status_code=507)
