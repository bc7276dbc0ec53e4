"""The pipeline of steps: dispatch steps early, and read their scalars later.

The host does not wait for a step that it has just dispatched. It dispatches more steps, and reads
the scalars of a step some steps later.

With `Settings(sdc_every=…)` a TPU takes some of the steps with a second executable, in which its
compiler makes every chip repeat its work and compare. Such a step takes about twice as long. It
does not detect a chip that makes the same error both times; comparing replicas does (hardware.py).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drumline.chips.catalogue import TPUS
from drumline.errors import UserError
from drumline.health.emulated import inject_compute_fault
from drumline.health.fault_report import HardwareFault
from drumline.train.batches import Prefetcher
from drumline.train.checkpoints.checkpoint import Saved
from drumline.train.multihost import StopFlag, barrier
from drumline.train.plan import Plan
from drumline.train.recipe import Batch
from drumline.train.state import State, replicate, step_number
from drumline.train.steps.step import HALT, NO_LIMITS, SKIP, StepOutcome, make_step


@dataclass(frozen=True)
class DispatchedStep:
    """A step that was dispatched and may not have finished."""

    step: int
    position: int
    """The position in the data before its batch."""
    scalars: jax.Array
    batch: Batch = field(repr=False, compare=False)
    """The batch itself, because a second reading of the data may differ."""


class Pipeline:
    """The dispatched steps, and the state, step number and data position after the last of them."""

    state: State
    step: int
    position: int
    """The number of records consumed or left out."""

    def __init__(self, plan: Plan) -> None:
        """Compile the step. `restart` sets the state before the first step."""
        self._plan = plan
        self._stop_flag = StopFlag(plan.mesh)
        self._prefetcher = Prefetcher(plan.loader)
        self._excluded: set[int] = set()
        """The positions of batches that are left out."""
        self._retry: DispatchedStep | None = None
        self._halts = True
        self._dispatched: deque[DispatchedStep] = deque()
        self._has_run = False
        self._input_waits: list[float] = []
        self._mean_input_seconds = 0.0
        self._mode = self._mode_array(HALT)
        self._no_limits = self._limits = replicate(plan.mesh, NO_LIMITS)
        self._limit_values = (np.inf, np.inf)
        options = plan.compiler_options
        self._step_function = make_step(plan.recipe, plan.mesh, plan.abstract_state, options)
        self._checker = CompilerChecker(plan)
        # Compile before the barrier, so that in the first step no host waits for a compiler.
        inputs = (
            plan.abstract_state,
            self._mode,
            plan.abstract_batch,
            self._stop_flag.array,
            self._limits,
        )
        with _user_errors():
            self._step_function.lower(*inputs).compile()
        self._checker.compile(*inputs)
        barrier()

    @property
    def idle(self) -> bool:
        """True if the scalars of every step have been read."""
        return not self._dispatched

    @property
    def warning(self) -> str | None:
        """A message if a setting of the recipe has no effect on these devices."""
        return self._checker.warning

    def mean_input_seconds(self) -> float:
        """Return the seconds per step that this host waited for data since the last call.

        If no step was dispatched since, return the last value.
        """
        if self._input_waits:
            self._mean_input_seconds = sum(self._input_waits) / len(self._input_waits)
            self._input_waits.clear()
        return self._mean_input_seconds

    def restart(self, saved: Saved) -> None:
        """Continue from a saved state. Discard the dispatched steps."""
        self.state, self.position = saved.state, saved.position
        self.step = step_number(saved.state)
        self._halts, self._retry = True, None
        self._mode = self._mode_array(HALT)
        self._dispatched.clear()

    def dispatch_step(self) -> None:
        """Dispatch the next step. Wait only for the very first step.

        The first step runs by itself, and its batch is not read ahead: cuDNN creates its kernels
        when they first run, and fails if another thread sends data to the GPU meanwhile.
        """
        size = self._plan.recipe.data.batch
        while self.position in self._excluded:
            self.position += size
        self.step += 1
        retry, self._retry = self._retry, None
        is_first, self._has_run = not self._has_run, True
        if retry is None:
            load = self._plan.loader.load_training if is_first else self._prefetcher.next_batch
            began_at = time.monotonic()
            batch, limits = load(self.position), self._limits
            self._input_waits.append(time.monotonic() - began_at)
        else:
            batch, limits = retry.batch, self._no_limits
        self.state, self._mode, scalars = self._run(
            self.step, self.state, self._mode, batch, self._stop_flag.array, limits
        )
        if is_first:
            with self._checker.raises_fault(self.step):
                scalars.block_until_ready()
        scalars.copy_to_host_async()
        self._dispatched.append(DispatchedStep(self.step, self.position, scalars, batch))
        self.position += size

    def read(self, lag: int) -> Iterator[tuple[DispatchedStep, StepOutcome]]:
        """Wait for all but the last `lag` steps, and yield each with its outcome."""
        while len(self._dispatched) > lag:
            step = self._dispatched.popleft()
            with self._checker.raises_fault(step.step):
                scalars = np.asarray(step.scalars.addressable_data(0))
            yield step, StepOutcome(scalars, self._plan.metric_names, self._plan.group_names)

    def set_limits(self, loss: float, norm: float) -> None:
        """Halt from the next step on if the loss or the gradient norm exceeds its limit."""
        if (loss, norm) != self._limit_values:
            self._limit_values = loss, norm
            self._limits = replicate(self._plan.mesh, np.asarray((loss, norm), np.float32))

    def replay(self, halted: DispatchedStep) -> tuple[State, jax.Array]:
        """Replay the step at which the run halted, and return its state and scalars.

        The same executable gets the same state, batch and key. Only the limits are lifted. It runs
        on a copy of the state, so the state of the run does not change.
        """
        state, _, scalars = self._run(
            halted.step,
            _copy(self.state),
            self._mode_array(HALT),
            halted.batch,
            self._stop_flag.array,
            self._no_limits,
        )
        return state, scalars

    def rerun(self, saved: Saved, to: int, on_step: Callable[[int], None]) -> None:
        """Rerun from a checkpoint to a step, with the batches that are excluded by now.

        As in the first run, non-finite batches are skipped and spikes are accepted. `on_step` gets
        the number of each step that has finished.
        """
        halts = self._halts
        self.restart(saved)
        self._halts, self._mode = halts, self._mode_array(SKIP)
        limits, self._limits = self._limits, self._no_limits
        while self.step < to:
            self.dispatch_step()
            for step, _ in self.read(lag=1):
                on_step(step.step)
        self._limits = limits
        self._rewind(self.step, self.position)

    def continue_after(self, nonfinite: DispatchedStep, *, halts: bool) -> None:
        """Continue after a step that changed nothing. `halts`: halt at the next such step.

        The steps that were dispatched after it have changed nothing either, and are repeated.
        """
        self._halts = halts
        self._rewind(nonfinite.step, nonfinite.position + self._plan.recipe.data.batch)

    def accept_spike(self, spiked: DispatchedStep) -> None:
        """Run the step at which the run halted for a spike once more, without limits."""
        self._retry = spiked
        self._rewind(spiked.step - 1, spiked.position)

    def exclude_batch(self, nonfinite: DispatchedStep) -> None:
        """Leave out the batch of this step from now on."""
        self._excluded.add(nonfinite.position)

    def close(self) -> None:
        """Stop reading ahead."""
        self._prefetcher.close()

    def _run(self, step: int, *inputs: Any) -> tuple[State, jax.Array, jax.Array]:
        """Run a step. On the emulator a machine may have a fault, which changes the result."""
        function = self._checker.step if self._checker.checks(step) else self._step_function
        with self._checker.raises_fault(step):
            state, mode, scalars = function(*inputs)
        return inject_compute_fault(state, step=step), mode, scalars

    def _rewind(self, step: int, position: int) -> None:
        """Discard the dispatched steps. The current state is that of this step."""
        self._dispatched.clear()
        self.step, self.position = step, position
        step_array = replicate(self._plan.mesh, np.asarray(step, self.state.step.dtype))
        self.state = replace(self.state, step=step_array)
        self._mode = self._mode_array(HALT if self._halts else SKIP)

    def _mode_array(self, mode: int) -> jax.Array:
        return replicate(self._plan.mesh, np.asarray(mode, np.int32))


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn the compiler's errors about its options into UserError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error).strip().partition("\n")[0]
        if "No such compile option" in message or "While setting option" in message:
            message = message.removeprefix("INVALID_ARGUMENT: ")
            raise UserError(f"compiler_options: {message}") from None
        raise


@jax.jit
def _copy(state: State) -> State:
    """Copy a state to other memory of the same devices."""
    copy: State = jax.tree.map(jnp.copy, state)
    return copy


# The checker in the TPU's compiler ----------------------------------------------------------------

ONE_CORE, TWO_CORES = ("v5e", "v6e"), ("v4", "v5p")
"""Chips with a single core repeat each bundle of instructions. In chips with two cores the other
core repeats the work."""
NOT_HARDWARE = (
    *("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED"),
    *("INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "FAILED_PRECONDITION", "allback"),
)
"""Parts of the messages of other errors in a step: memory, a lost host, an invalid program, or a
callback to Python."""


def checker_options(generation: str) -> dict[str, bool | str]:
    """Return the compiler options that turn the checker on for a TPU generation such as `v5e`."""
    options: dict[str, bool | str] = {
        "xla_tpu_enable_sdc_checker": True,
        "xla_tpu_sdc_check_repeat_count": "1",
        "xla_tpu_sdc_check_halt_on_detection": True,
    }
    if generation in ONE_CORE:
        options["xla_tpu_sdc_replicate_llo"] = True
    if generation in TWO_CORES:
        options["xla_tpu_sdc_checker_alternate_megacore_cores"] = True
    return options


class CompilerChecker:
    """The executable of the step with XLA's checker, and the steps that use it."""

    def __init__(self, plan: Plan) -> None:
        """Do not compile anything yet."""
        self._plan = plan
        self._interval = plan.recipe.settings.sdc_every if self.warning is None else None

    @property
    def warning(self) -> str | None:
        """A message if the recipe uses the checker and the platform has none."""
        platform = self._plan.mesh.devices.flat[0].platform
        if self._plan.recipe.settings.sdc_every is None or platform == "tpu":
            return None
        return f"sdc_every: only the compiler for TPUs has this checker; on {platform} it is off"

    def checks(self, step: int) -> bool:
        """Return True if this step uses the checker."""
        return self._interval is not None and step % self._interval == 0

    @cached_property
    def step(self) -> Any:
        """The step function, as `make_step` returns it."""
        plan = self._plan
        generation, _ = TPUS.get(plan.mesh.devices.flat[0].device_kind, ("", 1))
        options = {**plan.compiler_options, **checker_options(generation)}
        return make_step(plan.recipe, plan.mesh, plan.abstract_state, options)

    def compile(self, *inputs: Any) -> None:
        """Compile the step if it is used. An error of the compiler is not a hardware fault."""
        if self._interval is not None:
            self.step.lower(*inputs).compile()

    @contextmanager
    def raises_fault(self, step: int) -> Iterator[None]:
        """Turn an error of the checker into a HardwareFault.

        JAX raises the error when the step is dispatched or when its scalars are read.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            message = str(error)
            if not self.checks(step) or any(text in message for text in NOT_HARDWARE):
                raise
            message = message.strip()[:300] or type(error).__name__
            reason = f"step {step}: XLA's checker reports: {message}"
            raise HardwareFault(reason, host=jax.process_index()) from error
