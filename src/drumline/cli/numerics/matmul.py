"""`drumline numerics matmul`: the precision of products, and its price."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.options import AsJson, need_jax

if TYPE_CHECKING:
    from drumline.numerics.matmul import MatmulSurvey

SIZES = "64,256,1024,4096"
SQUARES = {"cpu": "256,1024"}
"""By platform; a CPU takes minutes for what others do at once."""
LARGE_SQUARES = "1024,4096"
LARGEST = 16384


def matmul(
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="D,D,…", help="d of the thin products.")
    ] = SIZES,
    inner: Annotated[
        int, typer.Option("--inner", help="The inner length of the thin products.")
    ] = 4,
    squares: Annotated[
        str | None, typer.Option("--squares", metavar="D,D,…", help="d of the square products.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Draw the thin products' errors, too."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Multiply in every precision there is, against float64."""
    need_jax()
    import jax

    from drumline.cli.connect import echo_json
    from drumline.numerics.matmul import survey_matmul
    from drumline.numerics.mistakes import Mistake
    from drumline.numerics.plots import write

    if not 1 <= inner <= LARGEST:
        raise Mistake(f"--inner {inner}: it can be 1 to {LARGEST}")
    if plot is not None and plot.suffix.lower() != ".svg":
        raise Mistake(f"--plot {plot}: it is drawn as SVG; name it {plot.stem}.svg")
    if squares is None:
        squares = SQUARES.get(jax.default_backend(), LARGE_SQUARES)
    survey = survey_matmul(_read("--sizes", sizes), inner, squares=_read("--squares", squares))
    if plot is not None:
        write(plot, survey.chart())
    if as_json:
        echo_json(survey.to_dict())
    else:
        _show(survey)
        if plot is not None:
            typer.echo(f"\nwrote {plot}")


def _read(option: str, text: str) -> list[int]:
    from drumline.numerics.mistakes import Mistake

    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise Mistake(
            f"{option} {text}: write whole numbers with commas, such as {SIZES}"
        ) from None
    for number in numbers:
        if not 1 <= number <= LARGEST:
            raise Mistake(f"{option} {number}: it can be 1 to {LARGEST}")
    return sorted(set(numbers))


def _show(survey: "MatmulSurvey") -> None:
    from drumline.cli.rendering.table import print_table
    from drumline.numerics.implementations import has_torch
    from drumline.numerics.matmul import DEFAULT, SQUARE, THIN

    typer.echo(f"float32 on {survey.device}, largest error against float64\n")
    for shape, title in (
        (THIN, f"[d,{survey.inner}] × [{survey.inner},d]"),
        (SQUARE, "[d,d] × [d,d]"),
    ):
        sizes = [str(product.size) for product in survey.of(shape, DEFAULT)]
        rows = []
        for name in survey.implementations():
            products = survey.of(shape, name)
            last = products[-1]
            cells = [f"{product.errors.max_abs:.1e}" for product in products]
            milliseconds = f"{1e3 * last.seconds:.3g} ms"
            rows.append([name, *cells, f"{last.errors.rms_abs:.1e}", milliseconds])
        headings = [title, *(f"d={size}" for size in sizes), "RMS", "TIME"]
        print_table(headings, rows, right=" " + "r" * (len(sizes) + 2))
        typer.echo("")
    for sentence in survey.verdict():
        typer.echo(sentence)
    if not has_torch():
        typer.echo("PyTorch is not installed; with it, it is compared too: pip install torch")
