"""What `check_finite` costs a training step: ViT-B/16 on one GPU, with it and without.

    python benchmarks/check_finite_h200.py
    python benchmarks/check_finite_h200.py --tiny    # a toy on any device: that it runs, no figure

One process, one compiled step (loss, gradients, AdamW; bfloat16 over float32 weights, batch 256).
Rounds of steps with and without a check of the updated parameters and the gradients take turns, and
medians count. The last check of a round is waited for within it. The reduction alone is what the
device needs for it back to back; the call is what the host spends until it has the next step.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from drumline.models.vit import ViT
from drumline.numerics.finite import check_finite, first_not_finite
from drumline.train.mesh import make_mesh
from drumline.train.state import replicate
from drumline.train.steps.step import compiler_options, loss_with_metrics
from train_h200 import STEPS, WARM_UP, model_and_arrays

ROUNDS = 9


def tiny() -> tuple[Any, dict[str, Any]]:
    """A model and a batch for a processor."""
    random = np.random.default_rng(0)
    return ViT(width=32, depth=2, heads=2, image=32, patch=8, classes=10), {
        "image": random.integers(0, 256, (8, 32, 32, 3), np.uint8),
        "label": random.integers(0, 10, 8, np.int32),
    }


class Training:
    """A model in training on one batch, whose gradients can be seen."""

    def __init__(self, model: Any, arrays: dict[str, Any]) -> None:
        """Begin, and compile the step. Called under the mesh."""
        loss_function, optimizer = loss_with_metrics(model), optax.adamw(1e-4, weight_decay=0.05)

        def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any, jax.Array]:
            loss_and_grad = jax.value_and_grad(loss_function, has_aux=True)
            (loss, _), grads = loss_and_grad(params, batch, jax.random.key(0))
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, grads, loss

        mesh = make_mesh({"data": 1})
        self.batch = {key: replicate(mesh, array) for key, array in arrays.items()}
        self.params = jax.jit(model.init)(jax.random.key(0))
        self.opt_state = jax.jit(optimizer.init)(self.params)
        self.grads: Any = None
        self.steps = 0
        compiled = jax.jit(step, donate_argnums=(0, 1), compiler_options=compiler_options(mesh))
        self.step = compiled.lower(self.params, self.opt_state, self.batch).compile()

    @property
    def seen(self) -> dict[str, Any]:
        """What is checked."""
        return {"params": self.params, "grads": self.grads}

    def run(self, steps: int, checked: bool) -> float:
        """Take so many steps; the loss of the last one, once it is known."""
        for _ in range(steps):
            self.params, self.opt_state, self.grads, loss = self.step(
                self.params, self.opt_state, self.batch
            )
            self.steps += 1
            if checked:
                check_finite(self.seen, "step", step=self.steps)
        if checked:
            check_finite({}, wait=True)
        return float(loss)


def seconds_of(run: Callable[[], Any], times: int) -> float:
    """Of one of so many."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / times


def alone(training: Training, times: int) -> tuple[float, float]:
    """Seconds of a reduction on the device, and of a call on the host."""

    def back_to_back() -> None:
        for _ in range(times):
            last = first_not_finite(training.seen)
        last.found.block_until_ready()

    back_to_back()
    reduction = statistics.median(seconds_of(back_to_back, times) for _ in range(ROUNDS))
    calls = []
    for _ in range(ROUNDS * times):
        calls.append(seconds_of(lambda: check_finite(training.seen), 1))
        jax.block_until_ready(first_not_finite(training.seen))
    return reduction, statistics.median(calls)


def main() -> None:
    """Print step times without and with the check, and what it takes alone."""
    parser = argparse.ArgumentParser(description="What check_finite costs a training step.")
    parser.add_argument("--tiny", action="store_true", help="a toy on any device")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each kind")
    arguments = parser.parse_args()
    model, arrays = tiny() if arguments.tiny else model_and_arrays("vit")
    with jax.set_mesh(make_mesh({"data": 1})):
        training = Training(model, arrays)
        for checked in (False, True):
            training.run(WARM_UP, checked)
        taken: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(arguments.rounds):
            for checked, seconds in taken.items():
                run = lambda checked=checked: training.run(STEPS, checked)  # noqa: E731
                seconds.append(seconds_of(run, STEPS))
        loss = training.run(1, checked=True)
        reduction, call = alone(training, STEPS)
    assert jnp.isfinite(loss)
    without, with_check = (statistics.median(taken[checked]) for checked in (False, True))
    leaves = jax.tree.leaves(training.seen)
    print(f"device            {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"checked           {len(leaves)} leaves, {sum(x.size for x in leaves):,} numbers")
    print(f"step without      {without * 1e3:.3f} ms")
    print(f"step with         {with_check * 1e3:.3f} ms")
    print(f"difference        {with_check / without - 1:+.2%}")
    print(f"reduction alone   {reduction * 1e3:.3f} ms")
    print(f"call on the host  {call * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
