"""Measure the memory and time of the ring matmuls and plain `jit` on eight emulated CPU devices.

    python benchmarks/overlap.py            # both tables, about two minutes on two cores
    python benchmarks/overlap.py --memory   # the first table alone
    python benchmarks/overlap.py --fraction 4   # the second with a quarter of the rows

The first table is the compiler's figure for the temporary memory on each device, with a
memory-optimized schedule like those of accelerators (the CPU's default starts all operations that
are ready). The second table uses the chapter's shape, B, D, F = 1024, 2048, 8192 in float32 on a
2x4 mesh. All variants alternate in one process, so only their ratios are meaningful.
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

MatmulFunction = Callable[..., jax.Array]
MEMORY_OPTIONS: dict[str, bool | int | str] = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
}
LIMITATIONS = """\
The table does not show overlap. The emulated devices share the machine's cores and memory, and a
permute is a synchronous copy between them, so there is no link time to hide. The ratios show the
cost of splitting a matmul into steps, not the gain from overlap."""


@dataclass(frozen=True)
class Case:
    """A ring function, its equivalents in `shard_map` and under `jit`, and its shardings.

    Shapes and specs name the dimensions: B over X; D and F over Y if the ring requires it.
    """

    name: str
    ring: MatmulFunction
    collective: MatmulFunction
    plain: MatmulFunction
    operands: tuple[str, ...]
    specs: tuple[P, ...]
    out: P


def gather(x: jax.Array, axis: int) -> jax.Array:
    """Return all of x on every device."""
    gathered: jax.Array = lax.all_gather(x, "Y", axis=axis, tiled=True)
    return gathered


def scatter(x: jax.Array, axis: int) -> jax.Array:
    """Return each device's share of the sum."""
    share: jax.Array
    share = lax.psum_scatter(x, "Y", scatter_dimension=axis, tiled=True)  # type: ignore[no-untyped-call]
    return share


def reduce(x: jax.Array) -> jax.Array:
    """Return the sum on every device."""
    total: jax.Array = lax.psum(x, "Y")  # type: ignore[no-untyped-call]
    return total


def spec(*axes: str | tuple[str, ...] | None) -> P:
    """Return a partition spec."""
    return P(*axes)  # type: ignore[no-untyped-call]


def cases() -> tuple[Case, ...]:
    """Return all functions in all their layouts."""
    rows = spec(("X", "Y"), None)
    tile, columns, row_sharded = spec("X", "Y"), spec(None, "Y"), spec("Y", None)

    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def feedforward_matmuls(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
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
            (tile, row_sharded),
            tile,
        ),
        Case(
            "matmul_reducescatter, rows",
            lambda x, w, **o: matmul_reducescatter(x, w, axis_name="Y", scattered="rows", **o),
            lambda x, w: scatter(x @ w, 0),
            matmul,
            ("BF", "FD"),
            (tile, row_sharded),
            rows,
        ),
        Case(
            "matmul_allreduce",
            lambda x, w, **o: matmul_allreduce(x, w, axis_name="Y", **o),
            lambda x, w: reduce(x @ w),
            matmul,
            ("BF", "FD"),
            (tile, row_sharded),
            spec("X", None),
        ),
        Case(
            "feedforward, columns",
            lambda x, w, v, **o: feedforward(x, w, v, axis_name="Y", activation=jax.nn.relu, **o),
            lambda x, w, v: scatter(jax.nn.relu(gather(x, 1) @ w) @ v, 1),
            feedforward_matmuls,
            ("BD", "DF", "FD"),
            (tile, columns, row_sharded),
            tile,
        ),
        Case(
            "feedforward, rows",
            lambda x, w, v, **o: feedforward(
                x, w, v, axis_name="Y", activation=jax.nn.relu, layout="rows", **o
            ),
            lambda x, w, v: scatter(jax.nn.relu(gather(x, 0) @ w) @ v, 0),
            feedforward_matmuls,
            ("BD", "DF", "FD"),
            (rows, columns, row_sharded),
            rows,
        ),
    )


def without_x_axis(case: Case) -> Case:
    """Return the case on a mesh with the ring's axis only."""

    def without_x(layout: P) -> P:
        axes = ["Y" if axis == ("X", "Y") else None if axis == "X" else axis for axis in layout]
        return spec(*axes)

    return replace(case, specs=tuple(map(without_x, case.specs)), out=without_x(case.out))


def mesh_of(x: int, y: int) -> Mesh:
    """Return a mesh of the first x·y devices."""
    return Mesh(np.array(jax.devices()[: x * y]).reshape(x, y), ("X", "Y"))


