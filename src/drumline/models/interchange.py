"""Weights under the names and in the shapes of other libraries, both ways, as `safetensors`.

A `ViT` has timm's (`vit_base_patch16_224` and its like), an `LM` has those of transformers' Llama:

    save("vit.safetensors", model, params)       # timm: model.load_state_dict(load_file(…))
    params = load("llama/", model)               # the folder of a model from the hub

Their kernels are `[outputs, inputs]` and ours `[inputs, outputs]`; ours have heads apart, and the
layers of a stack in one array. No number is changed on the way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drumline.models.layouts import Params
from drumline.models.lm import LM
from drumline.models.vit import ViT

Numbers = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Numbers]


@dataclass(frozen=True)
class Shared:
    """A tensor of the other library, and what of ours it holds.

    Attributes:
        theirs: its name; `{}` stands for the number of the block.
        ours: our weights in it, one behind the other in its first dimension.
        export: one of our weights as it lies there.
        adopt: the way back, to the shape of ours.
    """

    theirs: str
    ours: tuple[str, ...]
    export: Callable[[Numbers], Numbers]
    adopt: Callable[[Numbers, tuple[int, ...]], Numbers]

    @property
    def in_blocks(self) -> bool:
        """Whether every block has one."""
        return "{}" in self.theirs


def export(model: ViT | LM, params: Params) -> Tensors:
    """The weights under the other library's names, as NumPy arrays.

    Raises:
        ValueError: they are not this model's.
    """
    table, found = _table(model), Tensors()
    _check_weights(model, params)
    for shared in table:
        for block in range(model.depth) if shared.in_blocks else (None,):
            parts = [shared.export(np.asarray(_ours(params, name, block))) for name in shared.ours]
            found[shared.theirs.format(block)] = np.ascontiguousarray(np.concatenate(parts))
    return found


def adopt(model: ViT | LM, tensors: Mapping[str, Any]) -> Params:
    """The model's weights, in float32, from the other library's.

    Raises:
        ValueError: a tensor lacks, has another shape, or has no place in the model.
    """
    left = {name: value for name, value in tensors.items() if not _is_derived(name)}
    if (
        isinstance(model, LM)
        and "lm_head.weight" not in left
        and "model.embed_tokens.weight" in left
    ):
        left["lm_head.weight"] = left["model.embed_tokens.weight"]  # they are tied
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    stacks: dict[str, list[Numbers]] = {}
    params: Params = {"blocks": {}}
    for shared in _table(model):
        for block in range(model.depth) if shared.in_blocks else (None,):
            name = shared.theirs.format(block)
            if name not in left:
                raise ValueError(f"{_kind(model)}: {name} is not there; {_what_there_is(left)}")
            given = np.asarray(left.pop(name))
            if not jnp.issubdtype(given.dtype, jnp.floating):
                raise ValueError(
                    f"{_kind(model)}: {name} is {given.dtype}; weights that were quantized have to "
                    "be floats again first"
                )
            wanted = [_ours(shapes, ours, None).shape for ours in shared.ours]
            wanted = [shape[1:] if shared.in_blocks else shape for shape in wanted]
            parts = _divided(model, name, given, shared, wanted)
            for ours, part in zip(shared.ours, parts, strict=True):
                if shared.in_blocks:
                    stacks.setdefault(ours, []).append(part)
                else:
                    params[ours] = jnp.asarray(part, jnp.float32)
    if left:
        some = ", ".join(sorted(left)[:3])
        raise ValueError(f"{_kind(model)}: it has no place for {some}{_more(len(left) - 3)}")
    params["blocks"] = {
        name: jnp.asarray(np.stack(parts), jnp.float32) for name, parts in stacks.items()
    }
    return params


def save(path: str | Path, model: ViT | LM, params: Params) -> None:
    """Write the weights as one `safetensors` file; one that was there stays until that is done."""
    from safetensors.numpy import save_file

    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(export(model, params), str(draft), metadata={"format": "pt"})
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def load(path: str | Path, model: ViT | LM) -> Params:
    """The weights in a `safetensors` file, or in all those of a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: they are not this model's.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"{path}: there is no .safetensors file")
    tensors: Tensors = {}
    for file in files:
        for name, value in _read(file).items():
            if name in tensors:
                raise ValueError(f"{file}: {name} is in another file of {path}, too")
            tensors[name] = value
    return adopt(model, tensors)


