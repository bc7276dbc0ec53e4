"""The mesh of a run: the order of its devices.

On TPUs the order follows the links between the chips (`drumline.chips.torus`), so that a ring over
an axis has short hops. There are no such links between slices, and the first axes run across
slices. On other platforms JAX orders the devices.
"""

# mypy: allow-untyped-calls

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from drumline.chips import closes, mesh_order, wraps_of
from drumline.chips.catalogue import device_kind
from drumline.chips.torus import Core
from drumline.errors import UserError


def make_mesh(axes: Mapping[str, int]) -> Mesh:
    """Return a mesh of all devices. On a single host it may use only some of them."""
    devices, sizes = jax.devices(), dict(axes)
    text = " × ".join(f"{axis}={size}" for axis, size in axes.items()) or "no axes"
    for axis, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise UserError(f"mesh: {axis} is {size!r}; the size of an axis is a whole number")
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(
            f"mesh: {text}: the size of an axis is 1 or more, or -1 for all remaining devices"
        )
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    fixed = prod(size for size in sizes.values() if size != -1)
    if len(open_axes) > 1:
        raise UserError(f"mesh: {text}: only one axis can be -1")
    if open_axes:
        if len(devices) % fixed:
            raise UserError(f"mesh: {text}: {len(devices)} devices are not divisible by {fixed}")
        sizes[open_axes[0]] = len(devices) // fixed
    count = prod(sizes.values())
    if count > len(devices):
        raise UserError(f"mesh: {text} needs {count} devices and there are {len(devices)}")
    if count < len(devices) and jax.process_count() > 1:
        raise UserError(
            f"mesh: {text} leaves {len(devices) - count} of {len(devices)} devices idle, but with "
            "several hosts a mesh must use all devices; use -1 for one axis"
        )
    axis_types = (AxisType.Auto,) * len(sizes)
    shape, names = tuple(sizes.values()), tuple(sizes)
    tori = _find_tori(devices[:count], all_devices=count == len(devices)) if sizes else None
    if tori is not None:
        return Mesh(_order_devices(tori, sizes, text), names, axis_types)
    try:
        return jax.make_mesh(shape, names, axis_types, devices=devices[:count])
    except (NotImplementedError, AssertionError):  # JAX raises both for this.
        raise UserError(
            f"mesh: {text}: these {count} devices do not form a box of chips, and JAX cannot order "
            "them; use all devices, with -1 for one axis"
        ) from None


def is_ring(mesh: Mesh, axis: str) -> bool:
    """Return True if the last device of an axis is linked to the first as to its neighbor.

    If it is not, a ring over the axis that sends in both directions uses each link twice. Devices
    that are connected by a switch or by the data-center network are all equally far apart.
    """
    tori = _find_tori(list(mesh.devices.flat), all_devices=mesh.size == len(jax.devices()))
    if tori is None:
        return True
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    positions = {device.id: (torus, chip) for torus in tori for device, chip in torus.chips()}
    for line in lines.reshape(-1, lines.shape[-1]):
        first_torus, _ = positions[line[0].id]
        in_line = (positions[device.id] for device in line)
        chips = [chip for torus, chip in in_line if torus is first_torus]
        one_slice = len(chips) == len(line)
        if one_slice and not closes(chips, first_torus.sides, first_torus.wraps):
            return False
    return True


@dataclass(frozen=True, eq=False)
class _Torus:
    """The devices of a slice, or of a part of a slice that is a box."""

    devices: Mapping[Core, Any]
    sides: tuple[int, ...]
    wraps: tuple[bool, ...]
    cores: int

    def chips(self) -> Iterable[tuple[Any, tuple[int, ...]]]:
        """Yield each device with the coordinates of its chip."""
        return ((device, chip) for (chip, _), device in self.devices.items())


def _find_tori(devices: Sequence[Any], *, all_devices: bool) -> list[_Torus] | None:
    """Return the slices of the devices, in order, or None if they are not boxes of TPUs.

    A part of a slice is assumed to have no wrap-around links, as is the case within one host.
    """
    slices = defaultdict(list)
    for device in devices:
        if device.platform != "tpu" or getattr(device, "coords", None) is None:
            return None
        slices[getattr(device, "slice_index", None) or 0].append(device)
    candidates = [_make_torus(slices[index], all_devices=all_devices) for index in sorted(slices)]
    tori = [torus for torus in candidates if torus is not None]
    return tori if len(tori) == len(candidates) else None


def _make_torus(devices: Sequence[Any], *, all_devices: bool) -> _Torus | None:
    """Return the box of the devices of one slice, or None if they do not fill a box."""
    corner = tuple(min(values) for values in zip(*(d.coords for d in devices), strict=True))
    cores = sorted({device.core_on_chip for device in devices})
    by_core = {
        (
            tuple(int(value - low) for value, low in zip(device.coords, corner, strict=True)),
            cores.index(device.core_on_chip),
        ): device
        for device in devices
    }
    sides = tuple(1 + max(values) for values in zip(*(chip for chip, _ in by_core), strict=True))
    if not len(by_core) == len(devices) == prod(sides) * len(cores):
        return None
    kind = device_kind(devices[0].device_kind)
    wraps = wraps_of(kind.chip.name, sides) if all_devices and kind else (False,) * len(sides)
    return _Torus(by_core, sides, wraps, len(cores))


def _order_devices(tori: Sequence[_Torus], sizes: Mapping[str, int], text: str) -> np.ndarray:
    """Return the devices in the shape of the mesh."""
    slice_sizes = {len(torus.devices) for torus in tori}
    if len(slice_sizes) > 1:
        counts = " and ".join(str(count) for count in sorted(slice_sizes))
        raise UserError(
            f"mesh: {text}: the slices have {counts} devices; a mesh needs slices of one size"
        )
    across = _slices_per_axis(sizes, len(tori), text)
    inside = [size // slices for size, slices in zip(sizes.values(), across, strict=True)]
    devices = np.empty((len(tori), *slice_sizes), dtype=object)
    for row, torus in zip(devices, tori, strict=True):
        cores = mesh_order(torus.sides, torus.wraps, inside, torus.cores)
        row[:] = [torus.devices[core] for core in cores]
    # Every axis varies first over slices, then within a slice.
    order = [dimension for axis in range(len(sizes)) for dimension in (axis, len(sizes) + axis)]
    return devices.reshape(*across, *inside).transpose(order).reshape(tuple(sizes.values()))


def _slices_per_axis(sizes: Mapping[str, int], slices: int, text: str) -> list[int]:
    """Return the number of slices along each axis, as many as possible along the first."""
    counts, remaining = [], slices
    for axis, size in sizes.items():
        counts.append(gcd(size, remaining))
        remaining //= counts[-1]
        if remaining > 1 and counts[-1] < size:
            raise UserError(
                f"mesh: {text}: the first axes run across the {slices} slices, and {axis}={size} "
                f"is not divisible by {remaining * counts[-1]}; put an axis first that is"
            )
    return counts
