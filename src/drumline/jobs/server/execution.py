"""`exec`: run a user's command on the hosts of a slice, with input and output over one HTTP call.

The body of the call is one line of JSON followed by the bytes of the command's input. The answer is
one frame per line, as JSON:

    {"hosts": [0, 1]}                                    first: the hosts that run the command
    {"host": 0, "stream": "stdout", "data": "aGkK"}      output of a host, in base64
    {"taken": 4096}                                      this many bytes of the input were read
    {"host": 0, "exit_code": 0}                          last of each host; negative is a signal
    {"host": 0, "exit_code": null, "error": "no answer"} the exit code is unknown

All buffers are bounded. A caller that stops reading blocks the command. A command that stops
reading blocks the caller, who sends at most `WINDOW` bytes more than were read.
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from drumline.errors import HostError
from drumline.hosts.protocol import Session, Stream
from drumline.jobs.server.request_bodies import read_body
from drumline.jobs.server.verbs import RequestError

log = logging.getLogger(__name__)
Frame = dict[str, Any]
MAX_LINE_BYTES = 1 << 20


class Execution:
    """A command on one or more hosts."""

    def __init__(
        self,
        session: Session,
        hosts: Sequence[int],
        command: str,
        stdin: AsyncIterator[bytes] | None,
    ) -> None:
        """`frames` starts the command. Each host gets all of `stdin`."""
        self._session = session
        self._hosts = hosts
        self._command = command
        self._stdin = stdin
        self._frames: asyncio.Queue[Frame] = asyncio.Queue(2)

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """Run the command and yield its frames. Closing this generator ends it on every host."""
        stdin = (
            _Broadcast(self._report_taken(self._stdin), len(self._hosts)) if self._stdin else None
        )
        tasks = [
            asyncio.create_task(self._run(host, stdin.reader(index) if stdin else None))
            for index, host in enumerate(self._hosts)
        ]
        if stdin:
            tasks.append(asyncio.create_task(stdin.run()))
        running = set(self._hosts)
        try:
            yield {"hosts": [*self._hosts]}
            while running:
                frame = await self._frames.get()
                if "exit_code" in frame:
                    running.discard(frame["host"])
                yield frame
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, host: int, stdin: AsyncIterator[bytes] | None) -> None:
        async def on_output(stream: Stream, data: bytes) -> None:
            text = base64.b64encode(data).decode()
            await self._frames.put({"host": host, "stream": stream, "data": text})

        end: Frame = {"host": host, "exit_code": None}
        try:
            end["exit_code"] = await self._session.run(host, self._command, on_output, stdin=stdin)
        except HostError as error:
            end["error"] = str(error)
        except Exception as error:
            # Without this last frame the caller would wait forever.
            log.exception("a command on host %d", host)
            end["error"] = f"the server failed ({error}), see its log"
        await self._frames.put(end)

    async def _report_taken(self, stdin: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the input, and send a `taken` frame after each chunk."""
        async for chunk in stdin:
            yield chunk
            await self._frames.put({"taken": len(chunk)})


class _Broadcast:
    """A stream of bytes for several readers. The slowest reader sets the pace."""

    def __init__(self, source: AsyncIterator[bytes], readers: int) -> None:
        self._source = source
        self._queues: list[asyncio.Queue[bytes]] = [asyncio.Queue(2) for _ in range(readers)]
        self._closed: set[int] = set()

    async def run(self) -> None:
        """Pass on the source until it ends or every reader has closed."""
        async for chunk in self._source:
            if chunk:
                await self._put(chunk)
            if len(self._closed) == len(self._queues):
                return
        await self._put(b"")

    async def _put(self, chunk: bytes) -> None:
        for index, queue in enumerate(self._queues):
            if index not in self._closed:
                await queue.put(chunk)

    async def reader(self, index: int) -> AsyncIterator[bytes]:
        """Yield the chunks for one reader."""
        queue = self._queues[index]
        try:
            while chunk := await queue.get():
                yield chunk
        finally:
            self._closed.add(index)
            while not queue.empty():
                queue.get_nowait()


class Exchange:
    """An HTTP call that streams its body and its answer at the same time.

    Starlette reads the body before it answers, and notices a disconnect by reading on, which would
    discard a body that is still arriving. Here one task does all the reading.
    """

    def __init__(self, receive: Receive) -> None:
        """`first_line` reads the first bytes."""
        self._receive = receive
        # Unbounded, so that a disconnect is always noticed; the caller keeps to a window.
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self._complete = False

    async def first_line(self) -> dict[str, Any]:
        """Read the first line, a JSON object."""
        head = b""
        while b"\n" not in head and not self._complete:
            if len(head) > MAX_LINE_BYTES:
                raise RequestError(f"the first line has over {MAX_LINE_BYTES} bytes")
            head += await self._chunk() or b""
        line, _, rest = head.partition(b"\n")
        self._chunks.put_nowait(rest)
        return read_body(line)

    async def input(self) -> AsyncIterator[bytes]:
        """Yield the bytes after the first line."""
        while not (self._complete and self._chunks.empty()):
            if chunk := await self._chunks.get():
                yield chunk

    async def _chunk(self) -> bytes | None:
        """Return the next chunk of the body, or None if the caller has disconnected."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._complete = True
            return None
        self._complete = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def listen(self) -> None:
        """Read the body. Return when the caller has disconnected."""
        while True:
            chunk = await self._chunk()
            self._chunks.put_nowait(chunk or b"")
            if chunk is None:
                return


class LinesResponse(Response):
    """A response that streams one JSON object per line, until the caller disconnects."""

    def __init__(self, exchange: Exchange, lines: AsyncGenerator[Mapping[str, Any], None]) -> None:
        """`lines` is closed after the last line, or when the caller disconnects."""
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]
        self._exchange = exchange
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and send the answer at the same time."""
        del scope, receive
        listening = asyncio.create_task(self._exchange.listen())
        sending = asyncio.create_task(self._send_lines(send))
        try:
            await asyncio.wait({listening, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            listening.cancel()
            sending.cancel()
            await asyncio.gather(listening, sending, return_exceptions=True)
            await self._lines.aclose()

    async def _send_lines(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async for line in self._lines:
            body = json.dumps(line).encode() + b"\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
