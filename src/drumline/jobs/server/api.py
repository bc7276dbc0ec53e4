"""The HTTP API: each handler turns a request into one call of the service.

What is asked for wrongly is answered with `{"error": sentence}`. Every answer has headers about the
server itself, so that a command knows what else to show its user without a second request.
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
from drumline.jobs.server.exchange import Exchange, LinesResponse
from drumline.jobs.server.logs import stream_logs, wanted_of
from drumline.jobs.server.service import MOST_DIGITS, RECENT, JobService
from drumline.jobs.server.verbs import Mistake
from drumline.jobs.store.records import UNREADABLE, JobFilter

LONGEST_POLL = 30.0


class JobsApi:
    """The handlers, and the application made of them."""

    def __init__(
        self,
        service: JobService,
        stop: Callable[[], None],
        leaves_in: Callable[[], float | None],
        before_create: Callable[[], None] = lambda: None,
    ) -> None:
        """`leaves_in` gives the seconds until an idle server exits, None while it does not.

        `before_create` is called in a thread before each job is created.
        """
        self._service, self._stop = service, stop
        self._leaves_in, self._before_create = leaves_in, before_create
        self._started = time.time()

    def application(self) -> ASGIApp:
        """All of it, for a web server to serve."""
        app = Starlette(
            routes=[
                Route("/jobs", self.list_jobs),
                Route("/jobs", self.create, methods=["POST"]),
                Route("/plan", self.plan, methods=["POST"]),
                Route("/jobs/{id}", self.show),
                Route("/jobs/{id}/history", self.history),
                Route("/jobs/{id}/events", self.events),
                Route("/jobs/{id}/logs", self.logs),
                Route("/jobs/{id}/hosts", self.hosts),
                Route("/jobs/{id}/exec", self.run_command, methods=["POST"]),
                Route("/jobs/{id}/{verb}", self.verb, methods=["POST"]),
                Route("/strays", self.strays),
                Route("/strays/{verb}", self.settle_strays, methods=["POST"]),
                Route("/hosts", self.known_hosts),
                Route("/hosts/{verb}", self.settle_host, methods=["POST"]),
                Route("/status", self.status),
                Route("/stop", self.stop_server, methods=["POST"]),
            ],
            exception_handlers={
                Mistake: _mistake,
                HTTPException: _http_error,
                sqlite3.OperationalError: _no_room,
                OSError: _no_room,
            },
        )
        return ServerHeaders(app, self._service)

    async def list_jobs(self, request: Request) -> Response:
        """`GET /jobs?all=&status=&name=&user=&limit=&before=`."""
        return JSONResponse(self._service.overview(search_of(request.query_params)))

    async def create(self, request: Request) -> Response:
        """`POST /jobs {spec, secrets, user, origin}`."""
        body = await _body_of(request)
        await asyncio.to_thread(self._before_create)
        shown = await self._service.create(
            _given(body, "spec"), body.get("secrets", {}), body.get("user", ""), body.get("origin")
        )
        return JSONResponse(shown, status_code=201)

    async def plan(self, request: Request) -> Response:
        """`POST /plan {spec, origin}`: what a create would do; changes nothing."""
        body = await _body_of(request)
        return JSONResponse(await self._service.plan(_given(body, "spec"), body.get("origin")))

    async def show(self, request: Request) -> Response:
        """`GET /jobs/{id}`."""
        return JSONResponse(self._service.show(_job_id(request)))

    async def history(self, request: Request) -> Response:
        """`GET /jobs/{id}/history`: the metrics over the steps."""
        return JSONResponse(self._service.history(_job_id(request)))

    async def events(self, request: Request) -> Response:
        """`GET /jobs/{id}/events?after=&wait=`: may wait until there are new ones."""
        after = int(_number_of(request, "after"))
        wait = min(_number_of(request, "wait"), LONGEST_POLL)
        return JSONResponse(await self._service.events(_job_id(request), after, wait))

    async def logs(self, request: Request) -> Response:
        """`GET /jobs/{id}/logs?…`: a stream of text."""
        text = stream_logs(self._service, _job_id(request), wanted_of(request.query_params))
        return StreamingResponse(text, media_type="text/plain; charset=utf-8")

    async def verb(self, request: Request) -> Response:
        """`POST /jobs/{id}/{cancel, resume, delete, clean, …}`."""
        verb = str(request.path_params["verb"])
        return JSONResponse(
            await self._service.verb(_job_id(request), verb, await _body_of(request))
        )

    async def run_command(self, request: Request) -> Response:
        """`POST /jobs/{id}/exec`: frames both ways while the command runs."""
        exchange = Exchange(request.receive)
        asked = await exchange.opening()
        fed = request.headers.get("content-type") == "application/octet-stream"
        stdin = exchange.input() if fed else None
        execution = self._service.execution(
            _job_id(request), asked.get("host", 0), _given(asked, "command"), stdin
        )
        return LinesResponse(exchange, execution.frames())

    async def hosts(self, request: Request) -> Response:
        """`GET /jobs/{id}/hosts`."""
        return JSONResponse(self._service.hosts(_job_id(request)))

    async def status(self, _: Request) -> Response:
        """`GET /status`: of the server itself."""
        facts = {"pid": os.getpid(), "version": __version__, "started": self._started}
        facts |= {"leaves_in": self._leaves_in(), "stays": self._service.supervisor.busy()}
        return JSONResponse(facts | self._service.status())

    async def strays(self, _: Request) -> Response:
        """`GET /strays`: what is in the cloud, bears our name, and belongs to no job."""
        return JSONResponse(await self._service.lost.found())

    async def settle_strays(self, request: Request) -> Response:
        """`POST /strays/{verb} {names, user}`."""
        body = await _body_of(request)
        verb = str(request.path_params["verb"])
        names, user = body.get("names", ()), body.get("user", "")
        return JSONResponse(await self._service.lost.settle(verb, names, user))

    async def known_hosts(self, request: Request) -> Response:
        """`GET /hosts?identity=`: the hosts that jobs have met, or one of them."""
        identity = request.query_params.get("identity")
        remembered = self._service.remembered
        found = remembered.all() if identity is None else remembered.show(identity)
        return JSONResponse(found)

    async def settle_host(self, request: Request) -> Response:
        """`POST /hosts/{exclude, forgive} {identity, why, seconds}`."""
        verb = str(request.path_params["verb"])
        return JSONResponse(self._service.remembered.settle(verb, await _body_of(request)))

    async def stop_server(self, _: Request) -> Response:
        """`POST /stop`."""
        self._stop()
        return JSONResponse({"text": "the server stops; programs and slices go on"})


def _job_id(request: Request) -> str:
    return str(request.path_params["id"])


async def _body_of(request: Request) -> dict[str, Any]:
    try:
        body = await request.json() if await request.body() else {}
    except (ValueError, RecursionError):
        raise Mistake("the request's body is not JSON") from None
    if not isinstance(body, dict):
        raise Mistake("the request's body is not a JSON object")
    return body


def _given(body: dict[str, Any], key: str) -> Any:
    if key not in body:
        raise Mistake(f"the request's body has no {key!r}")
    return body[key]


def _number_of(request: Request, key: str) -> float:
    given = request.query_params.get(key, "0")
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not 0 <= number < 2**63:
        raise Mistake(f"{key}: {given!r:.40} is not a number from 0 on")
    return number


def search_of(query: QueryParams) -> JobFilter:
    """What `GET /jobs` asks for: all, status, name, user, limit, before."""
    numbers = {}
    for key in ("limit", "before"):
        given = query.get(key)
        whole = given is None or (given.isascii() and given.isdigit() and len(given) <= MOST_DIGITS)
        if not whole or (given is not None and int(given) == 0):
            raise Mistake(f"{key}: {given!r:.40} is not a number above 0 that a job can have")
        numbers[key] = given
    status = [name.strip().upper() for text in query.getlist("status") for name in text.split(",")]
    unknown = set(status) - {*Status, UNREADABLE}
    if unknown:
        known = ", ".join([*Status, UNREADABLE])
        raise Mistake(f"status: {min(unknown)!r} is none; there are {known}")
    everything = query.get("all") == "1" or bool(status) or numbers["before"] is not None
    return JobFilter(
        since=None if everything else time.time() - RECENT,
        status=tuple(dict.fromkeys(status)),
        name=query.get("name"),
        user=query.get("user"),
        limit=int(numbers["limit"]) if numbers["limit"] else None,
        before=numbers["before"],
    )


class ServerHeaders:
    """Adds headers about the server itself to each answer of an application."""

    def __init__(self, app: ASGIApp, service: JobService) -> None:
        """`service` gives the values of the headers."""
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, with our headers."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[VERSION_HEADER] = __version__
                headers[ORPHANS_HEADER] = str(len(self._service.lost.seen()))
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _mistake(_: Request, error: Exception) -> Response:
    assert isinstance(error, Mistake)
    return JSONResponse({"error": str(error)}, status_code=error.code)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code)


async def _no_room(_: Request, error: Exception) -> Response:
    if not is_disk_error(error):
        raise error
    text = f"nothing can be written to this home: {error}; make room, then try again"
    return JSONResponse({"error": text}, status_code=507)
