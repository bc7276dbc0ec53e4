"""Emulators of another version, and emulators that nothing can call."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drumline import __version__
from drumline.cli.emulator import app
from drumline.cloud.emulator import launch

# Holds the lock of an emulator and answers nothing, as `python -m drumline.cloud.emulator` may.
OTHER_EMULATOR = (
    "import fcntl, sys, time\n"
    "lock = open(sys.argv[2] + '/lock', 'w')\n"
    "fcntl.flock(lock, fcntl.LOCK_EX)\n"
    "print('ready', flush=True)\n"
    "time.sleep(3600)  # drumline.cloud.emulator\n"
)
Start = Callable[[str | None], "subprocess.Popen[bytes]"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRUMLINE_HOME", str(tmp_path))
    monkeypatch.delenv("DRUMLINE_EMULATOR", raising=False)
    monkeypatch.setattr(launch, "_ENDPOINT_SECONDS", 0.1)
    folder = tmp_path / "emulator"
    folder.mkdir()
    return folder


@pytest.fixture
def start_other(home: Path) -> Iterator[Start]:
    """Start another emulator with this endpoint file, which has no address that answers."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(endpoint: str | None) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", OTHER_EMULATOR, "--home", str(home)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if endpoint is not None:
            (home / launch.ENDPOINT).write_text(endpoint.replace("PID", str(process.pid)))
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


FIRST_VERSION = '{"pid": PID, "url": "http://127.0.0.1:9"}'
OLDER_VERSION = '{"pid": PID, "url": "http://127.0.0.1:9", "token": "t", "version": "0.0.7"}'


@pytest.mark.parametrize("endpoint", [None, "", "garbage", "[1]", FIRST_VERSION, OLDER_VERSION])
def test_stop_ends_an_emulator_of_any_version(
    home: Path, start_other: Start, endpoint: str | None
) -> None:
    process = start_other(endpoint)
    result = CliRunner().invoke(app, ["stop"])
    assert (result.exit_code, result.stdout) == (0, "stopped\n")
    assert process.wait(60) == -15
    assert not launch.is_running(home)


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        (FIRST_VERSION, "is an older version and does not answer"),
        (OLDER_VERSION, "is version 0.0.7 and does not answer"),
        ("garbage", "its endpoint.json cannot be read"),
    ],
)
def test_a_call_names_the_version_and_the_command_that_restarts_it(
    home: Path, start_other: Start, endpoint: str, message: str
) -> None:
    start_other(endpoint)
    result = CliRunner().invoke(app, ["resources", "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "drumline emulator stop" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    if endpoint != "garbage":
        with pytest.raises(launch.EmulatorError, match="drumline emulator stop"):
            launch.ensure_running(home)


def test_a_start_replaces_an_emulator_whose_endpoint_file_cannot_be_read(
    home: Path, start_other: Start
) -> None:
    other = start_other("garbage")
    try:
        launch.ensure_running(home)
        assert other.wait(60) == -15
        saved = json.loads((home / launch.ENDPOINT).read_text())
        assert saved["version"] == __version__
        assert saved["pid"] != other.pid
        assert launch.version_warning(home) == ""
        _assert_the_version_is_named(home, saved)
    finally:
        launch.stop(home)


def _assert_the_version_is_named(home: Path, saved: dict[str, object]) -> None:
    """Another version of this program still calls the emulator, and names both versions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "__version__", "9.9.9")
        result = CliRunner().invoke(app, ["status", "--json"])
    assert json.loads(result.stdout)["running"] is True
    assert result.stderr == (
        f"the running emulator (process {saved['pid']}) is version {__version__}, this command is "
        "9.9.9; to restart it, run drumline emulator stop, then drumline emulator start\n"
    )
    assert os.path.samefile(home, json.loads(result.stdout)["home"])
