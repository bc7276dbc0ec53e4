"""The provenance of a checkpoint, which is its recipe and data, and the changes since then.

A run that resumes with a different batch size, learning rate or data set has the result of neither
recipe. So every checkpoint records its provenance: of the data, the number of records and a hash of
a few; of the model, its sizes and a hash of its loss; of the optimizer, a hash of its computation
and the numbers in it. A run that resumes compares and logs the changes. It is refused if a change
would break the promise of the same bits, unless the user allows it.
"""

# mypy: allow-untyped-calls

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import Mesh

from drumline import __version__
from drumline.train.data import Data
from drumline.train.recipe import Recipe
from drumline.train.state import State

FORMAT = 1
SAMPLE = 8
"""The number of records that are hashed for the whole data set. They are read at every start."""


@dataclass(frozen=True)
class Change:
    """A difference between the provenance of a checkpoint and the current recipe."""

    text: str
    """`batch 128 → 64`."""
    breaking: bool
    """True if the run that resumes is no longer the run that started."""


@dataclass(frozen=True)
class ProvenanceComparison:
    """The messages about the changes, and whether the run may resume."""

    messages: tuple[str, ...]
    breaking: str = ""
    """The changes for which the run is refused; empty if it may resume."""


def provenance(recipe: Recipe, mesh: Mesh, state: State, loss: ClosedJaxpr) -> dict[str, Any]:
    """Return the provenance of a run's checkpoints, as values for a JSON file."""
    params, moments = _without_shardings(state.params), _without_shardings(state.opt_state)
    init = summarize_program(jax.make_jaxpr(recipe.optimizer.init)(params))
    update = summarize_program(jax.make_jaxpr(recipe.optimizer.update)(params, moments, params))
    initialize = jax.make_jaxpr(recipe.model.init)(jax.random.key(recipe.settings.seed))
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
        "compiler options": dict(recipe.compiler_options),
        "seed": recipe.settings.seed,
        "data": {
            "records": len(data.records),
            "content": hash_records(data),
            "batch": data.batch,
            "shuffle": data.shuffle,
            "seed": data.seed,
        },
        "model": {
            "kind": type(recipe.model).__name__,
            "sizes": dict(_model_sizes(recipe.model)),
            "defaults": dict(_model_defaults(recipe.model)),
            "loss": _hash_program(loss),
            "init": _hash_program(initialize, arrays=False),
        },
        "optimizer": {
            "equations": f"{init.equations} {update.equations}",
            "numbers": [*init.numbers, *update.numbers],
        },
    }


def hash_records(data: Data) -> str | None:
    """Return a hash of a few records, or None if it would not identify the data set.

    That is the case if records differ from one reading to the next, as with an augmentation without
    a seed. A record that cannot be read fails the run when its turn comes, not here.
    """
    indices = np.unique(np.linspace(0, len(data.records) - 1, SAMPLE).astype(np.int64))

    def hash_rows() -> str:
        sha = hashlib.sha256()
        for name, rows in sorted(data.records.rows(indices).items()):
            array = np.ascontiguousarray(rows)
            sha.update(repr((name, array.shape, str(array.dtype))).encode() + array.tobytes())
        return sha.hexdigest()[:16]

    try:
        first = hash_rows()
        return first if hash_rows() == first else None
    except Exception:
        return None


def compare_provenance(
    saved: Mapping[str, Any], current: Mapping[str, Any], allow_changes: bool
) -> ProvenanceComparison:
    """Compare the provenance of a checkpoint with that of the run that resumes from it."""
    if saved.get("format") != current["format"]:
        message = "this checkpoint does not record its recipe and data; no changes are assumed"
        return ProvenanceComparison((message,))
    changes = find_changes(saved, current)
    breaking = "; ".join(change.text for change in changes if change.breaking)
    others = "; ".join(change.text for change in changes if not change.breaking)
    if breaking and not allow_changes:
        return ProvenanceComparison((), breaking)
    messages = [f"the recipe changes here, as allowed: {breaking}"] if breaking else []
    if others:
        messages.append(f"changes since that checkpoint: {others}")
    return ProvenanceComparison(tuple(messages))


