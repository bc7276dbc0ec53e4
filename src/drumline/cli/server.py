"""`drumline server`: the server process, which commands start when they need it."""

import os
import time
from typing import Annotated, Any

import typer

from drumline.cli.connect import USER_ERROR, confirm, connect, echo_json, echo_lines
from drumline.cli.options import AsJson, Yes

app = typer.Typer(
    help="Manage the server, which commands start by themselves.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def run() -> None:
    """Run the server in the foreground until it is stopped."""
    from drumline.jobs.connection import SERVER_COMMAND

    command = (*SERVER_COMMAND, "--stay")
    os.execv(command[0], command)  # noqa: S606 - this process becomes the server


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show the running server and when it exits."""
    from drumline.cli.rendering.text import format_duration, sanitize

    client = connect(autostart=False)
    server = client.server_status()
    if as_json:
        echo_json(server)
    elif server is None:
        typer.echo(f"no server is running in {client.home}; commands start it when they need it")
    else:
        cloud = "the emulator on this machine" if server["cloud"] == "emulator" else server["cloud"]
        typer.echo(f"server   version {server['version']}, pid {server['pid']}")
        typer.echo(f"up       {format_duration(time.time() - server['started'])}")
        typer.echo(f"home     {server['home']}")
        typer.echo(f"cloud    {cloud}")
        active = f", {server['living']:,} active" if "living" in server else ""
        typer.echo(f"jobs     {server['jobs']:,}{active}")
        typer.echo(f"exits    {_exit_time(server)}")
        for aside in server.get("unreadable") or ():
            typer.echo(sanitize(f"! {aside['id']} cannot be read: {aside['reason']}"))
        if count := len(server.get("strays") or ()):
            slices = "1 slice" if count == 1 else f"{count} slices"
            typer.echo(f"! {slices} of a lost database; drumline server strays lists them")
    if server is None:
        raise typer.Exit(1)


@app.command()
def strays(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Names of slices [default: all]."),
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="Release the slices.")] = False,
    adopt: Annotated[bool, typer.Option("--adopt", help="Give each slice to a new job.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """List, release or adopt the slices of a lost database."""
    client = connect()
    if release and adopt:
        typer.echo("--release and --adopt cannot be combined", err=True)
        raise typer.Exit(USER_ERROR)
    listing = client.strays()
    if not (release or adopt):
        echo_json(listing) if as_json else echo_lines(_render_orphans(listing))
        return
    orphans = [orphan for orphan in listing["strays"] if not names or orphan["name"] in names]
    if release and orphans:
        listed = "\n".join(_orphan_line(orphan) for orphan in orphans)
        question = (
            f"{listed}\nthis stops their programs; they may belong to another home. Continue?"
        )
        confirm("release", question, yes)
    lines = client.settle_strays("release" if release else "adopt", names or ())
    echo_json({"text": lines}) if as_json else echo_lines(lines)


def _render_orphans(listing: dict[str, Any]) -> list[str]:
    from drumline.cli.rendering.text import sanitize

    lines = [_orphan_line(orphan) for orphan in listing["strays"]]
    if lines:
        lines.append("next: drumline server strays --release · drumline server strays --adopt")
    else:
        lines = ["there are no slices of a lost database"]
    return [
        *lines,
        *(f"! {zone} not polled: {sanitize(why)}" for zone, why in listing["not_seen"].items()),
    ]


def _orphan_line(orphan: dict[str, Any]) -> str:
    from drumline.cli.rendering.text import sanitize

    origin = f"job {orphan['job']} of database {orphan['owner']}"
    slice_type = f"{orphan['accelerator']} in {orphan['zone']}"
    return sanitize(f"{orphan['name']}  {slice_type}, {orphan['state']}, {origin}")


@app.command()
def stop(
    every: Annotated[
        bool, typer.Option("--all", help="Also stop the emulator and its hosts.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop the server; programs keep running without supervision."""
    if every:
        from drumline.cli.uninstall import stop_all

        stop_all(as_json)
        return
    client = connect(autostart=False)
    stopped = client.stop_server()
    if as_json:
        echo_json({"stopped": stopped})
    elif stopped:
        typer.echo(
            "server stopped; programs keep running, and preempted slices are replaced "
            "after the next command has started it again"
        )
    else:
        typer.echo(f"no server is running in {client.home}")


def _exit_time(server: dict[str, Any]) -> str:
    """Describe when the server exits by itself."""
    from drumline.cli.rendering.text import format_duration

    if server.get("stays"):
        return "not while there are active jobs or slices"
    if server.get("leaves_in") is None:
        return "never"
    return f"in {format_duration(server['leaves_in'])} without calls; commands start it again"
