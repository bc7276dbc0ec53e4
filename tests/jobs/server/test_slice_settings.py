"""The settings of slices: from job files and config.yaml to the cloud and to SSH."""

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.cloud.protocol import DataDisk, SliceOptions
from drumline.jobs.config import ConfigError, read
from drumline.jobs.server.verbs import RequestError
from tests.jobs.fakes import ZONE, ServerHarness, run_scenario

LAB = {
    "network": "lab",
    "subnetwork": "tpus",
    "external_ip": False,
    "tags": ["allow-ssh"],
    "service_account": "trainer@lab-tpu-1.iam.gserviceaccount.com",
    "labels": {"team": "vision", "cost-centre": 4711},
    "ssh": {"proxy_command": "iap %n %p --zone %z"},
}
"""The settings of a lab in config.yaml."""


def settings(**keys: Any) -> str:
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())


def test_a_slice_is_requested_with_the_settings_of_its_job(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(
            capacity="reserved",
            reservation="team-a",
            labels={"team": "vision"},
            service_account={"scopes": ["storage-ro"]},
            data_disks=[{"source": "imagenet", "mode": "read-only"}],
        )
        await harness.reaches(job, "RUNNING")
        [request] = harness.cloud.asked
        assert request.options == SliceOptions(
            reservation="team-a",
            scopes=("https://www.googleapis.com/auth/devstorage.read_only",),
            data_disks=(DataDisk("imagenet", "read-only"),),
        )
        assert request.labels["team"] == "vision"
        assert request.labels["drumline-job"] == job

    run_scenario(tmp_path, scenario)


def test_the_settings_of_the_home_are_the_defaults_of_every_job(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(tags=[], labels={"team": "speech"}, external_ip=True)
        await harness.reaches(job, "RUNNING")
        [request] = harness.cloud.asked
        assert request.options == SliceOptions(
            network="lab",
            subnetwork="tpus",
            external_ip=True,
            service_account="trainer@lab-tpu-1.iam.gserviceaccount.com",
        )
        assert request.labels["team"] == "speech"
        assert request.labels["cost-centre"] == "4711"

    run_scenario(tmp_path, scenario, settings=settings(**LAB))


def test_every_connection_goes_through_the_proxy_of_the_job(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        [session] = harness.starts(job)
        commands = [("iap", f"instance-{n}", "22", "--zone", ZONE) for n in range(2)]
        assert [address.proxy_command for address in session.addresses] == commands
        hosts = await harness.service.hosts(job)
        assert [tuple(host["proxy_command"]) for host in hosts] == commands
        other = await harness.create(ssh={"proxy_command": "none"})
        await harness.reaches(other, "RUNNING")
        [session] = harness.starts(other)
        assert [address.proxy_command for address in session.addresses] == [(), ()]

    run_scenario(tmp_path, scenario, settings=settings(**LAB))


def test_the_dry_run_shows_the_settings(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        disks = [{"source": "imagenet", "mode": "read-only"}]
        spec = {"accelerator": "v4-16", "run": "x", "workdir": None, "data_disks": disks}
        spec |= {"capacity": "reserved", "reservation": "team-a"}
        lines = (await harness.service.plan(spec))["lines"]
        assert lines[1:-1] == [
            "  network: lab",
            "  subnetwork: tpus",
            "  addresses: internal only",
            "  tags: allow-ssh",
            "  service account: trainer@lab-tpu-1.iam.gserviceaccount.com",
            "  labels: team=vision, cost-centre=4711",
            "  reservation: team-a",
            "  data disks: imagenet (read-only)",
            "  SSH through: iap %n %p --zone %z",
        ]

    run_scenario(tmp_path, scenario, settings=settings(**LAB))


def test_a_resource_of_another_zone_is_refused_with_its_place(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        path = "projects/p/zones/us-east5-b/disks/imagenet"
        disks = [{"source": path, "mode": "read-only"}]
        with pytest.raises(RequestError) as caught:
            await harness.create(data_disks=disks)
        assert str(caught.value) == (
            f"data_disks: {path} is in us-east5-b, the slice would be in {ZONE}; "
            "name a zone there, or another resource"
        )
        both: dict[str, Any] = {"accelerator": "v6e-16", "zones": ["us-east5-b", "europe-west4-a"]}
        with pytest.raises(RequestError, match="remove europe-west4-a from zones"):
            await harness.create(**both, data_disks=disks)
        anywhere: dict[str, Any] = {"accelerator": "v6e-16", "zones": "any", "data_disks": disks}
        job = await harness.create(**anywhere)
        choices = harness.service.record(job).job.choices
        assert {choice.zone for choice in choices} == {"us-east5-b"}
        subnet = "projects/p/regions/us-central2/subnetworks/tpus"
        assert await harness.create(subnetwork=subnet), "the region of the slice"

    run_scenario(tmp_path, scenario)


def test_a_held_slice_keeps_the_network_it_was_requested_with(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(keep=600)
        await harness.reaches(job, "RUNNING")
        await harness.service.verb(job, "cancel", {})
        await harness.reaches(job, "CANCELLED")
        spec = harness.show(job)["spec"]
        with pytest.raises(RequestError, match=r"external_ip: .* drumline delete"):
            await harness.service.verb(job, "resume", {"spec": spec | {"external_ip": False}})
        changed = spec | {"labels": {"team": "speech"}}
        await harness.service.verb(job, "resume", {"spec": changed})
        await harness.reaches(job, "RUNNING")

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("network: Lab", "network: 'Lab' is not the name of a network"),
        ("ssh: {proxy_command: nc %q}", r"ssh.proxy_command: %q is not known"),
        ("labels: {drumline-owner: me}", "are reserved"),
        ("external_ip: internal", "external_ip: is 'internal'; expected true or false"),
    ],
)
def test_the_settings_of_the_home_have_the_rules_of_the_job_file(
    tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "config.yaml").write_text(line)
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.yaml: {line.partition(':')[0]}")
