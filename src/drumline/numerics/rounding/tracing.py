"""Trace a function into a flat list of operations with their source lines.

JAX traces a function into equations. Calls (a nested `jit`, a custom derivative, a checkpoint) are
inlined, so that a program can end after any operation. Loops and branches (`scan`, `while`, `cond`)
are single operations. Prints are removed, because every run would repeat them.
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

from drumline.deprecated import renamed_attribute
from drumline.errors import UserError

_CALLS = {
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
"""The primitives for calls, and the parameter with the called jaxpr."""
_PRINTS = ("debug_callback", "debug_print")
_SOURCE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(:\d+)? \(")
_JAX_FOLDER = str(Path(jax.__file__).parent)
_OWN_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        """Return `file:line`, relative to the current folder if possible."""
        path = Path(self.file)
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{path}:{self.line}"


@dataclass(frozen=True)
class TracedOperation:
    """A description of an operation."""

    number: int
    """The number of the operation, starting at 1."""
    primitive: str
    inputs: tuple[str, ...]
    """The types of the inputs, such as `bfloat16[8,512]`."""
    outputs: tuple[str, ...]
    source: SourceLine | None
    """The line of the user's code, or None if unknown."""

    takes = renamed_attribute("takes", "inputs")
    gives = renamed_attribute("gives", "outputs")
    place = renamed_attribute("place", "source")

    def to_dict(self) -> dict[str, Any]:
        """Return the operation as JSON values."""
        return {
            "number": self.number,
            "primitive": self.primitive,
            "takes": list(self.inputs),
            "gives": list(self.outputs),
            "file": self.source.file if self.source else None,
            "line": self.source.line if self.source else None,
        }


@dataclass(frozen=True)
class TracedFunction:
    """The operations of a function, with its inputs and the names of its outputs."""

    closed_jaxpr: Any
    """The closed jaxpr without calls."""
    sources: tuple[SourceLine | None, ...]
    """The source lines of the operations."""
    inputs: tuple[Any, ...]
    output_names: tuple[str, ...]
    """The paths of the outputs in the result of the function."""
    compiler_options: dict[str, Any]
    """The options of the user's `jit`."""

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self.equations)

    @property
    def equations(self) -> list[Any]:
        """The equations of the jaxpr, in order."""
        equations: list[Any] = self.closed_jaxpr.jaxpr.eqns
        return equations

    @cached_property
    def _producers(self) -> dict[Any, int]:
        equations = enumerate(self.equations)
        return {var: index for index, equation in equations for var in equation.outvars}

    def producer(self, atom: Any) -> int | None:
        """Return the index of the operation that computes a value; None for inputs and
        constants."""
        return None if isinstance(atom, jex.Literal) else self._producers.get(atom)

    def operands(self, index: int) -> list[int]:
        """Return the operations that compute the inputs of an operation."""
        producers = (self.producer(atom) for atom in self.equations[index].invars)
        return sorted({producer for producer in producers if producer is not None})

    def ancestors(self, index: int) -> list[int]:
        """Return an operation and its dependencies, in order."""
        required = {index}
        for candidate in range(index, -1, -1):
            if candidate in required:
                required.update(self.operands(candidate))
        return sorted(required)

    @cached_property
    def float_dependent(self) -> frozenset[int]:
        """The operations that depend on a float input or constant, unlike a mask or an index."""
        jaxpr = self.closed_jaxpr.jaxpr
        floats = {
            var
            for var in (*jaxpr.invars, *jaxpr.constvars)
            if jnp.issubdtype(var.aval.dtype, jnp.inexact)
        }
        dependent = set()
        for index, equation in enumerate(jaxpr.eqns):
            variables = (atom for atom in equation.invars if not isinstance(atom, jex.Literal))
            if any(atom in floats for atom in variables):
                dependent.add(index)
                floats.update(equation.outvars)
        return frozenset(dependent)

    def program_until(self, index: int) -> Any:
        """Return a closed jaxpr that computes only the results of an operation."""
        equations = [self.equations[ancestor] for ancestor in self.ancestors(index)]
        outputs = [var for var in equations[-1].outvars if not isinstance(var, jex.DropVar)]
        variables = {
            atom
            for equation in equations
            for atom in equation.invars
            if not isinstance(atom, jex.Literal)
        }
        constants = [
            (var, value)
            for var, value in zip(
                self.closed_jaxpr.jaxpr.constvars, self.closed_jaxpr.consts, strict=True
            )
            if var in variables
        ]
        return make_closed_jaxpr(constants, self.closed_jaxpr.jaxpr.invars, outputs, equations)

    def operation(self, index: int) -> TracedOperation:
        """Return the description of an operation."""
        equation = self.equations[index]
        return TracedOperation(
            number=index + 1,
            primitive=equation.primitive.name,
            inputs=tuple(type_name(atom.aval) for atom in equation.invars),
            outputs=tuple(type_name(atom.aval) for atom in equation.outvars),
            source=self.sources[index],
        )


