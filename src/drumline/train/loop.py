"""The training loop, from top to bottom.

    result = fit(recipe, checkpoint="/data/run")

A run can be stopped at any instant, on any host, and goes on with the same bits: all that a step
depends on is the state, its number and the position in the data, and those are in every checkpoint.
The host never waits for a step it has just started. What a step tells is read `LAG` steps later, in
the same order on every host, and every decision is made from that alone: all make the same one.
"""

import os
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax.sharding import Mesh

from drumline.heartbeat import heartbeat
from drumline.train.agree import meet
from drumline.train.batches import Batches, Placed
from drumline.train.checkpoint import Checkpoints, Saved, kept
from drumline.train.evaluate import Measure, by_name
from drumline.train.finite import Blame, Finite, find_host, groups_of, make_finite, squares
from drumline.train.goodput import Clock, History, open_history, write_history
from drumline.train.notice import Notice, listening
from drumline.train.recipe import Batch, Recipe
from drumline.train.report import Reports, described
from drumline.train.state import State, begin, everywhere, layout, make_mesh, on_all, shardings
from drumline.train.throughput import mfu

LAG = 2
"""Steps between starting one and reading what it told. The devices always have the next at hand,
and a stop on notice comes this many steps late."""
BEAT = 0.5
"""Seconds between two heartbeats."""
ROLLBACKS = 3
"""Times in a row that a run goes back without getting past the step that failed."""

INQUIRIES = 10
"""Batches that are computed again to find out whose they were; a run that skips may meet many."""


class Ending(Enum):
    """How a run ended, and what the job manager is told of it."""

    DONE = "done"
    STOPPED = "stopped on notice"
    NOT_FINITE = "not a number"

    @property
    def exit_code(self) -> int:
        """0; 75, which asks to be started again later; 1."""
        return {Ending.DONE: 0, Ending.STOPPED: os.EX_TEMPFAIL, Ending.NOT_FINITE: 1}[self]


@dataclass(frozen=True)
class Result:
    """What became of a run."""

    state: State
    """As of the last finite step."""
    step: int
    metrics: dict[str, float]
    """The last that was told of training, and of the evaluation with `eval_` before each name."""
    ending: Ending
    report: str = ""
    """What was not finite, and where it came from."""


def fit(recipe: Recipe, *, checkpoint: str | Path | None = None) -> Result:
    """Train to the recipe's last step, from the newest checkpoint in the folder if there is one.

    All hosts call it alike. The folder (or `gs://…`) is one that all of them see; without one,
    nothing is saved.
    """
    settings = recipe.settings
    mesh = make_mesh(recipe.mesh)
    with listening(), jax.set_mesh(mesh), ExitStack() as closing:
        run = _Run(recipe, mesh, None if checkpoint is None else str(checkpoint), closing)
        run.resume()
        while run.step < recipe.steps:
            run.start_step()
            last = run.step == recipe.steps
            saves = last or run.step % settings.save_every == 0
            evaluates = last or _at(run.step, settings.evaluate_every)
            # A pause is the time to know everything; otherwise what is LAG steps old will do.
            verdict = run.read(behind=0 if saves or evaluates else LAG)
            if verdict is _Verdict.STOP and not last:
                # The steps that were started since are all hosts' last.
                if run.read(behind=0) is not _Verdict.NOT_FINITE:
                    run.save()
                return run.finish(Ending.STOPPED)
            if verdict is _Verdict.NOT_FINITE:
                if not run.go_back():
                    return run.finish(Ending.NOT_FINITE)
                continue
            if saves:
                run.save()
            if evaluates:
                run.evaluate()
        if not run.metrics:
            run.evaluate()  # there was nothing left to train
        return run.finish(Ending.DONE)


# The step -----------------------------------------------------------------------------------------

_STOP, _FINITE, _LOSS, _NORM = 0, 1, 2, 3
"""Where things stand in what a step tells; then come the model's metrics, then the groups."""


_OPTIONS: dict[str, dict[str, bool | str]] = {"gpu": {"xla_gpu_enable_triton_gemm": False}}
"""By platform. With cuBLAS alone a 1.3B decoder trains 5 % faster on an H200 than with the products
that XLA's tuning picks, and compiles in half the time (benchmarks/train_h200.py)."""


