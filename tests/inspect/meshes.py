"""The meshes of the known programs, and their arguments as shapes. No program runs."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.inspect.expected import ProgramCall

ROWS, COLUMNS = 64, 128
"""The shape of most arguments: 32 KiB of float32."""


def mesh_of(sizes: tuple[int, ...], kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """Return a mesh of the first devices with axes named X, Y and Z."""
    names = tuple("XYZ"[: len(sizes)])
    return jax.make_mesh(sizes, names, (kind,) * len(sizes), devices=jax.devices()[: prod(sizes)])


def shape_on(
    mesh: jax.sharding.Mesh, shape: tuple[int, ...], spec: P, dtype: Any = jnp.float32
) -> jax.ShapeDtypeStruct:
    """Return an argument's shape and sharding."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def mapped(
    sizes: tuple[int, ...],
    body: Callable[..., Any],
    *specs: P,
    shape: tuple[int, ...] = (ROWS, COLUMNS),
    dtype: Any = jnp.float32,
    out: Any = None,
) -> Callable[[], ProgramCall]:
    """Return a builder of `body` under `shard_map`, with an array of `shape` for each of the
    specs.
    """

    def build() -> ProgramCall:
        mesh = mesh_of(sizes)
        arguments = tuple(shape_on(mesh, shape, spec, dtype) for spec in specs)
        function = jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=specs[0] if out is None else out
        )
        return ProgramCall(function, arguments, mesh)

    return build
