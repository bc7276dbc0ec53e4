"""A chip that lies during training: who is accused, and what the next attempt goes on from."""

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
from tests.train.toy import ROWS, SHARDED, init, loss, toy

COPIES = Functions(init, loss)
"""Every device has all parameters: eight replicas."""
LIAR = 5
Break = Callable[..., None]


@pytest.fixture
def break_chip(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Break:
    """Go to a machine where a chip lies from a step on, or for None to a sound one."""
    machines = iter(tmp_path_factory.mktemp("machines") / str(number) for number in range(9))
    monkeypatch.setenv("DRUMLINE_EMULATED", "1")
    monkeypatch.setattr(hardware, "burn_in", lambda *_: HealthReport("pass", "all is well"))

    def breaks(how: str | None, from_step: int = 0, seed: int = 7) -> None:
        machine = next(machines)
        machine.mkdir()
        monkeypatch.setenv("DRUMLINE_MACHINE", str(machine))
        if how is not None:
            fault = {"how": how, "chip": LIAR, "from_step": from_step, "seed": seed}
            (machine / "fault.json").write_text(json.dumps(fault))

    return breaks


def steps_in(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}


def spiky(at: int, steps: int, model: Functions, **settings: Any) -> Recipe:
    """The toy, whose rows of one batch are far from what the model has learned."""
    rows = {
        name: np.resize(column, (16 * steps, *column.shape[1:])) for name, column in ROWS.items()
    }
    rows["y"] = rows["y"].copy()
    rows["y"][16 * (at - 1) : 16 * at] += 100
    made = toy(steps, model=model, **settings)
    return replace(made, data=data.arrays(rows, batch=16, shuffle=False))


def test_watching_changes_no_bit() -> None:
    off: dict[str, Any] = {"check_every": None, "alarm_loss": None, "alarm_norm": None}
    watched = fit(toy(70, model=COPIES, check_every=7))
    unwatched = fit(toy(70, model=COPIES, **off))
    assert fingerprint(watched.state) == fingerprint(unwatched.state)


def test_a_spike_of_the_data_is_computed_again_and_then_taken(
    capsys: pytest.CaptureFixture[str], break_chip: Break
) -> None:
    break_chip(None)
    watched = fit(spiky(62, 70, COPIES))
    said = capsys.readouterr().out
    assert said.count("far above the recent median") == 1
    assert "step 62: loss " in said
    assert "a replay gives the same bits, so the cause is the data or the model" in said
    off = fit(spiky(62, 70, COPIES, alarm_loss=None, alarm_norm=None))
    assert "far above the recent median" not in capsys.readouterr().out
    assert watched.step == off.step == 70
    assert fingerprint(watched.state) == fingerprint(off.state)


def test_a_lying_chip_is_found_and_another_machine_ends_with_the_bits_of_a_sound_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_chip: Break
) -> None:
    recipe = toy(60, model=COPIES)
    sound = fit(recipe)
    break_chip("lies", from_step=33)
    with pytest.raises(HardwareFault) as caught:
        fit(recipe, checkpoint=tmp_path)
    assert (caught.value.host, caught.value.chip) == (0, LIAR)
    assert str(caught.value).startswith(f"drumline: chip {LIAR} of host 0 computes wrong: ")
    assert str(caught.value) in capsys.readouterr().out
    # Before each checkpoint the replicas were compared, so the bad state is in none.
    assert max(steps_in(tmp_path)) == 30
    assert Marks(str(tmp_path)).names_with("checked") == {str(step) for step in steps_in(tmp_path)}
    break_chip(None)
    healed = fit(recipe, checkpoint=tmp_path)
    assert "resuming from step 30" in capsys.readouterr().out
    assert fingerprint(healed.state) == fingerprint(sound.state)


