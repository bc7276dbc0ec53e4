"""Counts the calls of a server, so that it can exit when it is idle.

The job manager's server and the emulator are started by commands and would otherwise run for ever
on the machine of a user who once tried them.
"""

import asyncio
import time
from collections.abc import Callable, Collection

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LONGEST_POLL = 5.0
LAST_CALLERS = 0.5
"""Seconds in which connected callers are still answered, with a refusal."""


class Visits:
    """An application that counts its callers, and refuses them once it is exiting.

    A refused call has had no effect, so the caller may send it to the next server.
    """

    def __init__(
        self,
        app: ASGIApp,
        busy: Callable[[], bool],
        patience: float | None,
        *,
        unnoticed: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Exit `patience` seconds after the last call and the last time that it was `busy`.

        Without `patience` it never exits. Calls of the paths `unnoticed` do not count.
        """
        self._app = app
        self._busy = busy
        self._patience = patience
        self._unnoticed = unnoticed
        self._clock = clock
        self._open = 0
        self._last = clock()
        self._leaving = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, and count it."""
        if self._leaving and scope["type"] == "http":
            refusal = JSONResponse({"error": "the server is leaving; ask again"}, 503)
            await refusal(scope, receive, send)
            return
        if scope.get("path") in self._unnoticed:
            await self._app(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
            self._last = self._clock()

    def leaves_in(self) -> float | None:
        """Seconds until it exits if nothing happens; None while it is not idle."""
        if self._patience is None:
            return None
        if self._open or self._busy():
            self._last = self._clock()
            return None
        return max(self._last + self._patience - self._clock(), 0.0)

    async def over(self) -> None:
        """Return when it is time to exit; from then on callers are refused."""
        while True:
            left = self.leaves_in()
            if left == 0.0:
                self._leaving = True
                return
            await asyncio.sleep(LONGEST_POLL if left is None else min(left, LONGEST_POLL))
