"""A Llama-style decoder: RMS norms, rotary positions, grouped queries, gated feed-forward.

    tokens[B, S] → table[V, D] → blocks of causal attention and feed-forward → norm → head[D, V]

With `experts` the feed-forward part of every block is a mixture of them that drops no token, and
two terms are added to the loss: one for using all experts, one for keeping the router's scores
small. Under tensor parallelism each device has its own part of the sequence between the
projections, its own heads and hidden features within them, and its own part of the vocabulary at
the end, where no device ever sees all logits.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from drumline.models.layouts import (
    Dims,
    Division,
    Layout,
    Metrics,
    OnMesh,
    Params,
    Weights,
    axes_of,
    check_apart,
    check_together,
    layers,
    over_all,
    read_layout,
)
from drumline.models.losses import (
    IGNORE_INDEX,
    check_numbers,
    cross_entropy,
    mean_of_counted,
)
from drumline.models.remat import Remat, check_remat
from drumline.parallel.block import steps
from drumline.parallel.block.attention import Kernel, attend
from drumline.parallel.block.norms import rms_norm
from drumline.parallel.block.shape import BlockShape
from drumline.parallel.block.weights import (
    Weight,
    attention_weights,
    axes_by_name,
    begin,
    expert_weights,
    feedforward_weights,
    stacked,
)
from drumline.parallel.experts.layer import moe_feedforward
from drumline.parallel.experts.routing import Routing, router_logits
from drumline.parallel.rings.ring import read_wire_dtype
from drumline.parallel.taps import scope, tap

AXES = ("batch", "sequence", "embed", "heads", "hidden", "vocab", "experts")
"""Logical axes: examples, positions, a token's vector, attention heads (and those of keys and
values), features of the dense feed-forward part, tokens to choose from, experts."""

_RING: Layout = {"sequence": "model", "heads": "model", "hidden": "model", "vocab": "model"}

LAYOUTS: dict[str, Layout] = {
    "data": {"batch": "data"},
    "fsdp": {"batch": "data", "embed": "data"},
    "tensor": {"batch": "data", "experts": "model", **_RING},
    "fsdp+tensor": {"batch": "data", "embed": "data", "experts": "model", **_RING},
    "expert": {"batch": ("data", "expert"), "experts": "expert"},
    "fsdp+expert": {
        "batch": ("data", "expert"),
        "embed": ("data", "expert"),
        "experts": "expert",
    },
    "expert+tensor": {"batch": ("data", "expert"), "experts": "expert", **_RING},
}

OUTSIDE: dict[str, Dims] = {
    "table": (None, ("sequence", "embed")),
    "norm": (None,),
    "head": ("embed", "vocab"),
}
"""Weights before and after the blocks, and the logical axes of their dimensions."""


@dataclass(frozen=True)
class LM(OnMesh):
    """The sizes of a decoder, how it computes, and how it lies on a mesh.

    Attributes:
        width: D, the length of a token's vector.
        depth: L, the number of blocks.
        heads: N, the number of query heads.
        head_dim: H, the length of a head's vectors.
        kv_heads: K, the number of key and value heads, N/K queries to each.
        hidden: F, the width of the feed-forward part, or of each expert.
        vocab: V, the number of different tokens.
        experts: E in each block; 0 for a dense feed-forward part.
        experts_per_token: k, how many of them a token goes to.
        balance_weight: of the loss that is 1 when all experts are used alike.
        z_weight: of the loss that is the mean square of the router's log-sum-exp.
        layout: a name from `LAYOUTS`, or a mapping from logical to mesh axes.
        compute_dtype: the type to multiply in; the weights are stored in float32.
        wire_dtype: the type in which sums travel on the rings of divided weights; None is float32,
            `"bfloat16"` half the bytes, rounded at every hop.
        attention: `"auto"` for the best kernel of the platform, or the name of one
            (`drumline.parallel.block.attention`).
        scan_layers: whether one compiled block serves all layers, in a loop.
        remat: what the blocks keep for the backward pass, the rest being computed again: True or
            `"full"` for nothing, `"projections"`, `"dots"`, False or `"none"` for everything
            (`drumline.models.remat`).
        rotary_base: the wavelength of the slowest rotary pair is 2π times this.
        epsilon: added to the mean square in the norms.
        ignore_index: what stands in a batch for a token that is not to be predicted.
    """

    width: int
    depth: int
    heads: int
    head_dim: int
    kv_heads: int
    hidden: int
    vocab: int = 32_000
    experts: int = 0
    experts_per_token: int = 2
    balance_weight: float = 0.01
    z_weight: float = 0.001
    layout: str | Layout = field(default="data", hash=False)
    compute_dtype: str = "bfloat16"
    wire_dtype: str | None = None
    attention: Kernel = "auto"
    scan_layers: bool = False
    remat: Remat = False
    rotary_base: float = 10_000.0
    epsilon: float = 1e-6
    ignore_index: int = IGNORE_INDEX

    item = "tokens"

    def __post_init__(self) -> None:
        """Refuse sizes and layouts that no mesh could mend."""
        if self.heads % self.kv_heads:
            raise ValueError(
                f"LM: {self.heads} query heads cannot share {self.kv_heads} kv_heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(f"LM: head_dim {self.head_dim} is odd; rotary positions need pairs")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"LM: experts_per_token is {self.experts_per_token}; of {self.experts} experts "
                f"a token can go to 1 to {self.experts}"
            )
        check_remat("LM", self.remat)
        read_wire_dtype("LM", self.wire_dtype)
        if self.attention not in get_args(Kernel):
            known = ", ".join(get_args(Kernel))
            raise ValueError(f"LM: attention is {self.attention!r}; it can be {known}")
        layout = self._layout()
        dense = () if self.experts else ("hidden",)
        check_together("LM", layout, ("sequence", "heads", "vocab", *dense))
        check_apart("LM", layout, "batch", "sequence")
        if self.experts:
            _check_experts(layout)

    def init(self, key: PRNGKeyArray) -> Params:
        """Draw the weights, each with variance 1/(the length it is summed over).

        Those that end a block's two branches have 1/(2·L) of that, so that the sum over the
        blocks does not grow with their number; the table's is 1/D.
        """
        d, branches = self.width, 2 * self.depth
        keys = iter(jax.random.split(key, 9))

        def normal(summed: int, *dims: int) -> jax.Array:
            return jax.random.normal(next(keys), dims) / sqrt(summed)

        def draw(weight: Weight) -> jax.Array:
            return normal(weight.summed * (branches if weight.ends else 1), *weight.dims)

        blocks = begin(stacked(self._block_weights(), self.depth), draw)
        table, head = normal(d, self.vocab, d), normal(d, d, self.vocab)
        return {"table": table, "blocks": blocks, "norm": jnp.ones(d), "head": head}

    def loss(
        self, params: Params, batch: dict[str, jax.Array], key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        """The mean cross-entropy of each next token, and what the experts add to it.

        A token that is not in the vocabulary is refused where its value is known. Under `jit` it
        is not, and the loss is NaN.

        Args:
            params: as `init` draws them.
            batch: "tokens", `int[B, S + 1]`: each but the last predicts the one behind it. Where
                that is `ignore_index`, as padding should be, nothing is to be predicted. If only
                some tokens are (the answer to a prompt, say), "targets", `int[B, S]`, has them,
                and `ignore_index` in place of all others.
            key: for models with randomness in them; here there is none.

        Returns:
            The loss to minimize, and its parts: "cross_entropy", and with experts
            "balance_loss" and "z_loss" before they are weighted, averaged over the blocks.
        """
        del key
        here = Division.here("LM", self._layout())
        self.check_batch(batch)
        count, length = batch["tokens"].shape
        here.check_rows("a batch of", count, "batch")
        here.check_rows("a sequence of", length - 1, "sequence")
        return here.run(self._local_loss, params, self._dims(), batch)

    def logits(self, params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """The scores of each next token, on one device: to sample from, or to compare with others'.

        Every step of the way can be tapped.
        """
        here = Division.whole("LM", self._layout())
        return self._local_logits(here, params, jnp.asarray(tokens, jnp.int32))[0]

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Refuse tokens that are not in the vocabulary, where their values are known."""
        for name in ("tokens", "targets"):
            if name in batch:
                check_numbers(f"LM: {name}", batch[name], self.vocab, self.ignore_index)
        if "targets" in batch:
            count, length = batch["tokens"].shape
            if batch["targets"].shape != (count, length - 1):
                raise ValueError(
                    f"LM: targets are {batch['targets'].shape}, but tokens of {(count, length)} "
                    f"predict {(count, length - 1)}"
                )

    def flops(self, batch: Mapping[str, Any]) -> float:
        """FLOPs of a training step: of the multiplications, three times those of the forward pass.

        That is 6 for each weight and token (the table is looked up, not multiplied by; of the
        experts only those a token goes to), and 6·S·N·H a token and block for causal attention,
        half of what the full square would be.
        """
        d, mixed = self.width, self.heads * self.head_dim
        block = 2 * d * (mixed + self.kv_heads * self.head_dim)
        if self.experts:
            block += d * self.experts + self.experts_per_token * 3 * d * self.hidden
        else:
            block += 3 * d * self.hidden
        seen = int(batch["tokens"].shape[1] - 1) * mixed
        return 6.0 * self.items(batch) * (self.depth * (block + seen) + d * self.vocab)

    def items(self, batch: Mapping[str, Any]) -> int:
        """Tokens that a batch predicts."""
        count, length = batch["tokens"].shape
        return int(count * (length - 1))

    def _layout(self) -> Layout:
        return read_layout("LM", self.layout, LAYOUTS, AXES)

    def _block_weights(self) -> dict[str, Weight]:
        shape = BlockShape(self.width, self.heads, self.kv_heads, self.head_dim, self.hidden)
        if self.experts:
            second = expert_weights(self.width, self.hidden, self.experts)
        else:
            second = feedforward_weights(shape)
        return {**attention_weights(shape), **second}

    def _dims(self) -> dict[str, Any]:
        return {**OUTSIDE, "blocks": axes_by_name(stacked(self._block_weights(), self.depth))}

    def _local_loss(
        self, here: Division, params: Params, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        tokens = batch["tokens"].astype(jnp.int32)
        logits, extra = self._local_logits(here, params, tokens[:, :-1])
        targets = batch["targets"].astype(jnp.int32) if "targets" in batch else tokens[:, 1:]
        ignored = {"ignore_index": self.ignore_index}
        losses = cross_entropy(logits, targets, here.axes("vocab"), **ignored)
        loss = mean_of_counted(losses, targets, **ignored)
        metrics = {"cross_entropy": loss, **{name: jnp.mean(each) for name, each in extra.items()}}
        if self.experts:
            loss = loss + self.balance_weight * metrics["balance_loss"]
            loss = loss + self.z_weight * metrics["z_loss"]
        return loss, metrics

    def _local_logits(
        self, here: Division, params: Params, tokens: Int[Array, "B S"]
    ) -> tuple[Float[Array, "B S V"], Metrics]:
        """The scores of the device's own part of the vocabulary, and what the experts tell."""
        dtype = jnp.dtype(self.compute_dtype)
        x = tap("table", self._look_up(here, params["table"], tokens).astype(dtype))
        block = here.block(
            lambda x, stored: self._block(here, x, stored),
            remat=self.remat,
            scanned=self.scan_layers,
        )
        if self.scan_layers:
            x, extra = lax.scan(block, x, params["blocks"])
        else:
            extras = []
            for number, stored in enumerate(layers(params["blocks"], self.depth)):
                with scope(f"blocks.{number}"):
                    x, extra = block(x, stored)
                extras.append(extra)
            extra = jax.tree.map(lambda *each: jnp.stack(each), *extras)
        norm, head = (here.at_hand(params[name], OUTSIDE[name], dtype) for name in ("norm", "head"))
        normed = tap("norm", rms_norm(x, norm, epsilon=self.epsilon))
        (logits,) = here.projections("vocab", self.wire_dtype).spread_out(normed, [head])
        return tap("head", logits), extra

    def _look_up(
        self, here: Division, table: Float[Array, "V D"], tokens: Int[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """The vectors of the device's own part of the sequence, in float32.

        Each device has some columns of the table and looks up all tokens; then the devices of the
        ring trade columns for positions. The gradient takes the same way back, and a token's
        gradients are summed in float32, however often it occurs.
        """
        table = here.at_hand(table, OUTSIDE["table"], jnp.float32)
        # A number that is no token has no vector, and NaN stands for it; the ignored one has zeros.
        x = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        x = jnp.where((tokens == self.ignore_index)[..., None], 0.0, x)
        if over := here.axes("sequence"):
            x = lax.all_to_all(x, over, split_axis=1, concat_axis=2, tiled=True)
        return x

    def _block(
        self, here: Division, x: Float[Array, "B S D"], stored: Weights
    ) -> tuple[Float[Array, "B S D"], Metrics]:
        w = here.at_hand(stored, axes_by_name(self._block_weights()), jnp.dtype(self.compute_dtype))
        norm = partial(rms_norm, epsilon=self.epsilon)
        mix = partial(attend, causal=True, kernel=self.attention, rotary_base=self.rotary_base)
        project = here.projections("heads", self.wire_dtype)
        x = steps.attention(x, w, project, norm=norm, attend=mix)
        if self.experts:
            return steps.experts(x, w, partial(self._mixture, here, w), norm=norm)
        project = here.projections("hidden", self.wire_dtype)
        return steps.feedforward(x, w, project, norm=norm, activation=jax.nn.silu), {}

    def _mixture(
        self, here: Division, w: Weights, x: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S D"], Metrics]:
        over = here.axes("experts")
        rows = x.reshape(-1, x.shape[-1])
        out, routing = moe_feedforward(
            rows,
            w["router"],
            w["experts_in"],
            w["experts_out"],
            k=self.experts_per_token,
            axis_name=over[0] if over else None,
        )
        return out.reshape(x.shape), router_losses(rows, w["router"], routing)


def router_losses(
    rows: Float[Array, "T D"], router: Float[Array, "D E"], routing: Routing
) -> Metrics:
    """The router's two losses over the tokens of all devices.

    The layer's own are over the devices that share its experts. The loss for balance is no mean
    over tokens, so from those parts the whole could not be had: it would depend on the layout.
    """
    # The layer has this product too; the compiler keeps one of them.
    share = jnp.mean(jax.nn.softmax(router_logits(rows, router)), axis=0)
    used = routing.tokens_per_expert.astype(jnp.float32)
    importance, use = over_all(share), over_all(used / jnp.sum(used))
    balance = router.shape[1] * jnp.sum(use * importance)
    return {"balance_loss": balance, "z_loss": over_all(routing.z_loss)}


def llama_350m(**changes: Any) -> LM:
    """24 blocks of width 1024: 373,867,520 parameters, 341.1 million without the table."""
    sizes = LM(width=1024, depth=24, heads=16, head_dim=64, kv_heads=16, hidden=2816)
    return replace(sizes, **changes)


def llama_1b3(**changes: Any) -> LM:
    """24 blocks of width 2048: 1,345,423,360 parameters, 1,279.9 million without the table."""
    sizes = LM(width=2048, depth=24, heads=16, head_dim=128, kv_heads=16, hidden=5504)
    return replace(sizes, **changes)


def _check_experts(layout: Layout) -> None:
    over = axes_of(layout, "experts")
    rows = axes_of(layout, "batch") + axes_of(layout, "sequence")
    if len(over) > 1:
        raise ValueError(
            f"LM: layout divides experts over {' and '.join(over)}; give them one mesh axis"
        )
    if over and over[0] not in rows:
        raise ValueError(
            f"LM: layout divides experts over {over[0]!r}, but neither batch nor sequence; tokens "
            "travel to their experts along an axis that divides them, so name it for one of these"
        )
