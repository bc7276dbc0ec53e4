"""Every layout trains to the same losses as one device, with the expected communication."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from drumline.models import LM, lm, mlp, vit
from drumline.models.remat import Remat
from drumline.models.sharding import Layout
from tests.cases import rare
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
"""The maximum relative difference of float32 losses over ten steps, because sums differ in
order.
"""

# Each axis with two of the models.
RUNS = [
    ("MLP", "fsdp+tensor", (4, 2)),
    ("ViT", "tensor", (2, 4)),
    ("LM", "fsdp", (8, 1)),
    ("MoE", "expert+tensor", (2, 2, 2)),
]
MORE_RUNS = [
    ("ViT", "data", (8, 1)),
    ("LM", "fsdp+tensor", (4, 2)),
    ("MoE", "fsdp+expert", (2, 1, 4)),
    ("ViT", "fsdp", (8, 1)),
    ("ViT", "fsdp+tensor", (4, 2)),
    ("LM", "data", (8, 1)),
    ("LM", "tensor", (2, 4)),
    # With experts, this combines "data", "fsdp" and "tensor".
    ("MoE", "fsdp+tensor", (4, 2)),
    ("MoE", "expert", (2, 1, 4)),
]


@pytest.mark.parametrize(("name", "layout", "sizes"), [*RUNS, *rare(*MORE_RUNS)])
def test_ten_steps_have_the_losses_of_one_device_and_the_communication_of_the_layout(
    name: str, layout: str, sizes: tuple[int, ...]
) -> None:
    one_device, run = trained(name, "data", 1), trained(name, layout, *sizes)
    assert one_device.losses[-1] < 0.8 * one_device.losses[0]
    assert np.max(np.abs(run.losses / one_device.losses - 1)) < BOUND
    assert not re.search(r"all-|reduce-scatter|collective|partition-id", one_device.program)
    if layout == "tensor":  # permutes activations and never gathers them
        assert "collective-permute" in run.program
        assert "all-gather" not in run.program
    if layout == "fsdp":  # gathers weights and scatters their gradients
        assert re.search(r"all-gather(-start)?\(", run.program)
        assert re.search(r"reduce-scatter(-start)?\(", run.program)


def test_every_layout_is_tested() -> None:
    runs = [*RUNS, *MORE_RUNS]
    tested = {name: {layout for model, layout, _ in runs if model == name} for name in MODELS}
    assert tested["ViT"] == set(vit.LAYOUTS)
    assert tested["LM"] | tested["MoE"] == set(lm.LAYOUTS)
    assert tested["MLP"] <= set(mlp.LAYOUTS)


@pytest.mark.parametrize("name", ["ViT", *rare("LM")])
def test_rings_send_sums_in_the_wire_dtype(name: str) -> None:
    def permuted_types(wire_dtype: str | None) -> set[str]:
        options: Any = {"layout": "tensor", "compute_dtype": "bfloat16", "wire_dtype": wire_dtype}
        model = replace(MODELS[name], **options)
        shapes = jax.eval_shape(model.init, KEY)
        with jax.set_mesh(mesh_of(2, 4)):
            gradient = jax.grad(lambda w, batch: model.loss(w, batch, KEY)[0])
            lowered = jax.jit(gradient).lower(shapes, batch_for(model, 8)).as_text()
        return set(re.findall(r"collective_permute.*?-> tensor<[\dx]*(\w+)>", lowered))

    assert permuted_types(None) == {"bf16", "f32"}
    assert permuted_types("bfloat16") == {"bf16"}


@pytest.mark.parametrize("name", ["LM", "ViT"])
def test_blocking_collectives_have_the_losses_and_gradients_of_one_device(name: str) -> None:
    options: Any = {"layout": "tensor", "implementation": "xla"}
    model = replace(MODELS[name], **options)
    program, shardings, batch = compiled(model, mesh_of(2, 4), name)
    loss, gradients = program(jax.device_put(weights_of(name), shardings), batch)
    expected_run = trained(name, "data", 1)
    assert float(loss) == pytest.approx(expected_run.losses[0], rel=1e-6)
    for actual, expected in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(expected_run.gradients), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-6)
    assert "collective-permute" not in program.as_text()


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


def test_unrolled_and_rematerialized_layers_equal_scanned_layers() -> None:
    scanned = trained("LM", "data", 1)
    model = replace(LITTLE_LM, scan_layers=False, remat=True)
    program, shardings, batch = compiled(model, mesh_of(1), "LM")
    loss, gradients = program(jax.device_put(weights_of("LM"), shardings), batch)
    assert float(loss) == pytest.approx(scanned.losses[0], rel=1e-6)
    for actual, expected in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(scanned.gradients), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_remat_policies_differ_in_saved_bytes() -> None:
    def saved_bytes(remat: Remat) -> int:
        residuals = saved_arrays(replace(LITTLE_LM, scan_layers=False, remat=remat))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in residuals)

    assert (
        saved_bytes("full") < saved_bytes("projections") < saved_bytes("dots") < saved_bytes("none")
    )
    assert (saved_bytes(True), saved_bytes(False)) == (saved_bytes("full"), saved_bytes("none"))


@pytest.mark.parametrize("implementation", ["ring", "xla"])
def test_remat_policies_save_the_projections_of_sharded_weights(implementation: str) -> None:
    """A policy does not see the matmuls inside of functions with their own gradient."""

    def saved_shapes(remat: Remat) -> Counter[tuple[int, ...]]:
        options: Any = {"layout": "tensor", "scan_layers": False, "implementation": implementation}
        model = replace(LITTLE_LM, remat=remat, **options)
        with jax.set_mesh(mesh_of(2, 4)):
            return Counter(leaf.shape for leaf in saved_arrays(model))

    full = saved_shapes("full")
    for policy in ("projections", "dots"):
        saved = saved_shapes(policy) - full
        # Queries, keys, values and the output; the gate and the input. No gradient needs the last.
        assert saved.total() >= 6 * LITTLE_LM.depth
    assert not full - saved_shapes("projections")


def test_logits_are_saved_in_the_compute_dtype() -> None:
    model = replace(LITTLE_LM, compute_dtype="bfloat16")
    shape = (2, 8, model.vocab)
    logits = [leaf.dtype.name for leaf in saved_arrays(model) if leaf.shape == shape]
    assert logits == ["bfloat16"]


def saved_arrays(model: LM) -> list[jax.ShapeDtypeStruct]:
    """Return the types of the arrays that the loss saves for its backward pass."""
    batch = {name: jnp.asarray(rows) for name, rows in batch_for(model, 2).items()}
    shapes = jax.eval_shape(model.init, KEY)
    residuals = jax.eval_shape(
        lambda weights: jax.vjp(lambda w: model.loss(w, batch, KEY)[0], weights)[1], shapes
    )
    return jax.tree.leaves(residuals)


def test_a_custom_layout_on_a_custom_mesh() -> None:
    # Weights are replicated over two groups of devices and sharded within a group.
    layout: Layout = {"batch": ("group", "member"), "embed": "member"}
    model = replace(MODELS["MLP"], layout=layout)
    assert model.specs()["layer0"]["weight"] == P("member", None)
    assert model.batch_spec() == P(("group", "member"))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("group", "member"))
    program, shardings, batch = compiled(model, mesh, "MLP")
    loss, _ = program(jax.device_put(weights_of("MLP"), shardings), batch)
    assert float(loss) == pytest.approx(trained("MLP", "data", 1).losses[0], rel=1e-6)


_REVERSED = ("outer", "inner")  # the mesh has the opposite order
_REVERSED_TENSOR: Layout = dict.fromkeys(("sequence", "heads", "hidden", "vocab"), _REVERSED)
REVERSED_LAYOUTS: dict[str, tuple[str, Layout]] = {
    "a ring": ("LM", _REVERSED_TENSOR),
    "a ring of images": ("ViT", dict.fromkeys(("sequence", "heads", "hidden"), _REVERSED)),
    "gathered weights": ("LM", dict.fromkeys(("batch", "embed"), _REVERSED)),
    "rows and columns": ("MLP", dict.fromkeys(("batch", "hidden"), _REVERSED)),
    "experts": (
        "MoE",
        {"batch": _REVERSED, "embed": _REVERSED, "experts": "outer"},
    ),
}


@pytest.mark.parametrize(
    ("case", "options"),
    [
        *((case, {}) for case in REVERSED_LAYOUTS if case == "gathered weights"),
        ("a ring", {"implementation": "xla"}),
        *rare(*((case, {}) for case in REVERSED_LAYOUTS if case != "gathered weights")),
    ],
)
def test_a_layout_may_name_mesh_axes_in_another_order_than_the_mesh(
    case: str, options: dict[str, Any]
) -> None:
    name, layout = REVERSED_LAYOUTS[case]
    model = replace(MODELS[name], layout=layout, **options)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("inner", "outer"))
    program, shardings, batch = compiled(model, mesh, name)
    loss, gradients = program(jax.device_put(weights_of(name), shardings), batch)
    expected_run = trained(name, "data", 1)
    assert float(loss) == pytest.approx(expected_run.losses[0], rel=1e-6)
    for actual, expected in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(expected_run.gradients), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-6)
