"""Simulated programs of users: they step, save, report, fail, hang, and end on SIGTERM.

The ranks of one attempt are one program: it steps when all have started, and when one dies the
others follow. Checkpoints are in a bucket, which outlives every slice, behind the real fence. A
write that was in flight when its host was preempted may still complete hours later, because a
paused machine wakes up or the bucket is slow.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from drumline.errors import UserError
from drumline.train.checkpoints.fence import Fence, FencedOff, Writer, newest
from tests.simulation.environment import Environment
from tests.train.checkpoints.fences import MemoryRecords, fence_of

BEAT = 900.0
"""Seconds between two heartbeats."""

WRITING = 20.0
"""Seconds that a checkpoint usually takes to be written."""
LATE = 0.3
"""The share of killed programs whose write in flight still completes."""

FailureKind = Literal["exit", "killed", "hang"]
SigtermReaction = Literal["leaves", "dies", "ignores"]
"""A program's reaction to SIGTERM: save and exit 75, die of it, or ignore it."""


@dataclass(frozen=True)
class Bug:
    """A failure of the program that occurs once, in the run that reaches this step."""

    step: int
    kind: FailureKind
    rank: int = 0


@dataclass(frozen=True)
class Plan:
    """The behaviour of one job's program."""

    steps: int
    seconds: float
    """Duration of a step in seconds."""
    save_every: int
    """Steps between two checkpoints."""
    bugs: tuple[Bug, ...] = ()
    on_sigterm: SigtermReaction = "dies"
    writes_heartbeats: bool = True
    """True if it writes heartbeats."""


@dataclass
class Bucket:
    """The progress of a job in its checkpoints."""

    saved: int = 0
    bugs_had: set[int] = field(default_factory=set)
    useful_seconds: float = 0.0


class Folder:
    """A checkpoint folder: its claims, its complete checkpoints, and their writers."""

    def __init__(self, environment: Environment, name: str) -> None:
        """Begin empty."""
        self._environment, self._name = environment, name
        self.records = MemoryRecords()
        self.complete: dict[str, tuple[str, int]] = {}
        """Name → the job whose parameters it has, and the step."""
        self.announced: dict[str, int] = {}
        """Name → the claim of the last writer that has announced to write it."""

    def claim(self, job: str, attempt: int, owner: str, fence: int) -> Fence:
        """Claim the folder as a program does. Raises UserError."""
        writer = Writer(f"{job}/{attempt}/{fence}", owner, job, attempt, fence, assigned=True)
        return fence_of(writer, self.records, self.complete.__contains__)

    def restore(self, job: str) -> int:
        """Return the newest step from which a program of this job resumes."""
        others = {other for other, _ in self.complete.values()} - {job}
        if others:
            self._environment.fail(f"{job} finds checkpoints of {min(others)} in {self._name}")
        return max((step for _, step in self.complete.values()), default=0)

    def new_name(self, step: int, fence: Fence) -> str:
        """Return a name for a new checkpoint that no earlier writer may still write to."""
        name = str(step)
        return name if name not in fence.abandoned else f"{name}.{fence.number}"

    def put(self, name: str, job: str, step: int, writer: Fence) -> None:
        """Complete a checkpoint."""
        self._check("wrote to", name, job, writer)
        self.complete[name] = (job, step)

    def remove(self, name: str, job: str, writer: Fence) -> None:
        """Remove a checkpoint."""
        self._check("removed", name, job, writer)
        self.complete.pop(name, None)

    def _check(self, action: str, name: str, job: str, writer: Fence) -> None:
        """Check that a replaced writer changes no file that its successor may use."""
        holder = newest(self.records)
        if holder is None or holder.since == writer.number:
            return
        used_since = self.announced.get(name, 0) > writer.number
        if used_since or name not in (*holder.abandoned, *holder.removing):
            text = (
                f"{job} {action} {name} in {self._name}, which {holder.writer.job} has taken over"
            )
            self._environment.fail(text)


