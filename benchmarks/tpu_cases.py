"""The matmuls of `tpu_compile.py`: shardings, sizes and implementations."""

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

# Disables XLA's own collective matmul.
NO_WINDOWS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


@dataclass(frozen=True)
class Case:
    """One implementation of a matmul or layer on a mesh."""

    name: str
    way: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: AbstractMesh
    options: dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The matmul x[rows, inner] · w[inner, columns] in bfloat16, with the rows of all devices."""

    name: str
    rows: int
    inner: int
    columns: int


@dataclass(frozen=True)
class MatmulSharding:
    """The sharding of a matmul over Y, with its implementation on shards. Rows are also sharded
    over X.
    """

    name: str
    x: P
    w: P
    out: P
    ring: Callable[..., jax.Array]

    def without(self, axis: str) -> MatmulSharding:
        """Return the same sharding without an axis."""
        x, w, out = (
            P(*(_remove_axis(entry, axis) for entry in spec)) for spec in (self.x, self.w, self.out)
        )
        return replace(self, x=x, w=w, out=out)


def _remove_axis(entry: Any, axis: str) -> Any:
    remaining = tuple(
        name for name in (entry if isinstance(entry, tuple) else (entry,)) if name != axis
    )
    return (remaining[0] if remaining else None) if len(remaining) < 2 else remaining


SHARDINGS = {
    sharding.name: sharding
    for sharding in (
        MatmulSharding(
            "gather contraction", P("X", "Y"), P(None, "Y"), P("X", "Y"), allgather_matmul
        ),
        MatmulSharding(
            "gather rows",
            P(("X", "Y"), None),
            P(None, "Y"),
            P("X", "Y"),
            partial(allgather_matmul, gathered="rows"),
        ),
        MatmulSharding(
            "scatter columns", P("X", "Y"), P("Y", None), P("X", "Y"), matmul_reducescatter
        ),
        MatmulSharding(
            "scatter rows",
            P("X", "Y"),
            P("Y", None),
            P(("X", "Y"), None),
            partial(matmul_reducescatter, scattered="rows"),
        ),
        MatmulSharding("all-reduce", P("X", "Y"), P("Y", None), P("X", None), matmul_allreduce),
    )
}
# The d_model and d_ff of the projections, and the columns of queries, keys and values.
LLAMAS = {"8B": (4096, 14336, 6144), "70B": (8192, 28672, 10240)}
TOKENS = (2048, 16384)
"""The tokens per chip: its share of the sequence."""


def mesh_of(on: str, ring: int) -> AbstractMesh:
    """Return a mesh of all chips of a slice, with rings of the given size."""
    return AbstractMesh(
        (slice_of(on).chips // ring, ring), ("X", "Y"), (AxisType.Explicit, AxisType.Explicit)
    )


def cases(on: str, ring: int, *, every_implementation: bool) -> Iterator[Case]:
    """Yield every matmul and implementation on a slice.

    `every_way` includes the rings in all directions and loop forms. If the compiler starts permutes
    late, each ring also appears with `overlap_options`.
    """
    with trace_for("tpu", f"TPU {slice_of(on).generation}"):
        overlap_flags = overlap_options()
    for case in _cases(mesh_of(on, ring), every_implementation):
        yield case
        if overlap_flags and case.way.startswith("ring"):
            yield replace(case, way=f"{case.way}, early", options=overlap_flags)


def _cases(mesh: AbstractMesh, every_implementation: bool) -> Iterator[Case]:
    for sharding in SHARDINGS.values():
        yield from _matmul_cases(
            mesh, sharding, Size("chapter", 1024, 2048, 8192), every_implementation
        )
    for tokens in TOKENS:
        rows = tokens * mesh.size
        for model, (width, hidden, heads) in LLAMAS.items():
            length_label = f"{tokens // 1024}k"
            llama_sizes = {
                Size(f"{model} up {length_label}", rows, width, hidden): "gather rows",
                Size(f"{model} qkv {length_label}", rows, width, heads): "gather rows",
                Size(f"{model} down {length_label}", rows, hidden, width): "scatter rows",
                Size(f"{model} out {length_label}", rows, width, width): "scatter rows",
            }
            for size, name in llama_sizes.items():
                yield from _matmul_cases(mesh, SHARDINGS[name], size, every_implementation)
    size = Size("8B up 2k", 2048 * mesh.size, 4096, 14336)
    yield from _matmul_cases(mesh, SHARDINGS["gather contraction"], size, every_implementation)
    size = Size("8B down 2k", 2048 * mesh.size, 14336, 4096)
    for name in ("scatter columns", "all-reduce"):
        yield from _matmul_cases(mesh, SHARDINGS[name], size, every_implementation)
    yield from _block(mesh)
    yield from _experts(mesh)


def _matmul_cases(
    mesh: AbstractMesh, sharding: MatmulSharding, size: Size, every_implementation: bool
) -> Iterator[Case]:
    name = f"{size.name}, {sharding.name}"
    operands = _operands(mesh, sharding, size)[:2]
    for way, (fn, options) in _implementations(mesh, sharding, every_implementation).items():
        if way == "ring, bf16 wire" and sharding.name.startswith("gather"):
            continue  # the forward pass sends no sum
        yield Case(name, way, fn, operands, mesh, options)
    # Here every group along X has the same rows, so the gradients of its weights need no sum with
    # other groups. Every implementation would wait for that sum.
    unsharded_over_x = sharding.without("X")
    size = replace(size, rows=size.rows // mesh.shape["X"])
    for way, (fn, options) in _implementations(
        mesh, unsharded_over_x, every_implementation
    ).items():
        with_gradients = partial(_gradients, fn)
        operands = _operands(mesh, unsharded_over_x, size)
        yield Case(f"{name}, gradients", way, with_gradients, operands, mesh, options)


def _operands(mesh: AbstractMesh, sharding: MatmulSharding, size: Size) -> tuple[Any, ...]:
    """Return x, w and the cotangent of the output."""
    return (
        _shape(mesh, sharding.x, size.rows, size.inner),
        _shape(mesh, sharding.w, size.inner, size.columns),
        _shape(mesh, sharding.out, size.rows, size.columns),
    )


def _implementations(
    mesh: AbstractMesh, sharding: MatmulSharding, every_implementation: bool
) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return the implementations of a matmul with their compiler options."""
    rings: dict[str, dict[str, Any]] = {"ring": {}, "ring, bf16 wire": {"wire_dtype": jnp.bfloat16}}
    if every_implementation:
        for direction in ("one", "both"):
            for loop in ("unrolled", "rolled"):
                rings[f"ring {direction} {loop}"] = {"direction": direction, "loop": loop}
    plain = partial(jnp.einsum, "bd,df->bf", out_sharding=sharding.out)
    implementations: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "jit": (plain, {}),
        "jit, no windows": (plain, NO_WINDOWS),
    }
    for way, ring_options in rings.items():
        ring = jax.shard_map(
            partial(sharding.ring, axis_name="Y", **ring_options),
            mesh=mesh,
            in_specs=(sharding.x, sharding.w),
            out_specs=sharding.out,
        )
        implementations[way] = (ring, {})
    return implementations


