"""Faulty chips during training: the fault report, and the checkpoint for the next attempt."""

# mypy: allow-untyped-calls

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from drumline.health import HardwareFault
from drumline.health.emulated import flip_bit, modify_shard
from drumline.health.fault_report import parse_fault_report
from drumline.health.report import CheckOutcome, ChipHealth, HealthReport
from drumline.train import Functions, Recipe, data, fingerprint, fit, hardware
from drumline.train.__main__ import main
from drumline.train.checkpoints.marks import Marks
from drumline.train.steps import pipeline
from tests.train import toy as toys
from tests.train.toy import ROWS, SHARDED, init, loss

REPLICATED = Functions(init, loss)
"""The toy with all parameters on every device: eight replicas."""
FAULTY_CHIP = 5
BreakChip = Callable[..., None]


def toy(steps: int, **settings: Any) -> Recipe:
    """Return the toy on all eight devices, so that most replicas are right."""
    return toys.toy(steps, mesh=8, **settings)


@pytest.fixture
def break_chip(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> BreakChip:
    """Return a function that switches to a machine with or without a faulty chip."""
    machines = iter(tmp_path_factory.mktemp("machines") / str(number) for number in range(9))
    monkeypatch.setenv("DRUMLINE_EMULATED", "1")
    monkeypatch.setattr(hardware, "burn_in", lambda *_: HealthReport("pass", "all is well"))

    def switch(mode: str | None, from_step: int = 0, seed: int = 7) -> None:
        machine = next(machines)
        machine.mkdir()
        monkeypatch.setenv("DRUMLINE_MACHINE", str(machine))
        if mode is not None:
            fault = {"how": mode, "chip": FAULTY_CHIP, "from_step": from_step, "seed": seed}
            (machine / "fault.json").write_text(json.dumps(fault))

    return switch


def steps_in(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}


def spiky(spike_step: int, steps: int, model: Functions, **settings: Any) -> Recipe:
    """Return the toy with a batch of targets far from the predictions."""
    rows = {
        name: np.resize(column, (16 * steps, *column.shape[1:])) for name, column in ROWS.items()
    }
    rows["y"] = rows["y"].copy()
    rows["y"][16 * (spike_step - 1) : 16 * spike_step] += 100
    base_recipe = toy(steps, model=model, **settings)
    return replace(base_recipe, data=data.arrays(rows, batch=16, shuffle=False))


def test_hardware_checks_change_no_bit() -> None:
    checks_off: dict[str, Any] = {"check_every": None, "alarm_loss": None, "alarm_norm": None}
    checked = fit(toy(70, model=REPLICATED, check_every=7))
    unchecked = fit(toy(70, model=REPLICATED, **checks_off))
    assert fingerprint(checked.state) == fingerprint(unchecked.state)


def test_a_spike_of_the_data_is_replayed_and_then_accepted(
    capsys: pytest.CaptureFixture[str], break_chip: BreakChip
) -> None:
    break_chip(None)
    checked = fit(spiky(62, 70, REPLICATED))
    output = capsys.readouterr().out
    assert output.count("far above the recent median") == 1
    assert "step 62: loss " in output
    assert "a replay gives the same bits, so the cause is the data or the model" in output
    checks_off = fit(spiky(62, 70, REPLICATED, alarm_loss=None, alarm_norm=None))
    assert "far above the recent median" not in capsys.readouterr().out
    assert checked.step == checks_off.step == 70
    assert fingerprint(checked.state) == fingerprint(checks_off.state)


def test_a_faulty_chip_is_found_and_a_run_on_another_machine_ends_with_the_right_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_chip: BreakChip
) -> None:
    recipe = toy(60, model=REPLICATED)
    healthy_run = fit(recipe)
    break_chip("lies", from_step=33)
    with pytest.raises(HardwareFault) as raised:
        fit(recipe, checkpoint=tmp_path)
    assert (raised.value.host, raised.value.chip) == (0, FAULTY_CHIP)
    assert str(raised.value).startswith(f"drumline: chip {FAULTY_CHIP} of host 0 computes wrong: ")
    assert str(raised.value) in capsys.readouterr().out
    # The replicas were compared before each checkpoint, so no checkpoint has the bad state.
    assert max(steps_in(tmp_path)) == 30
    assert Marks(str(tmp_path)).names_with("checked") == {str(step) for step in steps_in(tmp_path)}
    break_chip(None)
    resumed_run = fit(recipe, checkpoint=tmp_path)
    assert "resuming from step 30" in capsys.readouterr().out
    assert fingerprint(resumed_run.state) == fingerprint(healthy_run.state)