def find_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return the changes, those that are breaking first."""
    changes = [*_data_changes(saved["data"], current["data"])]
    if saved["seed"] != current["seed"]:
        changes.append(Change(f"seed {saved['seed']} → {current['seed']}", breaking=True))
    versions = [
        Change(f"{name} {saved_version} → {current['versions'][name]}", breaking=False)
        for name, saved_version in saved["versions"].items()
        if saved_version != current["versions"].get(name)
    ]
    sizes = [*_size_changes(saved["model"], current["model"])]
    devices = [*_device_changes(saved, current)]
    changes += sizes
    # With other shapes, shardings or versions of JAX the same loss has a different program.
    if not (changes or devices or versions):
        changes += _model_changes(saved["model"], current["model"])
    # The optimizer's equations depend on the shapes of the parameters.
    if not any(change.breaking for change in sizes):
        same_versions = not versions
        changes += _optimizer_changes(saved["optimizer"], current["optimizer"], same_versions)
    changes += [*devices, *versions]
    changes += [
        Change(f"{name} {saved[name]} → {current[name]}", breaking=False)
        for name in ("steps", "nan", "compiler options")
        # Checkpoints of earlier versions do not record the compiler options.
        if saved.get(name, {}) != current[name]
    ]
    return tuple(sorted(changes, key=lambda change: not change.breaking))


def _data_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Change]:
    if saved["batch"] != current["batch"]:
        yield Change(f"batch {saved['batch']} → {current['batch']}", breaking=True)
    if saved["records"] != current["records"]:
        yield Change(
            f"data of {saved['records']:,} → {current['records']:,} records", breaking=True
        )
    elif saved["content"] and current["content"] and saved["content"] != current["content"]:
        yield Change(f"other records in the data, {current['records']:,} as before", breaking=True)
    if saved["shuffle"] != current["shuffle"]:
        yield Change(f"data shuffle {saved['shuffle']} → {current['shuffle']}", breaking=True)
    elif saved["seed"] != current["seed"] and current["shuffle"]:
        yield Change(f"data seed {saved['seed']} → {current['seed']}", breaking=True)


def _size_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Change]:
    if saved["kind"] != current["kind"]:
        yield Change(f"model {saved['kind']} → {current['kind']}", breaking=True)
        return
    # A version without an option computed the same as the default of a later version.
    defaults = {**saved.get("defaults", {}), **current.get("defaults", {})}
    for name in sorted({*saved["sizes"], *current["sizes"]}):
        before, after = (
            model["sizes"].get(name, defaults.get(name, "none")) for model in (saved, current)
        )
        if before != after:
            # A different layout, like a different mesh, only changes the order of additions.
            yield Change(f"model {name} {before} → {after}", breaking=name != "layout")


def _model_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the changes of the programs of a model."""
    if saved["loss"] != current["loss"]:
        yield Change("the model's loss computes something else", breaking=True)
    # Checkpoints of earlier versions do not record the initialization.
    if saved.get("init", current["init"]) != current["init"]:
        yield Change("the model's parameters are initialized differently", breaking=True)


def _device_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the changes of the slice. They change the order of additions, or the chips."""
    effect = "so losses agree to rounding"
    if saved["mesh"] != current["mesh"]:
        meshes = (saved["mesh"].items(), current["mesh"].items())
        before, after = (" × ".join(f"{axis}={size}" for axis, size in mesh) for mesh in meshes)
        yield Change(f"mesh {before} → {after}, {effect}", breaking=False)
    for name in ("devices", "hosts"):
        if saved[name] != current[name]:
            yield Change(f"{name} {saved[name]} → {current[name]}, {effect}", breaking=False)


def _optimizer_changes(
    saved: Mapping[str, Any], current: Mapping[str, Any], same_versions: bool
) -> list[Change]:
    if saved == current:
        return []
    if not same_versions:
        return [Change("the optimizer, which cannot be compared across versions", breaking=False)]
    if saved["equations"] != current["equations"]:
        return [Change("the optimizer computes something else", breaking=True)]
    pairs = zip(saved["numbers"], current["numbers"], strict=True)
    changed = [
        *dict.fromkeys((abs(before), abs(after)) for before, after in pairs if before != after)
    ]
    text = ", ".join(f"{before:.6g} → {after:.6g}" for before, after in changed[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return [Change(f"the optimizer's numbers {text}{more}", breaking=True)]


def _without_shardings(shapes: Any) -> Any:
    """Remove the shardings, because the program must not depend on the mesh."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)


def _model_sizes(model: object) -> Iterator[tuple[str, str]]:
    """Yield the sizes of a model that is a dataclass. Its functions are part of the loss."""
    for item in fields(model) if is_dataclass(model) else ():
        value = getattr(model, item.name)
        if _is_plain(value):
            yield item.name, str(value)


def _model_defaults(model: object) -> Iterator[tuple[str, str]]:
    """Yield the default sizes of a model that is a dataclass."""
    for item in fields(model) if is_dataclass(model) else ():
        if item.default is not MISSING and _is_plain(item.default):
            yield item.name, str(item.default)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


