"""Conversion to other libraries' weights and back through files is exact."""

import json
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
from drumline.models.interchange import from_tensors, load, read_model, save, to_tensors
from drumline.models.sharding import Params
from tests.models import reference
from tests.models.training import KEY, mesh_of

VIT = ViT(width=32, depth=2, heads=4, image=16, patch=4, classes=5, compute_dtype="float32")
DECODER = LM(
    width=32, depth=2, heads=4, head_dim=6, kv_heads=2, hidden=48, vocab=40,
    compute_dtype="float32",
)  # fmt: skip
MODELS = [pytest.param(VIT, id="vit"), pytest.param(DECODER, id="lm")]


def random_params(model: ViT | LM) -> Params:
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params: Params = jax.tree.map(lambda w: rng.standard_normal(w.shape).astype(np.float32), shapes)
    return params


def assert_equal(actual: Params, expected: Params) -> None:
    assert actual.keys() == expected.keys()
    assert actual["blocks"].keys() == expected["blocks"].keys()
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("model", MODELS)
def test_save_and_load_are_exact(model: Any, tmp_path: Path) -> None:
    params = random_params(model)
    save(tmp_path / "model.safetensors", model, params)
    assert_equal(load(tmp_path / "model.safetensors", model), params)


def test_a_folder_of_several_files_is_one_model(tmp_path: Path) -> None:
    tensors = to_tensors(DECODER, random_params(DECODER))
    names = sorted(tensors)
    for index, file_names in enumerate((names[::2], names[1::2])):
        file = tmp_path / f"model-{index:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in file_names}, str(file))
    assert_equal(load(tmp_path, DECODER), random_params(DECODER))


def test_bfloat16_is_loaded_as_float32(tmp_path: Path) -> None:
    tensors = {
        k: v.astype(ml_dtypes.bfloat16) for k, v in to_tensors(VIT, random_params(VIT)).items()
    }
    save_file(tensors, str(tmp_path / "vit.safetensors"))
    actual = load(tmp_path / "vit.safetensors", VIT)
    expected = jax.tree.map(
        lambda w: w.astype(ml_dtypes.bfloat16).astype(np.float32), random_params(VIT)
    )
    assert_equal(actual, expected)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(actual))


def test_tied_weights_and_derived_tables_are_accepted() -> None:
    params = random_params(DECODER)
    params["head"] = params["table"].T.copy()
    tensors = to_tensors(DECODER, params)
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    assert_equal(from_tensors(DECODER, tensors), params)


def test_tensors_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    tensors = to_tensors(VIT, random_params(VIT))
    with pytest.raises(ValueError, match=re.escape("ViT: head.weight is missing; there are")):
        from_tensors(VIT, {name: value for name, value in tensors.items() if name != "head.weight"})
    message = "ViT: head.weight is [6, 32], but the model has [5, 32]"
    with pytest.raises(ValueError, match=re.escape(message)):
        from_tensors(VIT, {**tensors, "head.weight": np.zeros((6, 32))})
    with pytest.raises(ValueError, match=r"ViT: the model has no weights for blocks\.2\.norm1"):
        from_tensors(VIT, {**tensors, "blocks.2.norm1.bias": np.zeros(32)})
    with pytest.raises(ValueError, match="has no Llama with experts"):
        to_tensors(replace(DECODER, experts=4), {})
    with pytest.raises(FileNotFoundError, match=r"there is no \.safetensors file"):
        load(tmp_path, VIT)


def test_the_tensors_have_the_names_and_shapes_of_the_other_library(tmp_path: Path) -> None:
    save(tmp_path / "lm.safetensors", DECODER, random_params(DECODER))
    tensors = load_file(str(tmp_path / "lm.safetensors"))
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (12, 32)
    assert tensors["model.layers.0.self_attn.o_proj.weight"].shape == (32, 24)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (32, 48)
    assert to_tensors(VIT, random_params(VIT))["patch_embed.proj.weight"].shape == (32, 3, 4, 4)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "vit.safetensors", VIT, random_params(VIT))

    def fail_on_full_disk(_tensors: Any, name: str, **_: Any) -> None:
        Path(name).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fail_on_full_disk)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "vit.safetensors", VIT, random_params(VIT))
    assert [file.name for file in tmp_path.iterdir()] == ["vit.safetensors"]
    assert_equal(load(tmp_path / "vit.safetensors", VIT), random_params(VIT))


def test_weights_of_another_model_are_not_saved(tmp_path: Path) -> None:
    deeper = replace(DECODER, depth=3)
    with pytest.raises(ValueError, match=r"LM: blocks\.\w+ is \(2, .*but the model has \(3, "):
        save(tmp_path / "lm.safetensors", deeper, random_params(DECODER))
    with pytest.raises(ValueError, match="missing"):
        save(tmp_path / "lm.safetensors", DECODER, {"blocks": {}})
    assert not list(tmp_path.iterdir())


