"""Calls to the API: the requests, the retried errors and their time limits, the login."""

import asyncio

import httpx
import pytest
from google.cloud import tpu_v2

from drumline.cloud.google.rest import CallLimits
from drumline.cloud.google.tpu_api import TpuApi
from drumline.cloud.protocol import Cloud, CloudError, DataDisk, PlacementRequest, SliceOptions
from tests.cloud.google.scripted import (
    PARENT,
    WANTED,
    ZONE,
    Answer,
    Login,
    Script,
    Time,
    ask,
    fails,
    list_nodes,
    ok,
    refused,
    run,
)


def test_it_is_a_cloud() -> None:
    api: Cloud = TpuApi("p", transport=httpx.MockTransport(Script([ok()])))
    asyncio.run(api.close())


class TestAsking:
    def test_sends_messages_that_the_real_client_parses(self) -> None:
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
        assert dict(spec.node.metadata) == {
            "ssh-keys": "drumline:ssh-ed25519 AAAA drumline",
            "enable-oslogin": "FALSE",
        }
        assert spec.node.network_config.enable_external_ips

    @pytest.mark.parametrize(
        ("tier", "oneof"), [("spot", "spot"), ("reserved", None), ("on-demand", None)]
    )
    def test_each_tier_is_one_the_real_client_has(self, tier: str, oneof: str | None) -> None:
        script = Script([ok(name="op")])
        request = PlacementRequest("n", ZONE, "v4-8", tier)
        run(script, lambda api: api.ask(request))
        body = script.seen[0].content
        read = tpu_v2.QueuedResource.from_json(body, ignore_unknown_fields=False)
        assert tpu_v2.QueuedResource.pb(read).WhichOneof("tier") == oneof
        # `gcloud … queued-resources create --reserved` sends the same for any reservation.
        any_reservation = f"projects/p/locations/{ZONE}/reservations/-"
        assert read.reservation_name == (any_reservation if tier == "reserved" else "")

    def test_the_options_of_a_slice_are_those_of_the_real_client(self) -> None:
        options = SliceOptions(
            network="lab",
            subnetwork="projects/host/regions/us-central2/subnetworks/tpus",
            external_ip=False,
            tags=("allow-ssh", "tpu"),
            service_account="trainer@p.iam.gserviceaccount.com",
            scopes=("https://www.googleapis.com/auth/devstorage.read_only",),
            reservation="team-a",
            data_disks=(
                DataDisk("imagenet", "read-only"),
                DataDisk(f"projects/other/zones/{ZONE}/disks/scratch", "read-write"),
            ),
        )
        script = Script([ok(name="op")])
        request = PlacementRequest("n", ZONE, "v4-8", "reserved", options=options)
        run(script, lambda api: api.ask(request))
        body = script.seen[0].content
        read = tpu_v2.QueuedResource.from_json(body, ignore_unknown_fields=False)
        assert read.reservation_name == f"projects/p/locations/{ZONE}/reservations/team-a"
        assert "guaranteed" not in read
        node = read.tpu.node_spec[0].node
        assert node.network_config == tpu_v2.NetworkConfig(
            network="lab",
            subnetwork="projects/host/regions/us-central2/subnetworks/tpus",
            enable_external_ips=False,
        )
        assert list(node.tags) == ["allow-ssh", "tpu"]
        assert node.service_account == tpu_v2.ServiceAccount(
            email="trainer@p.iam.gserviceaccount.com",
            scope=["https://www.googleapis.com/auth/devstorage.read_only"],
        )
        assert [(disk.source_disk, disk.mode.name) for disk in node.data_disks] == [
            (f"projects/p/zones/{ZONE}/disks/imagenet", "READ_ONLY"),
            (f"projects/other/zones/{ZONE}/disks/scratch", "READ_WRITE"),
        ]

    def test_a_shared_reservation_is_sent_as_written(self) -> None:
        path = f"projects/other/locations/{ZONE}/reservations/team-b"
        script = Script([ok(name="op")])
        options = SliceOptions(reservation=path)
        request = PlacementRequest("n", ZONE, "v4-8", "reserved", options=options)
        run(script, lambda api: api.ask(request))
        read = tpu_v2.QueuedResource.from_json(script.seen[0].content)
        assert read.reservation_name == path

    def test_an_unknown_tier_is_not_sent(self) -> None:
        script = Script([ok()])
        request = PlacementRequest("n", ZONE, "v4-8", "free")
        error = fails(script, lambda api: api.ask(request))
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
    def test_an_existing_request_of_that_name_is_ours(self, answer: httpx.Response) -> None:
        script = Script([answer])
        run(script, ask)
        assert len(script.seen) == 1

    def test_a_lost_response_ends_in_already_exists(self) -> None:
        exists = refused(409, "ALREADY_EXISTS", "Resource already exists")
        script = Script([httpx.ReadTimeout("slow"), exists])
        run(script, ask)
        assert len(script.seen) == 2

    def test_a_busy_zone_is_retried(self) -> None:
        script = Script([refused(409, "ABORTED", "unable to queue the operation"), ok(name="op")])
        run(script, ask)
        assert len(script.seen) == 2

    def test_another_conflict_is_not_retried(self) -> None:
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
            (httpx.Response(418, content=b"teapot"), 14),
            (httpx.Response(301, headers={"Location": "http://elsewhere"}), 14),
            (httpx.Response(400, content=b'[{"error": {"status": "OUT_OF_RANGE"}}]'), 11),
            (httpx.Response(403, content=b'{"error": "invalid"}'), 7),
            (httpx.Response(400, content=b"[" * 100_000), 14),
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
        message = "Refused. QuotaFailure: Quota 'A' exhausted. Limit 4 [RESOURCE_QUOTA]"
        assert str(error) == message

    def test_invalid_details_are_ignored(self) -> None:
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
    def test_a_transient_error_is_tried_four_times(self, answer: Answer, code: int | None) -> None:
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
    def test_a_permanent_error_is_tried_once(self, answer: httpx.Response) -> None:
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
        limits = CallLimits(attempts=9, total=1e6)
        fails(Script([refused(503, None, "m")]), list_nodes, time, limits=limits)
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
    def test_retry_after_is_honoured(self, value: str, seconds: float) -> None:
        time = Time(chance=0.0)
        run(Script([refused(503, None, "m", Retry_After=value), ok()]), list_nodes, time)
        assert time.slept == [seconds]

    def test_retry_info_in_the_details_is_honoured(self) -> None:
        details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "3.5s"}]
        time = Time(chance=0.0)
        run(Script([refused(429, None, "m", details), ok()]), list_nodes, time)
        assert time.slept == [3.5]

    def test_a_delay_beyond_the_deadline_is_an_error(self) -> None:
        script, time = Script([refused(429, None, "m", Retry_After="3600")]), Time()
        assert fails(script, list_nodes, time).code == 8
        assert time.slept == []
        assert len(script.seen) == 1

    def test_all_tries_together_stay_within_the_deadline(self) -> None:
        time = Time()
        limits = CallLimits(attempts=1000, total=20.0)
        fails(Script([refused(503, None, "m")]), list_nodes, time, limits=limits)
        assert sum(time.slept) < 20.0
        assert len(time.slept) == 5

    def test_pages_share_the_deadline(self) -> None:
        time = Time()
        more = [ok(nextPageToken="a"), ok(nextPageToken="b"), ok(nextPageToken="c")]
        slow = refused(503, None, "m", Retry_After="9")
        answers: list[Answer] = [slow, more[0], slow, more[1], slow, more[2]]
        assert fails(Script(answers), list_nodes, time, limits=CallLimits(total=20)).code == 14
        assert time.at - 100 < 20

    def test_an_endless_response_is_cut_off(self) -> None:
        async def silent(_: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

        with pytest.raises(CloudError, match=r"no answer from tpu\.googleapis\.com") as caught:
            run(silent, list_nodes, limits=CallLimits(total=0.05, attempts=1))
        assert caught.value.code is None

    def test_every_timeout_is_set(self) -> None:
        script = Script([ok()])
        run(script, list_nodes, limits=CallLimits(connect=1, read=2, write=3, pool=4))
        timeout = script.seen[0].extensions["timeout"]
        assert timeout == {"connect": 1, "read": 2, "write": 3, "pool": 4}


class TestLogin:
    def test_a_call_has_the_token(self) -> None:
        script = Script([ok()])
        login = Login("secret")
        login.quota_project = "payer"
        run(script, list_nodes, credentials=login)
        assert script.seen[0].headers["authorization"] == "Bearer secret"
        assert script.seen[0].headers["x-goog-user-project"] == "payer"

    def test_a_rejected_token_is_replaced_once(self) -> None:
        script = Script([refused(401, "UNAUTHENTICATED", "expired"), ok()])
        login, time = Login("old", "new"), Time()
        run(script, list_nodes, time, credentials=login)
        sent = [one.headers["authorization"] for one in script.seen]
        assert sent == ["Bearer old", "Bearer new"]
        assert login.refused == [None, "old"]
        assert time.slept == []

    def test_a_second_rejection_is_final(self) -> None:
        script = Script([refused(401, "UNAUTHENTICATED", "expired")])
        error = fails(script, list_nodes, credentials=Login("old", "new"))
        assert error.code == 16
        assert "gcloud auth application-default login" in str(error)
        assert "new" not in str(error)
        assert len(script.seen) == 2

    def test_without_a_token_a_rejection_is_final(self) -> None:
        script = Script([refused(401, "UNAUTHENTICATED", "who?")])
        assert fails(script, list_nodes).code == 16
        assert len(script.seen) == 1

    def test_missing_credentials_are_final_and_send_no_request(self) -> None:
        script = Script([ok()])
        error = fails(script, list_nodes, credentials=Login(CloudError("no login", 16)))
        assert error.code == 16
        assert script.seen == []

    def test_a_token_server_that_does_not_answer_is_retried(self) -> None:
        script, time = Script([ok()]), Time()
        run(script, list_nodes, time, credentials=Login(CloudError("no answer"), "token"))
        assert len(time.slept) == 1
        assert len(script.seen) == 1
