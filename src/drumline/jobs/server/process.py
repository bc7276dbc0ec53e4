"""The server process: the supervisor's loop, and its HTTP API on a Unix socket.

    python -m drumline.jobs.server [--stay]

One per home folder; a second server finds the lock held and exits quietly. It may be killed at any
moment: programs, slices and the store do not need it, and the next server continues where it was.
With nothing to do for a while it exits, unless it was started to stay.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drumline import __version__
from drumline.cloud.google.tpu_api import GOOGLE, TpuApi
from drumline.cloud.protocol import Cloud
from drumline.cloud.visits import LAST_CALLERS, Visits
from drumline.jobs.caller import STRAYS, VERSION, home_folder
from drumline.jobs.config import Config, ConfigError, read
from drumline.jobs.controller.actions import is_about_storage
from drumline.jobs.controller.supervisor import Supervisor
from drumline.jobs.core.state import Status
from drumline.jobs.folders import Folders
from drumline.jobs.server.exchange import Exchange, LinesResponse
from drumline.jobs.server.logs import stream_logs, wanted_of
from drumline.jobs.server.service import MOST_DIGITS, RECENT, JobService
from drumline.jobs.server.verbs import Mistake
from drumline.jobs.store.records import Store
from drumline.jobs.store.schema import SchemaError
from drumline.jobs.store.search import UNREADABLE, Search

log = logging.getLogger(__name__)
LONGEST_POLL = 30.0
HOME_CHECK_SECONDS = 5.0

LeavesIn = Callable[[], float | None]


def routes(
    service: JobService, stop: asyncio.Event, started: float, leaves_in: LeavesIn
) -> list[Route]:
    """The HTTP API: each handler turns a request into one call of the service."""

    def job_id(request: Request) -> str:
        return str(request.path_params["id"])

    async def list_jobs(request: Request) -> Response:
        return JSONResponse(service.overview(_search(request.query_params)))

    async def create(request: Request) -> Response:
        body = await request.json()
        await asyncio.to_thread(start_emulator, service.supervisor.config)
        shown = await service.create(
            body["spec"], body.get("secrets", {}), body.get("user", ""), body.get("origin")
        )
        return JSONResponse(shown, status_code=201)

    async def plan(request: Request) -> Response:
        body = await request.json()
        return JSONResponse({"lines": await service.plan(body["spec"], body.get("origin"))})

    async def show(request: Request) -> Response:
        return JSONResponse(service.show(job_id(request)))

    async def history(request: Request) -> Response:
        return JSONResponse(service.history(job_id(request)))

    async def events(request: Request) -> Response:
        after = int(request.query_params.get("after", 0))
        wait = min(float(request.query_params.get("wait", 0)), LONGEST_POLL)
        return JSONResponse(await service.events(job_id(request), after, wait))

    async def logs(request: Request) -> Response:
        text = stream_logs(service, job_id(request), wanted_of(request.query_params))
        return StreamingResponse(text, media_type="text/plain; charset=utf-8")

    async def verb(request: Request) -> Response:
        body = await request.json() if await request.body() else {}
        return JSONResponse(
            await service.verb(job_id(request), str(request.path_params["verb"]), body)
        )

    async def run_command(request: Request) -> Response:
        exchange = Exchange(request.receive)
        asked = await exchange.opening()
        fed = request.headers.get("content-type") == "application/octet-stream"
        stdin = exchange.input() if fed else None
        execution = service.execution(
            job_id(request), asked.get("host", 0), asked["command"], stdin
        )
        return LinesResponse(exchange, execution.frames())

    async def hosts(request: Request) -> Response:
        return JSONResponse(service.hosts(job_id(request)))

    async def status(_: Request) -> Response:
        facts = {"pid": os.getpid(), "version": __version__, "started": started}
        facts |= {"leaves_in": leaves_in(), "stays": service.supervisor.busy()}
        return JSONResponse(facts | service.status())

    async def strays(_: Request) -> Response:
        return JSONResponse(await service.lost.found())

    async def settle_strays(request: Request) -> Response:
        body = await request.json() if await request.body() else {}
        verb = str(request.path_params["verb"])
        names, user = body.get("names", ()), body.get("user", "")
        return JSONResponse(await service.lost.settle(verb, names, user))

    async def stop_server(_: Request) -> Response:
        stop.set()
        return JSONResponse({"text": "the server stops; programs and slices go on"})

    return [
        Route("/jobs", list_jobs),
        Route("/jobs", create, methods=["POST"]),
        Route("/plan", plan, methods=["POST"]),
        Route("/jobs/{id}", show),
        Route("/jobs/{id}/history", history),
        Route("/jobs/{id}/events", events),
        Route("/jobs/{id}/logs", logs),
        Route("/jobs/{id}/hosts", hosts),
        Route("/jobs/{id}/exec", run_command, methods=["POST"]),
        Route("/jobs/{id}/{verb}", verb, methods=["POST"]),
        Route("/strays", strays),
        Route("/strays/{verb}", settle_strays, methods=["POST"]),
        Route("/status", status),
        Route("/stop", stop_server, methods=["POST"]),
    ]


def _search(query: QueryParams) -> Search:
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
    return Search(
        since=None if everything else time.time() - RECENT,
        status=tuple(dict.fromkeys(status)),
        name=query.get("name"),
        user=query.get("user"),
        limit=int(numbers["limit"]) if numbers["limit"] else None,
        before=numbers["before"],
    )


class ServerHeaders:
    """Adds headers about the server itself to each answer of an application.

    So a command knows what else to show its user without a second request.
    """

    def __init__(self, app: ASGIApp, service: JobService) -> None:
        """`service` gives the values of the headers."""
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, with our headers."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[VERSION] = __version__
                headers[STRAYS] = str(len(self._service.lost.seen()))
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _mistake(_: Request, error: Exception) -> Response:
    assert isinstance(error, Mistake)
    return JSONResponse({"error": str(error)}, status_code=error.code)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code)


async def _no_room(_: Request, error: Exception) -> Response:
    if not is_about_storage(error):
        raise error
    text = f"nothing can be written to this home: {error}; make room, then try again"
    return JSONResponse({"error": text}, status_code=507)


def connect(config: Config) -> Cloud:
    """The cloud that the settings name; the emulator is started if it is not running."""
    if config.local:
        from drumline.cloud.local import emulated_cloud

        start_emulator(config)
        home = Path(config.endpoint) if config.endpoint else Folders(config.home).emulator
        return emulated_cloud(config.project, home)
    from drumline.cloud.google.credentials import GoogleCredentials

    url = config.endpoint or GOOGLE
    return TpuApi(config.project, base_url=url, credentials=GoogleCredentials())


def start_emulator(config: Config) -> None:
    """Start our own emulator if it is the cloud and is not running; it exits when idle."""
    from drumline.cloud.emulator import launch

    if config.local and not config.endpoint:
        try:
            launch.ensure_running(Folders(config.home).emulator)
        except launch.EmulatorError as wrong:
            raise Mistake(f"the emulator does not start: {wrong}", 502) from None


def ssh_key(folders: Folders) -> str:
    """The public half of our key, which is made once.

    It is kept in a file of its own, so that a start need not load SSH to derive it.
    """
    public = folders.key.with_suffix(".pub")
    try:
        # A public half that is older belongs to a key that was replaced.
        if public.stat().st_mtime_ns >= folders.key.stat().st_mtime_ns:
            return public.read_text().strip()
    except FileNotFoundError:
        pass
    import asyncssh

    if folders.key.exists():
        key = asyncssh.read_private_key(folders.key)
    else:
        key = asyncssh.generate_private_key("ssh-ed25519", comment="drumline")
        _write_private(folders.key, key.export_private_key())
    _write_private(public, key.export_public_key())
    return key.export_public_key().decode().strip()


def _write_private(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    new.rename(path)


async def _home_is_gone(door: Path) -> None:
    """Return when no caller can reach us any more: the socket was removed or replaced."""
    ours = door.stat().st_ino
    with contextlib.suppress(FileNotFoundError):
        while door.stat().st_ino == ours:
            await asyncio.sleep(HOME_CHECK_SECONDS)


async def serve(config: Config, stay: bool = False) -> None:
    """Run until stopped, or, without `stay`, until there was nothing to do for a while."""
    folders = Folders(config.home)
    store = Store(folders.database)
    cloud = await asyncio.to_thread(connect, config)
    supervisor = Supervisor(store, cloud, config, ssh_key(folders))
    stop = asyncio.Event()
    service = JobService(supervisor)
    app = Starlette(
        routes=routes(service, stop, time.time(), lambda: visits.leaves_in()),
        exception_handlers={
            Mistake: _mistake,
            HTTPException: _http_error,
            sqlite3.OperationalError: _no_room,
            OSError: _no_room,
        },
    )
    patience = None if stay else config.idle_seconds
    visits = Visits(ServerHeaders(app, service), supervisor.busy, patience, unnoticed={"/status"})
    folders.socket.unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(folders.socket))
    folders.socket.chmod(0o600)
    web = uvicorn.Server(uvicorn.Config(visits, log_level="warning", lifespan="off"))
    web.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    listening = asyncio.create_task(web.serve(sockets=[door]))
    supervising = asyncio.create_task(supervisor.run())
    stopping = asyncio.create_task(stop.wait())
    homeless = asyncio.create_task(_home_is_gone(folders.socket))
    needless = asyncio.create_task(visits.over())
    try:
        ways_out = {listening, supervising, stopping, homeless, needless}
        await asyncio.wait(ways_out, return_when=asyncio.FIRST_COMPLETED)
        if needless.done():
            log.info("nothing to do for %.0f min: leaving", config.idle_seconds / 60)
            folders.socket.unlink(missing_ok=True)
            await asyncio.sleep(LAST_CALLERS)
    finally:
        web.should_exit = True
        web.force_exit = True
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervising
        await listening
        stopping.cancel()
        homeless.cancel()
        needless.cancel()
        await supervisor.close()
        store.close()
        folders.socket.unlink(missing_ok=True)


def main() -> None:
    """Acquire the lock and serve; it is no error if a server runs already."""
    os.umask(0o077)
    home = home_folder()
    folders = Folders(home)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("asyncssh", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with folders.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        try:
            asyncio.run(serve(read(home), stay="--stay" in sys.argv[1:]))
        except (ConfigError, SchemaError) as wrong:
            sys.exit(str(wrong))
