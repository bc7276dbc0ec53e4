"""What a caller can choose. Without Pallas, which takes a while to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
    """The arguments of a fused product beside its arrays, and the function to name in refusals."""

    caller: str
    axis_name: AxisName
    direction: Direction
    precision: lax.PrecisionLike
    wire_dtype: DTypeLike | None
    vmem_bytes: int | None
    cores: int | None
    interpret: Interpret

    def __post_init__(self) -> None:
        """Refuse what no kernel can be built with, emulated or not."""
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
