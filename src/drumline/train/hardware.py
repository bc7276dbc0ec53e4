"""Hardware checks during training: find chips that compute wrong results.

There are three checks:

- A step that spikes or is not finite halts the run (steps/step.py) and is *replayed*, with the same
  executable, state, batch and key.
- At every check the *replicas* of parameters and optimizer state are compared.
- At every check all devices run a *probe*, a short computation that should give the same bits.

A difference that should not exist ends the run with a `HardwareFault`. A difference that repeats
bit by bit is caused by the data or the program, and is not a fault. All hosts compare the same
checksums, so they reach the same verdict.
"""

import os
from collections.abc import Callable
from functools import cached_property
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from drumline.health import HardwareFault, burn_in
from drumline.heartbeat import heartbeat
from drumline.train.alarms import Alarms
from drumline.train.checkpoints.provenance import hash_records
from drumline.train.checkpoints.saving import RunCheckpoints
from drumline.train.checksums import (
    Deviation,
    DeviceChecksums,
    ReplicaGroups,
    compare_repeats,
    device_checksums,
    find_deviation,
    replica_groups,
    replicas_differ,
    replicated_leaves,
    without_replicas,
)
from drumline.train.multihost import failed_hosts
from drumline.train.plan import Plan
from drumline.train.probe import SlowHosts, probe_devices
from drumline.train.recipe import Params
from drumline.train.state import replicate, replicated
from drumline.train.steps.pipeline import DispatchedStep, Pipeline
from drumline.train.steps.step import LOSS, StepOutcome, has_primitive

MAX_RERUN_STEPS = 2000
"""The maximum number of steps to rerun for the proof of a fault."""
BURN_IN_SECONDS = 10.0
"""The length of the burn-in that searches for the faulty chip."""
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
DETERMINISTIC_FLAGS = (
    "xla_gpu_deterministic_ops=true",
    "xla_gpu_exclude_nondeterministic_ops=true",
)