def test_invalid_files_are_rejected(tmp_path: Path) -> None:
    tensors = to_tensors(VIT, random_params(VIT))
    integers = {name: value.astype(np.int8) for name, value in tensors.items()}
    save_file(integers, str(tmp_path / "int8.safetensors"))
    with pytest.raises(ValueError, match="is int8; convert quantized weights"):
        load(tmp_path / "int8.safetensors", VIT)
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"junk\.safetensors: not a complete safetensors file"):
        load(tmp_path / "junk.safetensors", VIT)
    duplicate_folder = tmp_path / "twice"
    duplicate_folder.mkdir()
    for name in ("a", "b"):
        save(duplicate_folder / f"{name}.safetensors", VIT, random_params(VIT))
    with pytest.raises(ValueError, match="is in another file of"):
        load(duplicate_folder, VIT)


# A config.json beside the weights -----------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 40,
    "rms_norm_eps": 1e-5, "rope_theta": 500.0, "attention_bias": False, "rope_scaling": None,
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the configuration with changes; `...` removes a value."""
    config = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": LLAMA_3},
        {"rope_scaling": {**LLAMA_3, "factor": 32.0, "high_freq_factor": 2.5}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        # The format of transformers 5, and values that are left out.
        {"rope_parameters": {**LLAMA_3, "rope_theta": 2000.0}, "rope_theta": ...},
        {"num_key_value_heads": ..., "head_dim": None, "rms_norm_eps": ..., "rope_theta": ...},
    ],
)
def test_a_model_read_from_its_config_computes_what_its_paper_says(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    model = read_model(write_config(tmp_path, **changes), compute_dtype="float32")
    params = random_params(model)
    save(tmp_path / "model.safetensors", model, params)
    tokens = np.random.default_rng(1).integers(0, 40, (2, 49), np.int32)
    loss, _ = jax.jit(model.loss)(load(tmp_path, model), {"tokens": tokens}, KEY)
    exact = jax.tree.map(np.float64, params)
    assert float(loss) == pytest.approx(reference.loss(model, exact, {"tokens": tokens}), rel=1e-5)
    if model.rotary_scaling:
        other = reference.loss(replace(model, rotary_scaling=None), exact, {"tokens": tokens})
        assert abs(other - float(loss)) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 41}, "LM: vocab is 40, but {} has 41; "),
        ({"num_hidden_layers": 3}, "LM: depth is 2, but {} has 3; "),
        ({"rms_norm_eps": 1e-6}, "LM: epsilon is 1e-05, but {} has 1e-06; "),
        ({"rope_theta": 1e4}, "LM: rotary_base is 500.0, but {} has 10000.0; "),
        ({"rope_scaling": LLAMA_3}, "LM: rotary_scaling is None, but {} has RotaryScaling("),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "{}: rope_type is 'yarn', and"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "{}: low_freq_factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "{}: factor is '4', which is not"),
        ({"rope_scaling": "linear"}, "{}: the scaling of rotary positions is 'linear'"),
        ({"model_type": "mistral"}, "{}: model_type is 'mistral', and LM supports only 'llama'"),
        ({"model_type": ...}, "{}: model_type is None, and LM supports only 'llama'"),
        ({"hidden_act": "gelu"}, "{}: hidden_act is 'gelu', which LM does not support"),
        ({"attention_bias": True}, "{}: attention_bias is True, which LM does not support"),
        ({"quantization_config": {"bits": 4}}, "{}: quantization_config is {{'bits': 4}}, which"),
        ({"hidden_size": ...}, "{}: hidden_size is missing"),
    ],
)
def test_weights_whose_config_does_not_fit_the_model_are_rejected(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = read_model(write_config(tmp_path))
    save(tmp_path / "model.safetensors", model, random_params(model))
    load(tmp_path, model)
    config = write_config(tmp_path, **changes) / "config.json"
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ValueError, match=re.escape(message.format(config))) as raised:
            load(path, model)
        assert "\n" not in str(raised.value)


def test_a_config_that_cannot_be_read_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json: there is no such file"):
        read_model(tmp_path)
    write_config(tmp_path, rope_scaling={**LLAMA_3, "low_freq_factor": 4.0})
    with pytest.raises(ValueError, match=r"LM: RotaryScaling\(factor=8.0, .* is not valid"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        read_model(tmp_path)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_built_with_their_sharding_and_type(
    model: Any, dtype: str, tmp_path: Path
) -> None:
    model, mesh = replace(model, layout="fsdp+tensor"), mesh_of(2, 2)
    params = random_params(model)
    save(tmp_path / "model.safetensors", model, params)
    loaded = load(tmp_path / "model.safetensors", model, mesh=mesh, dtype=dtype)
    assert_equal(loaded, jax.tree.map(lambda w: w.astype(dtype), params))

    def check(weight: jax.Array, spec: Any) -> None:
        assert weight.dtype == dtype
        assert weight.sharding == jax.sharding.NamedSharding(mesh, spec)

    jax.tree.map(check, loaded, model.specs())
    with pytest.raises(ValueError, match="cannot be divided between the 5 devices"):
        load(tmp_path / "model.safetensors", model, mesh=mesh_of(5))