# Programs -----------------------------------------------------------------------------------------

MAX_NUMBERS = 5000
"""If a program has more numbers, they become part of the hash. Such a list would help nobody."""
_LABELS = ("name", "debug_info")
"""The parameters of equations that are only for people to read."""


@dataclass(frozen=True)
class ProgramSummary:
    """A traced program, in a form that can be compared across processes.

    Two optimizers that differ only in a number, such as a learning rate or the length of a
    schedule, have the same equations and different numbers.
    """

    equations: str
    """A hash of the equations without names, source lines, addresses and numbers: 16 hex digits."""
    numbers: tuple[float, ...]
    """The numbers in the program, in order."""


def summarize_program(traced: ClosedJaxpr, *, arrays: bool = True) -> ProgramSummary:
    """Return the summary of a traced function, without the values of its `arrays` if told so."""
    hasher = _ProgramHasher(arrays=arrays)
    for const in traced.consts:
        hasher.add_constant(const)
    hasher.add_jaxpr(traced.jaxpr)
    if len(hasher.numbers) > MAX_NUMBERS:
        hasher.add(*hasher.numbers)
        hasher.numbers.clear()
    return ProgramSummary(hasher.equations.hexdigest()[:16], tuple(hasher.numbers))


def _hash_program(traced: ClosedJaxpr, *, arrays: bool = True) -> str:
    """Return a hash of a program with its numbers.

    The `arrays` of an initialization do not count, because they may be large pretrained weights.
    """
    summary = summarize_program(traced, arrays=arrays)
    text = repr((summary.equations, summary.numbers))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class _ProgramHasher:
    """Walks through a program. The text that it hashes is the same in all versions."""

    equations: Any = field(default_factory=hashlib.sha256)
    numbers: list[float] = field(default_factory=list)
    arrays: bool = True
    """True if the values of arrays count."""

    def add(self, *values: object) -> None:
        self.equations.update(repr(values).encode())

    def add_jaxpr(self, jaxpr: Jaxpr) -> None:
        variable_numbers: dict[Any, int] = {}
        aliases: dict[Any, Any] = {}

        def describe(atoms: Any) -> Iterator[object]:
            for atom in atoms:
                if isinstance(atom, Literal):
                    self.add_constant(atom.val)
                    yield "literal"
                else:
                    variable = aliases.get(atom, atom)
                    number = variable_numbers.setdefault(variable, len(variable_numbers))
                    yield number, _type_of(atom)

        self.add("takes", *describe([*jaxpr.constvars, *jaxpr.invars]))
        for equation in jaxpr.eqns:
            if equation.primitive.name == "name":
                # A name for remat policies (`checkpoint_name`) changes no result.
                (named,), (out,) = equation.invars, equation.outvars
                aliases[out] = aliases.get(named, named)
                continue
            self.add(equation.primitive.name, *describe(equation.invars))
            for name in sorted(equation.params):
                if name not in _LABELS:
                    self.add_parameter(name, equation.params[name])
            self.add(*describe(equation.outvars))
        self.add("gives", *describe(jaxpr.outvars))

    def add_parameter(self, name: str, value: Any) -> None:
        if isinstance(value, ClosedJaxpr):
            for const in value.consts:
                self.add_constant(const)
            self.add_jaxpr(value.jaxpr)
        elif isinstance(value, Jaxpr):
            self.add_jaxpr(value)
        elif isinstance(value, tuple | list):
            self.add(name, len(value))
            for item in value:
                self.add_parameter(name, item)
        elif isinstance(value, np.ndarray):
            self.add_constant(value)
        elif value is None or isinstance(value, bool | int | float | str | np.dtype | Enum):
            self.add(name, str(value))
        else:
            # The text of functions, meshes and shardings contains addresses.
            self.add(name, type(value).__name__)

    def add_constant(self, value: Any) -> None:
        unread = not self.arrays and np.ndim(value) > 0
        if unread or not getattr(value, "is_fully_addressable", True):
            self.add("constant", value.shape, str(value.dtype))
            return
        array = np.asarray(value)
        self.add("constant", array.shape, str(array.dtype))
        if array.ndim == 0 and array.dtype.kind in "iufb":
            self.numbers.append(float(array))
        elif array.dtype.kind != "O":
            self.equations.update(np.ascontiguousarray(array).tobytes())


def _type_of(atom: Any) -> tuple[object, str]:
    aval = atom.aval
    return getattr(aval, "shape", None), str(getattr(aval, "dtype", ""))
