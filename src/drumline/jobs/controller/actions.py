"""What is under way: one task for each action, and a backoff after each that failed.

`decide` runs in every round, so the same action is ordered again and again until its result is
observed. Here it is started once; an action that raised is retried only after a backoff, longer
each time: a full disk or a bug of ours must not become a thousand tries a minute.
"""

import asyncio
import errno
import logging
import sqlite3
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""The most seconds between two tries of an action that fails."""


@dataclass(frozen=True)
class _Failed:
    times: int
    again_at: float
    job_id: str | None
    said: str


class Actions:
    """Everything slow that the supervisor has begun, by a key that names it."""

    def __init__(self, clock: Callable[[], float], ended: Callable[[], None]) -> None:
        """`ended` is called after each action, done or failed."""
        self._clock = clock
        self._ended = ended
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, _Failed] = {}
        self.unwritable = ""
        """Why the disk cannot be written to at present; empty while it can."""

    def may_start(self, key: str) -> bool:
        """Whether the action is neither under way nor backing off after a failure."""
        failed = self._failed.get(key)
        return key not in self._tasks and (failed is None or self._clock() >= failed.again_at)

    def start(
        self,
        key: str,
        work: Callable[[], Coroutine[Any, Any, None]],
        job_id: str | None = None,
    ) -> bool:
        """Run `work` in a task of its own and return True, unless it is under way or backs off."""
        if not self.may_start(key):
            return False
        self._tasks[key] = asyncio.create_task(self._guarded(key, work, job_id), name=key)
        return True

    async def _guarded(
        self, key: str, work: Callable[[], Coroutine[Any, Any, None]], job_id: str | None
    ) -> None:
        try:
            await work()
            self.succeeded(key)
        except Exception as trouble:
            self.failed(key, trouble, job_id)
        finally:
            self._tasks.pop(key, None)
            self._ended()

    def attempt(self, key: str, work: Callable[[], None], job_id: str | None = None) -> None:
        """Do `work` now, with the same handling of errors and backoff: for what takes no time."""
        if not self.may_start(key):
            return
        try:
            work()
            self.succeeded(key)
        except Exception as trouble:
            self.failed(key, trouble, job_id)

    def succeeded(self, key: str) -> None:
        """Note a success: the action may be started again at once."""
        self._failed.pop(key, None)

    def failed(self, key: str, trouble: Exception, job_id: str | None = None) -> None:
        """Note a failure and back off; only the first of equal failures logs a traceback."""
        if is_about_storage(trouble):
            self.unwritable = f"nothing can be written: {trouble}"
        before = self._failed.get(key)
        times = before.times + 1 if before else 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(times - 1, 10))
        said = f"{key} failed: {_in_words(trouble)}"
        self._failed[key] = _Failed(times, self._clock() + pause, job_id, said)
        if before is None or before.said != said:
            log.error("%s", said, exc_info=trouble)
        else:
            log.warning("%s, for the %dth time; again in %.0f s", said, times, pause)

    def under_way(self, kind: str) -> set[str]:
        """What comes after `kind` in the keys of the tasks that begin with it."""
        return {key.removeprefix(kind) for key in self._tasks if key.startswith(kind)}

    def writable_again(self) -> None:
        """The disk can be written to again: nothing needs to back off any longer."""
        self.unwritable = ""
        self._failed.clear()

    def trouble(self, job_id: str) -> str:
        """What failed for a job and will be retried; empty where nothing did."""
        for failed in self._failed.values():
            if failed.job_id == job_id:
                return f"{failed.said}; trying again"
        return ""

    def next_try(self) -> float | None:
        """Seconds until the first failed action may be retried; None where there is none."""
        now = self._clock()
        waits = [f.again_at - now for f in self._failed.values() if f.again_at > now]
        return min(waits, default=None)

    def forget(self, job_id: str) -> None:
        """Nothing more is to be done for a job."""
        self._failed = {k: f for k, f in self._failed.items() if f.job_id != job_id}

    async def close(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def is_about_storage(trouble: Exception) -> bool:
    """Whether the error says that the disk is full or cannot be written to."""
    if isinstance(trouble, sqlite3.OperationalError):
        return "disk" in str(trouble) or "readonly" in str(trouble)
    return isinstance(trouble, OSError) and trouble.errno in _NO_ROOM


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class Budget:
    """A limit of so many calls a minute: the cloud limits the calls that create something."""

    def __init__(self, a_minute: float, clock: Callable[[], float]) -> None:
        """Begin with a minute's worth."""
        self._rate = a_minute
        self._clock = clock
        self._left = a_minute
        self._counted_at = clock()

    def take(self) -> bool:
        """Take one, if there is one left."""
        now = self._clock()
        self._left = min(self._rate, self._left + (now - self._counted_at) * self._rate / 60)
        self._counted_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _in_words(trouble: Exception) -> str:
    return f"{type(trouble).__name__}: {trouble}" if str(trouble) else type(trouble).__name__
