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
from drumline.jobs.billing import Grant, read_grant
from drumline.jobs.core.state import Thresholds


class ConfigError(Exception):
    """The settings cannot be used; the text says where and what to do."""


class _File(BaseModel):
    """The keys of config.yaml."""

    model_config = ConfigDict(extra="forbid")

    cloud: Literal["emulator", "google"] = "emulator"
    project: str | None = None
    zones: list[str] = Field(default_factory=list)
    """Zones with quota; a job with `zones: any` asks in these."""
    quota: list[str] = Field(default_factory=list)
    """Quota as the research programme writes it: `64 spot v6e chips in europe-west4-a`. The user
    is warned of a job that needs more."""
    endpoint: str | None = None
    """The URL of another Cloud TPU endpoint; with the emulator, the home folder of another emulator
    on this machine, which has its address and its token."""
    pace: Literal["google", "emulator"] | None = None
    """The cloud whose intervals and thresholds apply; `google` on the emulator is a rehearsal."""
    look_seconds: float | None = Field(default=None, gt=0)
    patience: dict[str, float] = Field(default_factory=dict)
    witness: Literal["infra_health"] | None = None
    """Who else is believed about the health of hosts: `infra_health`, Google's own metric."""
    log_megabytes: float = Field(default=2000.0, gt=0)
    """How much of each job's logs is kept on this machine: beginnings and newest ends."""
    idle_minutes: float = Field(default=30.0, gt=0)
    """Minutes without a job, a slice or a call after which the server exits."""


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
    look_seconds: float
    """Seconds between two polls of a zone, of two calls each."""
    asks_a_minute: float
    burn_in: Mapping[str, float]
    """Seconds of a burn-in, by its name in the job file."""
    patience: Thresholds
    timing: Timing
    zone_rest_scale: float
    idle_seconds: float
    """Seconds without anything to do after which the server exits."""
    witness: str | None
    """Whose word on the health of hosts counts beside what is measured; None is nobody's."""
    log_bytes: int
    """Bytes kept of a job's logs, of all hosts and attempts together."""

    def log_limit(self, hosts: int) -> int:
        """Bytes kept of one host's log in one attempt.

        A quarter of `log_bytes` is for the attempt under way, a quarter for the last before it, a
        quarter for the first; the rest is for those in between.
        """
        return self.log_bytes // 4 // hosts

    @property
    def local(self) -> bool:
        """Whether slices come from the emulator."""
        return self.cloud == "emulator"


# Six zones polled every 10 s are 72 calls a minute; Google's limit on creating nodes is about 90 a
# minute for a whole project, of which one user may take a third.
_LOOK_SECONDS = 10.0
_ASKS_A_MINUTE = 30.0
# The emulator answers at once and preempts slices within seconds, so everything is quicker there.
_QUICK_LOOK_SECONDS = 0.5
_QUICK_THRESHOLDS = Thresholds(
    waiting=3.0,
    silence=4.0,
    bad_silence=8.0,
    first_contact=30.0,
    settle=1.0,
    shutdown=2.0,
    rest=0.5,
    retry=0.5,
)
_QUICK_ASKS_A_MINUTE = 6000.0
# Most of the short one is compiling; the long one is for hosts with a past.
_BURN_IN = {"off": 0.0, "short": 30.0, "long": 180.0}
_QUICK_BURN_IN = {"off": 0.0, "short": 3.0, "long": 8.0}


def read(home: Path) -> Config:
    """The settings in a home folder."""
    path = home / "config.yaml"
    raw: Any = {}
    if path.exists():
        try:
            raw = yaml.safe_load(path.read_text()) or {}
            given = _File.model_validate(raw)
        except ValidationError as wrong:
            first = wrong.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}: {where}: {first['msg'].lower()}") from None
        except (yaml.YAMLError, OSError, UnicodeDecodeError) as wrong:
            text = str(wrong).replace("\n", " ")
            raise ConfigError(f"{path}: cannot be read: {text}") from None
    else:
        given = _File()
    local = given.cloud == "emulator"
    quick = (given.pace or given.cloud) == "emulator"
    if not local and not given.project:
        raise ConfigError(f"{path}: project: missing; drumline init --project ID writes it")
    if local and given.endpoint and "://" in given.endpoint:
        raise ConfigError(
            f"{path}: endpoint: an emulator is named by its folder, such as ~/.drumline/emulator, "
            "because its token is found there"
        )
    unknown = set(given.patience) - set(Thresholds.__dataclass_fields__)
    if unknown:
        raise ConfigError(f"{path}: patience.{min(unknown)}: unknown key")
    return Config(
        home=home,
        cloud=given.cloud,
        project=given.project or "local",
        zones=tuple(given.zones) or (LOCAL_ZONES if local else ()),
        quota=_grants(path, given.quota),
        endpoint=_endpoint(given),
        look_seconds=given.look_seconds or (_QUICK_LOOK_SECONDS if quick else _LOOK_SECONDS),
        asks_a_minute=_QUICK_ASKS_A_MINUTE if quick else _ASKS_A_MINUTE,
        burn_in=_QUICK_BURN_IN if quick else _BURN_IN,
        patience=replace(_QUICK_THRESHOLDS if quick else Thresholds(), **given.patience),
        timing=Timing(reconnect_most=1.0, device_wait=5.0) if quick else Timing(),
        zone_rest_scale=0.05 if quick else 1.0,
        idle_seconds=given.idle_minutes * 60,
        witness=given.witness,
        log_bytes=round(given.log_megabytes * 1e6),
    )


def _endpoint(given: _File) -> str | None:
    if given.endpoint and given.cloud == "emulator":
        return str(Path(given.endpoint).expanduser())
    return given.endpoint


def _grants(path: Path, written: list[str]) -> tuple[Grant, ...]:
    try:
        return tuple(read_grant(text) for text in written)
    except (ValueError, UnknownName) as wrong:
        raise ConfigError(f"{path}: quota: {wrong}") from None
