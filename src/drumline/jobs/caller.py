"""Calls the server by HTTP over its Unix socket, and starts it where none listens.

Standard library only, because every command pays for what is imported here.
"""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from drumline import __version__
from drumline.errors import UserError
from drumline.jobs.http import HttpAnswer, HttpConnection

if TYPE_CHECKING:
    from subprocess import Popen  # imported on use: few commands start anything

Json = dict[str, Any]

SERVER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "drumline.jobs.server")
# A cold start of the server imports its web and SSH libraries and may start the emulator: 2 s, or
# many on a busy machine. A server that died is noticed at once, so a long timeout costs nothing.
START_SECONDS = 60.0
# Far above any healthy answer: a busy disk or a slow bucket lookup must not look dead.
ANSWER_SECONDS = 60.0
# Less than a new database and a log need.
LEAST_ROOM = 1 << 18
# Bytes of a command's input in flight to the hosts: enough to keep a fast link busy.
WINDOW = 1 << 20
# sun_path holds 108 bytes on Linux and 104 on macOS, including the final zero.
LONGEST_SOCKET = 103

# Headers about the server itself, in every answer.
VERSION = "Drumline-Version"
STRAYS = "Drumline-Strays"

# The server outlives the command, and what it starts (an emulated host, say) inherits from it. So
# it gets the variables it needs, and not every token exported in the shell of the first command.
_KEPT = (
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|(HTTPS?|NO)_PROXY|(https?|no)_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
    r"|NO_GCE_CHECK|STORAGE_EMULATOR_HOST"
    r"|(DRUMLINE_|GOOGLE_|GCE_|CLOUDSDK_|LC_|XDG_|PYTHON|COVERAGE_).*"
)


class Refused(UserError):
    """The request cannot be fulfilled; the text says why and what to do."""


class NoServer(Refused):
    """No server runs here, and none was or could be started."""


class Leaving(ConnectionRefusedError):
    """The server is exiting and did nothing; the call may be sent to the next server."""


