import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from google.auth import credentials as google_auth
from google.auth.exceptions import RefreshError, TransportError
from google.cloud import tpu_v2

from drumline.cloud.google import placements
from drumline.cloud.google.credentials import GoogleCredentials, find_project
from drumline.cloud.google.resources import ListedNode, ListedRequest, Trouble
from drumline.cloud.google.rest import CallLimits, World
from drumline.cloud.google.tpu_api import TpuApi
from drumline.cloud.protocol import Cloud, CloudError, PlacementRequest
from drumline.observed.placements import Endpoint

Answer = httpx.Response | Exception
Result = TypeVar("Result")

ZONE = "us-central2-b"
PARENT = f"projects/p/locations/{ZONE}"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
WANTED = PlacementRequest(
    name="dl-ann-000012-1",
    zone=ZONE,
    accelerator="v4-16",
    image="tpu-ubuntu2204-base",
    tier="spot",
    labels={"drumline-owner": "ann", "drumline-job": "000012"},
    metadata={"ssh-keys": "drumline:ssh-ed25519 AAAA drumline"},
)


@dataclass
class Script:
    """A cloud that gives prepared answers in turn, the last one for ever."""

    answers: list[Answer]
    seen: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        # Each request needs a response of its own.
        return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)


@dataclass
class Time:
    """A clock that only sleeping moves, and the sleeps it saw."""

    at: float = 100.0
    slept: list[float] = field(default_factory=list)
    chance: float = 1.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds

    def world(self) -> World:
        return World(
            sleep=self.sleep, random=lambda: self.chance, clock=lambda: self.at, now=lambda: NOW
        )


class Login:
    quota_project: str | None = None

    def __init__(self, *tokens: str | CloudError) -> None:
        self.tokens = list(tokens)
        self.refused: list[str | None] = []

    async def token(self, refused: str | None = None) -> str:
        self.refused.append(refused)
        one = self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]
        if isinstance(one, CloudError):
            raise one
        return one


def run(
    script: Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]],
    story: Callable[[TpuApi], Coroutine[Any, Any, Result]],
    time: Time | None = None,
    **options: Any,
) -> Result:
    async def whole() -> Result:
        api = TpuApi(
            "p",
            transport=httpx.MockTransport(script),  # type: ignore[arg-type]
            world=(time or Time()).world(),
            **options,
        )
        try:
            return await story(api)
        finally:
            await api.close()

    return asyncio.run(whole())


def ok(**body: Any) -> httpx.Response:
    return httpx.Response(200, json=body)


def refused(
    http: int,
    status: str | None,
    message: str,
    details: Iterable[object] = (),
    **headers: str,
) -> httpx.Response:
    error: dict[str, Any] = {"code": http, "message": message, "details": list(details)}
    if status:
        error["status"] = status
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return httpx.Response(http, json={"error": error}, headers=named)


def fails(
    script: Script,
    story: Callable[[TpuApi], Coroutine[Any, Any, Any]],
    time: Time | None = None,
    **options: Any,
) -> CloudError:
    with pytest.raises(CloudError) as caught:
        run(script, story, time, **options)
    return caught.value


def list_nodes(api: TpuApi) -> Coroutine[Any, Any, list[ListedNode]]:
    return api.nodes(ZONE)


def list_requests(api: TpuApi) -> Coroutine[Any, Any, list[ListedRequest]]:
    return api.requests(ZONE)


def ask(api: TpuApi) -> Coroutine[Any, Any, None]:
    return api.ask(WANTED)


def release(api: TpuApi) -> Coroutine[Any, Any, None]:
    return api.release(ZONE, "s")


NO_REQUEST = refused(404, "NOT_FOUND", "no such request")


def release_node(api: TpuApi) -> Coroutine[Any, Any, None]:
    return api.release(ZONE, "s", ["s"])


def test_it_is_a_cloud() -> None:
    api: Cloud = TpuApi("p", transport=httpx.MockTransport(Script([ok()])))
    asyncio.run(api.close())