def _read(file: Path) -> Tensors:
    from safetensors import SafetensorError, safe_open

    try:
        # Through JAX: NumPy alone has no bfloat16.
        with safe_open(file, framework="flax") as opened:
            return {name: np.asarray(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as wrong:
        raise ValueError(f"{file}: no whole safetensors file: {wrong}") from None


# The tables -----------------------------------------------------------------------------------


def _as_it_is(theirs: str, ours: str) -> Shared:
    return Shared(theirs, (ours,), lambda x: x, lambda x, shape: x.reshape(shape))


def _flat(theirs: str, *ours: str) -> Shared:
    """Biases, of heads and features or of features alone."""
    return Shared(theirs, ours, lambda x: x.reshape(-1), lambda x, shape: x.reshape(shape))


def _kernel(theirs: str, *ours: str, inputs: int = 1) -> Shared:
    """Kernels whose first dimensions, so many of them, are inputs."""

    def export(x: Numbers) -> Numbers:
        rows = int(np.prod(x.shape[:inputs]))
        return x.reshape(rows, -1).T

    return Shared(theirs, ours, export, lambda x, shape: x.T.reshape(shape))


def _patches(theirs: str, ours: str, model: ViT) -> Shared:
    """The first convolution: theirs `[D, C, height, width]`, ours a product of flat patches."""
    cut, channels = model.patch, model.channels

    def export(x: Numbers) -> Numbers:
        return x.reshape(cut, cut, channels, -1).transpose(3, 2, 0, 1)

    return Shared(theirs, (ours,), export, lambda x, shape: x.transpose(2, 3, 1, 0).reshape(shape))


def _one_row(theirs: str, ours: str) -> Shared:
    """What theirs has for a batch of one."""

    def export(x: Numbers) -> Numbers:
        return x.reshape(1, -1, x.shape[-1])

    return Shared(theirs, (ours,), export, lambda x, shape: x.reshape(shape))


def _table(model: ViT | LM) -> list[Shared]:
    if isinstance(model, ViT):
        return _timm(model)
    if model.experts:
        raise ValueError("LM: with experts it has no counterpart among transformers' Llamas")
    return _llama()


def _timm(model: ViT) -> list[Shared]:
    qkv = ("query", "key", "value")
    return [
        _patches("patch_embed.proj.weight", "patch", model),
        _as_it_is("patch_embed.proj.bias", "patch_bias"),
        _one_row("cls_token", "class_token"),
        _one_row("pos_embed", "positions"),
        _as_it_is("blocks.{}.norm1.weight", "attention_norm"),
        _as_it_is("blocks.{}.norm1.bias", "attention_shift"),
        _kernel("blocks.{}.attn.qkv.weight", *qkv),
        _flat("blocks.{}.attn.qkv.bias", *(f"{name}_bias" for name in qkv)),
        _kernel("blocks.{}.attn.proj.weight", "output", inputs=2),
        _as_it_is("blocks.{}.attn.proj.bias", "output_bias"),
        _as_it_is("blocks.{}.norm2.weight", "feedforward_norm"),
        _as_it_is("blocks.{}.norm2.bias", "feedforward_shift"),
        _kernel("blocks.{}.mlp.fc1.weight", "up"),
        _as_it_is("blocks.{}.mlp.fc1.bias", "up_bias"),
        _kernel("blocks.{}.mlp.fc2.weight", "down"),
        _as_it_is("blocks.{}.mlp.fc2.bias", "down_bias"),
        _as_it_is("norm.weight", "norm"),
        _as_it_is("norm.bias", "shift"),
        _kernel("head.weight", "head"),
        _as_it_is("head.bias", "head_bias"),
    ]


def _llama() -> list[Shared]:
    block = "model.layers.{}"
    return [
        _as_it_is("model.embed_tokens.weight", "table"),
        _as_it_is(f"{block}.input_layernorm.weight", "attention_norm"),
        _kernel(f"{block}.self_attn.q_proj.weight", "query"),
        _kernel(f"{block}.self_attn.k_proj.weight", "key"),
        _kernel(f"{block}.self_attn.v_proj.weight", "value"),
        _kernel(f"{block}.self_attn.o_proj.weight", "output", inputs=2),
        _as_it_is(f"{block}.post_attention_layernorm.weight", "feedforward_norm"),
        _kernel(f"{block}.mlp.gate_proj.weight", "gate"),
        _kernel(f"{block}.mlp.up_proj.weight", "up"),
        _kernel(f"{block}.mlp.down_proj.weight", "down"),
        _as_it_is("model.norm.weight", "norm"),
        _kernel("lm_head.weight", "head"),
    ]


def _check_weights(model: ViT | LM, params: Params) -> None:
    """Refuse weights of another model: indexing would take the last block for all that lack."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    wanted, given = (
        {
            jax.tree_util.keystr(path, simple=True, separator="."): np.shape(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (shapes, params)
    )
    for name in [*wanted, *given]:
        if wanted.get(name) != given.get(name):
            raise ValueError(
                f"{_kind(model)}: {name} is {given.get(name, 'not there')}, but the model has "
                f"{wanted.get(name, 'none')}"
            )


def _ours(params: Mapping[str, Any], name: str, block: int | None) -> Any:
    """A weight by its name, which no weight in the blocks shares with one outside."""
    if name not in params["blocks"]:
        return params[name]
    return params["blocks"][name] if block is None else params["blocks"][name][block]


def _divided(
    model: ViT | LM, name: str, given: Numbers, shared: Shared, wanted: list[tuple[int, ...]]
) -> list[Numbers]:
    """The parts of a tensor that are our weights, each in our shape."""
    expected = [shared.export(np.empty(shape, np.float32)).shape for shape in wanted]
    whole = (sum(shape[0] for shape in expected), *expected[0][1:])
    if given.shape != whole:
        raise ValueError(
            f"{_kind(model)}: {name} is {list(given.shape)}, but the model has {list(whole)}"
        )
    ends = np.cumsum([shape[0] for shape in expected])[:-1]
    pieces = np.split(given, ends)
    return [shared.adopt(piece, shape) for piece, shape in zip(pieces, wanted, strict=True)]


def _is_derived(name: str) -> bool:
    """Tables that follow from the sizes and that older files carry along."""
    return name.endswith("rotary_emb.inv_freq")


def _kind(model: ViT | LM) -> str:
    return type(model).__name__


def _what_there_is(names: Mapping[str, Any]) -> str:
    if not names:
        return "there is nothing"
    return f"there are {', '.join(sorted(names)[:3])}{_more(len(names) - 3)}"


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
