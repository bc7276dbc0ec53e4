"""`drumline numerics`: compare the numerics of JAX, PyTorch and exact arithmetic."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from drumline.cli.options import AsJson, InputsName, TargetName, redirect_prints, require_jax
from drumline.cli.rendering.text import print_table, sanitize
from drumline.errors import UserError

if TYPE_CHECKING:
    from drumline.numerics.matmul import MatmulSurvey
    from drumline.numerics.repetition import RepeatReport
    from drumline.numerics.rounding.differences import ArgmaxFlips, Difference, Margin
    from drumline.numerics.rounding.precision import OutputReport, PrecisionReport, VariantReport

app = typer.Typer(
    help="Compare the numerics of JAX, PyTorch and exact arithmetic.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# ---- matmul ------------------------------------------------------------------------------------

THIN_SIZES = "64,256,1024,4096"
SQUARE_SIZES = {"cpu": "256,1024"}
"""The sizes of square matmuls by platform. Large ones take minutes on a CPU."""
LARGE_SQUARE_SIZES = "1024,4096"
MAX_SIZE = 16384


@app.command()
def matmul(
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="D,D,…", help="d of the thin matmuls.")
    ] = THIN_SIZES,
    inner: Annotated[
        int, typer.Option("--inner", help="The inner dimension of the thin matmuls.")
    ] = 4,
    squares: Annotated[
        str | None, typer.Option("--squares", metavar="D,D,…", help="d of the square matmuls.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Plot the errors of the thin matmuls."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the errors of float32 matmuls against float64."""
    require_jax()
    import jax

    from drumline.cli.connect import echo_json
    from drumline.numerics.matmul import survey_matmul
    from drumline.numerics.plots import write_svg

    if not 1 <= inner <= MAX_SIZE:
        raise UserError(f"--inner {inner}: use 1 to {MAX_SIZE}")
    if plot is not None and plot.suffix.lower() != ".svg":
        raise UserError(f"--plot {plot}: plots are SVG files; name it {plot.stem}.svg")
    if squares is None:
        squares = SQUARE_SIZES.get(jax.default_backend(), LARGE_SQUARE_SIZES)
    survey = survey_matmul(
        _parse_sizes("--sizes", sizes), inner, squares=_parse_sizes("--squares", squares)
    )
    if plot is not None:
        write_svg(plot, survey.chart())
    if as_json:
        echo_json(survey.to_dict())
    else:
        _print_matmul_survey(survey)
        if plot is not None:
            typer.echo(f"\nwrote {plot}")


def _parse_sizes(option: str, text: str) -> list[int]:
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(
            f"{option} {text}: write whole numbers with commas, such as {THIN_SIZES}"
        ) from None
    for size in sizes:
        if not 1 <= size <= MAX_SIZE:
            raise UserError(f"{option} {size}: use 1 to {MAX_SIZE}")
    return sorted(set(sizes))


def _print_matmul_survey(survey: "MatmulSurvey") -> None:
    from drumline.numerics.implementations import has_torch
    from drumline.numerics.matmul import DEFAULT, SQUARE, THIN

    typer.echo(f"float32 on {survey.device}, largest error against float64\n")
    for shape, title in (
        (THIN, f"[d,{survey.inner}] × [{survey.inner},d]"),
        (SQUARE, "[d,d] × [d,d]"),
    ):
        sizes = [str(measurement.size) for measurement in survey.select(shape, DEFAULT)]
        rows = []
        for name in survey.implementations():
            measurements = survey.select(shape, name)
            largest = measurements[-1]
            errors = [f"{measurement.errors.max_abs:.1e}" for measurement in measurements]
            milliseconds = f"{1e3 * largest.seconds:.3g} ms"
            rows.append([name, *errors, f"{largest.errors.rms_abs:.1e}", milliseconds])
        headings = [title, *(f"d={size}" for size in sizes), "RMS", "TIME"]
        print_table(headings, rows, right=" " + "r" * (len(sizes) + 2))
        typer.echo("")
    for sentence in survey.verdict():
        typer.echo(sentence)
    if not has_torch():
        typer.echo("PyTorch is not installed; to compare with it, run pip install torch")


