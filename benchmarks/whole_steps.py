"""Estimate whole training steps of the decoders under the TPU's compiler, on rings and without.

    python benchmarks/whole_steps.py [--on v5litepod-8 …] [--model 1b3 …] [--layout tensor …]

Needs libtpu (`pip install 'drumline[tpu]'` on x86_64 Linux, or `DRUMLINE_TPU_PYTHON`). A step is
the loss and the gradients of two layers in a scan, 16 sequences of 2,048 tokens, on a mesh of data
2 and model 4 (`fsdp`: data 8). Each row is one implementation:

    jit     the model without rings or `shard_map`; XLA adds the communication
    xla     blocking collectives inside `shard_map` (`LM(implementation="xla")`)
    ring    rings for all projections (`implementation="ring"`)
    auto    the choice of Drumline (`implementation="auto"`)

The columns are the estimate of the step, its ratio to `jit`, the time for which the device waits
for the network, the time of compiling and its ratio to `jit`. Compile times of a busy machine mean
little. Nothing here was measured on a TPU.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.inspect.compiling.programs import compile_for
from drumline.inspect.cost.machines import Machine, parse_machine
from drumline.inspect.estimate import Estimate, estimate_program
from drumline.models import lm
from drumline.models.sharding import ModelSharding, specs_of
from drumline.parallel.block import attention, layers
from drumline.parallel.target import overlap_options, trace_for

MODELS = {"350m": lm.llama_350m, "1b3": lm.llama_1b3}
LAYOUTS = ("tensor", "fsdp+tensor", "fsdp")
IMPLEMENTATIONS = ("jit", "xla", "ring", "auto")
LAYERS, SEQUENCES, TOKENS = 2, 16, 2048


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--on", nargs="+", default=["v5litepod-8", "v5p-16", "v6e-8"])
    options.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    options.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    arguments = options.parse_args()
    print(f"{'':36}{'step':>10}{'× jit':>8}{'waits':>10}{'compile':>10}{'× jit':>8}")
    for on in arguments.on:
        for model in arguments.model:
            for layout in arguments.layout:
                _print_rows(parse_machine(on), model, layout, arguments.only)


def _print_rows(machine: Machine, model: str, layout: str, implementations: list[str]) -> None:
    baseline: tuple[float, float] | None = None
    for implementation in implementations:
        started = time.perf_counter()
        estimate = estimate_step(machine, model, layout, implementation)
        seconds = time.perf_counter() - started
        baseline = baseline or (estimate.seconds, seconds)
        name = f"{machine.name} {model} {layout} {implementation}"
        print(
            f"{name:36}{estimate.seconds * 1e3:7.2f} ms{estimate.seconds / baseline[0]:8.2f}"
            f"{estimate.exposed * 1e3:7.2f} ms{seconds:8.0f} s{seconds / baseline[1]:8.1f}",
            flush=True,
        )


def estimate_step(machine: Machine, name: str, layout: str, implementation: str) -> Estimate:
    """Compile the loss and gradients of a model, and estimate their time."""
    mesh = AbstractMesh((8, 1) if layout == "fsdp" else (2, 4), ("data", "model"))
    chosen: Any = "auto" if implementation == "jit" else implementation
    model = MODELS[name](depth=LAYERS, scan_layers=True, layout=layout, implementation=chosen)
    loss = _loss_of_jit if implementation == "jit" else _loss

    def step(params: Any, batch: Any) -> Any:
        # A training run sets the mesh for the whole step. Here only the model needs it.
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.value_and_grad(partial(loss, model, mesh))(params, batch)

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    sharding = ModelSharding.on_mesh(mesh, "LM", model._layout())
    specs = specs_of(sharding.layout, model._logical_axes())
    params = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        shapes,
        specs,
    )
    tokens = jax.ShapeDtypeStruct(
        (SEQUENCES, TOKENS + 1), jnp.int32, sharding=NamedSharding(mesh, P("data"))
    )
    arguments = (params, {"tokens": tokens})
    with trace_for("tpu", f"TPU {machine.slice.generation}" if machine.slice else None):
        permutes = "ppermute" in str(jax.make_jaxpr(step)(*arguments))
        options = overlap_options() if permutes else {}
    compiled = compile_for(machine, step, arguments, mesh=mesh, compiler="tpu", options=options)
    return estimate_program(compiled, machine, "rings")


def _loss(model: lm.LM, mesh: AbstractMesh, params: Any, batch: Any) -> jax.Array:
    del mesh
    return model.loss(params, batch, jax.random.key(0))[0]


def _loss_of_jit(model: lm.LM, mesh: AbstractMesh, params: Any, batch: Any) -> jax.Array:
    """Return the loss of the whole arrays, with constraints after each layer."""
    with _global_view(mesh, sequence=None if model.layout == "fsdp" else "model"):
        return model._local_loss(ModelSharding("LM", {}, {}), params, batch)[0]


@contextmanager
def _global_view(mesh: AbstractMesh, sequence: str | None) -> Iterator[None]:
    def constrained(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def run(*args: Any, **options: Any) -> jax.Array:
            sharding = NamedSharding(mesh, P("data", sequence, None))
            out: jax.Array = lax.with_sharding_constraint(layer(*args, **options), sharding)
            return out

        return run

    def attend(*arrays: jax.Array, **options: Any) -> jax.Array:
        # XLA cannot shard a TPU kernel.
        heads = P("data", None, sequence, None)
        local = partial(attention.attend, **options)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads)
        out: jax.Array = mapped(*arrays)
        return out

    with (
        patch.object(lm, "attend", attend),
        patch.object(lm, "attention_layer", constrained(layers.attention_layer)),
        patch.object(lm, "feedforward_layer", constrained(layers.feedforward_layer)),
    ):
        yield


if __name__ == "__main__":
    main()
