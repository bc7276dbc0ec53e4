"""The products of `tpu_compile.py`: shardings, sizes, and the ways to compute them."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.chips import slice_of
from drumline.parallel import (
    BlockShape,
    TransformerBlock,
    allgather_matmul,
    expert_matmul,
    matmul_allreduce,
    matmul_reducescatter,
    overlap_options,
)
from drumline.parallel.target import trace_for

# XLA's own collective matmul, off.
NO_WINDOWS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


@dataclass(frozen=True)
class Case:
    """One product or layer, one way to compute it, on a mesh."""

    name: str
    way: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: AbstractMesh
    options: dict[str, Any]


@dataclass(frozen=True)
class Size:
    """x[rows, inner] · w[inner, columns] in bfloat16; the rows are for all devices."""

    name: str
    rows: int
    inner: int
    columns: int


@dataclass(frozen=True)
class Movement:
    """How a product is sharded over Y, and what computes it on shards; rows are over X too."""

    name: str
    x: P
    w: P
    out: P
    ring: Callable[..., jax.Array]

    def without(self, axis: str) -> Movement:
        """The same with nothing over an axis."""
        x, w, out = (
            P(*(_less(entry, axis) for entry in spec)) for spec in (self.x, self.w, self.out)
        )
        return replace(self, x=x, w=w, out=out)


def _less(entry: Any, axis: str) -> Any:
    kept = tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if name != axis)
    return (kept[0] if kept else None) if len(kept) < 2 else kept


MOVEMENTS = {
    movement.name: movement
    for movement in (
        Movement("gather contraction", P("X", "Y"), P(None, "Y"), P("X", "Y"), allgather_matmul),
        Movement(
            "gather rows",
            P(("X", "Y"), None),
            P(None, "Y"),
            P("X", "Y"),
            partial(allgather_matmul, gathered="rows"),
        ),
        Movement("scatter columns", P("X", "Y"), P("Y", None), P("X", "Y"), matmul_reducescatter),
        Movement(
            "scatter rows",
            P("X", "Y"),
            P("Y", None),
            P(("X", "Y"), None),
            partial(matmul_reducescatter, scattered="rows"),
        ),
        Movement("all-reduce", P("X", "Y"), P("Y", None), P("X", None), matmul_allreduce),
    )
}
# Width and hidden features of the projections; heads' columns are for queries, keys and values.
LLAMAS = {"8B": (4096, 14336, 6144), "70B": (8192, 28672, 10240)}
TOKENS = (2048, 16384)
"""A chip has so many, its share of the sequence."""


def mesh_of(on: str, ring: int) -> AbstractMesh:
    """All chips of a slice, so many of them in each ring."""
    return AbstractMesh(
        (slice_of(on).chips // ring, ring), ("X", "Y"), (AxisType.Explicit, AxisType.Explicit)
    )


def cases(on: str, ring: int, *, every_way: bool) -> Iterator[Case]:
    """Every product and way on a slice; `every_way` writes the rings in all directions, loops.

    Where the compiler begins hops late, each ring comes once more with `overlap_options`.
    """
    with trace_for("tpu", f"TPU {slice_of(on).generation}"):
        early = overlap_options()
    for case in _cases(mesh_of(on, ring), every_way):
        yield case
        if early and case.way.startswith("ring"):
            yield replace(case, way=f"{case.way}, early", options=early)


def _cases(mesh: AbstractMesh, every_way: bool) -> Iterator[Case]:
    for movement in MOVEMENTS.values():
        yield from _products(mesh, movement, Size("chapter", 1024, 2048, 8192), every_way)
    for tokens in TOKENS:
        rows = tokens * mesh.size
        for model, (width, hidden, heads) in LLAMAS.items():
            at = f"{tokens // 1024}k"
            sized = {
                Size(f"{model} up {at}", rows, width, hidden): "gather rows",
                Size(f"{model} qkv {at}", rows, width, heads): "gather rows",
                Size(f"{model} down {at}", rows, hidden, width): "scatter rows",
                Size(f"{model} out {at}", rows, width, width): "scatter rows",
            }
            for size, name in sized.items():
                yield from _products(mesh, MOVEMENTS[name], size, every_way)
    size = Size("8B up 2k", 2048 * mesh.size, 4096, 14336)
    yield from _products(mesh, MOVEMENTS["gather contraction"], size, every_way)
    size = Size("8B down 2k", 2048 * mesh.size, 14336, 4096)
    for name in ("scatter columns", "all-reduce"):
        yield from _products(mesh, MOVEMENTS[name], size, every_way)
    yield from _block(mesh)
    yield from _experts(mesh)


def _products(
    mesh: AbstractMesh, movement: Movement, size: Size, every_way: bool
) -> Iterator[Case]:
    name = f"{size.name}, {movement.name}"
    operands = _operands(mesh, movement, size)[:2]
    for way, (fn, options) in _ways(mesh, movement, every_way).items():
        if way == "ring, bf16 wire" and movement.name.startswith("gather"):
            continue  # no sum travels forward
        yield Case(name, way, fn, operands, mesh, options)
    # Here every group along X has the same rows: the gradients of its weights need no sum with the
    # others', for which any way to compute them would wait.
    alone = movement.without("X")
    size = replace(size, rows=size.rows // mesh.shape["X"])
    for way, (fn, options) in _ways(mesh, alone, every_way).items():
        back = partial(_gradients, fn)
        operands = _operands(mesh, alone, size)
        yield Case(f"{name}, gradients", way, back, operands, mesh, options)


def _operands(mesh: AbstractMesh, movement: Movement, size: Size) -> tuple[Any, ...]:
    """x, w and the result's cotangent."""
    return (
        _shape(mesh, movement.x, size.rows, size.inner),
        _shape(mesh, movement.w, size.inner, size.columns),
        _shape(mesh, movement.out, size.rows, size.columns),
    )


