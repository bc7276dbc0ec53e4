"""The sizes of the published models, and the arithmetic of them: parameters and model FLOPs.

The sizes are those of MaxText's model files; the FLOPs are counted as MaxText counts them, so that
a row's seconds and its printed TFLOP/s can be held against each other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """A mixture of experts that drops what exceeds an expert's capacity."""

    count: int
    chosen: int
    """Experts each token is sent to."""
    capacity_factor: float

    def capacity(self, length: int) -> int:
        """The tokens of one sequence that one expert takes."""
        return int(-(-length * self.chosen // self.count) * self.capacity_factor)


@dataclass(frozen=True)
class Model:
    """A decoder: RMS norm, rotary positions and a gated MLP unless the fields say otherwise."""

    name: str
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    vocab: int
    gate: str | None = "silu"
    """The activation of the gated MLP; None for a plain MLP with GELU."""
    rope: float = 500_000.0
    positions: int = 0
    """Learned positions; they stand instead of the rotary ones."""
    biases: bool = False
    """Layer norm instead of RMS norm, and a bias in each product of a layer."""
    tied: bool = False
    """Whether the head is the embedding."""
    windows: tuple[int | None, ...] = (None,)
    """The attention windows of the layers that repeat; None sees the whole sequence."""
    qk_norms: bool = False
    post_norms: bool = False
    experts: Experts | None = None

    def parameters(self) -> int:
        """All weights, the embedding included."""
        norms = 2 + 2 * self.post_norms
        layer = (
            self._attention_weights()
            + self._mlp_weights() * (self.experts.count if self.experts else 1)
            + norms * self.embed
            + 2 * self.head * self.qk_norms
        )
        if self.experts:
            layer += self.embed * self.experts.count
        if self.biases:
            # Those of q, k, v and the MLP's first product, of its second and of out, of both norms.
            layer += (self.heads + 2 * self.kv_heads) * self.head + self.mlp + 4 * self.embed
        ends = self.vocab * self.embed * (1 if self.tied else 2) + self.positions * self.embed
        return self.layers * layer + ends + self.embed * (1 + self.biases)

    def flops(self, tokens: int, length: int, *, causal: bool) -> float:
        """Model FLOPs of a step over that many tokens, as MaxText counts them.

        Six for each token and weight of a product, the head's included and the embedding's not,
        the chosen experts' alone and without what their capacity adds; twelve for each token, key
        and channel of the attention. `causal` counts half of the attention, which MaxText does
        since its pull request 1988.
        """
        layer = self._attention_weights()
        if self.experts:
            layer += self.experts.chosen * self._mlp_weights() + self.embed * self.experts.count
        else:
            layer += self._mlp_weights()
        products = 6 * tokens * (self.layers * layer + self.vocab * self.embed)
        keys = sum(min(window or length, length) for window in self.windows)
        repeats = self.layers // len(self.windows)
        attention = 12 * tokens * keys * repeats * self.heads * self.head
        return products + attention * (0.5 if causal else 1.0)

    def _attention_weights(self) -> int:
        return self.embed * self.head * 2 * (self.heads + self.kv_heads)

    def _mlp_weights(self) -> int:
        return (3 if self.gate else 2) * self.embed * self.mlp


LLAMA_8B = Model("llama3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Model("llama3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_405B = Model("llama3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256)
MISTRAL_7B = Model("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000, rope=1e6)
MIXTRAL_8X7B = Model(
    "mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, rope=1e6, experts=Experts(8, 2, 1.25)
)
MIXTRAL_8X22B = Model(
    "mixtral-8x22b", 56, 6144, 48, 8, 128, 16384, 32768, rope=1e6, experts=Experts(8, 2, 1.25)
)
GPT3_175B = Model(
    "gpt3-175b", 96, 12288, 96, 96, 128, 49152, 50304,
    gate=None, positions=16384, biases=True, tied=True,
)  # fmt: skip
GEMMA3_12B = Model(
    "gemma3-12b", 48, 3840, 16, 8, 256, 15360, 262144,
    gate="gelu", rope=1e6, tied=True, windows=(1024,) * 5 + (None,), qk_norms=True, post_norms=True,
)  # fmt: skip
