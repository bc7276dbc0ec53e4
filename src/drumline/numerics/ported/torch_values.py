"""The values in a PyTorch model: their names, and a recording of a run.

A PyTorch name is that of a module and stands for its output. `norm1:input` is the module's input,
`qkv[1/3]` the second of three equal parts of the last dimension (counted from 0), and `norm[:,0]`
the first token of each sequence.
"""

# NumPy annotates many results as Any.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from drumline.errors import UserError
from drumline.numerics.errors import NDArray
from drumline.numerics.implementations import to_tensor

if TYPE_CHECKING:
    import torch

OUTPUT = "output"
"""The name of the model's output."""

Rename = Mapping[str, str] | Callable[[str], str | None]
"""A mapping from JAX names to PyTorch names: regular expressions that match whole names, or a
function that returns None for names without a counterpart."""

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
"""The names of Drumline's `ViT` in timm's `VisionTransformer`."""

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
"""The names of Drumline's `LM` in transformers' `LlamaForCausalLM`."""


@dataclass(frozen=True)
class TorchName:
    """A parsed PyTorch name.

    Attributes:
        module: The name of the module.
        is_input: True for the module's input, False for its output.
        part: The index and count of equal parts of the last dimension, or None for all of it.
        token: The index in the second dimension, or None for all of it.
    """

    module: str
    is_input: bool = False
    part: tuple[int, int] | None = None
    token: int | None = None

    @staticmethod
    def parse(name: str) -> TorchName:
        """Parse a PyTorch name."""
        match = re.fullmatch(r"(.*?)(?:\[(\d+)/(\d+)\]|\[:, ?(\d+)\])?(:input)?", name)
        assert match is not None  # every group may be empty
        module, index, count, token, suffix = match.groups()
        if index is not None and int(index) >= int(count):
            raise UserError(
                f"rename: {name}: parts are counted from 0, so three parts are [0/3] to [2/3]"
            )
        part = None if index is None else (int(index), int(count))
        return TorchName(module, bool(suffix), part, None if token is None else int(token))

    def __str__(self) -> str:
        """Return the name as it is written."""
        part = "" if self.part is None else f"[{self.part[0]}/{self.part[1]}]"
        token = "" if self.token is None else f"[:,{self.token}]"
        return f"{self.module}{part}{token}{':input' if self.is_input else ''}"

    def select(self, value: NDArray) -> NDArray:
        """Return the part of a module's input or output that the name stands for."""
        if self.token is not None:
            if value.ndim < 2 or value.shape[1] <= self.token:
                raise UserError(
                    f"rename: {self.module} has no [:,{self.token}]; it is {value.shape}"
                )
            return value[:, self.token]
        if self.part is None:
            return value
        index, count = self.part
        if value.shape[-1] % count:
            raise UserError(
                f"rename: {self.module} returns {value.shape[-1]} features, which are not {count} "
                "equal parts"
            )
        return np.split(value, count, axis=-1)[index]


def torch_counterpart(name: str, rename: Rename | None) -> str | None:
    """Return the PyTorch name of a JAX name, or None if it has no counterpart."""
    if rename is None:
        return name
    if callable(rename):
        return rename(name)
    for pattern, torch_name in rename.items():
        if pattern == name:
            return torch_name
        try:
            match = re.fullmatch(pattern, name)
        except re.error as error:
            raise UserError(f"rename: {pattern!r} is not a regular expression: {error}") from None
        if match:
            return match.expand(torch_name)
    return None


@dataclass
class Recording:
    """The values in a run of a model.

    Attributes:
        model: The model.
        inputs: The first input tensor of each module.
        outputs: The first output tensor of each module.
    """

    model: torch.nn.Module
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def value(self, name: TorchName) -> NDArray | None:
        """Return a value in float64, or None if there is none."""
        tensor = (self.inputs if name.is_input else self.outputs).get(name.module)
        return None if tensor is None else name.select(_to_float64(tensor))

    def dtype(self, name: TorchName) -> np.dtype[Any]:
        """Return the type of a value in PyTorch."""
        tensor = (self.inputs if name.is_input else self.outputs)[name.module]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return np.dtype(getattr(ml_dtypes, dtype, dtype))

    def module_input(self, module: str) -> NDArray | None:
        """Return a module's input in float64, or None if it had none."""
        tensor = self.inputs.get(module)
        return None if tensor is None else _to_float64(tensor)

    def module_output(self, module: str) -> NDArray:
        """Return a module's output in float64."""
        return _to_float64(self.outputs[module])

    def module(self, name: TorchName) -> torch.nn.Module | None:
        """Return the module whose output a name stands for, or None for an input."""
        if name.is_input or name.module == OUTPUT:
            return None
        return dict(self.model.named_modules())[name.module]


def record(model: torch.nn.Module, inputs: Sequence[Any]) -> Recording:
    """Run a model once in evaluation mode, without gradients, and record all values."""
    import torch

    recording = Recording(model)
    training_modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), _recording_hooks(recording):
            _keep_first(recording.outputs, OUTPUT, model(*_to_tensors(model, inputs)))
    finally:
        for module, mode in training_modes.items():
            module.training = mode
    return recording


def float64_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model that computes in float64."""
    return copy.deepcopy(model).double()


def _to_float64(tensor: torch.Tensor) -> NDArray:
    return tensor.detach().to("cpu").double().numpy()


def _to_tensors(model: torch.nn.Module, inputs: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the inputs on the model's device, floats in the model's type."""
    import torch

    parameter = next(model.parameters(), torch.empty(0))
    for value in inputs:
        tensor = value if isinstance(value, torch.Tensor) else to_tensor(np.asarray(value))
        dtype = parameter.dtype if tensor.is_floating_point() else torch.long
        yield tensor.to(device=parameter.device, dtype=dtype)


@contextmanager
def _recording_hooks(recording: Recording) -> Iterator[None]:
    handles = []
    for name, module in recording.model.named_modules():
        if not name:
            continue

        def keep(_: Any, arguments: Any, keywords: Any, output: Any, name: str = name) -> None:
            _keep_first(recording.inputs, name, (*arguments, *keywords.values()))
            _keep_first(recording.outputs, name, output)

        handles.append(module.register_forward_hook(keep, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep_first(tensors: dict[str, torch.Tensor], name: str, values: Any) -> None:
    """Record the first tensor of the first call. Further calls of a module are not recorded."""
    import torch

    if name in tensors:
        return
    leaves = (leaf for leaf in _leaves(values) if isinstance(leaf, torch.Tensor))
    tensor = next(leaves, None)
    if tensor is not None:
        tensors[name] = tensor.clone()


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, tuple | list):
        for value in values:
            yield from _leaves(value)
    else:
        yield values
