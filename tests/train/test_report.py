"""The output of a run: JSON lines, TensorBoard, heartbeat, evaluation and goodput."""

import itertools
import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest

from drumline.heartbeat import flush
from drumline.train import Evaluation, Result, data, fit
from drumline.train.checkpoints.files import open_append
from drumline.train.goodput import RunHistory, StepClock, start_attempt
from drumline.train.reporting import mfu, peak_flops
from tests.train.toy import COUNT, ROWS, Slow, toy

heartbeat_module = sys.modules["drumline.heartbeat"]


def measure(params: Any, batch: Any) -> dict[str, jax.Array]:
    """Return metrics that are not in alphabetical order."""
    error = jnp.tanh(batch["x"] @ params["body"]) @ params["head"] - batch["y"]
    return {"squared": jnp.mean(error**2), "number": jnp.mean(batch["number"])}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Result, Path]]:
    """Run twelve steps with an evaluation every five, and a heartbeat file."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRUMLINE_HEARTBEAT", str(folder / "heartbeat.json"))
        patch.setattr(heartbeat_module, "_latest", None)
        patch.setattr("atexit.register", lambda _: None)
        recipe_made = toy(12, save_every=4, log_every=2, evaluate_every=5)
        result = fit(
            replace(recipe_made, evaluation=Evaluation(recipe_made.data, measure)),
            checkpoint=folder,
        )
        flush()
        yield result, folder


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_json_lines_hold_each_logged_step_once(run: tuple[Result, Path]) -> None:
    lines = read_lines(run[1])
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in lines if "eval_squared" in line] == [5, 10, 12]
    for line in steps:
        assert line["attempt"] == 1
        assert line.keys() >= {"time", "loss", "grad_norm", "numbers", "goodput"}
        assert line["rate"] > 0
        assert 0 <= line["goodput"] <= 1
        assert "mfu" not in line  # The peak of a CPU is unknown.
    assert steps[-1]["loss"] == run[0].metrics["loss"]


def test_the_evaluation_is_the_mean_over_every_row_once(run: tuple[Result, Path]) -> None:
    params = {k: np.asarray(v, np.float64) for k, v in run[0].state.params.items()}
    rows = {name: column.astype(np.float64) for name, column in ROWS.items()}
    error = np.tanh(rows["x"] @ params["body"]) @ params["head"] - rows["y"]
    assert run[0].metrics["eval_number"] == pytest.approx((COUNT - 1) / 2, rel=1e-6)
    assert run[0].metrics["eval_squared"] == pytest.approx(np.mean(error**2), rel=1e-5)


def test_the_heartbeat_reports_the_progress_of_the_run(run: tuple[Result, Path]) -> None:
    fields = json.loads((run[1] / "heartbeat.json").read_text())
    assert (fields["step"], fields["total"], fields["checkpoint"]) == (12, 12, 12)
    assert fields["item"] == "rows"
    assert fields["loss"] == run[0].metrics["loss"]
    assert fields["rate"] > 0
    assert fields["mfu"] is None
    assert 0 < fields["goodput"] < 1
    assert fields["result"] == (
        f"eval number {run[0].metrics['eval_number']:.4g}, "
        f"eval squared {run[0].metrics['eval_squared']:.4g}"
    )


def test_tensorboard_reads_every_scalar_and_discards_steps_before_a_resume(
    run: tuple[Result, Path],
) -> None:
    (file,) = (run[1] / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    events = [decode_fields(record) for record in records(file.read_bytes())]
    assert events[0][3] == [b"brain.Event:2"]
    assert decode_fields(events[1][7][0]) == {1: [1]}  # a session starts
    assert events[1][2] == [2]  # and events of this step and later ones are void
    scalars = {}
    for event in events[2:]:
        for value in decode_fields(event[5][0])[1]:
            tag, number = decode_fields(value)[1][0], decode_fields(value)[2][0]
            scalars[tag.decode(), event[2][0]] = struct.unpack("<f", number)[0]
    for line in read_lines(run[1]):
        for name in line.keys() - {"attempt", "step", "time"}:
            assert scalars.pop((name, line["step"])) == pytest.approx(line[name], rel=1e-6)
    assert scalars == {}


def records(content: bytes) -> Iterator[bytes]:
    """Yield the records of TensorFlow's format after checking both checksums."""
    offset = 0
    while offset < len(content):
        (length,) = struct.unpack("<Q", content[offset : offset + 8])
        assert content[offset + 8 : offset + 12] == masked_checksum(content[offset : offset + 8])
        data = content[offset + 12 : offset + 12 + length]
        assert content[offset + 12 + length : offset + 16 + length] == masked_checksum(data)
        yield data
        offset += 16 + length


