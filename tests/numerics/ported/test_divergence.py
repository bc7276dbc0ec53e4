"""`trace_divergence` with other types, modules, names and arguments."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from safetensors.numpy import save_file  # noqa: E402
from safetensors.torch import load_file as load_torch_file  # noqa: E402

from drumline.errors import UserError  # noqa: E402
from drumline.models import LM, ViT  # noqa: E402
from drumline.models.interchange import load, save  # noqa: E402
from drumline.numerics import LLAMA, TIMM_VIT, tap, trace_divergence  # noqa: E402
from drumline.parallel.taps import collecting, scope  # noqa: E402
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


@pytest.mark.parametrize("model", [VIT, DECODER], ids=["vit", "lm"])
def test_a_model_in_bfloat16_diverges_from_one_in_float32(model: ViT | LM) -> None:
    params = random_params(model, 3)
    bfloat16_model = replace(model, compute_dtype="bfloat16")
    if isinstance(bfloat16_model, ViT):
        peer, inputs = load_params(timm_vit(), model, params), images(3)
        divergence = trace_divergence(
            vit_function(bfloat16_model, params), peer, inputs, rename=TIMM_VIT
        )
    else:
        peer, inputs = load_params(llama(), model, params), tokens(3)
        divergence = trace_divergence(
            lm_function(bfloat16_model, params), peer, inputs, rename=LLAMA
        )
    assert divergence.first is not None
    assert divergence.cause is not None
    assert divergence.first is divergence.layers[0]
    assert "bfloat16" in divergence.cause.description


def test_pytorch_in_a_narrower_type_is_reported() -> None:
    params = random_params(DECODER, 4)
    peer = load_params(llama(), DECODER, params)
    peer.model.layers[1].mlp.down_proj.register_forward_hook(
        lambda _, __, out: out.bfloat16().float() if out.dtype == torch.float32 else out
    )
    divergence = trace_divergence(lm_function(DECODER, params), peer, tokens(4), rename=LLAMA)
    assert divergence.first is not None
    assert divergence.first.name == "blocks.1.down"
    assert "PyTorch is further away" in str(divergence)


class Stem(torch.nn.Module):  # type: ignore[misc]
    """A convolution that halves the image, as convolutional stems of ViTs do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.act = torch.nn.GELU()

    def forward(self, x: Any) -> Any:
        return self.act(self.conv(x))


@pytest.mark.parametrize(
    ("padding", "cause"), [(((1, 1), (1, 1)), None), ("SAME", "padding"), ("shifted", "padding")]
)
def test_another_padding_is_found(padding: Any, cause: str | None) -> None:
    torch.manual_seed(0)
    stem = Stem()
    kernel = stem.conv.weight.detach().numpy().transpose(2, 3, 1, 0)
    bias = stem.conv.bias.detach().numpy()
    explicit_padding = ((2, 0), (2, 0)) if padding == "shifted" else padding

    def jax_fn(x: jax.Array) -> jax.Array:
        x = jax.lax.conv_general_dilated(
            x.transpose(0, 2, 3, 1),
            kernel,
            (2, 2),
            explicit_padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = tap("conv", x + bias)
        out: jax.Array = tap("act", jax.nn.gelu(x, approximate=False)).transpose(0, 3, 1, 2)
        return out

    divergence = trace_divergence(jax_fn, stem, images(0), rename=None)
    assert [layer.name for layer in divergence.layers] == ["conv", "act", "output"]
    assert (divergence.cause.kind if divergence.cause else None) == cause, str(divergence)
    if divergence.first is not None:
        assert divergence.first.name == "conv"


def test_intermediates_can_be_returned_by_name(tmp_path: Path) -> None:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    weights = {name: value.detach().numpy() for name, value in layers.named_parameters()}

    def jax_fn(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        first = x @ weights["0.weight"].T + weights["0.bias"]
        centred = first - first.mean(-1, keepdims=True)
        normed = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-3)
        return normed, {"linear": first, "z": normed}

    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    divergence = trace_divergence(jax_fn, layers, x, rename={"linear": "0", "z": "1"})
    assert divergence.first is not None
    assert divergence.cause is not None
    assert (divergence.first.name, divergence.cause.kind) == ("z", "epsilon")
    assert "0.001, and PyTorch with 1e-05" in divergence.cause.description
    assert divergence.to_dict()["first"]["torch"] == "1"
    divergence.plot(tmp_path / "layers.svg")
    assert "diverges at z" in (tmp_path / "layers.svg").read_text()


def test_an_unknown_difference_has_no_known_cause() -> None:
    torch.manual_seed(1)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
    weight, bias = (value.detach().numpy() for value in layer.parameters())
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    noise = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)
    divergence = trace_divergence(lambda x: tap("0", x @ (weight.T + noise) + bias), layer, x)
    assert divergence.cause is not None
    assert divergence.cause.kind == "unknown"


