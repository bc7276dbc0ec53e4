"""Arguments as a user writes them: `bf16[1024,2048]@X,Y`.

A type, the sizes of the dimensions, and behind an @ the mesh axes of each: `X`, `X+Y` for both,
`-` for none. Dimensions that are not told of are not sharded.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from drumline.errors import UserError
from drumline.inspect.compiling.axes import Axes, shown
from drumline.inspect.hlo.text import dtype_name

_WRITTEN = re.compile(r"\s*(?P<dtype>\w+)\[(?P<sizes>[\d,\s]*)\]\s*(?:@\s*(?P<axes>[\w,+\-\s]*))?")


def read_shapes(written: list[str], mesh: Axes | None) -> tuple[Any, ...]:
    """The arguments of a function.

    Raises:
        UserError: one is written otherwise, or names an axis that the mesh has not.
    """
    return tuple(_read(text, mesh) for text in written)


def _read(text: str, mesh: Axes | None) -> Any:
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise UserError(
            f"--shapes {text!r}: write it as TYPE[SIZES]@AXES, as in bf16[1024,2048]@X,Y"
        )
    sizes = tuple(int(size) for size in re.findall(r"\d+", found["sizes"]))
    try:
        dtype = jnp.dtype(dtype_name(found["dtype"]))
    except TypeError:
        raise UserError(f"--shapes {text!r}: {found['dtype']} is no type of arrays") from None
    spec = _spec(text, found["axes"] or "", mesh)
    if len(spec) > len(sizes):
        raise UserError(f"--shapes {text!r} names {len(spec)} axes for {len(sizes)} dimensions")
    struct: Any = jax.ShapeDtypeStruct
    return struct(sizes, dtype, sharding=spec) if mesh is not None else struct(sizes, dtype)


def _spec(text: str, axes: str, mesh: Axes | None) -> PartitionSpec:
    parts: list[Any] = []
    for part in axes.split(",") if axes.strip() else []:
        names = tuple(name.strip() for name in part.split("+") if name.strip() not in ("", "-"))
        for name in names:
            if mesh is None:
                raise UserError(
                    f"--shapes {text!r} names the axis {name}: give the mesh with --mesh"
                )
            if name not in mesh:
                raise UserError(f"--shapes {text!r}: the mesh {shown(mesh)} has no axis {name}")
        parts.append(names if len(names) > 1 else (names[0] if names else None))
    spec: Any = PartitionSpec
    return spec(*parts)  # type: ignore[no-any-return]
