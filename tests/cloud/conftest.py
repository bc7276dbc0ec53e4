"""An emulator for tests, used through Google's own client."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import yaml

from drumline.cloud.emulator import launch
from tests.cloud.http_call import rest

LOCAL_A = "local-a"


def eventually(holds: Callable[[], Any], what: str = "", seconds: float = 60.0) -> Any:
    """Wait until `holds()` is true, and return what it returned."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, f"it never came to be: {what}"
        time.sleep(0.02)
    return value


@dataclass(frozen=True)
class Emulator:
    """A running emulator and the calls of the tests to it."""

    home: Path
    url: str
    key: asyncssh.SSHKey

    def client(self, credentials: Any = None) -> Any:
        from google.cloud import tpu_v2
        from google.cloud.tpu_v2.services.tpu.transports import TpuRestTransport
        from google.oauth2.credentials import Credentials

        transport = TpuRestTransport(
            host=self.url.removeprefix("http://"),
            url_scheme="http",
            credentials=credentials or Credentials(self.token),  # type: ignore[no-untyped-call]
        )
        return tpu_v2.TpuClient(transport=transport)

    @property
    def token(self) -> str:
        endpoint = launch.find(self.home)
        assert endpoint is not None
        return endpoint.token

    def control(self, verb: str, **fields: Any) -> dict[str, Any]:
        return launch.control(self.home, verb, **fields)

    def rest(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Send one HTTP call."""
        return rest(self.url, method, path, body, {"Authorization": f"Bearer {self.token}"})

    def node(self, accelerator: str = "v4-8", **more: Any) -> dict[str, Any]:
        public = self.key.export_public_key().decode().strip()
        return {
            "accelerator_type": accelerator,
            "runtime_version": "tpu-ubuntu2204-base",
            "metadata": {"ssh-keys": f"drumline:{public}"},
            **more,
        }

    @contextmanager
    def faults(self, **faults: Any) -> Iterator[None]:
        """Inject faults, and remove them in the end."""
        self.control("faults", **faults)
        try:
            yield
        finally:
            self.control("faults", clear=True)

    @contextmanager
    def capacity(self, accelerator: str, chips: int) -> Iterator[None]:
        """Limit the chips of local-a, and remove the limit in the end."""
        limit = {"zone": LOCAL_A, "accelerator": accelerator}
        self.control("capacity", **limit, chips=chips)
        try:
            yield
        finally:
            self.control("capacity", **limit, chips=None)

    def ask(self, name: str, accelerator: str = "v4-8", *, zone: str = LOCAL_A, **node: Any) -> Any:
        """Queue a spot request with one node of the same name."""
        parent = f"projects/p/locations/{zone}"
        spec = {"parent": parent, "node_id": name, "node": self.node(accelerator, **node)}
        return self.client().create_queued_resource(
            parent=parent,
            queued_resource_id=name,
            queued_resource={"tpu": {"node_spec": [spec]}, "spot": {}},
        )

    def state(self, name: str) -> str:
        """Return the state of a request."""
        full = f"projects/p/locations/{LOCAL_A}/queuedResources/{name}"
        got = self.client().get_queued_resource(name=full)
        return str(got.state.state.name)

    def wait_for(self, name: str, state: str) -> None:
        eventually(lambda: self.state(name) == state, f"{name} is {state}")

    def slice(self, name: str, accelerator: str = "v4-8", **node: Any) -> list[dict[str, Any]]:
        """Create a running slice and return its hosts from the emulator's list."""
        self.ask(name, accelerator, **node)
        self.wait_for(name, "ACTIVE")
        hosts = self.control("resources")["hosts"]
        return [host for host in hosts if host["node"] == name]

    def host(self, node: str) -> dict[str, Any]:
        """Return the only host of a node."""
        (host,) = [one for one in self.control("resources")["hosts"] if one["node"] == node]
        return dict(host)

    def release(self, name: str, zone: str = LOCAL_A) -> None:
        full = f"projects/p/locations/{zone}/queuedResources/{name}"
        self.client().delete_queued_resource(request={"name": full, "force": True}).result(
            timeout=60
        )


Start = Callable[..., Emulator]


@contextmanager
def running_emulator(home: Path, key: asyncssh.SSHKey, **config: Any) -> Iterator[Emulator]:
    """Run an emulator with the given keys in its config.yaml."""
    home.mkdir(exist_ok=True)
    (home / "config.yaml").write_text(yaml.safe_dump(config))
    try:
        yield Emulator(home, launch.ensure_running(home), key)
    finally:
        launch.stop(home)


@pytest.fixture(scope="session")
def ssh_key() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


@pytest.fixture
def start_emulator(tmp_path: Path, ssh_key: asyncssh.SSHKey) -> Iterator[Start]:
    """A function that starts an emulator with the given keys in its config.yaml."""
    home = tmp_path / "emulator"

    def start(**config: Any) -> Emulator:
        home.mkdir(exist_ok=True)
        (home / "config.yaml").write_text(yaml.safe_dump(config))
        return Emulator(home, launch.ensure_running(home), ssh_key)

    yield start
    launch.stop(home)


@pytest.fixture(scope="session")
def emulator(
    tmp_path_factory: pytest.TempPathFactory, ssh_key: asyncssh.SSHKey
) -> Iterator[Emulator]:
    """An emulator for all tests of a process that restore its state."""
    with running_emulator(tmp_path_factory.mktemp("home") / "emulator", ssh_key) as one:
        yield one
