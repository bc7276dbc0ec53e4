"""`MODULE:FUNCTION`, as users write it, and as they mistake it."""

import sys
from pathlib import Path

import pytest

from drumline.errors import UserError
from drumline.targets import load_target

SAMPLER = """
import math

NOTHING = 3


def inputs():
    return 2.0, 3.0


def other():
    return [5.0, 7.0]


def product(a, b):
    return a * b


def many(*all_of_them):
    return sum(all_of_them)


def alone(a=4):
    return math.sqrt(a)
"""


@pytest.fixture
def sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_sampler.py").write_text(SAMPLER)
    return tmp_path / "my_sampler.py"


def test_a_file_and_a_module_name_the_same_function(sampler: Path) -> None:
    for name in (str(sampler), "my_sampler.py", "my_sampler"):
        target = load_target(f"{name}:product")
        assert target.function(*target.inputs) == 6.0
        assert target.name == f"{name}:product"


def test_arguments_come_from_inputs_or_from_who_is_named(sampler: Path) -> None:
    del sampler
    assert load_target("my_sampler.py:product", "other").inputs == (5.0, 7.0)
    assert load_target("my_sampler.py:alone").inputs == ()
    assert load_target("my_sampler.py:many").inputs == (2.0, 3.0)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("my_sampler.py", "write it as MODULE:FUNCTION"),
        (":product", "write it as MODULE:FUNCTION"),
        ("nowhere.py:f", "nowhere.py: there is no such file"),
        ("nowhere:f", "nowhere: there is no such module here"),
        ("my_sampler.py:f", "my_sampler.py has no f; it has inputs, other, product, many, alone"),
        ("my_sampler.py:NOTHING", "my_sampler.py:NOTHING is not a function"),
        ("broken.py:f", "broken.py:2: "),
        ("needy.py:f", "needy.py imports absent_package, which is not installed"),
        ("needy:f", "needy imports absent_package, which is not installed"),
        ("bare.py:f", "bare.py:f takes x: define inputs() in bare.py"),
        ("raising.py:f", "raising.py cannot be imported: ValueError: two at "),
        ("raising:f", "raising cannot be imported: ValueError: two at "),
        ("leaving.py:f", "leaving.py exits when it is imported"),
        ("nulls.py:f", "nulls.py cannot be imported: "),
        ("..:f", "..: write the module's full name"),
        ("failing.py:f", "failing.py:inputs() fails: ZeroDivisionError: division by zero at "),
    ],
)
def test_a_mistake_is_one_sentence(target: str, sentence: str, sampler: Path) -> None:
    folder = sampler.parent
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")
    (folder / "needy.py").write_text("import absent_package\n")
    (folder / "raising.py").write_text("raise ValueError('two\\nlines')\n")
    (folder / "leaving.py").write_text("raise SystemExit(5)\n")
    (folder / "nulls.py").write_bytes(b"x = 1\0")
    (folder / "failing.py").write_text("def inputs():\n    1 / 0\n\ndef f(x):\n    pass\n")
    (folder / "bare.py").write_text("def f(x):\n    return x\n")
    with pytest.raises(UserError) as raised:
        load_target(target)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_with_the_name_of_another_module_hides_nothing(sampler: Path) -> None:
    (sampler.parent / "json.py").write_text(SAMPLER)
    import json

    assert load_target("json.py:product").inputs == (2.0, 3.0)
    assert json.loads("[1]") == [1]
    assert sys.modules["json"] is json
