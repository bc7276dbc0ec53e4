"""What a function's outputs owe to the compiler's freedom in rounding.

    report = precision(sample, logits)
    print(report.verdict)

The function is run as compiled, and in other ways that take one liberty of the compiler's away; a
reference in float64 says which is closer to the truth. For each way that changes an output, the
first operation where it parts is searched for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from drumline.numerics.mistakes import Mistake
from drumline.numerics.rounding.decisions import Flips, flips
from drumline.numerics.rounding.last_places import Difference, difference, differs, is_float
from drumline.numerics.rounding.operations import kind
from drumline.numerics.rounding.parting import Parting, PartingSearch
from drumline.numerics.rounding.reasons import why
from drumline.numerics.rounding.variants import Variant, Way, variants
from drumline.numerics.rounding.widened import NotWidened, reference

SET = {
    Way.NO_EXCESS: "jax.jit(f, compiler_options={'xla_allow_excess_precision': False})",
    Way.HIGHEST: "with jax.default_matmul_precision('highest'): ...",
}
"""What to write to have a function run in this way."""


@dataclass(frozen=True)
class OutputReport:
    """One output of the function, run in one way."""

    name: str
    kind: str
    change: Difference
    """From the output as compiled."""
    error: Difference | None
    """Against the reference, where there is one."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "change": self.change.to_dict(),
            "error": self.error.to_dict() if self.error else None,
        }


@dataclass(frozen=True)
class VariantReport:
    """What the function returns when it is run in one way."""

    way: Way
    outputs: tuple[OutputReport, ...]
    first: Parting | None = None
    """Where it parts from the function as compiled; none where it does not, or only as a whole."""
    flips: tuple[Flips, ...] = ()
    same_as: Way | None = None
    """Another way before this one that gives the same bits, although not those as compiled."""

    @property
    def changes(self) -> int:
        """How many elements differ from those as compiled."""
        return sum(output.change.differing for output in self.outputs)

    @property
    def elements(self) -> int:
        """How many elements the outputs have."""
        return sum(output.change.elements for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "variant": self.way.value,
            "changes": self.changes,
            "same_as": self.same_as.value if self.same_as else None,
            "outputs": [output.to_dict() for output in self.outputs],
            "first_operation": self.first.to_dict() if self.first else None,
            "flips": [counted.to_dict() for counted in self.flips],
        }


@dataclass(frozen=True)
class PrecisionReport:
    """A function run in every way."""

    device: str
    operations: int
    """How many the function has, once its calls are opened."""
    as_compiled: VariantReport
    variants: tuple[VariantReport, ...]
    left_out: tuple[str, ...]
    """What could not be run, each with its reason."""

    @property
    def changes(self) -> bool:
        """Whether any way changes any output."""
        return any(variant.changes for variant in self.variants)

    @property
    def verdict(self) -> str:
        """What to set, in words."""
        if not self.changes:
            ways = ", ".join(variant.way.value for variant in self.variants)
            return f"nothing changes on this device ({self.device}): {ways} give the same bits"
        told = [variant for variant in self.variants if variant.changes and not variant.same_as]
        return "\n".join(map(_advice, told))

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "device": self.device,
            "operations": self.operations,
            "changes": self.changes,
            "as_compiled": self.as_compiled.to_dict(),
            "variants": [variant.to_dict() for variant in self.variants],
            "left_out": list(self.left_out),
            "verdict": self.verdict,
        }


def precision(
    function: Callable[..., Any], *inputs: Any, argmax: bool = False, output: str | None = None
) -> PrecisionReport:
    """Run a function in every way, and find out where they part.

    Args:
        function: any function that JAX can trace, compiled or not.
        inputs: its arguments.
        argmax: count the decisions over the last axis that come out otherwise.
        output: the output to take the argmax of; without it, every float output.

    Raises:
        Mistake: the function cannot be traced or run, or has no such output.
    """
    compiled, *others = variants(function, inputs)
    names = compiled.program.names
    try:
        ours = compiled.outputs()
    except jax.errors.JaxRuntimeError as trouble:
        raise Mistake(f"the function cannot be run: {str(trouble).splitlines()[0]}") from trouble
    decided = _decided(names, ours, output) if argmax or output else []
    left_out = []
    if not any(variant.way is Way.HIGHEST for variant in others):
        left_out.append(f"{Way.HIGHEST.value}: the function takes other operations then")
    exact: list[np.ndarray] | None = None
    try:
        exact = reference(compiled.program)
    except NotWidened as trouble:
        left_out.append(f"the reference in float64: {trouble}")
    comparison = _Comparison(PartingSearch(compiled.program, compiled), tuple(others), ours, exact)
    return PrecisionReport(
        device=jax.devices()[0].device_kind,
        operations=len(compiled.program),
        as_compiled=VariantReport(compiled.way, _outputs(names, ours, ours, exact)),
        variants=tuple(comparison.reports(decided)),
        left_out=tuple(left_out),
    )


