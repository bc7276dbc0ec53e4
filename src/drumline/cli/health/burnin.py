"""`drumline burnin`: whether the chips of this machine compute as they should."""

from typing import TYPE_CHECKING, Annotated

import typer

from drumline.cli.options import AsJson, need_jax

if TYPE_CHECKING:
    from drumline.health.report import BurnIn, CheckOutcome, ChipHealth, HostHealth

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
        float, typer.Option("--seconds", metavar="N", help="How long to go on.")
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Test whether the chips here compute right."""
    from drumline.errors import UserError

    if not 0 < seconds < 1e6:
        raise UserError(f"--seconds {seconds:g}: say how long to test, such as 30")
    need_jax()
    from drumline.cli.connect import echo_json
    from drumline.health.burnin import burn_in

    try:
        report = burn_in(seconds=seconds)
    except RuntimeError as trouble:
        # Chips that another program holds, or whose memory is full, are not bad chips.
        said = (str(trouble).splitlines() or [type(trouble).__name__])[0]
        raise UserError(f"the chips could not be tested: {said[:300]}") from None
    if as_json:
        echo_json(report.as_dict())
    else:
        _show(report)
    raise typer.Exit(1 if report.verdict == "fail" else 0)


def _show(report: "BurnIn") -> None:
    from drumline.cli.connect import coloured
    from drumline.cli.rendering.table import table_lines
    from drumline.cli.rendering.text import count, harmless

    kinds = ", ".join(sorted({chip.kind for chip in report.devices}))
    counted = f"{count(len(report.devices), 'chip')} ({kinds})"
    typer.echo(f"{counted} · {count(len(report.hosts), 'host')} · {report.seconds:.0f} s")

    def paint(column: int, cell: str) -> str:
        verdict = cell.strip().lower()
        if column != 1 or verdict not in COLOURS or not coloured():
            return cell
        return typer.style(cell, fg=COLOURS[verdict])

    heading, *lines = table_lines(
        ["CHIP", "", *COLUMNS.values()], [_row(chip) for chip in report.devices], paint=paint
    )
    typer.secho(heading, bold=True)
    for line in lines:
        typer.echo(line)
    for sentence in _remarks(report):
        typer.echo(harmless(sentence))
    typer.secho(harmless(report.said), bold=True)


def _row(chip: "ChipHealth") -> list[str]:
    verdict = chip.verdict.upper() if chip.verdict == "fail" else chip.verdict
    tests = [_cell(chip.tests[test]) if test in chip.tests else "–" for test in COLUMNS]
    return [f"{chip.id} on host {chip.host}", verdict, *tests]


def _cell(test: "CheckOutcome") -> str:
    """The rate beside the catalogue's, or the verdict where there is no rate."""
    rate, unit = (test.tflops, "TFLOP/s") if test.tflops else (test.gb_per_s, "GB/s")
    if test.verdict == "pass" and test.seconds is None:
        return "–"
    if not rate:
        shown = "ok"
    elif test.peak and test.share is not None:
        shown = f"{rate:,.0f} of {test.peak:,.0f} {unit}, {test.share:.0%}"
    else:
        shown = f"{rate:.3g} {unit}"
    return (
        shown if test.verdict == "pass" else f"{test.verdict.upper()} {shown}".removesuffix(" ok")
    )


def _remarks(report: "BurnIn") -> list[str]:
    """What is wrong, a line each, but for what the sentence that ends the report says."""
    places: list[tuple[str, ChipHealth | HostHealth]] = [
        *((f"chip {chip.id} on host {chip.host}", chip) for chip in report.devices),
        *((f"host {host.host}", host) for host in report.hosts),
    ]
    warned = [
        f"{who}: {test.said}"
        for who, place in places
        for test in place.tests.values()
        if test.verdict == "warn"
    ]
    accused = [one.sentence.removeprefix("drumline: ") for one in report.accusations[1:]]
    return accused + (warned if report.accusations else warned[1:])
