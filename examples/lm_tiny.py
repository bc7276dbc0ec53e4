"""Train a small decoder on additions, with FSDP over `data` and tensor parallelism over `model`.

    python -m drumline.train examples/lm_tiny.py

prints at the end, on one CPU:

    done: step 300  loss 0.6797  cross entropy 0.6797  eval cross entropy 0.6842  eval loss 0.6842

Two of the seven symbols of a sum are random, so the lowest possible cross entropy is 2·ln(10)/7 =
0.658. A model that knows the form of a sum but cannot add reaches 1.06.
"""

import jax
import numpy as np
import optax

from drumline.models import LM
from drumline.train import Data, Evaluation, Recipe, SaveEvery, Settings, data

SYMBOLS = "0123456789+=;"
SUMS_PER_ROW = 4


def sums(rows: int, batch: int, seed: int) -> Data:
    """Return rows of sums such as `;3+9=12;4+1=05;`, in which only the results can be predicted."""
    digits = np.random.default_rng(seed).integers(0, 10, (rows, SUMS_PER_ROW, 2))
    texts = [";" + "".join(f"{a}+{b}={a + b:02};" for a, b in row) for row in digits]
    tokens = np.array([[SYMBOLS.index(symbol) for symbol in text] for text in texts], np.int32)
    return data.arrays({"tokens": tokens}, batch=batch)


def recipe(
    *, steps: int = 300, batch: int = 32, learning_rate: float = 1e-2, save_every: SaveEvery = 100
) -> Recipe:
    """Return the recipe."""
    model = LM(
        width=32,
        depth=2,
        heads=4,
        head_dim=8,
        kv_heads=2,
        hidden=64,
        vocab=16,
        layout="fsdp+tensor",
        compute_dtype="float32",
        scan_layers=True,
    )
    rate = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
    return Recipe(
        model=model,
        optimizer=optax.adam(rate, b2=0.98),
        data=sums(8000, batch, seed=0),
        mesh={"data": -1, "model": 2 if jax.device_count() % 2 == 0 else 1},
        steps=steps,
        evaluation=Evaluation(sums(256, batch, seed=1)),
        settings=Settings(save_every=save_every),
    )
