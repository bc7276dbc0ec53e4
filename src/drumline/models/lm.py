"""A Llama-style decoder: RMS norms, rotary positions, grouped-query attention, gated feed-forward.

    tokens[B, S] → table[V, D] → L blocks of causal attention and feed-forward → norm → head[D, V]

With `experts`, the feed-forward layers are dropless mixtures of experts, and the loss includes the
load-balancing loss and the z-loss of the router.

Tensor parallelism shards the sequence between the projections, heads and hidden features inside
them, and the vocabulary of the logits. No device ever holds all logits.
"""

# Shapes in the types are not Python expressions.
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

from drumline.models.losses import (
    IGNORE_INDEX,
    Total,
    check_indices,
    cross_entropy,
    masked_mean,
    masked_total,
)
from drumline.models.remat import Remat, check_remat
from drumline.models.sharding import (
    Batch,
    Layout,
    LocalFunction,
    LogicalAxes,
    Metrics,
    ModelSharding,
    Output,
    Params,
    ShardedModel,
    Weights,
    axes_of,
    check_disjoint_axes,
    check_same_axes,
    mean_over_devices,
    resolve_layout,
    unstack_layers,
)
from drumline.parallel.block.attention import Kernel, RotaryScaling, attend
from drumline.parallel.block.layers import (
    attention_layer,
    expert_layer,
    feedforward_layer,
    rms_norm,
)
from drumline.parallel.block.weights import (
    BlockShape,
    Weight,
    attention_weights,
    expert_weights,
    feedforward_weights,
    init,
    logical_axes,
    stack_layers,
)
from drumline.parallel.einsum.costs import Implementation
from drumline.parallel.experts.layer import moe_feedforward
from drumline.parallel.experts.routing import Routing, router_logits
from drumline.parallel.rings.ring import check_choice, check_wire_dtype
from drumline.parallel.taps import scope, tap

AXES = ("batch", "sequence", "embed", "heads", "hidden", "vocab", "experts")
"""The logical axes. "heads" are query and key-value heads, "hidden" is the hidden dimension of the
dense feed-forward layer."""

_TENSOR: Layout = {"sequence": "model", "heads": "model", "hidden": "model", "vocab": "model"}

LAYOUTS: dict[str, Layout] = {
    "data": {"batch": "data"},
    "fsdp": {"batch": "data", "embed": "data"},
    "tensor": {"batch": "data", "experts": "model", **_TENSOR},
    "fsdp+tensor": {"batch": "data", "embed": "data", "experts": "model", **_TENSOR},
    "expert": {"batch": ("data", "expert"), "experts": "expert"},
    "fsdp+expert": {
        "batch": ("data", "expert"),
        "embed": ("data", "expert"),
        "experts": "expert",
    },
    "expert+tensor": {"batch": ("data", "expert"), "experts": "expert", **_TENSOR},
}

OUTER_AXES: dict[str, LogicalAxes] = {
    "table": (None, ("sequence", "embed")),
    "norm": (None,),
    "head": ("embed", "vocab"),
}
"""The logical axes of the weights before and after the blocks."""


