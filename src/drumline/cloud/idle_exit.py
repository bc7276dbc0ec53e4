"""Lets a server exit when it is idle.

The job manager's server and the emulator are started by commands. Without this they would run
forever on the machine of a user who tried them once.
"""

import asyncio
import time
from collections.abc import Callable, Collection

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

MAX_POLL_SECONDS = 5.0
SHUTDOWN_SECONDS = 0.5
"""The seconds in which connected callers still get a refusal."""


class IdleExit:
    """An application that counts its open calls, and rejects calls once the server is exiting.

    A rejected call has had no effect, so the caller may send it to the next server.
    """

    def __init__(
        self,
        app: ASGIApp,
        is_busy: Callable[[], bool],
        idle_seconds: float | None,
        *,
        ignored_paths: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Exit `idle_seconds` after the last call and after the last time that it was busy.

        None means never. Calls of `ignored_paths` do not count.
        """
        self._app = app
        self._is_busy = is_busy
        self._idle_seconds = idle_seconds
        self._ignored_paths = ignored_paths
        self._clock = clock
        self._open_calls = 0
        self._last_active = clock()
        self._exiting = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, and count it."""
        if self._exiting and scope["type"] == "http":
            rejection = JSONResponse({"error": "the server is exiting; try again"}, 503)
            await rejection(scope, receive, send)
            return
        if scope.get("path") in self._ignored_paths:
            await self._app(scope, receive, send)
            return
        self._open_calls += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open_calls -= 1
            self._last_active = self._clock()

    def seconds_left(self) -> float | None:
        """Return the seconds until it exits if it stays idle, or None while it is active."""
        if self._idle_seconds is None:
            return None
        if self._open_calls or self._is_busy():
            self._last_active = self._clock()
            return None
        return max(self._last_active + self._idle_seconds - self._clock(), 0.0)

    async def wait_until_idle(self) -> None:
        """Return when it is time to exit. From then on, calls are rejected."""
        while True:
            seconds = self.seconds_left()
            if seconds == 0.0:
                self._exiting = True
                return
            await asyncio.sleep(
                MAX_POLL_SECONDS if seconds is None else min(seconds, MAX_POLL_SECONDS)
            )