# ---- precision ---------------------------------------------------------------------------------

MAX_OUTPUTS = 8
"""The outputs to print for each variant. A gradient has hundreds."""


@app.command()
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
    require_jax()
    from drumline.numerics.rounding.precision import precision as run_precision
    from drumline.targets import load_target

    with redirect_prints():
        loaded = load_target(target, inputs)
        report = run_precision(loaded.function, *loaded.inputs, argmax=argmax, output=output)
    if as_json:
        typer.echo(json.dumps({"function": target, **report.to_dict()}, indent=2))
    else:
        _print_precision_report(target, report)
    raise typer.Exit(1 if report.changes else 0)


def _print_precision_report(target: str, report: "PrecisionReport") -> None:
    typer.secho(
        f"{sanitize(target)} · {report.operations:,} operations on {report.device}", bold=True
    )
    rows = [
        _output_row(variant, output)
        for variant in (report.as_compiled, *report.variants)
        for output in _largest_differences(variant)
    ]
    print_table(
        ["VARIANT", "OUTPUT", "", "DIFFERS", "LARGEST", "ULPS", "ERROR", "ULPS"],
        rows,
        right="   rrrrr",
    )
    hidden = len(report.as_compiled.outputs) - MAX_OUTPUTS
    if hidden > 0:
        typer.echo(f"and {hidden:,} more outputs, which differ less: see --json")
    for reason in report.left_out:
        typer.echo(f"left out: {sanitize(reason)}")
    for variant in report.variants:
        _print_first_difference(variant, report.operations)
    _print_flips(report)
    typer.echo(f"\n{report.verdict}")


def _largest_differences(variant: "VariantReport") -> list["OutputReport"]:
    if len(variant.outputs) <= MAX_OUTPUTS:
        return list(variant.outputs)
    return sorted(variant.outputs, key=_difference_key, reverse=True)[:MAX_OUTPUTS]


def _difference_key(output: "OutputReport") -> tuple[float, float]:
    change, error = output.change, output.error
    return (change.ulps or change.differing, (error.ulps or 0.0) if error else 0.0)


def _output_row(variant: "VariantReport", output: "OutputReport") -> list[str]:
    change, error = output.change, output.error
    has_change = variant.mode.name != "AS_COMPILED"
    return [
        variant.mode.value,
        output.name,
        output.kind,
        f"{change.differing:,} of {change.elements:,}" if has_change else "–",
        *(_format_difference(change) if has_change else ("–", "–")),
        *(_format_difference(error) if error else ("–", "–")),
    ]


def _format_difference(difference: "Difference") -> tuple[str, str]:
    if difference.ulps is None:
        return (f"{difference.differing:,} differ" if difference.differing else "0", "–")
    return (f"{difference.largest:.3g}", f"{difference.ulps:.3g}")


def _print_first_difference(variant: "VariantReport", operation_count: int) -> None:
    if not variant.changes:
        return
    mode = variant.mode.value
    if variant.same_as is not None:
        typer.echo(f"\n{mode} gives the same bits as {variant.same_as.value}")
        return
    first = variant.first
    if first is None:
        typer.echo(f"\n{mode} differs only as a whole: each output by itself agrees")
        return
    operation, difference = first.operation, first.difference
    source = f" at {operation.source}" if operation.source else ""
    largest = ""
    if difference.ulps is not None:
        largest = ", by up to {} ({} ulps)".format(*_format_difference(difference))
    typer.echo(
        f"\n{mode} first differs at operation {operation.number:,} of {operation_count:,}: "
        f"{operation.primitive}{sanitize(source)}"
    )
    typer.echo(f"  {', '.join(operation.inputs)} → {', '.join(operation.outputs)}")
    typer.echo(f"  {difference.differing:,} of {difference.elements:,} differ{largest}")
    typer.echo(f"  {sanitize(first.reason)}")


def _print_flips(report: "PrecisionReport") -> None:
    rows = []
    for variant in report.variants:
        outputs = sorted(variant.flips, key=lambda flips: flips.flipped, reverse=True)
        rows += [_flip_row(variant, flips) for flips in outputs[:MAX_OUTPUTS]]
    if rows:
        typer.echo("")
        headings = ["VARIANT", "ARGMAX OF", "FLIPS", "LARGEST MARGIN", "MEDIAN"]
        print_table(headings, rows, right="  rrr")


