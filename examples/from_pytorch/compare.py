"""The losses of PyTorch, Drumline and JAX from the same weights over the same batches.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/from_pytorch/compare.py

What to see: in float32, PyTorch on one device and Drumline on eight are at most 9.2e-06 apart over
50 steps. In float64, PyTorch and jax_mlp.py are at most 2.1e-15 apart: they compute the same. With
a number of seeds behind the command, the first weights of each are tried.
"""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import drumline_mlp
import jax
import jax_mlp
import numpy as np
import torch_mlp
from digit_batches import HIDDEN_SIZES, batches, digits
from first_weights import from_torch, save

from drumline.train.__main__ import main as drumline_train

STEPS = 50
FLOAT32_BOUND = 1e-3
"""Ten times the worst of ten seeds, 8.9e-05. It leaves room for a ReLU that rounding turns on in
one program and not in the other, which is another one on another processor: however small the
gradient of such a unit is, Adam takes a whole step with it."""
FLOAT64_BOUND = 1e-12
"""Some hundred times the worst of ten seeds; no ReLU is as close to zero as rounding is here."""


@dataclass(frozen=True)
class Losses:
    """The losses of two programs, step by step."""

    of_torch: np.ndarray
    of_other: np.ndarray

    def apart(self) -> float:
        """The largest difference."""
        return float(np.abs(self.of_torch - self.of_other).max())


def torch_and_drumline(seed: int) -> Losses:
    """In float32, as the two files are."""
    model = torch_mlp.init(seed)
    with TemporaryDirectory() as folder:
        save(f"{folder}/weights.npz", from_torch(model.state_dict()))
        settings = ["--set", f"weights={folder}/weights.npz", "--set", f"steps={STEPS}"]
        with redirect_stdout(sys.stderr):
            drumline_train([drumline_mlp.__file__, *settings, "--checkpoint", f"{folder}/run"])
        lines = Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    of_torch = torch_mlp.train(model, batches(digits("train"), STEPS))
    return Losses(np.array(of_torch), np.array([one["loss"] for one in told if "loss" in one]))


def torch_and_jax(seed: int) -> Losses:
    """In float64, where rounding hides no difference."""
    model = torch_mlp.init(seed).double()
    weights, rows = from_torch(model.state_dict()), digits("train")
    with jax.enable_x64(True):
        _, of_jax = jax_mlp.train(jax_mlp.MLP(HIDDEN_SIZES), weights, batches(rows, STEPS))
    # JAX widens the images where they meet the weights; PyTorch has to be told.
    rows["image"] = rows["image"].astype(np.float64)
    of_torch = torch_mlp.train(model, batches(rows, STEPS))
    return Losses(np.array(of_torch), np.array(of_jax))


def main(seeds: int = 1) -> None:
    """Print how far the losses are apart, and the last ones side by side."""
    print("seed  float32  float64  last loss: PyTorch  Drumline")
    for seed in range(seeds):
        narrow, wide = torch_and_drumline(seed), torch_and_jax(seed)
        last = f"{narrow.of_torch[-1]:18.5f}  {narrow.of_other[-1]:8.5f}"
        print(f"{seed:4}  {narrow.apart():7.1e}  {wide.apart():7.1e}  {last}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