class HardwareChecks:
    """The hardware checks of an attempt."""

    def __init__(
        self,
        plan: Plan,
        pipeline: Pipeline,
        checkpoints: RunCheckpoints,
        log: Callable[[str], None],
    ) -> None:
        """Start without a check."""
        settings = plan.recipe.settings
        self._plan, self._pipeline, self._log = plan, pipeline, log
        self._checkpoints = checkpoints
        self._mesh = plan.mesh
        self._alarms = Alarms(settings.alarm_loss, settings.alarm_norm)
        self._slow_hosts = SlowHosts()
        self._checked_step: int | None = None
        self._enabled = settings.check_every is not None
        self._compares_replicas = True
        """False once the program itself turns out to let its replicas diverge."""

    def restart(self) -> None:
        """Forget the last check, because the run continues from an earlier step."""
        self._checked_step = None

    def accept_step(self, outcome: StepOutcome) -> None:
        """Add an accepted step to the baseline of the alarms."""
        loss, norm = outcome.scalars[LOSS : LOSS + 2].tolist()
        self._alarms.accept(loss, norm)
        self._pipeline.set_limits(*self._alarms.limits)

    # Replays --------------------------------------------------------------------------------------

    def investigate(self, halted: DispatchedStep, outcome: StepOutcome) -> None:
        """Replay the step at which the run halted. Raises HardwareFault if the hardware is faulty.

        The state is exactly that before the step.
        """
        step = halted.step
        loss, norm = outcome.scalars[LOSS : LOSS + 2]
        event = f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}"
        if self._compares_replicas:
            self._compare_replicas(step - 1)
        deviation, finding = None, ""
        try:
            deviation = self._replay(halted)
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            finding = "there is not enough memory for a replay"
        if deviation is None and not outcome.finite:
            deviation = self._recompute_nonfinite_state(step - 1)
        if deviation is not None:
            if self._nondeterminism is None:
                self._raise_fault(deviation, f"{event}, and a replay gives different bits")
            finding = f"a replay gives different bits, possibly because {self._nondeterminism}"
        if outcome.spiked:
            self._alarms.clear()
            self._pipeline.set_limits(*self._alarms.limits)
            same_bits = "a replay gives the same bits, so the cause is the data or the model"
            self._log(f"{event}, far above the recent median; {finding or same_bits}")
        elif finding:
            self._log(f"{event}; {finding}")

    def _replay(self, halted: DispatchedStep) -> Deviation | None:
        """Replay a step twice, and a third time if the runs differ, to find the deviating device.

        Only a difference between runs is proof. Replicas that differ in the same way in each run
        are caused by the program, or show up at the next check.
        """
        scalars = [device_checksums(self._mesh, self._deterministic(halted.scalars))]
        states = []
        for run in range(3):
            state, replayed = self._pipeline.replay(halted)
            scalars.append(device_checksums(self._mesh, self._deterministic(replayed)))
            states.append(device_checksums(self._mesh, state))
            del state
            deviation = self._compare_repeats(states, self._groups)
            scalar_groups = replica_groups(self._mesh, replayed)
            deviation = deviation or self._compare_repeats(scalars, scalar_groups)
            if run == 1 and deviation is None:
                break
        return deviation

    def _compare_repeats(
        self, runs: list[DeviceChecksums], groups: tuple[ReplicaGroups, ...]
    ) -> Deviation | None:
        if not self._compares_replicas:
            groups = tuple(map(without_replicas, groups))
        return compare_repeats(runs, groups)

    def _recompute_nonfinite_state(self, step: int) -> Deviation | None:
        """Recompute the state and compare, if it was non-finite before this step."""
        finite = not failed_hosts(_all_finite(self._pipeline.state.params))
        if finite or not self._can_rerun(step):
            return None
        before = device_checksums(self._mesh, self._pipeline.state)
        if not self._rerun(step):
            return None
        runs = [before, device_checksums(self._mesh, self._pipeline.state)]
        return None if runs[0] == runs[1] else find_deviation(runs, self._groups)

    # Checks ---------------------------------------------------------------------------------------

    def check(self) -> bool:
        """Compare the devices, once per step. Return True if this verifies the whole state.

        It does if every array has at least two replicas.
        """
        step = self._pipeline.step
        if not self._enabled:
            return False
        if self._checked_step != step:
            if self._compares_replicas:
                self._compare_replicas(step)
            self._probe(step)
            self._checked_step = step
        return self._compares_replicas and all(groups.replicated for groups in self._groups)

    def _compare_replicas(self, step: int) -> None:
        checksums = self._replica_checksums()
        if not replicas_differ(checksums, self._replicated_groups):
            return
        event = f"after step {step} replicas have different bits"
        if self._nondeterminism is not None:
            self._compares_replicas = False
            self._log(
                f"{event}, possibly because {self._nondeterminism}; replicas are no longer compared"
            )
            return
        runs = [checksums]
        if self._can_rerun(step):
            start = self._checkpoints.newest_until(step)
            self._log(f"{event}; rerunning from step {start:,}")
            for _ in range(2):
                if not self._rerun(step):
                    break
                runs.append(self._replica_checksums())
                deviation = find_deviation(runs, self._replicated_groups)
                if runs[-1] == checksums or (deviation and deviation.device is not None):
                    break
        reruns = runs[1:]
        if checksums in reruns or (not reruns and self._checked_step is None):
            # The program itself makes the replicas differ in every run, from its first step on. A
            # faulty chip could do so, too, but would also fail the burn-in.
            event += " in every run" if reruns else " at the first check"
            self._run_burn_in(event)
            self._compares_replicas = False
            self._log(
                f"{event}, so the cause is the program, such as a shard_map without check_vma; "
                "replicas are no longer compared"
            )
            return
        self._raise_fault(find_deviation(runs, self._replicated_groups) or Deviation(), event)

    def _probe(self, step: int) -> None:
        checksums, seconds = probe_devices(self._mesh, step)
        heartbeat(pulse_ms=1e3 * seconds[jax.process_index()])
        if self._platform != "cpu":
            for message in self._slow_hosts.update(seconds):
                self._log(message)
        if len(set(checksums.values())) == 1:
            return
        # More runs tell the errors of an intermittent fault from the correct value.
        runs = [checksums, *(probe_devices(self._mesh, step)[0] for _ in range(2))]
        rows: list[DeviceChecksums] = [
            {device: (value,) for device, value in run.items()} for run in runs
        ]
        groups = replica_groups(self._mesh, replicate(self._mesh, np.zeros(())))
        deviation = find_deviation(rows, groups) or Deviation()
        reason = f"after step {step} the same matmuls give different bits on different chips"
        self._raise_fault(deviation, reason)

    def _replica_checksums(self) -> DeviceChecksums:
        return device_checksums(self._mesh, replicated_leaves(self._mesh, self._pipeline.state))

    # Reruns from a checkpoint ---------------------------------------------------------------------

    def _can_rerun(self, step: int) -> bool:
        """Return True if a checkpoint is near enough and the data is reproducible."""
        if step - self._checkpoints.newest_until(step) > MAX_RERUN_STEPS:
            return False
        return not failed_hosts(hash_records(self._plan.recipe.data) is not None)

    def _rerun(self, step: int) -> bool:
        """Rerun from the last checkpoint to this step. If that is impossible, return False."""
        try:
            saved = self._checkpoints.read(self._checkpoints.newest_until(step))
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            return False
        if saved is None:
            return False
        # Report each step, or the job manager would take the run to be stuck.
        self._pipeline.rerun(saved, step, on_step=heartbeat)
        return True

    # Faults ---------------------------------------------------------------------------------------

    def _raise_fault(self, deviation: Deviation, reason: str) -> NoReturn:
        if deviation.device is None:
            self._run_burn_in(reason)
        hosts = {self._host_of[device] for device in deviation.devices}
        host = hosts.pop() if len(hosts) == 1 else None
        raise HardwareFault(reason, host=host, chip=deviation.device)

    def _run_burn_in(self, reason: str) -> None:
        """Search for the faulty chip. Raise HardwareFault if a single chip fails."""
        self._log(f"{reason}; testing every chip for {BURN_IN_SECONDS:.0f} seconds")
        try:
            report = burn_in(list(self._mesh.devices.flat), BURN_IN_SECONDS)
        except Exception as error:
            # It may lack memory, or a host. The fault is reported without a chip then.
            self._log(f"the burn-in did not run: {str(error)[:200] or type(error).__name__}")
            return
        failed = [int(device.id) for device in report.devices if device.verdict == "fail"]
        if len(failed) == 1 and failed[0] in self._host_of:
            host = self._host_of[failed[0]]
            raise HardwareFault(f"{reason}; it fails the burn-in", host=host, chip=failed[0])

    # Properties of the program and the mesh -------------------------------------------------------

    @property
    def _platform(self) -> str:
        return str(self._mesh.devices.flat[0].platform)

    @cached_property
    def _nondeterminism(self) -> str | None:
        """A clause that explains why a replay may give other bits, or None if it may not.

        GPUs are deterministic only with certain flags.
        """
        if has_primitive(self._plan.loss.jaxpr.jaxpr, "pure_callback", "io_callback"):
            return "the program's Python callbacks return different values"
        flags = os.environ.get("XLA_FLAGS", "")
        if self._platform != "gpu" or any(flag in flags for flag in DETERMINISTIC_FLAGS):
            return None
        return (
            "a GPU adds in a different order each time (to exclude that, run with "
            f"XLA_FLAGS=--{DETERMINISTIC_FLAGS[0]})"
        )

    @cached_property
    def _deterministic(self) -> Callable[[jax.Array], jax.Array]:
        """The scalars of a step that depend only on its state, batch and key."""
        return jax.jit(lambda scalars: scalars[LOSS:], out_shardings=replicated(self._mesh))

    @cached_property
    def _host_of(self) -> dict[int, int]:
        return {int(device.id): int(device.process_index) for device in self._mesh.devices.flat}

    @cached_property
    def _groups(self) -> tuple[ReplicaGroups, ...]:
        return replica_groups(self._mesh, self._plan.abstract_state)

    @cached_property
    def _replicated_groups(self) -> tuple[ReplicaGroups, ...]:
        return replica_groups(self._mesh, replicated_leaves(self._mesh, self._plan.abstract_state))


def _all_finite(params: Params) -> bool:
    """Return True if all parameters are finite. This waits for the devices."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    all_finite = jax.jit(
        lambda leaves: jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
    )
    return not leaves or bool(np.asarray(all_finite(leaves).addressable_data(0)))
