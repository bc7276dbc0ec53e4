"""`drumline init`: write the settings for a Google Cloud project, and check the login.

On a terminal, it asks for missing options. Unknown settings are kept.
"""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drumline.cli.connect import confirm, echo_json, echo_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

# Project ids of Google Cloud: 6 to 30 characters, starting with a letter, after an optional domain.
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")


def init(
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
    """Write the settings for Google Cloud and check the login."""
    from drumline.jobs.client import Refused
    from drumline.jobs.connection import home_folder

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
    first = "examples/quickstart.yaml" if local else "job.yaml --dry-run"
    return [*lines, f"next: drumline create {first}"]
