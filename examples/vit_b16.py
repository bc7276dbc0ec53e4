"""Train ViT-B/16, 86.6 million parameters, on images of 224×224 pixels, with FSDP.

    python -m drumline.train examples/vit_b16.py --set images=/data/imagenet

Measured on one H200: see docs/training.md.

The folder contains `images.npy`, uint8[N, 224, 224, 3], and `labels.npy`, int[N], which stay on
disk. Without a folder the images are noise, which is enough to measure the speed.
"""

from pathlib import Path

import numpy as np
import optax

from drumline.models import vit_b16
from drumline.train import Data, Recipe, SaveEvery, Settings, data


def recipe(
    *,
    images: Path | None = None,
    steps: int = 90_000,
    batch: int = 1024,
    learning_rate: float = 1e-3,
    save_every: SaveEvery = 1000,
) -> Recipe:
    """Return the recipe."""
    rate = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
    return Recipe(
        model=vit_b16(layout="fsdp"),
        optimizer=optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.05)
        ),
        data=pictures(images, batch) if images else noise(batch),
        mesh={"data": -1},
        steps=steps,
        settings=Settings(save_every=save_every),
    )


def pictures(folder: Path, batch: int) -> Data:
    """Return the images of a folder, which are read as needed."""
    columns = {
        "image": np.load(folder / "images.npy", mmap_mode="r"),
        "label": np.load(folder / "labels.npy", mmap_mode="r"),
    }
    return data.arrays(columns, batch=batch)


def noise(batch: int) -> Data:
    """Return a batch of random images, which is repeated."""
    random = np.random.default_rng(0)
    columns = {
        "image": random.integers(0, 256, (batch, 224, 224, 3), np.uint8),
        "label": random.integers(0, 1000, batch, np.int32),
    }
    return data.arrays(columns, batch=batch)