def _ways(
    mesh: AbstractMesh, movement: Movement, every_way: bool
) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """What computes a product, and the compiler's options."""
    rings: dict[str, dict[str, Any]] = {"ring": {}, "ring, bf16 wire": {"wire_dtype": jnp.bfloat16}}
    if every_way:
        for direction in ("one", "both"):
            for loop in ("unrolled", "rolled"):
                rings[f"ring {direction} {loop}"] = {"direction": direction, "loop": loop}
    plain = partial(jnp.einsum, "bd,df->bf", out_sharding=movement.out)
    ways: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "jit": (plain, {}),
        "jit, no windows": (plain, NO_WINDOWS),
    }
    for way, told in rings.items():
        ring = jax.shard_map(
            partial(movement.ring, axis_name="Y", **told),
            mesh=mesh,
            in_specs=(movement.x, movement.w),
            out_specs=movement.out,
        )
        ways[way] = (ring, {})
    return ways


def _gradients(fn: Callable[..., Any], *arrays: Any) -> Any:
    """The result and the gradients, for a cotangent that is there."""
    *operands, cotangent = arrays
    out, pull = jax.vjp(fn, *operands)
    return out, pull(cotangent)


def _block(mesh: AbstractMesh) -> Iterator[Case]:
    """A block of Llama 8B, forward and back, on rings and on plain shardings."""
    shape = BlockShape(width=4096, heads=32, kv_heads=8, head_dim=128, hidden=14336)
    x = _shape(mesh, P("X", "Y", None), mesh.shape["X"], 2048 * mesh.shape["Y"], 4096)
    for way in ("jit", "ring", "ring, bf16 wire"):
        wire = "bfloat16" if way == "ring, bf16 wire" else None
        build = partial(TransformerBlock, shape, dtype="bfloat16", wire_dtype=wire)
        kind = jax.eval_shape(lambda build=build: build(key=jax.random.key(0)))
        block = jax.tree.map(lambda leaf, spec: _shape(mesh, spec, *leaf.shape), kind, kind.specs())

        def step(
            block: TransformerBlock, x: jax.Array, g: jax.Array, overlap: bool = way != "jit"
        ) -> Any:
            return _gradients(lambda block, x: block(x, overlap=overlap), block, x, g)

        yield Case("8B block 2k, gradients", way, step, (block, x, x), mesh, {})


def _experts(mesh: AbstractMesh) -> Iterator[Case]:
    """Eight experts of a Llama 8B's width, tokens and experts over Y."""
    rows = 2048 * mesh.size
    a = _shape(mesh, P(("X", "Y"), None), rows, 4096)
    w = _shape(mesh, P("Y", None, None), 8, 4096, 14336)
    to = _shape(mesh, P(("X", "Y"), None), rows, 2, dtype=jnp.int32)
    for exchange in ("allgather", "alltoall"):
        fn = jax.shard_map(
            lambda a, w, to, exchange=exchange: expert_matmul(
                a, lax.pcast(w, ("X",), to="varying"), to, axis_name="Y", exchange=exchange
            ),
            mesh=mesh,
            in_specs=(P(("X", "Y"), None), P("Y", None, None), P(("X", "Y"), None)),
            out_specs=P(("X", "Y"), None),
        )
        yield Case("experts 8 × 8B up 2k", exchange, fn, (a, w, to), mesh, {})


def _shape(mesh: AbstractMesh, spec: P, *sizes: int, dtype: Any = jnp.bfloat16) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(sizes, dtype, sharding=NamedSharding(mesh, spec))
