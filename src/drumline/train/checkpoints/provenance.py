"""Where a checkpoint comes from, and what has changed since.

A run that goes on with another batch, learning rate or data set than it began with ends with the
result of neither recipe. So every checkpoint says what led to it: the data, by their number and a
few of the records; the model, by its sizes and by what its loss computes; the optimizer, by what
it computes and with which numbers. A run that goes on compares, says what is new, and is refused
where the promise of the same bits would be broken, unless the user says that this is meant.
"""

# mypy: allow-untyped-calls

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from drumline import __version__
from drumline.train.checkpoints.program import program
from drumline.train.data import Data
from drumline.train.recipe import Recipe
from drumline.train.state import State

FORMAT = 1
SAMPLE = 8
"""Records that stand for the whole data set: enough to notice another one, few enough to read at
every start."""


@dataclass(frozen=True)
class Change:
    """Something that is not as it was when a checkpoint was written."""

    told: str
    """`batch 128 → 64`."""
    breaks: bool
    """Whether what comes after it is no longer the run that was begun."""


@dataclass(frozen=True)
class Comparison:
    """What a run that goes on has to say, and whether it may."""

    said: tuple[str, ...]
    """Sentences for whoever watches."""
    refused: str = ""
    """What has changed and must not; empty where the run may go on."""


def provenance(recipe: Recipe, mesh: Mesh, places: State, loss: ClosedJaxpr) -> dict[str, Any]:
    """What leads to the checkpoints of a run, as plain values for a file."""
    params, moments = _bare(places.params), _bare(places.opt_state)
    begin = program(jax.make_jaxpr(recipe.optimizer.init)(params))
    update = program(jax.make_jaxpr(recipe.optimizer.update)(params, moments, params))
    data = recipe.data
    return {
        "format": FORMAT,
        "versions": {
            "drumline": __version__,
            **{name: version(name) for name in ("jax", "optax")},
        },
        "mesh": {axis: int(size) for axis, size in mesh.shape.items()},
        "devices": mesh.devices.flat[0].device_kind,
        "hosts": jax.process_count(),
        "steps": recipe.steps,
        "nan": recipe.settings.nan,
        "seed": recipe.settings.seed,
        "data": {
            "records": len(data.records),
            "content": sampled(data),
            "batch": data.batch,
            "shuffle": data.shuffle,
            "seed": data.seed,
        },
        "model": {
            "kind": type(recipe.model).__name__,
            "sizes": dict(_plain_fields(recipe.model)),
            "defaults": dict(_plain_defaults(recipe.model)),
            "loss": _with_numbers(loss),
        },
        "optimizer": {
            "equations": f"{begin.equations} {update.equations}",
            "numbers": [*begin.numbers, *update.numbers],
        },
    }


def sampled(data: Data) -> str | None:
    """A few letters that stand for the records; None where they cannot tell.

    Records that differ from one reading to the next, as with an augmentation that has no seed, say
    nothing about the data set; one that cannot be read is the run's business when it comes to it.
    """
    numbers = np.unique(np.linspace(0, len(data.records) - 1, SAMPLE).astype(np.int64))

    def read() -> str:
        sums = hashlib.sha256()
        for name, rows in sorted(data.records.rows(numbers).items()):
            array = np.ascontiguousarray(rows)
            sums.update(repr((name, array.shape, str(array.dtype))).encode() + array.tobytes())
        return sums.hexdigest()[:16]

    try:
        first = read()
        return first if read() == first else None
    except Exception:
        return None