def test_a_missing_residual_is_named() -> None:
    params = random_params(DECODER, 5)
    peer = load_params(llama(), DECODER, params)

    def jax_fn(x: jax.Array) -> jax.Array:
        with collecting() as intermediates:
            logits = DECODER.logits(params, x)
        for name, value in intermediates.items():
            tap(
                name,
                intermediates["blocks.1.attention"] if name == "blocks.1.feedforward" else value,
            )
        return logits

    divergence = trace_divergence(jax_fn, peer, tokens(5), rename=LLAMA)
    assert divergence.first is not None
    assert divergence.cause is not None
    assert (divergence.first.name, divergence.cause.kind) == ("blocks.1.feedforward", "residual")


def test_the_model_is_unchanged() -> None:
    peer = timm_vit().train()
    peer.blocks[0].eval()
    trace_divergence(
        vit_function(VIT, random_params(VIT, 0)),
        load_params(peer.train(), VIT, random_params(VIT, 0)),
        images(0),
        rename=TIMM_VIT,
    )
    peer.train()
    peer.blocks[0].eval()
    trace_divergence(vit_function(VIT, random_params(VIT, 0)), peer, images(0), rename=TIMM_VIT)
    assert peer.training
    assert not peer.blocks[0].training
    assert not any(module._forward_hooks for module in peer.modules())


@pytest.mark.parametrize(
    ("rename", "sentence"),
    [
        ({"nothing": "head"}, "no intermediate has a counterpart: JAX has patch, embedding"),
        ({"norm": "norm"}, "these are not the same values"),
        ({"head": "head[3/3]"}, "counted from 0"),
        ({"head(": "head"}, "is not a regular expression"),
        ({"head": "head[0/3]"}, "are not 3 equal parts"),
    ],
)
def test_bad_names_are_a_user_error(rename: Any, sentence: str) -> None:
    params = random_params(VIT, 0)
    if "nothing" in rename:
        rename = rename | {"output": "head:nothing"}
    with pytest.raises(UserError, match=re.escape(sentence)):
        trace_divergence(
            vit_function(VIT, params),
            load_params(timm_vit(), VIT, params),
            images(0),
            rename=rename,
        )


def test_a_tap_in_a_loop_is_a_user_error() -> None:
    model = replace(DECODER, scan_layers=True)
    params = random_params(DECODER, 0)
    with pytest.raises(UserError, match="traced by itself"):
        trace_divergence(
            lm_function(model, params),
            load_params(llama(), DECODER, params),
            tokens(0),
            rename=LLAMA,
        )


def test_unused_taps_do_not_change_the_program() -> None:
    params = random_params(VIT, 0)
    x = images(0).transpose(0, 2, 3, 1)
    program_before = str(jax.make_jaxpr(partial(VIT.logits, params))(x))
    with collecting() as intermediates, scope("here"):
        jax.make_jaxpr(partial(VIT.logits, params))(x)
    assert "here.blocks.0.query" in intermediates
    assert str(jax.make_jaxpr(partial(VIT.logits, params))(x)) == program_before


def test_weights_load_in_both_directions(tmp_path: Path) -> None:
    """Write Drumline's weights to files for the peer, and read the peer's weights."""
    cases: list[Any] = [
        (VIT, timm_vit(), images(7), vit_function),
        (DECODER, llama(), tokens(7), lm_function),
    ]
    for model, peer, x, apply in cases:
        tensors = {name: value.detach().numpy() for name, value in peer.state_dict().items()}
        save_file(tensors, tmp_path / "theirs.safetensors")
        params = load(tmp_path / "theirs.safetensors", model)
        expected = peer.eval()(torch.as_tensor(x))
        expected = getattr(expected, "logits", expected).detach().numpy()
        np.testing.assert_allclose(apply(model, params)(x), expected, rtol=1e-4, atol=1e-5)

        other_params = random_params(model, 8)
        save(tmp_path / "drumline.safetensors", model, other_params)
        peer.load_state_dict(load_torch_file(tmp_path / "drumline.safetensors"))
        reloaded = peer(torch.as_tensor(x))
        reloaded = getattr(reloaded, "logits", reloaded).detach().numpy()
        np.testing.assert_allclose(apply(model, other_params)(x), reloaded, rtol=1e-4, atol=1e-4)


def find_cause(add_fault: Callable[[Any], None], lm: LM = DECODER) -> tuple[str, str, str]:
    """Return the layer, the cause and its description for a fault in a Llama."""
    params = random_params(DECODER, 0)
    peer = load_params(llama(), DECODER, params)
    add_fault(peer)
    divergence = trace_divergence(lm_function(lm, params), peer, tokens(0), rename=LLAMA)
    assert divergence.first is not None
    assert divergence.cause is not None
    return divergence.first.name, divergence.cause.kind, divergence.cause.description


