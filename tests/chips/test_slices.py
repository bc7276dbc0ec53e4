import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.chips import Slice, UnknownName, slice_of, slices

EVERY_SLICE = slices()


@pytest.mark.parametrize("tpu_slice", EVERY_SLICE, ids=lambda tpu_slice: tpu_slice.name)
def test_the_figures_of_a_slice_are_consistent(tpu_slice: Slice) -> None:
    assert slice_of(tpu_slice.name) == tpu_slice
    assert tpu_slice.hosts * tpu_slice.chips_per_host == tpu_slice.chips
    assert math.prod(tpu_slice.topology) == tpu_slice.chips
    assert tpu_slice.cores == tpu_slice.chips * (tpu_slice.chip.cores or 0)
    assert len(tpu_slice.wraps) == len(tpu_slice.topology) == tpu_slice.chip.torus_dimensions
    assert tpu_slice.hbm_bytes == tpu_slice.chips * tpu_slice.chip.hbm_bytes
    assert tpu_slice.peak_bf16_flops == tpu_slice.chips * tpu_slice.chip.peak_bf16_flops
    assert (tpu_slice.runtime_image is None) == (tpu_slice.generation == "7x")


@pytest.mark.parametrize("tpu_slice", EVERY_SLICE, ids=lambda tpu_slice: tpu_slice.name)
def test_mesh_axes_match_the_topology(tpu_slice: Slice) -> None:
    axes = tpu_slice.mesh_axes()
    assert tuple(axis.length for axis in axes) == tpu_slice.topology
    assert tuple(axis.wraps for axis in axes) == tpu_slice.wraps
    assert {axis.link_bandwidth for axis in axes} == {tpu_slice.chip.link_bandwidth}


# Copied from the configuration tables of Google's documentation, not computed.
DOCUMENTED = [
    # name, chips, hosts, topology, wraps
    ("v2-8", 4, 1, "2x2", "--"),
    ("v2-512", 256, 64, "16x16", "ww"),
    ("v3-32", 16, 4, "4x4", "--"),
    ("v3-2048", 1024, 256, "32x32", "ww"),
    ("v4-8", 4, 1, "2x2x1", "---"),
    ("v4-64", 32, 8, "2x4x4", "---"),
    ("v4-128", 64, 16, "4x4x4", "www"),
    ("v4-384", 192, 48, "4x4x12", "www"),
    ("v4-4096", 2048, 512, "8x16x16", "www"),
    ("v5litepod-1", 1, 1, "1x1", "--"),
    ("v5litepod-4", 4, 1, "2x2", "--"),
    ("v5litepod-8", 8, 1, "2x4", "--"),
    ("v5litepod-16", 16, 4, "4x4", "--"),
    ("v5litepod-128", 128, 32, "8x16", "-w"),
    ("v5litepod-256", 256, 64, "16x16", "ww"),
    ("v5p-8", 4, 1, "2x2x1", "---"),
    ("v5p-16", 8, 2, "2x2x2", "---"),
    ("v5p-32", 16, 4, "2x2x4", "---"),
    ("v5p-64", 32, 8, "2x4x4", "---"),
    ("v5p-256", 128, 32, "4x4x8", "www"),
    ("v5p-512", 256, 64, "4x8x8", "www"),
    ("v5p-1024", 512, 128, "8x8x8", "www"),
    ("v5p-2048", 1024, 256, "8x8x16", "www"),
    ("v5p-8192", 4096, 1024, "16x16x16", "www"),
    ("v5p-12288", 6144, 1536, "16x16x24", "www"),
    ("v6e-8", 8, 1, "2x4", "--"),
    ("v6e-64", 64, 16, "8x8", "--"),
    ("v6e-256", 256, 64, "16x16", "ww"),
    # The accelerator types that GKE and Compute Engine give their hosts.
    ("tpu7x-8", 4, 1, "2x2x1", "---"),
    ("v7x-16", 8, 2, "2x2x2", "---"),
    ("tpu7x-32", 16, 4, "2x2x4", "---"),
    ("tpu7x-128", 64, 16, "4x4x4", "www"),
    ("tpu7x-512", 256, 64, "4x8x8", "www"),
]


@pytest.mark.parametrize(("name", "chips", "hosts", "topology", "wraps"), DOCUMENTED)
def test_slices_match_googles_documentation(
    name: str, chips: int, hosts: int, topology: str, wraps: str
) -> None:
    tpu_slice = slice_of(name)
    assert (tpu_slice.chips, tpu_slice.hosts) == (chips, hosts)
    assert "x".join(map(str, tpu_slice.topology)) == topology
    assert tpu_slice.wraps == tuple(mark == "w" for mark in wraps)


@pytest.mark.parametrize("typed", ["v5e-16", "v5litepod-16", "V5E-16", " v5e-16\n"])
def test_every_spelling_gives_the_name_of_the_cloud_api(typed: str) -> None:
    assert slice_of(typed).name == "v5litepod-16"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("v5p-12", "v5p comes in 8, 16, .*; nearest: v5p-8, v5p-16$"),
        ("v5e-12", "nearest: v5e-8, v5e-16$"),
        ("v4-2", "nearest: v4-8$"),
        ("v4-999999", "nearest: v4-6144$"),
        ("", "is empty"),
        ("   ", "is empty"),
        ("v4", "does not end in the size"),
        ("v4-", "does not end in the size"),
        ("v4-08", "does not end in the size"),
        ("v4--8", "does not end in the size"),
        ("v4-8; rm -rf /", "does not end in the size"),
        ("v4-٨", "does not end in the size"),
        ("v9-8", "no TPU generation"),
        ("h100-8", "names a GPU"),
    ],
)
def test_an_unknown_slice_is_an_error_with_a_suggestion(typed: str, message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        slice_of(typed)


@given(st.text(max_size=20) | st.from_regex(r"\A\s?[vV]?[0-9a-z]{1,4}-?[0-9]{0,12}\Z"))
def test_any_text_is_a_slice_or_an_error_of_one_line(typed: str) -> None:
    try:
        text = slice_of(typed).name
    except UnknownName as error:
        text = str(error)
    assert len(text.splitlines()) == 1
