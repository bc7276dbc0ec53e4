"""Listings, deletes and reads, with the messages of Google's own client."""

import json
from typing import Any

import httpx
import pytest
from google.cloud import tpu_v2

from drumline.cloud.google import placements
from drumline.cloud.google.placements import ListedNode, ListedRequest, RpcError
from drumline.cloud.google.tpu_api import TpuApi
from drumline.observed import Endpoint
from tests.cloud.google.scripted import (
    NO_REQUEST,
    PARENT,
    WANTED,
    ZONE,
    Answer,
    Script,
    ask,
    fails,
    list_nodes,
    list_requests,
    ok,
    refused,
    release,
    release_node,
    run,
)


def real_request(**fields: Any) -> dict[str, Any]:
    """Return a queued resource of the real client in the API's format."""
    made = tpu_v2.QueuedResource(name=f"{PARENT}/queuedResources/dl-ann-000012-1", **fields)
    read: dict[str, Any] = json.loads(
        tpu_v2.QueuedResource.to_json(
            made, use_integers_for_enums=False, including_default_value_fields=None
        )
    )
    return read


def real_node(**fields: Any) -> dict[str, Any]:
    made = tpu_v2.Node(name=f"{PARENT}/nodes/dl-ann-000012-1", **fields)
    read: dict[str, Any] = json.loads(
        tpu_v2.Node.to_json(made, use_integers_for_enums=False, including_default_value_fields=None)
    )
    return read


class TestListingRequests:
    def test_reads_messages_of_the_real_client(self) -> None:
        spec = {"node_id": "n", "node": {"accelerator_type": "v4-16", "labels": {"a": "b"}}}
        failed = {
            "state": "FAILED",
            "state_initiator": "SERVICE",
            "failed_data": {"error": {"code": 8, "message": "no more capacity"}},
        }
        entry = real_request(tpu={"node_spec": [spec]}, spot={}, state=failed)
        [request] = run(Script([ok(queuedResources=[entry])]), list_requests)
        assert request == ListedRequest(
            name="dl-ann-000012-1",
            zone=ZONE,
            state="FAILED",
            accelerator="v4-16",
            labels={"a": "b"},
            error=RpcError(8, "no more capacity"),
            nodes=("n",),
        )

    def test_the_labels_of_the_request_are_read_back(self) -> None:
        script = Script([ok(name="op")])
        run(script, ask)
        entry = json.loads(script.seen[0].content) | {"name": f"{PARENT}/queuedResources/x"}
        [request] = run(Script([ok(queuedResources=[entry])]), list_requests)
        assert request.labels == WANTED.labels
        assert request.accelerator == "v4-16"

    def test_reads_all_pages(self) -> None:
        pages: list[Answer] = [
            ok(queuedResources=[{"name": "a"}], nextPageToken="two"),
            ok(nextPageToken="three"),
            ok(queuedResources=[{"name": "b"}], nextPageToken=""),
        ]
        script = Script(pages)
        requests = run(script, list_requests)
        assert [one.name for one in requests] == ["a", "b"]
        tokens = [one.url.params.get("pageToken") for one in script.seen]
        assert tokens == [None, "two", "three"]

    def test_a_listing_without_end_is_an_error(self) -> None:
        script = Script([ok(nextPageToken="same")])
        assert "no end" in str(fails(script, list_requests))
        assert len(script.seen) == 2

    def test_an_incomplete_listing_is_an_error(self) -> None:
        holes = ok(queuedResources=[{"name": "a"}], unreachable=[f"locations/{ZONE}"])
        assert fails(Script([holes]), list_requests).code == 14

    def test_an_invalid_listing_is_an_error(self) -> None:
        assert "is not a list" in str(fails(Script([ok(queuedResources={"a": 1})]), list_requests))

    def test_an_invalid_entry_does_not_hide_the_others(self) -> None:
        odd: list[Any] = [
            None,
            3,
            [],
            {},
            {"name": ""},
            {"name": 4},
            {"name": "half", "state": "what"},
        ]
        script = Script([ok(queuedResources=[*odd, {"name": "good", "tpu": {"nodeSpec": [7]}}])])
        requests = run(script, list_requests)
        assert [one.name for one in requests] == ["half", "good"]
        assert {one.state for one in requests} == {"STATE_UNSPECIFIED"}

    def test_an_error_without_a_code_is_an_error(self) -> None:
        entry = {"name": "a", "state": {"state": "FAILED", "failedData": {"error": {"x": 1}}}}
        [request] = run(Script([ok(queuedResources=[entry])]), list_requests)
        assert request.error == RpcError(2, "the cloud gave no reason")


