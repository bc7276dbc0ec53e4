"""A job that needs more than the recorded quota gets a warning before the cloud refuses it."""

from pathlib import Path

import pytest

from drumline.chips import UnknownName
from drumline.jobs.billing import Grant, parse_grant, quota_warnings
from drumline.jobs.config import ConfigError, read
from drumline.jobs.core.state import Candidate
from tests.jobs.fakes import ServerHarness, run_scenario

V6E = Grant(64, "spot", "v6e", "europe-west4-a")
V4 = Grant(32, "on-demand", "v4", "us-central2-b")


@pytest.mark.parametrize(
    ("text", "grant"),
    [
        ("64 spot v6e chips in europe-west4-a", V6E),
        ("64 preemptible Cloud TPU v6e chips in zone europe-west4-a", V6E),
        ("32 on-demand TPU v4 chips in zone us-central2-b", V4),
        ("1 spot v5litepod chip in us-central1-a", Grant(1, "spot", "v5e", "us-central1-a")),
    ],
)
def test_a_grant_is_read_as_the_programme_writes_it(text: str, grant: Grant) -> None:
    assert parse_grant(text) == grant
    assert parse_grant(str(grant)) == grant


@pytest.mark.parametrize("text", ["", "lots", "64 v6e chips in europe-west4-a", "x spot v4 chips"])
def test_an_invalid_grant_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not like '64 spot v6e chips in europe-west4-a'"):
        parse_grant(text)


def test_a_chip_or_a_zone_there_is_not() -> None:
    with pytest.raises(UnknownName):
        parse_grant("64 spot v99 chips in europe-west4-a")
    with pytest.raises(UnknownName):
        parse_grant("64 spot v6e chips in atlantis-1-a")


@pytest.mark.parametrize(
    ("candidates", "capacity", "warned"),
    [
        ([("v6e-64", "europe-west4-a")], "spot", []),
        (
            [("v6e-128", "europe-west4-a")],
            "spot",
            ["v6e-128 has 128 chips, more than your quota of 64 spot v6e chips in europe-west4-a"],
        ),
        (
            [("v6e-16", "us-east5-b"), ("v6e-16", "us-east1-d"), ("v6e-16", "europe-west4-a")],
            "spot",
            ["you have no quota of spot v6e chips in us-east5-b, us-east1-d"],
        ),
        ([("v4-64", "us-central2-b")], "on-demand", []),
        (
            [("v4-64", "us-central2-b")],
            "spot",
            ["you have no quota of spot v4 chips in us-central2-b"],
        ),
    ],
)
def test_a_job_beyond_the_quota_gets_a_warning(
    candidates: list[tuple[str, str]], capacity: str, warned: list[str]
) -> None:
    assert quota_warnings([Candidate(*one) for one in candidates], capacity, [V6E, V4]) == warned


def test_two_grants_for_the_same_chips_add_up() -> None:
    choice = Candidate("v6e-128", "europe-west4-a")
    assert quota_warnings([choice], "spot", [V6E, V6E]) == []


def test_who_wrote_no_quota_down_is_not_warned() -> None:
    assert quota_warnings([Candidate("v4-128", "us-central2-b")], "spot", []) == []


def test_the_plan_and_the_job_carry_the_warning_and_the_job_is_made(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        warning = "you have no quota of spot v4 chips in us-central2-b"
        spec = {"accelerator": "v4-16", "zones": ["us-central2-b"], "run": "x", "workdir": None}
        assert (await harness.service.plan(spec))["lines"][-1] == f"! {warning}"
        made = await harness.service.create(spec, {}, "lab")
        assert made["warnings"] == [warning]
        shown = harness.show(made["id"])
        assert ("warning", warning) in [(one["kind"], one["text"]) for one in shown["events"]]
        await harness.reaches(made["id"], "RUNNING")
        within = spec | {"accelerator": "v6e-16", "zones": ["europe-west4-a"]}
        assert not any(
            line.startswith("!") for line in (await harness.service.plan(within))["lines"]
        )

    run_scenario(tmp_path, scenario, settings=f"quota: ['{V6E}']\n")


def test_a_quota_in_the_settings_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("quota: [lots of chips]\n")
    with pytest.raises(ConfigError, match=r"config.yaml: quota: 'lots of chips' is not like"):
        read(tmp_path)
