"""Train an MLP on handwritten digits of 8×8 pixels, data parallel over all devices.

    python -m drumline.train examples/digits.py

prints at the end, on one CPU:

    done: step 200  loss 0.0109  accuracy 1  eval accuracy 0.9832  eval loss 0.05193
"""

from pathlib import Path

import numpy as np
import optax

from drumline.models import MLP
from drumline.train import Data, Evaluation, Recipe, SaveEvery, Settings, data

DIGITS = Path(__file__).parent / "data" / "digits.npz"


def digits(split: str, batch: int) -> Data:
    """Return the images and labels of a split, `train` or `test`."""
    with np.load(DIGITS) as file:
        columns = {"image": file[f"{split}_images"][..., None], "label": file[f"{split}_labels"]}
    return data.arrays(columns, batch=batch)


def recipe(
    *, steps: int = 200, batch: int = 128, learning_rate: float = 2e-3, save_every: SaveEvery = 50
) -> Recipe:
    """Return the recipe."""
    return Recipe(
        model=MLP(input_dim=8 * 8, hidden_sizes=(256, 128)),
        optimizer=optax.adam(optax.cosine_decay_schedule(learning_rate, steps)),
        data=digits("train", batch),
        mesh={"data": -1},
        steps=steps,
        evaluation=Evaluation(digits("test", batch)),
        settings=Settings(save_every=save_every),
    )
