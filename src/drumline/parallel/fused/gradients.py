"""The fused matmuls with their gradients and checks.

The gradient of a gather with respect to x is a scatter that contracts the other dimension of w, and
the reverse. The weight gradients need the gathered array:

- The gradient of the scatter gathers g for dx. The chunks stay in HBM, and dw is a single matmul of
  the gathered g. A sum over the chunks as they arrive would read and write dw in float32 in every
  step, and would use as much memory as the chunks (`4·F/n` bytes for each of D columns, and the
  chunks `2·B`).
- The gradient of the gather needs no gather for dx. It gathers x again, overlapped with the matmuls
  of dw. Saved from the forward pass, the gathered x would occupy memory until then.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from drumline.parallel.axes import devices_along, is_checked, match_varying_on
from drumline.parallel.fused.functions import Options
from drumline.parallel.fused.kernels import gather_matmul, gather_outer, scatter_matmul
from drumline.parallel.fused.plans import LANES, KernelPlan, sublanes
from drumline.parallel.fused.ring import KernelRing
from drumline.parallel.rings.local import check_contraction, check_divides, check_weight
from drumline.parallel.rings.ring import Direction, check_choice
from drumline.parallel.transforms import once_only, reverse_only

_ONCE = "its backward pass is a kernel; the ring functions have one"


def gather_rows(x: jax.Array, w: jax.Array, options: Options) -> jax.Array:
    """Compute x[B_Y, D] · w[D, F_Y] → [B, F_Y]."""
    plan = _plan(options)
    _check(plan, x, w)
    _check_tiles(plan, x.shape[0], x, w)
    x, w = reverse_only(options.caller, *match_varying_on(options.axis_name, x, w))
    if plan.ring.size == 1:
        return _local_matmul(plan, x, w)
    return _gather(_with_tpu_limits(plan, options), x, w)


def scatter_rows(x: jax.Array, w: jax.Array, options: Options) -> jax.Array:
    """Compute x[B, F_Y] · w[F_Y, D] → [B_Y, D]."""
    plan = _plan(options)
    _check(plan, x, w)
    check_divides(options.caller, "rows of x", x.shape[0], plan.ring)
    size = plan.ring.size
    _check_tiles(plan, x.shape[0] // size, x, w)
    x, w = reverse_only(options.caller, *match_varying_on(options.axis_name, x, w))
    return (
        _local_matmul(plan, x, w) if size == 1 else _scatter(_with_tpu_limits(plan, options), x, w)
    )


def _plan(options: Options) -> KernelPlan:
    caller, axis_name = options.caller, options.axis_name
    check_choice(caller, "direction", options.direction, get_args(Direction))
    wire = jnp.dtype(options.wire_dtype or jnp.float32)
    check_choice(caller, "wire_dtype", wire.name, ("float32", "bfloat16"))
    size = devices_along(caller, axis_name)
    if options.interpret and is_checked(axis_name):
        raise ValueError(
            f"{caller}: JAX emulates kernels only where it does not check which axes values vary "
            "over; call jax.shard_map with check_vma=False, or leave interpret out, on a TPU"
        )
    mesh = tuple(jax.sharding.get_abstract_mesh().axis_names)
    ring = KernelRing(axis_name, size, options.direction, mesh)
    return KernelPlan(caller, ring, options.precision, wire, None, options.interpret)


def _with_tpu_limits(plan: KernelPlan, options: Options) -> KernelPlan:
    """Return the plan with the limits of the TPU, of this process or of the mesh compiled for.

    It uses half of the VMEM. XLA uses the rest for data between operations.
    """
    try:
        chip = pltpu.get_tpu_info()
    except ValueError:
        if not plan.interpret:
            raise ValueError(
                f"{plan.caller}: there is no TPU here; emulate one with "
                "interpret=pltpu.InterpretParams(), use the ring functions, or, to compile for "
                "one, name it in the mesh: AbstractMesh(..., abstract_device="
                "jax.sharding.AbstractDevice('TPU v5 lite', 1, 'tpu'))"
            ) from None
        return plan
    vmem = options.vmem_bytes or int(chip.vmem_capacity_bytes) // 2
    ring = replace(plan.ring, cores=options.cores or int(chip.num_cores))
    return replace(plan, ring=ring, vmem=vmem)


def _check(plan: KernelPlan, x: jax.Array, w: jax.Array) -> None:
    caller = plan.caller
    check_weight(caller, x, w)
    if x.ndim != 2:
        raise ValueError(
            f"{caller}: x must be a matrix [rows, columns], but its shape is {x.shape}; "
            "reshape it, or use the ring functions"
        )
    check_contraction(caller, x, w)
    if x.dtype != w.dtype or x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"{caller}: x and w must both be float32 or both bfloat16, not {x.dtype} and "
            f"{w.dtype}; cast them, or use the ring functions"
        )


def _check_tiles(plan: KernelPlan, rows: int, x: jax.Array, w: jax.Array) -> None:
    """Raise ValueError for shapes that do not consist of full tiles."""
    if plan.ring.size == 1:
        return
    # Chunks of sums are split in half, in the wire dtype.
    tile = 2 * max(sublanes(x.dtype.itemsize), sublanes(plan.wire_dtype.itemsize))
    for dimension, length, unit in (
        ("rows of each device's share", rows, tile),
        ("columns of x on each device", x.shape[1], LANES),
        ("columns of w on each device", w.shape[1], LANES),
    ):
        if length == 0 or length % unit:
            raise ValueError(
                f"{plan.caller}: the {length} {dimension} are not a multiple of {unit}, which the "
                "kernel's tiles take; pad them, or use the ring functions, which take any"
            )


def _local_matmul(plan: KernelPlan, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, precision=plan.precision)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(plan: KernelPlan, x: jax.Array, w: jax.Array) -> jax.Array:
    return gather_matmul(plan, x, w)[0]


def _gather_forward(
    plan: KernelPlan, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _gather(plan, x, w), (x, w)


def _gather_backward(
    plan: KernelPlan, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    g = once_only(plan.caller, g, reason=_ONCE)
    return scatter_matmul(plan, g, w, w_dim=1), gather_outer(plan, x, g)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter(plan: KernelPlan, x: jax.Array, w: jax.Array) -> jax.Array:
    return scatter_matmul(plan, x, w)


def _scatter_forward(
    plan: KernelPlan, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _scatter(plan, x, w), (x, w)


def _scatter_backward(
    plan: KernelPlan, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    g = once_only(plan.caller, g, reason=_ONCE)
    dx, gathered = gather_matmul(plan, g, w, w_dim=1, keep=True)
    dw = lax.dot_general(
        x,
        gathered,
        (((0,), (0,)), ((), ())),
        precision=plan.precision,
        preferred_element_type=w.dtype,
    )
    return dx, dw


_gather.defvjp(_gather_forward, _gather_backward)
_scatter.defvjp(_scatter_forward, _scatter_backward)
