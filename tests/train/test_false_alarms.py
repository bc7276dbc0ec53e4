"""Programs with suspicious results on sound chips: none is reported as a hardware fault."""

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
from tests.train.test_hardware_faults import COPIES, spiky
from tests.train.toy import init, loss

NO_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")


@pytest.fixture(autouse=True)
def burn_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "burn_in", lambda *_: HealthReport("pass", "all is well"))


@jax.custom_vjp
def twisted(weight: jax.Array) -> jax.Array:
    """Its gradient is another one on device 3 than on all others, and nobody checks."""
    return weight


def _twist(_: None, slope: jax.Array) -> tuple[jax.Array]:
    here = PartitionSpec()
    own = partial(jax.shard_map, in_specs=here, out_specs=here, check_vma=False)
    return (own(lambda part: part * (1 + 0.001 * (jax.lax.axis_index("data") == 3)))(slope),)


twisted.defvjp(lambda weight: (weight, None), _twist)


def uneven(params: Any, batch: Any, key: Any) -> Any:
    return loss({**params, "head": twisted(params["head"])}, batch, key)


@pytest.mark.parametrize("check_every", [20, None])
def test_diverging_replicas_and_a_spike_are_not_a_hardware_fault(
    check_every: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = spiky(62, 65, Functions(init, uneven), check_every=check_every, save_every=20)
    assert fit(made, checkpoint=tmp_path).step == 65
    output = capsys.readouterr().out
    assert output.count("so the cause is the program") == 1
    assert output.count("a replay gives the same bits, so the cause is the data or the model") == 1
    # Replicas that differ prove nothing about what is saved.
    assert not Marks(str(tmp_path)).names_with("checked")


def test_a_program_with_python_callbacks_need_not_be_deterministic(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = np.random.default_rng(0)

    def drawn(_: Any) -> Any:
        return np.float32(rng.normal())

    def noisy(params: Any, batch: Any, key: Any) -> Any:
        value, metrics = loss(params, batch, key)
        like = jax.ShapeDtypeStruct((), np.float32)
        here = jax.lax.stop_gradient(value)
        noise = jax.lax.cond(here >= 0, lambda x: jax.pure_callback(drawn, like, x), abs, here)
        return value * (1 + 0.01 * noise), metrics

    assert fit(spiky(62, 65, Functions(init, noisy), check_every=None)).step == 65
    assert (
        "possibly because the program's Python callbacks return different values"
        in capsys.readouterr().out
    )


def test_actions_after_the_step_before_a_spike_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, at = _Run.evaluate, []

    def noted(run: _Run) -> None:
        at.append(run.pipeline.step)
        evaluate(run)

    monkeypatch.setattr(_Run, "evaluate", noted)
    made = spiky(62, 65, COPIES, evaluate_every=61)
    fit(replace(made, evaluation=Evaluation(made.data)))
    assert at == [61, 65]


def test_random_keys_in_the_state_are_compared_and_copied(
    capsys: pytest.CaptureFixture[str],
) -> None:
    noise = optax.add_noise(0.0, 0.55, jax.random.key(1))
    made = replace(spiky(62, 65, COPIES), optimizer=optax.chain(noise, optax.adam(0.02)))
    assert fit(made).step == 65
    assert "a replay gives the same bits" in capsys.readouterr().out


def test_without_memory_for_a_replay_there_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise NO_MEMORY

    monkeypatch.setattr(pipeline, "_copy", refuse)
    assert fit(spiky(62, 65, COPIES)).step == 65
    assert "there is not enough memory for a replay" in capsys.readouterr().out
    # Nor for the way from the first state to here.
    monkeypatch.undo()
    first, begun = RunCheckpoints._initial, []

    def once(saving: RunCheckpoints) -> Any:
        begun.append(saving)
        return first(saving) if len(begun) == 1 else refuse()

    monkeypatch.setattr(RunCheckpoints, "_initial", once)
    monkeypatch.setattr(hardware, "burn_in", lambda *_: HealthReport("pass", "all is well"))
    assert fit(spiky(9, 8, Functions(init, uneven), check_every=4)).step == 8
    assert len(begun) == 2
    output = capsys.readouterr().out
    assert "at the first check, so the cause is the program" in output
    assert "computes wrong" not in output


def test_a_rerun_reports_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a job manager that waits for the next step would end the run."""
    steps: list[int | None] = []
    monkeypatch.setattr(hardware, "heartbeat", lambda step=None, **_: steps.append(step))
    fit(spiky(9, 8, Functions(init, uneven), check_every=4))
    assert steps[:3] == [1, 2, 3]
