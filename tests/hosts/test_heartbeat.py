import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.heartbeat import flush, heartbeat

pulse = sys.modules["drumline.heartbeat"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "heartbeat.json"
    monkeypatch.setenv("DRUMLINE_HEARTBEAT", str(path))
    monkeypatch.setattr(pulse, "_latest", None)
    monkeypatch.setattr(pulse, "_written", float("-inf"))
    monkeypatch.setattr("atexit.register", lambda _: None)
    return path


def read(file: Path) -> dict[str, object]:
    value = json.loads(file.read_text())
    assert isinstance(value, dict)
    return value


def test_numbers_of_all_kinds_are_told_as_numbers(file: Path) -> None:
    numpy = pytest.importorskip("numpy")
    heartbeat(step=numpy.int32(7), loss=numpy.float32(0.5), lr=float("nan"), phase="warm")
    said = read(file)
    assert isinstance(said.pop("time"), float)
    assert said == {"step": 7, "loss": 0.5, "lr": "nan", "phase": "warm"}


def test_a_fast_program_writes_at_most_ten_times_a_second_and_its_last_word(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    writes = []
    replace = os.replace

    def counted(source: str, target: str) -> None:
        writes.append(target)
        replace(source, target)

    monkeypatch.setattr("os.replace", counted)
    for step in range(1000):
        now[0] += 0.001
        heartbeat(step=step)
    assert len(writes) <= 11
    flush()
    assert read(file)["step"] == 999


def test_the_last_report_is_written_when_the_program_ends(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    code = "from drumline.heartbeat import heartbeat\nfor n in range(50): heartbeat(step=n)"
    subprocess.run([sys.executable, "-c", code], env={"DRUMLINE_HEARTBEAT": str(path)}, check=True)
    assert read(path)["step"] == 49
    assert list(tmp_path.iterdir()) == [path]


def test_without_an_agent_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRUMLINE_HEARTBEAT", raising=False)
    heartbeat(step=1, loss=object())


def test_a_disk_that_cannot_be_written_does_not_end_the_program(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRUMLINE_HEARTBEAT", str(file / "no" / "such" / "folder"))
    heartbeat(step=1)
