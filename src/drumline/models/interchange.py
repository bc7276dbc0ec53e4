"""Export and import weights as `safetensors` files with the names and shapes of other libraries.

A `ViT` has the format of timm's Vision Transformers (`vit_base_patch16_224` and others), an `LM`
that of transformers' Llama models:

    save("vit.safetensors", model, params)       # timm: model.load_state_dict(load_file(…))
    model = read_model("llama/", layout="fsdp")  # from the config.json of a model from the hub
    params = load("llama/", model, mesh=mesh)    # each device reads its own shards

Their kernels are `[outputs, inputs]`. Drumline's are `[inputs, outputs]`, have a dimension for the
heads, and are stacked by layer. The conversion is exact.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from drumline.models.lm import LM
from drumline.models.sharding import Params
from drumline.models.vit import ViT
from drumline.parallel.block.attention import RotaryScaling

NumpyArray = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, NumpyArray]


@dataclass(frozen=True)
class TensorMapping:
    """The relation between a tensor of another library and weights of the model.

    Attributes:
        tensor: the name of the tensor; `{}` stands for the index of the block.
        weights: the names of the weights, concatenated along the tensor's first dimension.
        to_tensor: converts a weight.
        to_weight: converts a part of the tensor to a weight with a given shape.
    """

    tensor: str
    weights: tuple[str, ...]
    to_tensor: Callable[[NumpyArray], NumpyArray]
    to_weight: Callable[[NumpyArray, tuple[int, ...]], NumpyArray]

    @property
    def is_per_block(self) -> bool:
        """True if every block has its own tensor."""
        return "{}" in self.tensor


def to_tensors(model: ViT | LM, params: Params) -> Tensors:
    """Convert weights to NumPy arrays with the names of the other library.

    Raises:
        ValueError: the weights do not fit the model.
    """
    mappings, tensors = _mappings(model), Tensors()
    _check_weights(model, params)
    for mapping in mappings:
        for block in range(model.depth) if mapping.is_per_block else (None,):
            parts = [
                mapping.to_tensor(np.asarray(_weight(params, name, block)))
                for name in mapping.weights
            ]
            tensors[mapping.tensor.format(block)] = np.ascontiguousarray(np.concatenate(parts))
    return tensors


def from_tensors(
    model: ViT | LM,
    tensors: Mapping[str, Any],
    *,
    mesh: Mesh | None = None,
    dtype: str = "float32",
) -> Params:
    """Convert tensors of the other library to weights of the model.

    With a mesh, each device gets its shard of the weights in the layout of the model, and a host
    reads only the values that its devices get. Without a mesh all are on one device.

    Raises:
        ValueError: a tensor is missing, has the wrong shape, or does not belong to the model.
    """
    remaining = {name: value for name, value in tensors.items() if not _is_derived(name)}
    if (
        isinstance(model, LM)
        and "lm_head.weight" not in remaining
        and "model.embed_tokens.weight" in remaining
    ):
        # The checkpoint ties the head to the embedding table.
        remaining["lm_head.weight"] = remaining["model.embed_tokens.weight"]
    if mesh is not None:
        model.check(mesh)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    specs = model.specs()

    def place(name: str, read: Callable[[tuple[slice, ...]], NumpyArray]) -> jax.Array:
        """Place a weight on its devices. `read` returns a part of it."""
        shape = _weight(shapes, name, None).shape
        if mesh is None:
            return jnp.array(read((slice(None),) * len(shape)), dtype)
        sharding = NamedSharding(mesh, _weight(specs, name, None))
        return jax.make_array_from_callback(
            shape, sharding, lambda index: np.array(read(index or ()), jnp.dtype(dtype))
        )

    stacks: dict[str, list[NumpyArray]] = {}
    params: Params = {"blocks": {}}
    for mapping in _mappings(model):
        for block in range(model.depth) if mapping.is_per_block else (None,):
            name = mapping.tensor.format(block)
            if name not in remaining:
                raise ValueError(f"{_kind(model)}: {name} is missing; {_list_names(remaining)}")
            tensor = np.asarray(remaining.pop(name))
            if not jnp.issubdtype(tensor.dtype, jnp.floating):
                raise ValueError(
                    f"{_kind(model)}: {name} is {tensor.dtype}; convert quantized weights to "
                    "floats first"
                )
            weight_shapes = [_weight(shapes, weight, None).shape for weight in mapping.weights]
            if mapping.is_per_block:
                weight_shapes = [shape[1:] for shape in weight_shapes]
            parts = _split_tensor(model, name, tensor, mapping, weight_shapes)
            for weight, part in zip(mapping.weights, parts, strict=True):
                if mapping.is_per_block:
                    stacks.setdefault(weight, []).append(part)
                else:
                    params[weight] = place(weight, part.__getitem__)
    if remaining:
        first = ", ".join(sorted(remaining)[:3])
        raise ValueError(
            f"{_kind(model)}: the model has no weights for {first}{_more(len(remaining) - 3)}"
        )
    for name, parts in stacks.items():
        params["blocks"][name] = place(name, partial(_read_stack, parts))
    return params


def _read_stack(blocks: list[NumpyArray], index: tuple[slice, ...]) -> NumpyArray:
    """Return a part of a stack of blocks."""
    return np.stack([block[index[1:]] for block in blocks[index[0]]])


def save(path: str | Path, model: ViT | LM, params: Params) -> None:
    """Write the weights to a `safetensors` file. Replace an existing file atomically."""
    from safetensors.numpy import save_file

    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(to_tensors(model, params), str(temporary), metadata={"format": "pt"})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(
    path: str | Path, model: ViT | LM, *, mesh: Mesh | None = None, dtype: str = "float32"
) -> Params:
    """Read the weights from a `safetensors` file, or from all in a folder.

    `mesh` and `dtype` are as in `from_tensors`. If there is a `config.json` beside the weights of
    an `LM`, the model must agree with it (`read_model`).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the tensors or their `config.json` do not fit the model.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"{path}: there is no .safetensors file")
    config = files[0].with_name("config.json")
    if isinstance(model, LM) and config.is_file():
        for name, value in _llama_options(config).items():
            if getattr(model, name) != value:
                raise ValueError(
                    f"LM: {name} is {getattr(model, name)}, but {config} has {value}; "
                    "interchange.read_model returns the model of this file"
                )
    tensors: Tensors = {}
    for file in files:
        for name, value in _read(file).items():
            if name in tensors:
                raise ValueError(f"{file}: {name} is in another file of {path}, too")
            tensors[name] = value
    return from_tensors(model, tensors, mesh=mesh, dtype=dtype)


