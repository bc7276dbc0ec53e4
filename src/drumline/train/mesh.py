"""The mesh of a run: which device has which place in it."""

# mypy: allow-untyped-calls

from collections.abc import Mapping
from math import prod

import jax
from jax.sharding import AxisType, Mesh

from drumline.train.mistakes import Mistake


def make_mesh(axes: Mapping[str, int]) -> Mesh:
    """The mesh over all devices, or over the first ones where a single host has more."""
    devices, sizes = jax.devices(), dict(axes)
    told = " × ".join(f"{axis}={size}" for axis, size in axes.items()) or "no axes"
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise Mistake(f"mesh: {told}: the size of an axis is 1 or more, or -1 for what is left")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    given = prod(size for size in sizes.values() if size != -1)
    if len(open_axes) > 1:
        raise Mistake(f"mesh: {told}: only one axis can be -1")
    if open_axes:
        if len(devices) % given:
            raise Mistake(f"mesh: {told}: {len(devices)} devices do not divide by {given}")
        sizes[open_axes[0]] = len(devices) // given
    needed = prod(sizes.values())
    if needed > len(devices):
        raise Mistake(f"mesh: {told} needs {needed} devices and there are {len(devices)}")
    if needed < len(devices) and jax.process_count() > 1:
        raise Mistake(
            f"mesh: {told} leaves {len(devices) - needed} of {len(devices)} devices idle, and with "
            "several hosts all must take part; use -1 for one axis"
        )
    automatic = (AxisType.Auto,) * len(sizes)
    shape, names = tuple(sizes.values()), tuple(sizes)
    return jax.make_mesh(shape, names, automatic, devices=devices[:needed])