class TestListingNodes:
    @pytest.mark.parametrize(
        ("fields", "maintenance"),
        [
            ({"health": "HEALTHY"}, ""),
            ({"health": "TIMEOUT"}, ""),
            ({"health": "UNHEALTHY_MAINTENANCE"}, "UNHEALTHY_MAINTENANCE"),
            ({"upcomingMaintenance": {"maintenanceStatus": "PENDING"}}, ""),
            (
                {"upcomingMaintenance": {"maintenanceStatus": "ONGOING"}},
                "maintenance in progress",
            ),
            ({"upcomingMaintenance": "soon", "health": 7}, ""),
        ],
    )
    def test_reads_the_maintenance_of_a_node(
        self, fields: dict[str, object], maintenance: str
    ) -> None:
        entry = {"name": f"{PARENT}/nodes/n", "state": "READY", "acceleratorType": "v4-8"}
        [node] = run(Script([ok(nodes=[entry | fields])]), list_nodes)
        assert placements.combine(None, [node]).maintenance == maintenance

    def test_reads_messages_of_the_real_client(self) -> None:
        entry = real_node(
            accelerator_type="v4-16",
            state="READY",
            labels={"drumline-job": "000012"},
            network_endpoints=[
                {
                    "ip_address": "10.0.0.2",
                    "port": 8470,
                    "access_config": {"external_ip": "3.4.5.6"},
                },
                {"ip_address": "10.0.0.3", "port": 8470},
            ],
        )
        [node] = run(Script([ok(nodes=[entry])]), list_nodes)
        assert node == ListedNode(
            name="dl-ann-000012-1",
            zone=ZONE,
            state="READY",
            accelerator="v4-16",
            labels={"drumline-job": "000012"},
            endpoints=(
                Endpoint("10.0.0.2", "3.4.5.6", 22),
                Endpoint("10.0.0.3", "10.0.0.3", 22),
            ),
        )

    def test_the_emulator_publishes_its_ports(self) -> None:
        endpoint = {"ip_address": "127.0.0.1", "port": 40022}
        entry = real_node(network_endpoints=[endpoint])
        [node] = run(Script([ok(nodes=[entry])]), list_nodes, ssh_port=None)
        assert node.endpoints == (Endpoint("127.0.0.1", "127.0.0.1", 40022),)

    @pytest.mark.parametrize(
        "gap",
        [{}, {"ipAddress": ""}, {"accessConfig": {"externalIp": "3.4.5.6"}}, None, "10.0.0.9"],
    )
    def test_one_host_without_an_address_leaves_the_list_empty(self, gap: object) -> None:
        entry = {"name": "n", "networkEndpoints": [gap, {"ipAddress": "10.0.0.3"}]}
        [node] = run(Script([ok(nodes=[entry])]), list_nodes)
        assert node.endpoints == ()

    def test_a_host_without_a_port_is_unknown_to_the_emulators_client(self) -> None:
        entry = {"name": "n", "networkEndpoints": [{"ipAddress": "127.0.0.1"}]}
        [node] = run(Script([ok(nodes=[entry])]), list_nodes, ssh_port=None)
        assert node.endpoints == ()

    def test_a_node_in_creation_has_no_hosts(self) -> None:
        entry = real_node(state="CREATING")
        [node] = run(Script([ok(nodes=[entry])]), list_nodes)
        assert (node.state, node.endpoints) == ("CREATING", ())


