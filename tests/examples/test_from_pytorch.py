"""PyTorch, JAX and Drumline train the same MLP alike, and the chapter shows code that runs."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from drumline import models
from drumline.errors import UserError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "from_pytorch"
CHAPTER = ROOT / "docs" / "from-pytorch.md"
NO_TORCH = "PyTorch is not installed: pip install 'drumline[torch]'"


Example = Callable[[str], Any]


@pytest.fixture(scope="module")
def example() -> Iterator[Example]:
    """Import an example by name, beside the others as scripts are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module


@pytest.fixture(scope="module")
def torch_mlp(example: Example) -> Any:
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    torch.set_num_threads(1)  # the shapes are small and the other cores busy
    return example("torch_mlp")


@pytest.fixture(scope="module")
def compare(torch_mlp: Any, example: Example) -> Any:
    compare = example("compare")
    assert compare.torch_mlp is torch_mlp
    return compare


@pytest.fixture(scope="module")
def in_float32(compare: Any) -> tuple[Any, str]:
    """PyTorch's losses and Drumline's, and what Drumline's command printed."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        losses = compare.compare_drumline(seed=0)
    return losses, printed.getvalue()


@pytest.fixture(scope="module")
def in_float64(compare: Any) -> Any:
    return compare.compare_jax(seed=0)


# The comparison -----------------------------------------------------------------------------------


def test_pycompare_drumline_have_the_same_losses(compare: Any, in_float32: tuple[Any, str]) -> None:
    losses, _ = in_float32
    assert losses.torch.shape == losses.other.shape == (compare.STEPS,)
    assert losses.torch[-1] < losses.torch[0] / 5
    assert losses.max_difference() < compare.FLOAT32_BOUND


def test_pycompare_jax_compute_the_same(compare: Any, in_float64: Any) -> None:
    assert in_float64.torch.shape == in_float64.other.shape == (compare.STEPS,)
    assert in_float64.other[-1] < in_float64.other[0] / 5
    assert in_float64.max_difference() < compare.FLOAT64_BOUND


def test_float32_losses_are_those_of_float64_but_for_rounding(
    compare: Any, in_float32: tuple[Any, str], in_float64: Any
) -> None:
    losses, _ = in_float32
    for narrow in (losses.torch, losses.other):
        assert np.abs(narrow - in_float64.torch).max() < compare.FLOAT32_BOUND


def test_the_other_weight_decay_would_be_noticed(
    torch_mlp: Any, example: Example, in_float64: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each library has a default of its own, a hundred times apart."""
    batches, steps = example("digit_batches"), len(in_float64.torch)
    monkeypatch.setattr(torch_mlp, "WEIGHT_DECAY", 1e-4)
    rows = batches.digits("train")
    rows["image"] = rows["image"].astype(np.float64)
    losses = torch_mlp.train(torch_mlp.init(0).double(), batches.batches(rows, steps))
    assert np.abs(losses - in_float64.other).max() > 1e-4


# The examples -------------------------------------------------------------------------------------


