"""Memory and time of the ring matmuls beside plain `jit`, on eight emulated CPU devices.

    python benchmarks/overlap.py            # both tables, about two minutes on two cores
    python benchmarks/overlap.py --memory   # the first alone
    python benchmarks/overlap.py --fraction 4   # the second with a quarter of the rows

The first table is the compiler's own account of temporary memory on each device, with a schedule
made for memory as accelerators have it (the CPU's default starts whatever is ready). The second
takes the chapter's shape, B, D, F = 1024, 2048, 8192 in float32 on a 2x4 mesh. All variants run in
turn within one process, so that only their ratios are worth reading.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.parallel import (
    allgather_matmul,
    feedforward,
    matmul_allreduce,
    matmul_reducescatter,
)

Product = Callable[..., jax.Array]
FOR_MEMORY: dict[str, bool | int | str] = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
}
CANNOT_SHOW = """\
What this cannot show: the emulated devices share the machine's cores and memory, a permute is a
copy between them that nothing runs beside, and so there is no link whose time could be hidden.
The ratios say what cutting a product into steps costs, not what overlapping gains."""


@dataclass(frozen=True)
class Case:
    """One function, what it replaces inside `shard_map` and under `jit`, and its layout.

    Shapes and specs name the dimensions: B over X; D and F over Y where the ring wants it.
    """

    name: str
    ring: Product
    collective: Product
    plain: Product
    operands: tuple[str, ...]
    specs: tuple[P, ...]
    out: P


def gather(x: jax.Array, axis: int) -> jax.Array:
    """The whole of x on every device."""
    whole: jax.Array = lax.all_gather(x, "Y", axis=axis, tiled=True)
    return whole


def scatter(x: jax.Array, axis: int) -> jax.Array:
    """Each device's share of the sum."""
    share: jax.Array
    share = lax.psum_scatter(x, "Y", scatter_dimension=axis, tiled=True)  # type: ignore[no-untyped-call]
    return share


def reduce(x: jax.Array) -> jax.Array:
    """The sum, on every device."""
    whole: jax.Array = lax.psum(x, "Y")  # type: ignore[no-untyped-call]
    return whole


def spec(*axes: str | tuple[str, ...] | None) -> P:
    """A partition spec."""
    return P(*axes)  # type: ignore[no-untyped-call]


def cases() -> tuple[Case, ...]:
    """All functions in all their layouts."""
    rows = spec(("X", "Y"), None)
    tile, columns, split = spec("X", "Y"), spec(None, "Y"), spec("Y", None)

    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def two(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w) @ v

    return (
        Case(
            "allgather_matmul, contraction",
            lambda x, w, **o: allgather_matmul(x, w, axis_name="Y", **o),
            lambda x, w: gather(x, 1) @ w,
            matmul,
            ("BD", "DF"),
            (tile, columns),
            tile,
        ),
        Case(
            "allgather_matmul, rows",
            lambda x, w, **o: allgather_matmul(x, w, axis_name="Y", gathered="rows", **o),
            lambda x, w: gather(x, 0) @ w,
            matmul,
            ("BD", "DF"),
            (rows, columns),
            tile,
        ),
        Case(
            "matmul_reducescatter, columns",
            lambda x, w, **o: matmul_reducescatter(x, w, axis_name="Y", **o),
            lambda x, w: scatter(x @ w, 1),
            matmul,
            ("BF", "FD"),
            (tile, split),
            tile,
        ),
        Case(
            "matmul_reducescatter, rows",
            lambda x, w, **o: matmul_reducescatter(x, w, axis_name="Y", scattered="rows", **o),
            lambda x, w: scatter(x @ w, 0),
            matmul,
            ("BF", "FD"),
            (tile, split),
            rows,
        ),
        Case(
            "matmul_allreduce",
            lambda x, w, **o: matmul_allreduce(x, w, axis_name="Y", **o),
            lambda x, w: reduce(x @ w),
            matmul,
            ("BF", "FD"),
            (tile, split),
            spec("X", None),
        ),
        Case(
            "feedforward, columns",
            lambda x, w, v, **o: feedforward(x, w, v, axis_name="Y", activation=jax.nn.relu, **o),
            lambda x, w, v: scatter(jax.nn.relu(gather(x, 1) @ w) @ v, 1),
            two,
            ("BD", "DF", "FD"),
            (tile, columns, split),
            tile,
        ),
        Case(
            "feedforward, rows",
            lambda x, w, v, **o: feedforward(
                x, w, v, axis_name="Y", activation=jax.nn.relu, layout="rows", **o
            ),
            lambda x, w, v: scatter(jax.nn.relu(gather(x, 0) @ w) @ v, 0),
            two,
            ("BD", "DF", "FD"),
            (rows, columns, split),
            rows,
        ),
    )


