"""The digits in batches of NumPy arrays, and the sizes of the model, for PyTorch and JAX.

The file has the digits in random order. The batches follow this order and start again at the end.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

BATCH = 64
PIXELS = 8 * 8
HIDDEN_SIZES = (256, 128)

Rows = dict[str, np.ndarray]


def digits(part: str) -> Rows:
    """Return the part `train` or `test`: "image" with floats from -1 to 1, and "label"."""
    with np.load(Path(__file__).parents[1] / "data" / "digits.npz") as file:
        images, labels = file[f"{part}_images"], file[f"{part}_labels"]
    images = images.reshape(len(images), PIXELS).astype(np.float32) / 127.5 - 1
    return {"image": images, "label": labels}


def batches(rows: Rows, steps: int) -> Iterator[Rows]:
    """Yield a batch for each step."""
    for step in range(steps):
        indices = (step * BATCH + np.arange(BATCH)) % len(rows["label"])
        yield {name: column[indices] for name, column in rows.items()}
