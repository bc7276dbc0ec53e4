"""Commands on hosts: unchanged bytes, errors of hosts, and the end of the caller."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from drumline.errors import HostError
from drumline.hosts.protocol import Session
from drumline.jobs.server.execution import Exchange, Execution, Frame, LinesResponse
from drumline.jobs.server.verbs import RequestError

Command = Callable[[Any, AsyncIterator[bytes] | None], Awaitable[int]]


class Hosts:
    """Hosts that run a coroutine in place of a command."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.running = 0

    async def run(self, host: int, command: str, output: Any, stdin: Any = None) -> int:
        del host, command
        self.running += 1
        try:
            return await self.command(output, stdin)
        finally:
            self.running -= 1


def an_execution(hosts: Hosts, count: int = 1, stdin: AsyncIterator[bytes] | None = None) -> Any:
    return Execution(cast(Session, hosts), range(count), "cmd", stdin).frames()


async def all_of(frames: AsyncIterator[Frame]) -> list[Frame]:
    async with asyncio.timeout(20):
        return [frame async for frame in frames]


async def echo(output: Any, stdin: AsyncIterator[bytes] | None) -> int:
    assert stdin is not None
    async for piece in stdin:
        await output("stdout", piece)
    return 0


def test_each_host_gets_all_input_and_reports_the_bytes_taken() -> None:
    pieces = [bytes([n]) * 1000 for n in range(256)]

    async def typed() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    frames = asyncio.run(all_of(an_execution(Hosts(echo), 2, typed())))
    assert frames[0] == {"hosts": [0, 1]}
    for host in (0, 1):
        written = [base64.b64decode(one["data"]) for one in frames if "data" in one
                   and one["host"] == host]  # fmt: skip
        assert b"".join(written) == b"".join(pieces)
        assert {"host": host, "exit_code": 0} in frames
    assert sum(one.get("taken", 0) for one in frames) > 0


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HostError("connection lost"), "connection lost"),
        (KeyError("oh"), "the server failed ('oh'), see its log"),
    ],
)
def test_a_failed_host_ends_the_command_with_its_error(error: Exception, message: str) -> None:
    async def lost(output: Any, stdin: Any) -> int:
        del output, stdin
        raise error

    frames = asyncio.run(all_of(an_execution(Hosts(lost))))
    assert frames[1:] == [{"host": 0, "exit_code": None, "error": message}]


@pytest.mark.parametrize("reads", [False, True])
def test_a_command_ends_when_its_caller_disconnects(reads: bool) -> None:
    async def scenario() -> None:
        arriving: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        sent: list[dict[str, Any]] = []
        started = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message)
            if b"up" in base64.b64decode(json.loads(message.get("body") or b"{}").get("data", "")):
                started.set()

        async def endless(output: Any, stdin: AsyncIterator[bytes] | None) -> int:
            await output("stdout", b"up")
            if reads:
                return await echo(output, stdin)
            await asyncio.Event().wait()
            return 0

        def body(data: bytes) -> dict[str, Any]:
            return {"type": "http.request", "body": data, "more_body": True}

        arriving.put_nowait(body(b'{"command"'))
        arriving.put_nowait(body(b': "x"}\nbytes'))
        exchange = Exchange(arriving.get)
        assert await exchange.first_line() == {"command": "x"}
        hosts = Hosts(endless)
        lines = an_execution(hosts, 1, exchange.input())
        answering = asyncio.create_task(LinesResponse(exchange, lines)({}, arriving.get, send))
        async with asyncio.timeout(20):
            await started.wait()
            for _ in range(50):
                arriving.put_nowait(body(b"more"))
            assert hosts.running == 1
            arriving.put_nowait({"type": "http.disconnect"})
            await answering
        assert hosts.running == 0
        assert sent[0]["status"] == 200

    asyncio.run(scenario())


def test_a_call_without_json_is_rejected() -> None:
    async def scenario() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"what?\n", "more_body": False}

        with pytest.raises(RequestError, match="body is not JSON"):
            await Exchange(receive).first_line()

    asyncio.run(scenario())
