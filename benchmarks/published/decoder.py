"""One training step of a decoder in plain JAX, general enough for every published row.

The step follows MaxText in these recipes, with the same shardings and casts. Weights and AdamW's
moments are sharded over the batch's axes (FSDP). Each layer casts its weights to bfloat16 and
gathers them. Layers are stacked and scanned, and the recipe's remat policy selects the values of a
layer that are kept. `step` builds the step from shapes alone.
"""

# The shapes in the types are not forward references.
# ruff: noqa: F722
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from published import experts
from published.attention import Flash, Kernel, attention
from published.models import Model

LAYOUT: Mapping[str | None, tuple[str, ...]] = {
    "batch": ("dcn_data", "dcn_fsdp", "fsdp", "expert"),
    "embed": ("dcn_fsdp", "fsdp", "expert"),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "experts": ("expert",),
    None: (),
}
"""The mesh axes of each logical axis. Axes that a mesh does not have are skipped."""

Axes = tuple[str | None, ...]
Weights = dict[str, Any]
Hidden = Float[Array, "B S D"]
Tokens = Int[Array, "B S"]
State = dict[str, Any]
Batch = dict[str, Any]


@dataclass(frozen=True)
class Remat:
    """The values of a layer that are kept for the backward pass, by their MaxText names.

    The scan over the layers always keeps the layer's input.
    """

    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    """The values that the recipe keeps in the host's memory."""


@dataclass(frozen=True)
class Training:
    """The model and the settings of one step."""

    model: Model
    batch: int
    """The sequences of all devices together."""
    length: int
    remat: Remat
    flash: Flash
    weight_dtype: str = "float32"
    """The dtype of the master weights and, as in optax, of AdamW's second moment."""
    mu_dtype: str = "float32"
    vocab_tiles: int = 1
    """The number of sequence tiles. Each tile's logits are computed separately, and again
    backward.
    """

    def offloaded_bytes(self) -> int:
        """Return the bytes that a step moves to the hosts' memory and back, all devices together.

        The program keeps these values on the devices. XLA's CPU pipeline has one memory and drops
        the placement, so the compiled text does not show the transfers.
        """
        model = self.model
        widths = {
            "decoder_layer_input": model.embed,
            "query_proj": model.heads * model.head,
            "key_proj": model.kv_heads * model.head,
            "value_proj": model.kv_heads * model.head,
            "context": model.heads * model.head,
            "out_proj": model.embed,
            "mlpwo": model.embed,
        }
        width = sum(widths[name] for name in self.remat.offloaded)
        return self.batch * self.length * model.layers * width * jnp.dtype("bfloat16").itemsize


@dataclass(frozen=True)
class Weight:
    """The shape of a weight and the logical axis of each dimension."""

    shape: tuple[int, ...]
    axes: Axes


def step(
    training: Training, mesh: Mesh | AbstractMesh
) -> tuple[Callable[[State, Batch], tuple[State, Array]], tuple[State, Batch]]:
    """Return the step as a function of state and batch, with their shapes and shardings."""
    table = weights_of(training.model)
    placement = Placement(mesh)

    def stored(dtype: str) -> Weights:
        return _map(
            lambda w: jax.ShapeDtypeStruct(w.shape, dtype, sharding=placement(w.axes)), table
        )

    scalar = jax.ShapeDtypeStruct((), "int32", sharding=placement(()))
    state: State = {
        "weights": stored(training.weight_dtype),
        "mu": stored(training.mu_dtype),
        "nu": stored(training.weight_dtype),
        "count": scalar,
    }
    tokens = jax.ShapeDtypeStruct(
        (training.batch, training.length), "int32", sharding=placement(("batch", None))
    )

    def train(state: State, batch: Batch) -> tuple[State, Array]:
        loss, gradients = jax.value_and_grad(loss_of)(
            state["weights"], batch, training, placement, table
        )
        return _adamw(state, gradients), loss

    return train, (state, {"inputs": tokens, "targets": tokens})


