"""Fused matmuls on emulated devices. JAX interprets their memory, copies and semaphores."""

# mypy: allow-untyped-calls

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from drumline.parallel import fused_allgather_matmul, fused_matmul_reducescatter

Mode = Literal["on_wait", "eager"]

ROWS, COLUMNS = 32, 128
"""The smallest sizes per device that a kernel accepts."""


class Fused(NamedTuple):
    """One of the functions, with the shardings and sizes of its operands and result."""

    function: Callable[..., jax.Array]
    x: P
    w: P
    out: P
    sizes: Callable[[int], tuple[int, int, int]]


GATHER = Fused(
    fused_allgather_matmul,
    P("Y", None),
    P(None, "Y"),
    P(None, "Y"),
    lambda n: (ROWS * n, 2 * COLUMNS, COLUMNS * n),
)
SCATTER = Fused(
    fused_matmul_reducescatter,
    P(None, "Y"),
    P("Y", None),
    P("Y", None),
    lambda n: (ROWS * n, COLUMNS * n, 2 * COLUMNS),
)


def interpreter(mode: Mode, cores: int = 1) -> Any:
    """Return parameters that copy as late as semaphores allow (`on_wait`) or as early (`eager`)."""
    return pltpu.InterpretParams(
        detect_races=True, dma_execution_mode=mode, num_cores_or_threads=cores
    )


def check_races() -> None:
    """Raise if the last kernels had a race. JAX keeps the verdict in a private module."""
    try:
        module = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
        races = module.races if hasattr(module, "races") else module.get_races()
    except (ImportError, AttributeError):
        pytest.skip("this JAX keeps the races that it finds elsewhere")
    if races is not None and races.races_found:
        raise RuntimeError("RACE DETECTED")


def ring_mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("Y",))


def sharded(fused: Fused, mesh: Mesh, **options: Any) -> Callable[..., jax.Array]:
    """Return the function on arrays that are sharded over the mesh axis Y."""
    return jax.jit(
        jax.shard_map(
            partial(fused.function, axis_name="Y", **options),
            mesh=mesh,
            in_specs=(fused.x, fused.w),
            out_specs=fused.out,
            check_vma=False,
        )
    )


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a compiled function of x, w and a cotangent: the result and both gradients."""

    def run(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, vjp_function = jax.vjp(function, x, w)
        return (out, *vjp_function(g))

    return jax.jit(run)


def operands(fused: Fused, devices: int, dtype: Any) -> tuple[Any, ...]:
    """Return x, w and a cotangent."""
    rows, inner, columns = fused.sizes(devices)
    rng = np.random.default_rng(devices)
    shapes = (rows, inner), (inner, columns), (rows, columns)
    return tuple(rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes)


def assert_close(actual: jax.Array, exact: np.ndarray[Any, Any]) -> None:
    """Assert the accuracy of float32 sums and one rounding to the result's type."""
    tolerance = 2.0**-8 if actual.dtype == jnp.bfloat16 else 2e-6
    error = np.max(np.abs(np.asarray(actual, np.float64) - exact)) / np.max(np.abs(exact))
    assert error < tolerance
