"""`drumline emulator`: the cloud on this machine, and controls that a real cloud does not have."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from drumline.cli.rendering.table import print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

MISTAKE = 2
NONE_RUNS = "no emulator is running; drumline create starts one"

app = typer.Typer(
    help="The cloud on this machine: preempt, break, run out of chips.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _home() -> Path:
    # An emulated host knows its emulator, as a TPU VM knows its metadata server.
    if here := os.environ.get("DRUMLINE_EMULATOR"):
        return Path(here)
    return Path(os.environ.get("DRUMLINE_HOME", "~/.drumline")).expanduser() / "emulator"


def _url() -> str | None:
    from drumline.cloud.emulator.launch import endpoint

    return endpoint(_home())


def _fail(sentence: str) -> NoReturn:
    typer.echo(sentence, err=True)
    raise typer.Exit(MISTAKE)


def _control(verb: str, **given: Any) -> dict[str, Any]:
    from drumline.cloud.emulator.launch import EmulatorError, control

    if _url() is None:
        _fail(NONE_RUNS)
    try:
        return control(_home(), verb, **given)
    except EmulatorError as wrong:
        _fail(str(wrong))


@app.command()
def start(as_json: AsJson = False) -> None:
    """Start the emulator, or say where it runs."""
    from drumline.cloud.emulator.launch import EmulatorError, ensure_running, make_private

    try:
        if "DRUMLINE_EMULATOR" not in os.environ:
            make_private(_home().parent)
        url = ensure_running(_home())
    except EmulatorError as wrong:
        _fail(str(wrong))
    typer.echo(json.dumps({"url": url, "home": str(_home())}) if as_json else f"running at {url}")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show whether it runs, what it holds, how it misbehaves."""
    url = _url()
    if url is None:
        if as_json:
            typer.echo(json.dumps({"running": False}))
        else:
            typer.echo(NONE_RUNS, err=True)
        raise typer.Exit(1)
    found = _control("status")
    if as_json:
        typer.echo(json.dumps({"running": True, "url": url, **found}, indent=2))
        return
    typer.echo(f"running at {url}, process {found['pid']}, home {found['home']}")
    held = ", ".join(
        f"{found[what]} {what if found[what] != 1 else what[:-1]}"
        for what in ("requests", "nodes", "hosts")
    )
    typer.echo(f"holds {held}; {found['total']} API calls since it started")
    for zone, pools in sorted(found["capacity"].items()):
        for name, chips in sorted(pools.items()):
            typer.echo(f"capacity of {name} in {zone}: {chips} chips")
    for line in _faults_in_words(found["faults"]):
        typer.echo(line)
    for machine in found["machines"]:
        broken = ", ".join(map(_breakage_in_words, machine["faults"]))
        typer.echo(f"machine {machine['name']}{_whose(machine)}: {broken}")


@app.command()
def stop(as_json: AsJson = False) -> None:
    """Stop the emulator and every host it has."""
    from drumline.cloud.emulator.launch import EmulatorError
    from drumline.cloud.emulator.launch import stop as stop_it

    try:
        stopped = stop_it(_home())
    except EmulatorError as wrong:
        _fail(str(wrong))
    if not stopped:
        _fail(NONE_RUNS)
    typer.echo(json.dumps({"stopped": True}) if as_json else "stopped")


@app.command()
def resources(as_json: AsJson = False) -> None:
    """List every request, node and host it holds."""
    found = _control("resources")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    rows = [
        [
            kind,
            resource["name"],
            resource["zone"],
            resource["accelerator"],
            resource["tier"],
            resource["state"],
            "",
            "",
        ]
        for kind, many in (("request", found["requests"]), ("node", found["nodes"]))
        for resource in many
    ]
    for host in found["hosts"]:
        name, address = f"{host['node']}/{host['index']}", f"{host['ip']}:{host['port']}"
        rows.append(["host", name, "", "", "", "", address, host["machine"]])
    if rows:
        titles = ["KIND", "NAME", "ZONE", "ACCELERATOR", "TIER", "STATE", "SSH", "MACHINE"]
        print_table(titles, rows)
    else:
        typer.echo("nothing")