def test_the_pytorch_example_prints_what_it_promises(
    torch_mlp: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As torchrun starts it, with one process, which has the whole batch.
    environment = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    torch_mlp.main()
    assert not torch_mlp.dist.is_initialized()
    _check(capsys.readouterr().out, _promised("torch_mlp"))


@pytest.mark.usefixtures("in_float64")  # where it is compiled
def test_the_jax_example_prints_the_same_from_pytorch_weights(
    torch_mlp: Any, example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = example("first_weights")
    first = torch_mlp.init(0).double().state_dict()
    weights.save(tmp_path / "weights.npz", weights.from_torch(first))
    with jax.enable_x64(True):
        example("jax_mlp").main(str(tmp_path / "weights.npz"))
    assert _promised("jax_mlp") == _promised("torch_mlp")
    _check(capsys.readouterr().out, _promised("jax_mlp"))


def test_the_drumline_example_prints_what_it_promises(in_float32: tuple[Any, str]) -> None:
    _, printed = in_float32
    text = (FOLDER / "drumline_mlp.py").read_text()
    promised = re.search(r"^    (done: .*)$", text, re.MULTILINE)
    line = re.search(r"^done: .*$", printed, re.MULTILINE)
    assert promised
    assert line
    _check(line[0], promised[1])


def test_weights_go_to_jax_transposed_and_come_back_unchanged(
    torch_mlp: Any, example: Example, tmp_path: Path
) -> None:
    torch, weights = torch_mlp.torch, example("first_weights")
    model = torch_mlp.init(0)
    weights.save(tmp_path / "weights.npz", weights.from_torch(model.state_dict()))
    arrived = weights.load(tmp_path / "weights.npz")

    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    exact = model.double()(torch.from_numpy(x).double()).detach().numpy()
    for layer in arrived.values():
        logits = x @ layer["weight"] + layer["bias"]
        x = np.maximum(logits, 0)
    np.testing.assert_allclose(logits, exact, atol=1e-6)

    back = weights.to_torch(jax.device_put(arrived))
    assert list(back) == list(model.state_dict())
    for name, tensor in torch_mlp.init(0).state_dict().items():
        np.testing.assert_array_equal(back[name], tensor.numpy())


def test_weights_for_jax_do_not_change_when_pytorch_trains(
    torch_mlp: Any, example: Example
) -> None:
    weights, batches = example("first_weights"), example("digit_batches")
    model = torch_mlp.init(0)
    params = weights.from_torch(model.state_dict())
    before = params["layer0"]["weight"].copy()
    torch_mlp.train(model, batches.batches(batches.digits("train"), 1))
    np.testing.assert_array_equal(params["layer0"]["weight"], before)


def test_without_a_file_jax_draws_weights_of_the_shapes_drumline_has(example: Example) -> None:
    jax_mlp = example("jax_mlp")
    here = jax.eval_shape(lambda: jax_mlp.init(jax_mlp.MLP((256, 128)), 0))
    there = jax.eval_shape(models.MLP(64, (256, 128)).init, jax.random.key(0))
    assert here == there


def test_a_missing_file_of_weights_is_one_sentence(example: Example, tmp_path: Path) -> None:
    recipe = example("drumline_mlp").recipe
    with pytest.raises(UserError, match=r"^weights: there is no file .*none\.npz; torch_mlp\.py"):
        recipe(weights=tmp_path / "none.npz")


def test_the_two_loops_have_the_same_names_in_the_same_order() -> None:
    assert _names("torch_mlp") == _names("jax_mlp")


# The chapter --------------------------------------------------------------------------------------


def _snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", CHAPTER.read_text(), re.MULTILINE | re.DOTALL)


def test_every_snippet_of_the_chapter_is_in_the_file_it_names() -> None:
    snippets = _snippets()
    assert len(snippets) >= 14  # two for each of the seven points
    for snippet in snippets:
        named, _, code = snippet.partition("\n")
        file = FOLDER / named.removeprefix("# ")
        assert file.is_file(), f"{named!r} does not name a file of the example"
        assert _stands_in(code, file.read_text()), f"not in {file.name}:\n{code}"


def test_a_changed_snippet_would_be_noticed() -> None:
    code = "a = 1\nif a:\n    b = 2\n"
    assert _stands_in(code, "def f():\n    a = 1\n    if a:\n        b = 2\n    c = 3\n")
    assert not _stands_in(code, "def f():\n    a = 1\n    if a:\n    b = 2\n")
    assert not _stands_in(code, "a = 1\nx = 0\nif a:\n    b = 2\n")


def test_the_chapter_states_the_bounds_that_are_tested(compare: Any) -> None:
    text = CHAPTER.read_text()
    assert f"float32 {compare.FLOAT32_BOUND:.0e}".replace("e-0", "e-") in text
    assert f"float64 {compare.FLOAT64_BOUND:.0e}" in text


def _stands_in(code: str, text: str) -> bool:
    """Whether these lines stand in the text one below the other, at any indentation.

    Blank lines do not count: the formatter sets them otherwise at the top level.
    """
    lines, code_lines = (list(filter(str.strip, one.splitlines())) for one in (text, code))
    blocks = (lines[i : i + len(code_lines)] for i in range(len(lines) - len(code_lines) + 1))
    return any(textwrap.dedent("\n".join(block)).splitlines() == code_lines for block in blocks)


def _names(module: str) -> list[str]:
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def _promised(module: str) -> str:
    match = re.search(r"^What to see: (.*)$", (FOLDER / f"{module}.py").read_text(), re.MULTILINE)
    assert match
    return match[1]


def _check(line: str, promised: str) -> None:
    """The same words, and numbers that rounding on another processor explains."""
    number = r"\d+\.\d+"
    assert re.sub(number, "#", line.strip()) == re.sub(number, "#", promised)
    for here, there in zip(re.findall(number, line), re.findall(number, promised), strict=True):
        assert float(here) == pytest.approx(float(there), rel=0.01)
