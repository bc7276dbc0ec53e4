"""Compare `drumline.inspect.estimate` with measurements on one H200.

    python benchmarks/inspect_h200.py [NAME …] [--texts FOLDER]

Run it on the GPU, because it uses the GPU's compiler. The programs are matmuls of several shapes,
attention, losses and training steps. `calibration` marks the programs that the constants were
fitted on. They do not count in the error. Each program is compiled, estimated and timed (the median
of five rounds after a warm-up). `--texts` keeps the compiled programs.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drumline.inspect import estimate

ROUNDS = 5
MIN_ROUND_SECONDS = 0.05
"""The duration of a round, long enough to make the clock and the first launch negligible."""

Workload = tuple[Callable[..., Any], tuple[Any, ...]]


def random_array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Return random numbers, because matmuls of zeros are faster."""
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def product(rows: int, inner: int, columns: int, dtype: Any = jnp.bfloat16) -> Workload:
    """Multiply two matrices."""
    return jnp.matmul, (
        random_array(rows, inner, dtype=dtype),
        random_array(inner, columns, dtype=dtype),
    )


def batched(batch: int, side: int) -> Workload:
    """Multiply many matrices of the same shape."""
    return jnp.matmul, (random_array(batch, side, side), random_array(batch, side, side))


def copy(megabytes: int) -> Workload:
    """Read and write this number of megabytes."""
    return jnp.negative, (random_array(megabytes * 2**19),)


def attention(kernel: str, backward: bool) -> Workload:
    """Run causal attention with 16 heads."""
    heads = [random_array(8, 2048, 16, 128) for _ in range(3)]
    run = partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel)
    if not backward:
        return run, tuple(heads)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(run(q, k, v).astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1, 2)), tuple(heads)


def gated() -> Workload:
    """Run a norm and a gate, which are bound by memory."""

    def run(x: jax.Array, gate: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)
        return (x32 * scale).astype(x.dtype) * jax.nn.silu(gate)

    return run, (random_array(32768, 4096), random_array(32768, 4096))


def vocabulary_loss() -> Workload:
    """Run an output layer with 32,000 tokens and its cross-entropy, with gradients."""

    def loss(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        logits = (x @ head).astype(jnp.float32)
        target_logits = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target_logits)

    targets = jnp.asarray(np.random.default_rng(0).integers(0, 32000, 16384), jnp.int32)
    operands = random_array(16384, 2048), random_array(2048, 32000)
    return jax.value_and_grad(loss, argnums=(0, 1)), (*operands, targets)


def layers() -> Workload:
    """Run eight rematerialized feed-forward layers in a scan, with gradients."""

    def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            activations = jax.nn.gelu(x @ weights[0])
            return x + activations @ weights[1], None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, (up, down))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    weights = random_array(8, 2048, 8192) * 0.02, random_array(8, 8192, 2048) * 0.02
    return jax.value_and_grad(loss, argnums=(1, 2)), (random_array(16384, 2048), *weights)


def training(name: str) -> Workload:
    """Run a training step of `drumline.train`, as in train_h200.py."""
    import optax  # type: ignore[import-untyped]

    from drumline.train.data import arrays as in_memory
    from drumline.train.mesh import make_mesh
    from drumline.train.recipe import Recipe
    from drumline.train.state import abstract_state, initial_state, replicate, shardings
    from drumline.train.steps.step import NO_LIMITS, compiler_options, make_step
    from train_h200 import WORKLOADS, model_and_arrays

    model, arrays = model_and_arrays(name)
    batches = in_memory(arrays, batch=WORKLOADS[name].batch, seed=0)
    recipe = Recipe(model, optax.adamw(1e-4, weight_decay=0.05), batches, {"data": 1}, steps=1)
    mesh = make_mesh(recipe.mesh)
    with jax.set_mesh(mesh):
        abstract = abstract_state(recipe, mesh)
        state = jax.jit(lambda: initial_state(recipe), out_shardings=shardings(abstract))()
        mode = replicate(mesh, np.zeros((), np.int32))
        stop_flag = replicate(mesh, np.zeros(1, np.float32))
        batch = {key: replicate(mesh, array) for key, array in arrays.items()}
        limits = replicate(mesh, NO_LIMITS)
        step = make_step(recipe, mesh, abstract, compiler_options(recipe, mesh))
        return step, (state, mode, batch, stop_flag, limits)


CALIBRATION: dict[str, Callable[[], Workload]] = {
    "matmul 8192³": partial(product, 8192, 8192, 8192),
    "matmul 2048³": partial(product, 2048, 2048, 2048),
    "copy 1 GiB": partial(copy, 1024),
    "attention, cuDNN, gradients": partial(attention, "cudnn", True),
}
WORKLOADS: dict[str, Callable[[], Workload]] = {
    "matmul 4096³": partial(product, 4096, 4096, 4096),
    "matmul 1024×8192×8192": partial(product, 1024, 8192, 8192),
    "matmul 32768×1024×4096": partial(product, 32768, 1024, 4096),
    "matmul 4096³ float32": partial(product, 4096, 4096, 4096, jnp.float32),
    "64 matmuls 1024³": partial(batched, 64, 1024),
    "attention, XLA": partial(attention, "xla", False),
    "norm and gate": gated,
    "vocabulary loss, gradients": vocabulary_loss,
    "8 layers in a scan, gradients": layers,
    "ViT-B/16 step": partial(training, "vit"),
    "decoder 350M step": partial(training, "350m"),
    "decoder 1.3B step": partial(training, "1b3"),
}


def measure(run: Callable[[], Any]) -> float:
    """Return the median seconds of a call."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    calls = max(1, int(MIN_ROUND_SECONDS / max(time.perf_counter() - start, 1e-6)))
    samples = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            out = run()
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start) / calls)
    return statistics.median(samples)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="programs to run (default: all)")
    parser.add_argument("--texts", type=Path, help="keep the compiled programs in this folder")
    options = parser.parse_args()
    errors = []
    print(f"{'program':32}{'predicted':>12}{'measured':>12}{'error':>8}  bound")
    for name, build in {**CALIBRATION, **WORKLOADS}.items():
        if options.names and name not in options.names:
            continue
        fn, args = build()
        compiled = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args).compile()
        result = estimate(compiled, on="H200")
        measured = measure(_repeatable(compiled, args))
        error = result.seconds / measured - 1
        errors += [] if name in CALIBRATION else [abs(error)]
        calibration = "  (calibration)" if name in CALIBRATION else ""
        print(
            f"{name:32}{result.seconds * 1e3:9.3f} ms{measured * 1e3:9.3f} ms{error:+8.0%}"
            f"  {result.bound}{calibration}",
            flush=True,
        )
        if options.texts is not None:
            options.texts.mkdir(parents=True, exist_ok=True)
            file = options.texts / (re.sub(r"[^A-Za-z0-9]+", "-", name) + ".txt")
            file.write_text(f"// measured {measured}\n{compiled.as_text()}")
    if errors:
        print(f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")


def _repeatable(compiled: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a function that can be called repeatedly. A training step reuses its state."""
    if len(args) != 4 or not isinstance(args[2], dict):
        return partial(compiled, *args)
    state, mode, batch, stop_flag = args

    def step() -> Any:
        nonlocal state, mode
        state, mode, scalars = compiled(state, mode, batch, stop_flag)
        return scalars

    return step


if __name__ == "__main__":
    main()
