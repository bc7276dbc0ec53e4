"""The agent's logs, its release of chips, and the files it accepts."""

import base64
import errno
import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from drumline.hosts.agent import code as agent_code
from drumline.hosts.agent.files import read_json
from drumline.hosts.agent.log import read_log
from drumline.hosts.agent.processes import is_alive
from drumline.hosts.agent.wire import AttemptStatus, archive_name, large_file_name
from drumline.hosts.code import Archive, pack
from drumline.hosts.remote import validate
from drumline.hosts.values import attempt_folder, code_files
from tests.cases import sampled
from tests.hosts.agent.machine import Machine, parent_of, wait_for


def test_watch_sends_new_output_from_any_offset(machine: Machine) -> None:
    machine.put("printf 'abc'; while [ ! -e go ]; do sleep 0.02; done; printf 'def'; exit 3")
    machine.start()
    wait_for(lambda: machine.log() == "abc", "the first part")
    words = machine.words("watch", attempt_folder(machine.what), "1")
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=machine.environment) as watch:
        assert watch.stdout is not None
        seen, text = [], b""
        for line in watch.stdout:
            news = json.loads(line)
            seen.append(news)
            if "log" in news:
                assert news["offset"] == 1 + len(text)
                text += base64.b64decode(news["log"])
                if text == b"bc":
                    touched = time.monotonic()
                    machine.file("go").touch()
            if news.get("status", {}).get("state") == "exited":
                break
        assert time.monotonic() - touched < 20
        watch.kill()
    assert text == b"bcdef"
    assert seen[-1]["status"]["exit_code"] == 3


def test_a_log_that_is_read_later_has_the_times_of_writing(machine: Machine) -> None:
    began = time.time()
    machine.finish("echo first; sleep 1.5; echo second")
    ended = time.time()
    wait_for(lambda: time.time() > ended + 0.5, "later")
    words = machine.words("watch", attempt_folder(machine.what), "0")
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=machine.environment) as watching:
        assert watching.stdout is not None
        at: dict[bytes, float] = {}
        while b"second" not in b"".join(at):
            line = json.loads(watching.stdout.readline())
            if "log" in line:
                at[base64.b64decode(line["log"])] = line["at"]
        watching.kill()
    (first, then), (second, later) = at.items()
    assert (first, second) == (b"first\n", b"second\n")
    assert began <= then + 0.01
    assert then + 1 < later <= ended


def test_prepare_ends_an_earlier_attempt_and_frees_the_chip(machine: Machine) -> None:
    devices = machine.home / "dev"
    (devices / "vfio").mkdir(parents=True)
    (devices / "vfio" / "0").touch()
    (devices / "libtpu_lockfile").touch()
    machine.environment["DRUMLINE_DEV"] = str(devices)
    machine.put("exec 5<>$DRUMLINE_DEV/vfio/0; echo up; sleep 60")
    machine.start()
    wait_for(lambda: "up" in machine.log(), "it holds the chip")
    leader = machine.leader()
    machine.put("true", attempt=2)
    expected = {"trouble": "", "have_code": True, "missing": [], "identity": {}}
    assert machine.prepared == expected
    assert not is_alive(leader)
    assert not (devices / "libtpu_lockfile").exists()


def test_prepare_reports_a_chip_that_stays_busy(machine: Machine) -> None:
    devices = machine.home / "dev"
    (devices / "vfio" / "0").mkdir(parents=True)
    machine.environment["DRUMLINE_DEV"] = str(devices)
    machine.put("true")
    assert machine.prepared["trouble"].startswith("open(/dev/vfio/0): ")


def test_a_program_from_before_a_restart_is_lost(machine: Machine) -> None:
    machine.put("sleep 60")
    machine.start()
    os.kill(parent_of(machine.leader()), signal.SIGKILL)
    os.kill(machine.leader(), signal.SIGKILL)
    started = machine.folder / "started.json"
    started.write_text(json.dumps({**json.loads(started.read_text()), "boot": "another"}))
    wait_for(lambda: not is_alive(machine.leader()), "it is gone")
    assert machine.attempt("status")["state"] == "lost"


@pytest.mark.parametrize("name", ["../../etc", "/etc", "jobs/../../x"])
def test_names_outside_the_agents_folder_are_rejected(machine: Machine, name: str) -> None:
    done = subprocess.run(
        machine.words("status", name),
        capture_output=True,
        env=machine.environment,
        check=False,
    )
    assert done.returncode != 0


