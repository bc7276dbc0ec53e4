"""A function as one flat list of operations, each with the line of the user's that asked for it.

JAX traces a function into equations, some of which call others: a `jit` inside, a custom
derivative, a checkpoint. Here those calls are opened, so that what is left runs one after the
other and can be cut off after any operation. Loops and branches (`scan`, `while`, `cond`) stay one
operation each. Prints are left out: they would be repeated with every run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from drumline.numerics.mistakes import Mistake

_CALLED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""The primitives that only call other equations, and the parameter that holds those."""
_PRINTS = ("debug_callback", "debug_print")
_WHERE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(:\d+)? \(")
_JAX = str(Path(jax.__file__).parent)
_OWN = str(Path(__file__).parent)


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        """As an editor takes it, from the current folder where the file lies below it."""
        path = Path(self.file)
        here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{here}:{self.line}"


@dataclass(frozen=True)
class TracedOperation:
    """One operation of a function, as a user can find it again."""

    number: int
    """Its position among the operations, from 1 on."""
    primitive: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    """Shapes and dtypes, such as `bfloat16[8,512]`."""
    place: SourceLine | None
    """The line that asked for it, where JAX has kept it."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "number": self.number,
            "primitive": self.primitive,
            "takes": list(self.takes),
            "gives": list(self.gives),
            "file": self.place.file if self.place else None,
            "line": self.place.line if self.place else None,
        }


@dataclass(frozen=True)
class TracedFunction:
    """A function's operations, what goes into them and what comes out."""

    flat: Any
    """The closed jaxpr without any calls."""
    places: tuple[SourceLine | None, ...]
    """The user's line for each operation."""
    inputs: tuple[Any, ...]
    names: tuple[str, ...]
    """A name for each output: its path in what the function returns."""
    compiler_options: dict[str, Any]
    """Those that the user's own `jit` sets."""

    def __len__(self) -> int:
        """How many operations there are."""
        return len(self.flat.jaxpr.eqns)

    @cached_property
    def _made_by(self) -> dict[Any, int]:
        numbered = enumerate(self.flat.jaxpr.eqns)
        return {var: index for index, equation in numbered for var in equation.outvars}

    def maker(self, atom: Any) -> int | None:
        """The index of the operation that made this value; none made a constant or an input."""
        return None if isinstance(atom, jex.Literal) else self._made_by.get(atom)

    def operands(self, index: int) -> list[int]:
        """The operations whose results this one takes."""
        made = (self.maker(atom) for atom in self.flat.jaxpr.eqns[index].invars)
        return sorted({maker for maker in made if maker is not None})

    def ancestors(self, index: int) -> list[int]:
        """Every operation that this one depends on, in order, and itself."""
        needed = {index}
        for earlier in range(index, -1, -1):
            if earlier in needed:
                needed.update(self.operands(earlier))
        return sorted(needed)

    @cached_property
    def from_floats(self) -> frozenset[int]:
        """The operations that depend on a float from outside: a mask, or an index, does not."""
        jaxpr = self.flat.jaxpr
        floats = {
            var
            for var in (*jaxpr.invars, *jaxpr.constvars)
            if jnp.issubdtype(var.aval.dtype, jnp.inexact)
        }
        found = set()
        for index, equation in enumerate(jaxpr.eqns):
            taken = (atom for atom in equation.invars if not isinstance(atom, jex.Literal))
            if any(atom in floats for atom in taken):
                found.add(index)
                floats.update(equation.outvars)
        return frozenset(found)

    def up_to(self, index: int) -> Any:
        """The closed jaxpr that computes this operation's results and nothing else."""
        equations = [self.flat.jaxpr.eqns[earlier] for earlier in self.ancestors(index)]
        kept = [var for var in equations[-1].outvars if not isinstance(var, jex.DropVar)]
        taken = {
            atom
            for equation in equations
            for atom in equation.invars
            if not isinstance(atom, jex.Literal)
        }
        constants = [
            (var, value)
            for var, value in zip(self.flat.jaxpr.constvars, self.flat.consts, strict=True)
            if var in taken
        ]
        return closed_jaxpr(constants, self.flat.jaxpr.invars, kept, equations)

    def operation(self, index: int) -> TracedOperation:
        """What a user is told of it."""
        equation = self.flat.jaxpr.eqns[index]
        return TracedOperation(
            number=index + 1,
            primitive=equation.primitive.name,
            takes=tuple(kind(atom.aval) for atom in equation.invars),
            gives=tuple(kind(atom.aval) for atom in equation.outvars),
            place=self.places[index],
        )


def kind(value: Any) -> str:
    """Dtype and shape in a user's words: `bfloat16[8,512]`."""
    if not hasattr(value, "dtype"):
        return str(value)
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def trace(function: Callable[..., Any], inputs: Sequence[Any]) -> TracedFunction:
    """The operations of a function on these inputs.

    What is no array and no number among the inputs is taken as it is.

    Raises:
        Mistake: JAX cannot trace the function, or it returns nothing.
    """
    leaves, tree = jax.tree.flatten(tuple(inputs))
    try:
        arrays = [jnp.asarray(leaf) if _is_array(leaf) else None for leaf in leaves]
    except (TypeError, ValueError) as trouble:
        raise Mistake(f"an input is no array: {_first_line(trouble)}") from trouble

    inner, options = _before_jit(function)

    def call(*given: Any) -> Any:
        filled = iter(given)
        pairs = zip(leaves, arrays, strict=True)
        arguments = [leaf if array is None else next(filled) for leaf, array in pairs]
        return inner(*jax.tree.unflatten(tree, arguments))

    taken = tuple(array for array in arrays if array is not None)
    try:
        closed, returned = jax.make_jaxpr(call, return_shape=True)(*taken)
    except jax.errors.ConcretizationTypeError as trouble:
        raise Mistake(
            "the function decides by the value of an input, which jit does not know: bind that "
            "input with functools.partial"
        ) from trouble
    except Exception as trouble:  # whatever the user's code raises
        raise Mistake(f"the function cannot be traced: {_first_line(trouble)}") from trouble
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(returned)]
    if not paths:
        raise Mistake("the function returns no array: there is nothing to compare")
    flat, places = flatten(closed)
    return TracedFunction(flat, places, taken, tuple(map(_name, paths)), options)