def test_an_unknown_scale_is_not_reported_as_a_known_one() -> None:
    for scale in (0.5, 2.5):
        layer, cause, description = find_cause(
            set_in_torch("model.layers.0.self_attn", scaling=scale)
        )
        assert (layer, cause) == ("blocks.0.mixed", "attention")
        assert "scores times 1/√H" in description
        assert "PyTorch an unknown variant" in description


def test_an_unknown_rotary_base_is_unknown() -> None:
    layer, cause, _ = find_cause(no_fault, replace(DECODER, rotary_base=2e6))
    assert (layer, cause) == ("blocks.0.mixed", "unknown")


def test_an_unknown_activation_is_not_reported_as_a_known_one() -> None:
    params = random_params(VIT, 0)
    for unknown_activation in (torch.nn.ELU(), torch.nn.Mish(), torch.nn.Softplus()):
        peer = load_params(timm_vit(), VIT, params)
        peer.blocks[0].mlp.act = unknown_activation
        divergence = trace_divergence(vit_function(VIT, params), peer, images(0), rename=TIMM_VIT)
        assert divergence.cause is not None
        assert divergence.cause.kind == "another activation"
        assert "gelu by the normal distribution, and PyTorch an unknown activation" in str(
            divergence
        )


def test_a_shared_mask_is_not_a_difference() -> None:
    class Masked(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(8, 8)
            self.i = torch.nn.Identity()

        def forward(self, x: Any) -> Any:
            visible = torch.tril(torch.ones(8, 8, dtype=torch.bool))
            return self.i(torch.where(visible, self.a(x), -torch.inf))

    torch.manual_seed(0)
    peer = Masked()
    weight, bias = (value.detach().numpy() for value in peer.a.parameters())
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)

    def jax_fn(x: jax.Array, offset: float = 0.0) -> jax.Array:
        scores = tap("a", x @ weight.T + bias)
        visible = jnp.tril(jnp.ones((8, 8), bool))
        masked: jax.Array = tap("i", jnp.where(visible, scores + offset, -jnp.inf))
        return masked

    assert trace_divergence(jax_fn, peer, x).first is None
    jitted = jax.jit(jax_fn)
    jitted(x)
    assert len(trace_divergence(jitted, peer, x).layers) == 3, (
        "a function that was already traced works too"
    )
    divergence = trace_divergence(partial(jax_fn, offset=np.nan), peer, x)
    assert divergence.cause is not None
    assert divergence.cause.kind == "not finite"
    json.dumps(divergence.to_dict(), allow_nan=False)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_pytorch_in_bfloat16_diverges_from_jax_in_float32() -> None:
    params = random_params(VIT, 0)
    peer = load_params(timm_vit(), VIT, params).bfloat16()
    divergence = trace_divergence(vit_function(VIT, params), peer, images(0), rename=TIMM_VIT)
    assert divergence.first is divergence.layers[0]
    assert "bfloat16" in str(divergence)


def test_convolutions_and_norms_of_every_kind_have_a_cause() -> None:
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((2, 4, 8, 8)).astype(np.float32)
    for layer, cause in (
        (torch.nn.Conv2d(4, 6, 3, stride=2, padding=1), "bias"),
        (torch.nn.Conv2d(4, 6, 3, padding="same", dilation=2), "bias"),
        (torch.nn.Conv2d(4, 4, 3, groups=2), "bias"),
        (torch.nn.GroupNorm(2, 4), "unknown"),
        (torch.nn.BatchNorm2d(4), "unknown"),
    ):
        without_bias = copy.deepcopy(layer).eval()
        if isinstance(layer, torch.nn.Conv2d):
            torch.nn.init.zeros_(without_bias.bias)
        output = without_bias(torch.from_numpy(x)).detach().numpy()
        if not isinstance(layer, torch.nn.Conv2d):
            output = output * 1.01
        wrong_function = partial(
            lambda output, x: tap("0", jnp.asarray(output) + 0 * x.sum()), output
        )
        divergence = trace_divergence(wrong_function, torch.nn.Sequential(layer), x)
        assert divergence.cause is not None
        assert divergence.cause.kind == cause, str(divergence)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"torch_module": object()}, "torch_module is object, no torch.nn.Module"),
        ({"bound": 0}, "bound is 0; it has to be more than 1"),
        ({"bound": float("nan")}, "bound is nan"),
        ({"inputs": {"x": 1}}, "an input is dict"),
        ({"rename": lambda _: 3}, "becomes 3, which is not a name"),
    ],
)
def test_bad_arguments_are_a_user_error(changes: Any, sentence: str) -> None:
    arguments = {
        "torch_module": torch.nn.Sequential(torch.nn.Linear(2, 2)),
        "inputs": np.ones((1, 2)),
    }
    with pytest.raises(UserError, match=re.escape(sentence)):
        trace_divergence(lambda x: tap("0", x), **{**arguments, **changes})
