"""Which machine a host says it is: by the metadata server, or by the emulator's folder."""

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from drumline.hosts.agent.system import identity as identities
from drumline.hosts.agent.system import machine

KNOWN = {
    "/computeMetadata/v1/instance/id": "4711",
    "/computeMetadata/v1/instance/attributes/physical_host": "/cluster/block/host-7\n",
    "/computeMetadata/v1/instance/preempted": "TRUE",
}


class Metadata(BaseHTTPRequestHandler):
    """Answers as Google's server does, and only who names it."""

    def do_GET(self) -> None:
        named = self.headers.get("Metadata-Flavor") == "Google"
        found = KNOWN.get(self.path) if named else None
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write((found or "<html>not found</html>").encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of Google's, whose metadata server is here."""
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    real = http.client.HTTPConnection
    here = f"127.0.0.1:{server.server_port}"
    monkeypatch.setattr(
        http.client, "HTTPConnection", lambda _, timeout: real(here, timeout=timeout)
    )
    for module in (identities, machine):
        monkeypatch.setattr(module, "on_google", lambda: True)
    for name in ("DRUMLINE_MACHINE", "DRUMLINE_DEV"):
        monkeypatch.delenv(name, raising=False)
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("google")
def test_a_machine_of_googles_is_known_by_what_its_metadata_has() -> None:
    assert identities.identity() == {
        "instance_id": "4711",
        "physical_host": "/cluster/block/host-7",
    }


@pytest.mark.usefixtures("google")
def test_what_the_server_does_not_have_is_empty() -> None:
    assert machine.metadata("attributes/nothing", 1.0) == ""
    assert machine.metadata("preempted", 1.0) == "TRUE"


def test_elsewhere_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRUMLINE_MACHINE", raising=False)
    monkeypatch.setattr(identities, "on_google", lambda: False)
    assert identities.identity() == {}


def test_an_emulated_machine_is_known_by_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRUMLINE_MACHINE", str(tmp_path))
    assert identities.identity() == {}
    (tmp_path / "physical_host").write_text("local-a-v4-4-1\n")
    assert identities.identity() == {"physical_host": "local-a-v4-4-1"}
