"""What a caller can choose. Without Pallas, which takes a while to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from drumline.parallel.axes import AxisName
from drumline.parallel.rings.ring import Direction

if TYPE_CHECKING:
    from jax.experimental.pallas import tpu as pltpu

    Interpret = bool | pltpu.InterpretParams
else:
    Interpret = Any


@dataclass(frozen=True)
class Options:
    """The arguments of a fused product beside its arrays, and the function to name in refusals."""

    caller: str
    axis_name: AxisName
    direction: Direction
    precision: lax.PrecisionLike
    wire_dtype: jax.typing.DTypeLike
    vmem_bytes: int | None
    cores: int | None
    interpret: Interpret