@dataclass(frozen=True)
class LM(ShardedModel):
    """A decoder: its sizes, its layout on a mesh, and the options of its computation.

    Attributes:
        width: D, the model dimension.
        depth: L, the number of blocks.
        heads: N, the number of query heads.
        head_dim: H, the dimension of a head.
        kv_heads: K, the number of key and value heads; N/K query heads share one.
        hidden: F, the hidden dimension of the feed-forward layer, or of an expert.
        vocab: V, the size of the vocabulary.
        experts: E, the number of experts per block; 0 for a dense feed-forward layer.
        experts_per_token: k, the number of experts per token.
        balance_weight: the weight of the load-balancing loss, which is 1 under a uniform load.
        z_weight: the weight of the z-loss, the mean square of the router's log-sum-exp.
        layout: a name from `LAYOUTS`, or a mapping from logical to mesh axes.
        compute_dtype: the type of the matmuls; the weights are stored in float32.
        wire_dtype: the type in which the sums of sharded matmuls are sent. None is float32; on a
            TPU it is `compute_dtype`, which halves the bytes and rounds at every permute.
        implementation: `"ring"` to overlap the communication of sharded matmuls, `"xla"` for
            blocking collectives. `"auto"` is a ring, except on TPUs where whole steps do not gain.
        attention: `"auto"` for the best kernel of the platform, or the name of a kernel
            (`drumline.parallel.block.attention`).
        scan_layers: True to compile one block and run all layers in a loop.
        remat: the rematerialization policy (`drumline.models.remat`): `"none"`, `"dots"`,
            `"projections"` or `"full"`; True for `"full"`, False for `"none"`.
        rotary_base: the base of the rotary embedding. The longest wavelength is 2π times this.
        rotary_scaling: the scaling of the rotary frequencies for sequences that are longer than in
            pre-training, as in Llama 3.1; None for none.
        epsilon: the constant added to the mean square in the norms.
        ignore_index: the token that is not predicted, such as padding.
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
    implementation: Implementation = "auto"
    attention: Kernel = "auto"
    scan_layers: bool = False
    remat: Remat = False
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    epsilon: float = 1e-6
    ignore_index: int = IGNORE_INDEX

    item = "tokens"

    def __post_init__(self) -> None:
        """Check the sizes, the options and the layout."""
        if self.heads % self.kv_heads:
            raise ValueError(
                f"LM: {self.heads} query heads cannot share {self.kv_heads} kv_heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(f"LM: head_dim {self.head_dim} is odd; rotary positions need pairs")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"LM: experts_per_token is {self.experts_per_token}; with {self.experts} experts "
                f"it can be 1 to {self.experts}"
            )
        if self.rotary_scaling:
            factor, low, high, length = self.rotary_scaling
            is_linear = low is None and high is None and length is None
            if factor <= 0 or not (is_linear or (low and high and length and low < high)):
                raise ValueError(
                    f"LM: {self.rotary_scaling} is not valid; give a positive factor, alone or "
                    "with low_freq_factor < high_freq_factor and the original length"
                )
        check_remat("LM", self.remat)
        check_wire_dtype("LM", self.wire_dtype)
        check_choice("LM", "implementation", self.implementation, get_args(Implementation))
        if self.attention not in get_args(Kernel):
            kernels = ", ".join(get_args(Kernel))
            raise ValueError(f"LM: attention is {self.attention!r}; it can be {kernels}")
        layout = self._layout()
        dense = () if self.experts else ("hidden",)
        check_same_axes("LM", layout, ("sequence", "heads", "vocab", *dense))
        check_disjoint_axes("LM", layout, "batch", "sequence")
        if self.experts:
            _check_expert_axes(layout)

    def init(self, key: PRNGKeyArray) -> Params:
        """Draw the weights with variance 1/fan-in, and the embedding table with variance 1/D.

        The last weights of the residual branches have 1/(2·L) of this variance, so the variance of
        the residual stream does not grow with the depth.
        """
        d, branches = self.width, 2 * self.depth
        keys = iter(jax.random.split(key, 9))

        def normal(fan_in: int, *dims: int) -> jax.Array:
            return jax.random.normal(next(keys), dims) / sqrt(fan_in)

        def draw(weight: Weight) -> jax.Array:
            return normal(weight.fan_in * (branches if weight.ends_branch else 1), *weight.dims)

        blocks = init(stack_layers(self._block_weights(), self.depth), draw)
        table, head = normal(d, self.vocab, d), normal(d, d, self.vocab)
        return {"table": table, "blocks": blocks, "norm": jnp.ones(d), "head": head}

    def loss(
        self, params: Params, batch: dict[str, jax.Array], key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        """Return the mean cross-entropy of the next tokens, plus the losses of the router.

        A token out of range raises ValueError. Under `jit`, where values are unknown, the loss is
        NaN instead.

        Args:
            params: the weights from `init`.
            batch: "tokens", `int[B, S + 1]`, whose tokens predict their successors, except
                `ignore_index` (padding). To predict only some tokens, such as the answer to a
                prompt, add "targets", `int[B, S]`, with `ignore_index` in all other positions.
            key: unused.

        Returns:
            The loss, and the metrics "cross_entropy" and, with experts, "balance_loss" and
            "z_loss", unweighted and averaged over the blocks.
        """
        del key
        return self._run(self._local_loss, params, batch)

    def evaluate(self, params: Params, batch: dict[str, jax.Array]) -> dict[str, Total | jax.Array]:
        """Return the total and the count of the cross-entropy of a batch, which is also the loss.

        The losses of the router are for training, and not part of this loss. The balance loss is
        not a mean over tokens, so it is left out. The z-loss is a mean over all positions.
        """
        return self._run(self._local_totals, params, batch)

    def logits(self, params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """Return the logits of the next tokens on a single device. Supports `collecting` taps."""
        sharding = ModelSharding.on_one_device("LM", self._layout())
        return self._local_logits(sharding, params, jnp.asarray(tokens, jnp.int32))[0]

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Raise ValueError if a token is out of range. Skip traced tokens."""
        for name in ("tokens", "targets"):
            if name in batch:
                check_indices(f"LM: {name}", batch[name], self.vocab, self.ignore_index)
        if "targets" in batch:
            count, length = batch["tokens"].shape
            if batch["targets"].shape != (count, length - 1):
                raise ValueError(
                    f"LM: targets have shape {batch['targets'].shape}, but tokens of shape "
                    f"{(count, length)} predict targets of shape {(count, length - 1)}"
                )

    def flops(self, batch: Mapping[str, Any]) -> float:
        """Return the matmul FLOPs of a training step, three times those of the forward pass.

        A token costs 6 per weight (without the embedding table and the experts that it does not
        use), and 6·S·N·H per block for causal attention.
        """
        d, attention_dim = self.width, self.heads * self.head_dim
        block_weights = 2 * d * (attention_dim + self.kv_heads * self.head_dim)
        if self.experts:
            block_weights += d * self.experts + self.experts_per_token * 3 * d * self.hidden
        else:
            block_weights += 3 * d * self.hidden
        attention = int(batch["tokens"].shape[1] - 1) * attention_dim
        blocks = self.depth * (block_weights + attention)
        return 6.0 * self.items(batch) * (blocks + d * self.vocab)

    def items(self, batch: Mapping[str, Any]) -> int:
        """Return the number of tokens that a batch predicts."""
        count, length = batch["tokens"].shape
        return int(count * (length - 1))

    def _layout(self) -> Layout:
        return resolve_layout("LM", self.layout, LAYOUTS, AXES)

    def _block_weights(self) -> dict[str, Weight]:
        shape = BlockShape(self.width, self.heads, self.kv_heads, self.head_dim, self.hidden)
        if self.experts:
            feedforward = expert_weights(self.width, self.hidden, self.experts)
        else:
            feedforward = feedforward_weights(shape)
        return {**attention_weights(shape), **feedforward}

    def _logical_axes(self) -> dict[str, Any]:
        blocks = logical_axes(stack_layers(self._block_weights(), self.depth))
        return {**OUTER_AXES, "blocks": blocks}

    def _run(self, local: LocalFunction[Output], params: Params, batch: Batch) -> Output:
        sharding = ModelSharding.on_current_mesh("LM", self._layout())
        self.check_batch(batch)
        count, length = batch["tokens"].shape
        sharding.check_rows("a batch of", count, "batch")
        sharding.check_rows("a sequence of", length - 1, "sequence")
        return sharding.run(local, params, self._logical_axes(), batch)

    def _local_loss(
        self, sharding: ModelSharding, params: Params, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        losses, targets, router_metrics = self._token_losses(sharding, params, batch)
        loss = masked_mean(losses, targets, ignore_index=self.ignore_index)
        metrics = {
            "cross_entropy": loss,
            **{name: jnp.mean(per_block) for name, per_block in router_metrics.items()},
        }
        if self.experts:
            loss = loss + self.balance_weight * metrics["balance_loss"]
            loss = loss + self.z_weight * metrics["z_loss"]
        return loss, metrics

    def _local_totals(
        self, sharding: ModelSharding, params: Params, batch: dict[str, jax.Array]
    ) -> dict[str, Total | jax.Array]:
        losses, targets, router_metrics = self._token_losses(sharding, params, batch)
        total = masked_total(losses, targets, ignore_index=self.ignore_index)
        metrics: dict[str, Total | jax.Array] = {"loss": total, "cross_entropy": total}
        if self.experts:
            metrics["z_loss"] = jnp.mean(router_metrics["z_loss"])
        return metrics

    def _token_losses(
        self, sharding: ModelSharding, params: Params, batch: dict[str, jax.Array]
    ) -> tuple[Float[Array, "B S"], Int[Array, "B S"], Metrics]:
        """Return the cross-entropy of each target, the targets, and the router's losses."""
        tokens = batch["tokens"].astype(jnp.int32)
        logits, router_metrics = self._local_logits(sharding, params, tokens[:, :-1])
        targets = batch["targets"].astype(jnp.int32) if "targets" in batch else tokens[:, 1:]
        losses = cross_entropy(
            logits, targets, sharding.axes("vocab"), ignore_index=self.ignore_index
        )
        return losses, targets, router_metrics

    def _local_logits(
        self, sharding: ModelSharding, params: Params, tokens: Int[Array, "B S"]
    ) -> tuple[Float[Array, "B S V"], Metrics]:
        """Return this device's shard of the logits, and the router's losses per block."""
        dtype = jnp.dtype(self.compute_dtype)
        x = tap("table", self._embed(sharding, params["table"], tokens).astype(dtype))
        block = sharding.rematerialize(
            lambda x, shards: self._block(sharding, x, shards),
            remat=self.remat,
            scanned=self.scan_layers,
        )
        if self.scan_layers:
            x, metrics = lax.scan(block, x, params["blocks"])
        else:
            block_metrics = []
            for index, shards in enumerate(unstack_layers(params["blocks"], self.depth)):
                with scope(f"blocks.{index}"):
                    x, metrics = block(x, shards)
                block_metrics.append(metrics)
            metrics = jax.tree.map(lambda *values: jnp.stack(values), *block_metrics)
        norm, head = (
            sharding.gathered(params[name], OUTER_AXES[name], dtype) for name in ("norm", "head")
        )
        normed = tap("norm", rms_norm(x, norm, epsilon=self.epsilon))
        project = sharding.projections("vocab", self.wire_dtype, self.implementation)
        (logits,) = project.column_parallel(normed, [head])
        return tap("head", logits), metrics

    def _embed(
        self, sharding: ModelSharding, table: Float[Array, "V D"], tokens: Int[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """Return the float32 embeddings of this device's shard of the sequence.

        A device has some columns of the table and looks up all tokens. An all-to-all then exchanges
        columns for positions. The table is float32, so repeated tokens sum their gradients in
        float32.
        """
        table = sharding.gathered(table, OUTER_AXES["table"], jnp.float32)
        # Invalid tokens become NaN, ignored tokens zero.
        x = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        x = jnp.where((tokens == self.ignore_index)[..., None], 0.0, x)
        if axes := sharding.axes("sequence"):
            x = lax.all_to_all(x, axes, split_axis=1, concat_axis=2, tiled=True)
        return x

    def _block(
        self, sharding: ModelSharding, x: Float[Array, "B S D"], shards: Weights
    ) -> tuple[Float[Array, "B S D"], Metrics]:
        axes = logical_axes(self._block_weights())
        w = sharding.gathered(shards, axes, jnp.dtype(self.compute_dtype))
        norm = partial(rms_norm, epsilon=self.epsilon)
        attention = partial(
            attend,
            causal=True,
            kernel=self.attention,
            rotary_base=self.rotary_base,
            rotary_scaling=self.rotary_scaling,
        )
        project = sharding.projections("heads", self.wire_dtype, self.implementation)
        x = attention_layer(x, w, project, norm=norm, attend=attention)
        if self.experts:
            return expert_layer(x, w, partial(self._run_experts, sharding, w), norm=norm)
        project = sharding.projections("hidden", self.wire_dtype, self.implementation)
        return feedforward_layer(x, w, project, norm=norm, activation=jax.nn.silu), {}

    def _run_experts(
        self, sharding: ModelSharding, w: Weights, x: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S D"], Metrics]:
        axes = sharding.axes("experts")
        rows = x.reshape(-1, x.shape[-1])
        out, routing = moe_feedforward(
            rows,
            w["router"],
            w["experts_in"],
            w["experts_out"],
            k=self.experts_per_token,
            axis_name=axes[0] if axes else None,
        )
        return out.reshape(x.shape), router_losses(rows, w["router"], routing)


def router_losses(
    rows: Float[Array, "T D"], router: Float[Array, "D E"], routing: Routing
) -> Metrics:
    """Return the router's load-balancing loss and z-loss over the tokens of all devices.

    The losses in `routing` cover only the devices that share experts. The load-balancing loss is a
    product of means, so the mean of these losses would depend on the layout.
    """
    # The compiler merges these logits with the identical ones of `moe_feedforward`.
    local_probability = jnp.mean(jax.nn.softmax(router_logits(rows, router)), axis=0)
    tokens_per_expert = routing.tokens_per_expert.astype(jnp.float32)
    probability = mean_over_devices(local_probability)
    load = mean_over_devices(tokens_per_expert / jnp.sum(tokens_per_expert))
    balance = router.shape[1] * jnp.sum(load * probability)
    return {"balance_loss": balance, "z_loss": mean_over_devices(routing.z_loss)}


def llama_350m(**changes: Any) -> LM:
    """Return a decoder with 373,867,520 parameters, 341.1 million outside the embedding."""
    sizes = LM(width=1024, depth=24, heads=16, head_dim=64, kv_heads=16, hidden=2816)
    return replace(sizes, **changes)


def llama_1b3(**changes: Any) -> LM:
    """Return a decoder with 1,345,423,360 parameters, 1,279.9 million outside the embedding."""
    sizes = LM(width=2048, depth=24, heads=16, head_dim=128, kv_heads=16, hidden=5504)
    return replace(sizes, **changes)


def _check_expert_axes(layout: Layout) -> None:
    axes = axes_of(layout, "experts")
    row_axes = axes_of(layout, "batch") + axes_of(layout, "sequence")
    if len(axes) > 1:
        raise ValueError(
            f"LM: layout shards experts over {' and '.join(axes)}; give them one mesh axis"
        )
    if axes and axes[0] not in row_axes:
        raise ValueError(
            f"LM: layout shards experts over {axes[0]!r}, which shards neither batch nor sequence; "
            "tokens are sent to their experts along this axis, so shard one of the two over it"
        )
