"""Measure the effect of the compiler's freedom in rounding on a function's outputs.

    report = precision(sample, logits)
    print(report.verdict)

The function runs as compiled, and in modes that restrict the compiler. A float64 reference shows
which result is closer. If a mode changes an output, a search finds the first operation that
differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from drumline.deprecated import renamed_attribute
from drumline.errors import UserError
from drumline.numerics.rounding.differences import (
    ArgmaxFlips,
    Difference,
    count_flips,
    differing_elements,
    is_inexact,
    measure_difference,
)
from drumline.numerics.rounding.execution import (
    ExecutionMode,
    Float64Unavailable,
    ProgramInMode,
    all_executions,
    run_in_float64,
)
from drumline.numerics.rounding.first_difference import DifferenceSearch, FirstDifference, explain
from drumline.numerics.rounding.tracing import type_name

SETTINGS = {
    ExecutionMode.NO_EXCESS: "jax.jit(f, compiler_options={'xla_allow_excess_precision': False})",
    ExecutionMode.HIGHEST: "with jax.default_matmul_precision('highest'): ...",
}
"""The Python code that selects each mode."""


@dataclass(frozen=True)
class OutputReport:
    """An output of the function in a mode."""

    name: str
    kind: str
    """The dtype and shape."""
    change: Difference
    """The difference from the output as compiled."""
    error: Difference | None
    """The difference from the reference, if available."""

    def to_dict(self) -> dict[str, Any]:
        """Return the output as JSON values."""
        return {
            "name": self.name,
            "kind": self.kind,
            "change": self.change.to_dict(),
            "error": self.error.to_dict() if self.error else None,
        }


@dataclass(frozen=True)
class VariantReport:
    """The outputs of the function in a mode."""

    mode: ExecutionMode
    outputs: tuple[OutputReport, ...]
    first: FirstDifference | None = None
    """The first operation that differs from the function as compiled. None without differences, or
    if only the whole function differs."""
    flips: tuple[ArgmaxFlips, ...] = ()
    same_as: ExecutionMode | None = None
    """An earlier mode with the same bits, if these differ from the function as compiled."""

    way = renamed_attribute("way", "mode")

    @property
    def changes(self) -> int:
        """The number of elements that differ from the function as compiled."""
        return sum(output.change.differing for output in self.outputs)

    @property
    def elements(self) -> int:
        """The number of elements of all outputs."""
        return sum(output.change.elements for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Return the outputs as JSON values."""
        return {
            "variant": self.mode.value,
            "changes": self.changes,
            "same_as": self.same_as.value if self.same_as else None,
            "outputs": [output.to_dict() for output in self.outputs],
            "first_operation": self.first.to_dict() if self.first else None,
            "flips": [flips.to_dict() for flips in self.flips],
        }


@dataclass(frozen=True)
class PrecisionReport:
    """The outputs of a function in all modes."""

    device: str
    operations: int
    """The number of operations after calls are inlined."""
    as_compiled: VariantReport
    variants: tuple[VariantReport, ...]
    left_out: tuple[str, ...]
    """The modes and references that could not run, with the reason."""

    @property
    def changes(self) -> bool:
        """True if any mode changes an output."""
        return any(variant.changes for variant in self.variants)

    @property
    def verdict(self) -> str:
        """Sentences about the result and the settings to use."""
        if not self.changes:
            modes = ", ".join(variant.mode.value for variant in self.variants)
            return f"nothing changes on this device ({self.device}): {modes} give the same bits"
        distinct = [variant for variant in self.variants if variant.changes and not variant.same_as]
        return "\n".join(map(_advice, distinct))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
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
    """Run a function in all modes and find the first operations that differ.

    Args:
        function: A function that JAX can trace, compiled or not.
        inputs: Its arguments.
        argmax: True to count changes of the argmax over the last axis.
        output: The output to take the argmax of, by default all float outputs.

    Raises:
        UserError: The function cannot be traced or run, or has no such output.
    """
    compiled, *others = all_executions(function, inputs)
    names = compiled.program.output_names
    try:
        compiled_outputs = compiled.outputs()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the function cannot be run: {str(error).splitlines()[0]}") from error
    argmax_outputs = _argmax_outputs(names, compiled_outputs, output) if argmax or output else []
    left_out = []
    if not any(execution.mode is ExecutionMode.HIGHEST for execution in others):
        left_out.append(f"{ExecutionMode.HIGHEST.value}: it changes the function's operations")
    reference: list[np.ndarray] | None = None
    try:
        reference = run_in_float64(compiled.program)
    except Float64Unavailable as error:
        left_out.append(f"the reference in float64: {error}")
    comparison = _Comparison(
        DifferenceSearch(compiled.program, compiled), tuple(others), compiled_outputs, reference
    )
    return PrecisionReport(
        device=jax.devices()[0].device_kind,
        operations=len(compiled.program),
        as_compiled=VariantReport(
            compiled.mode, _report_outputs(names, compiled_outputs, compiled_outputs, reference)
        ),
        variants=tuple(comparison.reports(argmax_outputs)),
        left_out=tuple(left_out),
    )


