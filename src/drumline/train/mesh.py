"""The mesh of a run: which device has which place in it.

On TPUs the places follow the links between the chips (`drumline.chips.torus`), so that a ring over
an axis has short hops; between slices there are no such links, and the first axes run across them.
Elsewhere JAX orders the devices.
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

from drumline.chips import closes as is_circle
from drumline.chips import mesh_order, wraps_of
from drumline.chips.catalogue import device_kind
from drumline.chips.torus import Core
from drumline.train.mistakes import Mistake


def make_mesh(axes: Mapping[str, int]) -> Mesh:
    """The mesh over all devices, or over the first ones where a single host has more."""
    devices, sizes = jax.devices(), dict(axes)
    told = " × ".join(f"{axis}={size}" for axis, size in axes.items()) or "no axes"
    for axis, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise Mistake(f"mesh: {axis} is {size!r}; the size of an axis is a whole number")
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
    tori = _tori(devices[:needed], whole=needed == len(devices)) if sizes else None
    if tori is not None:
        return Mesh(_laid(tori, sizes, told), names, automatic)
    try:
        return jax.make_mesh(shape, names, automatic, devices=devices[:needed])
    except (NotImplementedError, AssertionError):  # both are JAX's words for it
        raise Mistake(
            f"mesh: {told}: these {needed} devices fill no box of chips, and JAX finds no order of "
            "them; use all devices, with -1 for one axis"
        ) from None


def closes(mesh: Mesh, axis: str) -> bool:
    """Whether a ring over an axis is a circle on the links: its closing hop is like the others.

    Where it is not, the axis is a snake: a ring that sends both ways takes each link twice. Devices
    that a switch or the data-centre network joins are all equally far from each other.
    """
    tori = _tori(list(mesh.devices.flat), whole=mesh.size == len(jax.devices()))
    if tori is None:
        return True
    along = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    at = {device.id: (torus, chip) for torus in tori for device, chip in torus.chips()}
    for line in along.reshape(-1, along.shape[-1]):
        torus, _ = at[line[0].id]
        chips = [chip for home, chip in (at[device.id] for device in line) if home is torus]
        if len(chips) == len(line) and not is_circle(chips, torus.sides, torus.wraps):
            return False
    return True


@dataclass(frozen=True, eq=False)
class _Torus:
    """The devices of a slice, or of a part of it that is a box."""

    devices: Mapping[Core, Any]
    sides: tuple[int, ...]
    wraps: tuple[bool, ...]
    cores: int

    def chips(self) -> Iterable[tuple[Any, tuple[int, ...]]]:
        """Each device with the place of its chip."""
        return ((device, chip) for (chip, _), device in self.devices.items())


def _tori(devices: Sequence[Any], *, whole: bool) -> list[_Torus] | None:
    """The slices that the devices are of, in their order; None where they are no boxes of TPUs.

    Part of a slice is taken to have no links from end to end, which is true of any single host.
    """
    slices = defaultdict(list)
    for device in devices:
        if device.platform != "tpu" or getattr(device, "coords", None) is None:
            return None
        slices[getattr(device, "slice_index", None) or 0].append(device)
    found = [_torus(slices[number], whole=whole) for number in sorted(slices)]
    tori = [torus for torus in found if torus is not None]
    return tori if len(tori) == len(found) else None


def _torus(devices: Sequence[Any], *, whole: bool) -> _Torus | None:
    """The box that the devices of a slice fill; None where they fill none."""
    corner = tuple(min(along) for along in zip(*(d.coords for d in devices), strict=True))
    cores = sorted({device.core_on_chip for device in devices})
    placed = {
        (
            tuple(int(at - low) for at, low in zip(device.coords, corner, strict=True)),
            cores.index(device.core_on_chip),
        ): device
        for device in devices
    }
    sides = tuple(1 + max(along) for along in zip(*(chip for chip, _ in placed), strict=True))
    if not len(placed) == len(devices) == prod(sides) * len(cores):
        return None
    known = device_kind(devices[0].device_kind)
    wraps = wraps_of(known.chip.name, sides) if whole and known else (False,) * len(sides)
    return _Torus(placed, sides, wraps, len(cores))


def _laid(tori: Sequence[_Torus], sizes: Mapping[str, int], told: str) -> np.ndarray:
    """The devices, each at its place in the mesh."""
    each = {len(torus.devices) for torus in tori}
    if len(each) > 1:
        unlike = " and ".join(str(number) for number in sorted(each))
        raise Mistake(
            f"mesh: {told}: the slices have {unlike} devices; a mesh needs slices of one size"
        )
    across = _across(sizes, len(tori), told)
    inside = [size // over for size, over in zip(sizes.values(), across, strict=True)]
    laid = np.empty((len(tori), *each), dtype=object)
    for row, torus in zip(laid, tori, strict=True):
        places = mesh_order(torus.sides, torus.wraps, inside, torus.cores)
        row[:] = [torus.devices[core] for core in places]
    # Each axis first by slice, then within one.
    order = [part for axis in range(len(sizes)) for part in (axis, len(sizes) + axis)]
    return laid.reshape(*across, *inside).transpose(order).reshape(tuple(sizes.values()))


def _across(sizes: Mapping[str, int], slices: int, told: str) -> list[int]:
    """How many slices each axis runs across: the first as many as it can, then the next."""
    across, left = [], slices
    for axis, size in sizes.items():
        across.append(gcd(size, left))
        left //= across[-1]
        if left > 1 and across[-1] < size:
            raise Mistake(
                f"mesh: {told}: the first axes run across the {slices} slices, and {axis}={size} "
                f"does not divide by {left * across[-1]}; put an axis first that does"
            )
    return across
