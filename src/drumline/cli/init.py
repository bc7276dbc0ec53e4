"""`drumline init`: write the settings for a Google project, and check that its login works.

Asks for what was not given, on a terminal only. Settings that it does not know are kept.
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

# Google's project ids: 6 to 30 characters, a letter first; old ids have a domain in front.
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")


def init(
    project: Annotated[str | None, typer.Option("--project", help="The Google project.")] = None,
    zones: Annotated[
        str | None,
        typer.Option("--zones", metavar="ZONE,...", help="Where you have quota, best first."),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            "--quota",
            metavar="TEXT",
            help="'64 spot v6e chips in europe-west4-a'; jobs beyond it are warned. Repeatable.",
        ),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="No account: slices come from the emulator here.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Replace settings unasked.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the settings for a Google project, check its login."""
    from drumline.jobs.connection import home_folder

    path = home_folder() / "config.yaml"
    before = _read(path)
    settings = {"cloud": "emulator"} if local else _google(project, zones, quota, before)
    kept = {} if local else before
    after = {key: value for key, value in before.items() if key not in _OURS} | settings
    changed = {key for key in _OURS if key in kept and kept[key] != after.get(key)}
    if changed or (local and before.get("cloud") == "google"):
        question = f"{path} has settings already: {_shown(before)}. This replaces them. Go on?"
        confirm("init", question, yes)
    _write(path, after)
    if as_json:
        login = None if local else _login()
        echo_json({"file": str(path), "settings": after, "login": login})
        return
    lines = [f"wrote {path}", *(f"  {line}" for line in _yaml(after).splitlines())]
    if not local:
        lines.append(_login())
    echo_lines([*lines, *_hint(local)])


_OURS = ("cloud", "project", "zones", "quota")


def _google(
    project: str | None, zones: str | None, quota: "Sequence[str] | None", before: dict[str, Any]
) -> dict[str, Any]:
    """The settings for Google, from options, then answers, then the former settings."""
    from drumline.chips import region_of
    from drumline.jobs.client import Refused

    asks = sys.stdin.isatty()
    if project is None:
        known = before.get("project") or os.environ.get("GOOGLE_CLOUD_PROJECT")
        project = typer.prompt("project", default=known) if asks else known
    if not project:
        raise Refused("no project given: drumline init --project ID, or --local without an account")
    if not _PROJECT.fullmatch(project):
        raise Refused(
            f"--project: {project!r} is not a project id; gcloud projects list shows them"
        )
    grants = list(quota or before.get("quota") or [])
    from_quota = [_grant_zone(grant) for grant in grants]
    if zones is None:
        known = ",".join(before.get("zones") or dict.fromkeys(from_quota))
        zones = typer.prompt("zones with quota", default=known or None) if asks else known
    named = [zone.strip() for zone in (zones or "").split(",") if zone.strip()]
    if not named:
        raise Refused("no zones given: drumline init --zones us-central2-b,europe-west4-a")
    for zone in named:
        region_of(zone)  # raises if there is no such zone
    settings = {"cloud": "google", "project": project, "zones": list(dict.fromkeys(named))}
    return settings | ({"quota": grants} if grants else {})


def _grant_zone(grant: str) -> str:
    from drumline.jobs.billing import parse_grant
    from drumline.jobs.client import Refused

    try:
        return parse_grant(grant).zone
    except ValueError as wrong:
        raise Refused(f"--quota: {wrong}") from None


def _read(path: Path) -> dict[str, Any]:
    import yaml

    from drumline.jobs.client import Refused

    try:
        found = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as trouble:
        why = " ".join(str(trouble).split())
        raise Refused(f"{path} cannot be read, mend or remove it: {why}") from None
    return found if isinstance(found, dict) else {}


def _yaml(settings: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    return text


def _shown(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {settings[key]}" for key in _OURS if key in settings)


def _write(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings atomically, readable only by their owner."""
    path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    path.parent.chmod(0o700)
    draft = path.with_suffix(".yaml.new")
    with open(draft, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(_yaml(settings))
    draft.replace(path)


def _login() -> str:
    """Ask Google for a token with the credentials of this machine; returns how that went."""
    import asyncio

    from drumline.cloud.google.credentials import GoogleCredentials
    from drumline.cloud.protocol import CloudError

    try:
        asyncio.run(GoogleCredentials().token())
    except CloudError as trouble:
        return f"! credentials: {trouble}"
    return "✓ credentials: Google gave an access token"


def _hint(local: bool) -> list[str]:
    """What must happen before the settings apply, and what to do next."""
    from drumline.jobs.client import Client

    lines = []
    if Client(autostart=False).server_status() is not None:
        lines.append("a server runs with the settings from before: drumline server stop")
    first = "examples/quickstart.yaml" if local else "job.yaml --dry-run"
    return [*lines, f"next: drumline create {first}"]
