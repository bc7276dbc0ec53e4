"""Tiny models with weights in general position, and ten steps of AdamW in some layout."""

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
    """How a training run went, what its first gradients were, and the program it ran."""

    losses: np.ndarray[Any, Any]
    gradients: Tree
    program: str


def mesh_of(*sizes: int) -> Mesh:
    """A mesh of the first devices: data, model and expert, of one device where not said."""
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
    """Weights on the host: scales near one, everything else, biases too, away from zero."""
    rng = np.random.default_rng(1)

    def draw(path: Any, like: Any) -> Any:
        values = rng.normal(size=like.shape) * 0.3
        return np.float32(values + 1 if "norm" in str(path[-1]) else values)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(MODELS[name].init, KEY))


def compiled(model: Model, mesh: Mesh, name: str) -> tuple[Any, Tree, Any]:
    """Loss and gradients as a program for a mesh, where the weights go, and the batch in place."""
    with jax.set_mesh(mesh), traced_for_cpu_alone():
        places = jax.tree.map(partial(NamedSharding, mesh), model.specs())
        batch = jax.device_put(batch_for(model), NamedSharding(mesh, model.batch_spec()))
        both = jax.value_and_grad(lambda w, batch: model.loss(w, batch, KEY)[0])
        weights = jax.device_put(weights_of(name), places)
        program = jax.jit(both).lower(weights, batch).compile()
    return program, places, batch


@cache
def trained(name: str, layout: str, *sizes: int) -> Run:
    """Ten steps of AdamW on one batch."""
    model = replace(MODELS[name], layout=layout)
    program, places, batch = compiled(model, mesh_of(*sizes), name)
    weights, optimizer = weights_of(name), AdamW(weights_of(name))
    losses, first = [], None
    for _ in range(STEPS):
        loss, sharded = program(jax.device_put(weights, places), batch)
        gradients = jax.tree.map(np.asarray, sharded)
        weights = optimizer.step(weights, gradients)
        losses.append(float(loss))
        first = gradients if first is None else first
    return Run(np.array(losses), first, program.as_text())


class AdamW:
    """The optimizer on the host, so that what differs between layouts is what they compute."""

    def __init__(self, weights: Tree) -> None:
        self.moments = [jax.tree.map(np.zeros_like, weights) for _ in range(2)]
        self.number = 0

    def step(self, weights: Tree, gradients: Tree) -> Tree:
        self.number += 1
        first, second = self.moments
        first = jax.tree.map(lambda m, g: FIRST * m + (1 - FIRST) * g, first, gradients)
        second = jax.tree.map(lambda v, g: SECOND * v + (1 - SECOND) * g * g, second, gradients)
        self.moments = [first, second]

        def move(w: Any, m: Any, v: Any) -> Any:
            far = m / (1 - FIRST**self.number)
            far = far / (np.sqrt(v / (1 - SECOND**self.number)) + 1e-8)
            return np.float32(w - RATE * (far + DECAY * w))

        return jax.tree.map(move, weights, first, second)