class TestDeleting:
    def test_a_request_is_deleted_with_its_node(self) -> None:
        script = Script([ok(name="op")])
        run(script, release)
        [sent] = script.seen
        assert sent.method == "DELETE"
        assert sent.url.path == f"/v2/{PARENT}/queuedResources/s"
        assert dict(sent.url.params) == {"force": "true"}

    def test_a_node_alone(self) -> None:
        script = Script([NO_REQUEST, httpx.Response(200, content=b"")])
        run(script, release_node)
        [_, sent] = script.seen
        assert (sent.method, sent.url.path) == ("DELETE", f"/v2/{PARENT}/nodes/s")

    @pytest.mark.parametrize(
        "answer",
        [
            refused(404, "NOT_FOUND", "gone"),
            ok(name="op", done=True, error={"code": 5, "message": "gone"}),
            refused(400, "FAILED_PRECONDITION", "Queued resource s is already being deleted."),
            refused(400, "FAILED_PRECONDITION", "cannot delete while in state DELETING"),
            refused(409, "ABORTED", "deletion already in progress"),
        ],
    )
    def test_deleting_a_deleted_resource_is_no_error(self, answer: httpx.Response) -> None:
        run(Script([answer]), release)
        run(Script([NO_REQUEST, answer]), release_node)

    @pytest.mark.parametrize(
        "answer",
        [
            refused(400, "FAILED_PRECONDITION", "cannot be deleted while in state CREATING"),
            refused(400, "FAILED_PRECONDITION", "the request must be deleted first"),
            refused(403, "PERMISSION_DENIED", "is being deleted"),
            httpx.ReadTimeout("slow"),
        ],
    )
    def test_a_failed_delete_is_an_error(self, answer: Answer) -> None:
        fails(Script([answer]), release)


def guest(*keys: tuple[str, str]) -> dict[str, Any]:
    items = [{"namespace": "hostkeys", "key": key, "value": value} for key, value in keys]
    made = tpu_v2.GuestAttributes(query_path="hostkeys/", query_value={"items": items})
    read: dict[str, Any] = json.loads(tpu_v2.GuestAttributes.to_json(made))
    return read


class TestHostKeys:
    two = ok(name="n", networkEndpoints=[{"ipAddress": "10.0.0.2"}, {"ipAddress": "10.0.0.3"}])

    def keys(self, *answers: Answer) -> list[str | None]:
        self.script = Script(list(answers))
        node = ListedNode("n", ZONE, "READY", "v4-16", {})
        return run(self.script, lambda api: api.host_keys(placements.combine(None, [node])))

    def test_are_in_worker_order(self) -> None:
        first = guest(("ssh-rsa", "BBBB"), ("ssh-ed25519", "AAAA1"))
        second = guest(("ssh-ed25519", "ssh-ed25519 AAAA2 root@host"))
        keys = self.keys(self.two, ok(guestAttributes=[first, second]))
        assert keys == ["ssh-ed25519 AAAA1", "ssh-ed25519 AAAA2"]
        sent = self.script.seen[1]
        assert sent.url.path == f"/v2/{PARENT}/nodes/n:getGuestAttributes"
        body = tpu_v2.GetGuestAttributesRequest.from_json(sent.content, ignore_unknown_fields=False)
        assert body.query_path == "hostkeys/"

    def test_an_unpublished_key_is_none(self) -> None:
        keys = self.keys(self.two, ok(guestAttributes=[{}, guest(("ssh-ed25519", "AAAA2"))]))
        assert keys == [None, "ssh-ed25519 AAAA2"]

    def test_fewer_keys_than_hosts_are_not_used(self) -> None:
        keys = self.keys(self.two, ok(guestAttributes=[guest(("ssh-ed25519", "AAAA2"))]))
        assert keys == [None, None]

    @pytest.mark.parametrize(
        "answer",
        [refused(404, "NOT_FOUND", "no"), refused(400, "FAILED_PRECONDITION", "are disabled")],
    )
    def test_an_answer_that_none_is_published_is_no_key(self, answer: Answer) -> None:
        assert self.keys(self.two, answer) == [None, None]

    @pytest.mark.parametrize(
        "answer",
        [refused(403, None, "no"), refused(500, None, "internal"), httpx.ReadTimeout("")],
    )
    def test_keys_that_cannot_be_read_are_an_error(self, answer: Answer) -> None:
        fails(Script([self.two, answer]), read_keys)
        fails(Script([answer]), read_keys)


