"""Compare `drumline.inspect.estimate` with published measurements on TPUs.

    python benchmarks/inspect_published.py            all parts, one to two minutes on two cores
    python benchmarks/inspect_published.py steps      steps | chapter | anchors
    python benchmarks/inspect_published.py draw 'llama3.1-8b v6e-8' step.png

`steps`: training steps of AI-Hypercomputer/tpu-recipes (benchmarks/published), from v6e-8 to 512
chips, each as a plain JAX program. The only fitted constant, the fraction of the v6e peak that
large matmuls reach, is fitted on the two rows marked `fitted`. The other rows are held out.
`chapter`: 311, 244 (234.8 in its trace) and 224 µs from the chapter on programming TPUs in JAX. The
chapter does not name the chip, which must be a v2-8 by its figures. These rows are not used for
fitting. `anchors`: single measurements from the scaling book on v5e and v2. The benchmark does not
use a TPU or its compiler. The programs are compiled for emulated CPU devices.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.inspect import Estimate, estimate

FITTED = ("llama3.1-8b v6e-8", "llama3.1-8b v6e-64")


def steps() -> None:
    """Compare training steps."""
    from published import rows

    print(f"{'step':28}{'chips':>6}{'published':>11}{'predicted':>11}{'error':>7}  bound     took")
    errors = []
    for name, row in rows.ROWS.items():
        start = time.perf_counter()
        result = _estimate_step(row)
        error = result.seconds / row.seconds - 1
        errors += [] if name in FITTED else [abs(error)]
        duration = time.perf_counter() - start
        print(
            f"{name:28}{result.machine.chips:6}{row.seconds:9.2f} s{result.seconds:9.2f} s"
            f"{error:+7.0%}"
            f"  {result.bound:8}{duration:5.1f} s{'  fitted' if name in FITTED else ''}",
            flush=True,
        )
    summary = f"{len(errors)} rows held out"
    print(f"{summary}: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}\n")


def _estimate_step(row: Any) -> Estimate:
    from published import decoder

    fn, args = decoder.step(row.training, row.abstract_mesh())
    on = row.slice if row.slices == 1 else f"{row.slices}x{row.slice}"
    return estimate(jax.jit(fn, donate_argnums=0), *args, on=on, compiler="cpu")


def draw(name: str, file: str) -> None:
    """Draw the timeline of a step."""
    from published import rows

    _estimate_step(rows.ROWS[name]).save_png(file)


MESH = AbstractMesh((2, 4), ("X", "Y"), (AxisType.Explicit,) * 2)


def shape(*sizes: int, spec: Any = None, mesh: AbstractMesh = MESH, dtype: Any = jnp.int32) -> Any:
    """Return an argument. The default dtype is that of the chapter's `arange`."""
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec or P()))


def plain(a: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply as in the chapter, under jit alone."""
    return jnp.einsum("bd,df->bf", a, w, out_sharding=P("X", "Y"))


def ring(a: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply with the chapter's collective matmul."""
    devices, device = lax.axis_size("Y"), lax.axis_index("Y")
    width = a.shape[1]
    left = [(i, (i - 1) % devices) for i in range(devices)]
    zeros = jnp.zeros((a.shape[0], w.shape[1]), a.dtype)
    out: jax.Array = lax.pcast(zeros, ("X", "Y"), to="varying")
    for step in range(devices):
        owner = (device + step) % devices
        out += a @ lax.dynamic_slice_in_dim(w, owner * width, width)
        if step < devices - 1:
            a = lax.ppermute(a, "Y", left)
    return out


def chapter() -> None:
    """Compare three implementations of A[B_X, D_Y] · W[D, F_Y]."""
    sharded, local = shape(1024, 2048, spec=P("X", "Y")), shape(1024, 2048, spec=P("X", None))
    weights = shape(2048, 8192, spec=P(None, "Y"))
    mapped = jax.shard_map(
        ring, mesh=MESH, in_specs=(P("X", "Y"), P(None, "Y")), out_specs=P("X", "Y")
    )
    implementations: list[tuple[str, Callable[..., Any], Any, float]] = [
        ("blocking all-gather", plain, sharded, 311e-6),
        ("collective matmul", mapped, sharded, 244e-6),
        ("not sharded over Y", plain, local, 224e-6),
    ]
    print(f"{'the chapter, v2-8':32}{'published':>11}{'predicted':>11}{'error':>7}")
    for name, fn, a, published in implementations:
        _print_row(name, fn, (a, weights), MESH, "v2-8", published)
    print()


def anchors() -> None:
    """Compare single collectives and a matmul."""

    def gather(x: jax.Array) -> Any:
        return jax.sharding.reshard(x, P())

    print(f"{'single measurements':32}{'published':>11}{'predicted':>11}{'error':>7}")
    large = shape(2048, 8192, spec=P("Y"), dtype=jnp.bfloat16)
    small = shape(256, 256, spec=P("Y"), dtype=jnp.bfloat16)
    _print_row("v5e all-gather 34 MB over 4", gather, (large,), MESH, "v5litepod-8", 680e-6)
    _print_row("v5e all-gather 131 kB over 4", gather, (small,), MESH, "v5litepod-8", 8e-6)

    cores = AbstractMesh((4, 2), ("X", "Y"), (AxisType.Explicit,) * 2)
    a = shape(32 * 1024, 8192, spec=P("X"), mesh=cores, dtype=jnp.bfloat16)
    w = shape(8192, 32768, spec=P(None, "Y"), mesh=cores, dtype=jnp.bfloat16)
    _print_row("v2 product of 17.6 TFLOP", plain, (a, w), cores, "v2-8", 96e-3)
    scatter = jax.shard_map(
        lambda x: lax.psum_scatter(x, "Y", tiled=True),
        mesh=cores, in_specs=P("X"), out_specs=P(("X", "Y")), check_vma=False,
    )  # fmt: skip
    _print_row("v2 reduce-scatter 134 MB over 2", scatter, (a,), cores, "v2-8", 1.13e-3)
    print()


def _print_row(
    name: str, fn: Any, args: tuple[Any, ...], mesh: AbstractMesh, on: str, published: float
) -> None:
    result = estimate(fn, *args, on=on, mesh=mesh, compiler="cpu")
    error = result.seconds / published - 1
    print(
        f"{name:32}{published * 1e6:8.0f} µs{result.seconds * 1e6:8.0f} µs{error:+7.0%}", flush=True
    )


PARTS = {"chapter": chapter, "anchors": anchors, "steps": steps}

if __name__ == "__main__":
    if sys.argv[1:2] == ["draw"]:
        draw(*sys.argv[2:])
    else:
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
