"""`drumline numerics repeat`: whether a function gives the same bits every time, everywhere."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.options import AsJson, InputsName, TargetName, need_jax, prints_aside
from drumline.cli.rendering.table import print_table

if TYPE_CHECKING:
    from drumline.numerics.repetition import Repeated


def repeat(
    target: TargetName,
    runs: Annotated[int, typer.Option(help="How often to run it on each device.")] = 3,
    inputs: InputsName = None,
    as_json: AsJson = False,
) -> None:
    """Run a function again and again, and compare the bits."""
    need_jax()
    from drumline.numerics.repetition import repeat as run_repeatedly
    from drumline.targets import load_target

    with prints_aside():
        named = load_target(target, inputs)
        found = run_repeatedly(named.function, named.inputs, runs=runs)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        _show(found)
    if not found.identical:
        raise typer.Exit(1)


def _show(found: "Repeated") -> None:
    print_table(
        ["DEVICE", "RUNS", "REPEATS", "AGREES"],
        [
            [
                device.device,
                str(found.runs),
                "yes" if device.repeats else f"no, {len(device.odd_runs)} of {found.runs} differ",
                "yes" if device.agrees else "no" if device.repeats else "–",
            ]
            for device in found.devices
        ],
        right=" r",
    )
    for device in found.devices:
        for difference in device.among_runs:
            typer.echo(f"{device.device}, run {device.odd_runs[0]} of its own: {difference}")
        for difference in device.from_others if device.repeats else ():
            typer.echo(f"{device.device}, from the others: {difference}")
    typer.echo(f"\n{found.verdict}")
