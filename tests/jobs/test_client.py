"""The client: it finds or starts a server, and handles its loss."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.cloud.emulator import processes
from drumline.errors import UserError
from drumline.hosts.ssh import ensure_key_pair
from drumline.jobs import Client, Refused
from drumline.jobs import connection as connection_module
from drumline.jobs.client import job_id
from drumline.jobs.connection import NoServer, ServerConnection, home_folder
from drumline.jobs.folders import Folders
from drumline.jobs.server.process import remove_socket
from tests.jobs.installation import temporary_installation

# A server in small: takes the lock or leaves, writes down that it started and with what, answers
# /status and /jobs, stops on /stop. `DRUMLINE_TEST_*` make it slow, broken, or rude, or have it
# keep the lock after its stop until somebody else has found it taken.
SERVER = r"""
import fcntl, json, os, signal, socket, socketserver, sys, threading, time
from http.server import BaseHTTPRequestHandler
home = os.environ["DRUMLINE_HOME"]
if "DRUMLINE_TEST_BROKEN" in os.environ:
    print("starting"); sys.exit("config.yaml: cloud: 'gogle' is not known")
facts = {"pid": os.getpid(), "environ": dict(os.environ), "cwd": os.getcwd()}
with open(home + "/starts", "a") as starts: starts.write(json.dumps(facts) + "\n")
lock = open(home + "/server.lock", "a")
try: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError: sys.exit(0)
time.sleep(float(os.environ.get("DRUMLINE_TEST_SLOW", 0)))
def leave():
    while "DRUMLINE_TEST_LINGERS" in os.environ and not came_and_went(): time.sleep(0.01)
    os._exit(0)
continued = threading.Event()
signal.signal(signal.SIGCONT, lambda *_: continued.set())
def pause(): os.kill(os.getpid(), signal.SIGSTOP); continued.wait()
def came_and_went():
    later = [json.loads(line)["pid"] for line in open(home + "/starts")][1:]
    return bool(later) and not os.path.exists("/proc/%d" % later[0])
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, value):
        content = json.dumps(value).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(content)))
        self.send_header("Drumline-Version", "9"); self.send_header("Drumline-Strays", "1")
        self.end_headers(); self.wfile.write(content)
    def parse_request(self):
        valid = super().parse_request()
        if "DRUMLINE_TEST_CALLS" in os.environ:
            with open(home + "/calls", "a") as calls: calls.write(f"{self.command} {self.path}\n")
        return valid
    def do_GET(self):
        if self.path.endswith("/logs"):
            self.send_response(200); self.send_header("Transfer-Encoding", "chunked")
            self.end_headers(); self.wfile.write(b"6\r\nline 1\r\n")
            if "DRUMLINE_TEST_PAUSES" not in os.environ: os._exit(9)
            pause()
            self.wfile.write(b"6\r\nline 2\r\n0\r\n\r\n"); return
        if self.path == "/jobs": time.sleep(float(os.environ.get("DRUMLINE_TEST_LATE", 0)))
        self.answer({"pid": os.getpid(), "version": "9"} if self.path == "/status" else [])
    def do_POST(self):
        if self.path == "/stop":
            os.unlink(home + "/server.sock"); self.answer({})  # whoever calls next finds none
            threading.Timer(float(os.environ.get("DRUMLINE_TEST_SLOW", 0)), leave).start()
        elif "DRUMLINE_TEST_PAUSES" in os.environ:
            pause(); self.answer({})
        else: os._exit(9)
    def address_string(self): return "unix"
if os.path.exists(home + "/server.sock"): os.unlink(home + "/server.sock")
class Server(socketserver.ThreadingUnixStreamServer): daemon_threads = True
Server(home + "/server.sock", Handler).serve_forever()
"""


@pytest.fixture
def home(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    script = folder.parent / f"{folder.name}.py"
    script.write_text(SERVER)
    monkeypatch.setattr(connection_module, "SERVER_COMMAND", (sys.executable, str(script)))
    yield folder
    # One that was given up before it came to write down that it started, too.
    processes.kill_all(lambda: processes.find_by_environment(f"DRUMLINE_HOME={folder}"))


def starts(home: Path) -> list[dict[str, Any]]:
    path = home / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pause(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: ") T" in Path(f"/proc/{pid}/stat").read_text())


def gone(pid: int) -> bool:
    """Return True if a process has ended; a child may remain as a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_the_first_call_starts_the_server_and_the_second_finds_it(home: Path) -> None:
    assert Client(home).list() == []
    assert Client(home).list(all=True) == []
    [start] = starts(home)
    assert start["cwd"] == str(home)  # not the user's folder, whose modules would be imported
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "server.log").stat().st_mode) == 0o600


def test_a_new_home_is_for_its_owner_alone(home: Path) -> None:
    Client(home / "deep" / "er").list()
    assert stat.S_IMODE((home / "deep" / "er").stat().st_mode) == 0o700
    os.kill(starts(home / "deep" / "er")[0]["pid"], signal.SIGKILL)


