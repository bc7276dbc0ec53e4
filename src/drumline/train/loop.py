"""The training loop, from top to bottom.

    result = fit(recipe, checkpoint="/data/run")

A run can be stopped at any instant, on any host, and goes on with the same bits: all that a step
depends on is the state, its number and the position in the data, and those are in every checkpoint.
The host never waits for a step it has just started (pipeline.py). What a step tells is read `LAG`
steps later, in the same order on every host, and every decision is made from that alone: all make
the same one.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from drumline.health.fault_report import HardwareFault
from drumline.train.checkpoints.checkpoint import Saved
from drumline.train.checkpoints.claim import claim
from drumline.train.checkpoints.files import usable
from drumline.train.checkpoints.saving import Saving, open_checkpoints
from drumline.train.mesh import make_mesh
from drumline.train.notice import listening
from drumline.train.plan import Plan, make_plan
from drumline.train.recipe import Recipe
from drumline.train.reporting.goodput import Clock, Goodput, open_history
from drumline.train.reporting.progress import Progress
from drumline.train.reporting.report import Reports
from drumline.train.result import Ending, Result
from drumline.train.state import steps_taken
from drumline.train.steps.bad_batches import BadBatches
from drumline.train.steps.evaluate import Measure
from drumline.train.steps.pipeline import Pipeline, StepInFlight
from drumline.train.watch.watch import Watch

LAG = 2
"""Steps between starting one and reading what it told. The devices always have the next at hand,
and a stop on notice comes this many steps late."""


def fit(
    recipe: Recipe, *, checkpoint: str | Path | None = None, allow_changes: bool = False
) -> Result:
    """Train to the recipe's last step, from the newest checkpoint in the folder if there is one.

    All hosts call it alike. The folder (or `gs://…`) is one that all of them see; without one,
    nothing is saved. A checkpoint that another recipe or other data led to is refused, unless
    `allow_changes` says that this is meant.

    Raises:
        HardwareFault: a chip computes wrong. The next attempt, on other hardware, goes on from the
            last checkpoint that was checked.
    """
    mesh = make_mesh(recipe.mesh)
    with listening(), jax.set_mesh(mesh), ExitStack() as closing:
        run = _open(recipe, mesh, None if checkpoint is None else str(checkpoint), closing)
        try:
            return _train(run, recipe, allow_changes)
        except HardwareFault as fault:
            run.end_on(fault)
            raise


def _train(run: "_Run", recipe: Recipe, allow_changes: bool) -> Result:
    """The steps, from where the run stands to where it ends."""
    plan, pipeline = run.plan, run.pipeline
    run.restore(allow_changes)
    while pipeline.step < recipe.steps:
        pipeline.start_step()
        # A pause is the time to know everything; otherwise what is LAG steps old will do.
        heard = run.report(behind=0 if plan.pauses_at(pipeline.step) else LAG)
        if heard.stop and not plan.ends_at(pipeline.step):
            # The steps that were started since are all hosts' last.
            heard = run.report(behind=0)
            if heard.bad is None or run.go_past(heard.bad):
                run.save()
            return run.finish(Ending.STOPPED)
        if heard.bad is not None and not run.go_past(heard.bad):
            if not run.go_back(heard.bad):
                return run.finish(Ending.NOT_FINITE)
            continue
        if heard.again:
            continue  # what was due after the step before it has been done
        # Past a bad batch the run may stand at an earlier step than it had come to.
        if plan.checks_at(pipeline.step) and pipeline.idle:
            run.check()
        if plan.saves_at(pipeline.step) and pipeline.idle:
            run.save()
        if plan.evaluates_at(pipeline.step) and pipeline.idle:
            run.evaluate()
    if not run.progress.metrics:
        run.evaluate()  # there was nothing left to train
    return run.finish(Ending.DONE)


# The run around it --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Heard:
    """What the steps told that asks for something to be done."""

    stop: bool = False
    """Whether a host was told to stop."""
    bad: StepInFlight | None = None
    """A step whose loss or gradients are not finite, at which the run halted."""
    again: bool = False
    """Whether the run stands before a step that spiked, which is to be taken once more."""


_NOTHING, _STOP = _Heard(), _Heard(stop=True)


@dataclass(frozen=True)
class _Run:
    """One attempt: each of its parts has one purpose, and what takes several is done here."""

    plan: Plan
    pipeline: Pipeline
    measure: Measure | None
    goodput: Goodput
    saving: Saving
    progress: Progress
    reports: Reports
    bad_batches: BadBatches
    watch: Watch

    def restore(self, allow_changes: bool) -> None:
        """Take the newest checkpoint, if it is of this very recipe or that does not matter."""
        found = self._resume()
        if self.pipeline.step:
            said = self.saving.check(found, allow_changes)
            for sentence in (self._whence, *said):
                self.reports.say(sentence)

    def report(self, behind: int) -> _Heard:
        """Read and tell of the steps, all but the last few, or up to one that is not finite."""
        heard = _NOTHING
        for ended, outcome in self.pipeline.read(behind):
            self.goodput.clock.tick()
            if outcome.spiked:
                # It is told when it is taken; a stop that it told, every later step tells too.
                self.watch.inquire(ended, outcome)
                self.pipeline.accept(ended)
                self.goodput.clock.go_on()
                return replace(heard, again=True)
            if outcome.finite or not self.bad_batches.rolled_back:
                self.progress.step_ended(ended.step, outcome.metrics)
            if outcome.finite:
                self.watch.accepted(outcome)
            elif self.bad_batches.halting:
                self.watch.inquire(ended, outcome)
                self.bad_batches.inquire(ended, outcome.bad_groups, self.pipeline.state)
                return _Heard(bad=ended)
            else:
                self.bad_batches.mention(ended)
            if outcome.stop:
                heard = _STOP
        return heard

    def go_past(self, bad: StepInFlight) -> bool:
        """With `skip`, take up the run again after the bad batch, its state as it was before."""
        if not self.bad_batches.skipped:
            return False
        self.pipeline.go_past(bad, halting=self.bad_batches.halting)
        return True

    def go_back(self, bad: StepInFlight) -> bool:
        """Return to the last checkpoint and pass over the bad batch; False where that is no use."""
        if not self.bad_batches.may_roll_back(bad):
            return False
        self.pipeline.pass_over(bad)
        self._resume()
        if self.pipeline.step:
            self.reports.say(self._whence)
        self.reports.say(f"passing over {self.bad_batches.name(bad)}")
        return True

    def check(self) -> bool:
        """Compare the devices; whether they prove the state."""
        proven = self.watch.check()
        self.goodput.clock.go_on()
        return proven

    def save(self) -> None:
        """Begin a checkpoint, unless this very state is in one."""
        step = self.pipeline.step
        if self.saving.is_due(step):
            proven = self.check()
            self.saving.save(step, self.pipeline.state, self.pipeline.taken, checked=proven)

    def evaluate(self) -> None:
        """Measure the parameters on the evaluation data, and tell it."""
        if self.measure is not None:
            self.progress.evaluated(self.pipeline.step, self.measure(self.pipeline.state.params))
            self.goodput.clock.go_on()

    def end_on(self, fault: HardwareFault) -> None:
        """Say whom it accuses, and see to it that nobody goes on from what it may have spoiled."""
        self.reports.say(str(fault))
        # What a compiler's checker found, one host knows alone.
        together = fault.__cause__ is None or jax.process_count() == 1
        for step in self.saving.condemn(fault.reason, wait=together):
            self.reports.say(f"checkpoint {step} is suspect: nobody will go on from it")

    def finish(self, ending: Ending) -> Result:
        """Wait until all that was saved is safe, and tell the end."""
        self.saving.close()
        state = self.pipeline.state
        step = steps_taken(state)
        metrics = self.progress.ended(step, ending)
        return Result(state, step, metrics, ending, self.bad_batches.report)

    def _resume(self) -> Saved:
        """Take the newest checkpoint, or begin at the beginning."""
        found = self.saving.restore()
        self.pipeline.restart(found)
        self.watch.begin_again()
        self.goodput.resume(self.pipeline.step)
        self.progress.show(self.pipeline.step, {})
        return found

    @property
    def _whence(self) -> str:
        return f"going on from step {self.pipeline.step:,}"


def _open(recipe: Recipe, mesh: Mesh, path: str | None, closing: ExitStack) -> _Run:
    """Make everything ready for the first step; `closing` puts it away again."""
    # What cannot be is refused before anything is opened.
    plan = make_plan(recipe, mesh)
    reports = Reports(recipe.steps, item=recipe.model.item)
    measure = None
    if recipe.evaluation:
        measure = Measure(recipe, mesh, plan.places.params, plan.loss, reports.say)
    pipeline = Pipeline(plan)
    folder = None
    if path is None:
        history = open_history(None)
        reports.open(None, history.attempt)
    else:
        claimed = claim(path)
        closing.callback(claimed.release)
        with usable(path):
            # This first: on a full disk it makes room, of what an earlier attempt left.
            folder = open_checkpoints(plan, path, reports.say, claimed.fence)
            history = open_history(path)
            reports.open(path, history.attempt, claimed.check)
    closing.callback(reports.close)
    goodput = Goodput(history, Clock())
    saving = Saving(plan, folder, goodput)
    closing.push(saving.finish_after_failure)
    closing.callback(pipeline.close)
    progress = Progress(plan, reports, goodput, lambda: saving.committed)
    bad_batches = BadBatches(plan, reports.say)
    watch = Watch(plan, pipeline, saving, reports.say)
    if pipeline.ignored:
        reports.say(pipeline.ignored)
    return _Run(plan, pipeline, measure, goodput, saving, progress, reports, bad_batches, watch)
