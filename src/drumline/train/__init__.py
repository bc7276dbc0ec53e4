"""Training that loses nothing: stopped at any instant, a run still ends with the same bits.

    from drumline.train import Functions, Recipe, data, fit

    recipe = Recipe(
        model=Functions(init, loss),
        optimizer=optax.adam(1e-3),
        data=data.arrays({"image": images, "label": labels}, batch=64),
        mesh={"data": -1},
        steps=300,
    )
    result = fit(recipe, checkpoint="/data/run")

`python -m drumline.train CONFIG.py` runs a file that defines `recipe`.
"""

from drumline.train import data
from drumline.train.data import Data
from drumline.train.digest import fingerprint
from drumline.train.loop import Ending, Result, fit
from drumline.train.mistakes import Mistake
from drumline.train.recipe import (
    Batch,
    Evaluation,
    Functions,
    Metrics,
    Model,
    Params,
    Recipe,
    Settings,
)
from drumline.train.state import State

__all__ = [
    "Batch",
    "Data",
    "Ending",
    "Evaluation",
    "Functions",
    "Metrics",
    "Mistake",
    "Model",
    "Params",
    "Recipe",
    "Result",
    "Settings",
    "State",
    "data",
    "fingerprint",
    "fit",
]
