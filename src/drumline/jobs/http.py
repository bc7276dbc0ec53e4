"""HTTP/1.1 over a Unix socket, as much of it as calls to our own server need.

The standard library's client imports mail headers and TLS: a tenth of a command's time.
"""

import socket
from collections.abc import Mapping
from io import BufferedReader

LONGEST_LINE = 1 << 16


class Broken(ConnectionResetError):
    """The connection ended before the answer did, or the answer is not HTTP."""


class HttpConnection:
    """One request and its response."""

    def __init__(self, path: str, timeout: float | None) -> None:
        """Connect; `timeout` is for everything that is read and written after that."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Without a timeout yet: with one, a full accept queue is an error, without it a wait.
            self.sock.connect(path)
        except OSError:
            self.sock.close()
            raise
        self.sock.settimeout(timeout)
        self._answers = self.sock.makefile("rb")

    def send(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> None:
        """Send the request; a `body` is sent with its Content-Length."""
        if not path.isascii() or not path.isprintable() or " " in path:
            raise ValueError(f"not a path to ask for: {path!r}")
        fields = {"Host": "drumline", "Connection": "close"} | dict(headers or {})
        if body:
            fields["Content-Length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.sock.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)

    def answer(self) -> "HttpAnswer":
        """Wait until the response begins."""
        return HttpAnswer(self._answers)

    def close(self) -> None:
        """Close the connection."""
        self._answers.close()
        self.sock.close()


class HttpAnswer:
    """A response: `status`, `headers` by their names in lower case, and a body to read."""

    def __init__(self, file: BufferedReader) -> None:
        """Read up to the body."""
        self._file = file
        try:
            protocol, status, *_ = self._line().split()
            self.status = int(status)
        except ValueError:
            raise Broken("the answer is no HTTP") from None
        if not protocol.startswith(b"HTTP/1."):
            raise Broken("the answer is no HTTP")
        self.headers: dict[str, str] = {}
        while line := self._line():
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length")
        # Bytes left of the body, or of a chunk of it; None where the body ends with the connection.
        self._left = 0 if self._chunked else None if length is None else int(length)
        self._over = False

    def read(self) -> bytes:
        """All that is left of the body."""
        return b"".join(iter(self.piece, b""))

    def piece(self, most: int = 1 << 16) -> bytes:
        """The bytes of the body that have arrived, at least one; empty at its end."""
        if self._chunked and not self._left and not self._over:
            self._next_chunk()
        if self._over or self._left == 0:
            return b""
        piece = self._file.read1(most if self._left is None else min(most, self._left))
        if self._left is None:
            return piece
        if not piece:
            raise Broken("the answer breaks off")
        self._left -= len(piece)
        if self._chunked and not self._left:
            self._line()
        return piece

    def _next_chunk(self) -> None:
        try:
            self._left = int(self._line().partition(b";")[0], 16)
        except ValueError:
            raise Broken("the answer breaks off") from None
        if not self._left:
            self._over = True

    def _line(self) -> bytes:
        line = self._file.readline(LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise Broken("the answer breaks off")
        return line.rstrip(b"\r\n")