def test_unverified_checkpoints_become_suspect_and_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_chip: BreakChip
) -> None:
    recipe = toy(40, model=REPLICATED, check_every=None, keep_last=2)
    healthy_run = fit(recipe)
    break_chip(None)
    fit(replace(recipe, steps=10), checkpoint=tmp_path)
    break_chip("nan", from_step=33)
    with pytest.raises(HardwareFault, match=f"chip {FAULTY_CHIP} of host 0"):
        fit(recipe, checkpoint=tmp_path)
    # The checkpoints of the faulty hardware are suspect. The one of the earlier attempt is kept
    # despite two newer ones.
    assert steps_in(tmp_path) == {10, 20, 30}
    assert Marks(str(tmp_path)).names_with("suspect") == {"20", "30"}
    capsys.readouterr()
    break_chip(None)
    resumed_run = fit(recipe, checkpoint=tmp_path)
    output = capsys.readouterr().out
    assert "skipping checkpoint 30: the hardware that wrote it computed wrong results" in output
    assert "resuming from step 10" in output
    assert fingerprint(resumed_run.state) == fingerprint(healthy_run.state)


@pytest.mark.parametrize(("faulty_chips", "bad_chip"), [([FAULTY_CHIP], FAULTY_CHIP), ([1, 6], 6)])
def test_without_replicas_a_replay_or_a_burn_in_names_the_chip(
    faulty_chips: list[int], bad_chip: int, monkeypatch: pytest.MonkeyPatch, break_chip: BreakChip
) -> None:
    """A step spikes, and the replay gives different bits on some chips."""
    break_chip(None)
    injected_steps: list[int] = []

    def inject_in_replay(state: Any, *, step: int) -> Any:
        injected_steps.append(step)
        # The run halts at step 62 and has dispatched two more steps. Then comes the replay.
        if injected_steps[-2:] != [64, 62]:
            return state
        body = state.params["body"]
        for chip in faulty_chips:
            body = modify_shard(body, jax.devices()[chip], lambda values: flip_bit(values, 20))
        return replace(state, params={**state.params, "body": body})

    tests = {"matmul": CheckOutcome("fail", "other bits")}
    report = HealthReport("fail", "a chip", devices=(ChipHealth(0, tests, id=6, kind="cpu"),))
    durations: list[float] = []

    def burn_in(_: Any, seconds: float) -> HealthReport:
        durations.append(seconds)
        return report

    monkeypatch.setattr(hardware, "burn_in", burn_in)
    monkeypatch.setattr(pipeline, "inject_compute_fault", inject_in_replay)
    with pytest.raises(HardwareFault, match="a replay gives different bits") as raised:
        fit(spiky(62, 70, SHARDED))
    assert raised.value.chip == bad_chip
    assert injected_steps[-3:] == [62, 62, 62]
    assert len(durations) == len(faulty_chips) - 1


def test_a_program_with_diverging_replicas_is_not_a_hardware_fault(
    capsys: pytest.CaptureFixture[str], break_chip: BreakChip
) -> None:
    break_chip(None)

    @jax.custom_vjp
    def diverging(weight: jax.Array) -> jax.Array:
        return weight

    def diverging_gradient(_: None, slope: jax.Array) -> tuple[jax.Array]:
        # Each device has a different gradient for a replicated array, and nothing checks it.
        replicated = PartitionSpec()
        shard_map = partial(
            jax.shard_map, in_specs=replicated, out_specs=replicated, check_vma=False
        )
        return (shard_map(lambda part: part * (1.0 + jax.lax.axis_index("data")))(slope),)

    diverging.defvjp(lambda weight: (weight, None), diverging_gradient)

    def diverging_loss(params: Any, batch: Any, key: Any) -> Any:
        return loss({**params, "head": diverging(params["head"])}, batch, key)

    result = fit(toy(12, model=Functions(init, diverging_loss), check_every=5))
    output = capsys.readouterr().out
    assert result.step == 12
    assert output.count("so the cause is the program") == 1
    assert "computes wrong" not in output


def test_the_checker_of_the_tpu_is_off_on_other_platforms(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(toy(2, sdc_every=1))
    assert "sdc_every: only the compiler for TPUs has this checker; on cpu it is off" in (
        capsys.readouterr().out
    )


def test_the_command_prints_the_fault_report_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], break_chip: BreakChip
) -> None:
    """Only the counters have replicas here. They or the probe show the fault."""
    break_chip("lies")
    assert (
        main([str(Path(__file__).parent / "toy.py"), "--set", "steps=40", "--set", "mesh=8"]) == 1
    )
    *_, last = capsys.readouterr().err.strip().splitlines()
    fault_report = parse_fault_report(last)
    assert fault_report is not None
    assert (fault_report.host, fault_report.chip) == (0, FAULTY_CHIP)