@dataclass(frozen=True)
class Placement:
    """The shardings of a step's arrays on a mesh."""

    mesh: Mesh | AbstractMesh

    def __call__(self, axes: Axes, *, gathered: bool = False) -> NamedSharding:
        """Return the sharding of an array with these logical axes. If gathered, skip FSDP's
        axes.
        """
        used_axes: set[str] = set()
        spec: list[tuple[str, ...] | None] = []
        for axis in axes:
            mesh_axes = () if gathered and axis == "embed" else LAYOUT[axis]
            names = tuple(n for n in mesh_axes if n in self.mesh.axis_names and n not in used_axes)
            used_axes.update(names)
            spec.append(names or None)
        return NamedSharding(self.mesh, P(*spec))

    def put(self, x: Array, *axes: str | None) -> Array:
        """Return the array with the sharding of its logical axes."""
        constrained: Array = lax.with_sharding_constraint(x, self(axes))
        return constrained

    def gather(self, x: Array, axes: Axes) -> Array:
        """Return a weight in bfloat16, replicated. The cast comes first to halve the traffic."""
        cast = lax.with_sharding_constraint(x.astype(jnp.bfloat16), self(axes))
        gathered_weight: Array = lax.with_sharding_constraint(cast, self(axes, gathered=True))
        return gathered_weight


def weights_of(model: Model) -> Weights:
    """Return the shapes of all weights of a model. Repeating layers are stacked."""
    weights = {
        "embedding": Weight((model.vocab, model.embed), ("vocab", "embed")),
        **_norm("final_norm", model),
    }
    if not model.tied:
        weights["head"] = Weight((model.embed, model.vocab), ("embed", "vocab"))
    if model.positions:
        weights["positions"] = Weight((model.positions, model.embed), (None, "embed"))
    repeats = model.layers // len(model.windows)
    layer = {
        name: Weight((repeats, *w.shape), (None, *w.axes)) for name, w in _layer(model).items()
    }
    return {**weights, "layers": [layer for _ in model.windows]}


def _layer(model: Model) -> dict[str, Weight]:
    d, h, f = model.embed, model.head, model.mlp
    query, key = (model.heads, h), (model.kv_heads, h)
    table = {
        "q": Weight((d, *query), ("embed", "heads", None)),
        "k": Weight((d, *key), ("embed", "heads", None)),
        "v": Weight((d, *key), ("embed", "heads", None)),
        "out": Weight((*query, d), ("heads", None, "embed")),
        **_norm("attention_norm", model),
        **_norm("mlp_norm", model),
    }
    if model.biases:
        table |= {"q_bias": Weight(query, ("heads", None))}
        table |= {f"{name}_bias": Weight(key, ("heads", None)) for name in "kv"}
        table |= {"out_bias": Weight((d,), (None,)), "up_bias": Weight((f,), ("mlp",))}
        table |= {"down_bias": Weight((d,), (None,))}
    if model.qk_norms:
        table |= {name: Weight((h,), (None,)) for name in ("q_norm", "k_norm")}
    if model.post_norms:
        table |= {**_norm("post_attention_norm", model), **_norm("post_mlp_norm", model)}
    inputs = ("up", "gate") if model.gate else ("up",)
    if model.experts is None:
        table |= {name: Weight((d, f), ("embed", "mlp")) for name in inputs}
        return table | {"down": Weight((f, d), ("mlp", "embed"))}
    e = model.experts.count
    table |= {name: Weight((e, d, f), ("experts", "embed", "mlp")) for name in inputs}
    table |= {"router": Weight((d, e), ("embed", None))}
    return table | {"down": Weight((e, f, d), ("experts", "mlp", "embed"))}


def _norm(name: str, model: Model) -> dict[str, Weight]:
    vector = Weight((model.embed,), (None,))
    return {name: vector, **({f"{name}_bias": vector} if model.biases else {})}