class TestAsking:
    def test_sends_what_the_real_client_understands(self) -> None:
        script = Script([ok(name="op")])
        run(script, ask)
        [sent] = script.seen
        assert sent.method == "POST"
        assert sent.url.path == f"/v2/{PARENT}/queuedResources"
        assert dict(sent.url.params) == {"queuedResourceId": "dl-ann-000012-1"}
        assert "authorization" not in sent.headers
        read = tpu_v2.QueuedResource.from_json(sent.content, ignore_unknown_fields=False)
        [spec] = read.tpu.node_spec
        assert spec.parent == PARENT
        assert spec.node_id == "dl-ann-000012-1"
        assert spec.node.accelerator_type == "v4-16"
        assert spec.node.runtime_version == "tpu-ubuntu2204-base"
        assert dict(spec.node.labels) == WANTED.labels
        assert dict(spec.node.metadata) == WANTED.metadata
        assert spec.node.network_config.enable_external_ips

    @pytest.mark.parametrize(
        ("tier", "oneof"), [("spot", "spot"), ("reserved", "guaranteed"), ("on-demand", None)]
    )
    def test_each_tier_is_one_the_real_client_has(self, tier: str, oneof: str | None) -> None:
        script = Script([ok(name="op")])
        wanted = PlacementRequest("n", ZONE, "v4-8", "image", tier)
        run(script, lambda api: api.ask(wanted))
        body = script.seen[0].content
        read = tpu_v2.QueuedResource.from_json(body, ignore_unknown_fields=False)
        assert tpu_v2.QueuedResource.pb(read).WhichOneof("tier") == oneof
        assert read.tpu.node_spec[0].node.scheduling_config.reserved == (tier == "reserved")

    def test_an_unknown_tier_is_not_sent(self) -> None:
        script = Script([ok()])
        wanted = PlacementRequest("n", ZONE, "v4-8", "image", "free")
        error = fails(script, lambda api: api.ask(wanted))
        assert error.code == 3
        assert script.seen == []

    @pytest.mark.parametrize(
        "answer",
        [
            refused(409, "ALREADY_EXISTS", "Resource 'dl' already exists"),
            refused(409, None, "the thing already exists"),
            ok(name="op", done=True, error={"code": 6, "message": "exists"}),
        ],
    )
    def test_what_exists_already_is_ours(self, answer: httpx.Response) -> None:
        script = Script([answer])
        run(script, ask)
        assert len(script.seen) == 1

    def test_an_answer_lost_on_the_way_ends_in_already_exists(self) -> None:
        exists = refused(409, "ALREADY_EXISTS", "Resource already exists")
        script = Script([httpx.ReadTimeout("slow"), exists])
        run(script, ask)
        assert len(script.seen) == 2

    def test_a_busy_zone_is_tried_again(self) -> None:
        script = Script([refused(409, "ABORTED", "unable to queue the operation"), ok(name="op")])
        run(script, ask)
        assert len(script.seen) == 2

    def test_another_conflict_is_not(self) -> None:
        script = Script([refused(409, "ABORTED", "something else")])
        assert fails(script, ask).code == 10
        assert len(script.seen) == 1

    def test_an_operation_that_failed_at_once_is_an_error(self) -> None:
        script = Script(
            [ok(name="op", done=True, error={"code": 8, "message": "no more capacity"})]
        )
        error = fails(script, ask)
        assert (error.code, str(error)) == (8, "no more capacity")


