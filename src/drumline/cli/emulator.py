"""`drumline emulator`: the emulated cloud on this machine, and its fault injection."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from drumline.cli.connect import USER_ERROR
from drumline.cli.options import AsJson
from drumline.cli.rendering.text import plural, print_table, sanitize
from drumline.jobs.connection import home_folder

MISTAKE = 2
NOT_RUNNING = "no emulator is running; drumline create starts it"

app = typer.Typer(
    help="The emulated cloud: preempt slices, inject faults.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _home() -> Path:
    # An emulated host knows its emulator, as a TPU VM knows its metadata server.
    if folder := os.environ.get("DRUMLINE_EMULATOR"):
        return Path(folder)
    return home_folder() / "emulator"


def _url() -> str | None:
    from drumline.cloud.emulator.launch import endpoint

    return endpoint(_home())


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(USER_ERROR)


def _control(verb: str, **parameters: Any) -> dict[str, Any]:
    from drumline.cloud.emulator.launch import EmulatorError, control

    if _url() is None:
        _fail(_absence())
    _warn_of_version()
    try:
        return control(_home(), verb, **parameters)
    except EmulatorError as error:
        _fail(str(error))


def _absence() -> str:
    from drumline.cloud.emulator.launch import absence, is_running

    return absence(_home()) if is_running(_home()) else NOT_RUNNING


def _warn_of_version() -> None:
    from drumline.cloud.emulator.launch import version_warning

    if warning := version_warning(_home()):
        typer.echo(warning, err=True)


@app.command()
def start(as_json: AsJson = False) -> None:
    """Start the emulator, or show its address."""
    from drumline.cloud.emulator.launch import EmulatorError, ensure_running, make_private

    try:
        if "DRUMLINE_EMULATOR" not in os.environ:
            make_private(_home().parent)
        url = ensure_running(_home())
    except EmulatorError as error:
        _fail(str(error))
    _warn_of_version()
    typer.echo(json.dumps({"url": url, "home": str(_home())}) if as_json else f"running at {url}")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show the state, resources and faults of the emulator."""
    url = _url()
    if url is None:
        if as_json:
            typer.echo(json.dumps({"running": False}))
        else:
            typer.echo(_absence(), err=True)
        raise typer.Exit(1)
    state = _control("status")
    if as_json:
        typer.echo(json.dumps({"running": True, "url": url, **state}, indent=2))
        return
    typer.echo(f"running at {url}, process {state['pid']}, home {state['home']}")
    kinds = {"request": "requests", "node": "nodes", "host": "hosts"}
    resources = ", ".join(plural(state[key], noun) for noun, key in kinds.items())
    typer.echo(f"{resources}; {state['total']} API calls since the start")
    for zone, pools in sorted(state["capacity"].items()):
        for name, chips in sorted(pools.items()):
            typer.echo(f"capacity of {name} in {zone}: {chips} chips")
    for line in _describe_faults(state["faults"]):
        typer.echo(line)
    for machine in state["machines"]:
        machine_faults = ", ".join(map(_describe_fault, machine["faults"]))
        typer.echo(f"machine {machine['name']}{_user_of(machine)}: {machine_faults}")


@app.command()
def stop(as_json: AsJson = False) -> None:
    """Stop the emulator and its hosts."""
    from drumline.cloud.emulator.launch import EmulatorError
    from drumline.cloud.emulator.launch import stop as stop_emulator

    try:
        stopped = stop_emulator(_home())
    except EmulatorError as error:
        _fail(str(error))
    if not stopped:
        _fail(NOT_RUNNING)
    typer.echo(json.dumps({"stopped": True}) if as_json else "stopped")


@app.command()
def resources(as_json: AsJson = False) -> None:
    """List all requests, nodes and hosts."""
    listing = _control("resources")
    if as_json:
        typer.echo(json.dumps(listing, indent=2))
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
        for kind, group in (("request", listing["requests"]), ("node", listing["nodes"]))
        for resource in group
    ]
    for host in listing["hosts"]:
        name, address = f"{host['node']}/{host['index']}", f"{host['ip']}:{host['port']}"
        rows.append(["host", name, "", "", "", "", address, host["machine"]])
    if rows:
        titles = ["KIND", "NAME", "ZONE", "ACCELERATOR", "TIER", "STATE", "SSH", "MACHINE"]
        print_table(titles, rows)
    else:
        typer.echo("no resources")


