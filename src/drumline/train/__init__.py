"""Train JAX models. A run that is killed at any time resumes and ends with the same bits.

    from drumline.train import Functions, Recipe, data, fit

    recipe = Recipe(
        model=Functions(init, loss),
        optimizer=optax.adam(1e-3),
        data=data.arrays({"image": images, "label": labels}, batch=64),
        mesh={"data": -1},
        steps=300,
    )
    result = fit(recipe, checkpoint="/data/run")

`python -m drumline.train CONFIG.py` trains the recipe that a config file defines.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from drumline.deprecated import lookup

if TYPE_CHECKING:
    from drumline.train import data
    from drumline.train.checkpoints.saving import load_params
    from drumline.train.checksums import fingerprint
    from drumline.train.data import Data
    from drumline.train.loop import Ending, Result, fit
    from drumline.train.mesh import make_mesh
    from drumline.train.recipe import (
        Batch,
        Evaluation,
        Functions,
        Metrics,
        Model,
        Params,
        Recipe,
        SaveEvery,
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
    "Model",
    "Params",
    "Recipe",
    "Result",
    "SaveEvery",
    "Settings",
    "State",
    "data",
    "fingerprint",
    "fit",
    "load_params",
    "make_mesh",
]

REQUIRED_PACKAGES = ("jax", "optax", "orbax", "grain")
"""The packages of `drumline[jax]`, which training needs. The base install does not have them."""

_MODULES = {
    "Batch": "recipe",
    "Data": "data",
    "Ending": "loop",
    "Evaluation": "recipe",
    "Functions": "recipe",
    "Metrics": "recipe",
    "Model": "recipe",
    "Params": "recipe",
    "Recipe": "recipe",
    "Result": "loop",
    "SaveEvery": "recipe",
    "Settings": "recipe",
    "State": "state",
    "fingerprint": "checksums",
    "fit": "loop",
    "load_params": "checkpoints.saving",
    "make_mesh": "mesh",
}
_RENAMED = {"Mistake": "drumline.errors:UserError"}


def missing_packages_message() -> str | None:
    """Return a message that names the missing packages, or None if all are installed."""
    missing = [name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if not missing:
        return None
    return f"training needs {', '.join(missing)}: pip install 'drumline[jax]'"


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that a missing JAX gives a clear message."""
    if name == "data":
        return import_module("drumline.train.data")
    if name not in _MODULES:
        return lookup(__name__, name, _RENAMED)
    if message := missing_packages_message():
        raise ImportError(message)
    return getattr(import_module(f"drumline.train.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, also those that are not loaded yet, for tab completion."""
    return sorted({*globals(), *__all__})
