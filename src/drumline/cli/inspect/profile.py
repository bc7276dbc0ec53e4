"""`drumline inspect profile`: where the time of a traced step went."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.options import AsJson, need_jax
from drumline.cli.rendering.table import print_table
from drumline.cli.rendering.text import harmless

if TYPE_CHECKING:
    from drumline.inspect.profiles import Profile
    from drumline.inspect.profiles.comparison import ProfileComparison

SHOWN_DEVICES = 8
SHOWN_OPERATIONS = 10


def profile(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="What jax.profiler.trace wrote: its folder, or an .xplane.pb."
        ),
    ],
    device: Annotated[
        int | None, typer.Option("--device", metavar="N", help="Only this device.")
    ] = None,
    estimate: Annotated[
        Path | None,
        typer.Option("--estimate", metavar="FILE", help="An estimate as JSON, to compare with."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a traced step went."""
    need_jax()
    from drumline.inspect.profiles import read_profile
    from drumline.inspect.profiles.comparison import compare, read_estimate
    from drumline.inspect.profiles.report import summary

    estimated = read_estimate(estimate) if estimate else None
    measured = read_profile(folder, device)
    comparison = compare(measured, estimated) if estimated else None
    sentences = summary(measured, comparison)
    if as_json:
        told = {**measured.to_dict(), "summary": sentences}
        if comparison:
            told["estimate"] = comparison.to_dict()
        typer.echo(json.dumps(told, indent=2))
        return
    _show(measured, comparison)
    typer.echo("")
    for sentence in sentences:
        typer.echo(harmless(sentence))


def _show(measured: "Profile", comparison: "ProfileComparison | None") -> None:
    from drumline.inspect.profiles.report import duration

    count = len(measured.devices)
    ran = f"{measured.module} · " if measured.module else ""
    steps = "1 step" if measured.steps == 1 else f"{measured.steps:,} steps"
    devices = f"{count} {measured.platform} device{'s' if count > 1 else ''}"
    typer.secho(
        harmless(
            f"{ran}{steps} on {devices} · {duration(measured.seconds)} a step "
            f"(counted by {measured.steps_from})"
        ),
        bold=True,
    )
    _show_devices(measured)
    if measured.communication:
        _show_communication(measured)
    _show_operations(measured)
    if comparison:
        _show_comparison(comparison)


def _show_devices(measured: "Profile") -> None:
    from drumline.inspect.profiles.report import duration, percent

    typer.echo("")
    print_table(
        ["DEVICE", "STEP", "BUSY", "COMPUTES", "EXPOSED", "HIDDEN", "IDLE"],
        [
            [
                each.name,
                duration(each.span),
                percent(each.busy, each.span),
                percent(each.computing, each.span),
                percent(each.exposed, each.span),
                percent(each.hidden, each.span),
                percent(each.idle, each.span),
            ]
            for each in measured.devices[:SHOWN_DEVICES]
        ],
        right=" rrrrrr",
    )
    more = len(measured.devices) - SHOWN_DEVICES
    if more > 0:
        typer.echo(f"and {more:,} more devices: see --json")


def _show_communication(measured: "Profile") -> None:
    from drumline.inspect.profiles.comparison import short_source
    from drumline.inspect.profiles.report import duration, percent

    typer.echo("")
    print_table(
        ["COLLECTIVE", "SOURCE", "RUNS", "TIME", "EXPOSED", "", "HIDDEN", "COULD SAVE"],
        [
            [
                each.kind,
                short_source(each.source) or "–",
                f"{each.count:,.3g}",
                duration(each.seconds),
                duration(each.exposed),
                percent(each.exposed, measured.seconds),
                duration(each.hidden),
                percent(measured.saving(each), measured.seconds),
            ]
            for each in measured.communication[:SHOWN_OPERATIONS]
        ],
        right="  rrrrrr",
    )
    _more(len(measured.communication))


def _show_operations(measured: "Profile") -> None:
    from drumline.inspect.profiles.comparison import short_source
    from drumline.inspect.profiles.report import duration, percent

    typer.echo("")
    print_table(
        ["OPERATION", "KIND", "SOURCE", "RUNS", "TIME", ""],
        [
            [
                each.name if each.instructions == 1 else f"{each.name} +{each.instructions - 1}",
                each.kind if each.kind != each.name else "–",
                short_source(each.source) or "–",
                f"{each.count:,.3g}",
                duration(each.seconds),
                percent(each.seconds, measured.seconds),
            ]
            for each in measured.operations[:SHOWN_OPERATIONS]
        ],
        right="   rrr",
    )
    _more(len(measured.operations))


def _show_comparison(comparison: "ProfileComparison") -> None:
    from drumline.inspect.profiles.report import duration

    typer.echo("")
    parts = (comparison.whole, *comparison.parts[:SHOWN_OPERATIONS])
    print_table(
        ["AGAINST THE ESTIMATE", "SOURCE", "MEASURED", "ESTIMATED", "DIFFERENCE"],
        [
            [
                part.what,
                part.source or "–",
                duration(part.measured),
                duration(part.estimated),
                f"{'+' if part.seconds > 0 else ''}{duration(part.seconds)}",
            ]
            for part in parts
        ],
        right="  rrr",
    )
    _more(len(comparison.parts))


def _more(count: int) -> None:
    if count > SHOWN_OPERATIONS:
        typer.echo(f"and {count - SHOWN_OPERATIONS:,} more: see --json")
