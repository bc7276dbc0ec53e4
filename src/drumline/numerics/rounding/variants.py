"""The same function run in several ways, each of which rounds elsewhere.

The first is the function as `jax.jit` compiles it. The others take one liberty of the compiler's
away: to keep bfloat16 values in float32, to round the operands of a matrix product, to fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from drumline.numerics.rounding.last_places import as_numpy
from drumline.numerics.rounding.operations import TracedFunction, trace

EXCESS_PRECISION = "xla_allow_excess_precision"


class Way(Enum):
    """How a function is run; the text is what a user reads."""

    AS_COMPILED = "as compiled"
    NO_EXCESS = "no excess precision"
    HIGHEST = "highest matmul precision"
    OP_BY_OP = "op by op"


@dataclass(frozen=True)
class Variant:
    """A way to run a function: its outputs, and the results of any of its operations."""

    way: Way
    program: TracedFunction

    def outputs(self) -> list[np.ndarray]:
        """What the function returns, leaf by leaf."""
        return self._run(self.program.flat)

    def results(self, index: int) -> list[np.ndarray]:
        """The results of one operation, from a program that ends with it."""
        return self._run(self.program.up_to(index))

    def _run(self, closed: Any) -> list[np.ndarray]:
        function = jex.jaxpr_as_fun(closed)
        if self.way is not Way.OP_BY_OP:
            options = dict(self.program.compiler_options)
            if self.way is Way.NO_EXCESS:
                options[EXCESS_PRECISION] = False
            function = jax.jit(function, compiler_options=options or None)
        # Without `jit` each equation is compiled and run alone.
        return [as_numpy(value) for value in function(*self.program.inputs)]


def variants(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Variant]:
    """Every way to run a function on these inputs, the way it is compiled first."""
    program = trace(function, inputs)
    # A product asks for its precision when it is traced, so it has to be traced again.
    with jax.default_matmul_precision("highest"):
        highest = trace(function, inputs)
    return [
        Variant(way, highest if way is Way.HIGHEST else program)
        for way in Way
        if way is not Way.HIGHEST or _alike(program, highest)
    ]


def _alike(program: TracedFunction, other: TracedFunction) -> bool:
    """Whether two traces have the same operations, so that one can be set beside the other."""
    names = [[e.primitive.name for e in p.flat.jaxpr.eqns] for p in (program, other)]
    return names[0] == names[1]
