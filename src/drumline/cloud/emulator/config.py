"""The settings of the emulated cloud: `config.yaml` in its home, read at start.

By default it has unlimited chips and no delays, so that a first job starts at once. Each key makes
it more like a real cloud.
"""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from drumline.chips import LOCAL_ZONES, UnknownName, chip, slice_of, zones
from drumline.cloud.model.resources import CloudTiming, Limits, Tier
from drumline.errors import UserError

Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Chips = Annotated[int, Field(ge=0)]


def known_zones() -> tuple[str, ...]:
    """Return Google's zones with TPUs, and the zones of the emulator alone."""
    return (*LOCAL_ZONES, *zones())


def pool_name(accelerator: str) -> str:
    """Return the pool of an accelerator: `v4` for `v4` and `tpu v4`, `v4-8` for that size."""
    return slice_of(accelerator).name if "-" in accelerator.strip() else chip(accelerator).name


class Faults(BaseModel):
    """Faults of the API. The control calls never fail."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fail: Share = 0.0
    """The fraction of calls that fail with 503, 500 and 429 in turn. Half of the failing changes
    take effect nevertheless, as they may at Google."""
    delay: Share = 0.0
    seconds: Seconds = 1.0
    """The additional seconds of a delayed call."""
    login: Literal["ok", "expired"] = "ok"
    deny: tuple[str, ...] = ()
    """The zones where every call is denied."""


class EmulatorConfig(BaseModel):
    """The keys of `config.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    capacity: dict[str, dict[str, Chips]] = {}
    """Chips by zone and accelerator (`v4`, or `v4-8` for that size alone). Default: unlimited."""
    quota: dict[str, dict[Tier, Chips]] = {}
    """Chips that a project may use, by zone or region and by tier."""
    waiting_seconds: Seconds = 0.0
    """The minimum wait of a request, even if there are chips."""
    provision_seconds: Seconds = 0.0
    boot_seconds: Seconds = 0.0
    """Seconds from a host's start or reboot until it answers on SSH."""
    delete_seconds: Seconds = 0.0
    when_short: Literal["wait", "fail"] = "wait"
    preempt_every_seconds: Annotated[float, Field(gt=0)] | None = None
    """The mean lifetime of a spot node in seconds."""
    seed: int = 0
    buckets: dict[str, str] = {}
    """The locations of buckets, such as US-CENTRAL2. Every other bucket is in LOCAL."""
    page_size: Annotated[int, Field(ge=1, le=1000)] = 100
    faults: Faults = Faults()

    @field_validator("capacity")
    @classmethod
    def _pools(cls, value: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        for zone in value:
            if zone not in known_zones():
                raise ValueError(f"{zone!r} is not a zone with TPUs")
        try:
            return {
                zone: {pool_name(name): chips for name, chips in pools.items()}
                for zone, pools in value.items()
            }
        except UnknownName as error:
            raise ValueError(str(error)) from error

    def limits(self) -> Limits:
        """Return the capacity and quota at the start, as a copy that can be changed."""
        return Limits(
            capacity={zone: dict(pools) for zone, pools in self.capacity.items()},
            quota={place: dict(tiers) for place, tiers in self.quota.items()},
            fail_when_short=self.when_short == "fail",
        )

    def timing(self) -> CloudTiming:
        """Return the delays of the cloud."""
        return CloudTiming(
            waiting=self.waiting_seconds,
            provision=self.provision_seconds,
            delete=self.delete_seconds,
            preempt_every=self.preempt_every_seconds,
        )


def load(path: Path) -> EmulatorConfig:
    """Read the file. Without it, all settings have their defaults."""
    try:
        value = yaml.safe_load(path.read_text()) if path.exists() else None
        return EmulatorConfig.model_validate(value or {})
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise UserError(f"{path}: {first_error(error)}") from error


def first_error(error: ValidationError) -> str:
    """Return the first error, such as `quota.local-a.spot: Input should be a valid integer`."""
    details = error.errors()[0]
    path = ".".join(map(str, details["loc"])) or "the file"
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "extra_forbidden":
        message = "there is no such key"
    return f"{path}: {message}"