def loss_of(
    weights: Weights, batch: Batch, training: Training, placement: Placement, table: Weights
) -> Float[Array, ""]:
    """Return the mean cross-entropy of the next tokens."""
    model = training.model
    embedding = placement.gather(weights["embedding"], table["embedding"].axes)
    x = placement.put(_embed(batch["inputs"], embedding), "batch", None, None)
    if model.positions:
        learned = placement.gather(weights["positions"], table["positions"].axes)
        x += learned[: training.length]
    if model.post_norms:
        x *= model.embed**0.5

    def block(x: Hidden, layers: list[Weights]) -> tuple[Hidden, None]:
        for window, layer, weight_shapes in zip(
            model.windows, layers, table["layers"], strict=True
        ):
            x = _decode(x, layer, weight_shapes, window, training, placement)
        return x, None

    checkpointed = jax.checkpoint(block, policy=_policy(training), prevent_cse=False)
    x, _ = lax.scan(checkpointed, x, weights["layers"])
    x = normalize(x, weights, "final_norm")
    head = embedding.T if model.tied else placement.gather(weights["head"], table["head"].axes)
    return cross_entropy(x, head, batch["targets"], training.vocab_tiles)


def _policy(training: Training) -> Callable[..., Any]:
    remat = training.remat
    policy: Callable[..., Any] = jax.checkpoint_policies.save_only_these_names(
        *remat.saved, *remat.offloaded
    )
    return policy


def _embed(tokens: Tokens, embedding: Float[Array, "V D"]) -> Hidden:
    """Return embedding rows as a matmul with one-hot rows, which the compiler fuses into it."""
    with jax.named_scope("kernel[iota_embed work=1]"):
        return jax.nn.one_hot(tokens, embedding.shape[0], dtype=embedding.dtype) @ embedding


def _decode(
    x: Hidden,
    layer_weights: Weights,
    table: Mapping[str, Weight],
    window: int | None,
    training: Training,
    placement: Placement,
) -> Hidden:
    """Return the output of one layer."""
    model = training.model
    # The scan has removed the stacked dimension.
    w = {
        name: placement.gather(layer_weights[name], table[name].axes[1:]) for name in layer_weights
    }
    x = checkpoint_name(placement.put(x, "batch", None, None), "decoder_layer_input")
    out = _attend(normalize(x, w, "attention_norm"), w, window, training, placement)
    if model.post_norms:
        out = normalize(out, w, "post_attention_norm")
    x = placement.put(x + out, "batch", None, None)
    y = normalize(x, w, "mlp_norm")
    out = experts.mixture(y, w, model.experts, placement) if model.experts else _mlp(y, w, model)
    if model.post_norms:
        out = normalize(out, w, "post_mlp_norm")
    return placement.put(x + out, "batch", None, None)


def _attend(
    x: Hidden, w: Weights, window: int | None, training: Training, placement: Placement
) -> Hidden:
    model, length = training.model, training.length
    q, k, v = (jnp.einsum("bsd,dhc->bshc", x, w[name]) + w.get(f"{name}_bias", 0) for name in "qkv")
    if model.qk_norms:
        q, k = normalize(q, w, "q_norm"), normalize(k, w, "k_norm")
    if not model.positions:
        q, k = rotate(q, model.rope), rotate(k, model.rope)
    q, k, v = (
        checkpoint_name(placement.put(y, "batch", None, "heads", None), f"{name}_proj")
        for name, y in (("query", q), ("key", k), ("value", v))
    )
    kernel = Kernel(
        window,
        training.flash.forward_work(length, window),
        training.flash.backward_work(length, window),
    )
    grouped = q.reshape(*q.shape[:2], model.kv_heads, -1, model.head)
    context = attention(grouped, k, v, kernel).reshape(q.shape)
    out = jnp.einsum("bshc,hcd->bsd", context, w["out"]) + w.get("out_bias", 0)
    checkpointed_out: Hidden = checkpoint_name(out, "out_proj")
    return checkpointed_out


def _mlp(x: Hidden, w: Weights, model: Model) -> Hidden:
    up = jnp.einsum("bsd,df->bsf", x, w["up"]) + w.get("up_bias", 0)
    if model.gate is None:
        inner = jax.nn.gelu(checkpoint_name(up, "mlpwi"))
    else:
        gate = checkpoint_name(jnp.einsum("bsd,df->bsf", x, w["gate"]), "mlpwi_0")
        activation = jax.nn.silu if model.gate == "silu" else jax.nn.gelu
        inner = activation(gate) * checkpoint_name(up, "mlpwi_1")
    down = jnp.einsum("bsf,fd->bsd", inner, w["down"]) + w.get("down_bias", 0)
    checkpointed_out: Hidden = checkpoint_name(down, "mlpwo")
    return checkpointed_out


