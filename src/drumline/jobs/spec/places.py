"""Where a job may run: its choices in order, without those that would read across regions.

Pure: the locations of buckets are an argument; the caller reads them from the cloud.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drumline import chips
from drumline.jobs.core.state import Candidate
from drumline.jobs.spec import JobSpec
from drumline.jobs.spec.storage import SCHEME, bucket_of, mount_over
from drumline.jobs.spec.zones import ANY

EMULATED = "LOCAL"
"""The location of a bucket that is a folder of the emulator: in every region."""
_GB_IN_TB = 1000


@dataclass(frozen=True)
class BucketUse:
    """A bucket and the key that names it: `mounts /data`, `checkpoint`."""

    key: str
    bucket: str


class RegionCheck(NamedTuple):
    """The choices that read and write within their region, and why the job cannot go on."""

    choices: tuple[Candidate, ...]
    refusal: str | None
    """Two lines for the user if the job may not run anywhere, else None."""


def candidates(spec: JobSpec, *, local: bool) -> tuple[Candidate, ...]:
    """Every possible slice, in order of preference: by accelerator, then by zone.

    Empty when a job names only the emulator's zones and runs on Google.
    """
    found = []
    for accelerator in spec.accelerator:
        there = [place.zone for place in chips.places(chips.slice_of(accelerator))]
        if spec.zones == ANY:
            zones: Sequence[str] = chips.LOCAL_ZONES if local else there
        else:
            zones = [z for z in spec.zones if z in there or (local and z in chips.LOCAL_ZONES)]
        found += [Candidate(accelerator, zone) for zone in zones]
    return tuple(found)


def bucket_uses(spec: JobSpec) -> tuple[BucketUse, ...]:
    """Every bucket the job reads or writes."""
    uses = [BucketUse(f"mounts {path}", bucket_of(url)) for path, url in spec.mounts.items()]
    if spec.checkpoint and spec.checkpoint.startswith(SCHEME):
        uses.append(BucketUse("checkpoint", bucket_of(spec.checkpoint)))
    return tuple(uses)


def region_conflicts(
    spec: JobSpec, choices: Sequence[Candidate], locations: Mapping[str, str | None]
) -> RegionCheck:
    """Keep the choices in the region of every bucket whose location is known.

    Zones that the user named are not dropped silently: a conflict is refused, even if another zone
    has none. `any` zone means any in the region of the data. With `allow_cross_region` nothing is
    dropped; `any` then only tries the near zones of an accelerator first.
    """
    far = {choice: _far_buckets(spec, choice.zone, locations) for choice in choices}
    near = tuple(choice for choice in choices if not far[choice])
    if spec.allow_cross_region:
        kept = tuple(choices)
        if spec.zones == ANY:
            order = {name: place for place, name in enumerate(spec.accelerator)}
            kept = tuple(
                sorted(choices, key=lambda choice: (order[choice.accelerator], bool(far[choice])))
            )
        return RegionCheck(kept, None)
    conflict = next((choice for choice in choices if far[choice]), None)
    if conflict is None or (near and spec.zones == ANY):
        return RegionCheck(near, None)
    lines = [
        f"{use.key}: gs://{use.bucket} is in {locations[use.bucket]}, the slice would be in "
        f"{conflict.zone}: reading 1 TB costs about {_cost_of_a_terabyte()}"
        for use in far[conflict]
    ]
    region = chips.region_of(conflict.zone).upper()
    mend = f"leave {conflict.zone} out of zones" if near else f"use a bucket in {region}"
    return RegionCheck(near, "\n".join([*lines, f"{mend}, or set allow_cross_region: true"]))


def _far_buckets(spec: JobSpec, zone: str, locations: Mapping[str, str | None]) -> list[BucketUse]:
    return [
        use
        for use in bucket_uses(spec)
        if (location := locations.get(use.bucket)) is not None
        and location.upper() != EMULATED
        and not chips.same_region(zone, location)
    ]


def _cost_of_a_terabyte() -> str:
    low, high = (_GB_IN_TB * per_gb for per_gb in chips.STORAGE.cross_region_per_gb)
    return f"${low:,.0f} to ${high:,.0f}"


def checkpoint_problem(spec: JobSpec, *, local: bool) -> str | None:
    """Why the checkpoints would not outlive the slice; None where they do.

    On the emulator the hosts share this machine's folders, except that each has its own home.
    """
    folder = spec.checkpoint
    if folder is None or folder.startswith(SCHEME) or mount_over(folder, spec.mounts):
        return None
    if local and not folder.startswith("~"):
        return None
    return (
        f"checkpoint: {folder} is on the host's own disk and would be lost with the slice; "
        "use gs://bucket/folder, or a folder below a mount"
    )
