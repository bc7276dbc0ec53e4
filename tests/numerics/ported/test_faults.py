"""A correct port does not diverge. Every fault is found at its layer, with its cause."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

torch: Any = pytest.importorskip("torch")


from drumline.models.sharding import Params  # noqa: E402
from drumline.numerics import LLAMA, TIMM_VIT, trace_divergence  # noqa: E402
from tests.numerics.ported.peers import (  # noqa: E402
    DECODER,
    VIT,
    images,
    llama,
    lm_function,
    load_params,
    no_fault,
    random_params,
    set_in_torch,
    timm_vit,
    tokens,
    vit_function,
)

SEEDS = range(20)


def round_to_bf16(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def change_block(index: int, name: str, change: Callable[[jax.Array], jax.Array]) -> Any:
    """Return a function that changes one weight of one block."""

    def changed(params: Params) -> Params:
        weight = params["blocks"][name]
        changed_weight = weight.at[index].set(change(weight[index]))
        return {**params, "blocks": {**params["blocks"], name: changed_weight}}

    return changed


def change_weight(name: str, change: Callable[[jax.Array], jax.Array]) -> Any:
    return lambda params: {**params, name: change(params[name])}


def unchanged(params: Params) -> Params:
    return params


def transpose_heads(w: jax.Array) -> jax.Array:
    """Transpose the kernel of the heads as a matrix."""
    return w.reshape(w.shape[0], -1).T.reshape(w.shape)


@pytest.fixture(scope="module")
def vit_peer() -> Any:
    return timm_vit()


@pytest.fixture(scope="module")
def llama_peer() -> Any:
    return llama()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_correct_port_of_vit_does_not_diverge(seed: int, vit_peer: Any) -> None:
    params = random_params(VIT, seed)
    peer = load_params(vit_peer, VIT, params)
    divergence = trace_divergence(vit_function(VIT, params), peer, images(seed), rename=TIMM_VIT)
    assert divergence.first is None, str(divergence)
    assert len(divergence.layers) == 5 + 12 * VIT.depth
    assert "all 29 layers agree" in str(divergence)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_correct_port_of_llama_does_not_diverge(seed: int, llama_peer: Any) -> None:
    params = random_params(DECODER, seed)
    peer = load_params(llama_peer, DECODER, params)
    divergence = trace_divergence(lm_function(DECODER, params), peer, tokens(seed), rename=LLAMA)
    assert divergence.first is None, str(divergence)
    assert len(divergence.layers) == 4 + 13 * DECODER.depth


def tanh_gelu(peer: Any) -> None:
    peer.blocks[1].mlp.act = torch.nn.GELU(approximate="tanh")


def quick_gelu(peer: Any) -> None:
    class Quick(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x * torch.sigmoid(1.702 * x)

    peer.blocks[0].mlp.act = Quick()


def scale_of_vit(peer: Any) -> None:
    peer.blocks[1].attn.fused_attn = False
    peer.blocks[1].attn.scale = 1 / 16


def silu_for_gelu(peer: Any) -> None:
    peer.model.layers[1].mlp.act_fn = torch.nn.GELU()


def scale_of_llama(peer: Any) -> None:
    peer.model.layers[1].self_attn.scaling = 1.0


def rotary_base(peer: Any) -> None:
    inverse = 500_000.0 ** (-torch.arange(8, dtype=torch.float32) / 8)
    peer.model.rotary_emb.inv_freq.copy_(inverse)


Fault = tuple[str, str, str, Callable[[Params], Params], Callable[[Any], None]]
"""A name, the layer, the cause, and the change of JAX's weights or of PyTorch's model."""

VIT_FAULTS: list[Fault] = [
    ("epsilon", "blocks.1.attention_norm", "epsilon", unchanged,
     set_in_torch("blocks.1.norm1", eps=1e-5)),
    ("last epsilon", "norm", "epsilon", unchanged, set_in_torch("norm", eps=1e-3)),
    ("tanh", "blocks.1.activation", "gelu's variant", unchanged, tanh_gelu),
    ("quick gelu", "blocks.0.activation", "gelu's variant", unchanged, quick_gelu),
    ("no bias", "blocks.1.up", "bias", change_block(1, "up_bias", jnp.zeros_like), no_fault),
    ("bias dtype", "blocks.0.down", "bias in another dtype",
     change_block(0, "down_bias", round_to_bf16), no_fault),
    ("query bias dtype", "blocks.1.query", "bias in another dtype",
     change_block(1, "query_bias", round_to_bf16), no_fault),
    ("norm dtype", "blocks.1.feedforward_norm", "norm in another dtype",
     change_block(1, "feedforward_norm", round_to_bf16), no_fault),
    ("transposed output", "blocks.0.output", "transposed kernel",
     change_block(0, "output", lambda w: w.reshape(64, 64).T.reshape(w.shape)), no_fault),
    ("transposed key", "blocks.1.key", "transposed kernel",
     change_block(1, "key", transpose_heads), no_fault),
    ("reshaped kernel", "blocks.1.up", "transposed kernel",
     change_block(1, "up", lambda w: w.T.reshape(w.shape)), no_fault),
    ("attention scale", "blocks.1.mixed", "attention scale", unchanged, scale_of_vit),
    ("kernel dtype", "blocks.1.down", "kernel in another dtype",
     change_block(1, "down", round_to_bf16), no_fault),
    ("head bias", "head", "bias", change_weight("head_bias", jnp.zeros_like), no_fault),
    ("patches flipped", "patch", "transposed kernel",
     change_weight("patch", lambda w: w.reshape(8, 8, 3, 64)[::-1, ::-1].reshape(w.shape)),
     no_fault),
    ("patches turned", "patch", "transposed kernel",
     change_weight("patch", lambda w: w.reshape(8, 8, 3, 64).swapaxes(0, 1).reshape(w.shape)),
     no_fault),
    ("channels", "patch", "channels",
     change_weight("patch", lambda w: w.reshape(8, 8, 3, 64)[:, :, ::-1].reshape(w.shape)),
     no_fault),
]  # fmt: skip

LLAMA_FAULTS: list[Fault] = [
    ("epsilon", "blocks.1.feedforward_norm", "epsilon", unchanged,
     set_in_torch("model.layers.1.post_attention_layernorm", variance_epsilon=1e-5)),
    ("last epsilon", "norm", "epsilon", unchanged,
     set_in_torch("model.norm", variance_epsilon=1e-4)),
    ("activation", "blocks.1.activation", "another activation", unchanged, silu_for_gelu),
    ("transposed query", "blocks.0.query", "transposed kernel",
     change_block(0, "query", transpose_heads), no_fault),
    ("reshaped gate", "blocks.1.gate", "transposed kernel",
     change_block(1, "gate", lambda w: w.T.reshape(w.shape)), no_fault),
    ("attention scale", "blocks.1.mixed", "attention scale", unchanged, scale_of_llama),
    ("rotary base", "blocks.0.mixed", "rotary positions", unchanged, rotary_base),
    ("norm dtype", "blocks.1.attention_norm", "norm in another dtype",
     change_block(1, "attention_norm", round_to_bf16), no_fault),
    ("head dtype", "head", "kernel in another dtype",
     change_weight("head", round_to_bf16), no_fault),
    ("table dtype", "table", "embedding in another dtype",
     change_weight("table", round_to_bf16), no_fault),
    ("table scaled", "table", "embedding scale",
     change_weight("table", lambda w: w * 8.0), no_fault),
]  # fmt: skip


@pytest.mark.parametrize("fault", VIT_FAULTS, ids=lambda fault: fault[0])
def test_faults_in_vit_are_found(fault: Fault) -> None:
    _, layer, cause, change, add_fault = fault
    params = random_params(VIT, 1)
    peer = load_params(timm_vit(), VIT, params)
    add_fault(peer)
    divergence = trace_divergence(
        vit_function(VIT, change(params)), peer, images(1), rename=TIMM_VIT
    )
    assert divergence.first is not None
    assert divergence.cause is not None
    assert (divergence.first.name, divergence.cause.kind) == (layer, cause), str(divergence)


@pytest.mark.parametrize("fault", LLAMA_FAULTS, ids=lambda fault: fault[0])
def test_faults_in_llama_are_found(fault: Fault) -> None:
    _, layer, cause, change, add_fault = fault
    params = random_params(DECODER, 1)
    peer = load_params(llama(), DECODER, params)
    add_fault(peer)
    divergence = trace_divergence(
        lm_function(DECODER, change(params)), peer, tokens(1), rename=LLAMA
    )
    assert divergence.first is not None
    assert divergence.cause is not None
    assert (divergence.first.name, divergence.cause.kind) == (layer, cause), str(divergence)
