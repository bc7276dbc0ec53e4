"""Which intermediate of a JAX function is which of a PyTorch module.

A PyTorch name is that of a module, for what it returns; `norm1:input` is what it was given,
`qkv[1/3]` the second of three equal parts of the last dimension (counted from nought), and
`norm[:,0]` the first token of each sequence.
"""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from drumline.numerics.errors import Numbers
from drumline.numerics.mistakes import Mistake

Rename = Mapping[str, str] | Callable[[str], str | None]
"""From names of the JAX side to those of PyTorch: regular expressions that fit whole names, or a
function that returns None for what has no counterpart."""

_BLOCK = r"blocks\.(\d+)\."
TIMM_VIT: Mapping[str, str] = {
    "patch": "patch_embed",
    "embedding": "blocks.0:input",
    _BLOCK + "attention_norm": r"blocks.\1.norm1",
    _BLOCK + "query": r"blocks.\1.attn.qkv[0/3]",
    _BLOCK + "key": r"blocks.\1.attn.qkv[1/3]",
    _BLOCK + "value": r"blocks.\1.attn.qkv[2/3]",
    _BLOCK + "mixed": r"blocks.\1.attn.proj:input",
    _BLOCK + "output": r"blocks.\1.attn.proj",
    _BLOCK + "attention": r"blocks.\1.norm2:input",
    _BLOCK + "feedforward_norm": r"blocks.\1.norm2",
    _BLOCK + "up": r"blocks.\1.mlp.fc1",
    _BLOCK + "activation": r"blocks.\1.mlp.act",
    _BLOCK + "down": r"blocks.\1.mlp.fc2",
    _BLOCK + "feedforward": r"blocks.\1",
    "norm": "norm[:,0]",
    "head": "head",
}
"""Our `ViT` and timm's `VisionTransformer`."""

_LAYER = r"model.layers.\1."
LLAMA: Mapping[str, str] = {
    "table": "model.embed_tokens",
    _BLOCK + "attention_norm": _LAYER + "input_layernorm",
    _BLOCK + "query": _LAYER + "self_attn.q_proj",
    _BLOCK + "key": _LAYER + "self_attn.k_proj",
    _BLOCK + "value": _LAYER + "self_attn.v_proj",
    _BLOCK + "mixed": _LAYER + "self_attn.o_proj:input",
    _BLOCK + "output": _LAYER + "self_attn.o_proj",
    _BLOCK + "attention": _LAYER + "post_attention_layernorm:input",
    _BLOCK + "feedforward_norm": _LAYER + "post_attention_layernorm",
    _BLOCK + "gate": _LAYER + "mlp.gate_proj",
    _BLOCK + "up": _LAYER + "mlp.up_proj",
    _BLOCK + "activation": _LAYER + "mlp.act_fn",
    _BLOCK + "down": _LAYER + "mlp.down_proj",
    _BLOCK + "feedforward": r"model.layers.\1",
    "norm": "model.norm",
    "head": "lm_head",
}
"""Our `LM` and transformers' `LlamaForCausalLM`."""


@dataclass(frozen=True)
class TorchPlace:
    """Where on the PyTorch side a value is found.

    Attributes:
        module: the name of the module.
        given: whether it is what the module was given, and not what it returned.
        part: which of so many equal parts of the last dimension; None for the whole.
        token: which of the second dimension; None for all.
    """

    module: str
    given: bool = False
    part: tuple[int, int] | None = None
    token: int | None = None

    @staticmethod
    def read(name: str) -> TorchPlace:
        """A place as it is written."""
        found = re.fullmatch(r"(.*?)(?:\[(\d+)/(\d+)\]|\[:, ?(\d+)\])?(:input)?", name)
        assert found is not None  # every group may be empty
        module, number, count, token, given = found.groups()
        if number is not None and int(number) >= int(count):
            raise Mistake(
                f"rename: {name}: parts are counted from nought, so of 3 they are [0/3] to [2/3]"
            )
        part = None if number is None else (int(number), int(count))
        return TorchPlace(module, bool(given), part, None if token is None else int(token))

    def pick(self, whole: Numbers) -> Numbers:
        """What this place means of all that the module returned or was given."""
        if self.token is not None:
            if whole.ndim < 2 or whole.shape[1] <= self.token:
                raise Mistake(f"rename: {self.module} has no [:,{self.token}]; it is {whole.shape}")
            return whole[:, self.token]
        if self.part is None:
            return whole
        number, count = self.part
        if whole.shape[-1] % count:
            raise Mistake(
                f"rename: {self.module} returns {whole.shape[-1]} features, which are not {count} "
                "equal parts"
            )
        return np.split(whole, count, axis=-1)[number]


def counterpart(name: str, rename: Rename | None) -> str | None:
    """The PyTorch name of a JAX one; None where it has none."""
    if rename is None:
        return name
    if callable(rename):
        return rename(name)
    for pattern, theirs in rename.items():
        if pattern == name:
            return theirs
        try:
            found = re.fullmatch(pattern, name)
        except re.error as wrong:
            raise Mistake(f"rename: {pattern!r} is no regular expression: {wrong}") from None
        if found:
            return found.expand(theirs)
    return None
