"""`drumline inspect profile`: where the time of a traced step went."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from drumline.cli.options import AsJson, InputsName, need_jax, prints_aside
from drumline.cli.rendering.table import print_table
from drumline.cli.rendering.text import harmless, harmless_lines

if TYPE_CHECKING:
    from drumline.inspect.compiling.axes import Axes
    from drumline.inspect.profiles import Profile
    from drumline.inspect.profiles.report import ProfileComparison

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
    from drumline.inspect.profiles.report import compare, read_estimate, summary

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


def _show(measured: Profile, comparison: ProfileComparison | None) -> None:
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


def _show_devices(measured: Profile) -> None:
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


def _show_communication(measured: Profile) -> None:
    from drumline.inspect.profiles.report import duration, percent, short_source

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


def _show_operations(measured: Profile) -> None:
    from drumline.inspect.profiles.report import duration, percent, short_source

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


def _show_comparison(comparison: ProfileComparison) -> None:
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


MOST_EMULATED = 2048
"""Devices that the CPU backend can stand for."""


def program(
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:FUNCTION", help="The function, such as train.py:step."),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", metavar="X=2,Y=4", help="The mesh to shard over.")
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option("--on", metavar="SLICE", help="Estimate it there; several are compared."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shapes",
            metavar="TYPE[SIZES]@AXES",
            help="An argument, as in bf16[1024,2048]@X,Y; once for each.",
        ),
    ] = None,
    inputs: InputsName = None,
    example: Annotated[
        str | None,
        typer.Option(
            "--example",
            metavar="NAME",
            help="One of ours, see --list; with a MODULE:FUNCTION, the same as --inputs.",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List our own models and the chapter's examples.")
    ] = False,
    compiler: Annotated[
        str,
        typer.Option("--compiler", metavar="NAME", help="auto, cpu, tpu, or here: whose to ask."),
    ] = "auto",
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw the timeline.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write the timeline for ui.perfetto.dev."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what MODULE:FUNCTION sends, and takes on a slice."""
    need_jax()
    _check(target, example, listed, compiler, (png or trace) is not None, on, shapes, inputs)
    if mesh is not None:
        _emulate(mesh)
    if listed:
        _list(as_json)
        return
    with prints_aside():
        function, arguments, axes = _load(target, example, mesh, shapes or [], inputs)
    _tell(function, arguments, axes, on or [], (compiler, png, trace), as_json)


def _check(
    target: str | None,
    example: str | None,
    listed: bool,
    compiler: str,
    draws: bool,
    on: list[str] | None,
    shapes: list[str] | None,
    inputs: str | None,
) -> None:
    """Refuse what makes no sense before anything is imported."""
    from drumline.errors import UserError

    if listed == (target is not None or example is not None):
        raise UserError(
            "name a function as MODULE:FUNCTION, or one of ours with --example NAME: --list lists "
            "them"
        )
    if shapes and (inputs or example):
        raise UserError("--shapes gives the arguments: leave out --inputs and --example")
    if compiler not in ("auto", "cpu", "tpu", "here"):
        raise UserError(f"--compiler {compiler}: it can be auto, cpu, tpu or here")
    if draws and len(on or []) != 1:
        raise UserError("--png and --trace draw an estimate: name one slice with --on")


def _emulate(mesh: str) -> None:
    """Let the user's module make this mesh of CPU devices, before anything starts JAX."""
    from drumline.inspect.compiling.axes import read_mesh

    devices = prod(read_mesh(mesh).values())
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags and devices <= MOST_EMULATED:
        wanted = f"--xla_force_host_platform_device_count={devices}"
        os.environ["XLA_FLAGS"] = f"{flags} {wanted}".strip()


def _list(as_json: bool) -> None:
    from drumline.inspect.compiling.axes import shown
    from drumline.inspect.examples import examples

    rows = [[one.name, shown(dict(one.mesh)), one.on, one.what] for one in examples().values()]
    if as_json:
        names = ("name", "mesh", "on", "what")
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
    else:
        print_table(["NAME", "MESH", "ON", "WHAT"], rows)


def _load(
    target: str | None,
    example: str | None,
    mesh: str | None,
    shapes: list[str],
    inputs: str | None,
) -> tuple[Any, tuple[Any, ...], Axes | None]:
    """The function, its arguments, and the mesh to trace it under."""
    from drumline.inspect.compiling.axes import read_mesh
    from drumline.inspect.compiling.meshes import read_shapes
    from drumline.targets import load_function, load_target

    axes = None if mesh is None else read_mesh(mesh)
    if example is not None and target is None:
        from drumline.inspect.examples import example as find

        function, arguments = find(example).program(axes)
        return function, arguments, None
    assert target is not None
    if shapes:
        return load_function(target), read_shapes(shapes, axes), axes
    hint = "their shapes with --shapes 'bf16[1024,2048]@X,Y' for each"
    loaded = load_target(target, inputs or example, hint=hint)
    return loaded.function, loaded.inputs, axes


def _tell(
    function: Any,
    arguments: tuple[Any, ...],
    axes: Axes | None,
    on: list[str],
    how: tuple[str, Path | None, Path | None],
    as_json: bool,
) -> None:
    from drumline.inspect import communication, compare, estimate

    compiler: Any = how[0]
    if len(on) > 1:
        from drumline.inspect.compare import Layout

        way = Layout("as given", arguments, axes)
        with prints_aside():
            compared = compare(function, [way], on, compiler=compiler)
        _print(compared, as_json)
        return
    place = on[0] if on else None
    # On the slice that is asked for, so that the TPU's compiler tells what it does there.
    with prints_aside():
        sent = communication(function, *arguments, mesh=axes, on=place, compiler=compiler)
    if place is None:
        _print(sent, as_json)
        return
    with prints_aside():
        told = estimate(function, *arguments, mesh=axes, on=place, compiler=compiler)
    for path, save in ((how[1], told.save_png), (how[2], told.save_trace)):
        if path is not None:
            save(path)
            typer.echo(f"wrote {path}", err=True)
    if as_json:
        both = {"communication": sent.to_dict(), "estimate": told.to_dict()}
        typer.echo(json.dumps(both, indent=2))
        return
    typer.echo(harmless_lines(str(told)))
    typer.echo("")
    typer.echo(harmless_lines(str(sent)))


def _print(report: Any, as_json: bool) -> None:
    text = json.dumps(report.to_dict(), indent=2) if as_json else str(report)
    typer.echo(harmless_lines(text))


PROGRAM = "program"


class _Programs(TyperGroup):
    """Takes what names no command as the name of a program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] not in (["--help"], *([name] for name in self.commands)):
            args = [PROGRAM, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    help="What XLA made of a program, and what it will cost.",
    cls=_Programs,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(PROGRAM)(program)
app.command("profile")(profile)