class Dropped(Exception):
    """The server went away before the end of its answer."""


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the state: `$DRUMLINE_HOME`, or `~/.drumline`."""
    named = environ.get("DRUMLINE_HOME")
    return Path(named).expanduser().absolute() if named else Path.home() / ".drumline"


class Caller:
    """The server of a home folder, started by the first call that needs it."""

    def __init__(
        self,
        home: Path | None = None,
        autostart: bool = True,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`warn` gets a sentence when the running server is of another version than this client."""
        self.home = home_folder() if home is None else Path(home).absolute()
        self.socket = self.home / "server.sock"
        self._autostart = autostart
        self._warn = warn
        self._server: tuple[str | None, int] = __version__, 0
        self.withheld: frozenset[str] = frozenset()
        if len(os.fsencode(self.socket)) > LONGEST_SOCKET:
            raise Refused(
                f"{self.home} is too long a path for a Unix socket (at most "
                f"{LONGEST_SOCKET - len('/server.sock')} bytes); set DRUMLINE_HOME to a shorter one"
            )

    @property
    def log(self) -> Path:
        """The log of the server."""
        return self.home / "server.log"

    def ask(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        timeout: float | None = ANSWER_SECONDS,
    ) -> Json:
        """Send a call, starting a server where none listens. Only reads are repeated."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                answer = self.once(method, path, body, timeout)
            except (ConnectionRefusedError, FileNotFoundError):
                self.start()
            except Dropped as gone:
                if method != "GET":
                    raise Refused(f"{gone}; drumline list shows whether it was done") from gone
            else:
                self._warn_of_server()
                return answer
            if time.monotonic() > deadline:
                raise NoServer(f"the server keeps going away; see {self.log}")

    def once(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        timeout: float | None = ANSWER_SECONDS,
    ) -> Json:
        """Send a call to a server that listens already."""
        connection = self._connect(timeout)
        try:
            answer: Json = json.loads(self._send(connection, method, path, body).read())
            return answer
        except TimeoutError as late:
            raise Refused(
                f"the server has not answered in {timeout:.0f} s; see {self.log}"
            ) from late
        except (ConnectionResetError, BrokenPipeError) as gone:
            raise Dropped("the server went away before it answered") from gone
        except json.JSONDecodeError as odd:
            raise Refused(f"the server's answer to {path} is not JSON; see {self.log}") from odd
        finally:
            connection.close()

    def exchange(self, path: str, body: Json, source: BinaryIO | None = None) -> Iterator[Json]:
        """Send a call with an answer of several objects, and yield each as it comes.

        `source` is sent until the answer ends, at most a window ahead of what the server has read;
        it need never end. To stop early, close this generator: the server sees the disconnect.
        """
        while True:
            try:
                connection = self._connect(None)
                break
            except (ConnectionRefusedError, FileNotFoundError):
                self.start()
        try:
            if source is None:
                answer, window = self._send(connection, "POST", path, body), _Window()
            else:
                answer, window = self._feed(connection, path, body, source)
            self._warn_of_server()
            rest = b""
            while piece := answer.piece():
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    frame: Json = json.loads(line)
                    if "taken" in frame:
                        window.open(int(frame["taken"]))
                    else:
                        yield frame
        except Leaving as gone:
            if source is not None:  # some of which may have been read
                raise Refused("the server was just leaving; try again") from gone
            connection.close()
            self.start()
            yield from self.exchange(path, body)
        except (ConnectionResetError, BrokenPipeError) as gone:
            raise Dropped("the server went away before all was told") from gone
        finally:
            connection.close()

    def _feed(
        self, connection: HttpConnection, path: str, body: Json, source: BinaryIO
    ) -> "tuple[HttpAnswer, _Window]":
        """Send a line of JSON and then `source`, while the answer is read."""
        from threading import Thread

        headers = {"Content-Type": "application/octet-stream", "Transfer-Encoding": "chunked"}
        connection.send("POST", path, headers)
        window = _Window()
        head = json.dumps(body).encode() + b"\n"
        # Not waited for: it may block on a pipe that nobody writes to.
        pouring = (head, source, connection.sock, window)
        Thread(target=_pour, args=pouring, daemon=True).start()
        return self._answer(connection, path), window

    def _send(
        self, connection: HttpConnection, method: str, path: str, body: Json | None = None
    ) -> HttpAnswer:
        """Send a call and return its answer; an error is raised with its sentence."""
        if body is None:
            connection.send(method, path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.send(method, path, headers, json.dumps(body).encode())
        return self._answer(connection, path)

    def _answer(self, connection: HttpConnection, path: str) -> HttpAnswer:
        answer = connection.answer()
        headers = answer.headers
        self._server = headers.get(VERSION.lower()), int(headers.get(STRAYS.lower(), 0))
        if answer.status < 400:
            return answer
        if answer.status == 503:
            raise Leaving("the server is leaving")
        try:
            sentence = str(json.loads(answer.read())["error"])
        except (ValueError, KeyError, TypeError):
            sentence = f"the server failed with {answer.status} at {path}; see {self.log}"
        raise Refused(sentence)

    def stream(self, path: str) -> Iterator[bytes]:
        """The answer in pieces, as it comes."""
        connection = self._connect(None)
        try:
            answer = self._send(connection, "GET", path)
            while piece := answer.piece():
                yield piece
        except (ConnectionResetError, BrokenPipeError) as gone:
            raise Dropped("the server went away in the middle of the logs") from gone
        finally:
            connection.close()

    def _warn_of_server(self) -> None:
        """Warn the user once about a server that was found running."""
        if self._warn is None:
            return
        warn, self._warn = self._warn, None
        running, strays = self._server
        if strays:
            slices = (
                "1 slice of a job database that was lost runs"
                if strays == 1
                else f"{strays} slices of a job database that was lost run"
            )
            warn(f"{slices} on and may cost; drumline server strays lists what to do")
        if running != __version__:
            other = f"version {running}" if running else "an older version"
            warn(
                f"the server that runs is {other}, this command is {__version__}; "
                "after drumline server stop, the next command starts the new one"
            )

    # Having a server

    def _connect(self, timeout: float | None) -> HttpConnection:
        try:
            return HttpConnection(str(self.socket), timeout)
        except PermissionError as closed:
            raise NoServer(f"{self.socket} belongs to another user") from closed

    def listens(self) -> bool:
        """Whether a server answers."""
        try:
            self._connect(ANSWER_SECONDS).close()
        except (ConnectionRefusedError, FileNotFoundError):
            return False  # never started, stopped, or killed with its socket file left behind
        return True

    def vacant(self) -> bool:
        """Whether no server has this home; one that no longer listens may still write to it."""
        import fcntl

        try:
            with open(self.home / "server.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
        return True

    def start(self) -> None:
        """Start a server and wait until one listens: ours, or that of a concurrent command."""
        if not self._autostart:
            raise NoServer(f"no server runs in {self.home}")
        self._make_home()
        deadline = time.monotonic() + START_SECONDS
        child: Popen[bytes] | None = None
        with open(self.log, "ab", opener=_private) as log:
            written = log.seek(0, os.SEEK_END)
            try:
                while not self.listens():
                    code = None if child is None else child.poll()
                    if code:
                        last = _no_room(self.home) or _last_line(self.log, written)
                        raise NoServer(f"the server ended as it started ({self.log}): {last}")
                    if time.monotonic() > deadline:
                        raise NoServer(
                            f"no server listens after {START_SECONDS:.0f} s; see {self.log}"
                        )
                    if child is None:
                        child = self._spawn(log)
                    elif code == 0:
                        # Ours found the lock held and exited. If its holder was a server that is
                        # exiting, none will listen: allow time for that, then try again.
                        time.sleep(0.2)
                        child = None
                    time.sleep(0.02)
            finally:
                if child is not None and child.returncode is None:
                    child.returncode = 0  # it is to outlive us, which Popen would warn about
        self._warn = None  # the server that listens now has our own version

    def _spawn(self, log: BinaryIO) -> "Popen[bytes]":
        import subprocess

        environ = {
            name: value
            for name, value in os.environ.items()
            if re.fullmatch(_KEPT, name) and name not in self.withheld
        }
        return subprocess.Popen(
            SERVER_COMMAND,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Not the user's folder, which would come first on the server's import path.
            cwd=self.home,
            env=environ | {"DRUMLINE_HOME": str(self.home)},
            start_new_session=True,
        )

    def _make_home(self) -> None:
        try:
            self.home.mkdir(parents=True, mode=0o700, exist_ok=True)
            owner = self.home.stat().st_uid
            if os.getuid() not in (owner, 0):
                raise NoServer(
                    f"{self.home} belongs to another user; set DRUMLINE_HOME to your own"
                )
            self.home.chmod(0o700)
        except OSError as trouble:
            raise NoServer(f"{self.home} cannot be used: {trouble.strerror}") from trouble


class _Window:
    """Flow control: how many bytes may be sent ahead of what the other side has read."""

    def __init__(self) -> None:
        from threading import Condition

        self._room = WINDOW
        self._changed = Condition()

    def open(self, taken: int) -> None:
        """The other side has read this many bytes."""
        with self._changed:
            self._room += taken
            self._changed.notify()

    def wait(self, most: int) -> int:
        """Wait until bytes may be sent, and return how many."""
        with self._changed:
            while self._room <= 0:
                self._changed.wait()
            return min(self._room, most)

    def sent(self, count: int) -> None:
        """This many bytes were sent."""
        with self._changed:
            self._room -= count


def _pour(head: bytes, source: BinaryIO, sock: socket.socket, window: _Window) -> None:
    """Send bytes in the chunked encoding, as their length is not known."""
    try:
        sock.sendall(b"%x\r\n%b\r\n" % (len(head), head))
        while piece := os.read(source.fileno(), window.wait(1 << 16)):
            window.sent(len(piece))
            sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        sock.sendall(b"0\r\n\r\n")
    except OSError:
        return  # the answer has ended and the connection is closed


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _no_room(folder: Path) -> str:
    """A sentence where the disk is full: then the log has none."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    return f"the disk that holds {folder} is full; make room" if free < LEAST_ROOM else ""


def _last_line(path: Path, start: int) -> str:
    with open(path, "rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"
