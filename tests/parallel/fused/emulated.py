"""Fused products on emulated devices, whose memory, copies and semaphores JAX interprets."""

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
"""Of each device: the fewest that a kernel takes."""


class Fused(NamedTuple):
    """One of the functions, how its operands and its result are sharded, and their sizes."""

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
    """How to emulate: `on_wait` copies as late as semaphores allow, `eager` as early."""
    return pltpu.InterpretParams(
        detect_races=True, dma_execution_mode=mode, num_cores_or_threads=cores
    )


def check_races() -> None:
    """Raise if the last kernels had a race. JAX keeps the verdict where its users do not look."""
    try:
        module = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
        races = module.races if hasattr(module, "races") else module.get_races()
    except (ImportError, AttributeError):
        pytest.skip("this JAX keeps the races that it finds elsewhere")
    if races is not None and races.races_found:
        raise RuntimeError("RACE DETECTED")


def ring_mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("Y",))


def mapped(fused: Fused, mesh: Mesh, **options: Any) -> Callable[..., jax.Array]:
    """The function on arrays that the mesh's axis Y divides."""
    return jax.jit(
        jax.shard_map(
            partial(fused.function, axis_name="Y", **options),
            mesh=mesh,
            in_specs=(fused.x, fused.w),
            out_specs=fused.out,
            check_vma=False,
        )
    )


def operands(fused: Fused, devices: int, dtype: Any) -> tuple[jax.Array, ...]:
    """x, w and a cotangent."""
    rows, depth, columns = fused.sizes(devices)
    rng = np.random.default_rng(devices)
    shapes = (rows, depth), (depth, columns), (rows, columns)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def assert_close(actual: jax.Array, exact: np.ndarray[Any, Any]) -> None:
    """As exact as one rounding to the result's type, and sums in float32, can be."""
    allowed = 2.0**-8 if actual.dtype == jnp.bfloat16 else 2e-6
    error = np.max(np.abs(np.asarray(actual, np.float64) - exact)) / np.max(np.abs(exact))
    assert error < allowed
