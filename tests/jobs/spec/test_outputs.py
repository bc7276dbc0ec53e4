"""The key `outputs`: paths and patterns in the folder of the program."""

from pathlib import Path

import pytest

from drumline.jobs.spec import SpecError, changes, parse, validate

FILE = "accelerator: v4-8\nrun: python train.py\noutputs: "
RELATIVE = (
    "is not in the folder of the program; write a path relative to it, like results/ or *.png"
)
ITSELF = "is the folder of the program itself; name the files or folders that it writes"


@pytest.mark.parametrize(
    ("written", "outputs"),
    [
        ("results/", ("results/",)),
        ("[results, '*.png']", ("results", "*.png")),
        ("['./runs//a/', 'deep/**/x?.csv', '[ab].txt']", ("runs/a/", "deep/**/x?.csv", "[ab].txt")),
        ("[]", ()),
        ("", ()),
    ],
)
def test_paths_and_patterns(written: str, outputs: tuple[str, ...]) -> None:
    assert parse(FILE + written, source="job.yaml", folder=Path()).outputs == outputs


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("/data/results", f"'/data/results' {RELATIVE}"),
        ("~/results", f"'~/results' {RELATIVE}"),
        ("[a, ../b]", f"'../b' {RELATIVE}"),
        ("a/../../b", f"'a/../../b' {RELATIVE}"),
        ("gs://lab/results", f"'gs://lab/results' {RELATIVE}"),
        (".", f"'.' {ITSELF}"),
        ("./", f"'./' {ITSELF}"),
        ("[a, a]", "a is listed twice"),
        ("{a: b}", "is a map; expected one name or a list"),
        ("''", "is empty"),
        ("7", "7 is a number, not text; put it in quotes: '7'"),
    ],
)
def test_anything_else_is_an_error_with_its_line(written: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse(FILE + written, source="job.yaml", folder=Path())
    assert str(error.value) == f"job.yaml:3  outputs: {message}"


def test_a_job_of_an_earlier_version_has_not_changed_its_outputs() -> None:
    file = validate({"accelerator": "v4-8", "run": "x"}).model_dump(mode="json")
    older = {key: value for key, value in file.items() if key != "outputs"}
    assert changes(older, file) == []
    assert changes(older, file | {"outputs": ["a"]}) == ['outputs: none → ["a"]']