class Running:
    """One attempt of a program: all its ranks."""

    def __init__(
        self,
        environment: Environment,
        job: str,
        attempt: int,
        ranks: int,
        plan: Plan,
        checkpoint: str = "",
        owner: str = "",
        fence: int = 0,
    ) -> None:
        """Wait for every rank; the program steps after all have started."""
        self._environment = environment
        self.job, self.attempt, self._ranks = job, attempt, ranks
        self._plan = plan
        self._bucket = environment.buckets.setdefault(job, Bucket())
        folder_name = checkpoint or job
        self._folder = environment.folders.setdefault(folder_name, Folder(environment, folder_name))
        self._identity = (owner, fence)
        self._fence: Fence | None = None
        self._writing: tuple[str, int] | None = None
        """The name and the step of the checkpoint that is being written."""
        self._joined: dict[int, Any] = {}
        """Rank → its `HostRun`, which receives `told` and `ended`."""
        self._task: asyncio.Task[None] | None = None
        self.step = self._bucket.saved
        self.hanging = False

    def join(self, rank: int, host_run: Any) -> None:
        """Add a rank that has started."""
        self._joined[rank] = host_run
        if len(self._joined) == self._ranks:
            self._task = self._environment.spawn(self._run())

    async def _run(self) -> None:
        plan, bucket = self._plan, self._bucket
        await asyncio.sleep(20.0)  # compiling
        try:
            self._fence = self._folder.claim(self.job, self.attempt, *self._identity)
        except UserError as error:
            if not self._was_replaced():
                self._environment.fail(f"attempt {self.attempt} of {self.job}: {error}")
            self.rank_died(0, 2, str(error))
            return
        resumed = self.step = self._folder.restore(self.job)
        self._write_heartbeat(resumed)
        beat = self._environment.now() + BEAT
        while self.step < plan.steps:
            bug_steps = [
                s for n, s in enumerate(b.step for b in plan.bugs) if n not in bucket.bugs_had
            ]
            next_stop = min([plan.steps, self.step - self.step % plan.save_every + plan.save_every])
            next_stop = min([next_stop, *(step for step in bug_steps if step > self.step)])
            seconds = (next_stop - self.step) * plan.seconds
            began_at, first = self._environment.now(), self.step
            while (remaining := began_at + seconds - self._environment.now()) > 0:
                await asyncio.sleep(min(remaining, max(0.01, beat - self._environment.now())))
                passed = (self._environment.now() - began_at) / plan.seconds
                self.step = min(next_stop, first + int(passed))
                if self._environment.now() >= beat:
                    beat = self._environment.now() + BEAT
                    self._write_heartbeat(resumed)
            self.step = next_stop
            bug = self._bug_at(next_stop)
            if bug is not None:
                self._fail_with(bug)
                return
            if next_stop % plan.save_every == 0 or next_stop == plan.steps:
                try:
                    self._begin_write(next_stop)
                    await asyncio.sleep(self._environment.streams["programs"].delay(WRITING))
                    self._end_write()
                except FencedOff as error:
                    self._stopped_by(error)
                    return
            self._write_heartbeat(resumed)
        for host_run in list(self._joined.values()):
            host_run.on_end(0, "")

    def _begin_write(self, step: int) -> None:
        assert self._fence is not None
        self._fence.check()
        name = self._folder.new_name(step, self._fence)
        self._fence.begin_write(name)
        self._folder.announced[name] = self._fence.number
        self._writing = (name, step)

    def _end_write(self) -> None:
        """Complete the checkpoint and remove the older ones, except for the newest two."""
        assert self._fence is not None
        if self._writing is None:
            return
        (name, step), self._writing = self._writing, None
        folder, job = self._folder, self.job
        folder.put(name, job, step, self._fence)
        old = sorted(folder.complete, key=lambda name: folder.complete[name][1])[:-2]
        try:
            self._fence.begin_removal(old)
        except FencedOff:
            if self._fence.may_remove_own(name):
                folder.remove(name, job, self._fence)
            raise
        for name in old:
            folder.remove(name, job, self._fence)
        self._bucket.useful_seconds += max(0, step - self._bucket.saved) * self._plan.seconds
        self._bucket.saved = max(self._bucket.saved, step)

    def _was_replaced(self) -> bool:
        """Return True if a later attempt has claimed the folder."""
        holder = newest(self._folder.records)
        return holder is not None and holder.writer.fence > self._identity[1]

    def _stopped_by(self, error: FencedOff) -> None:
        """End the program. Only a later attempt may have taken the folder over."""
        if not self._was_replaced():
            self._environment.fail(f"attempt {self.attempt} of {self.job}: {error}")
        self.rank_died(0, 1, str(error))

    async def _complete_late(self, seconds: float) -> None:
        """Complete the write that was in flight when the program was killed."""
        await asyncio.sleep(seconds)
        self._environment.note("late", self.job, self.attempt, str(self._writing))
        try:
            if self._fence is None:
                self._fence = self._folder.claim(self.job, self.attempt, *self._identity)
            elif self._writing is not None:
                self._end_write()
            else:
                self._begin_write(self.step + 1)
                self._end_write()
        except (FencedOff, UserError):
            return

    def _bug_at(self, step: int) -> Bug | None:
        for number, bug in enumerate(self._plan.bugs):
            if bug.step == step and number not in self._bucket.bugs_had:
                self._bucket.bugs_had.add(number)
                return bug
        return None

    def _fail_with(self, bug: Bug) -> None:
        self._environment.note("bug", self.job, self.attempt, bug.kind)
        if bug.kind == "hang":
            self.hanging = True
            self._environment.failures[self.job] = self._environment.failures.get(self.job, 0) + 1
            return
        code = 1 if bug.kind == "exit" else -9
        self._environment.failures[self.job] = self._environment.failures.get(self.job, 0) + 1
        self.rank_died(bug.rank % self._ranks, code, "ValueError: shapes do not match")

    def rank_died(self, rank: int, code: int, error: str = "") -> None:
        """End one rank. The others lose their connection to it and follow."""
        host_run = self._joined.pop(rank, None)
        if host_run is not None:
            host_run.on_end(code, error)
        self._follow()

    def _follow(self) -> None:
        self._end_task()
        for rank in list(self._joined):
            self._environment.spawn(
                self._end_later(rank, self._environment.streams["programs"].delay(5.0))
            )

    async def _end_later(self, rank: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        host_run = self._joined.pop(rank, None)
        if host_run is not None:
            host_run.on_end(1, "Connection reset by peer")

    def seconds_to_end(self) -> float | None:
        """Return the seconds until it ends after a SIGTERM; None if it ignores the signal."""
        if self._plan.on_sigterm == "ignores" or self.hanging:
            return None
        return 3.0 if self._plan.on_sigterm == "leaves" else 0.1

    def ends_after_sigterm(self, rank: int) -> None:
        """Save the state, or die of the signal."""
        host_run = self._joined.pop(rank, None)
        if host_run is None:
            return
        if self._plan.on_sigterm == "leaves":
            try:
                if self._fence is not None:
                    self._end_write()
                if self._fence is not None and self.step > self._bucket.saved:
                    self._begin_write(self.step)
                    self._end_write()
            except FencedOff as error:
                host_run.on_end(1, str(error))
            else:
                host_run.on_end(75, "")
        else:
            host_run.on_end(-15, "")
        self._follow()

    def gone(self, rank: int) -> None:
        """Remove a rank that vanished with its host."""
        if self._joined.pop(rank, None) is not None:
            self._follow()

    def _end_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
            stream = self._environment.streams["late"]
            if self._identity[0] and stream.bernoulli(LATE):
                self._environment.spawn(self._complete_late(stream.delay(600.0, 14_400.0, 0.3)))

    def _write_heartbeat(self, resumed: int) -> None:
        if not self._plan.writes_heartbeats:
            return
        report = {
            "step": self.step,
            "total": self._plan.steps,
            "resumed": resumed,
            "checkpoint": self._bucket.saved,
            "fenced": True,
        }
        host_run = self._joined.get(0)
        if host_run is not None:
            host_run.on_heartbeat(report)
