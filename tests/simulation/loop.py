"""An event loop that is deterministic for a seed.

Time is virtual: it jumps to the next timer when nothing is ready. If several callbacks are ready,
the seed decides which runs next. There are no threads, sockets or signals; using one raises an
exception. Each callback belongs to the *party* that scheduled it. A party can be killed, after
which none of its callbacks runs again, or put to sleep for a while.
"""

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NoReturn
from weakref import WeakSet

PARTY: ContextVar[str] = ContextVar("party", default="environment")
"""The party of the running callback: the environment, or one process of the server."""


RESOLUTION = 1e-5
"""Seconds. A float has no smaller steps at this date, so an exact comparison would miss timers."""


MAX_STEPS_PER_INSTANT = 50_000
"""More callbacks than any instant needs."""


class Deadlock(Exception):
    """Nothing is ready and no timer is set, so the awaited future never completes."""


class Spinning(Exception):
    """Time does not advance, because a callback is always ready."""


class NotSimulated(Exception):
    """A call would make two runs of a seed differ."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks one at a time, in an order drawn from `order`."""

    # Every asyncio loop has this attribute, but the published types omit it.
    _ready: deque[Any]

    def __init__(self, order: random.Random, begin: float = 1_800_000_000.0) -> None:
        """Begin at a virtual time that is also the date."""
        super().__init__()
        self._order = order
        self._queue: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers = 0
        self._steps_at_tick = 0
        """The number of callbacks that had run when time last advanced."""
        self._now = begin
        self._killed: set[str] = set()
        self._asleep: dict[str, list[asyncio.Handle]] = {}
        self.steps = 0
        """The number of callbacks that ran so far."""
        self._alarms: list[tuple[int, Callable[[], None]]] = []
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()

    def time(self) -> float:
        """Return the virtual time."""
        return self._now

    def kill(self, party: str) -> None:
        """Drop all callbacks of this party: no `finally` runs."""
        self._killed.add(party)
        self._asleep.pop(party, None)

    def after_steps(self, steps: int, work: Callable[[], None]) -> None:
        """Call `work` right after so many more callbacks."""
        self._alarms.append((self.steps + steps, work))

    def put_to_sleep(self, party: str) -> None:
        """Hold back the callbacks of this party until it wakes up."""
        self._asleep.setdefault(party, [])

    def wake_up(self, party: str) -> None:
        """Run the callbacks that became ready while the party slept."""
        self._ready.extend(self._asleep.pop(party, []))

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Schedule a callback, without asyncio's checks for other threads."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        """Schedule a timer. Timers of one instant run in the order in which they were set."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers += 1
        heapq.heappush(self._queue, (when, self._timers, timer))
        return timer

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        """Create a task and remember it: asyncio's own list has the tasks of all loops."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.add(task)
        return task

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """Return the pending tasks. Holding them keeps the garbage collector from closing them."""
        return [task for task in self._tasks if not task.done()]

    def _timer_handle_cancelled(self, handle: Any) -> None:
        """Do nothing: a cancelled timer is skipped at its time."""

    def _run_once(self) -> None:
        ready, queue = self._ready, self._queue
        if not ready:
            while queue and queue[0][2]._cancelled:
                heapq.heappop(queue)
            if not queue:
                raise Deadlock
            if queue[0][0] > self._now:
                self._now, self._steps_at_tick = queue[0][0], self.steps
        elif self.steps > self._steps_at_tick + MAX_STEPS_PER_INSTANT:
            raise Spinning
        due = self._now + RESOLUTION
        while queue and queue[0][0] < due:
            timer = heapq.heappop(queue)[2]
            if not timer._cancelled:
                ready.append(timer)
        if not ready:
            return
        if len(ready) > 1:
            ready.rotate(-int(self._order.random() * len(ready)))
        handle = ready.popleft()
        if handle._cancelled:
            return
        party = handle._context.get(PARTY, "environment")
        if party in self._killed:
            return
        if party in self._asleep:
            self._asleep[party].append(handle)
            return
        handle._run()
        self.steps += 1
        if self._alarms:
            callbacks_due = [work for step, work in self._alarms if step <= self.steps]
            self._alarms = [alarm for alarm in self._alarms if alarm[0] > self.steps]
            for work in callbacks_due:
                work()

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Call the function at once, since there are no threads."""
        del executor
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        """Schedule a callback, since there is only one thread."""
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: Any) -> None:
        del event_list

    def _write_to_self(self) -> None:
        pass

    def _add_reader(self, *_: Any) -> NoReturn:
        raise NotSimulated("a file descriptor was to be read")

    async def create_connection(self, *_: Any, **__: Any) -> NoReturn:
        """Raise, since there is no network."""
        raise NotSimulated("a connection was to be opened")