def test_commands_at_once_get_one_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_SLOW", "0.3")
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(Client(home).list())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[]] * 4
    # One that finds the lock taken leaves, though perhaps later than all have their answer.
    wait_until(lambda: len([one for one in starts(home) if not gone(one["pid"])]) == 1)


def test_the_socket_of_a_killed_server_is_no_hindrance(home: Path) -> None:
    Client(home).list()
    first = starts(home)[0]["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: gone(first))
    assert (home / "server.sock").exists()
    assert Client(home).list() == []
    assert starts(home)[-1]["pid"] != first


def test_a_server_on_its_way_out_is_replaced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens no more and still holds the lock: the first that we start finds it taken."""
    monkeypatch.setenv("DRUMLINE_TEST_LINGERS", "1")
    Client(home).list()
    ServerConnection(home).call_running("POST", "/stop")
    assert Client(home).list() == []
    assert len(starts(home)) >= 3


def test_a_server_that_was_stopped_has_ended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens no more, and writes for a while yet: a copy made now would be a torn one."""
    monkeypatch.setenv("DRUMLINE_TEST_SLOW", "0.5")
    Client(home).list()
    assert Client(home).stop_server()
    assert gone(starts(home)[0]["pid"])
    assert not Client(home / "none").stop_server()


def test_a_server_that_dies_at_its_start_leaves_its_output(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "server.log").write_text("yesterday: all was well\n")
    monkeypatch.setenv("DRUMLINE_TEST_BROKEN", "1")
    with pytest.raises(NoServer, match=r"config\.yaml: cloud: 'gogle' is not known") as refused:
        Client(home).list()
    assert len(str(refused.value).splitlines()) == 1


def test_a_server_that_never_listens_is_given_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "START_SECONDS", 0.2)
    monkeypatch.setenv("DRUMLINE_TEST_SLOW", "30")
    with pytest.raises(NoServer, match="no server is listening after"):
        Client(home).list()


def test_without_autostart_no_server_is_started(home: Path) -> None:
    client = Client(home, autostart=False)
    with pytest.raises(NoServer, match="no server runs in"):
        client.list()
    assert client.server_status() is None
    assert not list(home.iterdir())


