"""`drumline inspect`: the communication and cost of a program, and profiles of traces.

`drumline inspect MODULE:FUNCTION` runs the command `program`. Arguments that do not start with a
command go to it.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from drumline.cli.options import AsJson, InputsName, redirect_prints, require_jax
from drumline.cli.rendering.text import print_table, sanitize, sanitize_lines
from drumline.errors import UserError

if TYPE_CHECKING:
    from drumline.inspect.compiling.axes import MeshAxes
    from drumline.inspect.profiles import Profile
    from drumline.inspect.profiles.report import ProfileComparison

MAX_EMULATED = 2048
"""The largest number of devices of the CPU backend."""
SHOWN_DEVICES = 8
SHOWN_OPERATIONS = 10


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
        typer.Option(
            "--on", metavar="SLICE", help="Estimate the cost on a slice. Repeat to compare several."
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shapes",
            metavar="TYPE[SIZES]@AXES",
            help="An argument, such as bf16[1024,2048]@X,Y. Repeat for each.",
        ),
    ] = None,
    inputs: InputsName = None,
    example: Annotated[
        str | None,
        typer.Option(
            "--example",
            metavar="NAME",
            help="An example from --list. With MODULE:FUNCTION, the same as --inputs.",
        ),
    ] = None,
    list_examples: Annotated[
        bool, typer.Option("--list", help="List the examples: models and the chapter's programs.")
    ] = False,
    compiler: Annotated[
        str,
        typer.Option("--compiler", metavar="NAME", help="The compiler: auto, cpu, tpu or here."),
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
    """Show the communication and cost of MODULE:FUNCTION.

    The arguments come from the function inputs() of the module, or from --shapes.
    """
    require_jax()
    if list_examples == (target is not None or example is not None):
        raise UserError(
            "name a function as MODULE:FUNCTION, or an example with --example NAME; --list lists "
            "the examples"
        )
    if shapes and (inputs or example):
        raise UserError("--shapes gives the arguments: leave out --inputs and --example")
    if compiler not in ("auto", "cpu", "tpu", "here"):
        raise UserError(f"--compiler {compiler}: it can be auto, cpu, tpu or here")
    if (png or trace) and len(on or []) != 1:
        raise UserError("--png and --trace draw an estimate: name one slice with --on")
    if mesh is not None:
        _emulate_devices(mesh)
    if list_examples:
        _print_examples(as_json)
        return
    with redirect_prints():
        function, arguments, axes = _load_program(target, example, mesh, shapes or [], inputs)
    _report(function, arguments, axes, on or [], compiler, png, trace, as_json)


def _emulate_devices(mesh: str) -> None:
    """Set XLA's flag for CPU devices before JAX starts, so that the module can make the mesh."""
    from drumline.inspect.compiling.axes import parse_mesh

    device_count = prod(parse_mesh(mesh).values())
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags and device_count <= MAX_EMULATED:
        flag = f"--xla_force_host_platform_device_count={device_count}"
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _print_examples(as_json: bool) -> None:
    from drumline.inspect.compiling.axes import format_mesh
    from drumline.inspect.examples import examples

    rows = [
        [example.name, format_mesh(dict(example.mesh)), example.on, example.description]
        for example in examples().values()
    ]
    if as_json:
        keys = ("name", "mesh", "on", "what")
        typer.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
    else:
        print_table(["NAME", "MESH", "ON", "WHAT"], rows)


def _load_program(
    target: str | None,
    example: str | None,
    mesh: str | None,
    shapes: list[str],
    inputs: str | None,
) -> tuple[Any, tuple[Any, ...], MeshAxes | None]:
    """Return the function, its arguments, and the mesh to trace it under."""
    from drumline.inspect.compiling.axes import parse_mesh
    from drumline.inspect.compiling.meshes import parse_shapes
    from drumline.targets import load_function, load_target

    axes = None if mesh is None else parse_mesh(mesh)
    if example is not None and target is None:
        from drumline.inspect.examples import find_example

        function, arguments = find_example(example).program(axes)
        return function, arguments, None
    assert target is not None
    if shapes:
        return load_function(target), parse_shapes(shapes, axes), axes
    hint = "their shapes with --shapes 'bf16[1024,2048]@X,Y' for each"
    loaded = load_target(target, inputs or example, hint=hint)
    return loaded.function, loaded.inputs, axes


