"""Accelerators and zones of a job file: their checks, and the slices that a job can request.

Pure functions on the catalogue of chips. Bucket locations are an argument; the caller reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from drumline import chips
from drumline.jobs.core.state import Candidate
from drumline.jobs.spec.checks import (
    GCS_SCHEME,
    InvalidValue,
    as_list,
    bucket_of,
    check_all,
    mount_of,
    quoted,
    text,
    unique,
    unwrap,
)

if TYPE_CHECKING:
    from drumline.jobs.spec.model import JobSpec

ANY = "any"
EMULATED = "LOCAL"
"""The location of an emulated bucket, which counts as being in every region."""
# Longer lists are cut: `drumline chips NAME` prints all zones.
_MAX_ZONES_SHOWN = 6
_GB_PER_TB = 1000


# --- checks -----------------------------------------------------------------------------------


def accelerators(raw: object) -> tuple[str, ...]:
    """Return slices in order of preference, under the names that the Cloud TPU API takes."""
    return unique(check_all(enumerate(as_list(raw)), _accelerator))


def _accelerator(raw: object) -> str:
    if isinstance(unwrap(raw), int | float):
        raise InvalidValue(f"{quoted(raw)} is not a slice; example: v4-8")
    name = text(raw)
    if len(name) > 60 or not name.isprintable():
        raise InvalidValue(f"{quoted(name)} is not a slice; examples: v4-8, v5litepod-16")
    try:
        tpu_slice = chips.slice_of(name)
    except chips.UnknownName as error:
        raise InvalidValue(str(error)) from None
    if tpu_slice.runtime_image is None:
        raise InvalidValue(
            f"{tpu_slice.name} is only available on GKE, not through the Cloud TPU API"
        )
    return tpu_slice.name


def zones(raw: object, accelerators: Sequence[str] | None) -> str | tuple[str, ...]:
    """Return `any`, or zones in order of preference, each with one of the accelerators.

    If the accelerators themselves are invalid (None), only the names of the zones are checked.
    """
    if isinstance(raw, str) and raw.strip() == ANY:
        return ANY
    return unique(check_all(enumerate(as_list(raw)), lambda item: _zone(item, accelerators)))


def _zone(raw: object, accelerators: Sequence[str] | None) -> str:
    if isinstance(unwrap(raw), int | float):
        raise InvalidValue(f"{quoted(raw)} is not a zone; example: us-central2-b")
    written = text(raw)
    zone = written.strip().casefold()
    if zone == ANY:
        raise InvalidValue("any cannot be combined with zones; write zones: any")
    if len(zone) > 60 or not zone.isprintable():
        raise InvalidValue(f"{quoted(written)} is not a zone; example: us-central2-b")
    if zone in chips.LOCAL_ZONES:
        return zone
    available = _zones_with(accelerators or ())
    try:
        chips.region_of(zone)
    except chips.UnknownName as error:
        in_region = [name for name in available if name.startswith(f"{zone}-")]
        if "is a region" in str(error) and accelerators:
            generations = _generations(accelerators)
            if in_region:
                raise InvalidValue(
                    f"{quoted(zone)} is a region; its zones with {generations}: {_cut(in_region)}"
                ) from None
            raise InvalidValue(
                f"{quoted(zone)} is a region without {generations}; {_alternatives(accelerators)}"
            ) from None
        raise InvalidValue(str(error)) from None
    if accelerators and zone not in available:
        raise InvalidValue(
            f"{zone} has no {_missing(zone, accelerators)}; {_alternatives(accelerators)}"
        )
    return zone


def _zones_with(accelerators: Sequence[str]) -> list[str]:
    """Return every zone with one of these slices, by preference, public zones first."""
    offers = (offer for name in accelerators for offer in chips.zone_offers(chips.slice_of(name)))
    return list(dict.fromkeys(offer.zone for offer in offers))


def _generations(accelerators: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(chips.slice_of(name).generation for name in accelerators))


def _missing(zone: str, accelerators: Sequence[str]) -> str:
    """Return the generations that a zone lacks, or the slices if only their size is missing."""
    in_zone = chips.generations_in(zone)
    slices = [chips.slice_of(name) for name in accelerators]
    names = (
        tpu_slice.name if tpu_slice.generation in in_zone else tpu_slice.generation
        for tpu_slice in slices
    )
    return " or ".join(dict.fromkeys(names))


def _alternatives(accelerators: Sequence[str]) -> str:
    """Return the zones that have these slices, as a clause of a message."""
    if len(accelerators) == 1:
        return f"zones with it: {_cut(_zones_with(accelerators), accelerators[0])}"
    return "; ".join(
        f"zones with {name}: {_cut(_zones_with([name]), name)}" for name in accelerators
    )


def _cut(zones: Sequence[str], accelerator: str | None = None) -> str:
    if len(zones) <= _MAX_ZONES_SHOWN:
        return ", ".join(zones)
    more = f", … (all: drumline chips {accelerator})" if accelerator else ", …"
    return ", ".join(zones[:_MAX_ZONES_SHOWN]) + more


def check_hosts(accelerators: Sequence[str], hosts: Sequence[int]) -> None:
    """Raise InvalidValue unless every accelerator has these hosts."""
    errors: list[tuple[tuple[str | int, ...], str]] = []
    for index, host in enumerate(hosts):
        for name in accelerators:
            count = chips.slice_of(name).hosts
            if host >= count:
                existing = "only host 0" if count == 1 else f"hosts 0 to {count - 1}"
                errors.append(((index,), f"{name} has no host {host}; it has {existing}"))
                break
    if errors:
        raise InvalidValue.from_errors(errors)


def check_disk_modes(accelerators: Sequence[str], modes: Sequence[str]) -> None:
    """Raise InvalidValue for a disk that several hosts of an accelerator would write to."""
    largest = max(
        (chips.slice_of(name) for name in accelerators), key=lambda s: s.hosts, default=None
    )
    if largest is None or largest.hosts == 1:
        return
    errors: list[tuple[tuple[str | int, ...], str]] = [
        ((index,), f"{largest.name} has {largest.hosts} hosts, which can only share a disk that is "
        "attached with mode: read-only")
        for index, mode in enumerate(modes)
        if mode != "read-only"
    ]  # fmt: skip
    if errors:
        raise InvalidValue.from_errors(errors)


# --- candidates -------------------------------------------------------------------------------


@dataclass(frozen=True)
class BucketUse:
    """A bucket and the key that names it: `mounts /data`, `checkpoint`."""

    key: str
    bucket: str


class RegionCheck(NamedTuple):
    """The candidates in the region of every bucket, or the reason why the job cannot run."""

    candidates: tuple[Candidate, ...]
    error: str | None
    """Two lines for the user if the job may not run anywhere, else None."""


def candidates(spec: "JobSpec", *, local: bool) -> tuple[Candidate, ...]:
    """Return every possible slice in order of preference: by accelerator, then by zone.

    The result is empty if a job names only zones of the emulator and runs on Google Cloud.
    """
    result = []
    for accelerator in spec.accelerator:
        available = [offer.zone for offer in chips.zone_offers(chips.slice_of(accelerator))]
        if spec.zones == ANY:
            zones: Sequence[str] = chips.LOCAL_ZONES if local else available
        else:
            zones = [z for z in spec.zones if z in available or (local and z in chips.LOCAL_ZONES)]
        result += [Candidate(accelerator, zone) for zone in zones]
    return tuple(result)


def bucket_uses(spec: "JobSpec") -> tuple[BucketUse, ...]:
    """Return every bucket that the job reads or writes."""
    uses = [BucketUse(f"mounts {path}", bucket_of(url)) for path, url in spec.mounts.items()]
    if spec.checkpoint and spec.checkpoint.startswith(GCS_SCHEME):
        uses.append(BucketUse("checkpoint", bucket_of(spec.checkpoint)))
    return tuple(uses)


def check_regions(
    spec: "JobSpec", candidates: Sequence[Candidate], locations: Mapping[str, str | None]
) -> RegionCheck:
    """Keep the candidates in the region of every bucket whose location is known.

    A zone that the user named is never dropped silently: if it is in another region than a bucket,
    the job is rejected even if other zones are fine. `any` stands for the zones in the region of
    the data. With `allow_cross_region` nothing is dropped; with `any`, near zones come first.
    """
    remote = {
        candidate: _remote_buckets(spec, candidate.zone, locations) for candidate in candidates
    }
    near = tuple(candidate for candidate in candidates if not remote[candidate])
    if spec.allow_cross_region:
        ordered = tuple(candidates)
        if spec.zones == ANY:
            preference = {name: index for index, name in enumerate(spec.accelerator)}
            ordered = tuple(
                sorted(candidates, key=lambda c: (preference[c.accelerator], bool(remote[c])))
            )
        return RegionCheck(ordered, None)
    conflict = next((candidate for candidate in candidates if remote[candidate]), None)
    if conflict is None or (near and spec.zones == ANY):
        return RegionCheck(near, None)
    lines = [
        f"{use.key}: gs://{use.bucket} is in {locations[use.bucket]}, the slice would be in "
        f"{conflict.zone}: reading 1 TB costs about {_cost_per_terabyte()}"
        for use in remote[conflict]
    ]
    region = chips.region_of(conflict.zone).upper()
    fix = f"remove {conflict.zone} from zones" if near else f"use a bucket in {region}"
    return RegionCheck(near, "\n".join([*lines, f"{fix}, or set allow_cross_region: true"]))


def _remote_buckets(
    spec: "JobSpec", zone: str, locations: Mapping[str, str | None]
) -> list[BucketUse]:
    return [
        use
        for use in bucket_uses(spec)
        if (location := locations.get(use.bucket)) is not None
        and location.upper() != EMULATED
        and not chips.same_region(zone, location)
    ]


def _cost_per_terabyte() -> str:
    low, high = (_GB_PER_TB * per_gb for per_gb in chips.STORAGE.cross_region_per_gb)
    return f"${low:,.0f} to ${high:,.0f}"


def mount_error(spec: "JobSpec", *, local: bool) -> str | None:
    """Return a message for a mount that an emulated host cannot make, else None.

    All emulated hosts share the folders of this machine, except that each has its own home.
    """
    for path in spec.mounts if local else ():
        if not path.startswith("~"):
            below_home = f"~/{path.strip('/')}"
            return (
                f"mounts {path}: an emulated host can mount only below its home folder; "
                f"use {below_home}, which also works on Google Cloud"
            )
    return None


def checkpoint_error(spec: "JobSpec", *, local: bool) -> str | None:
    """Return a message if the checkpoints would be lost with the slice, else None.

    Emulated hosts share the folders of this machine, except that each host has its own home.
    """
    folder = spec.checkpoint
    if folder is None or folder.startswith(GCS_SCHEME) or mount_of(folder, spec.mounts):
        return None
    if local and not folder.startswith("~"):
        return None
    return (
        f"checkpoint: {folder} is on the host's own disk and would be lost with the slice; "
        "use gs://bucket/folder, or a folder below a mount"
    )
