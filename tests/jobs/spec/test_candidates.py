"""Candidate slices of a job, and the regions of its buckets."""

from pathlib import Path

from drumline.chips import LOCAL_ZONES
from drumline.jobs.core.state import Candidate
from drumline.jobs.spec import JobSpec, parse
from drumline.jobs.spec.zones import (
    bucket_uses,
    candidates,
    check_regions,
    checkpoint_error,
    mount_error,
)


def job(text: str) -> JobSpec:
    return parse(f"run: x\n{text}", source="job.yaml", folder=Path("/lab"))


V4 = "accelerator: v4-128\n"
MOUNT = "mounts: {/data: gs://lab-data}\n"


def test_accelerators_come_before_zones_in_the_order_of_preference() -> None:
    spec = job("accelerator: [v6e-16, v4-8]\nzones: [europe-west4-a, us-central2-b]")
    assert candidates(spec, local=False) == (
        Candidate("v6e-16", "europe-west4-a"),
        Candidate("v6e-16", "us-central2-b"),
        Candidate("v4-8", "us-central2-b"),
    )


def test_any_zone_starts_with_public_zones() -> None:
    zones = [choice.zone for choice in candidates(job("accelerator: v5p-8"), local=False)]
    assert zones[:3] == ["us-central1-a", "us-east5-a", "europe-west4-b"]
    assert "europe-west1-d" in zones[3:]


def test_any_zone_of_the_emulator_is_a_local_zone() -> None:
    result = candidates(job(V4), local=True)
    assert result == tuple(Candidate("v4-128", zone) for zone in LOCAL_ZONES)


def test_local_zones_exist_only_on_the_emulator() -> None:
    spec = job(V4 + "zones: [local-b, us-central2-b]")
    assert [choice.zone for choice in candidates(spec, local=True)] == ["local-b", "us-central2-b"]
    assert [choice.zone for choice in candidates(spec, local=False)] == ["us-central2-b"]


def test_all_buckets_are_listed() -> None:
    spec = job(V4 + "mounts: {/data: gs://lab-data/c4}\ncheckpoint: gs://lab-out/x")
    assert [(use.key, use.bucket) for use in bucket_uses(spec)] == [
        ("mounts /data", "lab-data"),
        ("checkpoint", "lab-out"),
    ]


def test_a_bucket_in_another_region_is_rejected_with_the_price() -> None:
    spec = job(V4 + MOUNT)
    result = check_regions(spec, candidates(spec, local=False), {"lab-data": "EU"})
    assert result.candidates == ()
    assert result.error == (
        "mounts /data: gs://lab-data is in EU, the slice would be in us-central2-b: "
        "reading 1 TB costs about $20 to $50\n"
        "use a bucket in US-CENTRAL2, or set allow_cross_region: true"
    )


def test_a_multi_region_is_another_region() -> None:
    spec = job(V4 + MOUNT)
    assert check_regions(spec, candidates(spec, local=False), {"lab-data": "US"}).error


def test_any_zone_means_the_region_of_the_data() -> None:
    spec = job("accelerator: [v4-8, v6e-16]\n" + MOUNT)
    result = check_regions(spec, candidates(spec, local=False), {"lab-data": "EUROPE-WEST4"})
    assert result == ((Candidate("v6e-16", "europe-west4-a"),), None)


def test_a_named_zone_in_another_region_is_rejected() -> None:
    spec = job("accelerator: v6e-16\nzones: [us-east5-b, europe-west4-a]\n" + MOUNT)
    result = check_regions(spec, candidates(spec, local=False), {"lab-data": "us-east5"})
    assert result.error is not None
    assert "the slice would be in europe-west4-a" in result.error
    assert result.error.endswith(
        "\nremove europe-west4-a from zones, or set allow_cross_region: true"
    )


def test_each_bucket_in_another_region_has_a_line() -> None:
    spec = job(V4 + MOUNT + "checkpoint: gs://lab-out/x")
    locations = {"lab-data": "EU", "lab-out": "ASIA"}
    error = check_regions(spec, candidates(spec, local=False), locations).error
    assert error is not None
    first, second, fix = error.split("\n")
    assert first.startswith("mounts /data: gs://lab-data is in EU")
    assert second.startswith("checkpoint: gs://lab-out is in ASIA")
    assert fix == "use a bucket in US-CENTRAL2, or set allow_cross_region: true"


def test_unknown_and_local_buckets_are_accepted() -> None:
    spec = job(V4 + MOUNT)
    choices = candidates(spec, local=False)
    for locations in ({}, {"lab-data": None}, {"lab-data": "LOCAL"}, {"lab-data": "us-central2"}):
        assert check_regions(spec, choices, locations) == (choices, None)


def test_with_allow_cross_region_near_zones_come_first() -> None:
    spec = job("accelerator: v6e-16\nallow_cross_region: true\n" + MOUNT)
    choices = candidates(spec, local=False)
    result = check_regions(spec, choices, {"lab-data": "EUROPE-WEST4"})
    assert result.error is None
    assert result.candidates[0].zone == "europe-west4-a"
    assert set(result.candidates) == set(choices)
    named = job("accelerator: v6e-16\nallow_cross_region: true\nzones: us-east5-b\n" + MOUNT)
    choices = candidates(named, local=False)
    assert check_regions(named, choices, {"lab-data": "EU"}) == (choices, None)


def test_a_checkpoint_on_the_disk_of_a_host_is_rejected() -> None:
    lost = (
        "checkpoint: {} is on the host's own disk and would be lost with the slice; "
        "use gs://bucket/folder, or a folder below a mount"
    )
    relative = job(V4 + "checkpoint: out")
    assert checkpoint_error(relative, local=False) == lost.format("/lab/out")
    assert checkpoint_error(relative, local=True) is None
    home = job(V4 + "checkpoint: ~/out")
    assert checkpoint_error(home, local=True) == lost.format("~/out")
    outside = job(V4 + MOUNT + "checkpoint: /database/x")
    assert checkpoint_error(outside, local=False) == lost.format("/database/x")


def test_a_checkpoint_in_a_bucket_or_below_a_mount_is_accepted() -> None:
    for text in ("checkpoint: gs://lab-data/x", MOUNT + "checkpoint: /data/x", ""):
        assert checkpoint_error(job(V4 + text), local=False) is None
    home = job(V4 + "mounts: {~/data: gs://lab-data}\ncheckpoint: ~/data/x")
    assert checkpoint_error(home, local=False) is None


def test_an_emulated_host_mounts_only_below_its_home() -> None:
    absolute = job(V4 + "mounts: {/data/c4: gs://lab/c4}\n")
    assert mount_error(absolute, local=False) is None
    assert mount_error(absolute, local=True) == (
        "mounts /data/c4: an emulated host can mount only below its home folder; "
        "use ~/data/c4, which also works on Google Cloud"
    )
    assert mount_error(job(V4 + "mounts: {~/data/c4: gs://lab/c4}\n"), local=True) is None
