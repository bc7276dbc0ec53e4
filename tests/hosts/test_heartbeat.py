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
    monkeypatch.setattr(pulse, "_written_at", float("-inf"))
    monkeypatch.setattr("atexit.register", lambda _: None)
    return path


def read(file: Path) -> dict[str, object]:
    value = json.loads(file.read_text())
    assert isinstance(value, dict)
    return value


def test_numbers_of_all_types_are_reported_as_numbers(file: Path) -> None:
    numpy = pytest.importorskip("numpy")
    heartbeat(step=numpy.int32(7), loss=numpy.float32(0.5), lr=float("nan"), phase="warm")
    written = read(file)
    assert isinstance(written.pop("time"), float)
    assert written == {"step": 7, "loss": 0.5, "lr": "nan", "phase": "warm"}


def test_a_fast_program_writes_at_most_ten_times_a_second_and_its_last_report(
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


def test_values_missing_from_a_report_keep_their_last_value(file: Path) -> None:
    for step in range(298, 301):
        heartbeat(step=step, total=300, mfu=0.4, checkpoint=step)
    heartbeat(mfu=None, result="97.1 %")
    flush()
    written = read(file)
    del written["time"]
    assert written == {"step": 300, "total": 300, "mfu": None, "checkpoint": 300, "resumed": 298,
                    "result": "97.1 %"}  # fmt: skip


def test_every_report_has_the_checkpoint_that_the_program_resumed_from(file: Path) -> None:
    heartbeat(step=150, checkpoint=150)
    heartbeat(step=163, checkpoint=160)
    flush()
    written = read(file)
    assert (written["step"], written["checkpoint"], written["resumed"]) == (163, 160, 150)


def test_a_start_without_a_checkpoint_is_a_start_from_0(file: Path) -> None:
    heartbeat(step=1, checkpoint=None)
    assert read(file)["resumed"] == 0


def test_without_checkpoints_the_report_has_no_checkpoint(file: Path) -> None:
    heartbeat(step=1)
    assert "resumed" not in read(file)


def test_heartbeat_is_part_of_drumline_and_cheap_to_import(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    code = (
        "import sys, drumline\n"
        "assert not {'json', 'jax', 'numpy', 'contextlib'} & (set(sys.modules) - started)\n"
        "from drumline.heartbeat import heartbeat\n"
        "drumline.heartbeat(step=7, loss=0.5)\n"
        "import drumline.heartbeat as beat\n"
        "assert beat is drumline.heartbeat is heartbeat\n"
    )
    code = "import sys, typing\nstarted = set(sys.modules)\n" + code
    subprocess.run([sys.executable, "-c", code], env={"DRUMLINE_HEARTBEAT": str(path)}, check=True)
    assert read(path)["step"] == 7


def test_without_an_agent_heartbeat_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRUMLINE_HEARTBEAT", raising=False)
    heartbeat(step=1, loss=object())


def test_a_disk_that_cannot_be_written_does_not_end_the_program(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRUMLINE_HEARTBEAT", str(file / "no" / "such" / "folder"))
    heartbeat(step=1)
