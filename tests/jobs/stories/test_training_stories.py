"""Programs that report their steps, on the emulator: preempted, stuck and resumed."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.installation import Installation, temporary_installation

# Saves every second step and reports all metrics. The faults of a test run before each step.
TRAINING = """
import os, signal, sys, time
from pathlib import Path
import drumline

attempt = int(os.environ["DRUMLINE_ATTEMPT"])
saved = Path(os.environ["DRUMLINE_CHECKPOINT"]) / "step"
saved.parent.mkdir(parents=True, exist_ok=True)
step = int(saved.read_text()) if saved.exists() else 0
kept = step or None

def save():
    global kept
    saved.with_suffix(".new").write_text(str(step))
    saved.with_suffix(".new").rename(saved)
    kept = step

def leave(*_):
    save()
    drumline.heartbeat(step=step, checkpoint=kept)
    sys.exit(75)

signal.signal(signal.SIGTERM, leave)
total = int(os.environ["STEPS"])
while step < total:
    {trouble}
    time.sleep(0.1)
    step += 1
    if step % 2 == 0:
        save()
    drumline.heartbeat(step=step, total=total, loss=1 / step, rate=9800.0, item="images",
                       mfu=None, goodput=0.9, checkpoint=kept)
drumline.heartbeat(step=step, total=total, loss=1 / step, result="test accuracy 97.1 %")
"""


@pytest.fixture(scope="module")
def installation(shared: Installation) -> Installation:
    return shared


def train(installation: Installation, steps: int, trouble: str = "pass", **keys: Any) -> str:
    file = installation.write_job("python train.py", **{
        "accelerator": "v4-8", "checkpoint": "gs://runs/here", "environment": {"STEPS": str(steps)},
    } | keys)  # fmt: skip
    (file.parent / "train.py").write_text(TRAINING.replace("{trouble}", trouble))
    return str(installation.client.create(file)["id"])


def step_of(installation: Installation, job: str) -> float:
    return float((installation.client.show(job)["progress"] or {}).get("step", 0))


@pytest.mark.every_case
def test_one_that_hangs_is_started_again_and_finishes(installation: Installation) -> None:
    hang = "(attempt == 1 and step == 3) and time.sleep(600)"
    beating = train(installation, 6, hang, stuck_after="3s")
    shell = """
        for step in 1 2 3; do echo "completed step: $step, loss: 0.$step"; sleep 0.2; done
        test $DRUMLINE_ATTEMPT = 2 || sleep 600
        """
    pattern = r"completed step: (?P<step>\d+), loss: (?P<loss>\S+)"
    logging = installation.create(shell, accelerator="v4-8", stuck_after="3s", progress=pattern)
    for job, step in ((beating, 3), (logging, 3)):
        shown = installation.end(job)
        assert shown["status"] == "SUCCEEDED"
        assert [one["outcome"] for one in shown["attempts"]] == ["stuck", "succeeded"]
        assert shown["attempts"][0]["course"]["step"] == step
        assert (shown["failures"], shown["preemptions"]) == (1, 0)
        (text,) = [one["text"] for one in shown["events"] if one["kind"] == "stuck"]
        assert f"the last was step {step}; restarting" in text
    assert installation.client.show(logging)["progress"] == {"step": 3, "loss": 0.3}
    installation.cloud_is_empty()


def test_a_preemption_is_shown_with_its_step_and_the_curve_continues(
    installation: Installation,
) -> None:
    job = train(installation, 24)
    installation.until(lambda: step_of(installation, job) >= 9)
    installation.emulator("preempt", target=job)
    shown = installation.end(job)
    assert shown["status"] == "SUCCEEDED"
    first, second = (one["course"] for one in shown["attempts"])
    prefix = f"slice preempted at step {first['step']:.0f}"
    assert any(one["text"].startswith(prefix) for one in shown["events"])
    assert shown["steps_again"] == max(0, first["step"] - second["resumed"]) <= 2
    progress = shown["progress"]
    assert (progress["step"], progress["result"]) == (24, "test accuracy 97.1 %")
    assert (progress["goodput"], progress["checkpoint"]) == (0.9, 24)
    history = installation.client.history(job)
    assert {point["attempt"] for point in history["points"]} == {1, 2}
    for point in history["points"]:
        assert json.dumps(point["metrics"]["loss"]) == json.dumps(1 / point["step"])
    assert history["points"][-1]["step"] == 24


@pytest.mark.every_case
def test_one_that_saves_on_notice_and_leaves_is_preempted_not_failed(tmp_path: Path) -> None:
    with temporary_installation(tmp_path) as installation:
        # As on Google Cloud, a host shuts down after its program, and before the end of its notice.
        installation.configure(patience={"shutdown": 30.0})
        job = train(installation, 24, retry={"failures": 0})
        installation.until(lambda: step_of(installation, job) >= 5)
        installation.emulator("preempt", target=job, notice=4.0)
        shown = installation.end(job)
    assert shown["status"] == "SUCCEEDED"
    assert [one["outcome"] for one in shown["attempts"]] == ["preempted", "succeeded"]
    assert (shown["preemptions"], shown["failures"], shown["steps_again"]) == (1, 0, 0)
    saved = shown["attempts"][0]["course"]
    assert saved["checkpoint"] == saved["step"], "its last word was heard"


@pytest.mark.every_case
def test_one_that_leaves_of_itself_goes_on_where_it_was(installation: Installation) -> None:
    job = train(installation, 7, "step == 3 * attempt and leave()", retry={"failures": 0})
    shown = installation.end(job)
    assert shown["status"] == "SUCCEEDED"
    assert [one["outcome"] for one in shown["attempts"]] == ["left", "left", "succeeded"]
    assert (shown["failures"], shown["preemptions"], shown["steps_again"]) == (0, 0, 0)
    pauses = [after["started"] - before["ended"] for before, after in pairwise(shown["attempts"])]
    assert all(pause >= rest for pause, rest in zip(pauses, (0.5, 1.0), strict=True)), pauses