def masked_checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def decode_fields(message: bytes) -> dict[int, list[Any]]:
    """Return the fields of a protobuf message by number."""
    offset, fields = 0, {}  # type: tuple[int, dict[int, list[Any]]]

    def varint() -> int:
        nonlocal offset
        value = 0
        for shift in itertools.count(0, 7):
            byte = message[offset]
            offset += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        return value

    while offset < len(message):
        field, wire = divmod(varint(), 8)
        if wire == 0:
            value: Any = varint()
        else:
            size = {1: 8, 5: 4}.get(wire) or varint()
            value = message[offset : offset + size]
            offset += size
        fields.setdefault(field, []).append(value)
    return fields


def test_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for complete_lines in (
        b"",
        b'{"step": 1}\n',
        b'{"step": 1}\n{"step": 2}\n' + b"#" * 200_000 + b"\n",
    ):
        path.write_bytes(complete_lines + b'{"step": 3, "lo' + b"x" * 100_000)
        file = open_append(str(path), lines=True)
        file.add(b'{"step": 3}\n')
        file.close()
        assert path.read_bytes() == complete_lines + b'{"step": 3}\n'


def test_goodput_counts_only_steps_that_led_to_a_checkpoint() -> None:
    first_attempt = start_attempt(None, attempt=None, now=1000.0)
    assert first_attempt == RunHistory(1000.0, 1)
    assert first_attempt.goodput(30.0, now=1040.0) == 0.75
    with_checkpoints = first_attempt.with_checkpoint(10, 20.0).with_checkpoint(20, 40.0)
    # After 55 seconds of steps the run was killed and absent for a while. The 15 since the
    # checkpoint are lost.
    second_attempt = start_attempt(
        json.loads(json.dumps(with_checkpoints.as_json())), attempt=None, now=1100.0
    )
    assert second_attempt.attempt == 2
    assert second_attempt.goodput(second_attempt.seconds[20] + 10.0, now=1120.0) == pytest.approx(
        50 / 120
    )
    # The run returns to step 10, because 20 was damaged. The seconds of step 20 are discarded.
    assert second_attempt.with_checkpoint(15, 30.0).seconds == {10: 20.0, 15: 30.0}
    assert start_attempt({"first_start": "?"}, attempt=7, now=5.0) == RunHistory(5.0, 7)


def test_the_clock_counts_only_steps() -> None:
    # compiled, step, step, (pause) step, requested
    times = iter([10.0, 12.0, 14.0, 50.0, 53.0])
    clock = StepClock(lambda: next(times))
    for _ in range(3):
        clock.end_step()
    assert (clock.seconds, clock.steps_per_second()) == (4.0, 0.5)
    clock.end_pause()
    clock.end_step()
    assert clock.seconds == 7.0
    assert clock.steps_per_second() == pytest.approx(1 / 3)
    assert clock.steps_per_second() == pytest.approx(1 / 3)


def test_the_peak_of_a_chip_is_known_and_that_of_a_cpu_is_not() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 9.9e14
    assert peak_flops("TPU v5 lite") == 1.97e14
    assert peak_flops("TPU v3") == 1.23e14 / 2  # JAX counts its cores
    assert peak_flops("cpu") is None
    assert mfu(1e12, jax.devices()) is None


def norm_of(params: Any) -> float:
    return float(np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(params))))


@pytest.mark.parametrize("mesh", [1, 8])
def test_steps_report_norms_the_learning_rate_and_the_wait_for_input(
    mesh: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    recipe = replace(
        toy(3, mesh=mesh),
        optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=schedule),
        data=data.Data(Slow(0.02), batch=16, seed=7),
    )
    norm = norm_of(fit(replace(recipe, steps=2)).state.params)
    capsys.readouterr()
    metrics = fit(recipe, checkpoint=tmp_path).metrics
    # The norm of the parameters is from before the step.
    assert metrics["param_norm"] == pytest.approx(norm, rel=1e-6)
    assert metrics["learning_rate"] == pytest.approx(0.08, rel=1e-6)
    assert metrics["update_norm"] == pytest.approx(0.08 * metrics["grad_norm"], rel=1e-6)
    assert all(line["input_seconds"] > 0 for line in read_lines(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    params = recipe.model.init(jax.random.split(jax.random.key(0))[0])
    norm, deviation = norm_of(params), params["body"].std()
    assert lines[0] == (
        f"initial weights: norm {norm:.4g}, standard deviation of an array from 0 (head) to "
        f"{deviation:.3g} (body)"
    )
    fit(replace(recipe, steps=4), checkpoint=tmp_path)
    assert "initial weights" not in capsys.readouterr().out
    # Without a learning rate in the optimizer's state there is no such metric.
    assert "learning_rate" not in fit(toy(1, mesh=mesh)).metrics
