"""`BlockShape`: the sizes of a Transformer block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockShape:
    """The sizes of a block, and what is fixed about how it computes.

    Attributes:
        width: D, the length of a token's vector.
        heads: N, the number of query heads.
        kv_heads: K, the number of key and value heads; N/K queries share one.
        head_dim: H, the length of a head's vectors.
        hidden: F, the width of the feed-forward part.
        gated: whether the feed-forward part multiplies a gate with a second projection.
        causal: whether a token sees only those before it.
        rotary_base: the wavelength of the slowest rotary pair is 2π times this; None leaves
            positions to whoever makes the tokens.
        epsilon: added to the mean square in the norms.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    gated: bool = True
    causal: bool = True
    rotary_base: float | None = 10_000.0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse heads that cannot share, and heads that cannot be turned in pairs."""
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads: {self.heads} queries cannot share {self.kv_heads} kv_heads evenly"
            )
        if self.rotary_base is not None and self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd; rotary positions need pairs")
