from pathlib import Path

from drumline.chips import LOCAL_ZONES
from drumline.jobs.core.state import Candidate
from drumline.jobs.spec import JobSpec, parse
from drumline.jobs.spec.places import (
    bucket_uses,
    candidates,
    checkpoint_problem,
    region_conflicts,
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


def test_any_zone_begins_with_the_ones_open_to_everyone() -> None:
    zones = [choice.zone for choice in candidates(job("accelerator: v5p-8"), local=False)]
    assert zones[:3] == ["us-central1-a", "us-east5-a", "europe-west4-b"]
    assert "europe-west1-d" in zones[3:]


def test_any_zone_of_the_local_cloud_is_one_of_its_own() -> None:
    found = candidates(job(V4), local=True)
    assert found == tuple(Candidate("v4-128", zone) for zone in LOCAL_ZONES)


def test_named_zones_exist_on_the_local_cloud_and_its_own_only_there() -> None:
    spec = job(V4 + "zones: [local-b, us-central2-b]")
    assert [one.zone for one in candidates(spec, local=True)] == ["local-b", "us-central2-b"]
    assert [one.zone for one in candidates(spec, local=False)] == ["us-central2-b"]


def test_every_bucket_is_found() -> None:
    spec = job(V4 + "mounts: {/data: gs://lab-data/c4}\ncheckpoint: gs://lab-out/x")
    assert [(use.key, use.bucket) for use in bucket_uses(spec)] == [
        ("mounts /data", "lab-data"),
        ("checkpoint", "lab-out"),
    ]


def test_a_bucket_elsewhere_is_refused_with_the_price() -> None:
    spec = job(V4 + MOUNT)
    found = region_conflicts(spec, candidates(spec, local=False), {"lab-data": "EU"})
    assert found.choices == ()
    assert found.refusal == (
        "mounts /data: gs://lab-data is in EU, the slice would be in us-central2-b: "
        "reading 1 TB costs about $20 to $50\n"
        "use a bucket in US-CENTRAL2, or set allow_cross_region: true"
    )


def test_a_multi_region_that_holds_the_zone_is_still_elsewhere() -> None:
    spec = job(V4 + MOUNT)
    assert region_conflicts(spec, candidates(spec, local=False), {"lab-data": "US"}).refusal


def test_any_zone_narrows_to_the_region_of_the_data() -> None:
    spec = job("accelerator: [v4-8, v6e-16]\n" + MOUNT)
    found = region_conflicts(spec, candidates(spec, local=False), {"lab-data": "EUROPE-WEST4"})
    assert found == ((Candidate("v6e-16", "europe-west4-a"),), None)


def test_a_named_zone_elsewhere_is_refused_though_another_would_do() -> None:
    spec = job("accelerator: v6e-16\nzones: [us-east5-b, europe-west4-a]\n" + MOUNT)
    found = region_conflicts(spec, candidates(spec, local=False), {"lab-data": "us-east5"})
    assert found.refusal is not None
    assert "the slice would be in europe-west4-a" in found.refusal
    assert found.refusal.endswith(
        "\nleave europe-west4-a out of zones, or set allow_cross_region: true"
    )


def test_each_bucket_elsewhere_has_its_line() -> None:
    spec = job(V4 + MOUNT + "checkpoint: gs://lab-out/x")
    locations = {"lab-data": "EU", "lab-out": "ASIA"}
    refusal = region_conflicts(spec, candidates(spec, local=False), locations).refusal
    assert refusal is not None
    first, second, mend = refusal.split("\n")
    assert first.startswith("mounts /data: gs://lab-data is in EU")
    assert second.startswith("checkpoint: gs://lab-out is in ASIA")
    assert mend == "use a bucket in US-CENTRAL2, or set allow_cross_region: true"


def test_what_is_not_known_or_local_is_no_objection() -> None:
    spec = job(V4 + MOUNT)
    choices = candidates(spec, local=False)
    for locations in ({}, {"lab-data": None}, {"lab-data": "LOCAL"}, {"lab-data": "us-central2"}):
        assert region_conflicts(spec, choices, locations) == (choices, None)


def test_who_allows_it_may_cross_regions_but_near_zones_come_first() -> None:
    spec = job("accelerator: v6e-16\nallow_cross_region: true\n" + MOUNT)
    choices = candidates(spec, local=False)
    found = region_conflicts(spec, choices, {"lab-data": "EUROPE-WEST4"})
    assert found.refusal is None
    assert found.choices[0].zone == "europe-west4-a"
    assert set(found.choices) == set(choices)
    named = job("accelerator: v6e-16\nallow_cross_region: true\nzones: us-east5-b\n" + MOUNT)
    choices = candidates(named, local=False)
    assert region_conflicts(named, choices, {"lab-data": "EU"}) == (choices, None)


def test_a_checkpoint_on_the_disk_of_a_host_is_lost_with_it() -> None:
    lost = (
        "checkpoint: {} is on the host's own disk and would be lost with the slice; "
        "use gs://bucket/folder, or a folder below a mount"
    )
    relative = job(V4 + "checkpoint: out")
    assert checkpoint_problem(relative, local=False) == lost.format("/lab/out")
    assert checkpoint_problem(relative, local=True) is None
    home = job(V4 + "checkpoint: ~/out")
    assert checkpoint_problem(home, local=True) == lost.format("~/out")
    beside = job(V4 + MOUNT + "checkpoint: /database/x")
    assert checkpoint_problem(beside, local=False) == lost.format("/database/x")


def test_a_checkpoint_in_a_bucket_or_below_a_mount_is_kept() -> None:
    for text in ("checkpoint: gs://lab-data/x", MOUNT + "checkpoint: /data/x", ""):
        assert checkpoint_problem(job(V4 + text), local=False) is None
    home = job(V4 + "mounts: {~/data: gs://lab-data}\ncheckpoint: ~/data/x")
    assert checkpoint_problem(home, local=False) is None
