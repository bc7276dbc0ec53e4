"""`drumline server`: the process behind the commands. They start it by themselves."""

import os
import time
from typing import Any

import typer

from drumline.cli.connect import connect, echo_json
from drumline.cli.jobs import AsJson

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
    from drumline.jobs.caller import SERVER_COMMAND

    command = (*SERVER_COMMAND, "--stay")
    os.execv(command[0], command)  # noqa: S606 - this process becomes the server


@app.command()
def status(as_json: AsJson = False) -> None:
    """Say whether a server runs, which, and when it leaves."""
    from drumline.cli.text import duration

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
        typer.echo(f"jobs     {found['jobs']}")
        typer.echo(f"leaves   {_leaves(found)}")
    if found is None:
        raise typer.Exit(1)


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
    """When it ends by itself."""
    from drumline.cli.text import duration

    if found.get("stays"):
        return "not while a job lives or a slice is held"
    if found.get("leaves_in") is None:
        return "not by itself"
    return f"in {duration(found['leaves_in'])} if nothing is asked of it; a command starts it again"
