"""`server stop --all` and `clean --home`: stop everything, and delete the files of a home."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from drumline.cli.connect import confirm, connect, echo_json, echo_lines, runnable
from drumline.cli.rendering.text import format_dollars, format_size, plural, sanitize
from drumline.cli.rendering.views import FINAL_STATUSES
from drumline.jobs.connection import home_folder

if TYPE_CHECKING:
    from drumline.jobs.uninstall import CloudSlice, HomePart

_DESCRIPTIONS = {
    "jobs": "records, events and metrics",
    "logs": "output of programs, log of the server",
    "outputs": "files of programs that were copied from hosts",
    "archives": "code that was sent to hosts",
    "buckets": "gs:// of the emulator",
    "emulator": "disks of its hosts, its log",
    "settings": "config.yaml, SSH key and host keys",
}
MAX_NAMES = 3


def stop_all(as_json: bool) -> None:
    """Stop the server and the emulator of this home. Exit with 1 if slices of Google remain."""
    from drumline.cloud.emulator import launch
    from drumline.jobs.uninstall import cloud_slices

    home = home_folder()
    client = connect(autostart=False)
    status = client.server_status()
    unfinished = (
        [job for job in client.list() if job["status"] not in FINAL_STATUSES] if status else []
    )
    server = status["pid"] if client.stop_server() and status else None
    emulator, hosts = _stop_emulator(home / "emulator")
    if server is not None:
        launch.wait_for_exit([server])
    slices = cloud_slices(home)
    if as_json:
        remaining = [vars(cloud_slice) for cloud_slice in slices]
        echo_json({"server": server, "emulator": emulator, "hosts": hosts, "slices": remaining})
    else:
        lines = [f"stopped the server, process {server}"] if server else []
        if emulator:
            with_hosts = f", and its {plural(hosts, 'host')}" if hosts else ""
            lines.append(f"stopped the emulator, process {emulator}{with_hosts}")
        if unfinished:
            count = plural(len(unfinished), "unfinished job")
            lines.append(f"{count} will continue when a command starts the server again")
        echo_lines([*(lines or [f"nothing runs in {home}"]), *_render_slices(slices)])
    if slices:
        raise typer.Exit(1)


def _stop_emulator(home: Path) -> tuple[int | None, int]:
    """Stop an emulator. Return its process, None if none ran, and the number of its hosts."""
    from drumline.cloud.emulator import launch

    access, hosts = launch.find(home), 0
    try:
        if access:
            hosts = int(launch.control(home, "status")["hosts"])
    except launch.EmulatorError:
        pass  # it hangs, and `stop` kills it
    stopped = launch.stop(home)
    return (access.pid if access else 0) if stopped else None, hosts


def _render_slices(slices: "Sequence[CloudSlice]") -> list[str]:
    """Return a line for each slice of Google Cloud, and how to release them."""
    if not slices:
        return []
    lines = ["! these slices of Google Cloud may still run and cost money:"]
    for cloud_slice in slices:
        rate = f", about {format_dollars(cloud_slice.rate)} an hour" if cloud_slice.rate else ""
        text = f"  {cloud_slice.name}  {cloud_slice.accelerator} in {cloud_slice.zone}{rate}"
        lines.append(sanitize(f"{text}, job {cloud_slice.job}"))
    jobs = " ".join(dict.fromkeys(cloud_slice.job for cloud_slice in slices))
    return [*lines, runnable(f"release them with: drumline delete {jobs}")]


def clean_home(yes: bool, as_json: bool, dry_run: bool) -> None:
    """Show the files of this home by kind, ask, and delete them."""
    from drumline.errors import UserError
    from drumline.jobs import uninstall

    home = home_folder()
    if not home.is_dir():
        echo_json({"home": str(home), "parts": []}) if as_json else typer.echo(
            f"there is no folder {home}; nothing to delete"
        )
        return
    with uninstall.unused(home):
        if slices := uninstall.cloud_slices(home):
            raise UserError("\n".join([*_render_slices(slices), "nothing was deleted"]))
        parts, others = uninstall.home_parts(home)
        checkpoints = uninstall.outside_checkpoints(home)
        if as_json:
            listed = [{"kind": part.kind, "bytes": part.bytes} for part in parts]
            kept = {"others": [str(path) for path in others], "checkpoints": checkpoints}
            echo_json({"home": str(home), "parts": listed, "kept": kept})
        elif not parts:
            typer.echo(f"no files of Drumline are in {home}; nothing to delete")
        else:
            count = uninstall.job_count(home)
            echo_lines(
                _render_home(home, count, parts, [path.name for path in others], checkpoints)
            )
        if dry_run or not parts:
            return
        confirm("clean --home", "This deletes these files. Continue?", yes)
        try:
            uninstall.delete_parts(home, parts)
        except OSError as error:
            raise UserError(
                f"{error.filename or home} cannot be deleted: {error.strerror};"
                " other files are gone already"
            ) from None
    if not as_json:
        size = format_size(sum(part.bytes for part in parts))
        typer.echo(f"deleted {size}; to remove the program: pip uninstall drumline")


def _render_home(
    home: Path,
    jobs: int,
    parts: "Sequence[HomePart]",
    others: Sequence[str],
    checkpoints: Sequence[str],
) -> list[str]:
    """Return the sizes of a home by kind, and what is not deleted."""
    lines = [f"{home}: {plural(jobs, 'job')}, {format_size(sum(part.bytes for part in parts))}"]
    for part in parts:
        text = _DESCRIPTIONS[part.kind]
        if part.kind == "buckets":
            names = [path.name for path in sorted(part.paths[0].iterdir())]
            text += f", with the checkpoints there: {_join(names)}" if names else ""
        lines.append(sanitize(f"  {part.kind:9} {format_size(part.bytes):>8}  {text}"))
    if others:
        lines.append(sanitize(f"not deleted: {_join(others)} in this folder"))
    if checkpoints:
        lines.append(sanitize(f"not deleted: checkpoints in {_join(checkpoints)}"))
    return lines


def _join(names: Sequence[str]) -> str:
    more = [f"{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    return ", ".join([*names[:MAX_NAMES], *more])
