"""The training loop, from top to bottom.

    result = fit(recipe, checkpoint="/data/run")

A run can be stopped at any instant, on any host, and goes on with the same bits: all that a step
depends on is the state, its number and the position in the data, and those are in every checkpoint.
The host never waits for a step it has just started (step.py). What a step tells is read `LAG` steps
later, in the same order on every host, and every decision is made from that alone: all make the
same one.
"""

import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from drumline.heartbeat import heartbeat
from drumline.train.agree import hosts_without, meet
from drumline.train.batches import Batches, Placed
from drumline.train.checkpoints.checkpoint import Checkpoints, Saved, kept
from drumline.train.checkpoints.claim import claim
from drumline.train.checkpoints.files import usable
from drumline.train.checkpoints.provenance import compare, provenance
from drumline.train.mistakes import Mistake
from drumline.train.notice import Notice, listening
from drumline.train.recipe import Recipe
from drumline.train.reporting.goodput import Clock, History, open_history, write_history
from drumline.train.reporting.report import Reports, described
from drumline.train.reporting.throughput import mfu
from drumline.train.result import Ending, Result
from drumline.train.state import begin, everywhere, layout, make_mesh, shardings
from drumline.train.steps.evaluate import Measure
from drumline.train.steps.finite import Blame, Finite, find_host, groups_of, make_finite
from drumline.train.steps.loss import trace_loss
from drumline.train.steps.step import FINITE, LOSS, PASSING, STOP, WATCHING, make_step

LAG = 2
"""Steps between starting one and reading what it told. The devices always have the next at hand,
and a stop on notice comes this many steps late."""
BEAT = 0.5
"""Seconds between two heartbeats."""
ROLLBACKS = 3
"""Times in a row that a run goes back without getting past the step that failed."""

INQUIRIES = 10
"""Batches that are computed again to find out whose they were. A run that skips may meet many: from
then on it no longer halts at them, which costs the steps that were started since."""


def fit(
    recipe: Recipe, *, checkpoint: str | Path | None = None, allow_changes: bool = False
) -> Result:
    """Train to the recipe's last step, from the newest checkpoint in the folder if there is one.

    All hosts call it alike. The folder (or `gs://…`) is one that all of them see; without one,
    nothing is saved. A checkpoint that another recipe or other data led to is refused, unless
    `allow_changes` says that this is meant.
    """
    mesh = make_mesh(recipe.mesh)
    with listening(), jax.set_mesh(mesh), ExitStack() as closing:
        run = _Run(recipe, mesh, None if checkpoint is None else str(checkpoint), closing)
        run.take_up(allow_changes)
        while run.step < recipe.steps:
            run.start_step()
            # A pause is the time to know everything; otherwise what is LAG steps old will do.
            pause = run.saves or run.evaluates
            verdict = run.read(behind=0 if pause else LAG)
            if verdict is _Verdict.STOP and not run.last:
                # The steps that were started since are all hosts' last.
                verdict = run.read(behind=0)
                if verdict is not _Verdict.NOT_FINITE or run.go_past():
                    run.save()
                return run.finish(Ending.STOPPED)
            if verdict is _Verdict.NOT_FINITE and not run.go_past():
                if not run.go_back():
                    return run.finish(Ending.NOT_FINITE)
                continue
            # Past a bad batch the run may stand at an earlier step than it had come to.
            if run.saves and not run.started:
                run.save()
            if run.evaluates and not run.started:
                run.evaluate()
        if not run.metrics:
            run.evaluate()  # there was nothing left to train
        return run.finish(Ending.DONE)


# The run around it --------------------------------------------------------------------------------


class _Verdict(Enum):
    GO_ON = "go on"
    STOP = "a host was told to stop"
    NOT_FINITE = "loss or gradients are not finite"


@dataclass(frozen=True)
class _Started:
    """A step that the devices may still be busy with."""

    step: int
    taken: int
    """Records before its batch."""
    told: jax.Array


