"""The fused products with their gradients, and what they refuse.

Each is the other's gradient. For x that is exact: the gradient of a gather is a scatter with w's
other dimension contracted, and the reverse. The weights' gradients need the gathered array, and
get it in the way that moves and keeps least:

- The scatter's dx gathers g anyway, and every chunk of it lands in HBM anyway: they stay where they
  land, and dw is one product of the whole. Summed as the chunks pass, dw would be read and written
  in float32 in every step, and its sum takes as much memory as the chunks (`4·F/n` bytes of each of
  D columns, against `2·B`).
- The gather's dx gathers nothing, so x's chunks travel once more, beside the products of dw: after
  a gather without products they would have nothing to hide behind, and kept from the forward pass
  they would take their memory from there on.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from drumline.parallel.axes import devices_along, is_checked, vary_alike
from drumline.parallel.fused.functions import Options
from drumline.parallel.fused.kernels import gather_outer, gather_product, scatter_product
from drumline.parallel.fused.plans import LANES, KernelPlan, sublanes
from drumline.parallel.fused.ring import Tour
from drumline.parallel.rings.local import check_contraction, check_divides, check_weight
from drumline.parallel.rings.ring import Direction, check_choice
from drumline.parallel.transforms import once_only, reverse_only

_ONCE = "its backward pass is a kernel; the ring functions have one"


def gather_rows(x: jax.Array, w: jax.Array, options: Options) -> jax.Array:
    """x[B_Y, D] · w[D, F_Y] → [B, F_Y]."""
    plan = _plan(options)
    _check(plan, x, w)
    _check_tiles(plan, x.shape[0], x, w)
    x, w = reverse_only(options.caller, *vary_alike(options.axis_name, x, w))
    if plan.tour.size == 1:
        return _alone(plan, x, w)
    return _gather(_on_chip(plan, options), x, w)


def scatter_rows(x: jax.Array, w: jax.Array, options: Options) -> jax.Array:
    """x[B, F_Y] · w[F_Y, D] → [B_Y, D]."""
    plan = _plan(options)
    _check(plan, x, w)
    check_divides(options.caller, "rows of x", x.shape[0], plan.tour)
    size = plan.tour.size
    _check_tiles(plan, x.shape[0] // size, x, w)
    x, w = reverse_only(options.caller, *vary_alike(options.axis_name, x, w))
    return _alone(plan, x, w) if size == 1 else _scatter(_on_chip(plan, options), x, w)


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
    tour = Tour(axis_name, size, options.direction, mesh)
    return KernelPlan(caller, tour, options.precision, wire, None, options.interpret)


def _on_chip(plan: KernelPlan, options: Options) -> KernelPlan:
    """The plan with what the TPU has, of this process or of the mesh that is compiled for.

    Half of its VMEM: the rest stays with what XLA keeps there from one operation to the next.
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
    tour = replace(plan.tour, cores=options.cores or int(chip.num_cores))
    return replace(plan, tour=tour, vmem=vmem)


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
    """Refuse what does not fill tiles: a kernel's copies and blocks are made of whole ones."""
    if plan.tour.size == 1:
        return
    # Halves of a chunk of sums, in whichever type they travel.
    tile = 2 * max(sublanes(x.dtype.itemsize), sublanes(plan.wire_dtype.itemsize))
    for what, length, unit in (
        ("rows of each device's share", rows, tile),
        ("columns of x on each device", x.shape[1], LANES),
        ("columns of w on each device", w.shape[1], LANES),
    ):
        if length == 0 or length % unit:
            raise ValueError(
                f"{plan.caller}: the {length} {what} are not a multiple of {unit}, which the "
                "kernel's tiles take; pad them, or use the ring functions, which take any"
            )


def _alone(plan: KernelPlan, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, precision=plan.precision)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(plan: KernelPlan, x: jax.Array, w: jax.Array) -> jax.Array:
    return gather_product(plan, x, w)[0]


def _gather_forward(
    plan: KernelPlan, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _gather(plan, x, w), (x, w)


def _gather_backward(
    plan: KernelPlan, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    g = once_only(plan.caller, g, why=_ONCE)
    return scatter_product(plan, g, w, along=1), gather_outer(plan, x, g)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter(plan: KernelPlan, x: jax.Array, w: jax.Array) -> jax.Array:
    return scatter_product(plan, x, w)


def _scatter_forward(
    plan: KernelPlan, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _scatter(plan, x, w), (x, w)


def _scatter_backward(
    plan: KernelPlan, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    g = once_only(plan.caller, g, why=_ONCE)
    dx, gathered = gather_product(plan, g, w, along=1, keep=True)
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