def archive_of(folder: Path, *members: tarfile.TarInfo) -> tuple[bytes, str]:
    file = folder / "made.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    data = file.read_bytes()
    return data, hashlib.sha256(data).hexdigest()


def receive(machine: Machine, name: str, data: bytes, size: int | None = None) -> int:
    return subprocess.run(
        machine.words("receive", name, str(len(data) if size is None else size)),
        input=data,
        env=machine.environment,
        capture_output=True,
        check=False,
    ).returncode


def unpack(machine: Machine, sha: str, *large: str, work: str = "work/j/s") -> tuple[str, ...]:
    code = {"archive": sha, "large_files": large, "work": work}
    answer = machine.call("unpack", sent=code)
    assert answer["have_code"] == (not answer["missing"])
    return tuple(answer["missing"])


def test_an_incomplete_archive_leaves_no_file(machine: Machine, tmp_path: Path) -> None:
    member = tarfile.TarInfo("train.py")
    member.size = 1000
    data, sha = archive_of(tmp_path, member)
    assert receive(machine, archive_name(sha), data[:-10], len(data)) != 0
    assert unpack(machine, sha) == (archive_name(sha),)
    assert not list(machine.home.rglob("*.draft"))
    assert receive(machine, archive_name(sha), data) == 0
    assert unpack(machine, sha) == ()
    assert (machine.home / ".drumline/work/j/s/train.py").stat().st_size == 1000


BIG = b"0123456789abcdef" * 100_000


