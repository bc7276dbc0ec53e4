"""What watching costs a training step: ViT-B/16 on one GPU, at its defaults and with it off.

    python benchmarks/watch_h200.py
    python benchmarks/watch_h200.py --tiny    # a toy on any device: that it runs, no figure

One process and one compiled step, batch 256, through the pipeline of `drumline.train`: its data,
its reading two steps late. Rounds of 200 steps with and without watching take turns, and medians
count. With it, each step's loss and norm are held against limits and move them, and each hundredth
step is followed by a check (checksums of all that is held twice, which on one device is nothing,
and the pulse), for which the host waits until the devices are idle. Then the parts alone: a pulse,
and the checksums of the whole state, as a run on several devices computes them.
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


def seconds_of(run: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Print step times without and with watching, their ratio, and the parts."""
    parser = argparse.ArgumentParser(description="What watching costs a training step.")
    parser.add_argument("--tiny", action="store_true", help="a toy on any device")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each kind")
    arguments = parser.parse_args()
    model, arrays = tiny() if arguments.tiny else model_and_arrays("vit")
    data = in_memory(arrays, batch=len(arrays["label"]), shuffle=False)
    optimizer = optax.adamw(1e-4, weight_decay=0.05)
    recipe = Recipe(model, optimizer, data, {"data": 1}, steps=10**9)
    every = recipe.settings.check_every or STEPS
    mesh = make_mesh(recipe.mesh)
    with jax.set_mesh(mesh):
        plan = make_plan(recipe, mesh)
        pipeline = Pipeline(plan)
        checkpoints = RunCheckpoints(plan, None, Goodput(open_history(None), StepClock()))
        hardware = HardwareChecks(plan, pipeline, checkpoints, print)
        pipeline.restart(checkpoints.restore())

        def steps(count: int, watched: bool) -> None:
            for number in range(1, count + 1):
                pipeline.dispatch_step()
                due = watched and number % every == 0
                for _, outcome in pipeline.read(0 if due or number == count else LAG):
                    assert not outcome.spiked
                    if watched:
                        hardware.accept_step(outcome)
                if due:
                    hardware.check()

        for watched in (False, True):
            steps(every, watched)
        taken: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(arguments.rounds):
            for watched, seconds in taken.items():
                seconds.append(seconds_of(partial(steps, STEPS, watched)) / STEPS)
        pulses, sums = [], []
        for _ in range(9):
            pulses.append(seconds_of(lambda: probe_devices(mesh, pipeline.step)))
            sums.append(seconds_of(lambda: device_checksums(mesh, pipeline.state)))
        pipeline.close()
    without, with_watching = (statistics.median(taken[watched]) for watched in (False, True))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(pipeline.state))
    print(f"device               {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"step without         {without * 1e3:.3f} ms")
    print(f"step with            {with_watching * 1e3:.3f} ms")
    print(f"ratio                {with_watching / without:.4f}")
    print(f"pulse                {statistics.median(pulses) * 1e3:.3f} ms, each {every} steps")
    print(f"checksums of a state {statistics.median(sums) * 1e3:.3f} ms, {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
