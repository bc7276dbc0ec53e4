"""The settings of the emulated cloud: `config.yaml` in its home, read at start.

By default it has unlimited chips and takes no time, so that a first job runs at once. Each key
makes it more like a real cloud.
"""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from drumline.chips import LOCAL_ZONES, UnknownName, chip, slice_of, zones
from drumline.cloud.model.resources import CloudTiming, Limits, Tier

Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Chips = Annotated[int, Field(ge=0)]


class BadConfig(ValueError):
    """The text is the whole sentence for the user."""


def known_zones() -> tuple[str, ...]:
    """Google's zones with TPUs, and those that only the emulator has."""
    return (*LOCAL_ZONES, *zones())


def pool_name(accelerator: str) -> str:
    """The pool of an accelerator: `v4` for `v4` and `tpu v4`, or `v4-8` for that size alone."""
    return slice_of(accelerator).name if "-" in accelerator.strip() else chip(accelerator).name


class Faults(BaseModel):
    """Faults of the API. The control calls never fail."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fail: Share = 0.0
    """The share of calls that answer 503, 500 or 429 in turn. Half of their changes take effect
    nevertheless: a caller that sees a 503 cannot know."""
    delay: Share = 0.0
    seconds: Seconds = 1.0
    """The extra seconds of a delayed call."""
    login: Literal["ok", "expired"] = "ok"
    deny: tuple[str, ...] = ()
    """Zones where every call is denied."""


class EmulatorConfig(BaseModel):
    """The keys of `config.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    capacity: dict[str, dict[str, Chips]] = {}
    """Chips by zone and accelerator (`v4`, or `v4-8` for that size alone). Default: unlimited."""
    quota: dict[str, dict[Tier, Chips]] = {}
    """Chips that a project may use, by zone or region and by tier."""
    waiting_seconds: Seconds = 0.0
    """The least seconds that a request waits, with or without chips."""
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
    def _pools(cls, given: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        for zone in given:
            if zone not in known_zones():
                raise ValueError(f"{zone!r} is no zone with TPUs")
        try:
            return {
                zone: {pool_name(name): chips for name, chips in pools.items()}
                for zone, pools in given.items()
            }
        except UnknownName as wrong:
            raise ValueError(str(wrong)) from wrong

    def limits(self) -> Limits:
        """Capacity and quota for the fleet, which can be changed while it runs."""
        return Limits(
            capacity={zone: dict(pools) for zone, pools in self.capacity.items()},
            quota={place: dict(tiers) for place, tiers in self.quota.items()},
            fail_when_short=self.when_short == "fail",
        )

    def timing(self) -> CloudTiming:
        """How long things take."""
        return CloudTiming(
            waiting=self.waiting_seconds,
            provision=self.provision_seconds,
            delete=self.delete_seconds,
            preempt_every=self.preempt_every_seconds,
        )


def load(path: Path) -> EmulatorConfig:
    """Read the file; everything has its default where there is none."""
    try:
        given = yaml.safe_load(path.read_text()) if path.exists() else None
        return EmulatorConfig.model_validate(given or {})
    except yaml.YAMLError as wrong:
        raise BadConfig(f"{path}: not YAML: {' '.join(str(wrong).split())}") from wrong
    except ValidationError as wrong:
        raise BadConfig(f"{path}: {first_problem(wrong)}") from wrong


def first_problem(wrong: ValidationError) -> str:
    """`quota.local-a.spot: Input should be a valid integer`."""
    problem = wrong.errors()[0]
    where = ".".join(map(str, problem["loc"])) or "the whole"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = "there is no such key"
    return f"{where}: {message}"
