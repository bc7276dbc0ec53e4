"""HTTP over a Unix socket: the complete answer, or an error if the connection breaks."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.jobs.connection import BadResponse, HttpConnection, HttpResponse


@contextmanager
def answered(text: bytes) -> Iterator[Callable[[], HttpResponse]]:
    """A server that sends these bytes and closes the connection."""
    local, remote = socket.socketpair()
    with local, local.makefile("rb") as heard:
        remote.sendall(text)
        remote.close()
        yield lambda: HttpResponse(heard)


def chunked(pieces: list[bytes]) -> bytes:
    chunks = b"".join(b"%x;odd=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def counted(content: bytes) -> bytes:
    return b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_a_body_in_chunks_comes_whole(pieces: list[bytes]) -> None:
    with answered(chunked(pieces)) as answer:
        got = answer()
        assert (got.status, got.read(), got.read()) == (200, b"".join(pieces), b"")


@given(st.binary(max_size=300), st.integers(1, 7))
def test_a_body_of_known_length_comes_whole_in_pieces(content: bytes, most: int) -> None:
    with answered(counted(content) + b"more") as answer:
        got = answer()
        assert got.status == 404
        assert b"".join(iter(lambda: got.read_some(most), b"")) == content


def test_a_body_without_length_ends_with_the_connection() -> None:
    with answered(b"HTTP/1.0 200\r\nDrumline-Version: 9\r\n\r\nall\n\nof it") as answer:
        got = answer()
        assert got.headers == {"drumline-version": "9"}
        assert got.read() == b"all\n\nof it"


@pytest.mark.parametrize("whole", [chunked([b"some", b"thing\r\n"]), counted(b"something")])
def test_an_answer_that_breaks_off_is_never_taken_for_whole(whole: bytes) -> None:
    # The last chunk size ends a chunked body; the empty line after it carries nothing.
    needed = len(whole) - 2 if b"chunked" in whole else len(whole)
    for length in range(needed):
        with answered(whole[:length]) as answer, pytest.raises(BadResponse):
            answer().read()


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"\r\n",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 ok\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"x" * 99999,
    ],
)
def test_an_answer_that_is_not_http_is_an_error(odd: bytes) -> None:
    with answered(odd) as answer, pytest.raises(BadResponse):
        answer()


@pytest.mark.parametrize("path", ["/jobs\r\nX: y", "/a b", "/ü", "/\x00"])
def test_paths_with_control_characters_are_rejected(path: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "sock"))
        listening.listen()
        connection = HttpConnection(str(tmp_path / "sock"), 1)
        with pytest.raises(ValueError, match="not a valid request path"):
            connection.send("GET", path)
        connection.close()


def test_silence_is_a_time_out(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "sock"))
        listening.listen()
        connection = HttpConnection(str(tmp_path / "sock"), 0.01)
        connection.send("GET", "/jobs")
        with pytest.raises(TimeoutError):
            connection.response()
        connection.close()
