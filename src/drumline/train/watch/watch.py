"""Watching during training: when to look twice, what to compare, and whom to accuse of what.

Three things look. A step that spikes or is not finite halts the run (steps/step.py) and is
*replayed*: the same executable, state, batch and key. At every check the *replicas* of parameters
and moments are compared, and a short product of every chip (*pulse*). What differs that should not
ends in a `HardwareFault`; what repeats to the bit is the data's or the model's doing, and nobody
is accused. All hosts see the same rows of sums, and so come to the same end.
"""

import os
from collections.abc import Callable
from functools import cached_property
from typing import NoReturn

import jax
import numpy as np

from drumline.health import HardwareFault, burn_in
from drumline.heartbeat import heartbeat
from drumline.train.agree import hosts_without
from drumline.train.checkpoints.provenance import sampled
from drumline.train.checkpoints.saving import Saving
from drumline.train.plan import Plan
from drumline.train.state import everywhere, on_all
from drumline.train.steps.finite import all_finite
from drumline.train.steps.loss import calls_back
from drumline.train.steps.pipeline import Pipeline, StepInFlight
from drumline.train.steps.step import LOSS, StepOutcome
from drumline.train.watch.alarms import Alarms
from drumline.train.watch.checksums import Replicas, Rows, checksums, compared, layouts
from drumline.train.watch.pulse import pulse
from drumline.train.watch.slow import SlowHosts
from drumline.train.watch.verdict import Deviation, apart, find, repeated, torn

FARTHEST = 2000
"""Steps that are taken once more to prove an accusation: a chip is not worth a day."""
SEARCH = 10.0
"""Seconds of burn-in to find the chip, where the evidence names none."""
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
DETERMINISTIC = ("xla_gpu_deterministic_ops=true", "xla_gpu_exclude_nondeterministic_ops=true")


