"""`feedforward`: the Transformer's two matmuls with the non-linearity between them, on rings.

The first multiplies while it gathers, the second while it scatters, so the activations enter and
leave sharded over the axis and every transfer has a multiplication beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import jax
from jax import lax
from jax.typing import DTypeLike

from drumline.parallel.axes import AxisName
from drumline.parallel.rings.gather import allgather_matmul
from drumline.parallel.rings.ring import Direction, Loop, check_choice
from drumline.parallel.rings.scatter import matmul_reducescatter

Layout = Literal["columns", "rows"]


def feedforward(
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    axis_name: AxisName,
    activation: Callable[[jax.Array], jax.Array],
    layout: Layout = "columns",
    direction: Direction = "both",
    loop: Loop = "auto",
    precision: lax.PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
) -> jax.Array:
    """`activation(x · w_in) · w_out` with overlapped transfers, for use inside `jax.shard_map`.

    With Y standing for `axis_name`:

    - `layout="columns"`: `In[..., D_Y] · W_in[D, F_Y] · W_out[F_Y, D] → Out[..., D_Y]`, the
      features of the activations sharded;
    - `layout="rows"`: `In[..., S_Y, D] · W_in[D, F_Y] · W_out[F_Y, D] → Out[..., S_Y, D]`, the
      sequence sharded, as sequence parallelism has it.

    The hidden activations `[..., F_Y]` are kept for the gradient, as in any tensor-parallel
    block; wrap the call in `jax.checkpoint` to compute them again instead.

    Args:
        x: this device's shard of the activations, with any number of leading dimensions.
        w_in: this device's columns of the first weights.
        w_out: this device's rows of the second weights.
        axis_name: the mesh axis (or axes) of the ring.
        activation: the non-linearity. It sees each device's own hidden columns, so it may mix
            them (a gate, say) but not assume to see all of them.
        layout: the dimension of the activations that is sharded.
        direction: `"both"` uses both directions of the ring's links, `"one"` sends everything one
            way.
        loop: `"rolled"` is a loop in the program, `"unrolled"` every step written out; `"auto"`
            rolls rings of more than two devices, which need less memory and compile time then, and
            on TPUs those of more than sixteen.
        precision: of each multiplication, as `jnp.matmul` takes it.
        wire_dtype: the type in which sums travel; None is that in which they are added, float32.
    """
    check_choice("feedforward", "layout", layout, get_args(Layout))
    hidden = allgather_matmul(
        x,
        w_in,
        axis_name=axis_name,
        gathered="contraction" if layout == "columns" else "rows",
        direction=direction,
        loop=loop,
        precision=precision,
        wire_dtype=wire_dtype,
    )
    return matmul_reducescatter(
        activation(hidden),
        w_out,
        axis_name=axis_name,
        scattered=layout,
        direction=direction,
        loop=loop,
        precision=precision,
        wire_dtype=wire_dtype,
    )