@app.command()
def preempt(
    target: Annotated[str, typer.Argument(help="A node, a request, or a job such as 000012.")],
    notice: Annotated[
        float,
        typer.Option(
            min=0, max=86_400, help="Seconds until it happens, from SIGTERM to its programs."
        ),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Take a slice away, as the cloud does."""
    done = _control("preempt", target=target, notice=notice)
    when = f" in {notice:g} s" if notice else ""
    if as_json:
        typer.echo(json.dumps(done))
        return
    typer.echo(f"{done['preempted']} is preempted{when}")


@app.command()
def capacity(
    zone: Annotated[str, typer.Argument(help="Such as local-a.")],
    accelerator: Annotated[str, typer.Argument(help="v4 for all of them, v4-8 for that size.")],
    chips: Annotated[str, typer.Argument(help="How many chips there are; or unlimited.")],
    as_json: AsJson = False,
) -> None:
    """Set how many chips a zone has. What runs already goes on."""
    if chips != "unlimited" and not (chips.isascii() and chips.isdecimal() and len(chips) <= 9):
        _fail(f"{chips!r} is no number of chips; give one such as 16, or unlimited")
    number = None if chips == "unlimited" else int(chips)
    done = _control("capacity", zone=zone, accelerator=accelerator, chips=number)
    if as_json:
        typer.echo(json.dumps(done))
        return
    shown = "unlimited" if number is None else f"{number} chips"
    typer.echo(f"capacity of {done['accelerator']} in {zone}: {shown}")


@app.command()
def faults(
    fail: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of calls that fail: 0.1.")
    ] = None,
    delay: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of calls that take longer.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="How much longer.")] = None,
    login: Annotated[str | None, typer.Option(help="ok or expired.")] = None,
    deny: Annotated[list[str] | None, typer.Option(help="A zone to be denied; repeatable.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="End all faults first.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make the API misbehave, or behave again, or show how it does."""
    given = {"fail": fail, "delay": delay, "seconds": seconds, "login": login, "deny": deny or None}
    wanted = {key: value for key, value in given.items() if value is not None}
    done = _control("faults", **wanted, **({"clear": True} if clear else {}))
    if as_json:
        typer.echo(json.dumps(done))
        return
    for line in _faults_in_words(done) or ["no faults"]:
        typer.echo(line)


@app.command("break")
def break_host(
    target: Annotated[
        str,
        typer.Argument(
            help="A job such as 000012, a node, a request, or a machine such as local-a-v4-4-0."
        ),
    ],
    host: Annotated[
        int | None, typer.Option(help="Which host of the slice; 0 unless given.")
    ] = None,
    how: Annotated[
        str,
        typer.Option(
            help="lies, nan, bad-link, missing-chip, slow, vfio, silent or reboot; heal mends."
        ),
    ] = "silent",
    from_step: Annotated[
        int | None, typer.Option(help="With lies and nan: the first step that goes wrong.")
    ] = None,
    chip: Annotated[
        int | None, typer.Option(help="Which chip of the host goes wrong; 0 unless given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Break a host, or the machine that it is on; or heal both."""
    done = _control("break", target=target, host=host, how=how, from_step=from_step, chip=chip)
    if as_json:
        typer.echo(json.dumps(done))
        return
    where = done["machine"] if done["node"] is None else f"{done['node']} host {done['host']}"
    typer.echo(f"{where}: {_breakage_in_words(done)}")


def _breakage_in_words(found: dict[str, Any]) -> str:
    """Such as `lies (chip 2, from step 30)`."""
    of = [f"chip {found['chip']}"] if found.get("chip") is not None else []
    of += [f"from step {found['from_step']}"] if found.get("from_step") else []
    return f"{found['how']} ({', '.join(of)})" if of else str(found["how"])


def _whose(machine: dict[str, Any]) -> str:
    if machine["node"] is None:
        return ", which no slice has now"
    return f", host {machine['host']} of {machine['node']}"


def _faults_in_words(found: dict[str, Any]) -> list[str]:
    return list(_each_fault(found))


def _each_fault(found: dict[str, Any]) -> "Iterator[str]":
    if found["fail"]:
        yield f"{found['fail']:.0%} of calls fail"
    if found["delay"]:
        yield f"{found['delay']:.0%} of calls take {found['seconds']:g} s longer"
    if found["login"] != "ok":
        yield "the login has expired"
    for zone in found["deny"]:
        yield f"{zone} is denied"
