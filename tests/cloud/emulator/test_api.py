"""The API through Google's own client."""

from collections.abc import Iterator
from typing import Any

import asyncssh
import pytest
from google.api_core import exceptions
from google.cloud import tpu_v2

from tests.cloud.conftest import Emulator, running_emulator

PARENT = "projects/p/locations/local-a"


@pytest.fixture(scope="module")
def scarce(
    tmp_path_factory: pytest.TempPathFactory, ssh_key: asyncssh.SSHKey
) -> Iterator[Emulator]:
    """An emulator without v4 chips in local-a, where requests fail and listings have short pages.

    The tests that share it release their requests.
    """
    with running_emulator(
        tmp_path_factory.mktemp("scarce"),
        ssh_key,
        capacity={"local-a": {"v4": 0}},
        when_short="fail",
        quota={"local-b": {"spot": 4}},
        page_size=3,
        buckets={"ours": "US-CENTRAL2"},
    ) as one:
        yield one


def test_the_whole_life_of_a_request(emulator: Emulator) -> None:
    client = emulator.client()
    operation = emulator.ask("life", "v4-16", labels={"drumline-job": "000012"})
    created = operation.result(timeout=60)
    assert isinstance(created, tpu_v2.QueuedResource)
    assert operation.metadata.target == f"{PARENT}/queuedResources/life"
    emulator.wait_for("life", "ACTIVE")

    request = client.get_queued_resource(name=f"{PARENT}/queuedResources/life")
    assert "spot" in request
    assert request.tpu.node_spec[0].node.labels == {"drumline-job": "000012"}
    node = client.get_node(name=f"{PARENT}/nodes/life")
    assert node.state == tpu_v2.Node.State.READY
    assert node.accelerator_config.type_ == tpu_v2.AcceleratorConfig.Type.V4
    assert node.queued_resource == request.name
    assert [one.ip_address for one in node.network_endpoints] == ["127.0.0.1"] * 2
    assert len({one.port for one in node.network_endpoints}) == 2
    assert node.scheduling_config.spot

    with pytest.raises(exceptions.BadRequest, match="force=true") as refused:
        client.delete_queued_resource(name=request.name)
    assert refused.value.response.json()["error"]["status"] == "FAILED_PRECONDITION"
    emulator.release("life")
    with pytest.raises(exceptions.NotFound, match="queuedResources/life' was not found"):
        client.get_queued_resource(name=request.name)
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=node.name)
    assert emulator.control("resources") == {"requests": [], "nodes": [], "hosts": []}
    assert list((emulator.home / "hosts").iterdir()) == []


def test_the_options_of_a_node_are_checked_and_returned(emulator: Emulator) -> None:
    disk = {"source_disk": "projects/p/zones/local-a/disks/imagenet", "mode": "READ_ONLY"}
    account = {"email": "trainer@p.iam.gserviceaccount.com", "scope": ["https://a/b"]}
    network = {"network": "lab", "subnetwork": "tpus", "enable_external_ips": False}
    emulator.ask(
        "options",
        network_config=network,
        service_account=account,
        tags=["allow-ssh"],
        data_disks=[disk],
    )
    emulator.wait_for("options", "ACTIVE")
    node = emulator.client().get_node(name=f"{PARENT}/nodes/options")
    assert node.network_config == tpu_v2.NetworkConfig(network)
    assert node.service_account == tpu_v2.ServiceAccount(account)
    assert list(node.tags) == ["allow-ssh"]
    assert list(node.data_disks) == [tpu_v2.AttachedDisk(disk)]
    [endpoint] = node.network_endpoints
    assert endpoint.ip_address == "127.0.0.1"
    assert not endpoint.access_config.external_ip, "internal addresses only"
    emulator.release("options")


@pytest.mark.parametrize(
    ("accelerator", "option", "message"),
    [
        ("v4-8", {"tags": ["No Capitals"]}, "Invalid tag"),
        ("v4-8", {"network_config": {"subnetwork": "a b"}}, "Invalid network"),
        ("v4-8", {"service_account": {"email": "nobody"}}, "Invalid service account"),
        ("v4-8", {"data_disks": [{"source_disk": "imagenet"}]}, "must match"),
        ("v4-8", {"data_disks": [{"source_disk": "projects/p/zones/local-b/disks/d"}]}, "not in"),
        ("v4-16", {"data_disks": [{"source_disk": "projects/p/zones/local-a/disks/d"}]}, "READ_ON"),
    ],
)
def test_wrong_options_of_a_node_are_refused(
    emulator: Emulator, accelerator: str, option: dict[str, Any], message: str
) -> None:
    with pytest.raises(exceptions.BadRequest, match=message):
        emulator.ask("wrong-options", accelerator, **option)