def flatten(closed: Any) -> tuple[Any, tuple[SourceLine | None, ...]]:
    """A closed jaxpr without calls, and a place for each of its equations."""
    opened = _Opened([], [], [])
    inputs = [jex.Var(var.aval) for var in closed.jaxpr.invars]
    outputs = opened.open(closed.jaxpr, closed.consts, inputs, None)
    flat = closed_jaxpr(opened.constants, inputs, outputs, opened.equations)
    return flat, tuple(opened.places)


def closed_jaxpr(
    constants: Sequence[tuple[Any, Any]], takes: list[Any], gives: list[Any], equations: list[Any]
) -> Any:
    """These equations as one that can be run: with its constants, what it takes and gives."""
    effects = frozenset().union(*(equation.effects for equation in equations))
    unnamed = jex.DebugInfo("jit", "numerics", None, None)
    variables = [var for var, _ in constants]
    jaxpr = jex.Jaxpr(variables, takes, gives, equations, effects, unnamed)
    return jex.ClosedJaxpr(jaxpr, [value for _, value in constants])


@dataclass(frozen=True)
class _Opened:
    """The flat list while calls are being opened into it."""

    equations: list[Any]
    places: list[SourceLine | None]
    constants: list[tuple[Any, Any]]

    def open(self, jaxpr: Any, constants: Sequence[Any], given: list[Any], at: Any) -> list[Any]:
        """Append the equations of a jaxpr that is called with these values; its results.

        Every variable is made anew: a function that is called twice has the same ones both times.
        `at` is the place of the call where the called function is none of the user's.
        """
        known = dict(zip(jaxpr.invars, given, strict=True))
        for var, value in zip(jaxpr.constvars, constants, strict=True):
            known[var] = jex.Var(var.aval)
            self.constants.append((known[var], value))

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jex.Literal) else known[atom]

        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name in _PRINTS:
                continue
            takes = [read(atom) for atom in equation.invars]
            place = at or _place(equation)
            if name in _CALLED and _CALLED[name] in equation.params:
                called = equation.params[_CALLED[name]]
                inner = getattr(called, "jaxpr", called)
                # A function of JAX's own is traced once: its lines are those of the first caller.
                outer = place if at or _is_of_jax(inner) else None
                results = self.open(inner, getattr(called, "consts", ()), takes, outer)
            else:
                results = [_anew(var) for var in equation.outvars]
                self.equations.append(equation.replace(invars=takes, outvars=results))
                self.places.append(place)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def _anew(var: Any) -> Any:
    return jex.DropVar(var.aval) if isinstance(var, jex.DropVar) else jex.Var(var.aval)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def _before_jit(function: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function that is compiled with options of its own, without them, and these.

    JAX lets no function call one that has options of its own, and so cannot trace it inside ours.
    """
    settings = getattr(getattr(function, "_jit_info", None), "compiler_options_kvs", ())
    return (function.__wrapped__, dict(settings)) if settings else (function, {})


def _is_of_jax(jaxpr: Any) -> bool:
    written = getattr(jaxpr.debug_info, "func_filename", None)
    return written is not None and written.startswith(_JAX)


def _place(equation: Any) -> SourceLine | None:
    found = _WHERE.match(source_info_util.summarize(equation.source_info))
    if found is None or found["file"].startswith(_OWN):
        return None
    return SourceLine(found["file"], int(found["line"]))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "output"


def _first_line(trouble: Exception) -> str:
    lines = str(trouble).splitlines()
    return f"{type(trouble).__name__}: {lines[0]}" if lines else type(trouble).__name__