def compare(before: Mapping[str, Any], now: Mapping[str, Any], allow_changes: bool) -> Comparison:
    """Compare what led to a checkpoint with the recipe that is to go on from it."""
    if before.get("format") != now["format"]:
        told = "this checkpoint does not say which recipe and data led to it; taken to be these"
        return Comparison((told,))
    found = changes(before, now)
    breaking = "; ".join(change.told for change in found if change.breaks)
    others = "; ".join(change.told for change in found if not change.breaks)
    if breaking and not allow_changes:
        return Comparison((), refused=breaking)
    said = [f"with another recipe from here on, as allowed: {breaking}"] if breaking else []
    return Comparison((*said, f"since that checkpoint: {others}") if others else tuple(said))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Change, ...]:
    """What is new, those that break the promise first."""
    found = [*_of_the_data(before["data"], now["data"])]
    if before["seed"] != now["seed"]:
        found.append(Change(f"seed {before['seed']} → {now['seed']}", breaks=True))
    versions = [
        Change(f"{name} {old} → {now['versions'][name]}", breaks=False)
        for name, old in before["versions"].items()
        if old != now["versions"].get(name)
    ]
    sizes = [*_of_the_sizes(before["model"], now["model"])]
    places = [*_of_the_places(before, now)]
    found += sizes
    # Other shapes, other places or another JAX give another text of the same loss.
    if not (found or places or versions) and before["model"]["loss"] != now["model"]["loss"]:
        found.append(Change("the model's loss computes something else", breaks=True))
    # Parameters of other shapes are updated by other equations, whatever the optimizer.
    if not any(change.breaks for change in sizes):
        found += _of_the_optimizer(before["optimizer"], now["optimizer"], same_text=not versions)
    found += [*places, *versions]
    found += [
        Change(f"{name} {before[name]} → {now[name]}", breaks=False)
        for name in ("steps", "nan")
        if before[name] != now[name]
    ]
    return tuple(sorted(found, key=lambda change: not change.breaks))


def _of_the_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    if before["batch"] != now["batch"]:
        yield Change(f"batch {before['batch']} → {now['batch']}", breaks=True)
    if before["records"] != now["records"]:
        yield Change(f"data of {before['records']:,} → {now['records']:,} records", breaks=True)
    elif before["content"] and now["content"] and before["content"] != now["content"]:
        yield Change(f"other records in the data, of {now['records']:,} as before", breaks=True)
    if before["shuffle"] != now["shuffle"]:
        yield Change(f"data shuffle {before['shuffle']} → {now['shuffle']}", breaks=True)
    elif before["seed"] != now["seed"] and now["shuffle"]:
        yield Change(f"data seed {before['seed']} → {now['seed']}", breaks=True)


def _of_the_sizes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    if before["kind"] != now["kind"]:
        yield Change(f"model {before['kind']} → {now['kind']}", breaks=True)
        return
    # A version that lacks an option computed what a later one does by default.
    unsaid = {**before.get("defaults", {}), **now.get("defaults", {})}
    for name in sorted({*before["sizes"], *now["sizes"]}):
        old, new = (model["sizes"].get(name, unsaid.get(name, "none")) for model in (before, now))
        if old != new:
            # As with the mesh: the same sums in another order.
            yield Change(f"model {name} {old} → {new}", breaks=name != "layout")


def _of_the_places(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Another slice: the same sums in another order, or by other chips."""
    rounding = "losses agree to rounding"
    if before["mesh"] != now["mesh"]:
        meshes = (before["mesh"].items(), now["mesh"].items())
        old, new = (" × ".join(f"{axis}={size}" for axis, size in mesh) for mesh in meshes)
        yield Change(f"mesh {old} → {new}, so {rounding}", breaks=False)
    for name in ("devices", "hosts"):
        if before[name] != now[name]:
            yield Change(f"{name} {before[name]} → {now[name]}, so {rounding}", breaks=False)


def _of_the_optimizer(
    before: Mapping[str, Any], now: Mapping[str, Any], *, same_text: bool
) -> list[Change]:
    if before == now:
        return []
    if not same_text:
        return [Change("the optimizer, which cannot be compared across versions", breaks=False)]
    if before["equations"] != now["equations"]:
        return [Change("the optimizer computes something else", breaks=True)]
    pairs = zip(before["numbers"], now["numbers"], strict=True)
    differ = dict.fromkeys((abs(old), abs(new)) for old, new in pairs if old != new)
    told = ", ".join(f"{old:.6g} → {new:.6g}" for old, new in [*differ][:3])
    more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
    return [Change(f"the optimizer's numbers {told}{more}", breaks=True)]


def _bare(shapes: Any) -> Any:
    """Without their places: the program must not depend on the mesh."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)


def _with_numbers(traced: ClosedJaxpr) -> str:
    found = program(traced)
    text = repr((found.equations, found.numbers))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain_fields(model: object) -> Iterator[tuple[str, str]]:
    """The sizes of a model that is a dataclass; its functions are told by what they compute."""
    if not is_dataclass(model):
        return
    for each in fields(model):
        value = getattr(model, each.name)
        if _is_plain(value):
            yield each.name, str(value)


def _plain_defaults(model: object) -> Iterator[tuple[str, str]]:
    """What the sizes of a model that is a dataclass are where nobody says."""
    for each in fields(model) if is_dataclass(model) else ():
        if each.default is not MISSING and _is_plain(each.default):
            yield each.name, str(each.default)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
