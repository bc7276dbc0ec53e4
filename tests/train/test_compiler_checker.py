"""The checker of the TPU's compiler: its options, and its errors as hardware faults."""

# mypy: allow-untyped-calls

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from drumline.health import HardwareFault
from drumline.inspect.compiling.programs import compile_for
from drumline.inspect.compiling.workers import TPU_PYTHON, has_tpu_compiler
from drumline.inspect.cost.machines import parse_machine
from drumline.inspect.examples.models import training_step
from drumline.models import MLP
from drumline.train.steps.pipeline import CompilerChecker, checker_options
from tests.train.toy import toy


@pytest.mark.skipif(
    not has_tpu_compiler(),
    reason=f"needs the TPU's compiler: libtpu on x86_64 Linux, or {TPU_PYTHON}",
)
@pytest.mark.parametrize(
    ("generation", "accelerator"),
    [("v4", "v4-8"), ("v5e", "v5litepod-4"), ("v5p", "v5p-8"), ("v6e", "v6e-4")],
)
def test_the_compiler_accepts_the_options_for_a_training_step(
    generation: str, accelerator: str
) -> None:
    mesh = AbstractMesh((4,), ("data",))
    batch = {"image": ((8, 16), np.float32), "label": ((8,), np.int32)}
    step, inputs = training_step(MLP(input_dim=16, hidden_sizes=(8,)), batch, mesh)

    def compiled(options: dict[str, Any]) -> Any:
        machine = parse_machine(accelerator)
        return compile_for(machine, step, inputs, mesh=mesh, compiler="tpu", options=options)

    options = checker_options(generation)
    assert len(options) == 4
    assert compiled(options).compiler == "tpu"
    with pytest.raises(Exception, match="xla_tpu_sdc_check_nothing"):
        compiled({**options, "xla_tpu_sdc_check_nothing": True})


def checker_on_tpus(interval: int | None) -> CompilerChecker:
    """Return a checker for a plan on devices that report to be TPUs."""
    device = SimpleNamespace(platform="tpu", device_kind="TPU v4")
    mesh = SimpleNamespace(devices=np.array([device]))
    plan: Any = SimpleNamespace(mesh=mesh, recipe=toy(10, sdc_every=interval))
    return CompilerChecker(plan)


def test_the_checker_runs_at_its_interval_and_its_error_is_a_hardware_fault() -> None:
    checker = checker_on_tpus(4)
    assert [step for step in range(1, 13) if checker.checks(step)] == [4, 8, 12]
    assert checker.warning is None
    error = jax.errors.JaxRuntimeError
    fault_message = "host 0 computes wrong: step 8: XLA's checker"
    with pytest.raises(HardwareFault, match=fault_message) as raised, checker.raises_fault(8):
        raise error("INTERNAL: SDC detected at Physical location: tpu3:pe2:2")
    assert "Physical location: tpu3:pe2:2" in raised.value.reason
    # Other steps and other errors raise no fault.
    with pytest.raises(error), checker.raises_fault(7):
        raise error("INTERNAL: SDC")
    for message in (
        "RESOURCE_EXHAUSTED: out of memory",
        "INVALID_ARGUMENT: No such compile option: 'xla_tpu_enable_sdc_checker'",
        "INTERNAL: CpuCallback error calling callback: ValueError: no such file",
    ):
        with pytest.raises(error), checker.raises_fault(8):
            raise error(message)
    checker.step = SimpleNamespace(lower=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checker.compile()  # before the first step, outside of the fault check
    assert not any(checker_on_tpus(None).checks(step) for step in range(1, 13))