def _read(file: Path) -> Tensors:
    """Map the tensors of a file into memory. Their values are read when they are used."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):  # which checks the header and the length
            pass
    except SafetensorError as error:
        raise ValueError(f"{file}: not a complete safetensors file: {error}") from None
    content = np.memmap(file, np.uint8, "r")
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, end = (start + offset for offset in entry["data_offsets"])
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{file}: {name} has the type {entry['dtype']}, which is unknown")
        tensors[name] = content[first:end].view(jnp.dtype(dtype)).reshape(entry["shape"])
    return tensors


_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""The types of safetensors. Weights in fp8 need scales, which are not supported."""


# Configurations


def read_model(path: str | Path, **changes: Any) -> LM:
    """Return the model of a folder's `config.json`, as transformers writes it for Llama.

    `changes` sets other options, such as the layout.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the model is not a Llama, or has an option that `LM` does not support.
    """
    path = Path(path)
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        raise FileNotFoundError(f"{config}: there is no such file")
    return LM(**{**_llama_options(config), **changes})


_LLAMA_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Options of Llama that `LM` supports only with these values, which are also their defaults."""


def _llama_options(file: Path) -> dict[str, Any]:
    """Return the options of an `LM` in a `config.json`."""
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: not a configuration of a model")
    kind = config.get("model_type")
    if kind != "llama":
        raise ValueError(f"{file}: model_type is {kind!r}, and LM supports only 'llama'")
    for name, value in _LLAMA_FIXED.items():
        if config.get(name, value) not in (value, None):
            raise ValueError(f"{file}: {name} is {config[name]!r}, which LM does not support")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{file}: the scaling of rotary positions is {rope!r}, not an object")
    heads = _number(file, config, "num_attention_heads")
    width = _number(file, config, "hidden_size")
    return {
        "width": width,
        "depth": _number(file, config, "num_hidden_layers"),
        "heads": heads,
        "head_dim": _number(file, config, "head_dim", width // heads),
        "kv_heads": _number(file, config, "num_key_value_heads", heads),
        "hidden": _number(file, config, "intermediate_size"),
        "vocab": _number(file, config, "vocab_size"),
        "epsilon": _number(file, config, "rms_norm_eps", 1e-6),
        "rotary_base": _number(
            file, rope, "rope_theta", _number(file, config, "rope_theta", 10_000.0)
        ),
        "rotary_scaling": _rotary_scaling(file, rope),
    }


def _rotary_scaling(file: Path, rope: Mapping[str, Any]) -> RotaryScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ValueError(
            f"{file}: rope_type is {kind!r}, and LM supports 'default', 'linear' and 'llama3'"
        )
    names = RotaryScaling._fields if kind == "llama3" else ("factor",)
    return RotaryScaling(**{name: _number(file, rope, name) for name in names})


def _number(file: Path, config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a positive number of a configuration."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        problem = "is missing" if value is None else f"is {value!r}, which is not a positive number"
        raise ValueError(f"{file}: {name} {problem}")
    return value


# Mappings


def _identity(tensor: str, weight: str) -> TensorMapping:
    return TensorMapping(tensor, (weight,), lambda x: x, lambda x, shape: x.reshape(shape))


def _flat(tensor: str, *weights: str) -> TensorMapping:
    """Map biases, with or without a dimension for the heads."""
    return TensorMapping(
        tensor, weights, lambda x: x.reshape(-1), lambda x, shape: x.reshape(shape)
    )


def _kernel(tensor: str, *weights: str, inputs: int = 1) -> TensorMapping:
    """Map kernels whose first `inputs` dimensions are contracted."""

    def to_tensor(x: NumpyArray) -> NumpyArray:
        rows = int(np.prod(x.shape[:inputs]))
        return x.reshape(rows, -1).T

    return TensorMapping(tensor, weights, to_tensor, lambda x, shape: x.T.reshape(shape))


def _patches(tensor: str, weight: str, model: ViT) -> TensorMapping:
    """Map the patch embedding from a convolution `[D, C, height, width]` to a matmul."""
    size, channels = model.patch, model.channels

    def to_tensor(x: NumpyArray) -> NumpyArray:
        return x.reshape(size, size, channels, -1).transpose(3, 2, 0, 1)

    def to_weight(x: NumpyArray, shape: tuple[int, ...]) -> NumpyArray:
        return x.transpose(2, 3, 1, 0).reshape(shape)

    return TensorMapping(tensor, (weight,), to_tensor, to_weight)


def _with_batch(tensor: str, weight: str) -> TensorMapping:
    """Map a tensor that has a leading dimension for a batch of one."""

    def to_tensor(x: NumpyArray) -> NumpyArray:
        return x.reshape(1, -1, x.shape[-1])

    return TensorMapping(tensor, (weight,), to_tensor, lambda x, shape: x.reshape(shape))


def _mappings(model: ViT | LM) -> list[TensorMapping]:
    if isinstance(model, ViT):
        return _timm(model)
    if model.experts:
        raise ValueError("LM: transformers has no Llama with experts; set experts=0")
    return _llama()


def _timm(model: ViT) -> list[TensorMapping]:
    qkv = ("query", "key", "value")
    return [
        _patches("patch_embed.proj.weight", "patch", model),
        _identity("patch_embed.proj.bias", "patch_bias"),
        _with_batch("cls_token", "class_token"),
        _with_batch("pos_embed", "positions"),
        _identity("blocks.{}.norm1.weight", "attention_norm"),
        _identity("blocks.{}.norm1.bias", "attention_shift"),
        _kernel("blocks.{}.attn.qkv.weight", *qkv),
        _flat("blocks.{}.attn.qkv.bias", *(f"{name}_bias" for name in qkv)),
        _kernel("blocks.{}.attn.proj.weight", "output", inputs=2),
        _identity("blocks.{}.attn.proj.bias", "output_bias"),
        _identity("blocks.{}.norm2.weight", "feedforward_norm"),
        _identity("blocks.{}.norm2.bias", "feedforward_shift"),
        _kernel("blocks.{}.mlp.fc1.weight", "up"),
        _identity("blocks.{}.mlp.fc1.bias", "up_bias"),
        _kernel("blocks.{}.mlp.fc2.weight", "down"),
        _identity("blocks.{}.mlp.fc2.bias", "down_bias"),
        _identity("norm.weight", "norm"),
        _identity("norm.bias", "shift"),
        _kernel("head.weight", "head"),
        _identity("head.bias", "head_bias"),
    ]


def _llama() -> list[TensorMapping]:
    block = "model.layers.{}"
    return [
        _identity("model.embed_tokens.weight", "table"),
        _identity(f"{block}.input_layernorm.weight", "attention_norm"),
        _kernel(f"{block}.self_attn.q_proj.weight", "query"),
        _kernel(f"{block}.self_attn.k_proj.weight", "key"),
        _kernel(f"{block}.self_attn.v_proj.weight", "value"),
        _kernel(f"{block}.self_attn.o_proj.weight", "output", inputs=2),
        _identity(f"{block}.post_attention_layernorm.weight", "feedforward_norm"),
        _kernel(f"{block}.mlp.gate_proj.weight", "gate"),
        _kernel(f"{block}.mlp.up_proj.weight", "up"),
        _kernel(f"{block}.mlp.down_proj.weight", "down"),
        _identity("model.norm.weight", "norm"),
        _kernel("lm_head.weight", "head"),
    ]


def _check_weights(model: ViT | LM, params: Params) -> None:
    """Raise ValueError if the weights do not fit. JAX clips the index of a missing block."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    expected, actual = (
        {
            jax.tree_util.keystr(path, simple=True, separator="."): np.shape(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (shapes, params)
    )
    for name in [*expected, *actual]:
        if expected.get(name) != actual.get(name):
            raise ValueError(
                f"{_kind(model)}: {name} is {actual.get(name, 'missing')}, but the model has "
                f"{expected.get(name, 'none')}"
            )


def _weight(params: Mapping[str, Any], name: str, block: int | None) -> Any:
    """Return a weight by name. Names in and outside the blocks are distinct."""
    if name not in params["blocks"]:
        return params[name]
    return params["blocks"][name] if block is None else params["blocks"][name][block]


def _split_tensor(
    model: ViT | LM,
    name: str,
    tensor: NumpyArray,
    mapping: TensorMapping,
    shapes: list[tuple[int, ...]],
) -> list[NumpyArray]:
    """Split a tensor into weights and convert them to their shapes."""
    part_shapes = [mapping.to_tensor(np.empty(shape, np.float32)).shape for shape in shapes]
    expected = (sum(shape[0] for shape in part_shapes), *part_shapes[0][1:])
    if tensor.shape != expected:
        raise ValueError(
            f"{_kind(model)}: {name} is {list(tensor.shape)}, but the model has {list(expected)}"
        )
    ends = np.cumsum([shape[0] for shape in part_shapes])[:-1]
    parts = np.split(tensor, ends)
    return [mapping.to_weight(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def _is_derived(name: str) -> bool:
    """Return True for tables of older files that can be computed from the sizes."""
    return name.endswith("rotary_emb.inv_freq")


def _kind(model: ViT | LM) -> str:
    return type(model).__name__


def _list_names(names: Mapping[str, Any]) -> str:
    if not names:
        return "there are no tensors"
    return f"there are {', '.join(sorted(names)[:3])}{_more(len(names) - 3)}"


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