def test_a_reservation_is_in_the_zone_of_its_request(emulator: Emulator) -> None:
    client = emulator.client()

    def ask(name: str, **tier: Any) -> Any:
        spec = {"parent": PARENT, "node_id": name, "node": emulator.node()}
        resource = {"tpu": {"node_spec": [spec]}, **tier}
        return client.create_queued_resource(
            parent=PARENT, queued_resource_id=name, queued_resource=resource
        )

    for wrong in ("team-a", "projects/p/locations/local-b/reservations/team-a"):
        with pytest.raises(exceptions.BadRequest, match="reservation"):
            ask("reserved", reservation_name=wrong)
    reservation = f"{PARENT}/reservations/team-a"
    with pytest.raises(exceptions.BadRequest, match="spot request has no reservation"):
        ask("reserved", reservation_name=reservation, spot={})
    ask("reserved", reservation_name=reservation)
    emulator.wait_for("reserved", "ACTIVE")
    request = client.get_queued_resource(name=f"{PARENT}/queuedResources/reserved")
    assert request.reservation_name == reservation
    assert client.get_node(name=f"{PARENT}/nodes/reserved").scheduling_config.reserved
    emulator.release("reserved")


def test_a_node_without_a_queue(emulator: Emulator) -> None:
    client = emulator.client()
    node = client.create_node(parent=PARENT, node_id="alone", node=emulator.node()).result(
        timeout=60
    )
    assert (node.state, node.name) == (tpu_v2.Node.State.READY, f"{PARENT}/nodes/alone")
    changed = client.update_node(
        node={"name": node.name, "labels": {"a": "b"}}, update_mask={"paths": ["labels"]}
    ).result(timeout=60)
    assert changed.labels == {"a": "b"}
    client.delete_node(name=node.name).result(timeout=60)
    assert list(client.list_nodes(parent=PARENT)) == []


def test_out_of_chips_the_operation_of_a_node_fails_with_code_8(scarce: Emulator) -> None:
    operation = scarce.client().create_node(parent=PARENT, node_id="n", node=scarce.node())
    with pytest.raises(
        exceptions.GoogleAPICallError, match="There is no more capacity in the zone"
    ):
        operation.result(timeout=60)
    assert operation.operation.error.code == 8
    assert list(scarce.client().list_nodes(parent=PARENT)) == []


def test_lists_come_in_pages(scarce: Emulator) -> None:
    for index in range(7):
        scarce.ask(f"r{index}")
    client = scarce.client()
    pages = client.list_queued_resources(parent=PARENT).pages
    assert [len(page.queued_resources) for page in pages] == [3, 3, 1]
    every = client.list_queued_resources(request={"parent": PARENT, "page_size": 2})
    assert [one.name[-2:] for one in every] == [f"r{index}" for index in range(7)]
    anywhere = client.list_queued_resources(parent="projects/p/locations/-")
    assert len(list(anywhere)) == 7
    assert list(client.list_queued_resources(parent="projects/p/locations/local-b")) == []
    assert list(client.list_queued_resources(parent="projects/q/locations/local-a")) == []
    for index in range(7):
        scarce.release(f"r{index}")


def test_calls_are_counted_by_method_and_zone(emulator: Emulator) -> None:
    zone = "us-east5-a"  # no other test calls it
    for _ in range(2):
        list(emulator.client().list_nodes(parent=f"projects/p/locations/{zone}"))
    calls = emulator.control("status")
    assert calls["calls_by_zone"][zone] == {"nodes.list": 2}
    assert calls["total"] == sum(calls["calls"].values())


def test_deletions_between_pages_neither_hide_nor_repeat_entries(scarce: Emulator) -> None:
    for index in range(9):
        scarce.ask(f"r{index}")
    client = scarce.client()
    seen: list[str] = []
    for page in client.list_queued_resources(parent=PARENT).pages:
        seen += [one.name[-2:] for one in page.queued_resources]
        # The first entry of the page, its last (the next page begins after it), and a later one.
        for index in {3: (0, 2, 4), 6: (3, 8)}.get(len(seen), ()):
            scarce.release(f"r{index}")
    assert seen == ["r0", "r1", "r2", "r3", "r5", "r6", "r7"]
    with pytest.raises(exceptions.BadRequest, match="page token is invalid"):
        list(client.list_nodes(request={"parent": PARENT, "page_token": "nonsense"}))
    for index in (1, 5, 6, 7):
        scarce.release(f"r{index}")