def _flip_row(variant: "VariantReport", flips: "ArgmaxFlips") -> list[str]:
    flipped = f"{flips.flipped:,} of {flips.decisions:,}"
    margins = _format_margin(flips.largest), _format_margin(flips.median)
    return [variant.mode.value, flips.output, flipped, *margins]


def _format_margin(margin: "Margin | None") -> str:
    return "–" if margin is None else f"{margin.absolute:.3g} ({margin.ulps:.3g} ulps)"


# ---- topk --------------------------------------------------------------------------------------

ROWS = 8
"""The number of rows in each case."""

Number = TypeVar("Number", int, float)


@app.command()
def topk(
    k: Annotated[str, typer.Option(help="How many to choose; several with commas.")] = "64",
    length: Annotated[str, typer.Option(help="Elements in a row.")] = "8192",
    recall: Annotated[str, typer.Option(help="The share of the k largest to find.")] = "0.95",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: AsJson = False,
) -> None:
    """Measure the recall of lax.approx_max_k."""
    require_jax()
    ks, lengths = _parse_numbers("k", k, int), _parse_numbers("length", length, int)
    recalls = _parse_numbers("recall", recall, float)
    from drumline.numerics.topk_survey import TopKGrid, survey_topk

    grid = TopKGrid(
        shapes=tuple((ROWS, row_length) for row_length in lengths),
        ks=ks,
        recall_targets=recalls,
        dtypes=tuple(dtype.split(",")),
    )
    survey = survey_topk(grid)
    if as_json:
        typer.echo(json.dumps(survey.to_dict(), indent=2))
    else:
        print_table(
            ["ROWS", "TYPE", "LENGTH", "K", "RECALL ASKED", "MEAN", "WORST ROW", "VIOLATIONS"],
            [
                [
                    case.distribution,
                    case.dtype,
                    f"{case.length:,}",
                    str(case.k),
                    f"{case.recall_asked:g}",
                    f"{case.recall_mean:.4f}",
                    f"{case.recall_worst:.4f}",
                    str(len(case.violations)),
                ]
                for case in survey.cases
            ],
            right="  rrrrrr",
        )
        typer.echo(f"\n{survey.verdict}")
    if survey.broken:
        raise typer.Exit(1)


def _parse_numbers(option: str, text: str, parse: Callable[[str], Number]) -> tuple[Number, ...]:
    try:
        return tuple(parse(word) for word in text.split(","))
    except ValueError:
        numbers = "whole numbers" if parse is int else "numbers"
        raise UserError(
            f"--{option}: {text!r} is not made of {numbers}, such as 64 or 64,128"
        ) from None


# ---- repeat ------------------------------------------------------------------------------------


@app.command()
def repeat(
    target: TargetName,
    runs: Annotated[int, typer.Option(help="How often to run it on each device.")] = 3,
    inputs: InputsName = None,
    as_json: AsJson = False,
) -> None:
    """Run a function several times and compare the bits."""
    require_jax()
    from drumline.numerics.repetition import repeat as run_repeatedly
    from drumline.targets import load_target

    with redirect_prints():
        loaded = load_target(target, inputs)
        report = run_repeatedly(loaded.function, loaded.inputs, runs=runs)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print_repeat_report(report)
    if not report.identical:
        raise typer.Exit(1)


def _print_repeat_report(report: "RepeatReport") -> None:
    print_table(
        ["DEVICE", "RUNS", "REPEATS", "AGREES"],
        [
            [
                device.device,
                str(report.runs),
                "yes" if device.repeats else f"no, {len(device.odd_runs)} of {report.runs} differ",
                "yes" if device.agrees else "no" if device.repeats else "–",
            ]
            for device in report.devices
        ],
        right=" r",
    )
    for device in report.devices:
        for difference in device.among_runs:
            typer.echo(f"{device.device}, run {device.odd_runs[0]}: {difference}")
        for difference in device.from_others if device.repeats else ():
            typer.echo(f"{device.device}, from the others: {difference}")
    typer.echo(f"\n{report.verdict}")