@dataclass(frozen=True)
class _Comparison:
    """The executions of a function and the results to compare them with."""

    search: DifferenceSearch
    executions: tuple[ProgramInMode, ...]
    compiled_outputs: list[np.ndarray]
    reference: list[np.ndarray] | None

    def reports(self, argmax_outputs: list[int]) -> list[VariantReport]:
        """Return a report for each execution, with the flips of these outputs."""
        reports: list[VariantReport] = []
        earlier_outputs: list[list[np.ndarray]] = []
        for execution in self.executions:
            names, outputs = execution.program.output_names, execution.outputs()
            output_reports = _report_outputs(names, self.compiled_outputs, outputs, self.reference)
            changed_outputs = [
                i for i, report in enumerate(output_reports) if report.change.differing
            ]
            twin = None
            if changed_outputs:
                pairs = zip(reports, earlier_outputs, strict=True)
                twin = next((report for report, other in pairs if _equal(other, outputs)), None)
            earlier_outputs.append(outputs)
            flips = tuple(
                count_flips(names[i], self.compiled_outputs[i], outputs[i]) for i in argmax_outputs
            )
            reports.append(
                VariantReport(
                    execution.mode,
                    output_reports,
                    twin.first if twin else self._find_first(execution, changed_outputs),
                    flips,
                    twin.mode if twin else None,
                )
            )
        return reports

    def _find_first(
        self, execution: ProgramInMode, changed_outputs: list[int]
    ) -> FirstDifference | None:
        program = execution.program
        producers = [
            program.producer(program.closed_jaxpr.jaxpr.outvars[i]) for i in changed_outputs
        ]
        first = self.search.find(execution, [index for index in producers if index is not None])
        if first is None:
            return None
        index, difference = first
        is_excess = self._agrees_without_excess(execution, index)
        reason = explain(program, index, execution.mode, is_excess)
        return FirstDifference(program.operation(index), difference, reason)

    def _agrees_without_excess(self, execution: ProgramInMode, index: int) -> bool:
        """Return True if compiling without excess precision gives the result of op by op."""
        if execution.mode is not ExecutionMode.OP_BY_OP:
            return False
        no_excess = next(e for e in self.executions if e.mode is ExecutionMode.NO_EXCESS)
        return _equal(no_excess.results(index), execution.results(index))


def _equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return not any(differing_elements(*pair).any() for pair in zip(a, b, strict=True))


def _report_outputs(
    names: tuple[str, ...],
    compiled_outputs: list[np.ndarray],
    outputs: list[np.ndarray],
    reference: list[np.ndarray] | None,
) -> tuple[OutputReport, ...]:
    references = reference if reference is not None else [None] * len(names)
    return tuple(
        OutputReport(
            name,
            type_name(output),
            measure_difference(compiled, output),
            None if expected is None else measure_difference(output, expected),
        )
        for name, compiled, output, expected in zip(
            names, compiled_outputs, outputs, references, strict=True
        )
    )


def _argmax_outputs(
    names: tuple[str, ...], outputs: list[np.ndarray], output: str | None
) -> list[int]:
    """Return the indices of the outputs to take the argmax of."""
    eligible = [
        index
        for index, array in enumerate(outputs)
        if is_inexact(array) and array.dtype.kind != "c" and array.ndim and array.size
    ]
    if output is None:
        if not eligible:
            raise UserError("there is no array of floats among the outputs to take the argmax of")
        return eligible
    if output not in names:
        raise UserError(f"there is no output {output}; there is {', '.join(names)}")
    index = names.index(output)
    if index not in eligible:
        raise UserError(
            f"the output {output} is {type_name(outputs[index])}: argmax takes rows of floats"
        )
    return [index]


def _advice(variant: VariantReport) -> str:
    counts = f"{variant.changes:,} of {variant.elements:,} elements"
    if variant.mode is ExecutionMode.NO_EXCESS:
        return (
            f"excess precision changes {counts}; to have every rounding happen, write "
            f"{SETTINGS[variant.mode]}"
        )
    if variant.mode is ExecutionMode.HIGHEST:
        return (
            f"matmul precision changes {counts}; to multiply with every bit, write "
            f"{SETTINGS[variant.mode]}"
        )
    ulps = max((output.change.ulps or 0.0 for output in variant.outputs), default=0.0)
    return (
        f"compiled together or op by op, {counts} differ by up to {ulps:.3g} units of the last "
        "place: no setting gives both the same bits, so compare with a tolerance"
    )
