"""`drumline init`: write the settings for a Google Cloud project, and check the login.

On a terminal, it asks for missing options. Unknown settings are kept. With `--example`, it writes
a program and its job file instead.
"""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drumline.cli.connect import confirm, echo_json, echo_lines, runnable

if TYPE_CHECKING:
    from collections.abc import Sequence

# Project ids of Google Cloud: 6 to 30 characters, starting with a letter, after an optional domain.
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")


EXAMPLE = Path(__file__).parents[1] / "example"
"""The folder with the files of `--example`. docs/own-model.md shows the same program."""


def init(
    folder: Annotated[
        Path | None, typer.Argument(help="The folder of --example [default: example].")
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Write an example program and its job file.")
    ] = False,
    project: Annotated[
        str | None, typer.Option("--project", help="The Google Cloud project.")
    ] = None,
    zones: Annotated[
        str | None,
        typer.Option(
            "--zones", metavar="ZONE,...", help="Zones with quota, in order of preference."
        ),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            "--quota",
            metavar="TEXT",
            help="'64 spot v6e chips in europe-west4-a'; create warns beyond it. Repeatable.",
        ),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Use the emulator on this machine, without an account.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Replace settings, or probe, without confirmation."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Request a small slice, log in to it, and delete it."),
    ] = False,
    zone: Annotated[
        str | None, typer.Option("--zone", help="The zone of the probe [default: the first].")
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option("--accelerator", help="The slice of the probe [default: the smallest]."),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option("--capacity", help="Its tier [default: that of your quota, else spot]."),
    ] = None,
) -> None:
    """Write the settings for Google Cloud, or an example job."""
    from drumline.jobs.client import Refused
    from drumline.jobs.connection import home_folder

    if example:
        if project or zones or quota or local or probe or zone or accelerator or capacity:
            raise Refused("--example writes no settings; leave out the other options")
        _write_example(folder or Path("example"), as_json)
        return
    if folder:
        raise Refused(f"{folder}: a folder is for the example; add --example")
    if not probe and (zone or accelerator or capacity):
        raise Refused("--zone, --accelerator and --capacity are for a probe; add --probe")
    if probe:
        if as_json:
            raise Refused("--probe prints no JSON; its report is a file")
        if project or zones or quota or local:
            raise Refused("--probe uses the saved settings; run drumline init without it first")
        from drumline.cli.probe import run_probe

        raise typer.Exit(0 if run_probe(zone, accelerator, capacity, yes) else 1)
    path = home_folder() / "config.yaml"
    before = _read(path)
    settings = {"cloud": "emulator"} if local else _google_settings(project, zones, quota, before)
    replaced = {} if local else before
    after = {key: value for key, value in before.items() if key not in _KEYS} | settings
    changed = {key for key in _KEYS if key in replaced and replaced[key] != after.get(key)}
    if changed or (local and before.get("cloud") == "google"):
        question = f"{path} has settings: {_summary(before)}. This replaces them. Continue?"
        confirm("init", question, yes)
    _write(path, after)
    if as_json:
        login = None if local else _check_login()
        echo_json({"file": str(path), "settings": after, "login": login})
        return
    lines = [f"wrote {path}", *(f"  {line}" for line in _yaml(after).splitlines())]
    if not local:
        lines.append(_check_login())
    echo_lines([*lines, *_next_steps(local)])


def _write_example(folder: Path, as_json: bool) -> None:
    """Write the files of the example into a folder, and replace none."""
    from shlex import quote

    from drumline.jobs.client import Refused
    from drumline.jobs.connection import home_folder
    from drumline.train import missing_packages_message

    if folder.exists() and not folder.is_dir():
        raise Refused(f"{folder} is not a folder; no example was written")
    names = sorted(path.name for path in EXAMPLE.iterdir() if path.is_file())
    if existing := [name for name in names if os.path.lexists(folder / name)]:
        raise Refused(
            f"{folder / existing[0]} exists, and nothing was written; name another folder:"
            " drumline init --example FOLDER"
        )
    try:
        _copy_example(folder, names)
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}; no example was written") from None
    missing = missing_packages_message()
    if as_json:
        echo_json({"folder": str(folder), "files": names, "missing": missing})
        return
    lines = [f"wrote {folder / name}" for name in names]
    if missing:
        lines.append(f"! {missing}")
    settings = _read(home_folder() / "config.yaml")
    if settings.get("cloud") == "google":
        lines.append(
            f"! jobs run on Google Cloud, project {settings.get('project')}, and cost money;"
            " drumline init --local selects the emulator"
        )
    job = quote(str(folder / "job.yaml"))
    echo_lines([*lines, runnable(f"next: drumline create {job} --follow")])


