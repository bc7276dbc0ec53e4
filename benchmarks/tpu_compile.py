"""What the TPU's own compiler makes of our rings, beside plain `jit`, without a TPU.

    python benchmarks/tpu_compile.py [WORD …] [--on v5litepod-8]

Needs libtpu (`pip install 'drumline[tpu]'` on x86_64 Linux, or `DRUMLINE_TPU_PYTHON`). For each
program the schedule is read: `cycles`, the compiler's own estimates with loops multiplied out;
`both`, the same with the bandwidth's figures where data is only moved, of which the compiler's are
several times too high; the hops, what a device sends, what it waits for them, and the whole. Only
rows whose names hold all the WORDs are compiled, which under emulation takes a minute or more each.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.chips import slice_of
from drumline.inspect.communication import communication_of
from drumline.inspect.compiled import compiled_for
from drumline.inspect.cost.machines import machine
from drumline.inspect.cost.timeline import DEVICE
from drumline.inspect.estimate import Estimate, estimate_program
from drumline.parallel import allgather_matmul, matmul_allreduce, matmul_reducescatter


@dataclass(frozen=True)
class Size:
    """x[B, D] · w[D, F] in bfloat16."""

    name: str
    rows: int
    inner: int
    columns: int


SIZES = (
    Size("chapter", 1024, 2048, 8192),
    Size("8B up 8k", 8192, 4096, 14336),
    Size("8B down 8k", 8192, 14336, 4096),
)


@dataclass(frozen=True)
class Product:
    """How a product is sharded over Y, and what computes it on shards; B is sharded over X."""

    name: str
    x: P
    w: P
    out: P
    ring: Callable[..., jax.Array]


PRODUCTS = (
    Product("gather contraction", P("X", "Y"), P(None, "Y"), P("X", "Y"), allgather_matmul),
    Product(
        "gather rows",
        P(("X", "Y"), None),
        P(None, "Y"),
        P("X", "Y"),
        partial(allgather_matmul, gathered="rows"),
    ),
    Product("scatter columns", P("X", "Y"), P("Y", None), P("X", "Y"), matmul_reducescatter),
    Product("all-reduce", P("X", "Y"), P("Y", None), P("X", None), matmul_allreduce),
)


def programs(mesh: AbstractMesh) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Every product, size and way, forward and with gradients."""
    for size in SIZES:
        for product in PRODUCTS:
            args = (
                _shape(mesh, product.x, size.rows, size.inner),
                _shape(mesh, product.w, size.inner, size.columns),
            )
            ways: dict[str, Callable[..., jax.Array]] = {
                "jit": partial(jnp.einsum, "bd,df->bf", out_sharding=product.out)
            }
            for direction in ("one", "both"):
                for loop in ("unrolled", "rolled"):
                    ways[f"ring {direction} {loop}"] = jax.shard_map(
                        partial(product.ring, axis_name="Y", direction=direction, loop=loop),
                        mesh=mesh,
                        in_specs=(product.x, product.w),
                        out_specs=product.out,
                    )
            for way, fn in ways.items():
                yield f"{size.name}, {product.name}, {way}", fn, args
                yield f"{size.name}, {product.name}, {way}, gradients", _gradients(fn), args


def _shape(mesh: AbstractMesh, spec: P, *sizes: int) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


def _gradients(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(fn(x, w).astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1))


def cycles(told: Estimate) -> tuple[float, float]:
    """The compiler's own cycles, and those that count where it is far from the bandwidth."""
    clock = told.machine.constants.clock or 0.0
    flat = told.timeline.flat()
    events = [(event.cost, times) for event, times in flat if event.resource == DEVICE]
    own = sum((cost.cycles or cost.seconds) * times for cost, times in events)
    both = sum(cost.seconds * times for cost, times in events)
    return own * clock, both * clock


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only rows whose names hold all of them")
    parser.add_argument("--on", default="v5litepod-8", help="a slice of eight chips")
    given = parser.parse_args()
    chips = slice_of(given.on).chips
    mesh = AbstractMesh((chips // 4, 4), ("X", "Y"), (AxisType.Explicit,) * 2)
    columns = f"{'cycles':>9}{'both':>9}{'hops':>6}{'sent':>10}{'waits':>9}{'whole':>9}"
    print(f"{'on ' + given.on:58}{columns}")
    for name, fn, args in programs(mesh):
        if not all(word in name for word in given.words):
            continue
        target = machine(given.on)
        compiled = compiled_for(target, fn, args, mesh=mesh, compiler="tpu")
        told, sent = estimate_program(compiled, target), communication_of(compiled)
        own, both = cycles(told)
        hops = sum(one.count for one in sent.collectives)
        print(
            f"{name:58}{own / 1e3:8.1f}k{both / 1e3:8.1f}k{hops:6}{sent.sent / 2**20:6.1f} MiB"
            f"{told.exposed * 1e6:6.1f} µs{told.seconds * 1e6:6.1f} µs",
            flush=True,
        )


if __name__ == "__main__":
    main()
