"""`drumline hosts`: list, exclude and forgive the hosts of the host history."""

import time
from typing import Annotated, Any

import typer

from drumline.cli.connect import USER_ERROR, connect, echo_json, echo_lines
from drumline.cli.options import AsJson

app = typer.Typer(
    help="List the hosts of past slices; exclude or forgive one.",
    add_completion=False,
    rich_markup_mode=None,
)
Identity = Annotated[
    str, typer.Argument(metavar="HOST", help="A host as listed by drumline hosts.")
]
_MAX_DIGITS = 9
_UNITS = {"m": 60, "h": 3600, "d": 86_400}


@app.callback(invoke_without_command=True)
def hosts(context: typer.Context, as_json: AsJson = False) -> None:
    """List the hosts of past slices with the evidence against them."""
    if context.invoked_subcommand is not None:
        return
    from drumline.cli.rendering.text import print_table

    listing = connect().known_hosts()
    if as_json:
        echo_json(listing)
        return
    if not listing:
        typer.echo("there are no hosts yet; the hosts of a slice are listed when it is ready")
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
            for host in listing
        ],
    )
    if any(host["state"] != "good" for host in listing):
        typer.echo("\nnext: drumline hosts show HOST · drumline hosts forgive HOST")


@app.command()
def show(identity: Identity, as_json: AsJson = False) -> None:
    """Show one host with all evidence."""
    from drumline.cli.rendering.text import format_time, plural, sanitize

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
        f"seen       {plural(host['times_seen'], 'time')}, the last {_ago(host['when'], now)}"
        + (f", by job {host['job']}" if host["job"] else ""),
    ]
    for item in host["evidence"]:
        job = f" job {item['job']} attempt {item['attempt']}" if item["job"] else ""
        note = "" if item["held_against"] else " (does not count)"
        lines.append(f"{format_time(item['at'], now)}  {item['proof']}{job}: {item['text']}{note}")
    echo_lines([sanitize(line) for line in lines])


@app.command()
def exclude(
    identity: Identity,
    why: Annotated[str, typer.Option("--why", help="The reason, for others to read.")] = "",
    for_: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="12h or 7d [default: until forgiven]."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Reject a host from now on."""
    host = connect().exclude_host(identity, why, None if for_ is None else _seconds(for_))
    echo_json(host) if as_json else typer.echo(f"{identity} is excluded")


@app.command()
def forgive(identity: Identity, as_json: AsJson = False) -> None:
    """Discard all evidence against a host."""
    host = connect().forgive_host(identity)
    echo_json(host) if as_json else typer.echo(f"{identity} is good again")


def _seconds(text: str) -> float:
    digits, unit = text[:-1], text[-1:]
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS
    if unit not in _UNITS or not is_number or int(digits) == 0:
        typer.echo(f"--for: {text!r} is not a duration; write 30m, 12h or 7d", err=True)
        raise typer.Exit(USER_ERROR)
    return float(int(digits) * _UNITS[unit])


def _ago(at: float, now: float) -> str:
    from drumline.cli.rendering.text import format_duration

    return f"{format_duration(now - at)} ago"


def _until(host: dict[str, Any], now: float) -> str:
    from drumline.cli.rendering.text import format_duration

    if host["state"] == "good":
        return ""
    return "forgiven" if host["expires"] is None else f"in {format_duration(host['expires'] - now)}"
