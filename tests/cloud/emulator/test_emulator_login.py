"""Only the emulator's owner, who can read the token, may call it."""

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.auth.exceptions import InvalidOperation
from typer.testing import CliRunner

from drumline.cli.emulator import app
from drumline.cloud.emulator import launch
from drumline.cloud.local import emulated_cloud
from drumline.cloud.protocol import CloudError
from tests.cloud.http_call import rest

if TYPE_CHECKING:
    from tests.cloud.conftest import Emulator, Start
else:
    Emulator = Start = Any

PARENT = "projects/p/locations/local-a"
VERBS = ("preempt", "capacity", "faults", "break", "stop")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("shown", ["", "Bearer wrong", "Bearer ", "Basic cm9vdDo="])
def test_calls_without_the_token_are_rejected(emulator: Emulator, shown: str) -> None:
    headers = {"Authorization": shown} if shown else {}
    for method, path in (
        ("GET", f"/v2/{PARENT}/nodes"),
        ("POST", f"/v2/{PARENT}/nodes?nodeId=mine"),
        ("DELETE", f"/v2/{PARENT}/queuedResources/any?force=true"),
        ("GET", "/storage/v1/b/any"),
        ("GET", "/no/such/path"),
    ):
        status, answer = rest(emulator.url, method, path, {}, headers)
        assert (status, answer["error"]["status"]) == (401, "UNAUTHENTICATED"), path
    for method, verb in [("GET", "status"), ("GET", "resources"), *(("POST", v) for v in VERBS)]:
        status, answer = rest(emulator.url, method, f"/emulator/{verb}", {}, headers)
        assert status == 401, verb
        assert "token of this emulator is missing or wrong" in answer["error"]
    assert emulator.control("resources") == {"requests": [], "nodes": [], "hosts": []}


def test_googles_client_needs_the_token(emulator: Emulator) -> None:
    from google.auth.credentials import AnonymousCredentials

    anonymous = AnonymousCredentials()  # type: ignore[no-untyped-call]
    with pytest.raises(InvalidOperation, match="cannot be refreshed"):
        list(emulator.client(anonymous).list_nodes(parent=PARENT))
    assert list(emulator.client().list_nodes(parent=PARENT)) == []


def test_the_example_of_the_docs_page_works(
    emulator: Emulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / ".drumline").mkdir()
    (tmp_path / ".drumline" / "emulator").symlink_to(emulator.home)
    monkeypatch.setenv("HOME", str(tmp_path))
    page = Path(__file__).parents[3] / "docs" / "emulator.md"
    exec(page.read_text().split("```python\n")[1].split("```")[0], {})  # noqa: S102
    assert capsys.readouterr().out == "[]\n"


def test_the_home_of_the_emulator_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "new" / "home"
    monkeypatch.setenv("DRUMLINE_HOME", str(home))
    monkeypatch.delenv("DRUMLINE_EMULATOR", raising=False)
    before = os.umask(0)
    try:
        assert CliRunner().invoke(app, ["start"]).exit_code == 0
    finally:
        os.umask(before)
    try:
        assert mode(home) == mode(home.parent) == mode(home / "emulator") == 0o700
        assert mode(home / "emulator" / "endpoint.json") == 0o600
        assert mode(home / "emulator" / "log") == 0o600
        home.chmod(0o755)
        assert CliRunner().invoke(app, ["start"]).exit_code == 0
        assert mode(home) == 0o700
        stopped = CliRunner().invoke(app, ["stop"])
        assert (stopped.exit_code, stopped.stdout) == (0, "stopped\n")
        assert launch.find(home / "emulator") is None
    finally:
        launch.stop(home / "emulator")


def test_the_endpoint_file_of_a_dead_emulator_is_ignored(tmp_path: Path) -> None:
    """The port may belong to another user by now, who would receive the token."""
    (tmp_path / "lock").touch()
    endpoint = {"pid": 1, "url": "http://127.0.0.1:9", "token": "t", "started": 0.0}
    (tmp_path / "endpoint.json").write_text(json.dumps(endpoint))
    assert launch.find(tmp_path) is None
    assert launch.endpoint(tmp_path) is None
    assert not launch.stop(tmp_path)
    with pytest.raises(launch.EmulatorError, match="no emulator runs in"):
        launch.control(tmp_path, "stop")


def test_a_server_finds_an_emulator_that_restarted_with_another_port_and_token(
    start_emulator: Start,
) -> None:
    first = start_emulator()
    token = first.token
    assert len(token) >= 40

    async def story() -> None:
        cloud = emulated_cloud("p", first.home)
        assert await cloud.nodes("local-a") == []
        await asyncio.to_thread(launch.stop, first.home)
        second = await asyncio.to_thread(start_emulator)
        assert second.url != first.url
        assert second.token != token
        assert token not in (first.home / "log").read_text()
        assert await cloud.nodes("local-a") == []
        await cloud.close()

    asyncio.run(story())


def test_without_an_emulator_the_error_names_the_command_to_start_it(tmp_path: Path) -> None:
    from drumline.cloud.local import EmulatorCredentials

    with pytest.raises(CloudError, match="drumline emulator start"):
        asyncio.run(EmulatorCredentials(tmp_path).token())
