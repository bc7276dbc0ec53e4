"""The sizes of the published models, with their parameter counts and model FLOPs.

The sizes are those of MaxText's model files. The FLOPs are counted like MaxText's, so that a row's
seconds and its printed TFLOP/s can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """A mixture of experts that drops tokens beyond an expert's capacity."""

    count: int
    chosen: int
    """The number of experts for each token."""
    capacity_factor: float

    def capacity(self, length: int) -> int:
        """Return the number of tokens of one sequence that one expert takes."""
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
    """The number of learned positions, which replace the rotary ones."""
    biases: bool = False
    """Use layer norm instead of RMS norm, and a bias in each matmul of a layer."""
    tied: bool = False
    """True if the head is the embedding."""
    windows: tuple[int | None, ...] = (None,)
    """The attention windows of the repeating layers; None is the whole sequence."""
    qk_norms: bool = False
    post_norms: bool = False
    experts: Experts | None = None

    def parameters(self) -> int:
        """Return the number of weights, including the embedding."""
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
            # The biases of q, k, v and the MLP's first matmul, of its second and of out, of both
            # norms.
            layer += (self.heads + 2 * self.kv_heads) * self.head + self.mlp + 4 * self.embed
        embedding_weights = (
            self.vocab * self.embed * (1 if self.tied else 2) + self.positions * self.embed
        )
        return self.layers * layer + embedding_weights + self.embed * (1 + self.biases)

    def flops(self, tokens: int, length: int, *, causal: bool) -> float:
        """Return the model FLOPs of a step over `tokens` tokens, counted like MaxText.

        The count is six for each token and weight of a matmul. It includes the head but not the
        embedding, and only the chosen experts without their spare capacity. Attention adds twelve
        for each token, key and channel. `causal` counts half of the attention, like MaxText since
        its pull request 1988.
        """
        layer = self._attention_weights()
        if self.experts:
            layer += self.experts.chosen * self._mlp_weights() + self.embed * self.experts.count
        else:
            layer += self._mlp_weights()
        matmul_flops = 6 * tokens * (self.layers * layer + self.vocab * self.embed)
        key_count = sum(min(window or length, length) for window in self.windows)
        repeats = self.layers // len(self.windows)
        attention_flops = 12 * tokens * key_count * repeats * self.heads * self.head
        return matmul_flops + attention_flops * (0.5 if causal else 1.0)

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