def test_a_failed_request_carries_its_error(scarce: Emulator) -> None:
    scarce.ask("short")
    scarce.wait_for("short", "FAILED")
    got = scarce.client().get_queued_resource(name=f"{PARENT}/queuedResources/short")
    assert got.state.failed_data.error.code == 8
    assert "There is no more capacity" in got.state.failed_data.error.message
    assert got.state.state_initiator == tpu_v2.QueuedResourceState.StateInitiator.SERVICE
    scarce.release("short")


def test_capacity_given_later_ends_the_wait(emulator: Emulator) -> None:
    with emulator.capacity("v4", 0):
        emulator.ask("patient")
        assert emulator.state("patient") == "WAITING_FOR_RESOURCES"
        emulator.control("capacity", zone="local-a", accelerator="v4", chips=4)
        emulator.wait_for("patient", "ACTIVE")
        emulator.release("patient")


def test_the_text_distinguishes_quota_from_stockout(scarce: Emulator) -> None:
    scarce.ask("fits", zone="local-b")
    with pytest.raises(exceptions.TooManyRequests) as refused:
        scarce.ask("more", zone="local-b")
    assert "Quota 'TPUV4sPreemptiblePodPerProjectPerZoneForTPUAPI' exhausted" in str(refused.value)
    assert "Limit 4 in zone local-b" in str(refused.value)
    scarce.release("fits", zone="local-b")


def test_a_preempted_slice_is_suspended_by_the_service(emulator: Emulator) -> None:
    emulator.slice("victim", labels={"drumline-job": "000012"})
    assert emulator.control("preempt", target="000012") == {"preempted": "victim"}
    emulator.wait_for("victim", "SUSPENDED")
    client = emulator.client()
    got = client.get_queued_resource(name=f"{PARENT}/queuedResources/victim")
    assert got.state.state_initiator == tpu_v2.QueuedResourceState.StateInitiator.SERVICE
    node = client.get_node(name=f"{PARENT}/nodes/victim")
    assert (node.state, len(node.network_endpoints)) == (tpu_v2.Node.State.PREEMPTED, 0)
    emulator.release("victim")
    assert emulator.control("resources") == {"requests": [], "nodes": [], "hosts": []}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"accelerator_type": "v4-7"}, "Accelerator type 'v4-7' is invalid"),
        ({"accelerator_type": "v5e-16"}, "v5e-16 was not found in zone local-a"),
        ({"accelerator_type": "tpu7x-8"}, "tpu7x-8 was not found in zone local-a"),
        ({"runtime_version": "debian"}, "Runtime version 'debian' was not found"),
        ({"labels": {"Key": "x"}}, "Invalid label key 'Key'"),
        ({"labels": {"key": "X Y"}}, "Invalid value 'X Y' of label 'key'"),
    ],
)
def test_invalid_nodes_are_rejected(emulator: Emulator, change: dict[str, Any], says: str) -> None:
    with pytest.raises(exceptions.BadRequest, match=says):
        emulator.client().create_node(parent=PARENT, node_id="wrong", node=emulator.node() | change)


def test_names_that_are_in_use_malformed_or_in_unknown_zones(emulator: Emulator) -> None:
    emulator.slice("taken")
    with pytest.raises(exceptions.Conflict, match="queuedResources/taken' already exists"):
        emulator.ask("taken")
    emulator.release("taken")
    with pytest.raises(exceptions.BadRequest, match="Invalid queued_resource_id 'Bad_Name'"):
        emulator.ask("Bad_Name")
    client = emulator.client()
    with pytest.raises(exceptions.Forbidden, match="Location mars-a is not found or access is"):
        list(client.list_nodes(parent="projects/p/locations/mars-a"))
    with pytest.raises(exceptions.BadRequest, match="v4-8 was not found in zone us-central1-a"):
        client.create_node(
            parent="projects/p/locations/us-central1-a", node_id="n", node=emulator.node()
        )


def test_an_unknown_field_is_rejected(emulator: Emulator) -> None:
    status, answer = emulator.rest(
        "POST", f"/v2/{PARENT}/nodes?nodeId=n", {"acceleratorTyp": "v4-8"}
    )
    assert status == 400
    assert answer["error"]["status"] == "INVALID_ARGUMENT"
    assert "Unknown name \"acceleratorTyp\" at 'node'" in answer["error"]["message"]


