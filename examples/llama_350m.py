"""Train a Llama-style decoder of 374 million parameters at 2048 tokens, with FSDP.

    python -m drumline.train examples/llama_350m.py --set tokens=/data/train.bin

Measured on one H200: see docs/training.md.

The file contains token ids of two bytes each, text after text. Without a file the tokens are
random, which is enough to measure the speed.
"""

from pathlib import Path

import numpy as np
import optax

from drumline.models import LM, llama_350m
from drumline.train import Data, Recipe, SaveEvery, Settings, data

LENGTH = 2048


def recipe(
    *,
    tokens: Path | None = None,
    steps: int = 20_000,
    batch: int = 256,
    learning_rate: float = 3e-4,
    save_every: SaveEvery = 500,
) -> Recipe:
    """Return the recipe."""
    model = llama_350m(layout="fsdp")
    return Recipe(
        model=model,
        optimizer=adamw(learning_rate, steps),
        data=texts(tokens, model, batch),
        mesh={"data": -1},
        steps=steps,
        settings=Settings(
            save_every=save_every, keep_every=5000 if save_every == "auto" else 10 * save_every
        ),
    )


def adamw(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Return AdamW with warm-up, cosine decay to a tenth, and gradient clipping."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, steps // 50, steps, end_value=learning_rate / 10
    )
    clip = optax.clip_by_global_norm(1.0)
    return optax.chain(clip, optax.adamw(rate, b2=0.95, weight_decay=0.1))


def texts(file: Path | None, model: LM, batch: int) -> Data:
    """Return windows of the file, or of random tokens."""
    if file:
        return data.tokens(file, length=LENGTH, batch=batch)
    ids = np.random.default_rng(0).integers(0, model.vocab, (batch, LENGTH + 1), np.int32)
    return data.arrays({"tokens": ids}, batch=batch)
