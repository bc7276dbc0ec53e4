"""A user's command on the hosts of a slice: what it reads and writes, as frames while it runs.

A frame is an object on a line of JSON:

    {"hosts": [0, 1]}                                    first: where it runs
    {"host": 0, "stream": "stdout", "data": "aGkK"}      what it wrote, in base64
    {"taken": 4096}                                      so many bytes of its input were read
    {"host": 0, "exit_code": 0}                          last of each host; negative is a signal
    {"host": 0, "exit_code": null, "error": "no answer"} it is not known how it ended

Nothing is buffered without limit: a caller that stops reading holds up the command, and a command
that stops reading holds up the caller, who sends at most `WINDOW` bytes ahead of what was read.
"""

import asyncio
import base64
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from drumline.hosts.values import Stream
from drumline.jobs.server.fanout import Fanout

if TYPE_CHECKING:
    from drumline.hosts.session import SliceSession

log = logging.getLogger(__name__)
Frame = dict[str, Any]


class Execution:
    """A command on one or more hosts."""

    def __init__(
        self,
        session: "SliceSession",
        hosts: Sequence[int],
        command: str,
        stdin: AsyncIterator[bytes] | None,
    ) -> None:
        """Nothing runs before `frames`; each host gets all of `stdin`."""
        self._session = session
        self._hosts = hosts
        self._command = command
        self._stdin = stdin
        self._frames: asyncio.Queue[Frame] = asyncio.Queue(2)

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """Run the command and yield its frames; closing this generator ends it on every host."""
        fanout = Fanout(self._taken(self._stdin), len(self._hosts)) if self._stdin else None
        tasks = [
            asyncio.create_task(self._run(host, fanout.reader(number) if fanout else None))
            for number, host in enumerate(self._hosts)
        ]
        if fanout:
            tasks.append(asyncio.create_task(fanout.run()))
        going = set(self._hosts)
        try:
            yield {"hosts": [*self._hosts]}
            while going:
                frame = await self._frames.get()
                if "exit_code" in frame:
                    going.discard(frame["host"])
                yield frame
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, host: int, stdin: AsyncIterator[bytes] | None) -> None:
        # Already imported with the first connection, which exists by now.
        from drumline.hosts.connection import describe_connection_error
        from drumline.hosts.driver import CONNECTION_ERRORS

        async def output(stream: Stream, data: bytes) -> None:
            text = base64.b64encode(data).decode()
            await self._frames.put({"host": host, "stream": stream, "data": text})

        end: Frame = {"host": host, "exit_code": None}
        try:
            end["exit_code"] = await self._session.run(host, self._command, output, stdin=stdin)
        except CONNECTION_ERRORS as trouble:
            end["error"] = describe_connection_error(trouble)
        except Exception as trouble:
            # Without this last frame the caller would wait for ever.
            log.exception("a command on host %d", host)
            end["error"] = f"the server failed ({trouble}), see its log"
        await self._frames.put(end)

    async def _taken(self, stdin: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The input, with a `taken` frame for each piece once it was passed on."""
        async for piece in stdin:
            yield piece
            await self._frames.put({"taken": len(piece)})
