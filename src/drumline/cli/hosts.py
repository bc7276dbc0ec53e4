"""`drumline hosts`: what is known of the hosts that jobs have met."""

import time
from typing import Annotated, Any

import typer

from drumline.cli.connect import MISTAKE, connect, echo_json, echo_lines
from drumline.cli.options import AsJson

app = typer.Typer(
    help="List hosts that jobs have met; exclude or forgive.",
    add_completion=False,
    rich_markup_mode=None,
)
Identity = Annotated[str, typer.Argument(metavar="HOST", help="As drumline hosts lists it.")]
_MOST_DIGITS = 9
_UNITS = {"m": 60, "h": 3600, "d": 86_400}


@app.callback(invoke_without_command=True)
def hosts(context: typer.Context, as_json: AsJson = False) -> None:
    """List the hosts that jobs have met, with their past."""
    if context.invoked_subcommand is not None:
        return
    from drumline.cli.rendering.table import print_table

    found = connect().known_hosts()
    if as_json:
        echo_json(found)
        return
    if not found:
        typer.echo("no host was met yet: a job's hosts are listed once it has a slice")
        return
    now = time.time()
    print_table(
        ["HOST", "STATE", "SEEN", "JOB", "UNTIL", "WHY"],
        [
            [
                host["identity"],
                host["state"],
                _ago(host["when"], now),
                host["job"],
                _until(host, now),
                host["why"][:80],
            ]
            for host in found
        ],
    )
    if any(host["state"] != "good" for host in found):
        typer.echo("\nnext: drumline hosts show HOST · drumline hosts forgive HOST")


@app.command()
def show(identity: Identity, as_json: AsJson = False) -> None:
    """Show one host: what it is known by, and all evidence."""
    from drumline.cli.rendering.text import clock, count, harmless

    host = connect().known_host(identity)
    if as_json:
        echo_json(host)
        return
    now = time.time()
    until = _until(host, now)
    lines = [
        f"{host['identity']}  {host['state']}" + (f", until {until}" if until else ""),
        f"known by   its {host['strength']}",
        f"last in    {host['zone'] or 'no zone'}, {host['accelerator'] or 'no slice'}",
        f"seen       {count(host['times_seen'], 'time')}, the last {_ago(host['when'], now)}"
        + (f", by job {host['job']}" if host["job"] else ""),
    ]
    for each in host["evidence"]:
        job = f" job {each['job']} attempt {each['attempt']}" if each["job"] else ""
        kept = "" if each["held_against"] else " (not held against it)"
        lines.append(f"{clock(each['at'], now)}  {each['proof']}{job}: {each['text']}{kept}")
    echo_lines([harmless(line) for line in lines])


@app.command()
def exclude(
    identity: Identity,
    why: Annotated[str, typer.Option("--why", help="For whoever reads it later.")] = "",
    for_: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="12h or 7d; without it, until forgiven."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a host from now on, whatever its chips say."""
    host = connect().exclude_host(identity, why, None if for_ is None else _seconds(for_))
    echo_json(host) if as_json else typer.echo(f"{identity} is excluded")


@app.command()
def forgive(identity: Identity, as_json: AsJson = False) -> None:
    """Hold nothing against a host any longer."""
    host = connect().forgive_host(identity)
    echo_json(host) if as_json else typer.echo(f"{identity} is good again")


def _seconds(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    digits = number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS
    if unit not in _UNITS or not digits or int(number) == 0:
        typer.echo(f"--for: {text!r} is no length of time; write 30m, 12h or 7d", err=True)
        raise typer.Exit(MISTAKE)
    return float(int(number) * _UNITS[unit])


def _ago(moment: float, now: float) -> str:
    from drumline.cli.rendering.text import duration

    return f"{duration(now - moment)} ago"


def _until(host: dict[str, Any], now: float) -> str:
    from drumline.cli.rendering.text import duration

    if host["state"] == "good":
        return ""
    return "forgiven" if host["expires"] is None else f"in {duration(host['expires'] - now)}"
