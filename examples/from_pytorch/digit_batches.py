"""The digits in batches, as NumPy arrays, and the sizes: the same for PyTorch and for JAX.

They lie in the file in random order, so they are taken as they lie there, and at the end from the
front again.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

BATCH = 64
PIXELS = 8 * 8
HIDDEN_SIZES = (256, 128)

Rows = dict[str, np.ndarray]


def digits(part: str) -> Rows:
    """The part `train` or `test`: "image", floats from -1 to 1, and "label"."""
    with np.load(Path(__file__).parents[1] / "data" / "digits.npz") as file:
        images, labels = file[f"{part}_images"], file[f"{part}_labels"]
    images = images.reshape(len(images), PIXELS).astype(np.float32) / 127.5 - 1
    return {"image": images, "label": labels}


def batches(rows: Rows, steps: int) -> Iterator[Rows]:
    """One batch for each step."""
    for step in range(steps):
        numbers = (step * BATCH + np.arange(BATCH)) % len(rows["label"])
        yield {name: column[numbers] for name, column in rows.items()}
