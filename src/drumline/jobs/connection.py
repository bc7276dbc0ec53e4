"""Calls to the server by HTTP over its Unix socket. The first call starts the server if needed.

This module imports only the standard library, because every command loads it. Its HTTP client is
small: the client of the standard library imports mail headers and TLS, a tenth of a command's time.
"""

import json
import os
import re
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BufferedIOBase, BufferedReader, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from drumline import __version__
from drumline.errors import UserError

if TYPE_CHECKING:
    from subprocess import Popen  # imported on use: few commands start anything

Json = dict[str, Any]

SERVER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "drumline.jobs.server")
# A cold start of the server imports its web and SSH libraries and may start the emulator. That
# takes 2 s, or longer on a busy machine. A server that died is noticed at once, so a long limit is
# free.
START_SECONDS = 60.0
# Far above any normal response time, because a busy disk or a slow bucket must not look like a
# crash.
RESPONSE_SECONDS = 60.0
# After this silence the user learns that the server is slow, or paused and will never answer.
SILENCE_SECONDS = 5.0
PAUSE_POLL_SECONDS = 0.1
CONTENT_TOO_LARGE = 413
"""The HTTP status of LargeCode."""
# Less than a new database and a log need.
MIN_FREE_BYTES = 1 << 18
# Bytes of a command's input in transit to the hosts, enough for a fast link.
WINDOW = 1 << 20
# sun_path holds 108 bytes on Linux and 104 on macOS, including the final zero.
MAX_SOCKET_PATH = 103

# Headers about the server itself, in every response.
VERSION_HEADER = "Drumline-Version"
ORPHANS_HEADER = "Drumline-Strays"
STOP = "/stop"

# The server outlives the command, and its children (emulated hosts) inherit its environment. So it
# gets the variables that it needs, and not every token in the shell of the first command.
_INHERITED = (
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|(HTTPS?|NO)_PROXY|(https?|no)_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
    r"|NO_GCE_CHECK|STORAGE_EMULATOR_HOST"
    r"|(DRUMLINE_|GOOGLE_|GCE_|CLOUDSDK_|LC_|XDG_|PYTHON|COVERAGE_).*"
)


MAX_LINE = 1 << 16


class BadResponse(ConnectionResetError):
    """The connection ended before the response did, or the response is not HTTP."""


