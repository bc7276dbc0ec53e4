"""One HTTP call whose body and answer go on side by side, until either end leaves.

What ASGI offers reads a body first and then answers, and listens for the caller's leave by reading
on: a body that is still coming would be lost to it. Here one task reads all there is to read.
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
    """A body of one line of JSON and, behind it, bytes; an answer of lines of JSON."""

    def __init__(self, receive: Receive) -> None:
        """Nothing is read before `opening`."""
        self._receive = receive
        # Unbounded, so that a caller who leaves is noticed in any case: it keeps to a window.
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
        """The bytes behind the first line."""
        while not (self._whole and self._pieces.empty()):
            if piece := await self._pieces.get():
                yield piece

    async def _piece(self) -> bytes | None:
        """What comes next of the body; None when the caller has left."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._whole = True
            return None
        self._whole = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def listen(self) -> None:
        """Take in the body; return when the caller has left."""
        while True:
            piece = await self._piece()
            self._pieces.put_nowait(piece or b"")
            if piece is None:
                return


class LinesResponse(Response):
    """An object on each line, as they come; closed with the last one, or when the caller leaves."""

    def __init__(self, exchange: Exchange, lines: AsyncGenerator[Mapping[str, Any], None]) -> None:
        """Answer in this exchange."""
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]
        self._exchange = exchange
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Listen and tell at once."""
        del scope, receive
        listening = asyncio.create_task(self._exchange.listen())
        telling = asyncio.create_task(self._tell(send))
        try:
            await asyncio.wait({listening, telling}, return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                await telling
        finally:
            listening.cancel()
            telling.cancel()
            await asyncio.gather(listening, telling, return_exceptions=True)
            await self._lines.aclose()

    async def _tell(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async for line in self._lines:
            body = json.dumps(line).encode() + b"\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
