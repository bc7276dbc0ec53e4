"""Limits for what a host sends: one answer, one line of a watch, and the log."""

import asyncio
import base64
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from drumline.hosts.agent.status import MAX_BACKLOG_BYTES, ROUND_BYTES
from drumline.hosts.agent.wire import WatchLine
from drumline.hosts.connection import AgentError, Connection, KnownHosts
from drumline.hosts.log_segments import LogWriter, read_chunk, segments
from drumline.hosts.values import attempt_folder

from .agent.machine import Machine
from .on_hosts import on_hosts
from .stand_in import FAST, Slice
from .test_driver import make_runner


@pytest.mark.parametrize("stream", ["1", "2"])
def test_an_answer_that_is_too_long_is_an_error(tmp_path: Path, stream: str) -> None:
    async def story(slice_: Slice) -> None:
        connection = await connect(slice_)
        with pytest.raises(AgentError, match="sent more than 8 MB"):
            await connection.run(f"head -c 9000000 /dev/zero >&{stream}")
        assert (await connection.run("echo hello")).stdout == "hello\n"
        await connection.close()

    on_hosts(tmp_path, 1, story)


def test_a_line_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        connection = await connect(slice_)
        with pytest.raises(AgentError, match="sent more than 8 MB"):
            async for _ in connection.lines("echo hello; head -c 9000000 /dev/zero"):
                pass
        await connection.close()

    on_hosts(tmp_path, 1, story)


def test_errors_of_a_watch_do_not_stop_its_lines(tmp_path: Path) -> None:
    async def story(slice_: Slice) -> None:
        connection = await connect(slice_)
        lines = [line async for line in connection.lines("head -c 9000000 /dev/zero >&2; echo x")]
        assert lines == [b"x"]
        await connection.close()

    on_hosts(tmp_path, 1, story)


async def connect(slice_: Slice) -> Connection:
    known_hosts = KnownHosts(slice_.folder / "known")
    return await Connection.open(slice_.hosts[0].address, slice_.key, known_hosts, FAST)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    home = tmp_path / "home"
    home.mkdir()
    return Machine(home)


def write_log(machine: Machine, size: int) -> None:
    machine.folder.mkdir(parents=True)
    (machine.folder / "log").write_bytes(b"")
    os.truncate(machine.folder / "log", size)


def watch_until_status(machine: Machine) -> tuple[list[dict[str, Any]], int]:
    """Watch from the beginning until the first status. Return the pieces of the log before it."""
    words = machine.words("watch", attempt_folder(machine.what), "0")
    pieces: list[dict[str, Any]] = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=machine.environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            if message.get("status"):
                break
            if message.get("log"):
                pieces.append(message)
        process.kill()
    return pieces, sum(len(base64.b64decode(piece["log"])) for piece in pieces)


def test_the_status_is_sent_between_pieces_of_a_long_log(machine: Machine) -> None:
    write_log(machine, 20 * ROUND_BYTES)
    pieces, size = watch_until_status(machine)
    assert pieces[0]["offset"] == 0
    assert 0 < size < 2 * ROUND_BYTES


def test_a_log_that_grows_faster_than_it_is_sent_continues_near_its_end(machine: Machine) -> None:
    size = MAX_BACKLOG_BYTES + 5_000_000
    write_log(machine, size)
    pieces, _ = watch_until_status(machine)
    assert pieces[0]["skipped"] == pieces[0]["offset"]
    assert size / 2 < pieces[0]["offset"] < size
    assert not any(piece["skipped"] for piece in pieces[1:])


class SkippingHost:
    """A host whose program logs too fast, so that a part of the log is left out."""

    def __init__(self, *lines: WatchLine) -> None:
        self.lines = lines

    async def watch(self, *_: object) -> AsyncIterator[WatchLine]:
        for line in self.lines:
            yield line


def log_line(data: bytes, offset: int, skipped: int = 0) -> WatchLine:
    return WatchLine(log=base64.b64encode(data).decode(), offset=offset, skipped=skipped)


def receive(folder: Path, *lines: WatchLine) -> None:
    asyncio.run(make_runner(folder)._watch(SkippingHost(*lines)))  # type: ignore[arg-type]


def test_the_server_keeps_the_gap_of_a_skipped_part(tmp_path: Path) -> None:
    receive(tmp_path, log_line(b"one\n", 0), log_line(b"two\n", 104, skipped=100))
    log = tmp_path / "host-0.log"
    assert [(part.start, part.path.read_bytes()) for part in segments(log)] == [
        (0, b"one\n"),
        (104, b"two\n"),
    ]
    assert read_chunk(log, 4, 100).start == 104


def test_a_gap_that_was_not_announced_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="continues at 104"):
        receive(tmp_path, log_line(b"one\n", 0), log_line(b"two\n", 104, skipped=99))


def test_a_log_without_a_limit_keeps_all_parts_around_gaps(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "host-0.log")
    for start in range(0, 2000, 100):
        log.skip_to(start)
        log.append(b"line\n", 1.0)
    log.close()
    assert len(segments(tmp_path / "host-0.log")) == 20