@app.command()
def preempt(
    target: Annotated[str, typer.Argument(help="A node, a request, or a job: 000012 or its name.")],
    notice: Annotated[
        float,
        typer.Option(
            min=0, max=86_400, help="Seconds between SIGTERM to the programs and the preemption."
        ),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Preempt a slice."""
    result = _control("preempt", target=_job_or_resource(target), notice=notice)
    delay = f" in {notice:g} s" if notice else ""
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(f"{result['preempted']} is preempted{delay}")


@app.command()
def capacity(
    zone: Annotated[str, typer.Argument(help="Such as local-a.")],
    accelerator: Annotated[str, typer.Argument(help="v4 for all slices, v4-8 for one size.")],
    chips: Annotated[str, typer.Argument(help="The number of chips, or unlimited.")],
    as_json: AsJson = False,
) -> None:
    """Set the number of chips in a zone; running slices stay."""
    if chips != "unlimited" and not (chips.isascii() and chips.isdecimal() and len(chips) <= 9):
        _fail(f"{chips!r} is not a number of chips; expected a number such as 16, or unlimited")
    chip_count = None if chips == "unlimited" else int(chips)
    result = _control("capacity", zone=zone, accelerator=accelerator, chips=chip_count)
    if as_json:
        typer.echo(json.dumps(result))
        return
    amount = "unlimited" if chip_count is None else f"{chip_count} chips"
    typer.echo(f"capacity of {result['accelerator']} in {zone}: {amount}")


@app.command()
def faults(
    fail: Annotated[
        float | None, typer.Option(min=0, max=1, help="Fraction of calls that fail, such as 0.1.")
    ] = None,
    delay: Annotated[
        float | None, typer.Option(min=0, max=1, help="Fraction of calls that are delayed.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="The delay in seconds.")] = None,
    login: Annotated[str | None, typer.Option(help="The login: ok or expired.")] = None,
    deny: Annotated[list[str] | None, typer.Option(help="A zone to deny; repeatable.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all faults first.")] = False,
    as_json: AsJson = False,
) -> None:
    """Inject faults into the API, remove them, or show them."""
    options = {
        "fail": fail,
        "delay": delay,
        "seconds": seconds,
        "login": login,
        "deny": deny or None,
    }
    faults = {key: value for key, value in options.items() if value is not None}
    result = _control("faults", **faults, **({"clear": True} if clear else {}))
    if as_json:
        typer.echo(json.dumps(result))
        return
    for line in _describe_faults(result) or ["no faults"]:
        typer.echo(line)


@app.command("break")
def break_host(
    target: Annotated[
        str,
        typer.Argument(
            help="A job (its id or name), a node, a request, or a machine such as local-a-v4-4-0."
        ),
    ],
    host: Annotated[
        int | None, typer.Option(help="A host index of the slice [default: 0].")
    ] = None,
    how: Annotated[
        str,
        typer.Option(
            help="lies, nan, bad-link, missing-chip, slow, vfio, silent or reboot; or heal."
        ),
    ] = "silent",
    from_step: Annotated[
        int | None, typer.Option(help="The first wrong step, for lies and nan.")
    ] = None,
    chip: Annotated[int | None, typer.Option(help="The chip of the host [default: 0].")] = None,
    as_json: AsJson = False,
) -> None:
    """Inject a fault into a host or its machine, or heal both."""
    fields = {"host": host, "how": how, "from_step": from_step, "chip": chip}
    result = _control("break", target=_job_or_resource(target), **fields)
    if as_json:
        typer.echo(json.dumps(result))
        return
    name = result["machine"]
    if result["node"] is not None:
        name = f"{result['node']} host {result['host']}"
    typer.echo(f"{name}: {_describe_fault(result)}")


def _job_or_resource(target: str) -> str:
    """Return the id of the job with this name. Other targets are resolved by the emulator.

    If several jobs have the name, the only one that has not ended is meant. Fail if the job has
    ended and holds no slice.
    """
    from drumline.cli.connect import connect
    from drumline.jobs.client import NoServer, Refused

    client = connect(autostart=False)
    is_id = target.isascii() and target.isdigit()
    try:
        if is_id:
            jobs = [client.show(target)]
        else:
            jobs = [job for job in client.list(all=True, name=target) if job["name"] == target]
    except NoServer:
        return target  # an emulator without jobs, or on a host of another home
    except Refused:
        if is_id:
            return target  # perhaps a job of another home that uses the same emulator
        raise
    active = [job for job in jobs if job["ended"] is None]
    if len(jobs) > 1 and len(active) != 1:
        client.ids(target)  # fails, and names the jobs
    for job in active or jobs:
        if job["ended"] is not None and not job["chips_held"]:
            _fail(sanitize(f"{job['id']} {job['name']} is {job['status']} and holds no slice"))
        return str(job["id"])
    return target


def _describe_fault(fault: dict[str, Any]) -> str:
    """Return a description such as `lies (chip 2, from step 30)`."""
    details = [f"chip {fault['chip']}"] if fault.get("chip") is not None else []
    details += [f"from step {fault['from_step']}"] if fault.get("from_step") else []
    return f"{fault['how']} ({', '.join(details)})" if details else str(fault["how"])


def _user_of(machine: dict[str, Any]) -> str:
    if machine["node"] is None:
        return ", not in use"
    return f", host {machine['host']} of {machine['node']}"


def _describe_faults(faults: dict[str, Any]) -> list[str]:
    lines = []
    if faults["fail"]:
        lines.append(f"{faults['fail']:.0%} of calls fail")
    if faults["delay"]:
        lines.append(f"{faults['delay']:.0%} of calls are delayed by {faults['seconds']:g} s")
    if faults["login"] != "ok":
        lines.append("the login has expired")
    lines += [f"{zone} is denied" for zone in faults["deny"]]
    return lines
