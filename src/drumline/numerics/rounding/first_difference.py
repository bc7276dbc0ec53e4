"""Find the first operation that differs between two executions of a function, and explain it.

The search compares two executions of programs that end with operation k, bit by bit. It bisects the
ancestors of an output, between an operation that agrees and a later operation that differs, and so
ends at neighbours even if differences appear and disappear. Then it compares the operands, because
the neighbour may be on a different branch. The result is an operation that differs while its
operands agree, both at the end of a program. Shorter programs are fused differently.

The compiler does not report its rewrites. The explanation follows from the operation, the producers
of its operands, and the execution mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from drumline.deprecated import renamed_attribute
from drumline.numerics.rounding.differences import Difference, measure_difference
from drumline.numerics.rounding.execution import ExecutionMode
from drumline.numerics.rounding.tracing import SourceLine, TracedFunction, TracedOperation

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_SUMS = (*MATMULS, "reduce_sum", "cumsum", "cumlogsumexp", "reduce_prod", "cumprod", "scatter-add")
_LOOPS = ("scan", "while", "cond", "shard_map")
_RESHAPES = (
    "broadcast_in_dim",
    "copy",
    "expand_dims",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
)
"""Operations that change only the shape."""
_MEMORY_READS = ("concatenate", "dynamic_slice", "gather", "optimization_barrier", "sort", "top_k")
"""Operations that read their operands from memory, after rounding."""
_APPROXIMATED = (
    "cos",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "logistic",
    "pow",
    "rsqrt",
    "sin",
    "sqrt",
    "tan",
    "tanh",
)


class OperationRunner(Protocol):
    """An execution of a function that can return the results of any operation."""

    def results(self, index: int) -> list[np.ndarray]:
        """Return the results of an operation."""


@dataclass(frozen=True)
class FirstDifference:
    """The first operation that differs, its difference and the reason."""

    operation: TracedOperation
    difference: Difference
    reason: str

    why = renamed_attribute("why", "reason")

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        return {
            "operation": self.operation.to_dict(),
            "difference": self.difference.to_dict(),
            "why": self.reason,
        }


class DifferenceSearch:
    """A search for differences from an execution, whose results are cached."""

    def __init__(self, program: TracedFunction, runner: OperationRunner) -> None:
        """`runner` is the execution to compare with."""
        self._program = program
        self._runner = runner
        self._results: dict[int, list[np.ndarray]] = {}

    def find(self, other: OperationRunner, ends: Sequence[int]) -> tuple[int, Difference] | None:
        """Return the first operation that differs among the ancestors of `ends`.

        Return None if none of `ends` differs at the end of its program.
        """
        differences: dict[int, Difference] = {}
        # Enough comparisons for two searches: the initial search, and those on other branches.
        max_comparisons = 2 * math.ceil(math.log2(len(self._program) + 1)) + 4

        def differs(index: int) -> bool:
            if index not in differences:
                differences[index] = self._measure(other, index)
            return differences[index].differing > 0

        def has_budget() -> bool:
            return len(differences) < max_comparisons

        first = next((end for end in sorted(set(ends)) if has_budget() and differs(end)), None)
        while first is not None:
            first = self._bisect(first, differs)
            operands = (operand for operand in self._program.operands(first) if has_budget())
            branch = next((operand for operand in operands if differs(operand)), None)
            if branch is None:
                return first, differences[first]
            first = branch
        return None

    def _bisect(self, end: int, differs: Callable[[int], bool]) -> int:
        # A mask between layers always agrees and would send the search to its branch.
        ancestors = self._program.ancestors(end)[:-1]
        path = [*(index for index in ancestors if index in self._program.float_dependent), end]
        agreeing, differing = -1, len(path) - 1
        while differing - agreeing > 1:
            middle = (agreeing + differing) // 2
            if differs(path[middle]):
                differing = middle
            else:
                agreeing = middle
        return path[differing]

    def _measure(self, other: OperationRunner, index: int) -> Difference:
        """Return the maximum difference of an operation's results."""
        if index not in self._results:
            self._results[index] = self._runner.results(index)
        pairs = zip(self._results[index], other.results(index), strict=True)
        differences = [measure_difference(a, b) for a, b in pairs]
        return max(
            differences,
            key=lambda d: (d.differing > 0, d.ulps or d.largest),
            default=Difference(0, 0, 0.0, None),
        )


def explain(program: TracedFunction, index: int, mode: ExecutionMode, is_excess: bool) -> str:
    """Return the likely reason for an operation's difference, as a clause.

    `is_excess` is True if the operation agrees without excess precision.
    """
    name = _primitive(program, index)
    if mode is ExecutionMode.HIGHEST:
        return _explain_precision(name)
    if mode is ExecutionMode.NO_EXCESS or is_excess:
        return _explain_excess(program, index, name)
    return _explain_fusion(program, index, name)


def _explain_precision(name: str) -> str:
    if name in MATMULS:
        return (
            "a matmul at default precision: its float32 operands are rounded before they are "
            "multiplied"
        )
    if name in _LOOPS:
        return "a matmul inside it runs at default precision"
    return "compiled with matmuls of another precision, it is fused differently"


def _explain_excess(program: TracedFunction, index: int, name: str) -> str:
    roundings = _operand_roundings(program, index)
    if roundings:
        dtype = roundings[0][0]
        lines = sorted({str(source) for _, source in roundings if source is not None})
        rounding = f"the rounding at {' or '.join(lines)}" if lines else "its rounding"
        return (
            f"its {dtype} operand was kept in float32 by the compiler (excess precision): "
            f"{rounding} never happened"
        )
    if name in _LOOPS:
        return "inside it, values were kept in float32 by the compiler (excess precision)"
    return "the compiler computed it in float32 throughout (excess precision)"


def _operand_roundings(program: TracedFunction, index: int) -> list[tuple[str, SourceLine | None]]:
    """Return the dtype and source of the operands that an operation rounds to 16 bits or fewer.

    Operands in memory, from a gather or a sort, are returned only without others.
    """
    roundings = []
    for atom in program.equations[index].invars:
        dtype = getattr(atom.aval, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 2:
            continue
        producer = _skip_reshapes(program, program.producer(atom))
        if producer is not None:
            roundings.append((producer, str(dtype)))
    computed = [pair for pair in roundings if _primitive(program, pair[0]) not in _MEMORY_READS]
    return [(dtype, program.sources[producer]) for producer, dtype in computed or roundings]


def _skip_reshapes(program: TracedFunction, producer: int | None) -> int | None:
    """Return the operation before any reshapes."""
    while producer is not None and _primitive(program, producer) in _RESHAPES:
        producer = program.producer(program.equations[producer].invars[0])
    return producer


def _explain_fusion(program: TracedFunction, index: int, name: str) -> str:
    if name in _SUMS:
        return "a sum in another order: fused with its neighbours, it adds in other groups"
    producers = (_skip_reshapes(program, operand) for operand in program.operands(index))
    multiplications = [p for p in producers if p is not None and _primitive(program, p) == "mul"]
    if name in ("add", "sub", "add_any") and multiplications:
        source = program.sources[multiplications[0]]
        return (
            f"fused with the multiplication at {source or 'another line'}: a multiply and an add "
            "became one rounding"
        )
    if name in _APPROXIMATED:
        return f"fused with its neighbours: the multiplies and adds of {name} round differently"
    if name in _LOOPS:
        return "operations inside it are fused differently than in the whole program"
    return "the compiler rewrote it together with its neighbours"


def _primitive(program: TracedFunction, index: int) -> str:
    return str(program.equations[index].primitive.name)
