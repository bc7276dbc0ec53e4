"""The MLP's weights on their way from PyTorch to JAX and back.

`nn.Linear` keeps a weight as `[outputs, inputs]` and multiplies by its transpose; JAX code keeps
`[inputs, outputs]` and multiplies as it is. And `nn.Sequential` counts the ReLUs too, so the layers
are `net.0`, `net.2`, `net.4` there and `layer0`, `layer1`, `layer2` here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Weights = dict[str, dict[str, np.ndarray]]


def from_torch(state: Mapping[str, Any]) -> Weights:
    """The weights in a PyTorch model's `state_dict()`, as JAX takes them.

    They are copied, because PyTorch goes on to write into its own.
    """
    return {
        f"layer{i}": {
            "weight": state[f"net.{2 * i}.weight"].numpy().T.copy(),
            "bias": state[f"net.{2 * i}.bias"].numpy().copy(),
        }
        for i in range(len(state) // 2)
    }


def to_torch(weights: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The way back: what `load_state_dict` takes, with `torch.from_numpy` of each."""
    state = {}
    for i in range(len(weights)):
        layer = weights[f"layer{i}"]
        state[f"net.{2 * i}.weight"] = np.array(layer["weight"]).T
        state[f"net.{2 * i}.bias"] = np.array(layer["bias"])
    return state


def save(path: str | Path, weights: Weights) -> None:
    """Write them into an `.npz` file."""
    flat = {f"{name}.{kind}": w for name, layer in weights.items() for kind, w in layer.items()}
    np.savez(path, **flat)


def load(path: str | Path) -> Weights:
    """Read them again."""
    weights: Weights = {}
    with np.load(path) as file:
        for name, array in file.items():
            layer, kind = name.split(".")
            weights.setdefault(layer, {})[kind] = array
    return weights
