"""The environment of the simulated servers: time, random numbers, hosts, and a record of events."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from tests.simulation.loop import PARTY, SimulatedLoop

if TYPE_CHECKING:
    from tests.simulation.hosts import Host
    from tests.simulation.programs import Bucket, Folder, Plan, Running


class Stream(random.Random):
    """A stream of random numbers."""

    def bernoulli(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random() < probability

    def delay(self, usual: float, rare: float = 0.0, how_rare: float = 0.02) -> float:
        """Return seconds around `usual`, and now and then up to `rare`."""
        if rare and self.bernoulli(how_rare):
            return self.uniform(usual, rare)
        return usual * self.uniform(0.5, 1.5)


class RandomStreams:
    """The streams of one seed, by name."""

    def __init__(self, seed: int) -> None:
        """A stream depends only on the seed and its name."""
        self._seed = seed
        self._streams: dict[str, Stream] = {}

    def __getitem__(self, name: str) -> Stream:
        """Return the stream of that name."""
        if name not in self._streams:
            self._streams[name] = Stream(f"{self._seed}/{name}")
        return self._streams[name]


class Environment:
    """The true state of everything, whether or not a server has observed it."""

    def __init__(self, loop: SimulatedLoop, streams: RandomStreams) -> None:
        """Start empty."""
        self.loop = loop
        self.streams = streams
        self.hosts: dict[str, Host] = {}
        """Address → the host at this address."""
        self.buckets: dict[str, Bucket] = {}
        self.folders: dict[str, Folder] = {}
        """Checkpoint folder → its contents."""
        self.homes: list[str] = []
        """The id of each job database, in the order of their first use."""
        self.plans: dict[str, Plan] = {}
        self.running: dict[tuple[str, int], Running] = {}
        """Job and attempt → its program, from its first start on."""
        self.failures: dict[str, int] = {}
        """Job → the number of failures that its program caused."""
        self.started: dict[tuple[str, int, str], int] = {}
        """Job, attempt and host → the number of starts of the program there."""
        self.host_faults: Counter[str] = Counter()
        """Slice → the number of faults of its hosts."""
        self.interrupted_slices: set[str] = set()
        """Slices that the cloud preempted, or never granted."""
        self.misreported_runs: set[tuple[str, int]] = set()
        """Job and attempt of programs that a host wrongly reported as ended."""
        self.start_checks: list[Callable[[str, int, str], None]] = []
        """Callbacks that are called at every start of a program."""
        self.trace: list[tuple[Any, ...]] = []
        self.violations: list[str] = []
        """Invariants that were violated."""
        self.quiet = False
        """True after the faults have stopped."""
        self._bad: dict[str, bool] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._begin = loop.time()

    def key(self, owner: str, job: str) -> str:
        """Return the name of a job among all homes: `000007`, or `000007@2` in a second home."""
        if owner not in self.homes:
            self.homes.append(owner)
        home = 1 + self.homes.index(owner)
        return job if home == 1 else f"{job}@{home}"

    def now(self) -> float:
        """Return the true time."""
        return self.loop.time()

    def is_bad(self, machine: str) -> bool:
        """Return True if a chip of the machine computes wrong results, until the faults stop."""
        if machine not in self._bad:
            self._bad[machine] = self.streams[f"machine {machine}"].bernoulli(0.08)
        return self._bad[machine] and not self.quiet

    def note(self, *event: Any) -> None:
        """Record an event."""
        self.trace.append((round(self.now() - self._begin, 3), *event))

    def fail(self, violation: str) -> None:
        """Record the violation of an invariant, and end the simulation."""
        self.note("BROKEN", violation)
        self.violations.append(violation)
        self.loop.stop()

    def spawn(
        self, work: Coroutine[Any, Any, Any], party: str = "environment"
    ) -> asyncio.Task[Any]:
        """Start a task on behalf of a party."""
        context = copy_context()
        context.run(PARTY.set, party)
        task = self.loop.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(f"the simulation itself failed: {error!r}")
