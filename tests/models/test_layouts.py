"""Every layout trains like one device: the same losses, with the communication it promises."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from drumline.models import LM, lm, mlp, vit
from drumline.models.layouts import Layout
from drumline.models.remat import Remat
from tests.models.training import (
    KEY,
    LITTLE_LM,
    MODELS,
    batch_for,
    compiled,
    mesh_of,
    trained,
    weights_of,
)

BOUND = 1e-5
"""Largest relative difference of a loss over ten steps in float32, for sums in other orders."""

RUNS = [
    ("MLP", "fsdp+tensor", (4, 2)),
    ("ViT", "data", (8, 1)),
    ("ViT", "fsdp", (8, 1)),
    ("ViT", "tensor", (2, 4)),
    ("ViT", "fsdp+tensor", (4, 2)),
    ("LM", "data", (8, 1)),
    ("LM", "fsdp", (8, 1)),
    ("LM", "tensor", (2, 4)),
    ("LM", "fsdp+tensor", (4, 2)),
    # With experts, this is all that "data", "fsdp" and "tensor" do, at once.
    ("MoE", "fsdp+tensor", (4, 2)),
    ("MoE", "expert", (2, 1, 4)),
    ("MoE", "fsdp+expert", (2, 1, 4)),
    ("MoE", "expert+tensor", (2, 2, 2)),
]


@pytest.mark.parametrize(("name", "layout", "sizes"), RUNS)
def test_ten_steps_lose_what_one_device_loses(
    name: str, layout: str, sizes: tuple[int, ...]
) -> None:
    alone = trained(name, "data", 1).losses
    together = trained(name, layout, *sizes).losses
    assert alone[-1] < 0.8 * alone[0]
    assert np.max(np.abs(together / alone - 1)) < BOUND


def test_no_layout_of_the_tables_is_left_out() -> None:
    tried = {name: {layout for of, layout, _ in RUNS if of == name} for name in MODELS}
    assert tried["ViT"] == set(vit.LAYOUTS)
    assert tried["LM"] | tried["MoE"] == set(lm.LAYOUTS)
    assert tried["MLP"] <= set(mlp.LAYOUTS)


@pytest.mark.parametrize("name", ["ViT", "LM"])
def test_tensor_parallelism_sends_activations_round_the_ring_and_never_gathers_them(
    name: str,
) -> None:
    program = trained(name, "tensor", 2, 4).program
    assert "collective-permute" in program
    assert "all-gather" not in program


@pytest.mark.parametrize("name", ["ViT", "LM"])
def test_sums_go_round_the_ring_in_the_type_that_the_model_is_told(name: str) -> None:
    def on_the_wire(wire_dtype: str | None) -> set[str]:
        told: Any = {"layout": "tensor", "compute_dtype": "bfloat16", "wire_dtype": wire_dtype}
        model = replace(MODELS[name], **told)
        shapes = jax.eval_shape(model.init, KEY)
        with jax.set_mesh(mesh_of(2, 4)):
            gradient = jax.grad(lambda w, batch: model.loss(w, batch, KEY)[0])
            lowered = jax.jit(gradient).lower(shapes, batch_for(model, 8)).as_text()
        return set(re.findall(r"collective_permute.*?-> tensor<[\dx]*(\w+)>", lowered))

    assert on_the_wire(None) == {"bf16", "f32"}
    assert on_the_wire("bfloat16") == {"bf16"}


def test_fsdp_gathers_weights_and_scatters_their_gradients() -> None:
    program = trained("LM", "fsdp", 8, 1).program
    assert re.search(r"all-gather(-start)?\(", program)
    assert re.search(r"reduce-scatter(-start)?\(", program)


def test_one_device_communicates_nothing() -> None:
    for name in MODELS:
        program = trained(name, "data", 1).program
        assert not re.search(r"all-|reduce-scatter|collective|partition-id", program)


def test_fsdp_never_holds_all_the_weights_of_all_layers() -> None:
    deep = replace(LITTLE_LM, width=64, depth=32, hidden=256, layout="fsdp")
    with jax.set_mesh(mesh_of(8)):
        shapes = jax.eval_shape(deep.init, KEY)
        gradient = jax.jit(
            jax.grad(lambda w, batch: deep.loss(w, batch, KEY)[0]),
            in_shardings=(deep.specs(), deep.batch_spec()),
            out_shardings=deep.specs(),
        )
        program = gradient.lower(shapes, batch_for(deep, 8)).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < sum(4 * leaf.size for leaf in jax.tree.leaves(shapes)) / 2


def test_layers_written_out_and_computed_again_are_the_layers_in_the_loop() -> None:
    looped = trained("LM", "data", 1)
    model = replace(LITTLE_LM, scan_layers=False, remat=True)
    program, places, batch = compiled(model, mesh_of(1), "LM")
    loss, gradients = program(jax.device_put(weights_of("LM"), places), batch)
    assert float(loss) == pytest.approx(looped.losses[0], rel=1e-6)
    for one, other in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(looped.gradients), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_what_is_kept_for_the_backward_pass_goes_by_name() -> None:
    def kept(remat: Remat) -> int:
        residuals = kept_by(replace(LITTLE_LM, scan_layers=False, remat=remat))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in residuals)

    assert kept("full") < kept("projections") < kept("dots") < kept("none")
    assert (kept(True), kept(False)) == (kept("full"), kept("none"))


def test_no_logits_in_float32_wait_for_the_backward_pass() -> None:
    model = replace(LITTLE_LM, compute_dtype="bfloat16")
    shape = (2, 8, model.vocab)
    logits = [leaf.dtype.name for leaf in kept_by(model) if leaf.shape == shape]
    assert logits == ["bfloat16"]


def kept_by(model: LM) -> list[jax.ShapeDtypeStruct]:
    """What the loss keeps for its backward pass."""
    batch = {name: jnp.asarray(rows) for name, rows in batch_for(model, 2).items()}
    shapes = jax.eval_shape(model.init, KEY)
    residuals = jax.eval_shape(
        lambda weights: jax.vjp(lambda w: model.loss(w, batch, KEY)[0], weights)[1], shapes
    )
    return jax.tree.leaves(residuals)


def test_a_layout_of_ones_own_for_a_mesh_of_ones_own() -> None:
    # Weights whole on each of two groups of devices, divided within a group.
    layout: Layout = {"batch": ("group", "member"), "embed": "member"}
    model = replace(MODELS["MLP"], layout=layout)
    assert model.specs()["layer0"]["weight"] == P("member", None)
    assert model.batch_spec() == P(("group", "member"))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("group", "member"))
    program, places, batch = compiled(model, mesh, "MLP")
    loss, _ = program(jax.device_put(weights_of("MLP"), places), batch)
    assert float(loss) == pytest.approx(trained("MLP", "data", 1).losses[0], rel=1e-6)


_TURNED = ("outer", "inner")  # of a mesh that has them the other way round
LAYOUTS_IN_ANOTHER_ORDER: dict[str, tuple[str, Layout]] = {
    "a ring": ("LM", dict.fromkeys(("sequence", "heads", "hidden", "vocab"), _TURNED)),
    "a ring of images": ("ViT", dict.fromkeys(("sequence", "heads", "hidden"), _TURNED)),
    "gathered weights": ("LM", dict.fromkeys(("batch", "embed"), _TURNED)),
    "rows and columns": ("MLP", dict.fromkeys(("batch", "hidden"), _TURNED)),
    "experts": (
        "MoE",
        {"batch": _TURNED, "embed": _TURNED, "experts": "outer"},
    ),
}


@pytest.mark.parametrize("what", LAYOUTS_IN_ANOTHER_ORDER)
def test_mesh_axes_may_be_named_in_another_order_than_the_meshs(what: str) -> None:
    name, layout = LAYOUTS_IN_ANOTHER_ORDER[what]
    model = replace(MODELS[name], layout=layout)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("inner", "outer"))
    program, places, batch = compiled(model, mesh, name)
    loss, gradients = program(jax.device_put(weights_of(name), places), batch)
    alone = trained(name, "data", 1)
    assert float(loss) == pytest.approx(alone.losses[0], rel=1e-6)
    for found, expected in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(alone.gradients), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6)
