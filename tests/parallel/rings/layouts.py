"""The ring functions with their layouts and expected results.

Arrays are written `[o, ...]` with a first dimension for the other axes of the mesh. Each group of
devices that shares a ring has its own operands, so a result is one matmul, and no sum over groups
blurs its error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from drumline.parallel import (
    allgather_matmul,
    feedforward,
    matmul_allreduce,
    matmul_reducescatter,
)
from tests.parallel.rings.rounding import BoundedValue

Ring = str | tuple[str, ...]
RING = "Y"


@dataclass(frozen=True)
class Layout:
    """A function with the sharding of its operands and result over the ring's axis.

    Letters name the dimensions of `operands` and `result`. A letter followed by `Y` is sharded over
    the ring. `b` is a small batch dimension, the others are multiples of the ring.
    """

    name: str
    function: Callable[..., jax.Array]
    operands: tuple[str, ...]
    result: str

    def specs(self, other_axes: tuple[str, ...], ring: Ring = RING) -> tuple[tuple[P, ...], P]:
        """Return the specs of operands and result, with the first dimension over the other axes."""
        operands = tuple(_spec(d, other_axes, ring) for d in self.operands)
        return operands, _spec(self.result, other_axes, ring)


def spec(*axes: str | tuple[str, ...] | None) -> P:
    """Return a partition spec."""
    return P(*axes)  # type: ignore[no-untyped-call]


def abstract(
    shape: tuple[int, ...], dtype: npt.DTypeLike, sharding: jax.sharding.Sharding | None = None
) -> jax.ShapeDtypeStruct:
    """Return an array's shape for tracing and compiling."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _spec(dimensions: str, other_axes: tuple[str, ...], ring: Ring) -> P:
    axes = (ring if name.endswith(RING) else None for name in dimensions.split())
    return spec(other_axes or None, *axes)


def shape(dimensions: str, groups: int, sizes: dict[str, int]) -> tuple[int, ...]:
    """Return the full array's shape."""
    return (groups, *(sizes[name[0]] for name in dimensions.split()))


LAYOUTS = (
    Layout("gather contraction", allgather_matmul, ("b s dY", "d fY"), "b s fY"),
    Layout("gather rows", partial(allgather_matmul, gathered="rows"), ("b sY d", "d fY"), "b s fY"),
    Layout("scatter columns", matmul_reducescatter, ("b s fY", "fY d"), "b s dY"),
    Layout(
        "scatter rows",
        partial(matmul_reducescatter, scattered="rows"),
        ("b s fY", "fY d"),
        "b sY d",
    ),
    Layout("allreduce", matmul_allreduce, ("b s fY", "fY d"), "b s d"),
    Layout(
        "feedforward columns",
        partial(feedforward, activation=jnp.square),
        ("b s dY", "d fY", "fY d"),
        "b s dY",
    ),
    Layout(
        "feedforward rows",
        partial(feedforward, activation=jnp.square, layout="rows"),
        ("b sY d", "d fY", "fY d"),
        "b sY d",
    ),
)
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def mesh_of(sizes: tuple[int, ...], ring_position: int) -> tuple[Mesh, tuple[str, ...]]:
    """Return a mesh with the ring's axis at a position, and the names of its other axes."""
    names = ["X", "Z", "W"][: len(sizes) - 1]
    other_axes = tuple(names)
    names.insert(ring_position, RING)
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, tuple(names)), other_axes


def sharded(
    layout: Layout,
    mesh: Mesh,
    other_axes: tuple[str, ...],
    check_vma: bool = True,
    ring: Ring = RING,
    **options: Any,
) -> Callable[..., jax.Array]:
    """Return the function on whole arrays. Each group of devices works on its own entry."""

    def local(*arrays: jax.Array) -> jax.Array:
        operands = [array[0] for array in arrays]
        return layout.function(*operands, axis_name=ring, **options)[None]

    in_specs, out_specs = layout.specs(other_axes, ring)
    return jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


def expected(operands: list[BoundedValue], cotangent: BoundedValue) -> list[BoundedValue]:
    """Return the result and the gradient of every operand, in that order."""
    x, w, *rest = (_flatten(o) for o in operands)
    g = _flatten(cotangent)
    shapes = [cotangent.value.shape, *(o.value.shape for o in operands)]
    if not rest:
        arrays = [x @ w, g @ w.mT, x.mT @ g]
    else:
        (w_out,) = rest
        hidden = x @ w
        activated = hidden * hidden
        d_hidden = (g @ w_out.mT) * hidden.twice()
        arrays = [activated @ w_out, d_hidden @ w.mT, x.mT @ d_hidden, activated.mT @ g]
    return [
        BoundedValue(
            bounded_value.value.reshape(target_shape),
            bounded_value.error.reshape(target_shape),
            bounded_value.dtype,
        )
        for bounded_value, target_shape in zip(arrays, shapes, strict=True)
    ]


def _flatten(bounded_value: BoundedValue) -> BoundedValue:
    groups, *_, columns = bounded_value.value.shape
    target_shape = (groups, -1, columns)
    return BoundedValue(
        bounded_value.value.reshape(target_shape),
        bounded_value.error.reshape(target_shape),
        bounded_value.dtype,
    )
