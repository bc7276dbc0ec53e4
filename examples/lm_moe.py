"""Train a decoder with four experts per block on additions, with expert parallelism.

    python -m drumline.train examples/lm_moe.py

prints at the end, on one CPU (here on two lines):

    done: step 300  loss 0.6891  balance loss 1.056  cross entropy 0.6774  z loss 1.087
    eval cross entropy 0.6819  eval loss 0.6819  eval z loss 1.135

The lowest possible cross entropy is 0.658 (lm_tiny.py). The balance loss is 1 if all experts are
used equally.
"""

import jax
import optax
from lm_tiny import sums

from drumline.models import LM
from drumline.train import Evaluation, Recipe, SaveEvery, Settings


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
        hidden=32,
        vocab=16,
        experts=4,
        experts_per_token=2,
        layout="fsdp+expert",
        compute_dtype="float32",
        scan_layers=True,
    )
    rate = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
    return Recipe(
        model=model,
        optimizer=optax.adam(rate, b2=0.98),
        data=sums(8000, batch, seed=0),
        mesh={"data": -1, "expert": 2 if jax.device_count() % 2 == 0 else 1},
        steps=steps,
        evaluation=Evaluation(sums(256, batch, seed=1)),
        settings=Settings(save_every=save_every),
    )