class TestErrors:
    @pytest.mark.parametrize(
        ("answer", "code"),
        [
            (refused(400, "FAILED_PRECONDITION", "m"), 9),
            (refused(400, "INVALID_ARGUMENT", "m"), 3),
            (refused(400, None, "m"), 3),
            (refused(403, "PERMISSION_DENIED", "m"), 7),
            (refused(404, "NOT_FOUND", "m"), 5),
            (refused(409, "SOMETHING_NEW", "m"), 10),
            (refused(429, "RESOURCE_EXHAUSTED", "There is no more capacity in the zone"), 8),
            (httpx.Response(418, content=b"teapot"), 2),
            (httpx.Response(301, headers={"Location": "http://elsewhere"}), 2),
            (httpx.Response(400, content=b'[{"error": {"status": "OUT_OF_RANGE"}}]'), 11),
            (httpx.Response(403, content=b'{"error": "invalid"}'), 7),
            (httpx.Response(400, content=b"[" * 100_000), 3),
        ],
    )
    def test_carry_the_rpc_code(self, answer: httpx.Response, code: int) -> None:
        script = Script([answer])
        assert fails(script, list_nodes).code == code
        assert len(script.seen) == 1

    def test_the_details_of_a_quota_are_in_the_text(self) -> None:
        violation = {"subject": "project:p", "description": "Quota 'A' exhausted. Limit 4"}
        details = [
            {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [violation]},
            {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "RESOURCE_QUOTA"},
        ]
        error = fails(Script([refused(400, None, "Refused.", details)]), ask)
        assert error.code == 8
        said = "Refused. QuotaFailure: Quota 'A' exhausted. Limit 4 [RESOURCE_QUOTA]"
        assert str(error) == said

    def test_odd_details_are_left_aside(self) -> None:
        odd = [None, 3, {"@type": 4}, {"@type": "x.QuotaFailure", "violations": "no"}]
        assert fails(Script([refused(400, "INVALID_ARGUMENT", "m", odd)]), ask).code == 3

    def test_a_page_of_html_becomes_one_line(self) -> None:
        page = b"<html><head><title>502\n Bad Gateway</title></head><body>long</body></html>"
        error = fails(Script([httpx.Response(502, content=page)]), list_nodes)
        assert (error.code, str(error)) == (14, "502 Bad Gateway")


