"""`drumline numerics precision`: what a function's outputs owe to the compiler's rounding."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.options import AsJson, InputsName, TargetName, need_jax, prints_aside
from drumline.cli.rendering.table import print_table
from drumline.cli.rendering.text import harmless

if TYPE_CHECKING:
    from drumline.numerics.rounding.decisions import Flips, Margin
    from drumline.numerics.rounding.last_places import Difference
    from drumline.numerics.rounding.precision import OutputReport, PrecisionReport, VariantReport

SHOWN = 8
"""Outputs listed for each variant: a gradient has hundreds, and the first of them tell enough."""


def precision(
    target: TargetName,
    inputs: InputsName = None,
    argmax: Annotated[
        bool, typer.Option("--argmax", help="Count the argmax decisions that flip.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="NAME", help="The output to take the argmax of."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which outputs the compiler's rounding changes."""
    need_jax()
    from drumline.numerics.rounding.precision import precision as compare
    from drumline.targets import load_target

    with prints_aside():
        loaded = load_target(target, inputs)
        report = compare(loaded.function, *loaded.inputs, argmax=argmax, output=output)
    if as_json:
        typer.echo(json.dumps({"function": target, **report.to_dict()}, indent=2))
    else:
        _show(target, report)
    raise typer.Exit(1 if report.changes else 0)


def _show(target: str, report: "PrecisionReport") -> None:
    typer.secho(
        f"{harmless(target)} · {report.operations:,} operations on {report.device}", bold=True
    )
    rows = []
    for variant in (report.as_compiled, *report.variants):
        rows += [_row(variant, output) for output in _worst(variant)]
    print_table(
        ["VARIANT", "OUTPUT", "", "DIFFERS", "LARGEST", "ULPS", "ERROR", "ULPS"],
        rows,
        right="   rrrrr",
    )
    hidden = len(report.as_compiled.outputs) - SHOWN
    if hidden > 0:
        typer.echo(f"and {hidden:,} more outputs, which differ less: see --json")
    for left_out in report.left_out:
        typer.echo(f"left out: {harmless(left_out)}")
    for variant in report.variants:
        _show_first(variant, report.operations)
    _show_flips(report)
    typer.echo(f"\n{report.verdict}")


def _worst(variant: "VariantReport") -> list["OutputReport"]:
    if len(variant.outputs) <= SHOWN:
        return list(variant.outputs)
    return sorted(variant.outputs, key=_size, reverse=True)[:SHOWN]


def _size(output: "OutputReport") -> tuple[float, float]:
    change, error = output.change, output.error
    return (change.units or change.differing, (error.units or 0.0) if error else 0.0)


def _row(variant: "VariantReport", output: "OutputReport") -> list[str]:
    change, error = output.change, output.error
    compared = variant.way.name != "AS_COMPILED"
    return [
        variant.way.value,
        output.name,
        output.kind,
        f"{change.differing:,} of {change.elements:,}" if compared else "–",
        *(_far(change) if compared else ("–", "–")),
        *(_far(error) if error else ("–", "–")),
    ]


def _far(difference: "Difference") -> tuple[str, str]:
    if difference.units is None:
        return (f"{difference.differing:,} differ" if difference.differing else "0", "–")
    return (f"{difference.largest:.3g}", f"{difference.units:.3g}")


def _show_first(variant: "VariantReport", operations: int) -> None:
    if not variant.changes:
        return
    if variant.same_as is not None:
        typer.echo(f"\n{variant.way.value} gives the same bits as {variant.same_as.value}")
        return
    first = variant.first
    if first is None:
        typer.echo(f"\n{variant.way.value} parts only as a whole: each output alone agrees")
        return
    operation, difference = first.operation, first.difference
    where = f" at {operation.place}" if operation.place else ""
    counted = f"{difference.differing:,} of {difference.elements:,} differ"
    largest = (
        "" if difference.units is None else ", by up to {} ({} ulps)".format(*_far(difference))
    )
    typer.echo(
        f"\n{variant.way.value} parts at operation {operation.number:,} of {operations:,}: "
        f"{operation.primitive}{harmless(where)}"
    )
    typer.echo(f"  {', '.join(operation.takes)} → {', '.join(operation.gives)}")
    typer.echo(f"  {counted}{largest}")
    typer.echo(f"  {harmless(first.why)}")


def _show_flips(report: "PrecisionReport") -> None:
    rows = []
    for variant in report.variants:
        most = sorted(variant.flips, key=lambda flips: flips.flipped, reverse=True)
        rows += [_flip_row(variant, flips) for flips in most[:SHOWN]]
    if rows:
        typer.echo("")
        headings = ["VARIANT", "ARGMAX OF", "FLIPS", "LARGEST MARGIN", "MEDIAN"]
        print_table(headings, rows, right="  rrr")


def _flip_row(variant: "VariantReport", flips: "Flips") -> list[str]:
    flipped = f"{flips.flipped:,} of {flips.decisions:,}"
    return [variant.way.value, flips.output, flipped, _margin(flips.largest), _margin(flips.median)]


def _margin(margin: "Margin | None") -> str:
    return "–" if margin is None else f"{margin.absolute:.3g} ({margin.units:.3g} ulps)"
