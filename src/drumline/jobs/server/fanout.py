"""One stream of bytes for several readers: what is typed into `exec` goes to every host."""

import asyncio
from collections.abc import AsyncIterator


class Fanout:
    """The slowest reader sets the pace, so little is held in memory; readers may leave."""

    def __init__(self, source: AsyncIterator[bytes], readers: int) -> None:
        """Nothing is read before `run`."""
        self._source = source
        self._queues: list[asyncio.Queue[bytes]] = [asyncio.Queue(2) for _ in range(readers)]
        self._left: set[int] = set()

    async def run(self) -> None:
        """Pass on the source until all of it is read or every reader has left."""
        async for piece in self._source:
            if piece:
                await self._put(piece)
            if len(self._left) == len(self._queues):
                return
        await self._put(b"")

    async def _put(self, piece: bytes) -> None:
        for number, queue in enumerate(self._queues):
            if number not in self._left:
                await queue.put(piece)

    async def reader(self, number: int) -> AsyncIterator[bytes]:
        """The pieces for one reader."""
        try:
            while piece := await self._queues[number].get():
                yield piece
        finally:
            self.leave(number)

    def leave(self, number: int) -> None:
        """Wait no longer for this reader."""
        self._left.add(number)
        while not self._queues[number].empty():
            self._queues[number].get_nowait()