def test_the_server_does_not_inherit_variables_and_files_of_the_shell(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/login.json")
    Client(home).list()
    [start] = starts(home)
    assert "s3cret" not in json.dumps(start["environ"])
    assert start["environ"]["GOOGLE_APPLICATION_CREDENTIALS"] == "/login.json"
    assert start["environ"]["PATH"] == os.environ["PATH"]


def test_a_paused_server_is_reported_and_answers_after_it_continues(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "SILENCE_SECONDS", 0.2)
    client = Client(home)
    client.list()
    pid = starts(home)[0]["pid"]
    pause(pid)
    try:
        for call in (client.list, lambda: client.wait("1"), lambda: list(client.logs("1"))):
            with pytest.raises(Refused, match=rf"process {pid}\) is paused.*kill -CONT {pid}$"):
                call()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert client.list() == []


def test_a_paused_server_gets_no_request_that_it_would_execute_later(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "SILENCE_SECONDS", 0.2)
    monkeypatch.setenv("DRUMLINE_TEST_CALLS", "1")
    client = Client(home)
    client.list()
    pid = starts(home)[0]["pid"]
    pause(pid)
    try:
        with pytest.raises(Refused, match=rf"kill -CONT {pid}$"):
            client.cancel(4)
        with pytest.raises(Refused, match=rf"kill -CONT {pid}$"):
            list(client.exec_frames(4, "true"))
    finally:
        os.kill(pid, signal.SIGCONT)
    client.list()
    assert (home / "calls").read_text().split() == ["GET", "/jobs", "GET", "/jobs"]


def test_a_server_paused_after_a_request_executes_it_later(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "SILENCE_SECONDS", 0.2)
    monkeypatch.setenv("DRUMLINE_TEST_PAUSES", "1")
    client = Client(home)
    client.list()
    pid = starts(home)[0]["pid"]
    try:
        with pytest.raises(Refused, match=rf"kill -CONT {pid}, and it executes the request"):
            client.cancel(4)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_server_paused_in_the_middle_of_logs_is_reported_and_nothing_is_lost(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "SILENCE_SECONDS", 0.2)
    monkeypatch.setenv("DRUMLINE_TEST_PAUSES", "1")
    warnings: list[str] = []

    def continue_server(message: str) -> None:
        warnings.append(message)
        if "paused" in message:
            os.kill(starts(home)[0]["pid"], signal.SIGCONT)

    assert b"".join(Client(home, warn=continue_server).logs(4)) == b"line 1line 2"
    pid = starts(home)[0]["pid"]
    assert [one for one in warnings if "paused" in one] == [
        f"the server (process {pid}) is paused and answers no call;"
        f" continue it with: kill -CONT {pid}; waiting"
    ]


def test_a_slow_server_is_reported_once_and_its_answer_is_awaited(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "SILENCE_SECONDS", 0.1)
    monkeypatch.setenv("DRUMLINE_TEST_LATE", "0.5")
    warnings: list[str] = []
    assert Client(home, warn=warnings.append).list() == []
    assert [one for one in warnings if "not answered" in one] == [
        f"the server has not answered for 0 s, waiting; its log: {home / 'server.log'}"
    ]


def test_an_unacknowledged_change_is_not_repeated(home: Path) -> None:
    with pytest.raises(Refused, match="drumline list shows whether the request was executed"):
        Client(home).cancel(4)
    assert len(starts(home)) == 1


def test_logs_that_break_off_are_no_end_of_logs(home: Path) -> None:
    pieces = Client(home).logs(4)
    assert next(pieces) == b"line 1"
    with pytest.raises(Refused, match="in the middle of the logs"):
        next(pieces)


def test_a_server_that_already_runs_is_announced_once(home: Path) -> None:
    warnings: list[str] = []
    Client(home, warn=warnings.append).list()
    assert warnings == []
    client = Client(home, warn=warnings.append)
    client.list()
    client.list()
    strays, version = warnings
    assert "1 slice of a lost job database still runs" in strays
    assert "drumline server strays" in strays
    assert "version 9" in version


@pytest.mark.parametrize("typed", [12, "12", "000012", " 12 "])
def test_an_id_may_be_typed_short(typed: str | int) -> None:
    assert job_id(typed) == "000012"


@pytest.mark.parametrize("typed", ["0", " 00 ", 0, -1, "9" * 5000])
def test_an_invalid_id_is_rejected_before_any_request(typed: str | int) -> None:
    with pytest.raises(Refused, match="is not a job id"):
        job_id(typed)


@pytest.mark.parametrize("typed", ["x", "-1", "1.5", "../1", "١٢", "llama 1b"])
def test_all_but_a_number_is_a_name(typed: str) -> None:
    assert job_id(typed) is None


@pytest.mark.parametrize("typed", ["", "  ", "1\n/jobs", "a\udcff", "x" * 2000])
def test_a_name_that_no_job_can_have_is_rejected_before_any_request(
    tmp_path: Path, typed: str
) -> None:
    with pytest.raises(Refused, match="is no id or name of a job"):
        Client(tmp_path, autostart=False).show(typed)


def test_a_path_too_long_for_a_socket_is_a_sentence() -> None:
    with pytest.raises(Refused, match="set DRUMLINE_HOME to a shorter one"):
        Client(Path("/tmp") / ("x" * 100))  # noqa: S108


def test_the_home_folder_is_named_by_the_environment() -> None:
    assert home_folder({"DRUMLINE_HOME": "/srv/d"}) == Path("/srv/d")
    assert home_folder({}) == Path.home() / ".drumline"


def test_importing_the_client_loads_the_standard_library_alone() -> None:
    script = (
        "import sys; from drumline.jobs import Client\n"
        "heavy = {'typer', 'httpx', 'asyncssh', 'google', 'pydantic', 'starlette', 'yaml'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_the_public_half_of_the_key_is_that_of_the_key_there_is(tmp_path: Path) -> None:
    import asyncssh

    folders = Folders(tmp_path)
    folders.key.parent.mkdir(parents=True, exist_ok=True)
    first = ensure_key_pair(folders.key)
    assert ensure_key_pair(folders.key) == first
    other = asyncssh.generate_private_key("ssh-ed25519", comment="another")
    folders.key.write_bytes(other.export_private_key())
    assert ensure_key_pair(folders.key) == other.export_public_key().decode().strip() != first
    for file in folders.key.parent.iterdir():
        assert file.stat().st_mode & 0o077 == 0 or file == folders.key


def test_a_lost_key_is_not_replaced_while_slices_know_it(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    first = ensure_key_pair(folders.key, [])
    folders.key.unlink()
    for slices in (["dl-me-000001-1"], None):
        with pytest.raises(UserError, match="id_ed25519 is missing") as caught:
            ensure_key_pair(folders.key, slices)
        assert "ssh-keygen" in str(caught.value)
        assert not folders.key.exists()
    assert ensure_key_pair(folders.key, []) != first
    folders.key.unlink()
    folders.key.with_suffix(".pub").unlink()
    with pytest.raises(UserError, match="dl-me-000001-1 accept no other key"):
        ensure_key_pair(folders.key, ["dl-me-000001-1"])


def test_a_server_without_its_key_is_an_error_while_a_job_has_a_slice(tmp_path: Path) -> None:
    with temporary_installation(tmp_path) as installation:
        job = installation.create("sleep 600", accelerator="v4-8")
        installation.reaches(job, "RUNNING")
        installation.client.stop_server()
        key = installation.home / "ssh" / "id_ed25519"
        content = key.read_bytes()
        key.unlink()
        with pytest.raises(Exception, match="id_ed25519 is missing"):
            installation.client.show(job)
        assert not key.exists()
        key.write_bytes(content)
        key.chmod(0o600)
        assert installation.status(job) in {"RUNNING", "STARTING", "RECOVERING"}
        installation.client.delete(job)
        installation.cloud_is_empty()


def test_a_server_does_not_remove_the_socket_of_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    path.touch()
    own = path.stat().st_ino
    path.rename(tmp_path / "old")
    path.touch()
    remove_socket(path, own)
    assert path.exists()
    remove_socket(path, path.stat().st_ino)
    assert not path.exists()
