"""Training steps of our own models, each in its layouts, at the sizes of examples/.

The step is the one that `drumline.train` runs: loss, gradients, AdamW with clipped gradients, and
the check that all is finite. Nothing is drawn and nothing is read: the state's shapes come from
`jax.eval_shape`, their places from the model's table of layouts.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.inspect.examples.program import Built, Example
from drumline.models import LM, MLP, llama_1b3, llama_350m, vit_b16
from drumline.parallel.scheduling import overlap_options

LENGTH = 2048
"""Tokens of a sequence."""
PIXELS = 224

_ONE_AXIS = {"data": 8}
_TWO_AXES = {"data": 2, "model": 4}
MESHES: dict[str, dict[str, int]] = {
    "data": _ONE_AXIS,
    "fsdp": _ONE_AXIS,
    "tensor": _TWO_AXES,
    "fsdp+tensor": _TWO_AXES,
    "expert": {"data": 2, "expert": 4},
    "fsdp+expert": {"data": 2, "expert": 4},
    "expert+tensor": {"data": 2, "expert": 2, "model": 2},
}
"""Eight devices for each layout."""

Batch = dict[str, tuple[tuple[int, ...], Any]]
"""Shapes and types by name."""


@dataclass(frozen=True)
class Zeros:
    """As many rows as a batch has, of the shapes that a model takes."""

    batch: Batch

    def __len__(self) -> int:
        """How many there are."""
        return min(shape[0] for shape, _ in self.batch.values())

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Zeros."""
        return {
            name: np.zeros((len(numbers), *shape[1:]), dtype)
            for name, (shape, dtype) in self.batch.items()
        }


def training_step(model: Any, batch: Batch, mesh: AbstractMesh) -> Built:
    """The step of a training run on a mesh without devices, and the shapes of what it takes."""
    # Here, as the trainer needs Optax, and a list of examples does not.
    import optax  # type: ignore[import-untyped]

    from drumline.train.data import Data
    from drumline.train.recipe import Functions, Recipe
    from drumline.train.state import abstract_state
    from drumline.train.steps.step import make_step

    def loss(params: Any, batch: Any, key: Any) -> Any:
        # A run sets its mesh around the whole step; this one is known only to the model.
        with jax.sharding.use_abstract_mesh(mesh):
            return model.loss(params, batch, key)

    recipe = Recipe(
        model=Functions(model.init, loss, specs=model.specs, batch_spec=model.batch_spec),
        optimizer=optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
        ),
        data=Data(Zeros(batch), batch=len(Zeros(batch))),
        mesh=dict(mesh.shape),
        steps=1,
    )
    places = abstract_state(recipe, mesh)
    shape = partial(_shape, mesh)
    rows = {name: shape(dims, model.batch_spec(), dtype) for name, (dims, dtype) in batch.items()}
    watch = shape((), P(), np.int32)
    notice = shape((mesh.size,), P(mesh.axis_names), np.int32)
    limits = shape((2,), P(), np.float32)
    return _Step(partial(make_step, recipe, mesh, places)), (places, watch, rows, notice, limits)


@dataclass(frozen=True)
class _Step:
    """A training step whose options for the compiler depend on the chip that it is traced for."""

    make: Callable[[Mapping[str, Any]], Any]
    __name__ = "step"

    def trace(self, *arguments: Any) -> Any:
        """As what `jax.jit` returns has it."""
        return self.make(overlap_options()).trace(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        """As the step that is traced."""
        return self.make(overlap_options())(*arguments)


def _shape(mesh: AbstractMesh, dims: tuple[int, ...], spec: P, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))


def images(count: int, *shape: int) -> Batch:
    """A batch of images and their labels."""
    return {"image": ((count, *shape), np.uint8), "label": ((count,), np.int32)}


def texts(count: int) -> Batch:
    """A batch of sequences, one token longer than what predicts."""
    return {"tokens": ((count, LENGTH + 1), np.int32)}


def _moe(**changes: Any) -> LM:
    """The 350M decoder with eight experts in each block, of which a token goes to two."""
    return llama_350m(experts=8, experts_per_token=2, **changes)


@dataclass(frozen=True)
class _Family:
    """A model, its batch, and the layouts to show it in."""

    name: str
    what: str
    make: Callable[..., Any]
    batch: Batch
    layouts: tuple[str, ...]
    on: str
    options: Mapping[str, Any]

    def examples(self) -> tuple[Example, ...]:
        return tuple(self._example(layout) for layout in self.layouts)

    def _example(self, layout: str) -> Example:
        def build(mesh: AbstractMesh) -> Built:
            return training_step(self.make(layout=layout, **self.options), self.batch, mesh)

        return Example(
            name=f"models/{self.name}-{layout}",
            what=f"a training step of {self.what}, layout {layout}",
            mesh=MESHES[layout],
            on=self.on,
            build=build,
            axis_type=AxisType.Auto,
        )


_DENSE = ("data", "fsdp", "tensor", "fsdp+tensor")
# One block for all layers, as a table of 24 times the same collectives says no more; computed again
# in the backward pass, as without a fused attention kernel the scores of all layers fit nowhere.
_DECODER = {"scan_layers": True, "remat": True}
_FAMILIES = (
    _Family("mlp", "the MLP 784-1024-512-10", MLP, images(1024, 28, 28), _DENSE, "v5litepod-8", {}),
    _Family(
        "vit-b16",
        "ViT-B/16 on 1024 images",
        vit_b16,
        images(1024, PIXELS, PIXELS, 3),
        _DENSE,
        "v6e-8",
        {"scan_layers": True},
    ),
    _Family(
        "lm-350m",
        "the 350M decoder on 64 sequences of 2048",
        llama_350m,
        texts(64),
        _DENSE,
        "v6e-8",
        _DECODER,
    ),
    _Family(
        "lm-1b3",
        "the 1.3B decoder on 32 sequences of 2048",
        llama_1b3,
        texts(32),
        _DENSE,
        "v6e-8",
        _DECODER,
    ),
    _Family(
        "lm-moe",
        "the 350M decoder with 8 experts a block, on 64 sequences of 2048",
        _moe,
        texts(64),
        ("data", "expert", "fsdp+expert", "expert+tensor"),
        "v6e-8",
        _DECODER,
    ),
)

MODELS: tuple[Example, ...] = tuple(one for family in _FAMILIES for one in family.examples())
