"""The world outside the server: its clock, its dice, what was done in it, and who knows what."""

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
    """Draws in the words of the simulation."""

    def chance(self, probability: float) -> bool:
        """Whether something of that probability happens."""
        return self.random() < probability

    def delay(self, usual: float, rare: float = 0.0, how_rare: float = 0.02) -> float:
        """Seconds around `usual`, and now and then up to `rare`."""
        if rare and self.chance(how_rare):
            return self.uniform(usual, rare)
        return usual * self.uniform(0.5, 1.5)


class RandomStreams:
    """The streams of one seed, by name."""

    def __init__(self, seed: int) -> None:
        """Every stream follows from the seed and its name alone."""
        self._seed = seed
        self._known: dict[str, Stream] = {}

    def __getitem__(self, name: str) -> Stream:
        """The stream of that name."""
        if name not in self._known:
            self._known[name] = Stream(f"{self._seed}/{name}")
        return self._known[name]


class Environment:
    """All that is true, whether or not the server has seen it."""

    def __init__(self, loop: SimulatedLoop, streams: RandomStreams) -> None:
        """Begin with nothing."""
        self.loop = loop
        self.streams = streams
        self.hosts: dict[str, Host] = {}
        """Address → the host that answers there."""
        self.buckets: dict[str, Bucket] = {}
        self.folders: dict[str, Folder] = {}
        """Checkpoint folder → what is in it."""
        self.homes: list[str] = []
        """The id of each job database, as it is first met."""
        self.plans: dict[str, Plan] = {}
        self.running: dict[tuple[str, int], Running] = {}
        """Job and attempt → its program, from its first start on."""
        self.failures: dict[str, int] = {}
        """Job → how often its program failed by its own fault."""
        self.started: dict[tuple[str, int, str], int] = {}
        """Job, attempt and host → how often the program was started there."""
        self.host_faults: Counter[str] = Counter()
        """Slice → how often one of its hosts misbehaved."""
        self.taken: set[str] = set()
        """Slices that the cloud took, or never gave."""
        self.liars: set[tuple[str, int]] = set()
        """Job and attempt of programs that a host gave out as ended."""
        self.starting: list[Callable[[str, int, str], None]] = []
        """Called at every start of a program."""
        self.trace: list[tuple[Any, ...]] = []
        self.broken: list[str] = []
        """Promises that were not kept."""
        self.quiet = False
        """Whether the faults have stopped."""
        self._bad: dict[str, bool] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._begin = loop.time()

    def key(self, owner: str, job: str) -> str:
        """The name of a job among those of all homes: `000007`, and `000007@2` in a second home."""
        if owner not in self.homes:
            self.homes.append(owner)
        home = 1 + self.homes.index(owner)
        return job if home == 1 else f"{job}@{home}"

    def now(self) -> float:
        """The true time."""
        return self.loop.time()

    def is_bad(self, machine: str) -> bool:
        """Whether a chip of that machine lies; until the faults have stopped."""
        if machine not in self._bad:
            self._bad[machine] = self.streams[f"machine {machine}"].chance(0.08)
        return self._bad[machine] and not self.quiet

    def note(self, *what: Any) -> None:
        """Remember that something happened."""
        self.trace.append((round(self.now() - self._begin, 3), *what))

    def fail(self, promise: str) -> None:
        """A promise was not kept: that is the end of the night."""
        self.note("BROKEN", promise)
        self.broken.append(promise)
        self.loop.stop()

    def spawn(self, work: Coroutine[Any, Any, Any], party: str = "world") -> asyncio.Task[Any]:
        """Let something happen beside all else, on behalf of a party."""
        context = copy_context()
        context.run(PARTY.set, party)
        task = self.loop.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(f"the simulation itself failed: {error!r}")
