"""The old public names of inspect and targets work and warn with the new ones."""

# mypy: allow-untyped-calls

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from drumline import inspect, targets
from drumline.errors import UserError
from drumline.inspect import ProgramVariant, VariantComparison, compare, estimate
from drumline.inspect.compare import VariantEstimate
from drumline.inspect.cost.machines import parse_machine
from drumline.inspect.cost.memory import LiveBuffer
from drumline.inspect.cost.network import map_mesh
from drumline.inspect.estimate import EstimatedCollective

X = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
SLICE = "v5litepod-1"


def square(x: Any) -> Any:
    return x @ x


@pytest.mark.parametrize(
    ("module", "old_name", "new_name"),
    [
        ("drumline.inspect", "Layout", ProgramVariant),
        ("drumline.inspect", "LayoutComparison", VariantComparison),
        ("drumline.inspect", "Mistake", UserError),
        ("drumline.targets", "Mistake", UserError),
    ],
)
def test_old_names_of_modules(module: str, old_name: str, new_name: object) -> None:
    with pytest.warns(DeprecationWarning, match=f"{module}.{old_name} is now"):
        assert getattr(importlib.import_module(module), old_name) is new_name


def test_modules_have_no_other_names() -> None:
    for module in (inspect, targets):
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            module.Nothing  # noqa: B018


def test_old_names_of_fields() -> None:
    collective = EstimatedCollective(
        kind="all-gather", axes=(), source="", scope="", count=1, seconds=1, exposed=0, bytes=8
    )
    result = estimate(square, X, on=SLICE)
    for value, old_name, new_name in (
        (VariantEstimate("fsdp", SLICE, None, "too large"), "layout", "variant"),
        (VariantEstimate("fsdp", SLICE, None, "too large"), "why", "reason"),
        (LiveBuffer("weights", 8), "what", "name"),
        (collective, "taken", "bytes"),
        (result, "laid", "axis_links"),
    ):
        with pytest.warns(DeprecationWarning, match=f"{old_name} is now .*{new_name};"):
            assert getattr(value, old_name) == getattr(value, new_name)


def test_old_parameters() -> None:
    old_arguments: dict[str, Any] = {"laid": {}}
    with pytest.warns(DeprecationWarning, match=r"estimate\(laid=\) is now torus_dims="):
        estimate(square, X, on=SLICE, **old_arguments)
    old_arguments = {"layouts": {"plain": (X,)}, "on": SLICE}
    with pytest.warns(DeprecationWarning, match=r"compare\(layouts=\) is now variants="):
        assert compare(square, **old_arguments).best is not None


def test_old_parameter_of_load_target(tmp_path: Path) -> None:
    (tmp_path / "sampler.py").write_text("def draw(): pass\n")
    old_arguments: dict[str, Any] = {"given": f"{tmp_path}/sampler.py:draw"}
    with pytest.warns(DeprecationWarning, match=r"load_target\(given=\) is now name="):
        assert targets.load_target(**old_arguments).name == old_arguments["given"]


def test_old_value_of_torus_dims() -> None:
    mesh, machine = {"X": 2, "Y": 4}, parse_machine("v5litepod-8")
    old_value: Any = "tours"
    with pytest.warns(DeprecationWarning, match="'tours' is now 'rings'"):
        assert map_mesh(mesh, machine, old_value) == map_mesh(mesh, machine, "rings")
