"""`fused_allgather_matmul` and `fused_matmul_reducescatter`: a ring and its matmuls in one kernel.

The kernel starts the copies, multiplies, and waits for the copies itself, so the overlap does not
depend on the compiler's scheduler. It supports fewer shapes than the ring functions.

This module does not import Pallas, which takes a fifth of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax import lax
from jax.typing import DTypeLike

from drumline.parallel.axes import AxisName
from drumline.parallel.rings.ring import Direction, check_wire_dtype

if TYPE_CHECKING:
    from jax.experimental.pallas import tpu as pltpu

    Interpret = Literal[False] | pltpu.InterpretParams
else:
    Interpret = Any


@dataclass(frozen=True)
class Options:
    """The options of a fused matmul, and the name of the calling function for messages."""

    caller: str
    axis_name: AxisName
    direction: Direction
    precision: lax.PrecisionLike
    wire_dtype: DTypeLike | None
    vmem_bytes: int | None
    cores: int | None
    interpret: Interpret

    def __post_init__(self) -> None:
        """Raise ValueError for options that no kernel supports."""
        check_wire_dtype(self.caller, self.wire_dtype)
        if self.interpret and isinstance(self.interpret, bool | str | int):
            raise ValueError(
                f"{self.caller}: interpret is {self.interpret!r}; give pltpu.InterpretParams(), "
                "which emulates a TPU's memories and copies, or leave it out"
            )
        if self.cores not in (None, 1, 2):
            raise ValueError(f"{self.caller}: cores is {self.cores!r}; a chip has 1 or 2")
        vmem = self.vmem_bytes
        if vmem is not None and (not isinstance(vmem, int) or vmem < 1):
            raise ValueError(
                f"{self.caller}: vmem_bytes is {vmem!r}; it is a number of bytes, or None"
            )


def fused_allgather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    direction: Direction = "both",
    precision: lax.PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
    vmem_bytes: int | None = None,
    cores: int | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Multiply an array whose rows are sharded over a mesh axis, in one TPU kernel.

    `A[B_Y, D] · W[D, F_Y] → Out[B, F_Y]` with Y for `axis_name`; for use inside `jax.shard_map`.
    The same as `allgather_matmul(..., gathered="rows")`.

    Args:
        x: this device's rows.
        w: this device's columns of the weights.
        axis_name: the mesh axis (or axes) of the ring.
        direction: the directions of the copies, `"both"` or `"one"`.
        precision: the precision of the matmuls, as for `jnp.matmul`.
        wire_dtype: the type in which the sums of x's gradient are sent: float32 or bfloat16; None
            is the type of the sums, float32.
        vmem_bytes: the bytes of each core's VMEM to use; by default half of it.
        cores: the number of TensorCores to use; by default all: two on v4 and v5p.
        interpret: `pltpu.InterpretParams()` emulates the TPU on other devices, slowly.
    """
    options = Options(
        "fused_allgather_matmul",
        axis_name,
        direction,
        precision,
        wire_dtype,
        vmem_bytes,
        cores,
        interpret,
    )
    result: jax.Array = _gradients().gather_rows(x, w, options)
    return result


def fused_matmul_reducescatter(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: AxisName,
    direction: Direction = "both",
    precision: lax.PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
    vmem_bytes: int | None = None,
    cores: int | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Multiply by row-sharded weights and scatter the rows of the sum, in one TPU kernel.

    `Tmp[B, F_Y] · W[F_Y, D] → Out[B_Y, D]` with Y for `axis_name`; for use inside `jax.shard_map`.
    The same as `matmul_reducescatter(..., scattered="rows")`.

    Args:
        x: this device's columns.
        w: this device's rows of the weights.
        axis_name: the mesh axis (or axes) of the ring.
        direction: the directions of the copies, `"both"` or `"one"`.
        precision: the precision of the matmuls, as for `jnp.matmul`.
        wire_dtype: the type in which sums are sent: float32, or bfloat16, which halves the bytes
            and rounds at every hop; None is the type of the sums, float32.
        vmem_bytes: the bytes of each core's VMEM to use; by default half of it.
        cores: the number of TensorCores to use; by default all: two on v4 and v5p.
        interpret: `pltpu.InterpretParams()` emulates the TPU on other devices, slowly.
    """
    options = Options(
        "fused_matmul_reducescatter",
        axis_name,
        direction,
        precision,
        wire_dtype,
        vmem_bytes,
        cores,
        interpret,
    )
    result: jax.Array = _gradients().scatter_rows(x, w, options)
    return result


def _gradients() -> ModuleType:
    """Import the kernels on the first call."""
    from drumline.parallel.fused import gradients

    return gradients
