import pytest

from drumline.chips import Chip, UnknownName, chip, chips

GENERATIONS = ["v2", "v3", "v4", "v5e", "v5p", "v6e", "7x"]
GPUS = ["V100", "A100", "L40", "H100", "H200", "B100", "B200"]


def test_every_generation_and_every_gpu_of_the_slides_is_there() -> None:
    assert {one.name for one in chips()} == {*GENERATIONS, *GPUS}


@pytest.mark.parametrize("one", chips(), ids=lambda one: one.name)
def test_every_figure_names_its_source(one: Chip) -> None:
    figures = set(vars(one)) - {"name", "kind", "sources", "notes"}
    assert set(one.sources) == figures
    assert all(one.source_of(figure) for figure in figures)


@pytest.mark.parametrize("one", chips(), ids=lambda one: one.name)
def test_figures_are_of_a_chip_in_base_units(one: Chip) -> None:
    assert 1e13 < one.peak_bf16_flops < 1e16
    assert 1e10 < one.hbm_bytes < 1e12
    assert 1e11 < one.hbm_bandwidth < 1e13
    assert one.peak_8bit_flops is None or one.peak_8bit_flops >= one.peak_bf16_flops
    assert (one.torus_dimensions in {2, 3}) == (one.kind == "tpu")


def test_ranked_by_the_figure_so_h100_stands_above_v6e() -> None:
    peaks = [one.peak_bf16_flops for one in chips()]
    assert peaks == sorted(peaks, reverse=True)
    names = [one.name for one in chips()]
    assert names.index("H100") < names.index("v6e")


def test_where_the_slides_print_a_cores_share_the_chip_says_so() -> None:
    assert chip("v2").hbm_bytes == 16e9
    assert chip("v3").hbm_bytes == 32e9
    for name in ("v2", "v3"):
        assert any("one core's share" in note for note in chip(name).notes)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("v4", "v4"), ("TPU v4", "v4"), (" h100 ", "H100"), ("v5litepod", "v5e"), ("tpu7x", "7x")],
)
def test_a_chip_is_found_under_the_names_people_use(typed: str, meant: str) -> None:
    assert chip(typed).name == meant


@pytest.mark.parametrize(
    ("typed", "said"),
    [("H1000", "nearest: H100"), ("", "is empty"), ("vv5e", "v5e"), ("日本", "the chips are v2")],
)
def test_an_unknown_chip_gets_one_sentence(typed: str, said: str) -> None:
    with pytest.raises(UnknownName, match=said) as caught:
        chip(typed)
    assert "\n" not in str(caught.value)