def on_the_ring_alone(case: Case) -> Case:
    """The case on a mesh that has no axis but the ring's."""

    def without_x(layout: P) -> P:
        axes = ["Y" if axis == ("X", "Y") else None if axis == "X" else axis for axis in layout]
        return spec(*axes)

    return replace(case, specs=tuple(map(without_x, case.specs)), out=without_x(case.out))


def mesh_of(x: int, y: int) -> Mesh:
    """A mesh of the first x·y devices."""
    return Mesh(np.array(jax.devices()[: x * y]).reshape(x, y), ("X", "Y"))


def mapped(case: Case, mesh: Mesh, local: Product) -> Product:
    """A local function over the whole arrays of a case."""
    return jax.shard_map(local, mesh=mesh, in_specs=case.specs, out_specs=case.out)


def with_options(ring: Product, **options: Any) -> Product:
    """The ring function with options filled in."""
    return lambda *operands: ring(*operands, **options)


def described(case: Case, mesh: Mesh, sizes: dict[str, int]) -> list[jax.ShapeDtypeStruct]:
    """The operands of a case, without their data."""
    return [
        jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            tuple(sizes[letter] for letter in letters),
            jnp.float32,
            sharding=NamedSharding(mesh, layout),
        )
        for letters, layout in zip(case.operands, case.specs, strict=True)
    ]


def mebibytes(function: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct]) -> float:
    """MiB of temporary memory that a function takes on each device."""
    compiled = jax.jit(function, compiler_options=FOR_MEMORY).lower(*operands).compile()
    report = compiled.memory_analysis()
    assert report is not None
    return float(report.temp_size_in_bytes) / 2**20


def value_and_gradients(product: Product, operands: int) -> Callable[..., Any]:
    """The sum of squares of a product, with the gradients of all its operands."""

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(product(*arrays) ** 2)

    return jax.value_and_grad(loss, argnums=tuple(range(operands)))


def print_memory() -> None:
    """The first table."""
    print("Temporary memory on each device, MiB, forward / value and gradients")
    print("D, F = 2048, 4096, float32, a ring of n devices\n")
    heads = ("B", "n", "function", "collective", "one way", "both ways")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for rows, size in ((1024, 8), (1024, 4), (4096, 8), (4096, 4)):
        mesh = Mesh(np.array(jax.devices()[:size]), ("Y",))
        for case in map(on_the_ring_alone, cases()):
            operands = described(case, mesh, {"B": rows, "D": 2048, "F": 4096})
            variants = (
                case.collective,
                with_options(case.ring, direction="one"),
                with_options(case.ring, direction="both"),
            )
            products = [mapped(case, mesh, variant) for variant in variants]
            cells = [
                f"{mebibytes(product, operands):.1f} / "
                f"{mebibytes(value_and_gradients(product, len(operands)), operands):.1f}"
                for product in products
            ]
            print(f"| {rows} | {size} | {case.name} | " + " | ".join(cells) + " |", flush=True)


def seconds(functions: Sequence[Callable[[], jax.Array]], repeats: int) -> list[float]:
    """The median time of each function, all of them run in turn."""
    taken: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function().block_until_ready()
    for _ in range(repeats):
        for times, function in zip(taken, functions, strict=True):
            start = time.perf_counter()
            function().block_until_ready()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def print_times(fraction: int, repeats: int) -> None:
    """The second table."""
    sizes = {"B": 1024 // fraction, "D": 2048, "F": 8192}
    mesh = mesh_of(2, 4)
    print(f"Time relative to plain jit; B, D, F = {sizes['B']}, 2048, 8192, float32, 2x4 devices\n")
    heads = ("function", "plain jit, ms", "plain jit", "one way", "both ways")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for case in cases():
        rng = np.random.default_rng(0)
        operands = [
            jax.device_put(rng.normal(size=o.shape).astype(np.float32), o.sharding)
            for o in described(case, mesh, sizes)
        ]
        plain = jax.jit(case.plain, out_shardings=NamedSharding(mesh, case.out))
        rings = [
            jax.jit(mapped(case, mesh, with_options(case.ring, direction=direction)))
            for direction in ("one", "both")
        ]
        runs = [partial(function, *operands) for function in (plain, *rings)]
        first, *others = seconds(runs, repeats)
        ratios = " | ".join(f"{other / first:.2f}" for other in others)
        print(f"| {case.name} | {first * 1e3:.0f} | 1.00 | {ratios} |", flush=True)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description="Ring matmuls beside plain jit.")
    parser.add_argument("--memory", action="store_true", help="print the memory table alone")
    parser.add_argument("--fraction", type=int, default=1, help="divide the rows B by this")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each variant")
    arguments = parser.parse_args()
    print_memory()
    if not arguments.memory:
        print()
        print_times(arguments.fraction, arguments.repeats)
        print("\n" + CANNOT_SHOW)


if __name__ == "__main__":
    main()
