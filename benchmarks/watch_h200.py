"""Measure the cost of the hardware checks in a training step of ViT-B/16 on one GPU.

    python benchmarks/watch_h200.py
    python benchmarks/watch_h200.py --tiny    # a small model on any device, as a smoke test

One process runs one compiled step with batch 256 through the pipeline of `drumline.train`, which
reads metrics two steps late. Rounds of 200 steps with and without the checks alternate, and the
benchmark prints medians. With the checks, each step's loss and norm are compared with limits and
update them. Every hundredth step is followed by a check for which the host waits until the devices
are idle: checksums of all replicated arrays (none on one device) and the pulse. The benchmark then
times the parts separately: a pulse, and the checksums of the whole state as a run on several
devices computes them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import optax  # type: ignore[import-untyped]

from check_finite_h200 import tiny
from drumline.train.checkpoints.saving import RunCheckpoints
from drumline.train.checksums import device_checksums
from drumline.train.data import arrays as in_memory
from drumline.train.goodput import Goodput, StepClock, open_history
from drumline.train.hardware import HardwareChecks
from drumline.train.loop import LAG
from drumline.train.mesh import make_mesh
from drumline.train.plan import make_plan
from drumline.train.probe import probe_devices
from drumline.train.recipe import Recipe
from drumline.train.steps.pipeline import Pipeline
from train_h200 import model_and_arrays

STEPS, ROUNDS = 200, 4


def duration_of(run: Callable[[], object]) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Print the step times without and with the checks, their ratio, and the parts."""
    parser = argparse.ArgumentParser(description="Measure the cost of the hardware checks.")
    parser.add_argument("--tiny", action="store_true", help="a small model on any device")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each variant")
    arguments = parser.parse_args()
    model, arrays = tiny() if arguments.tiny else model_and_arrays("vit")
    batches = in_memory(arrays, batch=len(arrays["label"]), shuffle=False)
    optimizer = optax.adamw(1e-4, weight_decay=0.05)
    recipe = Recipe(model, optimizer, batches, {"data": 1}, steps=10**9)
    check_interval = recipe.settings.check_every or STEPS
    mesh = make_mesh(recipe.mesh)
    with jax.set_mesh(mesh):
        plan = make_plan(recipe, mesh)
        pipeline = Pipeline(plan)
        checkpoints = RunCheckpoints(plan, None, Goodput(open_history(None), StepClock()))
        hardware = HardwareChecks(plan, pipeline, checkpoints, print)
        pipeline.restart(checkpoints.restore())

        def steps(count: int, checked: bool) -> None:
            for index in range(1, count + 1):
                pipeline.dispatch_step()
                is_check_due = checked and index % check_interval == 0
                for _, outcome in pipeline.read(0 if is_check_due or index == count else LAG):
                    assert not outcome.spiked
                    if checked:
                        hardware.accept_step(outcome)
                if is_check_due:
                    hardware.check()

        for checked in (False, True):
            steps(check_interval, checked)
        samples: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(arguments.rounds):
            for checked, durations in samples.items():
                durations.append(duration_of(partial(steps, STEPS, checked)) / STEPS)
        pulse_seconds, checksum_seconds = [], []
        for _ in range(9):
            pulse_seconds.append(duration_of(lambda: probe_devices(mesh, pipeline.step)))
            checksum_seconds.append(duration_of(lambda: device_checksums(mesh, pipeline.state)))
        pipeline.close()
    without_checks, with_checks = (statistics.median(samples[checked]) for checked in (False, True))
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(pipeline.state))
    print(f"device               {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"step without         {without_checks * 1e3:.3f} ms")
    print(f"step with            {with_checks * 1e3:.3f} ms")
    print(f"ratio                {with_checks / without_checks:.4f}")
    print(
        f"pulse                {statistics.median(pulse_seconds) * 1e3:.3f} ms, each "
        f"{check_interval} steps"
    )
    print(
        f"checksums of a state {statistics.median(checksum_seconds) * 1e3:.3f} ms, "
        f"{state_bytes / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
