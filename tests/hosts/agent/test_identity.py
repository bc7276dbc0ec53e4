"""The identity of a host, from the metadata server or from the emulator's folder."""

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from drumline.hosts.agent import machine

ATTRIBUTES = {
    "/computeMetadata/v1/instance/id": "4711",
    "/computeMetadata/v1/instance/attributes/physical_host": "/cluster/block/host-7\n",
    "/computeMetadata/v1/instance/preempted": "TRUE",
}


class Metadata(BaseHTTPRequestHandler):
    """A metadata server like Google's, which requires a header."""

    def do_GET(self) -> None:
        has_header = self.headers.get("Metadata-Flavor") == "Google"
        value = ATTRIBUTES.get(self.path) if has_header else None
        self.send_response(404 if value is None else 200)
        self.end_headers()
        self.wfile.write((value or "<html>not found</html>").encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Google Cloud machine with a metadata server in this process."""
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    real = http.client.HTTPConnection
    address = f"127.0.0.1:{server.server_port}"
    monkeypatch.setattr(
        http.client, "HTTPConnection", lambda _, timeout: real(address, timeout=timeout)
    )
    monkeypatch.setattr(machine, "on_google", lambda: True)
    for name in ("DRUMLINE_MACHINE", "DRUMLINE_DEV"):
        monkeypatch.delenv(name, raising=False)
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("google")
def test_the_identity_on_google_comes_from_the_metadata_server() -> None:
    assert machine.machine_identity() == {
        "instance_id": "4711",
        "physical_host": "/cluster/block/host-7",
    }


@pytest.mark.usefixtures("google")
def test_a_missing_attribute_is_empty() -> None:
    assert machine.read_metadata("attributes/nothing", 1.0) == ""
    assert machine.read_metadata("preempted", 1.0) == "TRUE"


def test_no_identity_outside_google(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRUMLINE_MACHINE", raising=False)
    monkeypatch.setattr(machine, "on_google", lambda: False)
    assert machine.machine_identity() == {}


def test_the_identity_of_an_emulated_machine_comes_from_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRUMLINE_MACHINE", str(tmp_path))
    assert machine.machine_identity() == {}
    (tmp_path / "physical_host").write_text("local-a-v4-4-1\n")
    assert machine.machine_identity() == {"physical_host": "local-a-v4-4-1"}
