"""The order of devices in meshes over simulated TPUs."""

from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any

import jax
import numpy as np
import pytest

import drumline.train
from drumline.chips import Slice, links, slice_of, slices
from drumline.errors import UserError
from drumline.train.mesh import is_ring, make_mesh

KINDS = {
    "v2": "TPU v2",
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
}


@dataclass(frozen=True)
class Device:
    """A TPU as JAX shows it."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int = 0
    slice_index: int | None = None
    device_kind: str = "TPU v5 lite"
    platform: str = "tpu"
    process_index: int = 0


def simulated_devices(tpu_slice: Slice, *, cores: int = 1, slices: int = 1) -> list[Device]:
    """Return the devices of slices, numbered like JAX by core, then x, y, z."""
    dimensions = (*tpu_slice.topology, 1)[:3]
    coordinates = product(
        range(slices), *(range(side) for side in reversed(dimensions)), range(cores)
    )
    kind = KINDS[tpu_slice.generation]
    return [
        Device(index, tuple(reversed(chip)), core, slice_index if slices > 1 else None, kind)
        for index, (slice_index, *chip, core) in enumerate(coordinates)
    ]


@pytest.fixture
def use_devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces the devices of JAX."""

    def set_devices(devices: list[Device], hosts: int = 1) -> None:
        monkeypatch.setattr(jax, "devices", lambda: devices)
        monkeypatch.setattr(jax, "process_count", lambda: hosts)

    return set_devices


def ring_distances(tpu_slice: Slice, line: Any) -> list[int]:
    dimensions, wraps = (*tpu_slice.topology, 1)[:3], (*tpu_slice.wraps, False)[:3]
    return [links(a.coords, b.coords, dimensions, wraps) for a, b in pairwise([*line, line[0]])]


@pytest.mark.parametrize(
    "name",
    [
        tpu_slice.name
        for tpu_slice in slices()
        if 2 < tpu_slice.chips <= 64 and tpu_slice.generation in KINDS
    ],
)
def test_a_ring_over_a_whole_slice_has_hops_of_one_link(name: str, use_devices: Any) -> None:
    tpu_slice = slice_of(name)
    use_devices(simulated_devices(tpu_slice))
    mesh = make_mesh({"data": 1, "model": -1})
    assert set(ring_distances(tpu_slice, mesh.devices[0])) == {1}
    assert is_ring(mesh, "model")
    assert is_ring(mesh, "data")


def test_an_axis_that_jax_does_not_support_is_a_ring_too(use_devices: Any) -> None:
    tpu_slice = slice_of("v6e-64")
    use_devices(simulated_devices(tpu_slice))
    mesh = make_mesh({"data": -1, "model": 4})
    assert dict(mesh.shape) == {"data": 16, "model": 4}
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 2
    assert {device.id for device in mesh.devices.flat} == set(range(64))
    for line in mesh.devices:
        assert ring_distances(tpu_slice, line) == [1, 1, 1, 1]
    assert is_ring(mesh, "model")


def test_an_axis_that_is_not_a_ring_is_recognised(use_devices: Any) -> None:
    use_devices(simulated_devices(slice_of("v5litepod-8")))
    mesh = make_mesh({"data": 4, "model": 2})
    assert is_ring(mesh, "model")
    assert not is_ring(mesh, "data")
    assert is_ring(make_mesh({"data": 2, "model": 4}), "model")


def test_two_cores_of_a_chip_are_neighbours(use_devices: Any) -> None:
    tpu_slice = slice_of("v2-8")
    use_devices(simulated_devices(tpu_slice, cores=2))
    mesh = make_mesh({"model": 8})
    assert ring_distances(tpu_slice, mesh.devices) == [0, 1] * 4
    assert [device.core_on_chip for device in mesh.devices] == [0, 1] * 4
    assert is_ring(mesh, "model")


def test_wrap_around_links_are_used(use_devices: Any) -> None:
    tpu_slice = slice_of("v5p-128")
    use_devices(simulated_devices(tpu_slice), hosts=16)
    mesh = make_mesh({"data": 16, "model": 4})
    for line in [*mesh.devices, *mesh.devices.T]:
        assert set(ring_distances(tpu_slice, line)) == {1}
    ends = zip(mesh.devices[:, 0], mesh.devices[:, -1], strict=True)
    assert any(3 in np.abs(np.subtract(a.coords, b.coords)) for a, b in ends)


