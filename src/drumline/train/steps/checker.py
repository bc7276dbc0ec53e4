"""The checker inside XLA's compiler for TPUs: chosen steps that compute everything twice.

`Settings(sdc_every=1000)` takes each thousandth step with a second executable of the same step, in
which the compiler has every chip repeat its work and compare. It costs such a step about twice its
time. What a chip gets wrong in the same way both times it does not see: replicas do (watch/).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax

from drumline.chips.catalogue import TPUS
from drumline.health.fault_report import HardwareFault
from drumline.train.plan import Plan
from drumline.train.steps.step import make_step

ONE_CORE, TWO_CORES = ("v5e", "v6e"), ("v4", "v5p")
"""Chips with one core repeat each bundle of instructions; of two cores, the other one repeats."""
NOT_THE_CHIP = (
    *("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED"),
    *("INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "FAILED_PRECONDITION", "allback"),
)
"""What a step can also fail with: memory, a host that is gone, a program that cannot be, or Python
that is called back from it."""


def checker_options(generation: str) -> dict[str, bool | str]:
    """What turns the checker on for a generation of TPUs, such as `v5e`."""
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


class Checker:
    """The second executable, and the steps that it takes."""

    def __init__(self, plan: Plan) -> None:
        """Compile nothing yet."""
        self._plan = plan
        self._every = plan.recipe.settings.sdc_every if self.ignored is None else None

    @property
    def ignored(self) -> str | None:
        """Why the setting has no effect here, in a sentence: recipes move between platforms."""
        platform = self._plan.mesh.devices.flat[0].platform
        if self._plan.recipe.settings.sdc_every is None or platform == "tpu":
            return None
        return f"sdc_every: only the compiler for TPUs has this checker; on {platform} it is off"

    def is_due(self, step: int) -> bool:
        """Whether a step is taken with the checker."""
        return self._every is not None and step % self._every == 0

    @cached_property
    def step(self) -> Any:
        """The step, as `make_step` gives it."""
        plan = self._plan
        generation, _ = TPUS.get(plan.mesh.devices.flat[0].device_kind, ("", 1))
        return make_step(plan.recipe, plan.mesh, plan.places, checker_options(generation))

    def prepare(self, *inputs: Any) -> None:
        """Compile it, if any step is taken with it: what a compiler says accuses nobody."""
        if self._every is not None:
            self.step.lower(*inputs).compile()

    @contextmanager
    def accusing(self, step: int) -> Iterator[None]:
        """What the checker finds comes as an exception, when the step starts or when it is read."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            said = str(error)
            if not self.is_due(step) or any(word in said for word in NOT_THE_CHIP):
                raise
            host = jax.process_index()
            why = f"step {step}: XLA's checker says: {said.strip()[:300] or type(error).__name__}"
            raise HardwareFault(why, host=host) from error
