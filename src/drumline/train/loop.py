"""The training loop.

    result = fit(recipe, checkpoint="/data/run")

A run can be killed at any time on any host and resumes bit-exactly, because each checkpoint holds
everything a step depends on: the state, the step number and the data position. The host does not
wait for the step it has just dispatched (steps/pipeline.py). It reads a step's metrics `LAG` steps
later. Every host reads the same metrics in the same order and decides from them alone, so all hosts
take the same decisions.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import jax
from jax.sharding import Mesh

from drumline.health.fault_report import HardwareFault
from drumline.train.checkpoints.checkpoint import Saved
from drumline.train.checkpoints.claim import claim, is_fenced
from drumline.train.checkpoints.files import absolute_folder, raise_user_errors
from drumline.train.checkpoints.saving import (
    RunCheckpoints,
    make_provenance,
    open_checkpoints,
    refuse_folder_in_use,
)
from drumline.train.goodput import Goodput, StepClock, open_history
from drumline.train.hardware import HardwareChecks
from drumline.train.mesh import make_mesh
from drumline.train.multihost import catch_sigterm, connect_hosts
from drumline.train.plan import Plan, make_plan
from drumline.train.recipe import Recipe
from drumline.train.reporting import RunLog, RunProgress
from drumline.train.save_interval import SaveSchedule, make_schedule
from drumline.train.state import State, describe_weights, step_number
from drumline.train.steps.bad_batches import BadBatches
from drumline.train.steps.evaluation import Evaluator
from drumline.train.steps.pipeline import DispatchedStep, Pipeline

LAG = 2
"""The number of steps between dispatching a step and reading its metrics. With two, the devices
always have a next step to run. A run stops this many steps after SIGTERM."""


class Ending(Enum):
    """The reason why a run has ended."""

    DONE = "done"
    STOPPED = "stopped on notice"
    NOT_FINITE = "not a number"

    @property
    def exit_code(self) -> int:
        """The exit code of the program. 75 asks the job manager for a restart."""
        return {Ending.DONE: 0, Ending.STOPPED: os.EX_TEMPFAIL, Ending.NOT_FINITE: 1}[self]


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    state: State
    """The state after the last finite step."""
    step: int
    metrics: dict[str, float]
    """The last metrics of training, and of evaluations with `eval_` or `eval_NAME_` before each
    name."""
    ending: Ending
    report: str = ""
    """The source of the last non-finite value; empty if there was none."""


def fit(
    recipe: Recipe, *, checkpoint: str | Path | None = None, allow_changes: bool = False
) -> Result:
    """Train to the recipe's last step. Resume from the newest checkpoint in the folder, if any.

    Every host must call this with the same arguments. All hosts must share the folder (or
    `gs://…`). A relative folder starts at the working directory. Without a folder there are no
    checkpoints. A checkpoint of a different recipe or of different data is refused unless
    `allow_changes` is set.

    Raises:
        UserError: the recipe or the folder cannot be used.
        HardwareFault: a chip computes wrong results. The next attempt, on other hardware, resumes
            from the last checkpoint that was verified.
    """
    folder = None if checkpoint is None else absolute_folder(checkpoint)
    mesh = make_mesh(recipe.mesh)
    connect_hosts(mesh)
    with catch_sigterm(), jax.set_mesh(mesh), ExitStack() as cleanup:
        run = _open_run(recipe, mesh, folder, allow_changes, cleanup)
        try:
            return _train(run, recipe, allow_changes)
        except HardwareFault as fault:
            run.report_fault(fault)
            raise


def _train(run: "_Run", recipe: Recipe, allow_changes: bool) -> Result:
    """Restore the state and take the remaining steps."""
    plan, pipeline = run.plan, run.pipeline
    run.restore(allow_changes)
    while pipeline.step < recipe.steps:
        pipeline.dispatch_step()
        # Before a checkpoint, an evaluation or a check, read the metrics of all steps.
        event = run.read_steps(lag=0 if run.pauses_after(pipeline.step) else LAG)
        if event.stop and not plan.is_last(pipeline.step):
            # All hosts have dispatched the same steps. Read the rest of them, save and stop.
            event = run.read_steps(lag=0)
            if event.nonfinite is None or run.skip_batch(event.nonfinite):
                run.save(last=True)
            return run.finish(Ending.STOPPED)
        if event.nonfinite is not None and not run.skip_batch(event.nonfinite):
            if not run.roll_back(event.nonfinite):
                return run.finish(Ending.NOT_FINITE)
            continue
        if event.retry:
            continue  # The actions after the previous step have run already.
        # Skipping a batch may have rewound the pipeline, so look at its current step.
        if plan.checks_after(pipeline.step) and pipeline.idle:
            run.check()
        if run.saves.meets_after(pipeline.step) and pipeline.idle:
            run.saves.meet(pipeline.step)
        if run.saves_after(pipeline.step) and pipeline.idle:
            run.save(last=plan.is_last(pipeline.step))
        if plan.evaluates_after(pipeline.step) and pipeline.idle:
            run.evaluate()
    if not run.progress.metrics:
        run.evaluate()  # The restored checkpoint was of the last step, so nothing ran.
    return run.finish(Ending.DONE)


@dataclass(frozen=True)
class _Event:
    """The event in the steps that were read, if any, to which the run has to react."""

    stop: bool = False
    """True if a host got SIGTERM."""
    nonfinite: DispatchedStep | None = None
    """A step with a non-finite loss or gradient, at which the run has halted."""
    retry: bool = False
    """True if the next step repeats a step that spiked."""


@dataclass(frozen=True)
class _Run:
    """The parts of an attempt, and the operations that need several of them."""

    plan: Plan
    pipeline: Pipeline
    evaluators: list[Evaluator]
    goodput: Goodput
    checkpoints: RunCheckpoints
    progress: RunProgress
    log: RunLog
    bad_batches: BadBatches
    hardware: HardwareChecks
    saves: SaveSchedule

    def saves_after(self, step: int) -> bool:
        """Return True if a checkpoint is written after this step."""
        return self.plan.is_last(step) or self.saves.saves_after(step)

    def pauses_after(self, step: int) -> bool:
        """Return True if the run must read all metrics before it continues after this step."""
        plan = self.plan
        return (
            self.saves_after(step)
            or self.saves.meets_after(step)
            or plan.evaluates_after(step)
            or plan.checks_after(step)
        )

    def restore(self, allow_changes: bool) -> None:
        """Restore the newest checkpoint and compare its recipe with the current recipe."""
        saved = self._resume()
        if self.pipeline.step:
            changes = self.checkpoints.compare_recipe(saved, allow_changes)
            for message in (self._resume_message, *changes):
                self.log.message(message)
        else:
            self.log.message(describe_weights(self.pipeline.state.params, self.plan.mesh))

    def read_steps(self, lag: int) -> _Event:
        """Read and report all but the last `lag` steps. Stop at a step that has halted the run."""
        event = _Event()
        for step, outcome in self.pipeline.read(lag):
            self.goodput.clock.end_step()
            if outcome.spiked:
                # The repetition reports the step. Later steps have its stop flag, too.
                self.hardware.investigate(step, outcome)
                self.pipeline.accept_spike(step)
                self.goodput.clock.end_pause()
                return replace(event, retry=True)
            if outcome.finite or not self.bad_batches.rolls_back:
                self.progress.end_step(step.step, outcome.metrics)
            if outcome.finite:
                self.hardware.accept_step(outcome)
            elif self.bad_batches.halts:
                self.hardware.investigate(step, outcome)
                groups = outcome.nonfinite_groups
                self.bad_batches.investigate(step, groups, self.pipeline.state)
                return _Event(nonfinite=step)
            else:
                self.bad_batches.log_skipped(step)
            if outcome.stop:
                event = _Event(stop=True)
        return event

    def skip_batch(self, nonfinite: DispatchedStep) -> bool:
        """Continue after a bad batch if the policy is to skip. Return False if it is not."""
        if not self.bad_batches.skips:
            return False
        self.pipeline.continue_after(nonfinite, halts=self.bad_batches.halts)
        return True

    def roll_back(self, nonfinite: DispatchedStep) -> bool:
        """Return to the last checkpoint and leave out the bad batch, if the policy allows it."""
        if not self.bad_batches.may_roll_back(nonfinite):
            return False
        self.pipeline.exclude_batch(nonfinite)
        self._resume()
        if self.pipeline.step:
            self.log.message(self._resume_message)
        self.log.message(f"leaving out {self.bad_batches.batch_name(nonfinite)}")
        return True

    def check(self) -> bool:
        """Compare the devices. Return True if this verifies the whole state."""
        verified = self.hardware.check()
        self.goodput.clock.end_pause()
        return verified

    def save(self, *, last: bool) -> None:
        """Check the state and start to save it, unless this step has been saved already.

        `last`: the run ends after this step.
        """
        step = self.pipeline.step
        if self.checkpoints.needs_save(step):
            self.saves.begin_save()
            verified = self.check()
            state, position = self.pipeline.state, self.pipeline.position
            waited = self.checkpoints.save(step, state, position, checked=verified)
            if not last:
                self.saves.end_save(step, waited, self.checkpoints.write_seconds)
                self.goodput.clock.end_pause()

    def evaluate(self) -> None:
        """Evaluate the parameters and report the metrics."""
        metrics: dict[str, float] = {}
        for evaluator in self.evaluators:
            metrics |= evaluator(self.pipeline.state.params)
        if metrics:
            self.progress.end_evaluation(self.pipeline.step, metrics)
            self.goodput.clock.end_pause()

    def report_fault(self, fault: HardwareFault) -> None:
        """Log a hardware fault and mark the checkpoints that it may have corrupted."""
        self.log.message(str(fault))
        # Only a single host knows of a fault from the compiler's checker.
        on_all_hosts = fault.__cause__ is None or jax.process_count() == 1
        for step in self.checkpoints.mark_suspect(fault.reason, wait=on_all_hosts):
            self.log.message(f"checkpoint {step} is marked suspect: no run will resume from it")

    def finish(self, ending: Ending) -> Result:
        """Wait until the last checkpoint is complete, report the end and return the result."""
        self.checkpoints.close()
        state = self.pipeline.state
        step = step_number(state)
        if ending is Ending.STOPPED:
            newest = self.checkpoints.committed
            detail = (
                "no checkpoint yet" if newest is None else f"newest checkpoint: step {newest:,}"
            )
            self.log.message(f"stopped by SIGTERM at step {step:,}; {detail}")
        metrics = self.progress.end_run(step, done=ending is Ending.DONE)
        return Result(state, step, metrics, ending, self.bad_batches.report)

    def _resume(self) -> Saved:
        """Set the state to the newest checkpoint, or to the initial state."""
        saved = self.checkpoints.restore()
        self.pipeline.restart(saved)
        self.hardware.restart()
        self.goodput.resume(self.pipeline.step)
        self.saves.restart(self.pipeline.step)
        self.progress.send_heartbeat(self.pipeline.step, {})
        return saved

    @property
    def _resume_message(self) -> str:
        return f"resuming from step {self.pipeline.step:,}"


def _open_run(
    recipe: Recipe, mesh: Mesh, folder: str | None, allow_changes: bool, cleanup: ExitStack
) -> _Run:
    """Compile the step and open the folder. `cleanup` closes everything."""
    # Make the plan first, so that an invalid recipe is rejected before a folder is touched.
    plan = make_plan(recipe, mesh)
    log = RunLog(recipe.steps, item=recipe.model.item)
    unnamed = {"": recipe.evaluation} if recipe.evaluation else {}
    evaluators = [
        Evaluator(
            evaluation,
            recipe.model,
            mesh,
            plan.abstract_state.params,
            plan.loss,
            log.message,
            name,
        )
        for name, evaluation in {**unnamed, **recipe.evaluations}.items()
    ]
    pipeline = Pipeline(plan)
    checkpoint_folder = None
    if folder is None:
        history = open_history(None)
        log.open(None, history.attempt)
    else:
        provenance = make_provenance(plan)
        refuse_folder_in_use(folder, provenance, allow_changes)
        folder_claim = claim(folder)
        cleanup.callback(folder_claim.release)
        with raise_user_errors(folder):
            # This removes incomplete checkpoints, which frees space on a full disk.
            checkpoint_folder = open_checkpoints(
                plan, folder, provenance, log.message, folder_claim.fence
            )
            history = open_history(folder)
            log.open(folder, history.attempt, folder_claim.check)
    cleanup.callback(log.close)
    goodput = Goodput(history, StepClock())
    checkpoints = RunCheckpoints(plan, checkpoint_folder, goodput)
    cleanup.push(checkpoints.finish_after_error)
    cleanup.callback(pipeline.close)
    fenced = folder is not None and is_fenced(folder)
    saves = SaveSchedule(None) if folder is None else make_schedule(recipe.settings, log.message)
    progress = RunProgress(
        plan,
        log,
        goodput,
        lambda: checkpoints.committed,
        lambda: saves.interval,
        pipeline.mean_input_seconds,
        fenced=fenced,
    )
    bad_batches = BadBatches(plan, log.message)
    hardware = HardwareChecks(plan, pipeline, checkpoints, log.message)
    if plan.compiler_options:
        options = (f"{name}={value}" for name, value in plan.compiler_options.items())
        log.message(f"compiler options: {', '.join(options)}")
    if pipeline.warning:
        log.message(pipeline.warning)
    return _Run(
        plan,
        pipeline,
        evaluators,
        goodput,
        checkpoints,
        progress,
        log,
        bad_batches,
        hardware,
        saves,
    )
