"""`drumline server`: the process behind the commands. They start it by themselves."""

import os
import time
from typing import Annotated, Any

import typer

from drumline.cli.connect import MISTAKE, confirm, connect, echo_json, echo_lines
from drumline.cli.jobs import AsJson, Yes

app = typer.Typer(
    help="The process behind the commands, which start it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def run() -> None:
    """Run the server in the foreground; it does not leave by itself."""
    from drumline.jobs.connection import SERVER_COMMAND

    command = (*SERVER_COMMAND, "--stay")
    os.execv(command[0], command)  # noqa: S606 - this process becomes the server


@app.command()
def status(as_json: AsJson = False) -> None:
    """Say whether a server runs, which, and when it leaves."""
    from drumline.cli.rendering.text import duration, harmless

    client = connect(autostart=False)
    found = client.server_status()
    if as_json:
        echo_json(found)
    elif found is None:
        typer.echo(f"no server runs in {client.home}; the next command that needs one starts it")
    else:
        cloud = "the emulator on this machine" if found["cloud"] == "emulator" else found["cloud"]
        typer.echo(f"server   version {found['version']}, pid {found['pid']}")
        typer.echo(f"up       {duration(time.time() - found['started'])}")
        typer.echo(f"home     {found['home']}")
        typer.echo(f"cloud    {cloud}")
        in_hand = f", {found['living']:,} in hand" if "living" in found else ""
        typer.echo(f"jobs     {found['jobs']:,}{in_hand}")
        typer.echo(f"leaves   {_leaves(found)}")
        for aside in found.get("unreadable") or ():
            typer.echo(harmless(f"! {aside['id']} cannot be read: {aside['reason']}"))
        if count := len(found.get("strays") or ()):
            slices = "1 slice" if count == 1 else f"{count} slices"
            typer.echo(f"! {slices} of a lost database; drumline server strays lists them")
    if found is None:
        raise typer.Exit(1)


@app.command()
def strays(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Slices; all by default.")
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="Release them.")] = False,
    adopt: Annotated[bool, typer.Option("--adopt", help="Give each to a new job.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """List slices of a lost job database; release or adopt them."""
    client = connect()
    if release and adopt:
        typer.echo("--release or --adopt, not both", err=True)
        raise typer.Exit(MISTAKE)
    found = client.strays()
    if not (release or adopt):
        echo_json(found) if as_json else echo_lines(_stray_lines(found))
        return
    chosen = [stray for stray in found["strays"] if not names or stray["name"] in names]
    if release and chosen:
        listing = "\n".join(_stray_line(stray) for stray in chosen)
        question = f"{listing}\nthis ends what runs there; another home may know of it. Go on?"
        confirm("release", question, yes)
    lines = client.settle_strays("release" if release else "adopt", names or ())
    echo_json({"text": lines}) if as_json else echo_lines(lines)


def _stray_lines(found: dict[str, Any]) -> list[str]:
    from drumline.cli.rendering.text import harmless

    lines = [_stray_line(stray) for stray in found["strays"]]
    if lines:
        lines.append("next: drumline server strays --release · drumline server strays --adopt")
    else:
        lines = ["no slice of a lost database was found"]
    return [
        *lines,
        *(f"! {zone} not seen: {harmless(why)}" for zone, why in found["not_seen"].items()),
    ]


def _stray_line(stray: dict[str, Any]) -> str:
    from drumline.cli.rendering.text import harmless

    was = f"job {stray['job']} of database {stray['owner']}"
    place = f"{stray['accelerator']} in {stray['zone']}"
    return harmless(f"{stray['name']}  {place}, {stray['state']}, {was}")


@app.command()
def stop(as_json: AsJson = False) -> None:
    """Stop the server; programs go on, but nobody watches over them."""
    client = connect(autostart=False)
    stopped = client.stop_server()
    if as_json:
        echo_json({"stopped": stopped})
    elif stopped:
        typer.echo(
            "server stopped; running programs go on, lost slices are replaced "
            "once the next command starts it again"
        )
    else:
        typer.echo(f"no server runs in {client.home}")


def _leaves(found: dict[str, Any]) -> str:
    """When the server exits by itself."""
    from drumline.cli.rendering.text import duration

    if found.get("stays"):
        return "not while a job lives or a slice is held"
    if found.get("leaves_in") is None:
        return "not by itself"
    return f"in {duration(found['leaves_in'])} if nothing is asked of it; a command starts it again"
