"""The login to Google needs only the requirements of `pip install drumline`."""

import importlib.metadata
import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]

# Hide every module of packages not named in argv, then log in.
SCRIPT = """
import asyncio, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

absent = set(json.loads(sys.argv[1]))
sys.meta_path.insert(0, Absent())
from drumline.cloud.google.credentials import GoogleCredentials
print(asyncio.run(GoogleCredentials().token()))
"""


def installed_with(names: list[str]) -> set[str]:
    """Return these requirements with all their dependencies."""
    visited: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(name) for name in names]
    while left:
        requirement = left.pop()
        key = (str(canonicalize_name(requirement.name)), frozenset(requirement.extras))
        if key in visited:
            continue
        visited.add(key)
        for extra in ("", *requirement.extras):
            for text in importlib.metadata.requires(requirement.name) or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    left.append(needed)
    return {name for name, _ in visited}


@pytest.fixture
def google() -> Iterator[str]:
    """The URL of a token endpoint."""

    class Tokens(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer = json.dumps({"access_token": "ya29.fresh", "expires_in": 3600}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Tokens) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/token"
        server.shutdown()
        thread.join()


def test_the_base_install_can_log_in_to_google(google: str, tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = {
        "type": "service_account",
        "project_id": "lab-tpu-1",
        "private_key_id": "1",
        "private_key": key.decode(),
        "client_email": "lab@lab-tpu-1.iam.gserviceaccount.com",
        "token_uri": google,
    }
    (tmp_path / "key.json").write_text(json.dumps(account))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = installed_with(project["dependencies"]) | {"drumline"}
    absent = [
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if not brought & {str(canonicalize_name(package)) for package in packages}
    ]
    assert "jax" in absent
    assert "pytest" in absent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(absent)],
        env={"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "ya29.fresh\n", done.stderr