class Watch:
    """What this attempt knows of its hardware."""

    def __init__(
        self, plan: Plan, pipeline: Pipeline, saving: Saving, say: Callable[[str], None]
    ) -> None:
        """Nothing has been compared yet."""
        settings = plan.recipe.settings
        self._plan, self._pipeline, self._saving, self._say = plan, pipeline, saving, say
        self._mesh = plan.mesh
        self._alarms = Alarms(settings.alarm_loss, settings.alarm_norm)
        self._slow = SlowHosts()
        self._checked: int | None = None
        self._checks = settings.check_every is not None
        self._compares = True
        """Until replicas turn out to differ by the program's own doing."""

    def begin_again(self) -> None:
        """The run takes another course, from an earlier step: what was checked is not this one."""
        self._checked = None

    def accepted(self, outcome: StepOutcome) -> None:
        """A step counts: what is usual follows it."""
        loss, norm = outcome.told[LOSS : LOSS + 2].tolist()
        self._alarms.accept(loss, norm)
        self._pipeline.limit(*self._alarms.limits)

    # Replays --------------------------------------------------------------------------------------

    def inquire(self, halted: StepInFlight, outcome: StepOutcome) -> None:
        """Run the step that the run halted at again; raises HardwareFault, or it was no chip's lie.

        The run halted before it: the state is the very one that it began with.
        """
        step = halted.step
        loss, norm = outcome.told[LOSS : LOSS + 2]
        what = f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}"
        if self._compares:
            self._compare_replicas(step - 1)
        found, said = None, ""
        try:
            found = self._replay(halted)
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            said = "there is not the memory to compute it again"
        if found is None and not outcome.finite:
            found = self._lost_on_the_way(step - 1)
        if found is not None:
            if self._inexact is None:
                self._accuse(found, f"{what}, and other bits when computed again")
            said = f"computed again it is not the same, which {self._inexact}"
        if outcome.spiked:
            self._alarms.acquit()
            self._pipeline.limit(*self._alarms.limits)
            repeats = "computed again it is the same to the bit, so it is the data or the model"
            self._say(f"{what}, far above the usual; {said or repeats}")
        elif said:
            self._say(f"{what}; {said}")

    def _replay(self, halted: StepInFlight) -> Deviation | None:
        """Twice, and where these do not agree once more, to see who is alone with what it says.

        Only that they do not agree is proof: replicas that differ in the same way each time are
        the program's doing, or show at the next check.
        """
        told, given = [checksums(self._mesh, self._measured(halted.told))], []
        for run in range(3):
            state, again = self._pipeline.replay(halted)
            told.append(checksums(self._mesh, self._measured(again)))
            given.append(checksums(self._mesh, state))
            del state
            found = self._unlike(given, self._layouts)
            found = found or self._unlike(told, layouts(self._mesh, again))
            if run == 1 and found is None:
                break
        return found

    def _unlike(self, runs: list[Rows], lie: tuple[Replicas, ...]) -> Deviation | None:
        return repeated(runs, lie if self._compares else tuple(map(apart, lie)))

    def _lost_on_the_way(self, step: int) -> Deviation | None:
        """Whether a state with values that are not finite is what the steps really lead to."""
        finite = not hosts_without(all_finite(self._pipeline.state.params))
        if finite or not self._can_retrace(step):
            return None
        was = checksums(self._mesh, self._pipeline.state)
        if not self._retrace(step):
            return None
        runs = [was, checksums(self._mesh, self._pipeline.state)]
        return None if runs[0] == runs[1] else find(runs, self._layouts)

    # Checks ---------------------------------------------------------------------------------------

    def check(self) -> bool:
        """Compare the devices, once for each step; whether they prove all of the state.

        They do where everything in it is held at least twice.
        """
        step = self._pipeline.step
        if not self._checks:
            return False
        if self._checked != step:
            if self._compares:
                self._compare_replicas(step)
            self._take_pulse(step)
            self._checked = step
        return self._compares and self._covered

    def _compare_replicas(self, step: int) -> None:
        rows = self._replicas()
        if not torn(rows, self._compared):
            return
        what = f"after step {step} devices that should hold the same hold different bits"
        if self._inexact is not None:
            self._compares = False
            self._say(f"{what}, which {self._inexact}; they are compared no more")
            return
        runs = [rows]
        if self._can_retrace(step):
            self._say(f"{what}; computing it again from step {self._saving.nearest(step):,}")
            for _ in range(2):
                if not self._retrace(step):
                    break
                runs.append(self._replicas())
                found = find(runs, self._compared)
                if runs[-1] == rows or (found and found.device is not None):
                    break
        again = runs[1:]
        if rows in again or (not again and self._checked is None):
            # What the program does by itself it does each time, and from its first step on. A chip
            # may do so too, but then it shows in other programs as well.
            what += ", each time they are computed" if again else ", from the first check on"
            self._accuse_if_found(what)
            self._compares = False
            self._say(
                f"{what}: so it is the program, such as a shard_map without check_vma, and no "
                "chip; they are compared no more"
            )
            return
        self._accuse(find(runs, self._compared) or Deviation(), what)

    def _take_pulse(self, step: int) -> None:
        made, seconds = pulse(self._mesh, step)
        heartbeat(pulse_ms=1e3 * seconds[jax.process_index()])
        if self._platform != "cpu":
            for sentence in self._slow.heard(seconds):
                self._say(sentence)
        if len(set(made.values())) == 1:
            return
        # What a chip gets wrong now and then, more runs tell from what it gets right.
        runs = [made, *(pulse(self._mesh, step)[0] for _ in range(2))]
        rows: list[Rows] = [{device: (value,) for device, value in run.items()} for run in runs]
        found = find(rows, layouts(self._mesh, everywhere(self._mesh, np.zeros(())))) or Deviation()
        self._accuse(found, f"after step {step} the same product on every chip has other bits")

    def _replicas(self) -> Rows:
        return checksums(self._mesh, compared(self._mesh, self._pipeline.state))

    # The way once more ----------------------------------------------------------------------------

    def _can_retrace(self, step: int) -> bool:
        """Whether the way to a step is short enough, and its data read the same each time."""
        if step - self._saving.nearest(step) > FARTHEST:
            return False
        return not hosts_without(sampled(self._plan.recipe.data) is not None)

    def _retrace(self, step: int) -> bool:
        """Come to this step once more; False, with nothing changed, where that cannot be."""
        try:
            saved = self._saving.at(self._saving.nearest(step))
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            return False
        if saved is None:
            return False
        # Steps are told, or whoever waits for the next one would take the run to be stuck.
        self._pipeline.retrace(saved, step, taking=heartbeat)
        return True

    # Accusing -------------------------------------------------------------------------------------

    def _accuse(self, found: Deviation, why: str) -> NoReturn:
        device = found.device
        if device is None:
            self._accuse_if_found(why)
        hosts = {self._hosts[each] for each in found.devices}
        host = hosts.pop() if len(hosts) == 1 else None
        raise HardwareFault(why, host=host, chip=device)

    def _accuse_if_found(self, why: str) -> None:
        """Where the evidence names no chip, a burn-in may."""
        self._say(f"{why}; testing every chip for {SEARCH:.0f} seconds")
        try:
            report = burn_in(list(self._mesh.devices.flat), SEARCH)
        except Exception as error:
            # It can lack memory, or a host; the accusation stands without it.
            self._say(f"the test could not be made: {str(error)[:200] or type(error).__name__}")
            return
        bad = [int(device.id) for device in report.devices if device.verdict == "fail"]
        if len(bad) == 1 and bad[0] in self._hosts:
            host = self._hosts[bad[0]]
            raise HardwareFault(f"{why}; it fails the burn-in", host=host, chip=bad[0])

    # What is known of the mesh --------------------------------------------------------------------

    @property
    def _platform(self) -> str:
        return str(self._mesh.devices.flat[0].platform)

    @cached_property
    def _inexact(self) -> str | None:
        """Why the step need not give the same bits each time, to stand in a sentence.

        None where it must. On GPUs it must where XLA is told so.
        """
        if calls_back(self._plan.loss.traced.jaxpr):
            return "may be what the program's callbacks to Python return"
        flags = os.environ.get("XLA_FLAGS", "")
        if self._platform != "gpu" or any(flag in flags for flag in DETERMINISTIC):
            return None
        told = f"to tell, run with XLA_FLAGS=--{DETERMINISTIC[0]}"
        return f"on a GPU may be the order of its sums: {told}"

    @cached_property
    def _measured(self) -> Callable[[jax.Array], jax.Array]:
        """What a step told that depends on nothing but its state, batch and key."""
        return jax.jit(lambda told: told[LOSS:], out_shardings=on_all(self._mesh))

    @cached_property
    def _hosts(self) -> dict[int, int]:
        return {int(device.id): int(device.process_index) for device in self._mesh.devices.flat}

    @cached_property
    def _layouts(self) -> tuple[Replicas, ...]:
        return layouts(self._mesh, self._plan.places)

    @cached_property
    def _compared(self) -> tuple[Replicas, ...]:
        return layouts(self._mesh, compared(self._mesh, self._plan.places))

    @property
    def _covered(self) -> bool:
        return all(layout.replicated for layout in self._layouts)
