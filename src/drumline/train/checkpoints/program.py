"""What a traced function computes, told so that two of them can be compared across processes.

A program is its equations, from which names, source lines and addresses are left out, and the
numbers that stand in it: a learning rate, a decay, the length of a schedule. Two optimizers that
differ in a number alone have the same equations, and the numbers say in which.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

MOST_NUMBERS = 5000
"""Beyond this the numbers count as part of the equations: a list of them helps nobody."""
_NAMES = ("name", "debug_info")
"""Parameters of equations that are for people to read."""


@dataclass(frozen=True)
class TracedProgram:
    """What a function computes, for given shapes."""

    equations: str
    """Sixteen letters that stand for them."""
    numbers: tuple[float, ...]
    """Those that are written in it, in order."""


def program(traced: ClosedJaxpr) -> TracedProgram:
    """The program of a traced function."""
    walk = _Walk()
    for const in traced.consts:
        walk.constant(const)
    walk.through(traced.jaxpr)
    if len(walk.numbers) > MOST_NUMBERS:
        walk.word(*walk.numbers)
        walk.numbers.clear()
    return TracedProgram(walk.equations.hexdigest()[:16], tuple(walk.numbers))


@dataclass
class _Walk:
    equations: Any = field(default_factory=hashlib.sha256)
    numbers: list[float] = field(default_factory=list)

    def word(self, *words: object) -> None:
        self.equations.update(repr(words).encode())

    def through(self, jaxpr: Jaxpr) -> None:
        number_of: dict[Any, int] = {}

        def atoms(found: Any) -> Iterator[object]:
            for atom in found:
                if isinstance(atom, Literal):
                    self.constant(atom.val)
                    yield "literal"
                else:
                    yield number_of.setdefault(atom, len(number_of)), _type_of(atom)

        self.word("takes", *atoms([*jaxpr.constvars, *jaxpr.invars]))
        for equation in jaxpr.eqns:
            self.word(equation.primitive.name, *atoms(equation.invars))
            for name in sorted(equation.params):
                if name not in _NAMES:
                    self.parameter(name, equation.params[name])
            self.word(*atoms(equation.outvars))
        self.word("gives", *atoms(jaxpr.outvars))

    def parameter(self, name: str, value: Any) -> None:
        if isinstance(value, ClosedJaxpr):
            for const in value.consts:
                self.constant(const)
            self.through(value.jaxpr)
        elif isinstance(value, Jaxpr):
            self.through(value)
        elif isinstance(value, tuple | list):
            self.word(name, len(value))
            for item in value:
                self.parameter(name, item)
        elif isinstance(value, np.ndarray):
            self.constant(value)
        elif value is None or isinstance(value, bool | int | float | str | np.dtype | Enum):
            self.word(name, str(value))
        else:
            # Functions, meshes, shardings: their text has addresses in it.
            self.word(name, type(value).__name__)

    def constant(self, value: Any) -> None:
        if not getattr(value, "is_fully_addressable", True):
            self.word("constant", value.shape, str(value.dtype))
            return
        array = np.asarray(value)
        self.word("constant", array.shape, str(array.dtype))
        if array.ndim == 0 and array.dtype.kind in "iufb":
            self.numbers.append(float(array))
        elif array.dtype.kind != "O":
            self.equations.update(np.ascontiguousarray(array).tobytes())


def _type_of(atom: Any) -> tuple[object, str]:
    aval = atom.aval
    return getattr(aval, "shape", None), str(getattr(aval, "dtype", ""))