def test_an_unknown_kind_has_no_wrap_around_links(use_devices: Any) -> None:
    tpu_slice = slice_of("v5p-128")
    use_devices(
        [Device(d.id, d.coords, device_kind="TPU v99") for d in simulated_devices(tpu_slice)]
    )
    for line in make_mesh({"data": 16, "model": 4}).devices:
        for a, b in pairwise([*line, line[0]]):
            assert sum(abs(x - y) for x, y in zip(a.coords, b.coords, strict=True)) == 1


def test_a_part_of_a_host_is_a_box_without_wrap_around(use_devices: Any) -> None:
    tpu_slice = slice_of("v5litepod-8")
    use_devices(simulated_devices(tpu_slice))
    mesh = make_mesh({"model": 4})
    assert {device.id for device in mesh.devices} == {0, 1, 2, 3}
    assert ring_distances(tpu_slice, mesh.devices) == [1, 1, 1, 1]


def test_a_slice_need_not_start_at_the_corner_of_its_pod(use_devices: Any) -> None:
    tpu_slice = slice_of("v5litepod-16")
    use_devices(
        [
            Device(d.id, tuple(coordinate + 4 for coordinate in d.coords))
            for d in simulated_devices(tpu_slice)
        ]
    )
    mesh = make_mesh({"model": 16})
    assert set(ring_distances(tpu_slice, mesh.devices)) == {1}


# Several slices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "axes"),
    [
        (2, {"data": 2, "model": 8}),
        (2, {"data": 4, "model": 4}),
        (2, {"model": 16}),
        (4, {"data": 2, "fsdp": 2, "model": 8}),
        (4, {"data": 2, "fsdp": 4, "model": 4}),
        (4, {"one": 1, "data": 4, "model": 8}),
    ],
)
def test_the_first_axes_run_across_slices(
    count: int, axes: dict[str, int], use_devices: Any
) -> None:
    tpu_slice = slice_of("v5litepod-8")
    use_devices(simulated_devices(tpu_slice, slices=count), hosts=count)
    mesh = make_mesh(axes)
    flat = list(mesh.devices.flat)
    assert sorted(device.id for device in flat) == list(range(8 * count))
    slice_indices = np.array([device.slice_index for device in flat]).reshape(mesh.devices.shape)
    for axis in range(slice_indices.ndim):
        # Along each axis the slices follow in order, and the last axes stay within one slice.
        lines = np.moveaxis(slice_indices, axis, -1).reshape(-1, slice_indices.shape[axis])
        assert (np.diff(lines, axis=1) >= 0).all()
    if len(axes) > 1:
        assert (slice_indices == slice_indices[..., :1]).all()
        for line in mesh.devices.reshape(-1, mesh.devices.shape[-1]):
            assert set(ring_distances(tpu_slice, line)) == {1}


def test_axes_that_are_not_divisible_by_the_slices_are_rejected(use_devices: Any) -> None:
    use_devices(simulated_devices(slice_of("v5litepod-4"), slices=6), hosts=6)
    with pytest.raises(UserError) as error_info:
        make_mesh({"data": 4, "model": 6})
    assert str(error_info.value) == (
        "mesh: data=4 × model=6: the first axes run across the 6 slices, and data=4 "
        "is not divisible by 6; put an axis first that is"
    )
    assert make_mesh({"model": 6, "data": 4}).size == 24


def test_slices_of_two_sizes_are_rejected(use_devices: Any) -> None:
    large = simulated_devices(slice_of("v5litepod-8"), slices=2)
    use_devices(
        [device for device in large if device.slice_index == 0 or device.coords[1] < 2], hosts=2
    )
    with pytest.raises(
        UserError, match="the slices have 4 and 8 devices; a mesh needs slices of one"
    ):
        make_mesh({"data": -1})


# Devices without a torus --------------------------------------------------------------------------


def test_on_other_platforms_jax_orders_the_devices() -> None:
    mesh = drumline.train.make_mesh({"data": -1})
    assert mesh == jax.make_mesh((jax.device_count(),), ("data",), mesh.axis_types)
    assert is_ring(mesh, "data"), "an unknown topology is assumed to be a switch"


def test_jax_orders_devices_that_do_not_form_a_box(
    use_devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_not_implemented(*_: Any, devices: list[Device], **__: Any) -> None:
        assert prod(max(d.coords[side] for d in devices) + 1 for side in range(3)) == 4
        raise NotImplementedError("Failed to find assignment for logical_axis_index 0")

    use_devices(simulated_devices(slice_of("v5litepod-8")))
    monkeypatch.setattr(jax, "make_mesh", raise_not_implemented)
    with pytest.raises(UserError) as error_info:
        make_mesh({"data": 3})
    assert str(error_info.value) == (
        "mesh: data=3: these 3 devices do not form a box of chips, and JAX cannot order them; use "
        "all devices, with -1 for one axis"
    )