class TestRetries:
    @pytest.mark.parametrize(
        ("answer", "code"),
        [
            (httpx.ConnectError("refused"), None),
            (httpx.ConnectTimeout("slow"), None),
            (httpx.ReadTimeout("slow"), None),
            (httpx.WriteTimeout("slow"), None),
            (httpx.PoolTimeout("full"), None),
            (httpx.RemoteProtocolError("cut off"), None),
            (refused(429, "RESOURCE_EXHAUSTED", "Maximum number of requests per minute"), 8),
            (
                refused(
                    429, None, "Quota limit 'CreateNode requests per minute' has been exceeded"
                ),
                8,
            ),
            (refused(500, "INTERNAL", "m"), 13),
            (httpx.Response(502, content=b"<html>Bad Gateway</html>"), 14),
            (refused(503, "UNAVAILABLE", "m"), 14),
            (httpx.Response(504), 4),
            (refused(409, "ABORTED", "unable to queue the operation"), 10),
            (httpx.Response(200, content=b'{"nodes": [{"na'), None),
            (httpx.Response(200, content=b"<html>log in to the hotel</html>"), None),
            (httpx.Response(200, content=b""), None),
            (httpx.Response(200, content=b"[]"), None),
        ],
    )
    def test_what_may_pass_is_tried_four_times(self, answer: Answer, code: int | None) -> None:
        script, time = Script([answer]), Time()
        assert fails(script, list_nodes, time).code == code
        assert len(script.seen) == 4
        assert time.slept == [0.5, 1.0, 2.0]

    @pytest.mark.parametrize(
        "answer",
        [
            refused(429, "RESOURCE_EXHAUSTED", "Quota 'TPUV4PerZoneForTPUAPI' exhausted. Limit 8"),
            refused(429, "RESOURCE_EXHAUSTED", "There is no more capacity in the zone"),
            refused(503, "UNAVAILABLE", "There is no more capacity in the zone"),
            refused(403, "PERMISSION_DENIED", "Permission denied"),
            refused(501, "UNIMPLEMENTED", "no"),
        ],
    )
    def test_what_lasts_is_tried_once(self, answer: httpx.Response) -> None:
        script, time = Script([answer]), Time()
        fails(script, ask, time)
        assert len(script.seen) == 1
        assert time.slept == []

    def test_an_answer_after_a_failure_is_the_answer(self) -> None:
        script = Script([httpx.ReadTimeout("slow"), refused(503, None, "m"), ok()])
        assert run(script, list_nodes) == []
        assert len(script.seen) == 3

    @pytest.mark.parametrize("chance", [0.0, 0.3, 0.999])
    def test_jitter_is_full_and_bounded(self, chance: float) -> None:
        time = Time(chance=chance)
        patience = CallLimits(attempts=9, total=1e6)
        fails(Script([refused(503, None, "m")]), list_nodes, time, patience=patience)
        ceilings = [0.5, 1, 2, 4, 8, 8, 8, 8]
        assert time.slept == pytest.approx([chance * ceiling for ceiling in ceilings])

    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            ("7", 7.0),
            ("Thu, 01 Jan 2026 00:00:09 GMT", 9.0),
            ("Wed, 31 Dec 2025 00:00:00 GMT", 0.0),
            ("Thu, 01 Jan 2026 00:00:09", 0.0),
            ("soon", 0.0),
            ("-3", 0.0),
            ("", 0.0),
        ],
    )
    def test_the_cloud_may_say_how_long_to_wait(self, value: str, seconds: float) -> None:
        time = Time(chance=0.0)
        run(Script([refused(503, None, "m", Retry_After=value), ok()]), list_nodes, time)
        assert time.slept == [seconds]

    def test_the_wait_may_stand_in_the_details(self) -> None:
        details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "3.5s"}]
        time = Time(chance=0.0)
        run(Script([refused(429, None, "m", details), ok()]), list_nodes, time)
        assert time.slept == [3.5]

    def test_a_wait_that_is_too_long_is_the_callers_to_make(self) -> None:
        script, time = Script([refused(429, None, "m", Retry_After="3600")]), Time()
        assert fails(script, list_nodes, time).code == 8
        assert time.slept == []
        assert len(script.seen) == 1

    def test_all_attempts_together_stay_within_the_time(self) -> None:
        time = Time()
        patience = CallLimits(attempts=1000, total=20.0)
        fails(Script([refused(503, None, "m")]), list_nodes, time, patience=patience)
        assert sum(time.slept) < 20.0
        assert len(time.slept) == 5

    def test_pages_share_the_time(self) -> None:
        time = Time()
        more = [ok(nextPageToken="a"), ok(nextPageToken="b"), ok(nextPageToken="c")]
        slow = refused(503, None, "m", Retry_After="9")
        answers: list[Answer] = [slow, more[0], slow, more[1], slow, more[2]]
        assert fails(Script(answers), list_nodes, time, patience=CallLimits(total=20)).code == 14
        assert time.at - 100 < 20

    def test_an_answer_that_never_ends_is_cut_off(self) -> None:
        async def silent(_: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

        with pytest.raises(CloudError, match=r"no answer from tpu\.googleapis\.com") as caught:
            run(silent, list_nodes, patience=CallLimits(total=0.05, attempts=1))
        assert caught.value.code is None

    def test_every_time_out_is_set(self) -> None:
        script = Script([ok()])
        run(script, list_nodes, patience=CallLimits(connect=1, read=2, write=3, pool=4))
        timeout = script.seen[0].extensions["timeout"]
        assert timeout == {"connect": 1, "read": 2, "write": 3, "pool": 4}


class TestLogin:
    def test_the_token_goes_with_the_call(self) -> None:
        script = Script([ok()])
        login = Login("secret")
        login.quota_project = "payer"
        run(script, list_nodes, credentials=login)
        assert script.seen[0].headers["authorization"] == "Bearer secret"
        assert script.seen[0].headers["x-goog-user-project"] == "payer"

    def test_a_refused_token_is_replaced_once(self) -> None:
        script = Script([refused(401, "UNAUTHENTICATED", "expired"), ok()])
        login, time = Login("old", "new"), Time()
        run(script, list_nodes, time, credentials=login)
        sent = [one.headers["authorization"] for one in script.seen]
        assert sent == ["Bearer old", "Bearer new"]
        assert login.refused == [None, "old"]
        assert time.slept == []

    def test_a_second_refusal_is_final(self) -> None:
        script = Script([refused(401, "UNAUTHENTICATED", "expired")])
        error = fails(script, list_nodes, credentials=Login("old", "new"))
        assert error.code == 16
        assert "gcloud auth application-default login" in str(error)
        assert "new" not in str(error)
        assert len(script.seen) == 2

    def test_without_a_token_a_refusal_is_final(self) -> None:
        script = Script([refused(401, "UNAUTHENTICATED", "who?")])
        assert fails(script, list_nodes).code == 16
        assert len(script.seen) == 1

    def test_no_credentials_is_final_and_sends_nothing(self) -> None:
        script = Script([ok()])
        error = fails(script, list_nodes, credentials=Login(CloudError("no login", 16)))
        assert error.code == 16
        assert script.seen == []

    def test_a_token_server_that_does_not_answer_is_tried_again(self) -> None:
        script, time = Script([ok()]), Time()
        run(script, list_nodes, time, credentials=Login(CloudError("no answer"), "token"))
        assert len(time.slept) == 1
        assert len(script.seen) == 1


def real_request(**fields: Any) -> dict[str, Any]:
    """A queued resource as the API prints it, made by the real client."""
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
    def test_reads_what_the_real_client_writes(self) -> None:
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
            trouble=Trouble(8, "no more capacity"),
            by_user=False,
            nodes=("n",),
        )

    def test_tells_our_delete_from_theirs(self) -> None:
        state = {"state": "SUSPENDING", "state_initiator": "USER"}
        entry = real_request(state=state)
        [request] = run(Script([ok(queuedResources=[entry])]), list_requests)
        assert (request.state, request.by_user, request.trouble) == ("SUSPENDING", True, None)

    def test_the_body_we_ask_with_carries_the_labels_back(self) -> None:
        script = Script([ok(name="op")])
        run(script, ask)
        entry = json.loads(script.seen[0].content) | {"name": f"{PARENT}/queuedResources/x"}
        [request] = run(Script([ok(queuedResources=[entry])]), list_requests)
        assert request.labels == WANTED.labels
        assert request.accelerator == "v4-16"

    def test_takes_all_pages(self) -> None:
        pages: list[Answer] = [
            ok(queuedResources=[{"name": "a"}], nextPageToken="two"),
            ok(nextPageToken="three"),
            ok(queuedResources=[{"name": "b"}], nextPageToken=""),
        ]
        script = Script(pages)
        found = run(script, list_requests)
        assert [one.name for one in found] == ["a", "b"]
        tokens = [one.url.params.get("pageToken") for one in script.seen]
        assert tokens == [None, "two", "three"]

    def test_a_listing_without_end_is_an_error(self) -> None:
        script = Script([ok(nextPageToken="same")])
        assert "no end" in str(fails(script, list_requests))
        assert len(script.seen) == 2

    def test_a_listing_with_holes_is_an_error(self) -> None:
        holes = ok(queuedResources=[{"name": "a"}], unreachable=[f"locations/{ZONE}"])
        assert fails(Script([holes]), list_requests).code == 14

    def test_a_listing_of_the_wrong_shape_is_an_error(self) -> None:
        assert "no list" in str(fails(Script([ok(queuedResources={"a": 1})]), list_requests))

    def test_an_odd_entry_does_not_hide_the_others(self) -> None:
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
        found = run(script, list_requests)
        assert [one.name for one in found] == ["half", "good"]
        assert {one.state for one in found} == {"STATE_UNSPECIFIED"}

    def test_trouble_without_a_code_is_still_trouble(self) -> None:
        entry = {"name": "a", "state": {"state": "FAILED", "failedData": {"error": {"x": 1}}}}
        [request] = run(Script([ok(queuedResources=[entry])]), list_requests)
        assert request.trouble == Trouble(2, "the cloud gave no reason")


