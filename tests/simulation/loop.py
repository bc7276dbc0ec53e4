"""An event loop in which nothing is left to chance but what the seed says.

Time is virtual: it jumps to the next timer when nothing is ready. Of several callbacks that are
ready, the seed says which runs next. There are no threads, no sockets and no signals: whoever asks
for one is told so by an exception. Each callback belongs to a *party*, the one that scheduled it;
a party can be killed, after which none of its callbacks runs again, or be put to sleep for a while.
"""

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NoReturn
from weakref import WeakSet

PARTY: ContextVar[str] = ContextVar("party", default="world")
"""Who runs now: the world, or one life of the server."""


RESOLUTION = 1e-5
"""Seconds. At this date a float has no smaller steps; a timer missed by one would never ring."""


MOMENT = 50_000
"""Callbacks that no moment needs."""


class Deadlock(Exception):
    """Nothing is ready and no timer is set: what is awaited can never come."""


class Spinning(Exception):
    """Time does not pass any more, because something is always ready."""


class NotSimulated(Exception):
    """Something was asked for that would make two runs of a seed differ."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks one at a time, in an order drawn from `order`."""

    # What every asyncio loop has, and its published types leave out.
    _ready: deque[Any]

    def __init__(self, order: random.Random, begin: float = 1_800_000_000.0) -> None:
        """Begin at a virtual time that is also the date."""
        super().__init__()
        self._order = order
        self._queue: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers = 0
        self._moment = 0
        """How many callbacks had run when time last passed."""
        self._now = begin
        self._killed: set[str] = set()
        self._asleep: dict[str, list[asyncio.Handle]] = {}
        self.steps = 0
        """Callbacks that ran so far."""
        self._alarms: list[tuple[int, Callable[[], None]]] = []
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()

    def time(self) -> float:
        """The virtual time."""
        return self._now

    def kill(self, party: str) -> None:
        """Nothing that this party scheduled runs any more: no `finally`, no farewell."""
        self._killed.add(party)
        self._asleep.pop(party, None)

    def after_steps(self, steps: int, work: Callable[[], None]) -> None:
        """Do something right after so many more callbacks, in the midst of whatever goes on."""
        self._alarms.append((self.steps + steps, work))

    def put_to_sleep(self, party: str) -> None:
        """What this party scheduled waits until it wakes."""
        self._asleep.setdefault(party, [])

    def wake_up(self, party: str) -> None:
        """All that became ready meanwhile runs now, late."""
        self._ready.extend(self._asleep.pop(party, []))

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """As every loop does, without the checks for other threads."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        """Timers of one moment in the order in which they were set."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers += 1
        heapq.heappush(self._queue, (when, self._timers, timer))
        return timer

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        """As every loop does, and remember it: asyncio's own list has those of all loops."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.add(task)
        return task

    def under_way(self) -> list[asyncio.Task[Any]]:
        """The tasks that are not done; whoever keeps them keeps the collector from closing them."""
        return [task for task in self._tasks if not task.done()]

    def _timer_handle_cancelled(self, handle: Any) -> None:
        """It is passed over when its time comes."""

    def _run_once(self) -> None:
        ready, queue = self._ready, self._queue
        if not ready:
            while queue and queue[0][2]._cancelled:
                heapq.heappop(queue)
            if not queue:
                raise Deadlock
            if queue[0][0] > self._now:
                self._now, self._moment = queue[0][0], self.steps
        elif self.steps > self._moment + MOMENT:
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
        party = handle._context.get(PARTY, "world")
        if party in self._killed:
            return
        if party in self._asleep:
            self._asleep[party].append(handle)
            return
        handle._run()
        self.steps += 1
        if self._alarms:
            rings = [work for step, work in self._alarms if step <= self.steps]
            self._alarms = [alarm for alarm in self._alarms if alarm[0] > self.steps]
            for work in rings:
                work()

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Done at once: there are no threads here."""
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
        """The one thread there is."""
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: Any) -> None:
        del event_list

    def _write_to_self(self) -> None:
        pass

    def _add_reader(self, *_: Any) -> NoReturn:
        raise NotSimulated("a file descriptor was to be read")

    async def create_connection(self, *_: Any, **__: Any) -> NoReturn:
        """There is no network."""
        raise NotSimulated("a connection was to be opened")
