"""Weights under other libraries' names: both ways, through files, to the bit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drumline.models import LM, ViT
from drumline.models.interchange import adopt, export, load, save
from drumline.models.layouts import Params

VIT = ViT(width=32, depth=2, heads=4, image=16, patch=4, classes=5, compute_dtype="float32")
DECODER = LM(
    width=32, depth=2, heads=4, head_dim=6, kv_heads=2, hidden=48, vocab=40,
    compute_dtype="float32",
)  # fmt: skip
MODELS = [pytest.param(VIT, id="vit"), pytest.param(DECODER, id="lm")]


def drawn(model: ViT | LM) -> Params:
    dice = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params: Params = jax.tree.map(
        lambda w: dice.standard_normal(w.shape).astype(np.float32), shapes
    )
    return params


def same(one: Params, other: Params) -> None:
    assert one.keys() == other.keys()
    assert one["blocks"].keys() == other["blocks"].keys()
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_saved_is_loaded_to_the_bit(model: Any, tmp_path: Path) -> None:
    params = drawn(model)
    save(tmp_path / "model.safetensors", model, params)
    same(load(tmp_path / "model.safetensors", model), params)
    assert model.init(jax.random.key(0)).keys() == params.keys()


def test_a_folder_of_several_files_is_one_model(tmp_path: Path) -> None:
    tensors = export(DECODER, drawn(DECODER))
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        file = tmp_path / f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, str(file))
    same(load(tmp_path, DECODER), drawn(DECODER))


def test_bfloat16_is_loaded_as_the_numbers_it_holds(tmp_path: Path) -> None:
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in export(VIT, drawn(VIT)).items()}
    save_file(tensors, str(tmp_path / "vit.safetensors"))
    found = load(tmp_path / "vit.safetensors", VIT)
    wanted = jax.tree.map(lambda w: w.astype(ml_dtypes.bfloat16).astype(np.float32), drawn(VIT))
    same(found, wanted)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(found))


def test_tied_weights_and_derived_tables_are_understood() -> None:
    params = drawn(DECODER)
    params["head"] = params["table"].T.copy()
    tensors = export(DECODER, params)
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    same(adopt(DECODER, tensors), params)


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    tensors = export(VIT, drawn(VIT))
    with pytest.raises(ValueError, match=re.escape("ViT: head.weight is not there; there are")):
        adopt(VIT, {name: value for name, value in tensors.items() if name != "head.weight"})
    wrong = "ViT: head.weight is [6, 32], but the model has [5, 32]"
    with pytest.raises(ValueError, match=re.escape(wrong)):
        adopt(VIT, {**tensors, "head.weight": np.zeros((6, 32))})
    with pytest.raises(ValueError, match=r"ViT: it has no place for blocks\.2\.norm1\.bias"):
        adopt(VIT, {**tensors, "blocks.2.norm1.bias": np.zeros(32)})
    with pytest.raises(ValueError, match="no counterpart"):
        export(replace(DECODER, experts=4), {})
    with pytest.raises(FileNotFoundError, match=r"there is no \.safetensors file"):
        load(tmp_path, VIT)


def test_the_names_are_the_other_libraries(tmp_path: Path) -> None:
    save(tmp_path / "lm.safetensors", DECODER, drawn(DECODER))
    found = load_file(str(tmp_path / "lm.safetensors"))
    assert found["model.layers.1.self_attn.k_proj.weight"].shape == (12, 32)
    assert found["model.layers.0.self_attn.o_proj.weight"].shape == (32, 24)
    assert found["model.layers.0.mlp.down_proj.weight"].shape == (32, 48)
    assert export(VIT, drawn(VIT))["patch_embed.proj.weight"].shape == (32, 3, 4, 4)


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "vit.safetensors", VIT, drawn(VIT))

    def fills_up(_tensors: Any, name: str, **_: Any) -> None:
        Path(name).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fills_up)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "vit.safetensors", VIT, drawn(VIT))
    assert [file.name for file in tmp_path.iterdir()] == ["vit.safetensors"]
    same(load(tmp_path / "vit.safetensors", VIT), drawn(VIT))


def test_weights_of_another_model_are_not_written(tmp_path: Path) -> None:
    deeper = replace(DECODER, depth=3)
    with pytest.raises(ValueError, match=r"LM: blocks\.\w+ is \(2, .*but the model has \(3, "):
        save(tmp_path / "lm.safetensors", deeper, drawn(DECODER))
    with pytest.raises(ValueError, match="not there"):
        save(tmp_path / "lm.safetensors", DECODER, {"blocks": {}})
    assert not list(tmp_path.iterdir())


def test_files_that_are_not_one_models_weights_are_refused(tmp_path: Path) -> None:
    tensors = export(VIT, drawn(VIT))
    whole = {name: value.astype(np.int8) for name, value in tensors.items()}
    save_file(whole, str(tmp_path / "int8.safetensors"))
    with pytest.raises(ValueError, match="is int8; weights that were quantized"):
        load(tmp_path / "int8.safetensors", VIT)
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"junk\.safetensors: no whole safetensors file"):
        load(tmp_path / "junk.safetensors", VIT)
    twice = tmp_path / "twice"
    twice.mkdir()
    for name in ("a", "b"):
        save(twice / f"{name}.safetensors", VIT, drawn(VIT))
    with pytest.raises(ValueError, match="is in another file of"):
        load(twice, VIT)
