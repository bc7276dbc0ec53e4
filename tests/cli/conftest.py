"""A fake server with fixed answers on a Unix socket, which records its requests."""

import json
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drumline import __version__
from drumline.cli import main
from drumline.jobs.connection import VERSION_HEADER

# The commands of these tests need the extra `jax`.
collect_ignore_glob = [] if find_spec("jax") else ["test_inspect.py", "test_numerics_*.py"]


class FakeServer:
    """Answers by method and path. An answer is a value, or a function of query and body."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.version = __version__
        self.requests: list[tuple[str, str, Any]] = []
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
        """Add jobs."""
        self.answers["GET /jobs"] = list(jobs)
        for job in jobs:
            self.answers[f"GET /jobs/{job['id']}"] = job

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        path, _, query = target.partition("?")
        if path != "/status":
            self.requests.append((method, target, body))
        answer = self.answers.get(f"{method} {path}", (404, {"error": f"there is no {path}"}))
        if callable(answer):
            answer = answer(query, body)
        return answer if isinstance(answer, tuple) else (200, answer)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        status, answer = self.fake.answer(self.command, self.path, body)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header(VERSION_HEADER, self.fake.version)
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
        """Ignore a command that disconnects before its answer is complete."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("DRUMLINE_HOME", str(folder))
    monkeypatch.setenv("TZ", "UTC")
    return folder


@pytest.fixture
def server(home: Path) -> Iterator[FakeServer]:
    fake = FakeServer(home)
    handler = type("Handler", (_Handler,), {"fake": fake})
    with _Server(str(home / "server.sock"), handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield fake
        http_server.shutdown()
        thread.join()


@pytest.fixture
def drumline() -> Callable[..., int]:
    """Return a function that runs the command line in this process and returns its exit code."""

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        code = ended.value.code
        return code if isinstance(code, int) else 0

    return run


@pytest.fixture
def a_job() -> Callable[..., dict[str, Any]]:
    """Return a function that makes a job as `show` returns it, RUNNING by default."""

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