def mapped(case: Case, mesh: Mesh, local: MatmulFunction) -> MatmulFunction:
    """Return a local function mapped over the whole arrays of a case."""
    return jax.shard_map(local, mesh=mesh, in_specs=case.specs, out_specs=case.out)


def with_options(ring: MatmulFunction, **options: Any) -> MatmulFunction:
    """Return the ring function with options."""
    return lambda *operands: ring(*operands, **options)


def operand_shapes(case: Case, mesh: Mesh, sizes: dict[str, int]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of a case's operands."""
    return [
        jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            tuple(sizes[letter] for letter in letters),
            jnp.float32,
            sharding=NamedSharding(mesh, layout),
        )
        for letters, layout in zip(case.operands, case.specs, strict=True)
    ]


def temporary_mebibytes(
    function: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct]
) -> float:
    """Return the temporary memory of a function on each device, in MiB."""
    compiled = jax.jit(function, compiler_options=MEMORY_OPTIONS).lower(*operands).compile()
    report = compiled.memory_analysis()
    assert report is not None
    return float(report.temp_size_in_bytes) / 2**20


def value_and_gradients(function: MatmulFunction, operands: int) -> Callable[..., Any]:
    """Return a function of the sum of squares of a matmul and the gradients of all operands."""

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(function(*arrays) ** 2)

    return jax.value_and_grad(loss, argnums=tuple(range(operands)))


def print_memory() -> None:
    """Print the memory table."""
    print("Temporary memory on each device, MiB, forward / value and gradients")
    print("D, F = 2048, 4096, float32, a ring of n devices\n")
    columns = ("B", "n", "function", "collective", "one way", "both ways")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for rows, size in ((1024, 8), (1024, 4), (4096, 8), (4096, 4)):
        mesh = Mesh(np.array(jax.devices()[:size]), ("Y",))
        for case in map(without_x_axis, cases()):
            operands = operand_shapes(case, mesh, {"B": rows, "D": 2048, "F": 4096})
            variants = (
                case.collective,
                with_options(case.ring, direction="one"),
                with_options(case.ring, direction="both"),
            )
            mapped_variants = [mapped(case, mesh, variant) for variant in variants]
            cells = [
                f"{temporary_mebibytes(function, operands):.1f} / "
                f"{temporary_mebibytes(value_and_gradients(function, len(operands)), operands):.1f}"
                for function in mapped_variants
            ]
            print(f"| {rows} | {size} | {case.name} | " + " | ".join(cells) + " |", flush=True)


def median_seconds(functions: Sequence[Callable[[], jax.Array]], repeats: int) -> list[float]:
    """Return the median seconds of each function. The functions alternate."""
    samples: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function().block_until_ready()
    for _ in range(repeats):
        for durations, function in zip(samples, functions, strict=True):
            start = time.perf_counter()
            function().block_until_ready()
            durations.append(time.perf_counter() - start)
    return [statistics.median(durations) for durations in samples]


def print_times(fraction: int, repeats: int) -> None:
    """Print the time table."""
    sizes = {"B": 1024 // fraction, "D": 2048, "F": 8192}
    mesh = mesh_of(2, 4)
    print(f"Time relative to plain jit; B, D, F = {sizes['B']}, 2048, 8192, float32, 2x4 devices\n")
    columns = ("function", "plain jit, ms", "plain jit", "one way", "both ways")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for case in cases():
        rng = np.random.default_rng(0)
        operands = [
            jax.device_put(rng.normal(size=o.shape).astype(np.float32), o.sharding)
            for o in operand_shapes(case, mesh, sizes)
        ]
        plain = jax.jit(case.plain, out_shardings=NamedSharding(mesh, case.out))
        rings = [
            jax.jit(mapped(case, mesh, with_options(case.ring, direction=direction)))
            for direction in ("one", "both")
        ]
        runs = [partial(function, *operands) for function in (plain, *rings)]
        plain_seconds, *ring_seconds = median_seconds(runs, repeats)
        ratios = " | ".join(f"{duration / plain_seconds:.2f}" for duration in ring_seconds)
        print(f"| {case.name} | {plain_seconds * 1e3:.0f} | 1.00 | {ratios} |", flush=True)


def main() -> None:
    """Print the requested tables."""
    parser = argparse.ArgumentParser(description="Ring matmuls beside plain jit.")
    parser.add_argument("--memory", action="store_true", help="print the memory table only")
    parser.add_argument("--fraction", type=int, default=1, help="divide the rows B by this")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each variant")
    arguments = parser.parse_args()
    print_memory()
    if not arguments.memory:
        print()
        print_times(arguments.fraction, arguments.repeats)
        print("\n" + LIMITATIONS)


if __name__ == "__main__":
    main()
