"""`drumline numerics topk`: whether the approximate top k keeps its contract on this device."""

import json
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from drumline.cli.options import AsJson, need_jax
from drumline.cli.rendering.table import print_table

ROWS = 8
"""In each case: enough for a worst one."""

Number = TypeVar("Number", int, float)


def topk(
    k: Annotated[str, typer.Option(help="How many to choose; several with commas.")] = "64",
    length: Annotated[str, typer.Option(help="Elements in a row.")] = "8192",
    recall: Annotated[str, typer.Option(help="The part of the k largest to find.")] = "0.95",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: AsJson = False,
) -> None:
    """Measure the recall of lax.approx_max_k."""
    need_jax()
    ks, lengths = _numbers("k", k, int), _numbers("length", length, int)
    recalls = _numbers("recall", recall, float)
    from drumline.numerics.topk_survey import TopKGrid, survey_topk

    grid = TopKGrid(
        shapes=tuple((ROWS, each) for each in lengths),
        ks=ks,
        recall_targets=recalls,
        dtypes=tuple(dtype.split(",")),
    )
    found = survey_topk(grid)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
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
                for case in found.cases
            ],
            right="  rrrrrr",
        )
        typer.echo(f"\n{found.verdict}")
    if found.broken:
        raise typer.Exit(1)


def _numbers(option: str, given: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    from drumline.numerics.mistakes import Mistake

    try:
        return tuple(kind(each) for each in given.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise Mistake(
            f"--{option}: {given!r} is not made of {what}, such as 64 or 64,128"
        ) from None
