"""Compare the losses of PyTorch, Drumline and JAX with the same weights and batches.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/from_pytorch/compare.py

What to see: in float32, the losses of PyTorch on one device and Drumline on eight differ by at most
9.2e-06 over 50 steps. In float64, those of PyTorch and jax_mlp.py differ by at most 2.1e-15, so
both compute the same. An argument is the number of seeds to run.
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
"""Ten times the largest difference of ten seeds, 8.9e-05. Rounding may activate a ReLU in only one
program, at a seed that depends on the processor, and Adam takes a full step even with a tiny
gradient."""
FLOAT64_BOUND = 1e-12
"""Several hundred times the largest difference of ten seeds. No ReLU is within rounding of zero."""


@dataclass(frozen=True)
class Losses:
    """The losses of two programs, step by step."""

    torch: np.ndarray
    other: np.ndarray

    def max_difference(self) -> float:
        """Return the largest difference."""
        return float(np.abs(self.torch - self.other).max())


def compare_drumline(seed: int) -> Losses:
    """Train with PyTorch and Drumline in float32, as in the two files."""
    model = torch_mlp.init(seed)
    with TemporaryDirectory() as folder:
        save(f"{folder}/weights.npz", from_torch(model.state_dict()))
        settings = ["--set", f"weights={folder}/weights.npz", "--set", f"steps={STEPS}"]
        with redirect_stdout(sys.stderr):
            drumline_train([drumline_mlp.__file__, *settings, "--checkpoint", f"{folder}/run"])
        lines = Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    torch_losses = torch_mlp.train(model, batches(digits("train"), STEPS))
    return Losses(
        np.array(torch_losses), np.array([step["loss"] for step in metrics if "loss" in step])
    )


def compare_jax(seed: int) -> Losses:
    """Train with PyTorch and JAX in float64, where rounding hides no difference."""
    model = torch_mlp.init(seed).double()
    weights, rows = from_torch(model.state_dict()), digits("train")
    with jax.enable_x64(True):
        _, jax_losses = jax_mlp.train(jax_mlp.MLP(HIDDEN_SIZES), weights, batches(rows, STEPS))
    # JAX converts the images to float64 when it multiplies them; PyTorch does not.
    rows["image"] = rows["image"].astype(np.float64)
    torch_losses = torch_mlp.train(model, batches(rows, STEPS))
    return Losses(np.array(torch_losses), np.array(jax_losses))


def main(seeds: int = 1) -> None:
    """Print the largest differences and the last losses."""
    print("seed  float32  float64  last loss: PyTorch  Drumline")
    for seed in range(seeds):
        float32, float64 = compare_drumline(seed), compare_jax(seed)
        last = f"{float32.torch[-1]:18.5f}  {float32.other[-1]:8.5f}"
        print(
            f"{seed:4}  {float32.max_difference():7.1e}  {float64.max_difference():7.1e}  {last}",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
