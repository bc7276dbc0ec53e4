"""The server's settings: `$DRUMLINE_HOME/config.yaml`, all of it optional.

Without this file, jobs run on the emulator. `drumline init` writes it for a Google project.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drumline.chips import LOCAL_ZONES, UnknownName
from drumline.hosts.values import Timing
from drumline.jobs.billing import Grant, Prices, parse_grant
from drumline.jobs.core.state import Timeouts
from drumline.jobs.slice_settings import SliceSettings


class ConfigError(Exception):
    """The settings cannot be used. The text has the place and the fix."""


class _File(BaseModel):
    """The keys of config.yaml."""

    model_config = ConfigDict(extra="forbid")

    cloud: Literal["emulator", "google"] = "emulator"
    project: str | None = None
    zones: list[str] = Field(default_factory=list)
    """Zones with quota. A job with `zones: any` requests slices in these."""
    quota: list[str] = Field(default_factory=list)
    """Quota as the research programme writes it: `64 spot v6e chips in europe-west4-a`. A job that
    needs more gets a warning."""
    endpoint: str | None = None
    """The URL of another Cloud TPU endpoint. With the emulator, the home folder of another emulator
    on this machine, which has its address and its token."""
    pace: Literal["google", "emulator"] | None = None
    """The cloud whose intervals and timeouts apply. `google` on the emulator is a rehearsal."""
    look_seconds: float | None = Field(default=None, gt=0)
    patience: dict[str, float] = Field(default_factory=dict)
    witness: Literal["infra_health"] | None = None
    """An additional source of the health of hosts: `infra_health` is Google's own metric."""
    log_megabytes: float = Field(default=2000.0, gt=0)
    """The size of each job's logs on this machine: their beginnings and newest ends."""
    output_megabytes: float = Field(default=10_000.0, gt=0)
    """The size of the files that each job's `outputs` may have on this machine."""
    idle_minutes: float = Field(default=30.0, gt=0)
    """Minutes without a job, a slice or a call after which the server exits."""
    network: Any = None
    """This and the following keys are defaults for the keys of the same name in job files."""
    subnetwork: Any = None
    external_ip: Any = None
    tags: Any = None
    service_account: Any = None
    labels: Any = None
    ssh: Any = None


@dataclass(frozen=True)
class Config:
    """The settings of the server."""

    home: Path
    cloud: str
    project: str
    zones: tuple[str, ...]
    quota: tuple[Grant, ...]
    """The quota of the project; empty where config.yaml has none."""
    endpoint: str | None
    poll_seconds: float
    """Seconds between two polls of a zone, of two calls each."""
    requests_per_minute: float
    burn_in: Mapping[str, float]
    """Seconds of a burn-in, by its name in the job file."""
    timeouts: Timeouts
    timing: Timing
    zone_backoff_scale: float
    idle_seconds: float
    """Idle seconds after which the server exits."""
    health_source: str | None
    """The source of the health of hosts beside Drumline's own tests; None is none."""
    slice_settings: SliceSettings
    """The settings of slices for all jobs, which a job file may replace."""
    log_bytes: int
    """The most bytes of a job's logs, of all hosts and attempts together."""
    output_bytes: int
    """The most bytes of a job's outputs, of all hosts together."""

    def log_limit(self, hosts: int) -> int:
        """Return the most bytes of one host's log in one attempt.

        The current attempt, the one before it, and the first get a quarter of `log_bytes` each. The
        other attempts share the rest.
        """
        return self.log_bytes // 4 // hosts

    @property
    def local(self) -> bool:
        """True if slices come from the emulator."""
        return self.cloud == "emulator"

    @property
    def prices(self) -> Prices:
        """The prices of slices."""
        return Prices(emulated=self.local)


