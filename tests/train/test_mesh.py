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
    """As JAX shows a TPU."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int = 0
    slice_index: int | None = None
    device_kind: str = "TPU v5 lite"
    platform: str = "tpu"
    process_index: int = 0


def pretended(one: Slice, *, cores: int = 1, slices: int = 1) -> list[Device]:
    """Numbered as JAX numbers them: by core, then x, y, z."""
    sides = (*one.topology, 1)[:3]
    at = product(range(slices), *(range(side) for side in reversed(sides)), range(cores))
    kind = KINDS[one.generation]
    return [
        Device(number, tuple(reversed(chip)), core, of_slice if slices > 1 else None, kind)
        for number, (of_slice, *chip, core) in enumerate(at)
    ]


@pytest.fixture
def having(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let JAX have these devices."""

    def have(devices: list[Device], hosts: int = 1) -> None:
        monkeypatch.setattr(jax, "devices", lambda: devices)
        monkeypatch.setattr(jax, "process_count", lambda: hosts)

    return have


def apart(one: Slice, line: Any) -> list[int]:
    sides, wraps = (*one.topology, 1)[:3], (*one.wraps, False)[:3]
    return [links(a.coords, b.coords, sides, wraps) for a, b in pairwise([*line, line[0]])]


@pytest.mark.parametrize(
    "name", [one.name for one in slices() if 2 < one.chips <= 64 and one.generation in KINDS]
)
def test_a_ring_over_a_whole_slice_has_hops_of_one_link(name: str, having: Any) -> None:
    one = slice_of(name)
    having(pretended(one))
    mesh = make_mesh({"data": 1, "model": -1})
    assert set(apart(one, mesh.devices[0])) == {1}
    assert is_ring(mesh, "model")
    assert is_ring(mesh, "data")


def test_an_axis_that_jax_does_not_support_is_a_ring_too(having: Any) -> None:
    one = slice_of("v6e-64")
    having(pretended(one))
    mesh = make_mesh({"data": -1, "model": 4})
    assert dict(mesh.shape) == {"data": 16, "model": 4}
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 2
    assert {device.id for device in mesh.devices.flat} == set(range(64))
    for line in mesh.devices:
        assert apart(one, line) == [1, 1, 1, 1]
    assert is_ring(mesh, "model")


def test_an_axis_that_is_not_a_ring_is_recognised(having: Any) -> None:
    having(pretended(slice_of("v5litepod-8")))
    mesh = make_mesh({"data": 4, "model": 2})
    assert is_ring(mesh, "model")
    assert not is_ring(mesh, "data")
    assert is_ring(make_mesh({"data": 2, "model": 4}), "model")


def test_two_cores_of_a_chip_are_neighbours(having: Any) -> None:
    one = slice_of("v2-8")
    having(pretended(one, cores=2))
    mesh = make_mesh({"model": 8})
    assert apart(one, mesh.devices) == [0, 1] * 4
    assert [device.core_on_chip for device in mesh.devices] == [0, 1] * 4
    assert is_ring(mesh, "model")


def test_wrap_around_links_are_used(having: Any) -> None:
    one = slice_of("v5p-128")
    having(pretended(one), hosts=16)
    mesh = make_mesh({"data": 16, "model": 4})
    for line in [*mesh.devices, *mesh.devices.T]:
        assert set(apart(one, line)) == {1}
    ends = zip(mesh.devices[:, 0], mesh.devices[:, -1], strict=True)
    assert any(3 in np.abs(np.subtract(a.coords, b.coords)) for a, b in ends)


def test_an_unknown_kind_has_no_wrap_around_links(having: Any) -> None:
    one = slice_of("v5p-128")
    having([Device(d.id, d.coords, device_kind="TPU v99") for d in pretended(one)])
    for line in make_mesh({"data": 16, "model": 4}).devices:
        for a, b in pairwise([*line, line[0]]):
            assert sum(abs(x - y) for x, y in zip(a.coords, b.coords, strict=True)) == 1


def test_a_part_of_a_host_is_a_box_without_wrap_around(having: Any) -> None:
    one = slice_of("v5litepod-8")
    having(pretended(one))
    mesh = make_mesh({"model": 4})
    assert {device.id for device in mesh.devices} == {0, 1, 2, 3}
    assert apart(one, mesh.devices) == [1, 1, 1, 1]


def test_a_slice_need_not_start_at_the_corner_of_its_pod(having: Any) -> None:
    one = slice_of("v5litepod-16")
    having([Device(d.id, tuple(at + 4 for at in d.coords)) for d in pretended(one)])
    mesh = make_mesh({"model": 16})
    assert set(apart(one, mesh.devices)) == {1}


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
def test_the_first_axes_run_across_slices(count: int, axes: dict[str, int], having: Any) -> None:
    one = slice_of("v5litepod-8")
    having(pretended(one, slices=count), hosts=count)
    mesh = make_mesh(axes)
    flat = list(mesh.devices.flat)
    assert sorted(device.id for device in flat) == list(range(8 * count))
    places = np.array([device.slice_index for device in flat]).reshape(mesh.devices.shape)
    for axis in range(places.ndim):
        # Along each axis slices come one after the other, and the last axes stay in one.
        along = np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis])
        assert (np.diff(along, axis=1) >= 0).all()
    if len(axes) > 1:
        assert (places == places[..., :1]).all()
        for line in mesh.devices.reshape(-1, mesh.devices.shape[-1]):
            assert set(apart(one, line)) == {1}


def test_axes_that_are_not_divisible_by_the_slices_are_rejected(having: Any) -> None:
    having(pretended(slice_of("v5litepod-4"), slices=6), hosts=6)
    with pytest.raises(UserError) as refused:
        make_mesh({"data": 4, "model": 6})
    assert str(refused.value) == (
        "mesh: data=4 × model=6: the first axes run across the 6 slices, and data=4 "
        "is not divisible by 6; put an axis first that is"
    )
    assert make_mesh({"model": 6, "data": 4}).size == 24


def test_slices_of_two_sizes_are_rejected(having: Any) -> None:
    large = pretended(slice_of("v5litepod-8"), slices=2)
    having([device for device in large if device.slice_index == 0 or device.coords[1] < 2], hosts=2)
    with pytest.raises(
        UserError, match="the slices have 4 and 8 devices; a mesh needs slices of one"
    ):
        make_mesh({"data": -1})


# Where no torus is known -------------------------------------------------------------------------


def test_on_other_platforms_jax_orders_the_devices() -> None:
    mesh = drumline.train.make_mesh({"data": -1})
    assert mesh == jax.make_mesh((jax.device_count(),), ("data",), mesh.axis_types)
    assert is_ring(mesh, "data"), "a switch joins them, as far as anybody knows"


def test_jax_orders_devices_that_do_not_form_a_box(
    having: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, devices: list[Device], **__: Any) -> None:
        assert prod(max(d.coords[side] for d in devices) + 1 for side in range(3)) == 4
        raise NotImplementedError("Failed to find assignment for logical_axis_index 0")

    having(pretended(slice_of("v5litepod-8")))
    monkeypatch.setattr(jax, "make_mesh", refuse)
    with pytest.raises(UserError) as refused:
        make_mesh({"data": 3})
    assert str(refused.value) == (
        "mesh: data=3: these 3 devices do not form a box of chips, and JAX cannot order them; use "
        "all devices, with -1 for one axis"
    )