@dataclass(frozen=True)
class _Comparison:
    """The ways to run a function, and what they are compared with."""

    search: PartingSearch
    others: tuple[Variant, ...]
    ours: list[np.ndarray]
    """The outputs as compiled."""
    exact: list[np.ndarray] | None
    """The outputs of the reference."""

    def reports(self, decided: list[int]) -> list[VariantReport]:
        """What each of the ways changes; `decided` are the outputs whose argmax is taken."""
        reports: list[VariantReport] = []
        seen: list[list[np.ndarray]] = []
        for variant in self.others:
            names, theirs = variant.program.names, variant.outputs()
            outputs = _outputs(names, self.ours, theirs, self.exact)
            changed = [number for number, output in enumerate(outputs) if output.change.differing]
            twin = None
            if changed:
                pairs = zip(reports, seen, strict=True)
                twin = next((report for report, other in pairs if _same(other, theirs)), None)
            seen.append(theirs)
            reports.append(
                VariantReport(
                    variant.way,
                    outputs,
                    twin.first if twin else self._first(variant, changed),
                    tuple(flips(names[i], self.ours[i], theirs[i]) for i in decided),
                    twin.way if twin else None,
                )
            )
        return reports

    def _first(self, variant: Variant, changed: list[int]) -> Parting | None:
        program = variant.program
        made = [program.maker(program.flat.jaxpr.outvars[number]) for number in changed]
        found = self.search.first(variant, [maker for maker in made if maker is not None])
        if found is None:
            return None
        index, apart = found
        reason = why(program, index, variant.way, self._is_excess(variant, index))
        return Parting(program.operation(index), apart, reason)

    def _is_excess(self, variant: Variant, index: int) -> bool:
        """Whether, without excess precision, the compiler's result is the one op by op."""
        if variant.way is not Way.OP_BY_OP:
            return False
        strict = next(other for other in self.others if other.way is Way.NO_EXCESS)
        return _same(strict.results(index), variant.results(index))


def _same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return not any(differs(*pair).any() for pair in zip(ours, theirs, strict=True))


def _outputs(
    names: tuple[str, ...],
    ours: list[np.ndarray],
    theirs: list[np.ndarray],
    exact: list[np.ndarray] | None,
) -> tuple[OutputReport, ...]:
    truths = exact if exact is not None else [None] * len(names)
    return tuple(
        OutputReport(
            name,
            kind(their),
            difference(our, their),
            None if truth is None else difference(their, truth),
        )
        for name, our, their, truth in zip(names, ours, theirs, truths, strict=True)
    )


def _decided(names: tuple[str, ...], ours: list[np.ndarray], output: str | None) -> list[int]:
    """The outputs whose argmax is taken."""
    able = [
        number
        for number, array in enumerate(ours)
        if is_float(array) and array.dtype.kind != "c" and array.ndim and array.size
    ]
    if output is None:
        if not able:
            raise Mistake("there is no array of floats among the outputs to take the argmax of")
        return able
    if output not in names:
        raise Mistake(f"there is no output {output}; there is {', '.join(names)}")
    number = names.index(output)
    if number not in able:
        raise Mistake(f"the output {output} is {kind(ours[number])}: argmax takes rows of floats")
    return [number]


def _advice(variant: VariantReport) -> str:
    counted = f"{variant.changes:,} of {variant.elements:,} elements"
    if variant.way is Way.NO_EXCESS:
        return (
            f"excess precision changes {counted}; to have every rounding happen, write "
            f"{SET[variant.way]}"
        )
    if variant.way is Way.HIGHEST:
        return (
            f"matmul precision changes {counted}; to multiply with every bit, write "
            f"{SET[variant.way]}"
        )
    units = max((output.change.units or 0.0 for output in variant.outputs), default=0.0)
    return (
        f"compiled together or op by op, {counted} differ by up to {units:.3g} units of the last "
        "place: no setting gives both the same bits, so compare with a tolerance"
    )