class _Run:
    """One attempt: the state, and everything that is done around the steps."""

    def __init__(self, recipe: Recipe, mesh: Mesh, folder: str | None, closing: ExitStack) -> None:
        self.recipe, self.mesh, self.folder = recipe, mesh, folder
        self.reports = Reports(recipe.steps, item=recipe.model.item)
        # What cannot be is refused before anything is opened.
        self.places = layout(recipe, mesh)
        self.placed = Placed(recipe.data, mesh, recipe.model.batch_spec())
        self.shapes = self.placed.shapes()
        loss = trace_loss(recipe.model, self.places.params, self.shapes)
        self.measure: Measure | None = None
        if recipe.evaluation:
            self.measure = Measure(recipe, mesh, self.places.params, loss, self.say)
        self.names = ("loss", "grad_norm", *loss.metrics)
        self.groups = groups_of(self.places.params)
        self.watch = self.watching(WATCHING)
        self.notice = Notice(mesh)
        self.advance = make_step(recipe, mesh, self.places)
        # The first step finds what is compiled here, and no host waits for another's compiler.
        inputs = (self.places, self.watch, self.shapes, self.notice.word)
        self.advance.lower(*inputs).compile()
        meet()
        self.checkpoints: Checkpoints | None = None
        self.provenance: dict[str, Any] = {}
        if folder is None:
            self.open_reports(closing)
        else:
            closing.callback(claim(folder))
            self.provenance = provenance(recipe, mesh, self.places, loss.traced)
            keep = partial(kept, last=recipe.settings.keep_last, every=recipe.settings.keep_every)
            with usable(folder):
                # This first: on a full disk it makes room, of what an earlier attempt left.
                self.checkpoints = Checkpoints(folder, keep, self.say, recipe.steps)
                self.open_reports(closing)
            closing.push(self.save_what_is_under_way)
        self.batches = Batches(self.placed)
        closing.callback(self.batches.close)
        self.clock = Clock()
        self.beat = 0.0
        self.logged = self.evaluated = 0
        self.speed: dict[str, float | None] = {}
        self.metrics: dict[str, float] = {}
        self.report = ""
        self.failed = _Started(0, 0, self.notice.word)
        self.failures = 0
        self.rollbacks: list[_Started] = []
        self.passed_over: set[int] = set()

    def open_reports(self, closing: ExitStack) -> None:
        self.history = open_history(self.folder)
        self.reports.open(self.folder, self.history.attempt)
        closing.callback(self.reports.close)

    def say(self, text: str) -> None:
        self.reports.say(text)

    def save_what_is_under_way(self, kind: type[BaseException] | None, *_: object) -> None:
        """When something breaks, a checkpoint that is being written is still worth having."""
        # With several hosts one must not wait for others that will never come.
        if kind is not None and self.checkpoints and jax.process_count() == 1:
            with suppress(Exception):
                self.checkpoints.wait()

    @property
    def last(self) -> bool:
        return self.step == self.recipe.steps

    @property
    def saves(self) -> bool:
        return self.last or self.step % self.recipe.settings.save_every == 0

    @property
    def evaluates(self) -> bool:
        return self.last or _at(self.step, self.recipe.settings.evaluate_every)

    def watching(self, how: int) -> jax.Array:
        return everywhere(self.mesh, np.asarray(how, np.int32))

    def take_up(self, allow_changes: bool) -> None:
        """Take the newest checkpoint, if it is of this very recipe or that does not matter."""
        found = self.resume()
        if not self.step:
            return
        compared = compare(found.provenance, self.provenance, allow_changes)
        # Data that differ on one host alone end the run on all.
        refusing = hosts_without(not compared.refused)
        if refusing:
            why = compared.refused or f"as host {refusing[0]} sees it"
            raise Mistake(
                f"checkpoint: step {self.step:,} in {self.folder} comes from another recipe "
                f"({why}), and going on would give the result of neither; change it back, name "
                "another folder, or allow it with --allow-changes or fit(…, allow_changes=True)"
            )
        for sentence in (self.whence, *compared.said):
            self.say(sentence)

    @property
    def whence(self) -> str:
        return f"going on from step {self.step:,}"

    def resume(self) -> Saved:
        """Take the newest checkpoint, or begin at the beginning."""
        found = None
        if self.checkpoints:
            batch = self.recipe.data.batch
            found = self.checkpoints.restore(self.places, self.mesh, batch)
        if found is None:
            first = jax.jit(partial(begin, self.recipe), out_shardings=shardings(self.places))
            found = Saved(first(), 0)
        self.state, self.taken = found.state, found.taken
        self.step = self.saved = int(self.state.step.addressable_data(0))
        self.watch = self.watching(WATCHING)
        self.started: deque[_Started] = deque()
        self.clock.start(self.history.seconds.get(self.step, 0.0))
        self.show(self.step, {})
        return found

    def start_step(self) -> None:
        """Hand the devices one more step. Nothing here waits for them."""
        while self.taken in self.passed_over:
            self.taken += self.recipe.data.batch
        batch = self.batches.take(self.taken)
        self.state, self.watch, told = self.advance(self.state, self.watch, batch, self.notice.word)
        told.copy_to_host_async()
        self.step += 1
        self.started.append(_Started(self.step, self.taken, told))
        self.taken += self.recipe.data.batch

    def read(self, behind: int) -> _Verdict:
        """Read what the steps told, all but the last few, or up to one that is not finite."""
        verdict = _Verdict.GO_ON
        while len(self.started) > behind:
            one = self.started.popleft()
            told = np.asarray(one.told.addressable_data(0))
            self.clock.tick()
            values, flags = np.split(told[LOSS:], [len(self.names)])
            again = not told[FINITE] and self.recipe.settings.nan == "rollback"
            if not again:
                self.tell(one.step, dict(zip(self.names, values.tolist(), strict=True)))
            if not told[FINITE]:
                if self.passes:
                    self.say(f"step {one.step}: not a number from {self.named(one)}")
                else:
                    bad = (g for g, good in zip(self.groups, flags, strict=True) if not good)
                    self.blame(one, tuple(bad))
                    return _Verdict.NOT_FINITE
            if told[STOP]:
                verdict = _Verdict.STOP
        return verdict

    def tell(self, step: int, values: dict[str, float]) -> None:
        """Log a step where it is due, and show now and then that the run is alive."""
        self.metrics.update(values)
        now = time.time()
        due = step == self.recipe.steps or step % self.recipe.settings.log_every == 0
        if due:
            pace = self.clock.steps_per_second()
            flops = pace * self.recipe.model.flops(self.shapes)
            self.speed = {
                "rate": pace * self.recipe.model.items(self.shapes) or None,
                "mfu": mfu(flops, list(self.mesh.devices.flat)),
                "goodput": self.history.goodput(self.clock.seconds, now),
            }
            # After a rollback the same steps tell the same once more.
            if step > self.logged:
                self.reports.tell(step, {**values, **self.speed}, now)
            self.logged = max(step, self.logged)
        if due or now - self.beat > BEAT:
            self.beat = now
            self.show(step, {**values, **self.speed})

    def show(self, step: int, values: Mapping[str, object]) -> None:
        """Where the run is, for `drumline list`. Every host has its own heartbeat."""
        known = {
            "total": self.recipe.steps,
            "item": self.recipe.model.item,
            "checkpoint": self.checkpoints.committed if self.checkpoints else None,
        }
        heartbeat(step, **{name: v for name, v in {**values, **known}.items() if name != "step"})

    def blame(self, bad: _Started, groups: tuple[str, ...]) -> None:
        """Find out where a value that is not finite came from, and say so.

        The run halted at it: the parameters are the very ones it was computed with.
        """
        self.failed = bad
        self.failures += 1
        data, rows = self.recipe.data, self.placed.rows_of_hosts
        batch = self.placed.load(bad.taken, data.numbers)
        key = jax.random.fold_in(jax.random.wrap_key_data(self.state.key), bad.step - 1)
        again = partial(self.finite, self.state.params, batch, key)
        host, repeats = find_host(again, data.batch, rows)
        self.report = Blame(host, len(rows), groups, repeats).told(bad.step, self.named(bad))
        self.say(self.report)

    def named(self, started: _Started) -> str:
        """The batch of a step, by its number; after a change of its size, by its first record."""
        number, rest = divmod(started.taken, self.recipe.data.batch)
        return f"the batch from record {started.taken:,} on" if rest else f"batch {number}"

    @property
    def passes(self) -> bool:
        """Whether steps go past bad batches by themselves, because there were so many."""
        return self.recipe.settings.nan == "skip" and self.failures >= INQUIRIES

    def go_past(self) -> bool:
        """With `skip`, take up the run again after the bad batch, its state as it was before."""
        if self.recipe.settings.nan != "skip":
            return False
        bad = self.failed
        # The steps that were started since have changed nothing, and are started again.
        self.started.clear()
        self.step, self.taken = bad.step, bad.taken + self.recipe.data.batch
        number = everywhere(self.mesh, np.asarray(bad.step, self.state.step.dtype))
        self.state = replace(self.state, step=number)
        self.watch = self.watching(PASSING if self.passes else WATCHING)
        return True

    @cached_property
    def finite(self) -> Finite:
        return make_finite(self.recipe.model)

    def go_back(self) -> bool:
        """Return to the last checkpoint and pass over the bad batch; False where that is no use."""
        if self.recipe.settings.nan == "stop":
            return False
        bad = self.failed
        self.rollbacks = [*(one for one in self.rollbacks if one.step >= bad.step), bad]
        if len(self.rollbacks) > ROLLBACKS:
            self.say(f"went back {ROLLBACKS} times without getting past step {bad.step}")
            return False
        self.passed_over.add(bad.taken)
        self.resume()
        if self.step:
            self.say(self.whence)
        self.say(f"passing over {self.named(bad)}")
        return True

    def save(self) -> None:
        """Begin a checkpoint, unless this very state is in one."""
        if self.checkpoints is None or self.step == self.saved:
            return
        history = self.history = self.history.at_checkpoint(self.step, self.clock.seconds)
        saved = Saved(self.state, self.taken, self.provenance)
        self.checkpoints.save(self.step, saved, self.mesh, partial(self._remember, history))
        self.saved = self.step
        self.clock.go_on()

    def _remember(self, history: History) -> None:
        """In the background, once the checkpoint is whole."""
        if self.folder is not None and jax.process_index() == 0:
            write_history(self.folder, history)

    def evaluate(self) -> None:
        """Measure the parameters on the evaluation data, and tell it."""
        if self.measure is None:
            return
        values = self.measure(self.state.params)
        self.metrics.update(values)
        if self.step > self.evaluated:
            self.reports.tell(self.step, values, time.time())
        self.evaluated = max(self.step, self.evaluated)
        self.clock.go_on()

    def finish(self, ending: Ending) -> Result:
        """Wait until all that was saved is safe, and tell the end."""
        committed = None
        if self.checkpoints:
            self.checkpoints.close()
            committed = self.checkpoints.committed
        step = int(self.state.step.addressable_data(0))
        if ending is Ending.STOPPED:
            what = "no checkpoint" if committed is None else f"the checkpoint is step {committed:,}"
            self.say(f"told to stop at step {step:,}; {what}")
        told = described({k: v for k, v in self.metrics.items() if k.startswith("eval_")})
        result = {"result": ", ".join(told)} if told and ending is Ending.DONE else {}
        self.show(step, {**self.metrics, **self.speed, **result})
        known = {name: value for name, value in self.speed.items() if value is not None}
        return Result(self.state, step, {**known, **self.metrics}, ending, self.report)


def _at(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
