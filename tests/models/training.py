"""Tiny models with generic weights, and ten steps of AdamW in a given layout."""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from drumline.models import LM, MLP, ViT
from tests.tracing import traced_for_cpu_alone

Model = LM | MLP | ViT
Tree = Any

KEY = jax.random.key(0)
AXES = ("data", "model", "expert")
STEPS = 10
RATE, DECAY, FIRST, SECOND = 6e-3, 0.01, 0.9, 0.999

LITTLE_LM = LM(
    width=16,
    depth=2,
    heads=8,
    head_dim=4,
    kv_heads=4,
    hidden=24,
    vocab=32,
    compute_dtype="float32",
    scan_layers=True,
)
MODELS: dict[str, Model] = {
    "MLP": MLP(input_dim=16, hidden_sizes=(32, 24, 16)),
    "ViT": ViT(width=16, depth=1, heads=4, image=12, patch=4, classes=8, compute_dtype="float32"),
    "LM": LITTLE_LM,
    "MoE": replace(LITTLE_LM, depth=1, scan_layers=False, experts=4, balance_weight=0.1),
}


@dataclass(frozen=True)
class Run:
    """The losses of a training run, its first gradients, and its compiled program."""

    losses: np.ndarray[Any, Any]
    gradients: Tree
    program: str


def mesh_of(*sizes: int) -> Mesh:
    """Return a mesh of the first devices; the sizes of data, model and expert are 1 by default."""
    sizes = (*sizes, *[1] * (3 - len(sizes)))
    return Mesh(np.array(jax.devices()[: prod(sizes)]).reshape(sizes), AXES)


def batch_for(model: Model, count: int = 16) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    if isinstance(model, LM):
        return {"tokens": rng.integers(0, model.vocab, (count, 9), dtype=np.int32)}
    shape = (4, 4, 1) if isinstance(model, MLP) else (model.image, model.image, 3)
    classes = model.num_classes if isinstance(model, MLP) else model.classes
    return {
        "image": rng.integers(0, 256, (count, *shape), dtype=np.uint8),
        "label": rng.integers(0, classes, count, dtype=np.int32),
    }


@cache
def weights_of(name: str) -> Tree:
    """Return the random weights of one of the models."""
    return random_weights(MODELS[name])


def random_weights(model: Model) -> Tree:
    """Return random weights on the host: norms near one, all others away from zero."""
    rng = np.random.default_rng(1)

    def random_weight(path: Any, shape: Any) -> Any:
        values = rng.normal(size=shape.shape) * 0.3
        return np.float32(values + 1 if "norm" in str(path[-1]) else values)

    return jax.tree_util.tree_map_with_path(random_weight, jax.eval_shape(model.init, KEY))


def compiled(model: Model, mesh: Mesh, name: str) -> tuple[Any, Tree, Any]:
    """Return the compiled loss and gradients, the shardings of the weights, and a placed batch."""
    with jax.set_mesh(mesh), traced_for_cpu_alone():
        shardings = jax.tree.map(partial(NamedSharding, mesh), model.specs())
        batch = jax.device_put(batch_for(model), NamedSharding(mesh, model.batch_spec()))
        value_and_grad = jax.value_and_grad(lambda w, batch: model.loss(w, batch, KEY)[0])
        weights = jax.device_put(weights_of(name), shardings)
        program = jax.jit(value_and_grad).lower(weights, batch).compile()
    return program, shardings, batch


@cache
def trained(name: str, layout: str, *sizes: int) -> Run:
    """Run ten steps of AdamW on one batch."""
    model = replace(MODELS[name], layout=layout)
    program, shardings, batch = compiled(model, mesh_of(*sizes), name)
    weights, optimizer = weights_of(name), AdamW(weights_of(name))
    losses, first = [], None
    for _ in range(STEPS):
        loss, sharded = program(jax.device_put(weights, shardings), batch)
        gradients = jax.tree.map(np.asarray, sharded)
        weights = optimizer.step(weights, gradients)
        losses.append(float(loss))
        first = gradients if first is None else first
    return Run(np.array(losses), first, program.as_text())


class AdamW:
    """AdamW on the host, so that layouts differ only in the computed loss and gradients."""

    def __init__(self, weights: Tree) -> None:
        self.moments = [jax.tree.map(np.zeros_like, weights) for _ in range(2)]
        self.step_number = 0

    def step(self, weights: Tree, gradients: Tree) -> Tree:
        self.step_number += 1
        first, second = self.moments
        first = jax.tree.map(lambda m, g: FIRST * m + (1 - FIRST) * g, first, gradients)
        second = jax.tree.map(lambda v, g: SECOND * v + (1 - SECOND) * g * g, second, gradients)
        self.moments = [first, second]

        def apply(w: Any, m: Any, v: Any) -> Any:
            update = m / (1 - FIRST**self.step_number)
            update = update / (np.sqrt(v / (1 - SECOND**self.step_number)) + 1e-8)
            return np.float32(w - RATE * (update + DECAY * w))

        return jax.tree.map(apply, weights, first, second)
