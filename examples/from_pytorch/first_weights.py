"""Convert the MLP's weights from PyTorch to JAX and back.

`nn.Linear` stores a weight as `[outputs, inputs]` and multiplies by its transpose. JAX code stores
`[inputs, outputs]`. `nn.Sequential` numbers the ReLUs too, so PyTorch's layers are `net.0`, `net.2`
and `net.4`, and JAX's are `layer0`, `layer1` and `layer2`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Weights = dict[str, dict[str, np.ndarray]]


def from_torch(state: Mapping[str, Any]) -> Weights:
    """Return the weights in a PyTorch model's `state_dict()` for JAX.

    They are copies, because PyTorch updates its weights in place.
    """
    return {
        f"layer{i}": {
            "weight": state[f"net.{2 * i}.weight"].numpy().T.copy(),
            "bias": state[f"net.{2 * i}.bias"].numpy().copy(),
        }
        for i in range(len(state) // 2)
    }


def to_torch(weights: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return the arrays of a `state_dict()`, as NumPy arrays."""
    state = {}
    for i in range(len(weights)):
        layer = weights[f"layer{i}"]
        state[f"net.{2 * i}.weight"] = np.array(layer["weight"]).T
        state[f"net.{2 * i}.bias"] = np.array(layer["bias"])
    return state


def save(path: str | Path, weights: Weights) -> None:
    """Write weights to an `.npz` file."""
    flat = {f"{name}.{kind}": w for name, layer in weights.items() for kind, w in layer.items()}
    np.savez(path, **flat)


def load(path: str | Path) -> Weights:
    """Read weights from an `.npz` file."""
    weights: Weights = {}
    with np.load(path) as file:
        for name, array in file.items():
            layer, kind = name.split(".")
            weights.setdefault(layer, {})[kind] = array
    return weights
