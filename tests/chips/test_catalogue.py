import pytest

from drumline.chips import Chip, UnknownName, chip, chips

GENERATIONS = ["v2", "v3", "v4", "v5e", "v5p", "v6e", "7x"]
GPUS = ["V100", "A100", "L40", "H100", "H200", "B100", "B200"]


def test_the_catalogue_has_every_generation_and_gpu() -> None:
    assert {row.name for row in chips()} == {*GENERATIONS, *GPUS}


@pytest.mark.parametrize("row", chips(), ids=lambda row: row.name)
def test_every_figure_names_its_source(row: Chip) -> None:
    figures = set(vars(row)) - {"name", "kind", "sources", "notes"}
    assert set(row.sources) == figures
    assert all(row.source_of(figure) for figure in figures)


@pytest.mark.parametrize("row", chips(), ids=lambda row: row.name)
def test_figures_are_per_chip_and_in_base_units(row: Chip) -> None:
    assert 1e13 < row.peak_bf16_flops < 1e16
    assert 1e10 < row.hbm_bytes < 1e12
    assert 1e11 < row.hbm_bandwidth < 1e13
    for peak in (row.peak_int8_flops, row.peak_fp8_flops):
        assert peak is None or peak >= row.peak_bf16_flops
    assert (row.torus_dimensions in {2, 3}) == (row.kind == "tpu")


def test_chips_are_sorted_by_their_bf16_peak() -> None:
    peaks = [row.peak_bf16_flops for row in chips()]
    assert peaks == sorted(peaks, reverse=True)
    names = [row.name for row in chips()]
    assert names.index("H100") < names.index("v6e")


def test_notes_explain_slides_that_print_the_memory_of_one_core() -> None:
    assert chip("v2").hbm_bytes == 16e9
    assert chip("v3").hbm_bytes == 32e9
    for name in ("v2", "v3"):
        assert any("one core's share" in note for note in chip(name).notes)


@pytest.mark.parametrize(
    ("typed", "name"),
    [("v4", "v4"), ("TPU v4", "v4"), (" h100 ", "H100"), ("v5litepod", "v5e"), ("tpu7x", "7x")],
)
def test_chip_accepts_common_spellings(typed: str, name: str) -> None:
    assert chip(typed).name == name


@pytest.mark.parametrize(
    ("typed", "message"),
    [("H1000", "nearest: H100"), ("", "is empty"), ("vv5e", "v5e"), ("日本", "the chips are v2")],
)
def test_an_unknown_chip_is_an_error_of_one_line(typed: str, message: str) -> None:
    with pytest.raises(UnknownName, match=message) as caught:
        chip(typed)
    assert "\n" not in str(caught.value)
