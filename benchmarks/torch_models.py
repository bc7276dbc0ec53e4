"""The decoder of `drumline.models.lm` in plain PyTorch, for benchmarks/train_h200.py.

The code is written for speed under `torch.compile`. It has one projection for queries, keys and
values, one for gate and up, `scaled_dot_product_attention` and PyTorch's fused cross-entropy.
Experts use rows sorted by expert and `torch._grouped_mm`.
"""

# This project does not install PyTorch.
# mypy: ignore-errors

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder with as many key and value heads as query heads."""

    width: int
    depth: int
    heads: int
    hidden: int
    vocab: int = 32_000
    length: int = 2048
    experts: int = 0
    experts_per_token: int = 2


SIZES = {
    "350m": Sizes(1024, 24, 16, 2816),
    "1b3": Sizes(2048, 24, 16, 5504),
    "moe": Sizes(1024, 24, 16, 2816, experts=8),
}


class Experts(nn.Module):
    """A mixture of gated feed-forward experts that drops no token."""

    def __init__(self, sizes: Sizes) -> None:
        """Create the weights."""
        super().__init__()
        self.count, self.k = sizes.experts, sizes.experts_per_token
        self.router = nn.Parameter(torch.empty(sizes.width, sizes.experts))
        self.gate_up = nn.Parameter(torch.empty(sizes.experts, sizes.width, 2 * sizes.hidden))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, sizes.width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted outputs of each token's experts, and their auxiliary loss."""
        rows = x.reshape(-1, x.shape[-1])
        with torch.autocast("cuda", enabled=False):
            logits = rows.float() @ self.router
        scores = logits.softmax(-1)
        gates, experts = scores.topk(self.k, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = torch.zeros(self.count, dtype=torch.int32, device=x.device)
        counts = counts.scatter_add(0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
        group_ends = counts.cumsum(0, dtype=torch.int32)
        token_index = order // self.k
        hidden = torch._grouped_mm(
            rows[token_index].bfloat16(), self.gate_up.bfloat16(), offs=group_ends
        )
        gate, up = hidden.chunk(2, -1)
        expert_outputs = torch._grouped_mm(F.silu(gate) * up, self.down.bfloat16(), offs=group_ends)
        weighted = expert_outputs * gates.flatten()[order][:, None]
        out = torch.zeros_like(rows, dtype=torch.float32).index_add(
            0, token_index, weighted.float()
        )
        balance = self.count * (counts / counts.sum() * scores.mean(0)).sum()
        auxiliary_loss = 0.01 * balance + 0.001 * logits.logsumexp(-1).square().mean()
        return out.to(x.dtype).reshape(x.shape), auxiliary_loss


class Block(nn.Module):
    """Pre-norm attention and gated feed-forward."""

    def __init__(self, sizes: Sizes) -> None:
        """Create the weights."""
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm = nn.Parameter(torch.ones(sizes.width))
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.output = nn.Linear(sizes.width, sizes.width, bias=False)
        self.feedforward_norm = nn.Parameter(torch.ones(sizes.width))
        if sizes.experts:
            self.experts = Experts(sizes)
        else:
            self.experts = None
            self.gate_up = nn.Linear(sizes.width, 2 * sizes.hidden, bias=False)
            self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the output of the block, and the auxiliary loss of its experts."""
        batch, length, width = x.shape
        normed = F.rms_norm(x, (width,), self.attention_norm, 1e-6)
        projections = self.qkv(normed).chunk(3, -1)
        query, key, value = (
            p.view(batch, length, self.heads, -1).transpose(1, 2) for p in projections
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        normed = F.rms_norm(x, (width,), self.feedforward_norm, 1e-6)
        if self.experts is not None:
            attended, auxiliary_loss = self.experts(normed)
            return x + attended, auxiliary_loss
        gate, up = self.gate_up(normed).chunk(2, -1)
        return x + self.down(F.silu(gate) * up), 0.0


class Decoder(nn.Module):
    """A decoder that returns the loss of a batch of tokens."""

    def __init__(self, sizes: Sizes) -> None:
        """Create the weights and the tables of rotary angles."""
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.depth))
        self.norm = nn.Parameter(torch.ones(sizes.width))
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        half = sizes.width // sizes.heads // 2
        angles = torch.arange(sizes.length)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for weight in self.parameters():
            if weight.ndim >= 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next tokens."""
        x = self.embedding(tokens[:, :-1])
        auxiliary_loss = 0.0
        for block in self.blocks:
            x, block_loss = block(x, self.cos, self.sin)
            auxiliary_loss = auxiliary_loss + block_loss / len(self.blocks)
        logits = self.head(F.rms_norm(x, (x.shape[-1],), self.norm, 1e-6))
        return (
            F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) + auxiliary_loss
        )


def decoder(sizes: Sizes) -> Decoder:
    """Return a decoder of the given sizes."""
    return Decoder(sizes)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs of each head by its position."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