class TestListingNodes:
    def test_reads_what_the_real_client_writes(self) -> None:
        entry = real_node(
            accelerator_type="v4-16",
            state="READY",
            health="HEALTHY",
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
            health="HEALTHY",
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
    def test_a_host_without_an_address_leaves_all_unknown(self, gap: object) -> None:
        entry = {"name": "n", "networkEndpoints": [gap, {"ipAddress": "10.0.0.3"}]}
        [node] = run(Script([ok(nodes=[entry])]), list_nodes)
        assert node.endpoints == ()

    def test_a_host_without_a_port_is_unknown_to_the_emulators_client(self) -> None:
        entry = {"name": "n", "networkEndpoints": [{"ipAddress": "127.0.0.1"}]}
        [node] = run(Script([ok(nodes=[entry])]), list_nodes, ssh_port=None)
        assert node.endpoints == ()

    def test_a_node_being_made_has_no_hosts_and_no_health(self) -> None:
        entry = real_node(state="CREATING")
        [node] = run(Script([ok(nodes=[entry])]), list_nodes)
        assert (node.state, node.endpoints, node.health) == ("CREATING", (), None)


class TestDeleting:
    def test_a_request_goes_with_its_node(self) -> None:
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
    def test_what_is_gone_or_going_is_no_error(self, answer: httpx.Response) -> None:
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
    def test_what_stays_is_an_error(self, answer: Answer) -> None:
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
        return run(self.script, lambda api: api.host_keys(placements.one(None, [node])))

    def test_are_in_worker_order(self) -> None:
        first = guest(("ssh-rsa", "BBBB"), ("ssh-ed25519", "AAAA1"))
        second = guest(("ssh-ed25519", "ssh-ed25519 AAAA2 root@host"))
        found = self.keys(self.two, ok(guestAttributes=[first, second]))
        assert found == ["ssh-ed25519 AAAA1", "ssh-ed25519 AAAA2"]
        sent = self.script.seen[1]
        assert sent.url.path == f"/v2/{PARENT}/nodes/n:getGuestAttributes"
        body = tpu_v2.GetGuestAttributesRequest.from_json(sent.content, ignore_unknown_fields=False)
        assert body.query_path == "hostkeys/"

    def test_one_that_is_not_published_leaves_a_gap(self) -> None:
        found = self.keys(self.two, ok(guestAttributes=[{}, guest(("ssh-ed25519", "AAAA2"))]))
        assert found == [None, "ssh-ed25519 AAAA2"]

    def test_fewer_answers_than_hosts_give_none_to_the_wrong_host(self) -> None:
        found = self.keys(self.two, ok(guestAttributes=[guest(("ssh-ed25519", "AAAA2"))]))
        assert found == [None, None]

    @pytest.mark.parametrize(
        "answer", [refused(404, "NOT_FOUND", "no"), refused(403, None, "no"), httpx.ReadTimeout("")]
    )
    def test_an_error_is_no_key(self, answer: Answer) -> None:
        assert self.keys(self.two, answer) == [None, None]
        assert self.keys(answer) == []


class TestBuckets:
    def test_their_place_is_read_from_storage(self) -> None:
        script = Script([ok(location="US-CENTRAL2")])
        assert run(script, lambda api: api.bucket_location("b/x")) == "US-CENTRAL2"
        url = script.seen[0].url
        assert str(url) == "https://storage.googleapis.com/storage/v1/b/b%2Fx?fields=location"

    def test_or_from_the_emulator(self) -> None:
        script = Script([ok(location="LOCAL")])
        here = "http://127.0.0.1:9/"
        options: dict[str, Any] = {"base_url": here, "storage_url": here}
        assert run(script, lambda api: api.bucket_location("b"), **options) == "LOCAL"
        assert str(script.seen[0].url) == "http://127.0.0.1:9/storage/v1/b/b?fields=location"

    @pytest.mark.parametrize(
        "answer", [httpx.Response(403), httpx.Response(404), ok(), ok(location=3)]
    )
    def test_one_that_cannot_be_seen_has_no_known_place(self, answer: httpx.Response) -> None:
        assert run(Script([answer]), lambda api: api.bucket_location("b")) is None

    def test_a_cloud_that_does_not_answer_is_an_error(self) -> None:
        assert fails(Script([httpx.Response(503)]), lambda api: api.bucket_location("b")).code == 14


def test_a_name_cannot_leave_its_place_in_the_path() -> None:
    script = Script([ok()])
    run(script, lambda api: api.release(ZONE, "../nodes/other?x=1"))
    assert script.seen[0].url.raw_path.startswith(
        f"/v2/{PARENT}/queuedResources/..%2Fnodes%2Fother%3Fx%3D1".encode()
    )


class FakeLogin(google_auth.Credentials):
    """google-auth's side: each refresh gives the next token, good for an hour."""

    def __init__(self, clock: Callable[[], datetime], *failures: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = clock
        self.failures = list(failures)
        self.refreshes = 0

    def refresh(self, request: object) -> None:
        assert callable(request)
        if self.failures:
            raise self.failures.pop(0)
        self.refreshes += 1
        self.token = f"token {self.refreshes}"
        # In UTC without saying so, as google-auth keeps it.
        self.expiry = (self.clock() + timedelta(hours=1)).replace(tzinfo=None)


@dataclass
class Clock:
    at: datetime = NOW

    def __call__(self) -> datetime:
        return self.at


class TestGoogleCredentials:
    def test_a_token_is_kept_until_five_minutes_before_it_expires(self) -> None:
        clock = Clock()
        fake = FakeLogin(clock)
        login = GoogleCredentials(lambda: (fake, "p"), clock)
        found = []
        for minutes in (0, 54, 1, 54):
            clock.at += timedelta(minutes=minutes)
            found.append(asyncio.run(login.token()))
        assert found == ["token 1", "token 1", "token 2", "token 2"]

    def test_many_calls_at_once_refresh_once(self) -> None:
        fake = FakeLogin(Clock())
        login = GoogleCredentials(lambda: (fake, "p"), Clock())

        async def story() -> tuple[set[str], set[str]]:
            first = await asyncio.gather(*(login.token() for _ in range(8)))
            second = await asyncio.gather(*(login.token("token 1") for _ in range(8)))
            return set(first), set(second)

        assert asyncio.run(story()) == ({"token 1"}, {"token 2"})

    def test_an_expired_login_says_what_to_do(self) -> None:
        expired = RefreshError("invalid_grant: Bad Request")  # type: ignore[no-untyped-call]
        login = GoogleCredentials(lambda: (FakeLogin(Clock(), expired), None))
        with pytest.raises(CloudError, match="expired: run gcloud auth application") as caught:
            asyncio.run(login.token())
        assert caught.value.code == 16

    @pytest.mark.parametrize(
        "failure",
        [
            TransportError("no route"),  # type: ignore[no-untyped-call]
            RefreshError("busy", retryable=True),  # type: ignore[no-untyped-call]
        ],
    )
    def test_a_server_that_is_not_reached_is_no_verdict_on_the_login(
        self, failure: Exception
    ) -> None:
        login = GoogleCredentials(lambda: (FakeLogin(Clock(), failure), None))
        with pytest.raises(CloudError) as caught:
            asyncio.run(login.token())
        assert caught.value.code is None
        assert asyncio.run(login.token()) == "token 1"

    def test_no_login_at_all_says_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
        monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
        with pytest.raises(CloudError, match=r"no Google credentials: .*run gcloud") as caught:
            asyncio.run(GoogleCredentials().token())
        assert caught.value.code == 16
        assert find_project() is None

    def test_the_project_is_the_environments_or_the_logins(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
        assert find_project(lambda: (FakeLogin(Clock()), "mine")) == "mine"
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "named")
        assert find_project(lambda: (FakeLogin(Clock()), "mine")) == "named"

    def test_the_project_that_pays_is_google_auths(self) -> None:
        fake = FakeLogin(Clock())
        fake._quota_project_id = "payer"
        login = GoogleCredentials(lambda: (fake, "p"), Clock())
        asyncio.run(login.token())
        assert login.quota_project == "payer"

    def test_it_logs_a_tpu_api_in(self) -> None:
        fake = FakeLogin(Clock())
        login = GoogleCredentials(lambda: (fake, "p"), Clock())
        script = Script([refused(401, "UNAUTHENTICATED", "expired"), ok()])
        run(script, list_nodes, credentials=login)
        assert script.seen[-1].headers["authorization"] == "Bearer token 2"
