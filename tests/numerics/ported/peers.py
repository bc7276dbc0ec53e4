"""Small models of Drumline, timm and transformers with the same weights."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from drumline.models import LM, ViT
from drumline.models.interchange import to_tensors
from drumline.models.sharding import Params

torch: Any = pytest.importorskip("torch")


def _repair_torchvision() -> None:
    """Make torchvision importable if it was built for a CUDA version that is not installed.

    timm and transformers import it and use none of its operators. The import fails at the
    registration of two operators that were not loaded.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
    except ImportError:
        pass


_repair_torchvision()
VIT = ViT(width=64, depth=2, heads=4, image=32, patch=8, classes=10, compute_dtype="float32")
DECODER = LM(
    width=64, depth=2, heads=4, head_dim=16, kv_heads=2, hidden=96, vocab=50,
    compute_dtype="float32",
)  # fmt: skip


def timm_vit(model: ViT = VIT) -> Any:
    """Return timm's model with its own random weights."""
    timm = pytest.importorskip("timm")
    return timm.create_model(
        "vit_base_patch16_224", img_size=model.image, patch_size=model.patch,
        embed_dim=model.width, depth=model.depth, num_heads=model.heads, num_classes=model.classes,
    )  # fmt: skip


def llama(model: LM = DECODER) -> Any:
    """Return transformers' model with its own random weights."""
    transformers = pytest.importorskip("transformers")
    sizes = transformers.LlamaConfig(
        vocab_size=model.vocab, hidden_size=model.width, intermediate_size=model.hidden,
        num_hidden_layers=model.depth, num_attention_heads=model.heads, head_dim=model.head_dim,
        num_key_value_heads=model.kv_heads, rms_norm_eps=model.epsilon,
        max_position_embeddings=256, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(sizes)


def random_params(model: ViT | LM, seed: int) -> Params:
    """Return weights without zeros and ones, as after some training."""
    random_source = np.random.default_rng(seed)
    params = model.init(jax.random.key(seed))
    perturbed: Params = jax.tree.map(
        lambda w: w + 0.05 * random_source.standard_normal(w.shape).astype(np.float32), params
    )
    return perturbed


def load_params(peer: Any, model: ViT | LM, params: Params) -> Any:
    """Return the peer with these weights."""
    tensors = {name: torch.from_numpy(value) for name, value in to_tensors(model, params).items()}
    missing, unexpected = peer.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all("inv_freq" in name for name in missing)
    return peer.eval()


def images(seed: int, model: ViT = VIT, count: int = 2) -> Any:
    """Return images with channels first, as in PyTorch."""
    random_source = np.random.default_rng(seed)
    shape = (count, model.channels, model.image, model.image)
    return random_source.standard_normal(shape).astype(np.float32)


def tokens(seed: int, model: LM = DECODER, length: int = 24) -> Any:
    return np.random.default_rng(seed).integers(0, model.vocab, (2, length))


def vit_function(model: ViT, params: Params) -> Callable[[Any], Any]:
    """Return a function of images with channels first."""
    return lambda x: model.logits(params, x.transpose(0, 2, 3, 1))


def lm_function(model: LM, params: Params) -> Callable[[Any], Any]:
    return lambda x: model.logits(params, x)


def set_in_torch(path: str, **values: Any) -> Callable[[Any], None]:
    """Return a function that sets attributes of one module of the peer."""

    def set_attributes(peer: Any) -> None:
        for name, value in values.items():
            setattr(peer.get_submodule(path), name, value)

    return set_attributes


def no_fault(peer: Any) -> None:
    del peer
