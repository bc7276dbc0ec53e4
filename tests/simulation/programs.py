"""What users' programs do: step, save, tell, fail, hang, and leave when they are told to.

The ranks of one attempt are one program: it steps when all have started, and when one dies the
others follow. Checkpoints are in a bucket, which outlives every slice.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.simulation.nature import Nature

BEAT = 900.0
"""Seconds between two heartbeats."""

Failing = Literal["exit", "killed", "hang"]
Manner = Literal["leaves", "dies", "ignores"]
"""What a program does on SIGTERM: save and exit 75, die of it, or nothing."""


@dataclass(frozen=True)
class Bug:
    """A failure of the program, once: the run that comes to this step has it."""

    step: int
    kind: Failing
    rank: int = 0


@dataclass(frozen=True)
class Plan:
    """What the program of one job does."""

    steps: int
    seconds: float
    """How long a step takes."""
    save_every: int
    """Steps between two checkpoints."""
    bugs: tuple[Bug, ...] = ()
    on_sigterm: Manner = "dies"
    tells: bool = True
    """Whether it writes heartbeats."""


@dataclass
class Bucket:
    """What a job's checkpoints hold."""

    saved: int = 0
    bugs_had: set[int] = field(default_factory=set)
    useful_seconds: float = 0.0


class Running:
    """One attempt of a program: all its ranks."""

    def __init__(self, nature: Nature, job: str, attempt: int, ranks: int, plan: Plan) -> None:
        """Nothing happens before every rank has started."""
        self._nature = nature
        self.job, self.attempt, self._ranks = job, attempt, ranks
        self._plan = plan
        self._bucket = nature.buckets.setdefault(job, Bucket())
        self._joined: dict[int, Any] = {}
        """Rank → where it runs: what is told `told` and `ended`."""
        self._task: asyncio.Task[None] | None = None
        self.step = self._bucket.saved
        self.hanging = False

    def join(self, rank: int, place: Any) -> None:
        """A rank has started."""
        self._joined[rank] = place
        if len(self._joined) == self._ranks:
            self._task = self._nature.spawn(self._go())

    async def _go(self) -> None:
        plan, bucket = self._plan, self._bucket
        await asyncio.sleep(20.0)  # compiling
        resumed = self.step = bucket.saved
        self._tell(resumed)
        beat = self._nature.now() + BEAT
        while self.step < plan.steps:
            ahead = [s for n, s in enumerate(b.step for b in plan.bugs) if n not in bucket.bugs_had]
            goal = min([plan.steps, self.step - self.step % plan.save_every + plan.save_every])
            goal = min([goal, *(step for step in ahead if step > self.step)])
            seconds = (goal - self.step) * plan.seconds
            began, first = self._nature.now(), self.step
            while (left := began + seconds - self._nature.now()) > 0:
                await asyncio.sleep(min(left, max(0.01, beat - self._nature.now())))
                passed = (self._nature.now() - began) / plan.seconds
                self.step = min(goal, first + int(passed))
                if self._nature.now() >= beat:
                    beat = self._nature.now() + BEAT
                    self._tell(resumed)
            self.step = goal
            bug = self._bug_at(goal)
            if bug is not None:
                self._has(bug)
                return
            if goal % plan.save_every == 0 or goal == plan.steps:
                bucket.useful_seconds += (goal - bucket.saved) * plan.seconds
                bucket.saved = goal
            self._tell(resumed)
        for place in list(self._joined.values()):
            place.ended(0, "")

    def _bug_at(self, step: int) -> Bug | None:
        for number, bug in enumerate(self._plan.bugs):
            if bug.step == step and number not in self._bucket.bugs_had:
                self._bucket.bugs_had.add(number)
                return bug
        return None

    def _has(self, bug: Bug) -> None:
        self._nature.note("bug", self.job, self.attempt, bug.kind)
        if bug.kind == "hang":
            self.hanging = True
            self._nature.failures[self.job] = self._nature.failures.get(self.job, 0) + 1
            return
        code = 1 if bug.kind == "exit" else -9
        self._nature.failures[self.job] = self._nature.failures.get(self.job, 0) + 1
        self.rank_died(bug.rank % self._ranks, code, "ValueError: shapes do not match")

    def rank_died(self, rank: int, code: int, error: str = "") -> None:
        """One rank ended by itself; the others lose their sibling and follow."""
        place = self._joined.pop(rank, None)
        if place is not None:
            place.ended(code, error)
        self._follow()

    def _follow(self) -> None:
        self._end_task()
        for rank in list(self._joined):
            self._nature.spawn(self._follows(rank, self._nature.streams["programs"].delay(5.0)))

    async def _follows(self, rank: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        place = self._joined.pop(rank, None)
        if place is not None:
            place.ended(1, "Connection reset by peer")

    def seconds_to_end(self) -> float | None:
        """How long it takes after a SIGTERM to end by itself; None where it does not."""
        if self._plan.on_sigterm == "ignores" or self.hanging:
            return None
        return 3.0 if self._plan.on_sigterm == "leaves" else 0.1

    def ends_after_sigterm(self, rank: int) -> None:
        """It saved what it had, or died of the signal."""
        place = self._joined.pop(rank, None)
        if place is None:
            return
        if self._plan.on_sigterm == "leaves":
            gained = max(0, self.step - self._bucket.saved)
            self._bucket.useful_seconds += gained * self._plan.seconds
            self._bucket.saved = max(self._bucket.saved, self.step)
            place.ended(75, "")
        else:
            place.ended(-15, "")
        self._follow()

    def gone(self, rank: int) -> None:
        """A rank vanished with its host, and tells nobody."""
        if self._joined.pop(rank, None) is not None:
            self._follow()

    def _end_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _tell(self, resumed: int) -> None:
        if not self._plan.tells:
            return
        told = {
            "step": self.step,
            "total": self._plan.steps,
            "resumed": resumed,
            "checkpoint": self._bucket.saved,
        }
        place = self._joined.get(0)
        if place is not None:
            place.told(told)
