"""Invalid sizes, options and layouts raise an error that names the problem and the fix."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from drumline.models import LM, MLP, ViT
from tests.models.training import KEY, LITTLE_LM, MODELS, batch_for, mesh_of, weights_of


@contextmanager
def raises(message: str) -> Iterator[None]:
    """Expect exactly this message; `match` would also accept notes that JAX adds to it."""
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        yield
    assert str(caught.value) == message


TINY: dict[str, Any] = {"width": 16, "depth": 1, "heads": 4}
UNKNOWN_KERNEL: dict[str, Any] = {"attention": "flash"}
UNKNOWN_REMAT: dict[str, Any] = {"remat": "dotz"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MLP(layout="tensr"),
            "MLP: layout 'tensr' is unknown; choose from data, fsdp, tensor, fsdp+tensor, "
            "or give a mapping from logical axes to mesh axes",
        ),
        (
            lambda: ViT(**TINY, layout={"bach": "data"}),
            "ViT: layout has 'bach', which is not a logical axis; "
            "the logical axes are batch, sequence, embed, heads, hidden",
        ),
        (
            lambda: ViT(**TINY, layout={"batch": "data", "embed": "model"}),
            "ViT: layout shards embed over 'model' but not the batch; weights are gathered "
            "over axes that hold different examples, so name that axis for both",
        ),
        (
            lambda: ViT(**TINY, layout={"sequence": "model", "hidden": "model"}),
            "ViT: layout shards sequence over 'model' and heads over None; "
            "give sequence, heads, hidden the same mesh axis, or none",
        ),
        (
            lambda: replace(
                LITTLE_LM,
                layout=dict.fromkeys(("batch", "sequence", "heads", "hidden", "vocab"), "x"),
            ),
            "LM: layout shards both batch and sequence over 'x'; give them different mesh axes",
        ),
        (
            lambda: replace(LITTLE_LM, **UNKNOWN_REMAT),
            "LM: remat is 'dotz'; it can be none, dots, projections, full, "
            "or True for full and False for none",
        ),
        (
            lambda: replace(LITTLE_LM, wire_dtype="int8"),
            "LM: wire_dtype must be a floating-point type, as jnp.bfloat16, not 'int8'",
        ),
        (
            lambda: ViT(**TINY, wire_dtype="half a float"),
            "ViT: wire_dtype must be a floating-point type, as jnp.bfloat16, not 'half a float'",
        ),
        (
            lambda: MLP(layout={"batch": "data", "hidden": "model"}),
            "MLP: layout shards hidden over 'model' but not the batch; "
            "the rows of the batch move around that ring, so name that axis for both",
        ),
        (
            lambda: MLP(layout={"batch": "data", "hidden": "data", "embed": "data"}),
            "MLP: layout shards both embed and hidden over 'data'; give them different mesh axes",
        ),
        (
            lambda: replace(LITTLE_LM, experts=4, layout={"batch": "data", "experts": "expert"}),
            "LM: layout shards experts over 'expert', which shards neither batch nor sequence; "
            "tokens are sent to their experts along this axis, so shard one of the two over it",
        ),
        (
            lambda: replace(
                LITTLE_LM, experts=4, layout={"batch": ("a", "b"), "experts": ("a", "b")}
            ),
            "LM: layout shards experts over a and b; give them one mesh axis",
        ),
        (lambda: MLP(input_dim=0), "MLP: input_dim is 0; it must be at least 1"),
        (
            lambda: MLP(hidden_sizes=(8, 0)),
            "MLP: hidden_sizes is (8, 0); each must be at least 1",
        ),
        (lambda: ViT(16, 1, 3), "ViT: width 16 cannot be divided into 3 heads"),
        (
            lambda: ViT(**TINY, image=225),
            "ViT: images of 225 pixels cannot be cut into patches of 16",
        ),
        (
            lambda: ViT(**TINY, **UNKNOWN_KERNEL),
            "ViT: attention is 'flash'; it can be auto, xla, cudnn, splash",
        ),
        (
            lambda: replace(LITTLE_LM, kv_heads=3),
            "LM: 8 query heads cannot share 3 kv_heads evenly",
        ),
        (
            lambda: replace(LITTLE_LM, head_dim=5),
            "LM: head_dim 5 is odd; rotary positions need pairs",
        ),
        (
            lambda: replace(LITTLE_LM, experts=4, experts_per_token=5),
            "LM: experts_per_token is 5; with 4 experts it can be 1 to 4",
        ),
        (
            lambda: replace(LITTLE_LM, **UNKNOWN_KERNEL),
            "LM: attention is 'flash'; it can be auto, xla, cudnn, splash",
        ),
    ],
)
def test_invalid_models_cannot_be_created(make: Callable[[], LM | MLP | ViT], message: str) -> None:
    with raises(message):
        make()


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (
            replace(LITTLE_LM, layout="tensor"),
            (1, 8),
            "LM: heads of blocks.key, 4 cannot be divided between the 8 devices of mesh axis model",
        ),
        (
            replace(LITTLE_LM, width=12, layout="fsdp+tensor"),
            (4, 2),
            "LM: sequence and embed of table, 12 cannot be divided between the 8 devices "
            "of mesh axis model × data",
        ),
        (
            replace(LITTLE_LM, experts=6, layout="expert"),
            (1, 1, 4),
            "LM: experts of blocks.experts_in, 6 cannot be divided between the 4 devices "
            "of mesh axis expert",
        ),
        (
            MLP(input_dim=10, layout="fsdp"),
            (4,),
            "MLP: embed of layer0.weight, 10 cannot be divided between the 4 devices "
            "of mesh axis data",
        ),
    ],
)
def test_a_model_that_does_not_fit_the_mesh_is_rejected(
    model: LM | MLP, sizes: tuple[int, ...], message: str
) -> None:
    with raises(message):
        model.check(mesh_of(*sizes))
    with jax.set_mesh(mesh_of(*sizes)), raises(message):
        jax.eval_shape(model.loss, jax.eval_shape(model.init, KEY), batch_for(model, 64), KEY)


def test_a_mesh_without_the_axis_is_rejected() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    message = (
        "ViT: layout shards sequence over mesh axis 'model', but the mesh has data; "
        "add that axis to the mesh, with size 1 if need be"
    )
    with raises(message):
        replace(MODELS["ViT"], layout="tensor").check(mesh)


@pytest.mark.parametrize(
    ("name", "layout", "batch", "message"),
    [
        (
            "LM",
            "data",
            {"tokens": np.zeros((6, 9), np.int32)},
            "LM: a batch of 6 cannot be divided between the 4 devices of mesh axis data",
        ),
        (
            "LM",
            "tensor",
            {"tokens": np.zeros((8, 10), np.int32)},
            "LM: a sequence of 9 cannot be divided between the 2 devices of mesh axis model",
        ),
        (
            "ViT",
            "data",
            {"image": np.zeros((8, 12, 14, 3)), "label": np.zeros(8, np.int32)},
            "ViT: images are (12, 14, 3), but the model takes (12, 12, 3)",
        ),
    ],
)
def test_a_batch_of_the_wrong_shape_is_rejected(
    name: str, layout: str, batch: dict[str, Any], message: str
) -> None:
    model = replace(MODELS[name], layout=layout)
    with jax.set_mesh(mesh_of(4, 2)), raises(message):
        jax.eval_shape(model.loss, weights_of(name), batch, KEY)
