"""The MLP and its training in Drumline. `fit` replaces the loops of torch_mlp.py and jax_mlp.py.

    python -m drumline.train examples/from_pytorch/drumline_mlp.py --set weights=/tmp/weights.npz

    done: step 50  loss 0.3022  accuracy 0.9531  eval accuracy 0.9226  eval loss 0.3147

The file has the initial weights of torch_mlp.py. Without it, the recipe draws others.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import optax
from digit_batches import BATCH, HIDDEN_SIZES, PIXELS, digits
from first_weights import Weights, load

from drumline import models
from drumline.errors import UserError
from drumline.train import Evaluation, Recipe, Settings, data

STEPS = 50
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2


@dataclass(frozen=True)
class MLP(models.MLP):
    """Linear layers with ReLU between them. The initial weights may come from a file."""

    weights: Path | None = None

    def init(self, key: jax.Array) -> Weights:
        """Return the weights in the file, or draw new ones."""
        return load(self.weights) if self.weights else super().init(key)


def recipe(*, steps: int = STEPS, seed: int = 0, weights: Path | None = None) -> Recipe:
    """Train on the digits, from the weights in a file if there is one."""
    if weights and not weights.is_file():
        raise UserError(f"weights: there is no file {weights}; torch_mlp.py writes one")
    return Recipe(
        model=MLP(PIXELS, HIDDEN_SIZES, weights=weights),
        optimizer=optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        data=data.arrays(digits("train"), batch=BATCH, shuffle=False),
        mesh={"data": -1},
        steps=steps,
        evaluation=Evaluation(data.arrays(digits("test"), batch=BATCH)),
        settings=Settings(seed=seed, log_every=1),
    )
