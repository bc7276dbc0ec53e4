"""Parse and format the axes of a mesh, such as `X=2,Y=4`.

This module does not import JAX, because the command line sets XLA's flags first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, SupportsIndex

from drumline.errors import UserError

MeshAxes = dict[str, int]
"""The names and sizes of mesh axes, in the order in which devices are numbered."""


def parse_mesh(text: str) -> MeshAxes:
    """Parse `X=2,Y=4`.

    Raises:
        UserError: the text is malformed, repeats an axis, or has a size below 1.
    """
    axes: MeshAxes = {}
    for axis_text in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d{1,9})\s*", axis_text)
        if match is None:
            raise UserError(f"the mesh {text!r}: write each axis as NAME=SIZE, such as X=2,Y=4")
        if match[1] in axes:
            raise UserError(f"the mesh {text!r} names the axis {match[1]} twice")
        axes[match[1]] = int(match[2])
    return checked_axes(axes)


def checked_axes(axes: Mapping[Any, Any]) -> MeshAxes:
    """Check that every axis has a name and a size, and return the axes.

    Raises:
        UserError: a name or a size is invalid.
    """
    for name, size in axes.items():
        is_integer = isinstance(size, SupportsIndex) and not isinstance(size, bool)
        if not isinstance(name, str) or not is_integer or size < 1:
            raise UserError(
                f"the mesh axis {name!r} has the size {size!r}; it must be an integer of 1 or more"
            )
    return {name: int(size) for name, size in axes.items()}


def format_mesh(axes: MeshAxes) -> str:
    """Format axes as `X=2,Y=4`."""
    return ",".join(f"{name}={size}" for name, size in axes.items())
