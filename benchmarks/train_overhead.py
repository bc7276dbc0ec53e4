"""Measure the overhead of the training loop, and of checkpoints written in the background.

    python benchmarks/train_overhead.py                  # about two minutes
    python benchmarks/train_overhead.py --million 200    # with a state of 800 MB

A step takes 50 ms during which the CPU is free, as it is while an accelerator works: it is a
callback that sleeps inside a compiled program. Three loops over the same compiled step alternate in
one process. The bare loop only dispatches steps. `fit` runs with all its features (metrics, log,
TensorBoard, heartbeat, prefetched data). The third loop is `fit` with a checkpoint every 100 steps.
The benchmark prints ratios of the time between consecutive steps.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from drumline.train import Functions, Recipe, Settings, data, fit
from drumline.train.batches import BatchLoader, Prefetcher
from drumline.train.mesh import make_mesh
from drumline.train.multihost import StopFlag
from drumline.train.state import abstract_state, initial_state, replicate, shardings
from drumline.train.steps.step import NO_LIMITS, make_step

STEP_SECONDS = 0.05
SAVE_EVERY = 100

step_starts: list[tuple[float, float]] = []
THREAD = time.pthread_getcpuclockid(threading.get_ident())
"""The CPU clock of the thread that runs the loop, readable from other threads."""


def record_and_sleep(x: np.ndarray) -> np.ndarray:
    """Record the start of a step and sleep, which stands for its work."""
    step_starts.append((time.monotonic(), time.clock_gettime(THREAD)))
    time.sleep(STEP_SECONDS)
    return np.zeros_like(x)


def with_unused_state(optimizer: Any, million: int) -> Any:
    """Return the optimizer with an unused state of additional `million` million numbers."""

    def init(params: Any) -> Any:
        return optimizer.init(params), [jnp.ones((1000, 1000)) * i for i in range(million)]

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, moments = optimizer.update(grads, state[0], params)
        return updates, (moments, state[1])

    return optax.GradientTransformation(init, update)


def recipe(million: int, steps: int, save_every: int) -> Recipe:
    """Return a small model with a step that sleeps, and a state of `million` million numbers."""

    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (256,))}

    def loss(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        del key
        first = jax.lax.stop_gradient(params["w"][0])
        sleep_result = jax.pure_callback(
            record_and_sleep, jax.ShapeDtypeStruct((), np.float32), first
        )
        error = batch["x"] @ params["w"] - 1
        return jnp.mean(error**2) + sleep_result, {"error": jnp.abs(error).mean()}

    rows = np.random.default_rng(0).normal(size=(4096, 256)).astype(np.float32)
    return Recipe(
        model=Functions(init, loss),
        optimizer=with_unused_state(optax.adam(1e-3), million),
        data=data.arrays({"x": rows}, batch=256),
        mesh={"data": 1},
        steps=steps,
        settings=Settings(save_every=save_every, log_every=10),
    )


def run_bare_loop(million: int, steps: int) -> None:
    """Run the same step without a training loop."""
    bare_recipe = recipe(million, steps, steps)
    mesh = make_mesh(bare_recipe.mesh)
    with jax.set_mesh(mesh):
        abstract = abstract_state(bare_recipe, mesh)
        step = make_step(bare_recipe, mesh, abstract)
        state = jax.jit(lambda: initial_state(bare_recipe), out_shardings=shardings(abstract))()
        batches = Prefetcher(BatchLoader(bare_recipe.data, mesh, bare_recipe.model.batch_spec()))
        batch, stop_flag = batches.next_batch(0), StopFlag(mesh).array
        mode, limits = replicate(mesh, np.zeros((), np.int32)), replicate(mesh, NO_LIMITS)
        for _ in range(steps):
            state, mode, scalars = step(state, mode, batch, stop_flag, limits)
        jax.block_until_ready(scalars)
        batches.close()


def time_per_step(run: Callable[[], object]) -> tuple[float, float]:
    """Return the wall and CPU seconds per step, without the first five steps."""
    step_starts.clear()
    with redirect_stdout(StringIO()):
        run()
    (end_wall, end_cpu), (start_wall, start_cpu) = step_starts[-1], step_starts[5]
    steps = len(step_starts) - 6
    return (end_wall - start_wall) / steps, (end_cpu - start_cpu) / steps


def main() -> None:
    """Measure the loops and print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--million", type=int, default=12, help="millions of numbers in the state")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    steps, megabytes = 2 * SAVE_EVERY + 10, 4 * options.million
    ratios: dict[str, list[float]] = {"loop": [], "checkpoint": [], "the loop's own thread": []}
    for round_index in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["DRUMLINE_HEARTBEAT"] = str(Path(folder) / "heartbeat.json")
            bare_seconds, bare_cpu = time_per_step(partial(run_bare_loop, options.million, steps))
            without_checkpoints, with_checkpoints = (
                recipe(options.million, steps, interval) for interval in (steps, SAVE_EVERY)
            )
            fit_seconds, fit_cpu = time_per_step(
                partial(fit, without_checkpoints, checkpoint=f"{folder}/never")
            )
            checkpoint_seconds, _ = time_per_step(
                partial(fit, with_checkpoints, checkpoint=f"{folder}/often")
            )
        ratios["loop"].append(fit_seconds / bare_seconds - 1)
        ratios["checkpoint"].append(checkpoint_seconds / fit_seconds - 1)
        ratios["the loop's own thread"].append((fit_cpu - bare_cpu) / STEP_SECONDS)
        print(
            f"round {round_index + 1}: bare {bare_seconds * 1e3:.2f} ms a step, fit "
            f"{fit_seconds * 1e3:.2f}, "
            f"with a checkpoint of {megabytes} MB every {SAVE_EVERY} steps "
            f"{checkpoint_seconds * 1e3:.2f}; "
            f"of the processor, bare {bare_cpu * 1e3:.2f} ms a step, fit {fit_cpu * 1e3:.2f}"
        )
    for name, ratio_list in ratios.items():
        round_ratios = ", ".join(f"{100 * ratio:+.2f} %" for ratio in ratio_list)
        print(f"{name}: {100 * statistics.median(ratio_list):+.2f} % (median of {round_ratios})")


if __name__ == "__main__":
    main()