@pytest.fixture
def code(machine: Machine, tmp_path: Path) -> Archive:
    """Return an archive with a large file, both of which the machine has received."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("x = 1")
    (folder / "data.bin").write_bytes(BIG)
    os.utime(folder / "data.bin", (1_700_000_000, 1_700_000_000))
    archive = pack(folder, tmp_path / "archives")
    for path in code_files(archive.path, archive.large_files):
        assert receive(machine, path.name, path.read_bytes()) == 0
    return archive


def test_each_job_gets_a_copy_of_a_large_file(machine: Machine, code: Archive) -> None:
    for job in ("a", "b"):
        assert unpack(machine, code.sha256, *code.large_files, work=f"work/{job}/s") == ()
        data = machine.home / ".drumline/work" / job / "s/data.bin"
        assert (data.read_bytes(), data.stat().st_mtime) == (BIG, 1_700_000_000)
        data.write_bytes(b"changed by its job")
    kept = list((machine.home / ".drumline/code").iterdir())
    assert len(kept) == 2
    assert {path.stat().st_mode & 0o077 for path in [*kept, kept[0].parent]} == {0}


@pytest.mark.parametrize("damage", ["another", "cut short", "not compressed", "removed"])
def test_a_damaged_file_is_not_unpacked_but_requested_again(
    machine: Machine, code: Archive, damage: str
) -> None:
    (large,) = code.large_files
    kept = machine.home / ".drumline/code" / large_file_name(large)
    good = kept.read_bytes()
    kept.unlink()
    if damage != "removed":
        other = {"another": gzip.compress(b"x"), "cut short": good[:-9], "not compressed": BIG}
        kept.write_bytes(other[damage])
    assert unpack(machine, code.sha256, large) == (large_file_name(large),)
    assert not kept.exists()
    assert not (machine.home / ".drumline/work/j/s").exists()
    assert receive(machine, large_file_name(large), good) == 0
    assert unpack(machine, code.sha256, large) == ()


def test_a_damaged_archive_is_requested_again(machine: Machine, code: Archive) -> None:
    kept = machine.home / ".drumline/code" / code.path.name
    kept.write_bytes(kept.read_bytes()[:-20])
    assert unpack(machine, code.sha256, *code.large_files) == (code.path.name,)


def test_old_files_and_those_beyond_the_limit_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_code, "FOLDER", str(tmp_path))
    now = time.time()
    for name, age in {"new": 0.0, "recent": 3000.0, "older": 6000.0, "old": 8 * 86400.0}.items():
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (now - age, now - age))

    def kept() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    agent_code.prune(1000)
    assert kept() == {"new", "recent", "older"}
    agent_code.prune(250)
    assert kept() == {"new", "recent"}
    agent_code.prune(0)
    assert kept() == {"new"}, "it is in use"


def test_a_full_disk_is_reported_and_empties_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_code, "FOLDER", str(tmp_path))
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(SystemExit, match="the disk of the host is full"):  # noqa: SIM117
        with agent_code.explain_full_disk():
            raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "link"), [("../evil", ""), ("/evil", ""), ("a", "../../evil")])
def test_an_archive_with_paths_outside_the_working_copy_is_rejected(
    machine: Machine, tmp_path: Path, name: str, link: str
) -> None:
    member = tarfile.TarInfo(name)
    if link:
        member.type, member.linkname = tarfile.SYMTYPE, link
    data, sha = archive_of(tmp_path, member)
    assert receive(machine, archive_name(sha), data) == 0
    with pytest.raises(AssertionError, match="points outside the working copy"):
        unpack(machine, sha)
    assert not list(machine.home.rglob("evil"))
    assert not list(machine.home.rglob("*.draft"))


def test_a_named_pipe_in_place_of_a_heartbeat_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "heartbeat.json")
    assert read_json(str(tmp_path), "heartbeat.json") is None
    (tmp_path / "folder.json").mkdir()
    assert read_json(str(tmp_path), "folder.json") is None


DEEP = "[" * 100_000


def put_in_place(path: Path, kind: str) -> None:
    """Replace a file by something that a reader does not expect."""
    if path.exists():
        path.unlink()
    match kind:
        case "deep":
            path.write_text(DEEP)
        case "deep object":
            path.write_text('{"a":' * 100_000)
        case "nested below the limit":
            path.write_text('{"step": 1, "loss": ' + "[" * 300 + "]" * 300 + "}")
        case "folder":
            path.mkdir()
            (path / "file").touch()
        case "named pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 33)
        case "wrong types":
            path.write_text('{"exit_code": "x", "at": [], "pid": {}, "ended_at": {}, "tail": 7}')
        case "not an object":
            path.write_text("[1]")
        case "not text":
            path.write_bytes(b"\xff\xfe{}")


KINDS = (
    "deep", "deep object", "nested below the limit", "folder", "named pipe", "device", "huge",
    "wrong types", "not an object", "not text",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_reading_something_else_than_a_file_neither_blocks_nor_leaks(
    tmp_path: Path, kind: str
) -> None:
    put_in_place(tmp_path / "heartbeat.json", kind)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read_json(str(tmp_path), "heartbeat.json")
        read_log(str(tmp_path), 0, 100)
    assert len(os.listdir("/proc/self/fd")) == before


READ_FILES = ("heartbeat.json", "burnin.json", "error.json", "times", "failed")
AGENT_FILES = ("exit.json", "log", "waiting.lock", "adopted.json")


def each_kind_once(names: Sequence[str]) -> list[Any]:
    """Return all names with all kinds. `make test` runs each kind with one of the names."""
    sample = [(names[index % len(names)], kind) for index, kind in enumerate(KINDS)]
    return sampled(product(names, KINDS), sample)


@pytest.mark.parametrize(("name", "kind"), each_kind_once(READ_FILES))
def test_files_of_a_program_do_not_end_the_agent(machine: Machine, name: str, kind: str) -> None:
    machine.put("echo up; while [ ! -e go ]; do sleep 0.05; done")
    machine.attempt("start", sent={"coordinator": "", "before": "true; "})
    wait_for(lambda: "up" in machine.log(), "the program is up")
    put_in_place(machine.folder / name, kind)
    status = validate(AttemptStatus, machine.attempt("status"))
    assert status.state == "running"
    machine.file("go").touch()
    assert machine.ended()["exit_code"] == 0


@pytest.mark.parametrize(("name", "kind"), each_kind_once(AGENT_FILES))
def test_a_program_that_replaces_the_agents_files_is_still_stopped(
    machine: Machine, name: str, kind: str
) -> None:
    machine.put("echo up; sleep 600")
    machine.start()
    wait_for(lambda: "up" in machine.log(), "the program is up")
    leader = machine.leader()
    put_in_place(machine.folder / name, kind)
    validate(AttemptStatus, machine.attempt("status"))
    ended = validate(AttemptStatus, machine.attempt("stop", "1"))
    assert ended.state == "exited"
    assert not is_alive(leader)


def test_a_report_has_a_bounded_size(machine: Machine) -> None:
    machine.put("echo up; sleep 600")
    machine.start()
    report = {f"metric-{n}": n for n in range(5000)} | {"step": 7, "text": "x" * 100_000}
    report |= {"n" * 1000: 1, "list": list(range(10_000))}
    (machine.folder / "heartbeat.json").write_text(json.dumps(report))
    status = machine.attempt("status")
    assert len(json.dumps(status)) < 100_000
    assert status["heartbeat"]["step"] == 7
    machine.attempt("stop", "1")
