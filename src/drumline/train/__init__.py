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

from importlib import import_module
from typing import TYPE_CHECKING, Any

from drumline.train.mistakes import Mistake, missing

if TYPE_CHECKING:
    from drumline.train import data
    from drumline.train.checkpoints.digest import fingerprint
    from drumline.train.data import Data
    from drumline.train.loop import fit
    from drumline.train.mesh import make_mesh
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
    from drumline.train.result import Ending, Result
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
    "make_mesh",
]

_HOMES = {
    "data": ("Data",),
    "checkpoints.digest": ("fingerprint",),
    "loop": ("fit",),
    "mesh": ("make_mesh",),
    "recipe": (
        "Batch",
        "Evaluation",
        "Functions",
        "Metrics",
        "Model",
        "Params",
        "Recipe",
        "Settings",
    ),
    "result": ("Ending", "Result"),
    "state": ("State",),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: without JAX this still says in a sentence what lacks."""
    if name == "data":
        return import_module("drumline.train.data")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if lacking := missing():
        raise ImportError(lacking)
    return getattr(import_module(f"drumline.train.{home}"), name)