def _copy_example(folder: Path, names: "Sequence[str]") -> None:
    """Copy the files, or remove those already written if one cannot be."""
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            with open(folder / name, "xb") as file:
                written.append(folder / name)
                file.write((EXAMPLE / name).read_bytes())
        # With a umask of 077 `create` would leave the files out, because they look private.
        for path in (*new_folders[:1], *written):
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    except OSError:
        for path in written:
            path.unlink()
        for path in new_folders:
            with suppress(OSError):
                path.rmdir()
        raise


_KEYS = ("cloud", "project", "zones", "quota")


def _google_settings(
    project: str | None, zones: str | None, quota: "Sequence[str] | None", before: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings for Google Cloud, from options, answers and the previous settings."""
    from drumline.chips import region_of
    from drumline.jobs.client import Refused

    interactive = sys.stdin.isatty()
    if project is None:
        default = before.get("project") or os.environ.get("GOOGLE_CLOUD_PROJECT")
        project = typer.prompt("project", default=default) if interactive else default
    if not project:
        raise Refused("no project: use drumline init --project ID, or --local without an account")
    if not _PROJECT.fullmatch(project):
        raise Refused(
            f"--project: {project!r} is not a project id; list yours with: gcloud projects list"
        )
    grants = list(quota or before.get("quota") or [])
    from_quota = [_grant_zone(grant) for grant in grants]
    if zones is None:
        default = ",".join(before.get("zones") or dict.fromkeys(from_quota))
        zones = (
            typer.prompt("zones with quota", default=default or None) if interactive else default
        )
    named = [zone.strip() for zone in (zones or "").split(",") if zone.strip()]
    if not named:
        raise Refused("no zones: use drumline init --zones us-central2-b,europe-west4-a")
    for zone in named:
        region_of(zone)  # raises if the zone does not exist
    settings = {"cloud": "google", "project": project, "zones": list(dict.fromkeys(named))}
    return settings | ({"quota": grants} if grants else {})


def _grant_zone(grant: str) -> str:
    from drumline.jobs.billing import parse_grant
    from drumline.jobs.client import Refused

    try:
        return parse_grant(grant).zone
    except ValueError as error:
        raise Refused(f"--quota: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    import yaml

    from drumline.jobs.client import Refused

    try:
        settings = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise Refused(f"{path} cannot be read; correct or remove it: {reason}") from None
    return settings if isinstance(settings, dict) else {}


def _yaml(settings: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    return text


def _summary(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {settings[key]}" for key in _KEYS if key in settings)


def _write(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings atomically, readable only by their owner."""
    path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    path.parent.chmod(0o700)
    temporary = path.with_suffix(".yaml.new")
    with open(temporary, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(_yaml(settings))
    temporary.replace(path)


def _check_login() -> str:
    """Get an access token with the credentials of this machine. Return a line with the result."""
    import asyncio

    from drumline.cloud.google.credentials import GoogleCredentials
    from drumline.cloud.protocol import CloudError

    try:
        asyncio.run(GoogleCredentials().token())
    except CloudError as error:
        return f"! credentials: {error}"
    return "✓ credentials: received an access token"


def _next_steps(local: bool) -> list[str]:
    """Return hints about the running server and the next command."""
    from drumline.jobs.client import Client

    lines = []
    if Client(autostart=False).server_status() is not None:
        lines.append(
            "a server is running with the previous settings; stop it with: drumline server stop"
        )
    command = "init --example" if local else "create job.yaml --dry-run"
    return [*lines, runnable(f"next: drumline {command}")]