def type_name(value: Any) -> str:
    """Return the dtype and shape of a value, such as `bfloat16[8,512]`."""
    if not hasattr(value, "dtype"):
        return str(value)
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def trace(function: Callable[..., Any], inputs: Sequence[Any]) -> TracedFunction:
    """Trace a function with these inputs.

    Inputs that are neither arrays nor numbers are passed unchanged.

    Raises:
        UserError: JAX cannot trace the function, or it returns nothing.
    """
    leaves, tree = jax.tree.flatten(tuple(inputs))
    try:
        arrays = [jnp.asarray(leaf) if _is_array(leaf) else None for leaf in leaves]
    except (TypeError, ValueError) as error:
        raise UserError(f"an input is not an array: {_first_line(error)}") from error

    inner, options = _without_jit(function)

    def call(*traced: Any) -> Any:
        remaining = iter(traced)
        pairs = zip(leaves, arrays, strict=True)
        arguments = [leaf if array is None else next(remaining) for leaf, array in pairs]
        return inner(*jax.tree.unflatten(tree, arguments))

    array_inputs = tuple(array for array in arrays if array is not None)
    try:
        closed_jaxpr, output_shapes = jax.make_jaxpr(call, return_shape=True)(*array_inputs)
    except jax.errors.ConcretizationTypeError as error:
        raise UserError(
            "the function decides by the value of an input, which jit does not know: bind that "
            "input with functools.partial"
        ) from error
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"the function cannot be traced: {_first_line(error)}") from error
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(output_shapes)]
    if not paths:
        raise UserError("the function returns no array: there is nothing to compare")
    inlined, sources = inline_calls(closed_jaxpr)
    return TracedFunction(inlined, sources, array_inputs, tuple(map(_path_name, paths)), options)


def inline_calls(closed_jaxpr: Any) -> tuple[Any, tuple[SourceLine | None, ...]]:
    """Return a closed jaxpr without calls, and the source lines of its equations."""
    inliner = _Inliner([], [], [])
    inputs = [jex.Var(var.aval) for var in closed_jaxpr.jaxpr.invars]
    outputs = inliner.inline(closed_jaxpr.jaxpr, closed_jaxpr.consts, inputs, None)
    inlined = make_closed_jaxpr(inliner.constants, inputs, outputs, inliner.equations)
    return inlined, tuple(inliner.sources)


def make_closed_jaxpr(
    constants: Sequence[tuple[Any, Any]],
    inputs: list[Any],
    outputs: list[Any],
    equations: list[Any],
) -> Any:
    """Return a closed jaxpr of these equations, with constants as pairs of variable and value."""
    effects = frozenset().union(*(equation.effects for equation in equations))
    debug_info = jex.DebugInfo("jit", "numerics", None, None)
    variables = [var for var, _ in constants]
    jaxpr = jex.Jaxpr(variables, inputs, outputs, equations, effects, debug_info)
    return jex.ClosedJaxpr(jaxpr, [value for _, value in constants])


@dataclass(frozen=True)
class _Inliner:
    """A flat list of equations under construction."""

    equations: list[Any]
    sources: list[SourceLine | None]
    constants: list[tuple[Any, Any]]

    def inline(
        self, jaxpr: Any, constants: Sequence[Any], inputs: list[Any], call_source: Any
    ) -> list[Any]:
        """Append the equations of a called jaxpr and return its outputs.

        All variables are new, because calls of the same function share variables. `call_source` is
        the line of the call if the called function is not the user's.
        """
        variables = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, constants, strict=True):
            variables[var] = jex.Var(var.aval)
            self.constants.append((variables[var], value))

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jex.Literal) else variables[atom]

        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name in _PRINTS:
                continue
            operands = [read(atom) for atom in equation.invars]
            source = call_source or _source_line(equation)
            if name in _CALLS and _CALLS[name] in equation.params:
                called = equation.params[_CALLS[name]]
                inner = getattr(called, "jaxpr", called)
                # JAX traces library functions once, with the lines of the first caller.
                inner_source = source if call_source or _is_jax_function(inner) else None
                inner_constants = getattr(called, "consts", ())
                results = self.inline(inner, inner_constants, operands, inner_source)
            else:
                results = [_new_variable(var) for var in equation.outvars]
                self.equations.append(equation.replace(invars=operands, outvars=results))
                self.sources.append(source)
            variables.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def _new_variable(var: Any) -> Any:
    return jex.DropVar(var.aval) if isinstance(var, jex.DropVar) else jex.Var(var.aval)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def _without_jit(function: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Split a function that is compiled with options, because JAX cannot trace it inside another.

    Return the function and its options.
    """
    options = getattr(getattr(function, "_jit_info", None), "compiler_options_kvs", ())
    return (function.__wrapped__, dict(options)) if options else (function, {})


def _is_jax_function(jaxpr: Any) -> bool:
    file = getattr(jaxpr.debug_info, "func_filename", None)
    return file is not None and file.startswith(_JAX_FOLDER)


def _source_line(equation: Any) -> SourceLine | None:
    match = _SOURCE.match(source_info_util.summarize(equation.source_info))
    if match is None or match["file"].startswith(_OWN_FOLDER):
        return None
    return SourceLine(match["file"], int(match["line"]))


def _path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "output"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
