"""What the training loop costs around its steps, and what a checkpoint in the background costs.

    python benchmarks/train_overhead.py                  # about two minutes
    python benchmarks/train_overhead.py --million 200    # with a state of 800 MB

A step here is 50 ms during which the processor is free, as it is while an accelerator works: a
callback that sleeps in the middle of a compiled program. Three loops over the same compiled step
take turns in one process: the bare one, which hands over step after step and looks at nothing;
`fit` with everything on (metrics, log, TensorBoard, heartbeat, data read ahead); and `fit` that
also writes a checkpoint every 100 steps. Printed are ratios of the time from one step to the next.
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

STEP = 0.05
SAVE_EVERY = 100

starts: list[tuple[float, float]] = []
THREAD = time.pthread_getcpuclockid(threading.get_ident())
"""The processor time of the thread that runs the loop, readable from others."""


def sleep(x: np.ndarray) -> np.ndarray:
    """The work of a step, and the record of when it began."""
    starts.append((time.monotonic(), time.clock_gettime(THREAD)))
    time.sleep(STEP)
    return np.zeros_like(x)


def with_ballast(optimizer: Any, million: int) -> Any:
    """The optimizer with this many million numbers more to carry, which no step touches."""

    def init(params: Any) -> Any:
        return optimizer.init(params), [jnp.ones((1000, 1000)) * i for i in range(million)]

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, moments = optimizer.update(grads, state[0], params)
        return updates, (moments, state[1])

    return optax.GradientTransformation(init, update)


def recipe(million: int, steps: int, save_every: int) -> Recipe:
    """A small model whose step is a nap, and a state of this many million numbers."""

    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (256,))}

    def loss(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        del key
        first = jax.lax.stop_gradient(params["w"][0])
        nap = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), np.float32), first)
        error = batch["x"] @ params["w"] - 1
        return jnp.mean(error**2) + nap, {"error": jnp.abs(error).mean()}

    rows = np.random.default_rng(0).normal(size=(4096, 256)).astype(np.float32)
    return Recipe(
        model=Functions(init, loss),
        optimizer=with_ballast(optax.adam(1e-3), million),
        data=data.arrays({"x": rows}, batch=256),
        mesh={"data": 1},
        steps=steps,
        settings=Settings(save_every=save_every, log_every=10),
    )


def bare(million: int, steps: int) -> None:
    """The same step, handed over again and again."""
    made = recipe(million, steps, steps)
    mesh = make_mesh(made.mesh)
    with jax.set_mesh(mesh):
        abstract = abstract_state(made, mesh)
        step = make_step(made, mesh, abstract)
        state = jax.jit(lambda: initial_state(made), out_shardings=shardings(abstract))()
        batches = Prefetcher(BatchLoader(made.data, mesh, made.model.batch_spec()))
        batch, stop_flag = batches.next_batch(0), StopFlag(mesh).array
        mode, limits = replicate(mesh, np.zeros((), np.int32)), replicate(mesh, NO_LIMITS)
        for _ in range(steps):
            state, mode, scalars = step(state, mode, batch, stop_flag, limits)
        jax.block_until_ready(scalars)
        batches.close()


def paced(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds from one step to the next, and of the processor, without the first five steps."""
    starts.clear()
    with redirect_stdout(StringIO()):
        run()
    (wall, processor), (from_wall, from_processor) = starts[-1], starts[5]
    steps = len(starts) - 6
    return (wall - from_wall) / steps, (processor - from_processor) / steps


def main() -> None:
    """Measure and print."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--million", type=int, default=12, help="numbers in the state")
    words.add_argument("--rounds", type=int, default=3)
    asked = words.parse_args()
    steps, megabytes = 2 * SAVE_EVERY + 10, 4 * asked.million
    ratios: dict[str, list[float]] = {"loop": [], "checkpoint": [], "the loop's own thread": []}
    for turn in range(asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["DRUMLINE_HEARTBEAT"] = str(Path(folder) / "heartbeat.json")
            alone, handing = paced(partial(bare, asked.million, steps))
            never, often = (recipe(asked.million, steps, each) for each in (steps, SAVE_EVERY))
            looped, busy = paced(partial(fit, never, checkpoint=f"{folder}/never"))
            saved, _ = paced(partial(fit, often, checkpoint=f"{folder}/often"))
        ratios["loop"].append(looped / alone - 1)
        ratios["checkpoint"].append(saved / looped - 1)
        ratios["the loop's own thread"].append((busy - handing) / STEP)
        print(
            f"round {turn + 1}: bare {alone * 1e3:.2f} ms a step, fit {looped * 1e3:.2f}, "
            f"with a checkpoint of {megabytes} MB every {SAVE_EVERY} steps {saved * 1e3:.2f}; "
            f"of the processor, bare {handing * 1e3:.2f} ms a step, fit {busy * 1e3:.2f}"
        )
    for name, found in ratios.items():
        told = ", ".join(f"{100 * ratio:+.2f} %" for ratio in found)
        print(f"{name}: {100 * statistics.median(found):+.2f} % (median of {told})")


if __name__ == "__main__":
    main()