def test_what_was_saved_unchecked_is_suspect_and_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_chip: Break
) -> None:
    recipe = toy(40, model=COPIES, check_every=None, keep_last=2)
    sound = fit(recipe)
    break_chip(None)
    fit(replace(recipe, steps=10), checkpoint=tmp_path)
    break_chip("nan", from_step=33)
    with pytest.raises(HardwareFault, match=f"chip {LIAR} of host 0"):
        fit(recipe, checkpoint=tmp_path)
    # Of the hardware that failed nothing can be believed. What another left is still there,
    # although there are two newer ones.
    assert steps_in(tmp_path) == {10, 20, 30}
    assert Marks(str(tmp_path)).names_with("suspect") == {"20", "30"}
    capsys.readouterr()
    break_chip(None)
    healed = fit(recipe, checkpoint=tmp_path)
    said = capsys.readouterr().out
    assert "skipping checkpoint 30: the hardware that wrote it computed wrong results" in said
    assert "resuming from step 10" in said
    assert fingerprint(healed.state) == fingerprint(sound.state)


@pytest.mark.parametrize(("liars", "found"), [([LIAR], LIAR), ([1, 6], 6)])
def test_where_nothing_is_held_twice_a_replay_names_the_chip_or_a_burn_in_does(
    liars: list[int], found: int, monkeypatch: pytest.MonkeyPatch, break_chip: Break
) -> None:
    """A spike, and chips that give something else the second time."""
    break_chip(None)
    seen: list[int] = []

    def lies_in_the_replay(state: Any, *, step: int) -> Any:
        seen.append(step)
        # The run halts at step 62 and has started two more; then it is run again.
        if seen[-2:] != [64, 62]:
            return state
        body = state.params["body"]
        for liar in liars:
            body = modify_shard(body, jax.devices()[liar], lambda values: flip_bit(values, 20))
        return replace(state, params={**state.params, "body": body})

    tests = {"matmul": CheckOutcome("fail", "other bits")}
    report = HealthReport("fail", "a chip", devices=(ChipHealth(0, tests, id=6, kind="cpu"),))
    asked: list[float] = []

    def burn_in(_: Any, seconds: float) -> HealthReport:
        asked.append(seconds)
        return report

    monkeypatch.setattr(hardware, "burn_in", burn_in)
    monkeypatch.setattr(pipeline, "inject_compute_fault", lies_in_the_replay)
    with pytest.raises(HardwareFault, match="a replay gives different bits") as caught:
        fit(spiky(62, 70, SHARDED))
    assert caught.value.chip == found
    assert seen[-3:] == [62, 62, 62]
    assert len(asked) == len(liars) - 1


def test_a_program_that_leaves_its_replicas_different_accuses_nobody(
    capsys: pytest.CaptureFixture[str], break_chip: Break
) -> None:
    break_chip(None)

    @jax.custom_vjp
    def same(weight: jax.Array) -> jax.Array:
        return weight

    def twisted(_: None, slope: jax.Array) -> tuple[jax.Array]:
        # Each device has a gradient of its own for what all have a copy of, and nobody checks.
        here = PartitionSpec()
        own = partial(jax.shard_map, in_specs=here, out_specs=here, check_vma=False)
        return (own(lambda part: part * (1.0 + jax.lax.axis_index("data")))(slope),)

    same.defvjp(lambda weight: (weight, None), twisted)

    def uneven(params: Any, batch: Any, key: Any) -> Any:
        return loss({**params, "head": same(params["head"])}, batch, key)

    result = fit(toy(12, model=Functions(init, uneven), check_every=5))
    said = capsys.readouterr().out
    assert result.step == 12
    assert said.count("so the cause is the program") == 1
    assert "computes wrong" not in said


def test_the_checker_of_the_tpu_is_left_out_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    fit(toy(2, sdc_every=1))
    assert "sdc_every: only the compiler for TPUs has this checker; on cpu it is off" in (
        capsys.readouterr().out
    )


def test_the_command_ends_with_the_accusation_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], break_chip: Break
) -> None:
    """Nothing but counters is held twice here; every chip's short product tells, if not they."""
    break_chip("lies")
    assert main([str(Path(__file__).parent / "toy.py"), "--set", "steps=40"]) == 1
    *_, last = capsys.readouterr().err.strip().splitlines()
    accused = parse_fault_report(last)
    assert accused is not None
    assert (accused.host, accused.chip) == (0, LIAR)
