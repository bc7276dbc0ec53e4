"""One HTTP call whose body and answer are streamed at the same time, until either side closes.

An ASGI response reads the body first and then answers, and notices a disconnect by reading on: it
would swallow a body that is still coming. Here one task does all the reading.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from drumline.jobs.server.verbs import Mistake

LONGEST_LINE = 1 << 20


class Exchange:
    """A body of one line of JSON followed by bytes; an answer of lines of JSON."""

    def __init__(self, receive: Receive) -> None:
        """Nothing is read before `opening`."""
        self._receive = receive
        # Unbounded, so that a disconnect is always noticed; the caller keeps to a window.
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._whole = False

    async def opening(self) -> Any:
        """The first line."""
        head = b""
        while b"\n" not in head and not self._whole:
            if len(head) > LONGEST_LINE:
                raise Mistake(f"the first line has over {LONGEST_LINE} bytes")
            head += await self._piece() or b""
        line, _, rest = head.partition(b"\n")
        self._pieces.put_nowait(rest)
        try:
            return json.loads(line)
        except ValueError:
            raise Mistake("the first line is no JSON") from None

    async def input(self) -> AsyncIterator[bytes]:
        """The bytes after the first line."""
        while not (self._whole and self._pieces.empty()):
            if piece := await self._pieces.get():
                yield piece

    async def _piece(self) -> bytes | None:
        """The next piece of the body; None when the caller has disconnected."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._whole = True
            return None
        self._whole = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def listen(self) -> None:
        """Read the body; return when the caller has disconnected."""
        while True:
            piece = await self._piece()
            self._pieces.put_nowait(piece or b"")
            if piece is None:
                return


class LinesResponse(Response):
    """Streams an object on each line; closed after the last, or when the caller disconnects."""

    def __init__(self, exchange: Exchange, lines: AsyncGenerator[Mapping[str, Any], None]) -> None:
        """Answer in this exchange."""
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
