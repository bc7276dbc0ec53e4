"""Programs with suspicious results on healthy chips: none is reported as a hardware fault."""

# mypy: allow-untyped-calls

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest
from jax.sharding import PartitionSpec

from drumline.health.report import HealthReport
from drumline.train import Evaluation, Functions, fit, hardware
from drumline.train.checkpoints.marks import Marks
from drumline.train.checkpoints.saving import RunCheckpoints
from drumline.train.loop import _Run
from drumline.train.steps import pipeline
from tests.cases import rare
from tests.train.test_hardware_faults import REPLICATED, spiky
from tests.train.toy import init, loss

NO_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")


@pytest.fixture(autouse=True)
def burn_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "burn_in", lambda *_: HealthReport("pass", "all is well"))


@jax.custom_vjp
def diverging(weight: jax.Array) -> jax.Array:
    """Return the weight, with a different gradient on device 3 than on all others."""
    return weight


def _diverging_gradient(_: None, slope: jax.Array) -> tuple[jax.Array]:
    replicated = PartitionSpec()
    shard_map = partial(jax.shard_map, in_specs=replicated, out_specs=replicated, check_vma=False)
    return (shard_map(lambda part: part * (1 + 0.001 * (jax.lax.axis_index("data") == 3)))(slope),)


diverging.defvjp(lambda weight: (weight, None), _diverging_gradient)


def diverging_loss(params: Any, batch: Any, key: Any) -> Any:
    return loss({**params, "head": diverging(params["head"])}, batch, key)


@pytest.mark.parametrize("check_every", [20, *rare(None)])
def test_diverging_replicas_and_a_spike_are_not_a_hardware_fault(
    check_every: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = spiky(62, 65, Functions(init, diverging_loss), check_every=check_every, save_every=20)
    assert fit(recipe, checkpoint=tmp_path).step == 65
    output = capsys.readouterr().out
    assert output.count("so the cause is the program") == 1
    assert output.count("a replay gives the same bits, so the cause is the data or the model") == 1
    # Different replicas prove nothing about the saved state.
    assert not Marks(str(tmp_path)).names_with("checked")


def test_a_program_with_python_callbacks_need_not_be_deterministic(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = np.random.default_rng(0)

    def random_number(_: Any) -> Any:
        return np.float32(rng.normal())

    def noisy_loss(params: Any, batch: Any, key: Any) -> Any:
        value, metrics = loss(params, batch, key)
        scalar_shape = jax.ShapeDtypeStruct((), np.float32)
        constant = jax.lax.stop_gradient(value)
        noise = jax.lax.cond(
            constant >= 0,
            lambda x: jax.pure_callback(random_number, scalar_shape, x),
            abs,
            constant,
        )
        return value * (1 + 0.01 * noise), metrics

    assert fit(spiky(62, 65, Functions(init, noisy_loss), check_every=None)).step == 65
    assert (
        "possibly because the program's Python callbacks return different values"
        in capsys.readouterr().out
    )


def test_actions_after_the_step_before_a_spike_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, evaluated_steps = _Run.evaluate, []

    def record_step(run: _Run) -> None:
        evaluated_steps.append(run.pipeline.step)
        evaluate(run)

    monkeypatch.setattr(_Run, "evaluate", record_step)
    recipe = spiky(62, 65, REPLICATED, evaluate_every=61)
    fit(replace(recipe, evaluation=Evaluation(recipe.data)))
    assert evaluated_steps == [61, 65]


def test_random_keys_in_the_state_are_compared_and_copied(
    capsys: pytest.CaptureFixture[str],
) -> None:
    noise = optax.add_noise(0.0, 0.55, jax.random.key(1))
    recipe = replace(spiky(62, 65, REPLICATED), optimizer=optax.chain(noise, optax.adam(0.02)))
    assert fit(recipe).step == 65
    assert "a replay gives the same bits" in capsys.readouterr().out


def test_without_memory_for_a_replay_there_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_no_memory(*_: Any) -> Any:
        raise NO_MEMORY

    monkeypatch.setattr(pipeline, "_copy", raise_no_memory)
    assert fit(spiky(62, 65, REPLICATED)).step == 65
    assert "there is not enough memory for a replay" in capsys.readouterr().out
    # There is not enough memory for a rerun from the first state either.
    monkeypatch.undo()
    initial_state, restarts = RunCheckpoints._initial, []

    def fail_after_first(saving: RunCheckpoints) -> Any:
        restarts.append(saving)
        return initial_state(saving) if len(restarts) == 1 else raise_no_memory()

    monkeypatch.setattr(RunCheckpoints, "_initial", fail_after_first)
    monkeypatch.setattr(hardware, "burn_in", lambda *_: HealthReport("pass", "all is well"))
    assert fit(spiky(9, 8, Functions(init, diverging_loss), check_every=4)).step == 8
    assert len(restarts) == 2
    output = capsys.readouterr().out
    assert "at the first check, so the cause is the program" in output
    assert "computes wrong" not in output


def test_a_rerun_reports_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job manager that waits for the next step would end the run otherwise."""
    steps: list[int | None] = []
    monkeypatch.setattr(hardware, "heartbeat", lambda step=None, **_: steps.append(step))
    fit(spiky(9, 8, Functions(init, diverging_loss), check_every=4))
    assert steps[:3] == [1, 2, 3]
