"""Training steps of Drumline's models in each layout, at the sizes of examples/.

The step is that of `drumline.train`: loss, gradients, AdamW with gradient clipping, and the check
for finite values. No parameters are initialized and no data is read. The shapes of the state come
from `jax.eval_shape`, their shardings from the model's layout.
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

from drumline.inspect.examples.program import Example, Program
from drumline.models import LM, MLP, llama_1b3, llama_350m, vit_b16
from drumline.parallel.target import overlap_options

LENGTH = 2048
"""Tokens per sequence."""
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
"""A mesh of eight devices for each layout."""

Batch = dict[str, tuple[tuple[int, ...], Any]]
"""Shapes and dtypes by name."""


@dataclass(frozen=True)
class Zeros:
    """A dataset of zeros with the rows of one batch."""

    batch: Batch

    def __len__(self) -> int:
        """Return the number of rows."""
        return min(shape[0] for shape, _ in self.batch.values())

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return zeros for the rows with these indices."""
        return {
            name: np.zeros((len(numbers), *shape[1:]), dtype)
            for name, (shape, dtype) in self.batch.items()
        }


def training_step(model: Any, batch: Batch, mesh: AbstractMesh) -> Program:
    """Return a training step for a mesh without devices, and the shapes of its arguments."""
    # The trainer needs Optax. The list of examples does not.
    import optax  # type: ignore[import-untyped]

    from drumline.train.data import Data
    from drumline.train.recipe import Functions, Recipe
    from drumline.train.state import abstract_state
    from drumline.train.steps.step import make_step

    def loss(params: Any, batch: Any, key: Any) -> Any:
        # A training run sets the mesh for the whole step. Here only the model needs it.
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
    state = abstract_state(recipe, mesh)
    shape = partial(_sharded_shape, mesh)
    rows = {name: shape(dims, model.batch_spec(), dtype) for name, (dims, dtype) in batch.items()}
    mode = shape((), P(), np.int32)
    stop_flag = shape((mesh.size,), P(mesh.axis_names), np.int32)
    limits = shape((2,), P(), np.float32)
    step = _Step(partial(make_step, recipe, mesh, state))
    return step, (state, mode, rows, stop_flag, limits)


@dataclass(frozen=True)
class _Step:
    """A training step whose compiler options depend on the chip that it is traced for."""

    make: Callable[[Mapping[str, Any]], Any]
    __name__ = "step"

    def trace(self, *arguments: Any) -> Any:
        """Trace the step, as a jitted function does."""
        return self.make(overlap_options()).trace(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        """Run the step."""
        return self.make(overlap_options())(*arguments)


def _sharded_shape(
    mesh: AbstractMesh, dims: tuple[int, ...], spec: P, dtype: Any
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))


def images(count: int, *shape: int) -> Batch:
    """Return a batch of images and labels."""
    return {"image": ((count, *shape), np.uint8), "label": ((count,), np.int32)}


def texts(count: int) -> Batch:
    """Return a batch of sequences, with one more token than positions to predict from."""
    return {"tokens": ((count, LENGTH + 1), np.int32)}


def _moe(**changes: Any) -> LM:
    """Return the 350M decoder with eight experts per block and two per token."""
    return llama_350m(experts=8, experts_per_token=2, **changes)


@dataclass(frozen=True)
class _Family:
    """A model, its batch and its layouts."""

    name: str
    description: str
    make: Callable[..., Any]
    batch: Batch
    layouts: tuple[str, ...]
    on: str
    options: Mapping[str, Any]

    def examples(self) -> tuple[Example, ...]:
        return tuple(self._example(layout) for layout in self.layouts)

    def _example(self, layout: str) -> Example:
        def build(mesh: AbstractMesh) -> Program:
            return training_step(self.make(layout=layout, **self.options), self.batch, mesh)

        return Example(
            name=f"models/{self.name}-{layout}",
            description=f"a training step of {self.description}, layout {layout}",
            mesh=MESHES[layout],
            on=self.on,
            build=build,
            axis_type=AxisType.Auto,
        )


_DENSE = ("data", "fsdp", "tensor", "fsdp+tensor")
# A scan over the layers keeps the table of collectives short. The backward pass recomputes the
# blocks, because without a fused attention kernel the scores of all layers do not fit in memory.
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

MODELS: tuple[Example, ...] = tuple(
    example for family in _FAMILIES for example in family.examples()
)