# Six zones polled every 10 s cause 72 calls per minute. Google allows a project to create about 90
# nodes per minute, of which one user may take a third.
_POLL_SECONDS = 10.0
_REQUESTS_PER_MINUTE = 30.0
# The emulator answers at once and preempts slices within seconds, so everything is faster there.
_FAST_POLL_SECONDS = 0.5
_FAST_TIMEOUTS = Timeouts(
    waiting=15.0,
    cheaper=3.0,
    visible=3.0,
    booting=120.0,
    deleting=60.0,
    silence=4.0,
    bad_silence=8.0,
    first_contact=30.0,
    settle=1.0,
    shutdown=2.0,
    settled=30.0,
    rest=0.5,
    outputs_interval=5.0,
    retry=0.5,
)
_FAST_REQUESTS_PER_MINUTE = 6000.0
# Most of a short burn-in is compilation. A long one is for hosts with evidence against them.
_BURN_IN = {"off": 0.0, "short": 30.0, "long": 180.0}
_FAST_BURN_IN = {"off": 0.0, "short": 3.0, "long": 8.0}


def read(home: Path) -> Config:
    """Read the settings of a home folder."""
    path = home / "config.yaml"
    raw: Any = {}
    if path.exists():
        try:
            raw = yaml.safe_load(path.read_text()) or {}
            file = _File.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}: {key}: {first['msg'].lower()}") from None
        except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
            text = str(error).replace("\n", " ")
            raise ConfigError(f"{path}: cannot be read: {text}") from None
    else:
        file = _File()
    local = file.cloud == "emulator"
    fast = (file.pace or file.cloud) == "emulator"
    if not local and not file.project:
        raise ConfigError(f"{path}: project: missing; drumline init --project ID writes it")
    if local and file.endpoint and "://" in file.endpoint:
        raise ConfigError(
            f"{path}: endpoint: give the emulator's folder, such as ~/.drumline/emulator, "
            "which has its token"
        )
    unknown = set(file.patience) - set(Timeouts.__dataclass_fields__)
    if unknown:
        raise ConfigError(f"{path}: patience.{min(unknown)}: unknown key")
    return Config(
        home=home,
        cloud=file.cloud,
        project=file.project or "local",
        zones=tuple(file.zones) or (LOCAL_ZONES if local else ()),
        quota=_grants(path, file.quota),
        endpoint=_endpoint(file),
        poll_seconds=file.look_seconds or (_FAST_POLL_SECONDS if fast else _POLL_SECONDS),
        requests_per_minute=_FAST_REQUESTS_PER_MINUTE if fast else _REQUESTS_PER_MINUTE,
        burn_in=_FAST_BURN_IN if fast else _BURN_IN,
        timeouts=replace(_FAST_TIMEOUTS if fast else Timeouts(), **file.patience),
        timing=Timing(reconnect_most=1.0, device_wait=5.0) if fast else Timing(),
        zone_backoff_scale=0.05 if fast else 1.0,
        idle_seconds=file.idle_minutes * 60,
        health_source=file.witness,
        slice_settings=_slice_settings(path, file),
        log_bytes=round(file.log_megabytes * 1e6),
        output_bytes=round(file.output_megabytes * 1e6),
    )


def _endpoint(file: _File) -> str | None:
    if file.endpoint and file.cloud == "emulator":
        return str(Path(file.endpoint).expanduser())
    return file.endpoint


def _grants(path: Path, sentences: list[str]) -> tuple[Grant, ...]:
    try:
        return tuple(parse_grant(sentence) for sentence in sentences)
    except (ValueError, UnknownName) as error:
        raise ConfigError(f"{path}: quota: {error}") from None


def _slice_settings(path: Path, file: _File) -> SliceSettings:
    """Return the settings of slices, by the rules of the job file."""
    written = {key: value for key in _SLICE_KEYS if (value := getattr(file, key)) is not None}
    if not written:
        return SliceSettings()
    # Imported only if needed, because building the schema of job files takes a while.
    from drumline.jobs.spec import SpecError, slice_settings

    try:
        return slice_settings(written, source=str(path))
    except SpecError as error:
        # Like the other errors of this file, which have no lines.
        raise ConfigError(str(error).replace(f"{path}  ", f"{path}: ")) from None


_SLICE_KEYS = (
    "network",
    "subnetwork",
    "external_ip",
    "tags",
    "service_account",
    "labels",
    "ssh",
)
