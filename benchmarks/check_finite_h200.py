"""Measure the cost of `check_finite` in a training step of ViT-B/16 on one GPU.

    python benchmarks/check_finite_h200.py
    python benchmarks/check_finite_h200.py --tiny    # a small model on any device, a smoke test

One process runs one compiled step (loss, gradients, AdamW; bfloat16 over float32 weights, batch
256). Rounds of steps with and without a check of the updated parameters and the gradients
alternate, and the benchmark prints medians. A round includes the wait for its last check.
"Reduction alone" is the device time of consecutive reductions. "Call on the host" is the time until
the host can dispatch the next step.
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
from drumline.train.steps.step import loss_with_metrics
from train_h200 import STEPS, WARM_UP, model_and_arrays

ROUNDS = 9


def tiny() -> tuple[Any, dict[str, Any]]:
    """Return a small model and a batch for a CPU."""
    random = np.random.default_rng(0)
    return ViT(width=32, depth=2, heads=2, image=32, patch=8, classes=10), {
        "image": random.integers(0, 256, (8, 32, 32, 3), np.uint8),
        "label": random.integers(0, 10, 8, np.int32),
    }


class Training:
    """A model in training on one batch, with access to its gradients."""

    def __init__(self, model: Any, arrays: dict[str, Any]) -> None:
        """Initialize the state and compile the step. Must be called under the mesh."""
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
        options = dict(model.compiler_options["gpu"])
        compiled = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
        self.step = compiled.lower(self.params, self.opt_state, self.batch).compile()

    @property
    def checked_arrays(self) -> dict[str, Any]:
        """The arrays that are checked."""
        return {"params": self.params, "grads": self.grads}

    def run(self, count: int, checked: bool) -> float:
        """Run some steps and return the loss of the last one."""
        for _ in range(count):
            self.params, self.opt_state, self.grads, loss = self.step(
                self.params, self.opt_state, self.batch
            )
            self.steps += 1
            if checked:
                check_finite(self.checked_arrays, "step", step=self.steps)
        if checked:
            check_finite({}, wait=True)
        return float(loss)


def duration_of(run: Callable[[], Any], count: int) -> float:
    """Return the duration of one of `times` runs."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / count


def measure_check_alone(training: Training, count: int) -> tuple[float, float]:
    """Return the seconds of a reduction on the device, and of a call on the host."""

    def run_reductions() -> None:
        for _ in range(count):
            result = first_not_finite(training.checked_arrays)
        result.encoded.block_until_ready()

    run_reductions()
    reduction_median = statistics.median(duration_of(run_reductions, count) for _ in range(ROUNDS))
    call_seconds = []
    for _ in range(ROUNDS * count):
        call_seconds.append(duration_of(lambda: check_finite(training.checked_arrays), 1))
        jax.block_until_ready(first_not_finite(training.checked_arrays))
    return reduction_median, statistics.median(call_seconds)


def main() -> None:
    """Print the step times without and with the check, and the duration of the check alone."""
    parser = argparse.ArgumentParser(description="Measure the cost of check_finite.")
    parser.add_argument("--tiny", action="store_true", help="a small model on any device")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each variant")
    arguments = parser.parse_args()
    model, arrays = tiny() if arguments.tiny else model_and_arrays("vit")
    with jax.set_mesh(make_mesh({"data": 1})):
        training = Training(model, arrays)
        for checked in (False, True):
            training.run(WARM_UP, checked)
        samples: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(arguments.rounds):
            for checked, durations in samples.items():
                run = lambda checked=checked: training.run(STEPS, checked)  # noqa: E731
                durations.append(duration_of(run, STEPS))
        loss = training.run(1, checked=True)
        reduction_median, call_median = measure_check_alone(training, STEPS)
    assert jnp.isfinite(loss)
    without_check, with_check = (statistics.median(samples[checked]) for checked in (False, True))
    leaves = jax.tree.leaves(training.checked_arrays)
    print(f"device            {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"checked           {len(leaves)} leaves, {sum(x.size for x in leaves):,} numbers")
    print(f"step without      {without_check * 1e3:.3f} ms")
    print(f"step with         {with_check * 1e3:.3f} ms")
    print(f"difference        {with_check / without_check - 1:+.2%}")
    print(f"reduction alone   {reduction_median * 1e3:.3f} ms")
    print(f"call on the host  {call_median * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