def test_unknown_paths_and_parameters_are_the_errors_of_google(emulator: Emulator) -> None:
    for method, path in (
        ("GET", "/"),
        ("GET", f"/v2/{PARENT}/volcanoes"),
        ("GET", "/v1/projects/p/locations"),
        ("PUT", f"/v2/{PARENT}/nodes"),
        ("POST", f"/v2/{PARENT}/nodes/n:explode"),
    ):
        status, answer = emulator.rest(method, path, {})
        shown = {"code": 404, "message": "Method not found.", "status": "NOT_FOUND"}
        assert (status, answer) == (404, {"error": shown}), path
    status, answer = emulator.rest("GET", f"/v2/{PARENT}/nodes?filter=x")
    assert (status, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert 'Unknown name "filter": Cannot bind query parameter' in answer["error"]["message"]
    status, answer = emulator.rest("GET", "/emulator/volcano")
    assert (status, answer) == (404, {"error": "there is no control GET /emulator/volcano"})


def test_a_call_repeated_under_its_request_id_is_the_same_operation(emulator: Emulator) -> None:
    client = emulator.client()
    spec = {"parent": PARENT, "node_id": "twice", "node": emulator.node()}
    create = {
        "parent": PARENT,
        "queued_resource_id": "twice",
        "queued_resource": {"tpu": {"node_spec": [spec]}, "spot": {}},
        "request_id": "01234567-89ab-4def-8123-456789abcdef",
    }
    first, again = (client.create_queued_resource(request=create) for _ in range(2))
    assert first.operation.name == again.operation.name
    with pytest.raises(exceptions.BadRequest, match="was used for another request"):
        client.create_queued_resource(request=create | {"queued_resource_id": "other"})
    with pytest.raises(exceptions.BadRequest, match="must be a UUID"):
        client.create_queued_resource(request=create | {"request_id": "again"})
    with pytest.raises(exceptions.Conflict, match="already exists"):
        client.create_queued_resource(request=create | {"request_id": ""})
    emulator.wait_for("twice", "ACTIVE")
    delete = {
        "name": f"{PARENT}/queuedResources/twice",
        "force": True,
        "request_id": "01234567-89ab-4def-8123-456789abcde0",
    }
    gone = client.delete_queued_resource(request=delete)
    gone.result(timeout=60)
    # Without the id the placement could not be deleted.
    assert client.delete_queued_resource(request=delete).operation.name == gone.operation.name
    with pytest.raises(exceptions.NotFound):
        client.delete_queued_resource(request=delete | {"request_id": ""})


def test_buckets_have_a_location(scarce: Emulator) -> None:
    assert scarce.rest("GET", "/storage/v1/b/ours")[1]["location"] == "US-CENTRAL2"
    assert scarce.rest("GET", "/storage/v1/b/other")[1]["location"] == "LOCAL"


def test_several_nodes_under_one_request(emulator: Emulator) -> None:
    spec = {
        "parent": PARENT,
        "multislice_params": {"node_count": 2, "node_id_prefix": "pair"},
        "node": emulator.node(),
    }
    emulator.client().create_queued_resource(
        parent=PARENT, queued_resource_id="pair", queued_resource={"tpu": {"node_spec": [spec]}}
    )
    emulator.wait_for("pair", "ACTIVE")
    names = [one.name.rpartition("/")[2] for one in emulator.client().list_nodes(parent=PARENT)]
    assert names == ["pair-0", "pair-1"]
    emulator.release("pair")


def test_injected_errors_alternate_and_spare_the_controls(scarce: Emulator) -> None:
    path = f"/v2/{PARENT}/nodes"
    with scarce.faults(fail=1.0):
        assert {scarce.rest("GET", path)[0] for _ in range(3)} == {429, 500, 503}
        spec = {"parent": PARENT, "nodeId": "n", "node": {"acceleratorType": "v4-8"}}
        spec["node"] |= {"runtimeVersion": "tpu-ubuntu2204-base"}  # type: ignore[operator]
        for index in range(12):
            create = f"/v2/{PARENT}/queuedResources?queuedResourceId=r{index}"
            body = {"tpu": {"nodeSpec": [spec | {"nodeId": f"r{index}"}]}}
            assert scarce.rest("POST", create, body)[0] in {429, 500, 503}
        requests = scarce.control("resources")["requests"]
    # Some calls took effect although they failed, which the caller cannot know.
    assert 0 < len(requests) < 12
    assert scarce.rest("GET", path)[0] == 200
    for request in requests:
        scarce.release(request["name"])


def test_an_expired_login_and_a_denied_zone(emulator: Emulator) -> None:
    client = emulator.client()
    with emulator.faults(login="expired"):
        # Google's client would refresh its token, which anonymous credentials cannot.
        status, answer = emulator.rest("GET", f"/v2/{PARENT}/nodes")
    assert (status, answer["error"]["status"]) == (401, "UNAUTHENTICATED")
    assert "invalid authentication credentials" in answer["error"]["message"]
    with emulator.faults(deny=["local-b"]):
        assert list(client.list_nodes(parent=PARENT)) == []
        with pytest.raises(exceptions.Forbidden, match=r"Permission 'tpu\.nodes\.list' denied on"):
            list(client.list_nodes(parent="projects/p/locations/local-b"))
