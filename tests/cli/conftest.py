"""A stand-in for the server: canned answers on a Unix socket, and a record of what was asked."""

import json
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from drumline import __version__
from drumline.cli import main
from drumline.jobs.connection import VERSION_HEADER


class StandIn:
    """Answers by method and path; an answer may be a value, or a function of query and body."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.version = __version__
        self.asked: list[tuple[str, str, Any]] = []
        self.answers: dict[str, Any] = {
            "GET /status": {
                "pid": 4242,
                "version": __version__,
                "home": str(home),
                "cloud": "emulator",
                "jobs": 3,
                "started": 0.0,
            }
        }

    def holds(self, *jobs: dict[str, Any]) -> None:
        """Let these jobs exist."""
        self.answers["GET /jobs"] = list(jobs)
        for job in jobs:
            self.answers[f"GET /jobs/{job['id']}"] = job

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        path, _, query = target.partition("?")
        if path != "/status":
            self.asked.append((method, target, body))
        found = self.answers.get(f"{method} {path}", (404, {"error": f"there is no {path}"}))
        if callable(found):
            found = found(query, body)
        return found if isinstance(found, tuple) else (200, found)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stand_in: StandIn

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        status, answer = self.stand_in.answer(self.command, self.path, body)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header(VERSION_HEADER, self.stand_in.version)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = _serve  # noqa: N815 - the names http.server looks for

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A command that has its answer hangs up, perhaps before all of it was written."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("DRUMLINE_HOME", str(folder))
    monkeypatch.setenv("TZ", "UTC")
    return folder


@pytest.fixture
def server(home: Path) -> Iterator[StandIn]:
    stand_in = StandIn(home)
    handler = type("Handler", (_Handler,), {"stand_in": stand_in})
    with _Server(str(home / "server.sock"), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield stand_in
        listening.shutdown()
        thread.join()


@pytest.fixture
def drumline() -> Callable[..., int]:
    """Run the command line in this process; returns its exit code."""

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        code = ended.value.code
        return code if isinstance(code, int) else 0

    return run


@pytest.fixture
def a_job() -> Callable[..., dict[str, Any]]:
    """A job as `show` tells it: running, unless said otherwise."""

    def make(number: str = "000004", **changes: Any) -> dict[str, Any]:
        job = {
            "id": number,
            "user": "lab",
            "name": "llama-1b",
            "accelerator": "v4-128",
            "zone": "us-central2-b",
            "host0_ip": "35.186.0.98",
            "status": "RUNNING",
            "reason": "",
            "progress": {"step": 18400, "total": 50000, "mfu": 0.412, "checkpoint": 18000},
            "created": 1_700_000_000.0,
            "ended": None,
            "preemptions": 3,
            "failures": 0,
            "bad_hosts": 0,
            "chips_held": 64,
            "cost": 412.5,
            "cost_per_hour": 103.04,
            "spec": {"zones": ["us-central2-b"], "checkpoint": "gs://lab/run", "secrets": []},
            "cause": None,
            "attempts": [],
            "events": [],
            "slice": None,
        }
        return job | changes

    return make