def _gradients(fn: Callable[..., Any], *arrays: Any) -> Any:
    """Return the output and the gradients for a given cotangent."""
    *operands, cotangent = arrays
    out, vjp_function = jax.vjp(fn, *operands)
    return out, vjp_function(cotangent)


def _block(mesh: AbstractMesh) -> Iterator[Case]:
    """Yield a block of Llama 8B, forward and backward, on rings and on plain shardings."""
    shape = BlockShape(width=4096, heads=32, kv_heads=8, head_dim=128, hidden=14336)
    x = _shape(mesh, P("X", "Y", None), mesh.shape["X"], 2048 * mesh.shape["Y"], 4096)
    for way in ("jit", "ring", "ring, bf16 wire"):
        comm_dtype = "bfloat16" if way == "ring, bf16 wire" else None
        build = partial(TransformerBlock, shape, dtype="bfloat16", wire_dtype=comm_dtype)
        block_shapes = jax.eval_shape(lambda build=build: build(key=jax.random.key(0)))
        block = jax.tree.map(
            lambda leaf, spec: _shape(mesh, spec, *leaf.shape), block_shapes, block_shapes.specs()
        )

        def step(
            block: TransformerBlock, x: jax.Array, g: jax.Array, overlap: bool = way != "jit"
        ) -> Any:
            return _gradients(lambda block, x: block(x, overlap=overlap), block, x, g)

        yield Case("8B block 2k, gradients", way, step, (block, x, x), mesh, {})


def _experts(mesh: AbstractMesh) -> Iterator[Case]:
    """Yield eight experts with the d_model of Llama 8B, tokens and experts over Y."""
    rows = 2048 * mesh.size
    a = _shape(mesh, P(("X", "Y"), None), rows, 4096)
    w = _shape(mesh, P("Y", None, None), 8, 4096, 14336)
    assignment = _shape(mesh, P(("X", "Y"), None), rows, 2, dtype=jnp.int32)
    for exchange in ("allgather", "alltoall"):
        fn = jax.shard_map(
            lambda a, w, assignment, exchange=exchange: expert_matmul(
                a, lax.pcast(w, ("X",), to="varying"), assignment, axis_name="Y", exchange=exchange
            ),
            mesh=mesh,
            in_specs=(P(("X", "Y"), None), P("Y", None, None), P(("X", "Y"), None)),
            out_specs=P(("X", "Y"), None),
        )
        yield Case("experts 8 × 8B up 2k", exchange, fn, (a, w, assignment), mesh, {})


def _shape(mesh: AbstractMesh, spec: P, *sizes: int, dtype: Any = jnp.bfloat16) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(sizes, dtype, sharding=NamedSharding(mesh, spec))
