"""Who calls a server, so that one that nobody needs can leave by itself.

The job manager's server and the emulator are started by commands and would otherwise run for ever
on the machine of somebody who once tried them.
"""

import asyncio
import time
from collections.abc import Callable, Collection

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LONGEST_POLL = 5.0
LAST_CALLERS = 0.5
"""Seconds for those who are connected to hear that nobody serves them here."""


class Visits:
    """An application that counts its callers, and turns them away once it is leaving.

    What is turned away has not been done, so whoever called may ask the next server for it.
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
        """Leave `patience` seconds after the last call and the last moment that it was `busy`.

        Without patience it stays. Calls of the paths `unnoticed` count for nothing.
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
        """Pass a call on, and remember that there was one."""
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
        """Seconds until it leaves if nothing happens; None while it does not think of it."""
        if self._patience is None:
            return None
        if self._open or self._busy():
            self._last = self._clock()
            return None
        return max(self._last + self._patience - self._clock(), 0.0)

    async def over(self) -> None:
        """Return when it is time to leave; from then on callers are turned away."""
        while True:
            left = self.leaves_in()
            if left == 0.0:
                self._leaving = True
                return
            await asyncio.sleep(LONGEST_POLL if left is None else min(left, LONGEST_POLL))
