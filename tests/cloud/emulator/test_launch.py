"""Start, stop and commands of the emulator."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from drumline.cli.emulator import _home, app
from drumline.cloud.emulator import launch
from drumline.cloud.emulator.config import load
from drumline.errors import UserError
from tests.cases import rare
from tests.cloud.conftest import eventually

if TYPE_CHECKING:
    from tests.cloud.conftest import Emulator, Start
else:
    Emulator = Start = Any


def drumline(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def at_home(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """The emulator of the home folder, so that commands find it."""
    monkeypatch.setenv("DRUMLINE_HOME", str(emulator.home.parent))
    monkeypatch.delenv("DRUMLINE_EMULATOR", raising=False)
    return emulator


def test_concurrent_callers_start_one_emulator(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from drumline.cloud.emulator import launch;"
        "print(launch.ensure_running(Path(sys.argv[1])))"
    )

    def ask(_: int) -> str:
        call = [sys.executable, "-c", script, str(tmp_path)]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(ask, range(2))
    try:
        assert first == second == launch.endpoint(tmp_path)
        announced = json.loads((tmp_path / "endpoint.json").read_text())
        assert announced["pid"] == launch.control(tmp_path, "status")["pid"]
        assert "already runs" not in (tmp_path / "log").read_text()
    finally:
        assert launch.stop(tmp_path)
    assert launch.endpoint(tmp_path) is None
    assert not launch.stop(tmp_path)


def test_sigterm_ends_the_hosts_and_removes_the_endpoint_file(start_emulator: Start) -> None:
    emulator = start_emulator()
    emulator.slice("some", "v4-16")
    os.kill(emulator.control("status")["pid"], signal.SIGTERM)
    deadline = time.monotonic() + 60
    while (emulator.home / "endpoint.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (emulator.home / "hosts").exists()
    assert not (emulator.home / "machines").exists()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_the_process_of_a_stopped_emulator_has_exited(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from drumline.cloud.emulator import launch;"
        "launch.ensure_running(Path(sys.argv[1])); print(launch.find(Path(sys.argv[1])).pid)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    started = subprocess.run(command, capture_output=True, text=True, check=True)
    pid = int(started.stdout)
    processes = [pid, *launch.children_of(pid)]
    assert len(processes) > 1
    assert launch.stop(tmp_path)
    assert [pid for pid in processes if not launch.has_exited(pid)] == []


def test_a_hanging_emulator_is_stopped(
    start_emulator: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = start_emulator()
    pid = emulator.control("status")["pid"]
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(launch, "_RESPONSE_SECONDS", 0.1)
    monkeypatch.setattr(launch, "_STOP_SECONDS", 0.1)
    assert launch.stop(emulator.home)
    assert launch.find(emulator.home) is None


def test_launch_imports_only_the_standard_library() -> None:
    script = (
        "import sys; import drumline.cloud.emulator.launch;"
        "print([m for m in ('pydantic', 'starlette', 'asyncssh', 'httpx') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("boot_secs: 3", "boot_secs: there is no such key"),
        ("capacity: {mars: {v4: 1}}", "capacity: 'mars' is not a zone with TPUs"),
        ("quota: {local-a: {cheap: 1}}", "quota.local-a.cheap"),
        ("a: [", "not YAML"),
    ],
)
def test_an_invalid_config_is_one_sentence(tmp_path: Path, config: str, says: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    with pytest.raises(UserError) as failed:
        load(tmp_path / "config.yaml")
    assert says in str(failed.value)
    assert len(str(failed.value).splitlines()) == 1


def test_with_an_invalid_config_the_emulator_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("boot_secs: 3")
    with pytest.raises(launch.EmulatorError, match=r"did not start: .* there is no such key"):
        launch.ensure_running(tmp_path)


def test_without_an_emulator_the_commands_fail_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRUMLINE_HOME", str(tmp_path))
    monkeypatch.delenv("DRUMLINE_EMULATOR", raising=False)
    for arguments in (["resources"], ["preempt", "000001"], ["stop"]):
        code, _, message = drumline(*arguments)
        assert (code, message) == (2, "no emulator is running; drumline create starts it\n")
    assert drumline("status")[0] == 1
    assert json.loads(drumline("status", "--json")[1]) == {"running": False}


def test_the_commands_list_and_preempt_a_slice(at_home: Emulator) -> None:
    assert drumline("resources") == (0, "no resources\n", "")
    at_home.slice("mine", "v4-16", labels={"drumline-job": "000007"})
    resources = json.loads(drumline("resources", "--json")[1])
    assert [one["state"] for one in resources["requests"]] == ["ACTIVE"]
    assert [one["index"] for one in resources["hosts"]] == [0, 1]
    assert "mine/1" in drumline("resources")[1]
    assert drumline("break", "000007", "--host", "1", "--how", "silent")[:2] == (
        0,
        "mine host 1: silent\n",
    )
    assert drumline("preempt", "7")[:2] == (0, "mine is preempted\n")
    at_home.wait_for("mine", "SUSPENDED")
    code, _, message = drumline("preempt", "7")
    assert (code, message) == (2, "7 has no chips: it is SUSPENDED\n")
    at_home.release("mine")
    assert json.loads(drumline("resources", "--json")[1]) == {
        "requests": [],
        "nodes": [],
        "hosts": [],
    }


def test_capacity_and_faults_from_the_command_line(at_home: Emulator) -> None:
    assert drumline("start")[1] == f"running at {at_home.url}\n"
    assert drumline("capacity", "local-a", "v4", "16")[1].endswith("local-a: 16 chips\n")
    shown = drumline("faults", "--fail", "0.25", "--deny", "local-b")[1]
    assert shown == "25% of calls fail\nlocal-b is denied\n"
    status = drumline("status")[1]
    assert "0 requests, 0 nodes, 0 hosts;" in status
    assert "capacity of v4 in local-a: 16 chips" in status
    assert "25% of calls fail" in status
    assert drumline("faults", "--clear")[1] == "no faults\n"
    assert "unlimited" in drumline("capacity", "local-a", "v4", "unlimited")[1]
    assert "v4" not in at_home.control("status")["capacity"]["local-a"]
    code, _, message = drumline("capacity", "local-a", "v4", "lots")
    assert (code, "'lots' is not a number of chips" in message) == (2, True)
    code, _, message = drumline("capacity", "local-a", "v4", "9" * 23)
    assert (code, "is not a number of chips" in message) == (2, True)
    for notice in ("1e308", "nan"):
        code, _, message = drumline("preempt", "000001", "--notice", notice)
        assert (code, "notice" in message) == (2, True), message


@pytest.mark.parametrize("spoilt", ["garbage", None])
def test_the_emulator_restores_its_endpoint_file(emulator: Emulator, spoilt: str | None) -> None:
    file = emulator.home / launch.ENDPOINT
    if spoilt is None:
        file.unlink()
    else:
        file.write_text(spoilt)
    eventually(lambda: launch.endpoint(emulator.home) == emulator.url, "the file is restored")


@pytest.mark.parametrize("moved", [False, *rare(True)], ids=["deleted", "moved"])
def test_an_emulator_without_its_home_exits_and_leaves_the_next_one_alone(
    tmp_path: Path, moved: bool
) -> None:
    home = tmp_path / "emulator"
    launch.ensure_running(home)
    first = launch.find(home)
    if moved:
        home.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(home)
    url = launch.ensure_running(home)
    try:
        assert first
        eventually(lambda: not answers(first.url), "the first one to exit")
        assert launch.endpoint(home) == url
    finally:
        launch.stop(home)
        launch.stop(tmp_path / "elsewhere")


def answers(url: str) -> bool:
    """Return True if something listens on the port of a URL."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", urlsplit(url).port or 0)) == 0


def test_an_empty_drumline_home_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRUMLINE_EMULATOR", raising=False)
    monkeypatch.setenv("DRUMLINE_HOME", "")
    assert _home() == Path.home() / ".drumline" / "emulator"
