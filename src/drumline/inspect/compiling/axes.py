"""The axes of a mesh as a user writes them, `X=2,Y=4`. Without JAX, which may not run yet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, SupportsIndex

from drumline.errors import UserError

Axes = dict[str, int]
"""Names and sizes, in the order in which devices are numbered."""


def read_mesh(text: str) -> Axes:
    """The axes of `X=2,Y=4`.

    Raises:
        UserError: it is written otherwise, names an axis twice, or has a size below 1.
    """
    axes: Axes = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d{1,9})\s*", part)
        if found is None:
            raise UserError(f"the mesh {text!r}: write each axis as NAME=SIZE, such as X=2,Y=4")
        if found[1] in axes:
            raise UserError(f"the mesh {text!r} names the axis {found[1]} twice")
        axes[found[1]] = int(found[2])
    return checked(axes)


def checked(axes: Mapping[Any, Any]) -> Axes:
    """The axes, if each has a name and a size.

    Raises:
        UserError: one has not.
    """
    for name, size in axes.items():
        whole = isinstance(size, SupportsIndex) and not isinstance(size, bool)
        if not isinstance(name, str) or not whole or size < 1:
            raise UserError(
                f"the mesh axis {name!r} has the size {size!r}; it must be a number from 1 on"
            )
    return {name: int(size) for name, size in axes.items()}


def shown(axes: Axes) -> str:
    """As a user writes it: `X=2,Y=4`."""
    return ",".join(f"{name}={size}" for name, size in axes.items())