def make_step(recipe: Recipe, mesh: Mesh, places: State) -> Any:
    """One step under jit: loss, gradients, update, and a vector of what there is to tell.

    A step whose loss or gradients are not finite leaves parameters and moments as they were. Unless
    such steps are to be skipped it also halts the run: all steps after it change nothing, so the
    state is still the one that failed when the host comes to read of it.
    """
    model, optimizer = recipe.model, recipe.optimizer
    halts = recipe.settings.nan != "skip"

    def step(
        state: State, halted: jax.Array, batch: Batch, notice: jax.Array
    ) -> tuple[State, jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        with_gradient = jax.value_and_grad(model.loss, has_aux=True)
        (loss, metrics), grads = with_gradient(state.params, batch, key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        by_group = jnp.stack(list(squares(grads).values()))
        finite = jnp.isfinite(loss) & jnp.isfinite(by_group).all()
        good = finite & ~halted
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(good, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        halted = halted | ~finite if halts else halted
        number = state.step + (~halted).astype(state.step.dtype)
        norm = jnp.sqrt(by_group.sum())
        words = [notice.max(), finite, loss, norm, *by_name(metrics), *jnp.isfinite(by_group)]
        told = jnp.stack([jnp.asarray(word, jnp.float32) for word in words])
        return State(params, opt_state, number, state.key), halted, told

    whole = on_all(mesh)
    return jax.jit(
        step,
        donate_argnums=(0, 1),
        out_shardings=(shardings(places), whole, whole),
        compiler_options=_OPTIONS.get(mesh.devices.flat[0].platform),
    )


# The run around it --------------------------------------------------------------------------------


class _Verdict(Enum):
    GO_ON = "go on"
    STOP = "a host was told to stop"
    NOT_FINITE = "loss or gradients are not finite"


@dataclass(frozen=True)
class _Started:
    """A step that the devices may still be busy with."""

    step: int
    position: int
    told: jax.Array


class _Run:
    """One attempt: the state, and everything that is done around the steps."""

    def __init__(self, recipe: Recipe, mesh: Mesh, folder: str | None, closing: ExitStack) -> None:
        self.recipe, self.mesh, self.folder = recipe, mesh, folder
        # What cannot be is refused before anything is opened.
        self.places = layout(recipe, mesh)
        self.placed = Placed(recipe.data, mesh, recipe.model.batch_spec())
        self.shapes = self.placed.shapes()
        told = jax.eval_shape(recipe.model.loss, self.places.params, self.shapes, jax.random.key(0))
        self.names = ("loss", "grad_norm", *sorted(told[1]))
        self.groups = groups_of(self.places.params)
        self.halted = everywhere(mesh, np.zeros((), np.bool_))
        self.notice = Notice(mesh)
        self.advance = make_step(recipe, mesh, self.places)
        # The first step finds what is compiled here, and no host waits for another's compiler.
        inputs = (self.places, self.halted, self.shapes, self.notice.word)
        self.advance.lower(*inputs).compile()
        meet()
        self.history = open_history(folder)
        self.reports: Reports | None = None
        if jax.process_index() == 0:
            item, attempt = recipe.model.item, self.history.attempt
            self.reports = Reports(folder, attempt, recipe.steps, item=item)
            closing.callback(self.reports.close)
        self.checkpoints: Checkpoints | None = None
        if folder is not None:
            keep = partial(kept, last=recipe.settings.keep_last, every=recipe.settings.keep_every)
            self.checkpoints = Checkpoints(folder, keep, self.say, recipe.steps)
            closing.push(self.save_what_is_under_way)
        self.batches = Batches(self.placed)
        closing.callback(self.batches.close)
        self.measure = Measure(recipe, mesh, self.places.params) if recipe.evaluation else None
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

    def say(self, text: str) -> None:
        if self.reports:
            self.reports.say(text)

    def save_what_is_under_way(self, kind: type[BaseException] | None, *_: object) -> None:
        """When something breaks, a checkpoint that is being written is still worth having."""
        # With several hosts one must not wait for others that will never come.
        if kind is not None and self.checkpoints and jax.process_count() == 1:
            with suppress(Exception):
                self.checkpoints.wait()

    def resume(self) -> None:
        """Take the newest checkpoint, or begin at the beginning."""
        found = self.checkpoints.restore(self.places, self.mesh) if self.checkpoints else None
        if found is None:
            first = jax.jit(partial(begin, self.recipe), out_shardings=shardings(self.places))
            found = Saved(first(), 0)
        self.state, self.position = found.state, found.position
        self.step = self.saved = int(self.state.step.addressable_data(0))
        self.halted = everywhere(self.mesh, np.zeros((), np.bool_))
        self.started: deque[_Started] = deque()
        self.clock.start(self.history.seconds.get(self.step, 0.0))
        self.show(self.step, {})
        if self.step:
            self.say(f"going on from step {self.step:,}")

    def start_step(self) -> None:
        """Hand the devices one more step. Nothing here waits for them."""
        while self.position in self.passed_over:
            self.position += 1
        batch = self.batches.take(self.position)
        self.state, self.halted, told = self.advance(
            self.state, self.halted, batch, self.notice.word
        )
        told.copy_to_host_async()
        self.step += 1
        self.started.append(_Started(self.step, self.position, told))
        self.position += 1

    def read(self, behind: int) -> _Verdict:
        """Read what the steps told, all but the last few, or up to one that is not finite."""
        verdict = _Verdict.GO_ON
        while len(self.started) > behind:
            one = self.started.popleft()
            told = np.asarray(one.told.addressable_data(0))
            self.clock.tick()
            values, flags = np.split(told[_LOSS:], [len(self.names)])
            again = not told[_FINITE] and self.recipe.settings.nan == "rollback"
            if not again:
                self.tell(one.step, dict(zip(self.names, values.tolist(), strict=True)))
            if not told[_FINITE]:
                bad = (group for group, good in zip(self.groups, flags, strict=True) if not good)
                self.blame(one, tuple(bad))
                if self.recipe.settings.nan != "skip":
                    return _Verdict.NOT_FINITE
            if told[_STOP]:
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
            if self.reports and step > self.logged:
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
        """Find out where a value that is not finite came from, and say so."""
        self.failed = bad
        self.failures += 1
        if self.failures > INQUIRIES:
            self.say(f"step {bad.step}: not a number from batch {bad.position}")
            return
        data, rows = self.recipe.data, self.placed.rows_of_hosts
        batch = self.placed.load(bad.position, data.numbers)
        key = jax.random.fold_in(jax.random.wrap_key_data(self.state.key), bad.step - 1)
        again = partial(self.finite, self.state.params, batch, key)
        host, repeats = find_host(again, data.batch, rows)
        self.report = Blame(host, len(rows), groups, repeats).told(bad.step, bad.position)
        self.say(self.report)

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
        self.passed_over.add(bad.position)
        self.resume()
        self.say(f"passing over batch {bad.position}")
        return True

    def save(self) -> None:
        """Begin a checkpoint, unless this very state is in one."""
        if self.checkpoints is None or self.step == self.saved:
            return
        history = self.history = self.history.at_checkpoint(self.step, self.clock.seconds)
        saved = Saved(self.state, self.position)
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
        if self.reports and self.step > self.evaluated:
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