def _report(
    function: Any,
    arguments: tuple[Any, ...],
    axes: MeshAxes | None,
    on: list[str],
    compiler: Any,
    png: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    from drumline.inspect import ProgramVariant, communication, compare, estimate

    if len(on) > 1:
        variant = ProgramVariant("as given", arguments, axes)
        with redirect_prints():
            comparison = compare(
                function, [variant], on, compiler=compiler, zones=_configured_zones()
            )
        _print_report(comparison, as_json)
        return
    slice_name = on[0] if on else None
    with redirect_prints():
        # With a slice, the TPU's compiler can be used for the communication as well.
        sent = communication(function, *arguments, mesh=axes, on=slice_name, compiler=compiler)
    if slice_name is None:
        _print_report(sent, as_json)
        return
    with redirect_prints():
        cost = estimate(function, *arguments, mesh=axes, on=slice_name, compiler=compiler)
    for path, save in ((png, cost.save_png), (trace, cost.save_trace)):
        if path is not None:
            save(path)
            typer.echo(f"wrote {path}", err=True)
    if as_json:
        reports = {"communication": sent.to_dict(), "estimate": cost.to_dict()}
        typer.echo(json.dumps(reports, indent=2))
        return
    typer.echo(sanitize_lines(str(cost)))
    typer.echo("")
    typer.echo(sanitize_lines(str(sent)))


def _configured_zones() -> tuple[str, ...]:
    """Return the zones of the Google Cloud project in config.yaml; none if there is no project."""
    from drumline.jobs.config import ConfigError, read
    from drumline.jobs.connection import home_folder

    try:
        config = read(home_folder())
    except ConfigError:
        return ()  # the commands of jobs report it
    return () if config.local else config.zones


def _print_report(report: Any, as_json: bool) -> None:
    text = json.dumps(report.to_dict(), indent=2) if as_json else str(report)
    typer.echo(sanitize_lines(text))


# Profiles -----------------------------------------------------------------------------------------


def profile(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="The folder of jax.profiler.trace, or an .xplane.pb file."
        ),
    ],
    device: Annotated[
        int | None, typer.Option("--device", metavar="N", help="Show only this device.")
    ] = None,
    estimate: Annotated[
        Path | None,
        typer.Option("--estimate", metavar="FILE", help="Compare with an estimate in JSON."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a traced step spends its time."""
    require_jax()
    from drumline.inspect.profiles import read_profile
    from drumline.inspect.profiles.report import compare_profile, read_estimate, summarize

    estimated = read_estimate(estimate) if estimate else None
    measured = read_profile(folder, device)
    comparison = compare_profile(measured, estimated) if estimated else None
    sentences = summarize(measured, comparison)
    if as_json:
        report = {**measured.to_dict(), "summary": sentences}
        if comparison:
            report["estimate"] = comparison.to_dict()
        typer.echo(json.dumps(report, indent=2))
        return
    _print_profile(measured, comparison)
    typer.echo("")
    for sentence in sentences:
        typer.echo(sanitize(sentence))


def _print_profile(measured: Profile, comparison: ProfileComparison | None) -> None:
    from drumline.inspect.profiles.report import format_duration

    count = len(measured.devices)
    module = f"{measured.module} · " if measured.module else ""
    steps = "1 step" if measured.steps == 1 else f"{measured.steps:,} steps"
    devices = f"{count} {measured.platform} device{'s' if count > 1 else ''}"
    title = (
        f"{module}{steps} on {devices} · {format_duration(measured.seconds)} a step "
        f"(counted by {measured.steps_from})"
    )
    typer.secho(sanitize(title), bold=True)
    _print_devices(measured)
    if measured.communication:
        _print_communication(measured)
    _print_operations(measured)
    if comparison:
        _print_comparison(comparison)


def _print_devices(measured: Profile) -> None:
    from drumline.inspect.profiles.report import format_duration, format_percent

    typer.echo("")
    print_table(
        ["DEVICE", "STEP", "BUSY", "COMPUTES", "EXPOSED", "HIDDEN", "IDLE"],
        [
            [
                device.name,
                format_duration(device.span),
                format_percent(device.busy, device.span),
                format_percent(device.computing, device.span),
                format_percent(device.exposed, device.span),
                format_percent(device.hidden, device.span),
                format_percent(device.idle, device.span),
            ]
            for device in measured.devices[:SHOWN_DEVICES]
        ],
        right=" rrrrrr",
    )
    more = len(measured.devices) - SHOWN_DEVICES
    if more > 0:
        typer.echo(f"and {more:,} more devices: see --json")


def _print_communication(measured: Profile) -> None:
    from drumline.inspect.profiles.report import format_duration, format_percent, short_source

    typer.echo("")
    print_table(
        ["COLLECTIVE", "SOURCE", "RUNS", "TIME", "EXPOSED", "", "HIDDEN", "COULD SAVE"],
        [
            [
                collective.kind,
                short_source(collective.source) or "–",
                f"{collective.count:,.3g}",
                format_duration(collective.seconds),
                format_duration(collective.exposed),
                format_percent(collective.exposed, measured.seconds),
                format_duration(collective.hidden),
                format_percent(measured.saving(collective), measured.seconds),
            ]
            for collective in measured.communication[:SHOWN_OPERATIONS]
        ],
        right="  rrrrrr",
    )
    _print_more(len(measured.communication))


def _print_operations(measured: Profile) -> None:
    from drumline.inspect.profiles.report import format_duration, format_percent, short_source

    typer.echo("")
    rows = []
    for op in measured.operations[:SHOWN_OPERATIONS]:
        others = f" +{op.instructions - 1}" if op.instructions > 1 else ""
        rows.append(
            [
                f"{op.name}{others}",
                op.kind if op.kind != op.name else "–",
                short_source(op.source) or "–",
                f"{op.count:,.3g}",
                format_duration(op.seconds),
                format_percent(op.seconds, measured.seconds),
            ]
        )
    print_table(["OPERATION", "KIND", "SOURCE", "RUNS", "TIME", ""], rows, right="   rrr")
    _print_more(len(measured.operations))


def _print_comparison(comparison: ProfileComparison) -> None:
    from drumline.inspect.profiles.report import format_duration

    typer.echo("")
    print_table(
        ["AGAINST THE ESTIMATE", "SOURCE", "MEASURED", "ESTIMATED", "DIFFERENCE"],
        [
            [
                part.subject,
                part.source or "–",
                format_duration(part.measured),
                format_duration(part.estimated),
                f"{'+' if part.seconds > 0 else ''}{format_duration(part.seconds)}",
            ]
            for part in (comparison.total, *comparison.parts[:SHOWN_OPERATIONS])
        ],
        right="  rrr",
    )
    _print_more(len(comparison.parts))


def _print_more(count: int) -> None:
    if count > SHOWN_OPERATIONS:
        typer.echo(f"and {count - SHOWN_OPERATIONS:,} more: see --json")


# Commands -----------------------------------------------------------------------------------------

PROGRAM = "program"


class _InspectGroup(TyperGroup):
    """Passes arguments that do not start with a command to the command `program`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] not in (["--help"], *([name] for name in self.commands)):
            args = [PROGRAM, *args]
        return super().parse_args(ctx, args)


_EXAMPLES = """\b
Examples:
  drumline inspect --list
  drumline inspect --example models/lm-1b3-fsdp --on v6e-8
  drumline inspect train.py:step --mesh data=2,model=4 --on v6e-8
  drumline inspect train.py:step --mesh data=8 --on v6e-8 --on v5litepod-8
  drumline inspect model.py:layer --mesh X=2,Y=4 \\
    --shapes 'bf16[1024,2048]@X,Y' --shapes 'bf16[2048,8192]@-,Y'
  drumline inspect profile FOLDER

`drumline inspect program --help` lists the options."""

app = typer.Typer(
    help="Show a program's communication and cost.\n\nLists its collectives, and estimates the "
    "time, memory and price on a slice that you do not have.",
    epilog=_EXAMPLES,
    cls=_InspectGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(PROGRAM, epilog=_EXAMPLES.rpartition("\n\n")[0])(program)
app.command("profile")(profile)
