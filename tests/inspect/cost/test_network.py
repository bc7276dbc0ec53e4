"""The mapping of meshes to slices, and the times of collectives by the scaling book's formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.chips import UnknownName, chip
from drumline.errors import UserError
from drumline.inspect.cost.machines import (
    TorusDimension,
    chip_constants,
    match_devices,
    parse_machine,
)
from drumline.inspect.cost.network import AxisLinks, Network, map_mesh

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
)
MIB = 2**20


def axis_links(mesh: dict[str, int], machine_name: str) -> dict[str, str]:
    return {
        name: str(links) for name, links in map_mesh(mesh, parse_machine(machine_name)).axes.items()
    }


def link_bandwidth(name: str) -> float:
    """Return the bandwidth of one link in one direction that collectives reach."""
    return chip(name).link_bandwidth * chip_constants(name).link_efficiency


@pytest.mark.parametrize(
    ("machine_name", "mesh", "links"),
    [
        ("v5litepod-8", {"X": 2, "Y": 4}, {"X": "line of 2", "Y": "line of 4"}),
        ("v5litepod-8", {"X": 4, "Y": 2}, {"X": "line of 4", "Y": "line of 2"}),
        ("v5litepod-8", {"X": 8}, {"X": "line of 2 × line of 4"}),
        ("v5litepod-8", {"X": 8, "Y": 1}, {"X": "line of 2 × line of 4", "Y": "one device"}),
        ("v6e-256", {"X": 16, "Y": 16}, {"X": "ring of 16", "Y": "ring of 16"}),
        ("v6e-256", {"X": 256}, {"X": "ring of 16 × ring of 16"}),
        # A part of a ring is a line, because its ends are not connected.
        ("v6e-256", {"X": 4, "Y": 64}, {"X": "line of 4", "Y": "ring of 16 × line of 4"}),
        (
            "v6e-256",
            {"X": 8, "Y": 8, "Z": 4},
            {"X": "line of 8", "Y": "line of 8", "Z": "line of 2 × line of 2"},
        ),
        ("v5p-16", {"X": 2, "Y": 4}, {"X": "line of 2", "Y": "line of 2 × line of 2"}),
        ("v5p-128", {"X": 4, "Y": 4, "Z": 4}, dict.fromkeys("XYZ", "ring of 4")),
        ("v5p-128", {"X": 4, "Y": 16}, {"X": "ring of 4", "Y": "ring of 4 × ring of 4"}),
        (
            "v5p-128",
            {"X": 8, "Y": 8},
            {"X": "ring of 4 × line of 2", "Y": "line of 2 × ring of 4"},
        ),
        # JAX shows two devices for each chip of these generations.
        ("v2-8", {"X": 2, "Y": 4}, {"X": "2 cores of a chip", "Y": "line of 2 × line of 2"}),
        ("v2-8", {"X": 8}, {"X": "2 cores of a chip × line of 2 × line of 2"}),
        (
            "tpu7x-256",
            {"X": 8, "Y": 32},
            {"X": "2 cores of a chip × ring of 4", "Y": "ring of 4 × ring of 8"},
        ),
        (
            "2xv6e-256",
            {"data": 2, "model": 256},
            {"data": "2 slices", "model": "ring of 16 × ring of 16"},
        ),
        ("2xv6e-256", {"data": 512}, {"data": "2 slices × ring of 16 × ring of 16"}),
        # The mesh's first axis runs between the slices, regardless of its length.
        (
            "2xv6e-256",
            {"X": 16, "Y": 32},
            {"X": "2 slices × line of 8", "Y": "ring of 16 × line of 2"},
        ),
    ],
)
def test_a_mesh_uses_whole_dimensions_if_possible(
    machine_name: str, mesh: dict[str, int], links: dict[str, str]
) -> None:
    assert axis_links(mesh, machine_name) == links


@pytest.mark.parametrize(
    ("machine_name", "devices"),
    [
        ("v5litepod-8", 8),
        ("v6e-256", 256),
        ("2xv6e-256", 512),
        ("v5p-128", 64),
        ("v2-8", 8),
        ("tpu7x-8", 8),
        ("8xH200", 8),
        ("H200", 1),
    ],
)
def test_a_machine_has_the_devices_of_all_its_slices(machine_name: str, devices: int) -> None:
    assert parse_machine(machine_name).devices == devices


def test_the_two_cores_of_a_chip_share_its_resources() -> None:
    total, half = chip("v2"), parse_machine("v2-8")
    assert half.peak_flops == total.peak_bf16_flops / 2
    assert half.memory_bytes == total.hbm_bytes / 2
    assert half.memory_bandwidth == total.hbm_bandwidth / 2
    assert half.link_bandwidth == pytest.approx(link_bandwidth("v2") / 2)


def test_a_mesh_of_chips_takes_both_cores_as_one_device() -> None:
    assert match_devices(parse_machine("v2-8"), {"X": 4}, 4).devices_per_chip == 1
    assert match_devices(parse_machine("v5p-16"), {"X": 8}, 8).devices_per_chip == 1
    assert match_devices(parse_machine("v5p-16"), {"X": 16}, 16).devices_per_chip == 2


@pytest.mark.parametrize(
    ("machine_name", "devices"), [("v5litepod-8", 16), ("8xH200", 4), ("2xv6e-256", 256)]
)
def test_a_mesh_of_another_size_is_rejected(machine_name: str, devices: int) -> None:
    with pytest.raises(UserError) as error:
        match_devices(parse_machine(machine_name), {"X": devices}, devices)
    message = str(error.value)
    assert f"the mesh X={devices} has {devices} devices" in message
    assert machine_name in message


@pytest.mark.parametrize(
    ("machine_name", "mesh", "axis"),
    [
        ("v5litepod-8", {"X": 3, "Y": 2}, "X=3"),
        ("v6e-256", {"X": 2, "Y": 512}, "Y=512"),
        ("v5p-128", {"X": 3}, "X=3"),
    ],
)
def test_an_axis_that_does_not_fit_is_rejected(
    machine_name: str, mesh: dict[str, int], axis: str
) -> None:
    with pytest.raises(
        UserError, match=f"mesh axis {axis} of .* does not fit on {machine_name}, whose chips"
    ):
        map_mesh(mesh, parse_machine(machine_name))


def test_an_axis_uses_the_given_dimensions() -> None:
    machine = parse_machine("v5p-64")  # 2×4×4
    assert str(map_mesh({"X": 4, "Y": 8}, machine).axes["Y"]) == "line of 2 × line of 4"
    network = map_mesh({"X": 8, "Y": 4}, machine, {"X": (0, 2), "Y": (1,)})
    assert {name: str(links) for name, links in network.axes.items()} == {
        "X": "line of 2 × line of 4",
        "Y": "line of 4",
    }
    remaining = map_mesh({"X": 8, "Y": 4}, machine, {"Y": (2,)})
    assert str(remaining.axes["X"]) == "line of 2 × line of 4"


@pytest.mark.parametrize(
    "torus_dims", [{"X": (0,)}, {"X": (1, 2)}, {"X": (7,)}, {"X": (0, 1), "Y": (1,)}, {"Q": (0,)}]
)
def test_the_given_dimensions_must_fit_the_axis(torus_dims: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(UserError, match="mesh axis"):
        map_mesh({"X": 8, "Y": 4}, parse_machine("v5p-64"), torus_dims)


@pytest.mark.parametrize("name", ["v9-8", "0xv6e-256", "8xH2O0", "", "x", "v5litepod-7"])
def test_an_unknown_machine_is_an_error(name: str) -> None:
    with pytest.raises(UnknownName) as error:
        parse_machine(name)
    assert "\n" not in str(error.value)


# Times -------------------------------------------------------------------------------------------

RING = map_mesh({"X": 16, "Y": 16}, parse_machine("v6e-256"))
LINE = map_mesh({"X": 2, "Y": 4}, parse_machine("v5litepod-8"))
SLICES = map_mesh({"data": 2, "X": 16, "Y": 16}, parse_machine("2xv6e-256"))


def latency(name: str, hops: int) -> float:
    return chip_constants(name).collective_seconds + hops * chip_constants(name).hop_seconds


def test_an_all_gather_on_a_ring_uses_both_directions() -> None:
    shard = 64 * MIB
    total = 16 * shard
    # V / W with both directions of the link, without the shard that each device already has.
    expected = total * 15 / 16 / (2 * link_bandwidth("v6e")) + latency("v6e", 8)
    assert RING.collective_seconds("all-gather", shard, ["X"]) == pytest.approx(expected)


def test_an_all_gather_over_two_rings_uses_twice_the_links() -> None:
    shard = 4 * MIB
    expected = 256 * shard * 255 / 256 / (4 * link_bandwidth("v6e")) + latency("v6e", 16)
    assert RING.collective_seconds("all-gather", shard, ["X", "Y"]) == pytest.approx(expected)


def test_an_all_gather_on_a_line_has_one_link_at_its_ends() -> None:
    shard = 64 * MIB
    expected = 3 * shard / link_bandwidth("v5e") + latency("v5e", 3)
    assert LINE.collective_seconds("all-gather", shard, ["Y"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("network", "axes", "members"),
    [
        (RING, ("X",), 16),
        (RING, ("X", "Y"), 256),
        (LINE, ("Y",), 4),
        (LINE, ("X", "Y"), 8),
        (SLICES, ("data",), 2),
        (SLICES, ("data", "X"), 32),
        (map_mesh({"X": 8}, parse_machine("v2-8")), ("X",), 8),
        (map_mesh({"X": 2, "Y": 4}, parse_machine("v2-8")), ("X",), 2),
        (map_mesh({"X": 8}, parse_machine("8xH200")), ("X",), 8),
    ],
)
def test_a_reduce_scatter_takes_as_long_and_an_all_reduce_twice(
    network: Network, axes: tuple[str, ...], members: int
) -> None:
    total = 512.0 * MIB
    gather = network.collective_seconds("all-gather", total / members, axes)
    assert network.collective_seconds("reduce-scatter", total, axes) == pytest.approx(gather)
    start = network.machine.constants.collective_seconds
    if not network.machine.torus:
        start += network.machine.constants.hop_seconds
    assert network.collective_seconds("all-reduce", total, axes) - start == pytest.approx(
        2 * (gather - start)
    )


@pytest.mark.parametrize(
    ("network", "axis", "length", "factor"), [(RING, "X", 16, 1), (LINE, "Y", 4, 2)]
)
def test_an_all_to_all_takes_a_quarter_of_an_all_gather(
    network: Network, axis: str, length: int, factor: int
) -> None:
    operand_bytes = 64.0 * MIB
    name = network.machine.chip.name
    # The book gives V / (4·W) with W in both directions and V the whole array. A line takes twice
    # that.
    expected = factor * operand_bytes * length / (4 * 2 * link_bandwidth(name))
    hops = length // 2 if factor == 1 else length - 1
    seconds = network.collective_seconds("all-to-all", operand_bytes, [axis])
    assert seconds == pytest.approx(expected + latency(name, hops))


def test_a_permute_uses_one_link_in_one_direction() -> None:
    operand_bytes = 64.0 * MIB
    ring = operand_bytes / link_bandwidth("v6e") + latency("v6e", 1)
    assert RING.collective_seconds("collective-permute", operand_bytes, ["X"]) == pytest.approx(
        ring
    )
    # A message from the last device of a line to the first passes all other devices.
    line = operand_bytes / link_bandwidth("v5e") + latency("v5e", 3)
    assert LINE.collective_seconds("collective-permute", operand_bytes, ["Y"]) == pytest.approx(
        line
    )


def test_small_messages_take_the_latency() -> None:
    for kind, hops in (("all-gather", 8), ("reduce-scatter", 8), ("all-reduce", 16)):
        assert RING.collective_seconds(kind, 1, ["X"]) == pytest.approx(
            latency("v6e", hops), rel=1e-3
        )
    assert LINE.collective_seconds("all-gather", 1, ["Y"]) == pytest.approx(
        latency("v5e", 3), rel=1e-3
    )


@pytest.mark.parametrize(("total", "measured"), [(34e6, 680e-6), (128e3, 8e-6)])
def test_an_all_gather_on_four_chips_agrees_with_the_books_measurement(
    total: float, measured: float
) -> None:
    assert LINE.collective_seconds("all-gather", total / 4, ["Y"]) == pytest.approx(
        measured, rel=0.1
    )


def test_collectives_between_slices_use_the_data_centre_network() -> None:
    dcn = 1.25e10 * chip_constants("v6e").link_efficiency
    operand_bytes = 256.0 * MIB
    start = chip_constants("v6e").collective_seconds
    assert SLICES.collective_seconds("all-gather", operand_bytes, ["data"]) == pytest.approx(
        start + operand_bytes / dcn
    )
    assert SLICES.collective_seconds("all-reduce", operand_bytes, ["data"]) == pytest.approx(
        start + operand_bytes / dcn
    )
    assert SLICES.collective_seconds(
        "collective-permute", operand_bytes, ["data"]
    ) == pytest.approx(start + operand_bytes / dcn)
    # After the sum within the slice, only a part is sent between slices.
    within_slice = SLICES.collective_seconds("all-reduce", operand_bytes, ["X"])
    both_axes = SLICES.collective_seconds("all-reduce", operand_bytes, ["data", "X"])
    assert both_axes == pytest.approx(within_slice + operand_bytes / 16 / dcn)
    assert both_axes < within_slice + SLICES.collective_seconds(
        "all-reduce", operand_bytes, ["data"]
    )


def test_gpus_communicate_through_a_switch() -> None:
    network = map_mesh({"X": 8}, parse_machine("8xH200"))
    link = chip("H200").link_bandwidth * chip_constants("H200").link_efficiency
    start = chip_constants("H200").collective_seconds + chip_constants("H200").hop_seconds
    operand_bytes = 64.0 * MIB
    for kind, factor in (
        ("all-gather", 7.0),
        ("reduce-scatter", 7 / 8),
        ("all-to-all", 7 / 8),
        ("all-reduce", 14 / 8),
        ("collective-permute", 1.0),
    ):
        assert network.collective_seconds(kind, operand_bytes, ["X"]) == pytest.approx(
            start + factor * operand_bytes / link
        )


@pytest.mark.parametrize("gpu", ["V100", "A100", "H100", "H200", "B200"])
def test_gpu_nodes_communicate_over_the_network_between_them(gpu: str) -> None:
    machine = parse_machine(f"32x{gpu}")
    network = map_mesh({"data": 4, "model": 8}, machine)
    node = map_mesh({"model": 8}, parse_machine(f"8x{gpu}"))
    link, outside = machine.link_bandwidth, machine.dcn_bandwidth
    start = machine.constants.collective_seconds + machine.constants.hop_seconds
    assert outside < link / 4
    size = 64.0 * MIB

    def seconds(kind: str, *axes: str) -> float:
        return network.collective_seconds(kind, size, axes) - start

    assert seconds("all-reduce", "model") + start == pytest.approx(
        node.collective_seconds("all-reduce", size, ["model"])
    )
    # Each GPU has its own adapter and sends its own part.
    for kind, across, both in (
        ("all-reduce", 2 * 3 / 4, 2 * 7 / 8 * size / link + 2 * 3 / 4 / 8 * size / outside),
        ("reduce-scatter", 3 / 4, 7 / 8 * size / link + 3 / 4 / 8 * size / outside),
        ("all-gather", 3, 7 * 4 * size / link + 3 * size / outside),
        ("all-to-all", 3 / 4, 7 / 8 * size / link + 3 / 4 * size / outside),
        ("collective-permute", 1, size / outside),
    ):
        assert seconds(kind, "data") == pytest.approx(across * size / outside), kind
        assert seconds(kind, "data", "model") == pytest.approx(both), kind
    whole = map_mesh({"X": 32}, machine)
    assert whole.collective_seconds("all-reduce", size, ["X"]) == pytest.approx(
        start + seconds("all-reduce", "data", "model")
    )
    assert str(whole.axes["X"]) == "4 nodes × ring of 8"
    assert network.resources(["data"]) == ("dcn",)
    assert network.resources(["model"]) == ("nvlink",)
    assert set(whole.resources(["X"])) == {"nvlink", "dcn"}


def test_a_node_has_up_to_eight_gpus() -> None:
    assert parse_machine("4xA100").slices == parse_machine("8xA100").slices == 1
    assert parse_machine("64xA100").slices == 8
    with pytest.raises(UnknownName, match="nodes of 8 GPUs; use 8xH100 or 16xH100"):
        parse_machine("12xH100")


def test_cores_of_a_chip_communicate_faster_than_neighbouring_chips() -> None:
    network = map_mesh({"X": 2, "Y": 4}, parse_machine("v2-8"))
    operand_bytes = 64.0 * MIB
    within = operand_bytes / link_bandwidth("v2") + latency("v2", 1)
    assert network.collective_seconds("all-gather", operand_bytes, ["X"]) == pytest.approx(within)
    assert network.collective_seconds("all-gather", operand_bytes / 2, ["Y"]) > within


def test_an_axis_of_one_device_costs_nothing() -> None:
    network = map_mesh({"X": 8, "Y": 1}, parse_machine("v5litepod-8"))
    assert all(network.collective_seconds(kind, 1e9, ["Y"]) == 0 for kind in KINDS)


# Links ------------------------------------------------------------------------------------------


def test_axes_use_separate_links() -> None:
    assert not set(RING.resources(["X"])) & set(RING.resources(["Y"]))
    assert set(RING.resources(["X", "Y"])) == {*RING.resources(["X"]), *RING.resources(["Y"])}
    assert set(SLICES.resources(["data"])) == {"dcn"}
    assert "dcn" in SLICES.resources(["data", "X"])
    assert map_mesh({"X": 8}, parse_machine("8xH200")).resources(["X"]) == ("nvlink",)


def test_a_permute_on_a_ring_leaves_the_other_direction_free() -> None:
    assert not set(RING.resources(["X"], "up")) & set(RING.resources(["X"], "down"))
    assert set(LINE.resources(["Y"], "up")) == set(LINE.resources(["Y"], "down"))


# Properties -------------------------------------------------------------------------------------

sizes = st.integers(min_value=0, max_value=2**36)
lengths = st.lists(st.sampled_from((2, 3, 4, 8, 16)), min_size=1, max_size=3)


def network_of(lengths: list[int], wraps: bool) -> Network:
    lines = tuple(TorusDimension(length, wraps) for length in lengths)
    return Network(parse_machine("v6e-256"), {"X": AxisLinks(lines)})


@given(
    kind=st.sampled_from(KINDS),
    lengths=lengths,
    wraps=st.booleans(),
    small_size=sizes,
    large_size=sizes,
)
def test_more_bytes_take_longer(
    kind: str, lengths: list[int], wraps: bool, small_size: int, large_size: int
) -> None:
    small_size, large_size = sorted((small_size, large_size))
    network = network_of(lengths, wraps)
    assert network.collective_seconds(kind, small_size, ["X"]) <= network.collective_seconds(
        kind, large_size, ["X"]
    )


@given(kind=st.sampled_from(KINDS), lengths=lengths, operand_bytes=sizes)
def test_a_ring_is_never_slower_than_a_line(
    kind: str, lengths: list[int], operand_bytes: int
) -> None:
    ring, line = network_of(lengths, True), network_of(lengths, False)
    assert ring.collective_seconds(kind, operand_bytes, ["X"]) <= line.collective_seconds(
        kind, operand_bytes, ["X"]
    )


@given(kind=st.sampled_from(KINDS), operand_bytes=sizes, slices=st.sampled_from((2, 4, 8)))
def test_the_data_centre_network_is_never_faster(
    kind: str, operand_bytes: int, slices: int
) -> None:
    within_slice = Network(
        parse_machine("v6e-256"), {"X": AxisLinks((TorusDimension(slices, True),))}
    )
    between_slices = Network(parse_machine("v6e-256"), {"X": AxisLinks((), slices)})
    start = chip_constants("v6e").collective_seconds
    hops = slices * chip_constants("v6e").hop_seconds
    assert between_slices.collective_seconds(
        kind, operand_bytes, ["X"]
    ) + hops >= within_slice.collective_seconds(kind, operand_bytes, ["X"])
    assert between_slices.collective_seconds(kind, operand_bytes, ["X"]) >= start