def normalize(x: Float[Array, "... D"], w: Weights, name: str) -> Float[Array, "... D"]:
    """Return layer norm if the weights have a bias for it, otherwise RMS norm."""
    x32 = x.astype(jnp.float32)
    bias = w.get(f"{name}_bias")
    if bias is not None:
        x32 -= x32.mean(-1, keepdims=True)
    scaled = x32 * lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + 1e-5)
    y: Array = scaled.astype(x.dtype) * w[name].astype(x.dtype)
    return y if bias is None else y + bias.astype(x.dtype)


def rotate(x: Float[Array, "B S H C"], base: float) -> Float[Array, "B S H C"]:
    """Return the array with rotary positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * base ** (
        -jnp.arange(half, dtype=jnp.float32) / half
    )
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def cross_entropy(
    x: Hidden, head: Float[Array, "D V"], targets: Tokens, tiles: int
) -> Float[Array, ""]:
    """Return the mean loss. With several tiles, only one tile's logits exist at a time."""
    if tiles == 1:
        losses: Float[Array, "B S"] = _negative_log(x @ head, targets)
        return losses.mean()

    def tile(total: Array, part: tuple[Hidden, Tokens]) -> tuple[Array, None]:
        hidden, tile_targets = part
        return total + _negative_log(hidden @ head, tile_targets).sum(), None

    tile_inputs = jax.tree.map(
        lambda y: jnp.moveaxis(y.reshape(y.shape[0], tiles, -1, *y.shape[2:]), 1, 0), (x, targets)
    )
    checkpointed_tile = jax.checkpoint(tile, prevent_cse=False)
    total, _ = lax.scan(checkpointed_tile, jnp.zeros(()), tile_inputs)
    return total / targets.size


@jax.checkpoint
def _negative_log(logits: Float[Array, "B S V"], targets: Tokens) -> Float[Array, "B S"]:
    """Compute in float32 without residuals: the backward pass recomputes it from the logits."""
    x32 = logits.astype(jnp.float32)
    target_logits = jnp.sum(x32 * jax.nn.one_hot(targets, x32.shape[-1]), axis=-1)
    return jax.nn.logsumexp(x32, axis=-1) - target_logits


def _adamw(state: State, gradients: Weights) -> State:
    """Return the state after AdamW with a clip by the global norm, computed in float32."""
    learning_rate, b1, b2, decay = 3e-5, 0.9, 0.95, 0.1
    squares = jax.tree.leaves(
        jax.tree.map(lambda g: jnp.sum(jnp.square(g.astype(jnp.float32))), gradients)
    )
    clip = jnp.minimum(1.0, lax.rsqrt(sum(squares) + 1e-16))
    count = state["count"] + 1

    def update(w: Array, mu: Array, nu: Array, g: Array) -> tuple[Array, Array, Array]:
        g = g.astype(jnp.float32) * clip
        m = b1 * mu.astype(jnp.float32) + (1 - b1) * g
        n = b2 * nu.astype(jnp.float32) + (1 - b2) * jnp.square(g)
        adam_update = (m / (1 - b1**count)) / (jnp.sqrt(n / (1 - b2**count)) + 1e-8)
        x32 = w.astype(jnp.float32)
        updated = x32 - learning_rate * (adam_update + decay * x32)
        return updated.astype(w.dtype), m.astype(mu.dtype), n.astype(nu.dtype)

    leaves, tree = jax.tree.flatten(state["weights"])
    old = (leaves, jax.tree.leaves(state["mu"]), jax.tree.leaves(state["nu"]))
    new = [update(*parts) for parts in zip(*old, jax.tree.leaves(gradients), strict=True)]
    weights, mu, nu = (jax.tree.unflatten(tree, list(column)) for column in zip(*new, strict=True))
    return {"weights": weights, "mu": mu, "nu": nu, "count": count}


def _map(f: Callable[[Weight], Any], table: Weights) -> Weights:
    mapped: Weights = jax.tree.map(f, table, is_leaf=lambda leaf: isinstance(leaf, Weight))
    return mapped
