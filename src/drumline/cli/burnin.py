"""`drumline burnin`: test the chips of this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.options import AsJson, require_jax

if TYPE_CHECKING:
    from drumline.health.report import CheckOutcome, ChipHealth, HealthReport, HostHealth

COLUMNS = {
    "matmul_bf16": "BF16",
    "matmul_int8": "INT8",
    "functions": "FUNCTIONS",
    "memory": "MEMORY",
    "links": "LINKS",
}
COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


def burnin(
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="N", help="Seconds to test.")
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Test the chips of this machine for wrong results."""
    from drumline.errors import UserError

    if not 0 < seconds < 1e6:
        raise UserError(f"--seconds {seconds:g}: say how long to test, such as 30")
    require_jax()
    from drumline.cli.connect import echo_json
    from drumline.health.burnin import burn_in

    try:
        report = burn_in(seconds=seconds)
    except RuntimeError as error:
        # Chips that another program uses, or whose memory is full, are not bad chips.
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"the chips could not be tested: {first_line[:300]}") from None
    if as_json:
        echo_json(report.as_dict())
    else:
        _print_report(report)
    raise typer.Exit(1 if report.verdict == "fail" else 0)


def _print_report(report: "HealthReport") -> None:
    from drumline.cli.connect import coloured
    from drumline.cli.rendering.text import plural, render_table, sanitize

    kinds = ", ".join(sorted({chip.kind for chip in report.devices}))
    chips = f"{plural(len(report.devices), 'chip')} ({kinds})"
    typer.echo(f"{chips} · {plural(len(report.hosts), 'host')} · {report.seconds:.0f} s")

    def paint(column: int, cell: str) -> str:
        verdict = cell.strip().lower()
        if column != 1 or verdict not in COLOURS or not coloured():
            return cell
        return typer.style(cell, fg=COLOURS[verdict])

    heading, *lines = render_table(
        ["CHIP", "", *COLUMNS.values()], [_row(chip) for chip in report.devices], paint=paint
    )
    typer.secho(heading, bold=True)
    for line in lines:
        typer.echo(line)
    for message in _further_messages(report):
        typer.echo(sanitize(message))
    typer.secho(sanitize(report.message), bold=True)


def _row(chip: "ChipHealth") -> list[str]:
    verdict = chip.verdict.upper() if chip.verdict == "fail" else chip.verdict
    tests = [_cell(chip.tests[test]) if test in chip.tests else "–" for test in COLUMNS]
    return [f"{chip.id} on host {chip.host}", verdict, *tests]


def _cell(test: "CheckOutcome") -> str:
    """Return the rate and the catalogue's peak, or the verdict if there is no rate."""
    rate, unit = (test.tflops, "TFLOP/s") if test.tflops else (test.gb_per_s, "GB/s")
    if test.verdict == "pass" and test.seconds is None:
        return "–"
    if not rate:
        text = "ok"
    elif test.peak and test.share is not None:
        text = f"{rate:,.0f} of {test.peak:,.0f} {unit}, {test.share:.0%}"
    else:
        text = f"{rate:.3g} {unit}"
    return text if test.verdict == "pass" else f"{test.verdict.upper()} {text}".removesuffix(" ok")


def _further_messages(report: "HealthReport") -> list[str]:
    """Return a line for each fault and warning that the final message does not contain."""
    tested: list[tuple[str, ChipHealth | HostHealth]] = [
        *((f"chip {chip.id} on host {chip.host}", chip) for chip in report.devices),
        *((f"host {host.host}", host) for host in report.hosts),
    ]
    warnings = [
        f"{name}: {test.message}"
        for name, health in tested
        for test in health.tests.values()
        if test.verdict == "warn"
    ]
    faults = [fault.sentence.removeprefix("drumline: ") for fault in report.faults[1:]]
    return faults + (warnings if report.faults else warnings[1:])