class _SocketReader(RawIOBase):
    """The bytes from a socket. While none arrive, `on_silence` is called with the seconds."""

    def __init__(self, sock: socket.socket) -> None:
        """The timeout of the socket limits each read."""
        self._sock = sock
        self.on_silence: Callable[[float], None] | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes, or the end of the connection."""
        timeout, waited = self._sock.gettimeout(), 0.0
        seconds = SILENCE_SECONDS if timeout is None else min(SILENCE_SECONDS, timeout)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while not poll.poll(seconds * 1000):
            waited += seconds
            if self.on_silence is not None:
                self.on_silence(waited)
            if timeout is not None and waited >= timeout:
                raise TimeoutError
        return self._sock.recv_into(buffer)


class HttpConnection:
    """One request and its response."""

    def __init__(self, path: str, timeout: float | None) -> None:
        """Connect. `timeout` applies to each read and write afterwards."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # No timeout yet: with one, a full accept queue would be an error.
            self.sock.connect(path)
        except OSError:
            self.sock.close()
            raise
        self.sock.settimeout(timeout)
        self._socket_reader = _SocketReader(self.sock)
        self._reader = BufferedReader(self._socket_reader)

    def send(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> None:
        """Send the request. A `body` gets a Content-Length."""
        if not path.isascii() or not path.isprintable() or " " in path:
            raise ValueError(f"not a valid request path: {path!r}")
        fields = {"Host": "drumline", "Connection": "close"} | dict(headers or {})
        if body:
            fields["Content-Length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.sock.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)

    def call_on_silence(self, function: Callable[[float], None]) -> None:
        """Call a function with the seconds of silence while a read waits, every few seconds."""
        self._socket_reader.on_silence = function

    def paused_server(self) -> int | None:
        """Return the process of the server if it was stopped by a signal, on Linux; else None."""
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        pid = int.from_bytes(
            self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder
        )
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return None
        return pid if state in {"T", "t"} else None

    def response(self) -> "HttpResponse":
        """Wait for the head of the response."""
        return HttpResponse(self._reader)

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()
        self.sock.close()


class HttpResponse:
    """A response: `status`, `headers` by lower-case name, and a body to read."""

    def __init__(self, file: BufferedIOBase) -> None:
        """Read up to the body."""
        self._file = file
        first_line = self._line()
        try:
            protocol, status, *_ = first_line.split()
            self.status = int(status)
        except ValueError:
            raise BadResponse("the response is not HTTP") from None
        if not protocol.startswith(b"HTTP/1."):
            raise BadResponse("the response is not HTTP")
        self.headers: dict[str, str] = {}
        while line := self._line():
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length")
        # Bytes left of the body or of its current chunk; None if the connection ends the body.
        self._left = 0 if self._chunked else None if length is None else int(length)
        self._complete = False

    def read(self) -> bytes:
        """Read the rest of the body."""
        return b"".join(iter(self.read_some, b""))

    def read_some(self, max_bytes: int = 1 << 16) -> bytes:
        """Read the bytes of the body that have arrived, at least one; empty at its end."""
        if self._chunked and not self._left and not self._complete:
            self._next_chunk()
        if self._complete or self._left == 0:
            return b""
        size = max_bytes if self._left is None else min(max_bytes, self._left)
        data = self._file.read1(size)
        if self._left is None:
            return data
        if not data:
            raise BadResponse("the response is incomplete")
        self._left -= len(data)
        if self._chunked and not self._left:
            self._line()
        return data

    def _next_chunk(self) -> None:
        line = self._line()
        try:
            self._left = int(line.partition(b";")[0], 16)
        except ValueError:
            raise BadResponse("the response is incomplete") from None
        if not self._left:
            self._complete = True

    def _line(self) -> bytes:
        line = self._file.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise BadResponse("the response is incomplete")
        return line.rstrip(b"\r\n")


class Refused(UserError):
    """The server cannot fulfil the request. The text has the reason and the fix."""


class LargeCode(Refused):
    """The code of a job is so large that its user must allow it. Nothing was changed."""


class NoServer(Refused):
    """No server runs in this home, and none could be started."""


class ServerExiting(ConnectionRefusedError):
    """The server is exiting and ignored the call, which may be sent to the next server."""


class ServerDisconnected(Exception):
    """The connection ended before the end of the response."""


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the home folder: `$DRUMLINE_HOME`, or `~/.drumline`."""
    path = environ.get("DRUMLINE_HOME")
    return Path(path).expanduser().absolute() if path else Path.home() / ".drumline"


class ServerConnection:
    """The connection to the server of a home folder, which the first call starts."""

    def __init__(
        self,
        home: Path | None = None,
        autostart: bool = True,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`warn` is called with a message if the running server has another version."""
        self.home = home_folder() if home is None else Path(home).absolute()
        self.socket = self.home / "server.sock"
        self._autostart = autostart
        self._warn = self._warn_of_silence = warn
        self._server: tuple[str | None, int] = __version__, 0
        self.withheld: frozenset[str] = frozenset()
        if len(os.fsencode(self.socket)) > MAX_SOCKET_PATH:
            raise Refused(
                f"{self.home} is too long a path for a Unix socket (at most "
                f"{MAX_SOCKET_PATH - len('/server.sock')} bytes); set DRUMLINE_HOME to a "
                "shorter one"
            )

    @property
    def log(self) -> Path:
        """The log file of the server."""
        return self.home / "server.log"

    def call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        timeout: float | None = RESPONSE_SECONDS,
    ) -> Json:
        """Send a call. Start a server if none listens. Only reads are repeated."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                response = self.call_running(method, path, body, timeout)
            except (ConnectionRefusedError, FileNotFoundError):
                self.start()
            except ServerDisconnected as error:
                if method != "GET":
                    message = f"{error}; drumline list shows whether the request was executed"
                    raise Refused(message) from error
            else:
                return response
            if time.monotonic() > deadline:
                raise NoServer(f"the server exits repeatedly; see {self.log}")

    def call_running(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        timeout: float | None = RESPONSE_SECONDS,
    ) -> Json:
        """Send a call to a server that listens already."""
        connection = self._open(timeout)
        try:
            response: Json = json.loads(self._send(connection, method, path, body).read())
            return response
        except TimeoutError as error:
            raise Refused(
                f"the server has not answered in {timeout:.0f} s; see {self.log}"
            ) from error
        except (ConnectionResetError, BrokenPipeError) as error:
            raise ServerDisconnected("the server exited before it answered") from error
        except json.JSONDecodeError as error:
            raise Refused(f"the server's answer to {path} is not JSON; see {self.log}") from error
        finally:
            connection.close()

    def exchange(self, path: str, body: Json, source: BinaryIO | None = None) -> Iterator[Json]:
        """Send a call and yield the objects of the response as they arrive.

        `source` is sent until the response ends, at most one window ahead of the server's reads. It
        may be endless. To stop early, close this generator, which closes the connection.
        """
        while True:
            try:
                connection = self._open(None)
                break
            except (ConnectionRefusedError, FileNotFoundError):
                self.start()
        try:
            if source is None:
                response, window = self._send(connection, "POST", path, body), _Window()
            else:
                response, window = self._send_stream(connection, path, body, source)
            connection.call_on_silence(partial(self._warn_of_pause, connection))
            rest = b""
            while data := response.read_some():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    frame: Json = json.loads(line)
                    if "taken" in frame:
                        window.add(int(frame["taken"]))
                    else:
                        yield frame
        except ServerExiting as error:
            if source is not None:  # the server may have read some of it
                raise Refused("the server was exiting; try again") from error
            connection.close()
            self.start()
            yield from self.exchange(path, body)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise ServerDisconnected("the server exited before the end of its answer") from error
        finally:
            connection.close()

    def _send_stream(
        self, connection: HttpConnection, path: str, body: Json, source: BinaryIO
    ) -> "tuple[HttpResponse, _Window]":
        """Send a line of JSON and then `source`, while the response is read."""
        from threading import Thread

        headers = {"Content-Type": "application/octet-stream", "Transfer-Encoding": "chunked"}
        connection.send("POST", path, headers)
        window = _Window()
        head = json.dumps(body).encode() + b"\n"
        # The thread is never joined, because it may block on a pipe that nobody writes to.
        arguments = (head, source, connection.sock, window)
        Thread(target=_send_chunks, args=arguments, daemon=True).start()
        return self._receive(connection, "POST", path), window

    def _send(
        self, connection: HttpConnection, method: str, path: str, body: Json | None = None
    ) -> HttpResponse:
        """Send a call and return its response. Raise the error of the response, if any."""
        if body is None:
            connection.send(method, path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.send(method, path, headers, json.dumps(body).encode())
        return self._receive(connection, method, path)

    def _open(self, timeout: float | None) -> HttpConnection:
        """Connect. Raise Refused if the server is paused, before a request is sent to it."""
        connection = self._connect(timeout)
        deadline = time.monotonic() + SILENCE_SECONDS
        while (pid := connection.paused_server()) is not None:
            if time.monotonic() > deadline:
                connection.close()
                raise Refused(_pause_message(pid))
            time.sleep(PAUSE_POLL_SECONDS)
        return connection

    def _on_silence(self, connection: HttpConnection, method: str, seconds: float) -> None:
        """Raise Refused if the server is paused instead of answering a call. Warn if it is slow."""
        pid = connection.paused_server()
        if pid is not None:
            later = "" if method == "GET" else ", and it executes the request that it has received"
            raise Refused(_pause_message(pid) + later)
        # Calls with a longer timeout pack code, or wait for events.
        if self._warn_of_silence and connection.sock.gettimeout() == RESPONSE_SECONDS:
            self._warn_of_silence(
                f"the server has not answered for {seconds:.0f} s, waiting; its log: {self.log}"
            )
            self._warn_of_silence = None

    def _warn_of_pause(self, connection: HttpConnection, seconds: float) -> None:
        """Warn once if the server was paused in the middle of a response, which stays complete."""
        del seconds
        pid = connection.paused_server()
        if pid is not None and self._warn_of_silence:
            self._warn_of_silence(f"{_pause_message(pid)}; waiting")
            self._warn_of_silence = None

    def _receive(self, connection: HttpConnection, method: str, path: str) -> HttpResponse:
        connection.call_on_silence(partial(self._on_silence, connection, method))
        response = connection.response()
        headers = response.headers
        orphan_count = int(headers.get(ORPHANS_HEADER.lower(), 0))
        self._server = headers.get(VERSION_HEADER.lower()), orphan_count
        if response.status == 503:
            raise ServerExiting("the server is exiting")
        if path != STOP:
            # Also before an error, which the other version may have caused.
            self._warn_of_server()
        if response.status < 400:
            return response
        try:
            message = str(json.loads(response.read())["error"])
        except (ValueError, KeyError, TypeError):
            message = f"the server failed with {response.status} at {path}; see {self.log}"
        raise LargeCode(message) if response.status == CONTENT_TOO_LARGE else Refused(message)

    def stream(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of a response as they arrive."""
        connection = self._open(None)
        try:
            response = self._send(connection, "GET", path)
            connection.call_on_silence(partial(self._warn_of_pause, connection))
            while data := response.read_some():
                yield data
        except (ConnectionResetError, BrokenPipeError) as error:
            raise ServerDisconnected("the server exited in the middle of the logs") from error
        finally:
            connection.close()

    def _warn_of_server(self) -> None:
        """Warn the user once about the version and the orphans of a running server."""
        if self._warn is None:
            return
        warn, self._warn = self._warn, None
        version, orphans = self._server
        if orphans:
            slices = (
                "1 slice of a lost job database still runs"
                if orphans == 1
                else f"{orphans} slices of a lost job database still run"
            )
            warn(f"{slices} and may cost money; drumline server strays lists them and the commands")
        if version != __version__:
            other = f"version {version}" if version else "an older version"
            warn(
                f"the running server is {other}, this command is {__version__}; "
                "after drumline server stop, the next command starts the new one"
            )

    # --- Start of the server ----------------------------------------------------------------

    def _connect(self, timeout: float | None) -> HttpConnection:
        try:
            return HttpConnection(str(self.socket), timeout)
        except PermissionError as error:
            raise NoServer(f"{self.socket} belongs to another user") from error

    def server_listens(self) -> bool:
        """Return True if a server accepts connections."""
        try:
            self._connect(RESPONSE_SECONDS).close()
        except (ConnectionRefusedError, FileNotFoundError):
            return False  # never started, stopped, or killed without removing its socket
        return True

    def is_unlocked(self) -> bool:
        """Return True if no server has this home. A server that exits may still write to it."""
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
        """Start a server and wait until it listens, or that of a concurrent command."""
        if not self._autostart:
            raise NoServer(f"no server runs in {self.home}")
        self._make_home()
        deadline = time.monotonic() + START_SECONDS
        child: Popen[bytes] | None = None
        with open(self.log, "ab", opener=_private) as log:
            log_start = log.seek(0, os.SEEK_END)
            try:
                while not self.server_listens():
                    code = None if child is None else child.poll()
                    if code:
                        reason = _full_disk_message(self.home) or _last_line(self.log, log_start)
                        raise NoServer(f"the server failed to start ({self.log}): {reason}")
                    if time.monotonic() > deadline:
                        raise NoServer(
                            f"no server is listening after {START_SECONDS:.0f} s; see {self.log}"
                        )
                    if child is None:
                        child = self._spawn(log)
                    elif code == 0:
                        # This server exited because another one has the lock. If that one is
                        # exiting, none will listen, so wait and retry.
                        time.sleep(0.2)
                        child = None
                    time.sleep(0.02)
            finally:
                if child is not None and child.returncode is None:
                    child.returncode = 0  # or Popen would warn that the child outlives it
        self._warn = None  # the server has the version of this client

    def _spawn(self, log: BinaryIO) -> "Popen[bytes]":
        import subprocess

        environ = {
            name: value
            for name, value in os.environ.items()
            if re.fullmatch(_INHERITED, name) and name not in self.withheld
        }
        return subprocess.Popen(
            SERVER_COMMAND,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # The user's folder would come first on the server's import path.
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
        except OSError as error:
            raise NoServer(f"{self.home} cannot be used: {error.strerror}") from error


class _Window:
    """Flow control: the number of bytes that may be sent ahead of the receiver's reads."""

    def __init__(self) -> None:
        from threading import Condition

        self._available = WINDOW
        self._changed = Condition()

    def add(self, count: int) -> None:
        """Allow more bytes, because the receiver has read this many."""
        with self._changed:
            self._available += count
            self._changed.notify()

    def wait(self, max_bytes: int) -> int:
        """Wait until bytes may be sent. Return their number."""
        with self._changed:
            while self._available <= 0:
                self._changed.wait()
            return min(self._available, max_bytes)

    def subtract(self, count: int) -> None:
        """Allow fewer bytes, because this many were sent."""
        with self._changed:
            self._available -= count


def _send_chunks(head: bytes, source: BinaryIO, sock: socket.socket, window: _Window) -> None:
    """Send bytes of unknown length in the chunked encoding."""
    try:
        sock.sendall(b"%x\r\n%b\r\n" % (len(head), head))
        while data := os.read(source.fileno(), window.wait(1 << 16)):
            window.subtract(len(data))
            sock.sendall(b"%x\r\n%b\r\n" % (len(data), data))
        sock.sendall(b"0\r\n\r\n")
    except OSError:
        return  # the response is complete and the connection is closed


def _pause_message(pid: int) -> str:
    return (
        f"the server (process {pid}) is paused and answers no call;"
        f" continue it with: kill -CONT {pid}"
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _full_disk_message(folder: Path) -> str:
    """Return a message if the disk is full, because then the log has none; else empty."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    return (
        f"the disk that holds {folder} is full; delete some files" if free < MIN_FREE_BYTES else ""
    )


def _last_line(path: Path, start: int) -> str:
    with open(path, "rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "its log is empty"