async def read_keys(api: TpuApi) -> list[str | None]:
    return await api.host_keys(placements.combine(None, [ListedNode("n", ZONE, "READY", "", {})]))


class TestInstanceNames:
    node = ListedNode(
        "n", ZONE, "READY", "v4-16", {}, (Endpoint("10.0.0.2", "1"), Endpoint("10.0.0.3", "1"))
    )

    def names(self, *attributes: dict[str, Any]) -> list[str | None]:
        self.script = Script([ok(guestAttributes=[*attributes])])
        placement = placements.combine(None, [self.node])
        return run(self.script, lambda api: api.instance_names(placement))

    def test_are_in_worker_order(self) -> None:
        first = guest(("hostname", "t1v-n-abc-w-0"), ("ssh-ed25519", "AAAA"))
        second = guest(("ssh-ed25519", "AAAA"))
        assert self.names(first, second) == ["t1v-n-abc-w-0", None]
        [sent] = self.script.seen
        body = tpu_v2.GetGuestAttributesRequest.from_json(sent.content, ignore_unknown_fields=False)
        assert body.query_path == "", "as gcloud asks"

    def test_an_answer_that_none_is_published_is_no_name(self) -> None:
        script = Script([refused(404, "NOT_FOUND", "no guest attributes")])
        placement = placements.combine(None, [self.node])
        assert run(script, lambda api: api.instance_names(placement)) == [None, None]

    def test_fewer_names_than_hosts_are_not_used(self) -> None:
        assert self.names(guest(("hostname", "t1v-n-abc-w-0"))) == [None, None]


class TestBuckets:
    def test_the_location_is_read_from_storage(self) -> None:
        script = Script([ok(location="US-CENTRAL2")])
        assert run(script, lambda api: api.bucket_location("b/x")) == "US-CENTRAL2"
        url = script.seen[0].url
        assert str(url) == "https://storage.googleapis.com/storage/v1/b/b%2Fx?fields=location"

    def test_the_location_is_read_from_the_emulator(self) -> None:
        script = Script([ok(location="LOCAL")])
        here = "http://127.0.0.1:9/"
        options: dict[str, Any] = {"base_url": here, "storage_url": here}
        assert run(script, lambda api: api.bucket_location("b"), **options) == "LOCAL"
        assert str(script.seen[0].url) == "http://127.0.0.1:9/storage/v1/b/b?fields=location"

    @pytest.mark.parametrize(
        "answer",
        [httpx.Response(403), refused(404, None, "Not Found"), ok(), ok(location=3)],
    )
    def test_an_unreadable_bucket_has_no_location(self, answer: httpx.Response) -> None:
        assert run(Script([answer]), lambda api: api.bucket_location("b")) is None

    def test_a_cloud_that_does_not_answer_is_an_error(self) -> None:
        assert fails(Script([httpx.Response(503)]), lambda api: api.bucket_location("b")).code == 14


def test_a_name_is_escaped_in_the_path() -> None:
    script = Script([ok()])
    run(script, lambda api: api.release(ZONE, "../nodes/other?x=1"))
    assert script.seen[0].url.raw_path.startswith(
        f"/v2/{PARENT}/queuedResources/..%2Fnodes%2Fother%3Fx%3D1".encode()
    )
