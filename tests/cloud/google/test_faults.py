import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.cloud.google import errors
from drumline.cloud.google.errors import classify, refusal
from drumline.jobs.core.refusals import RefusalAction, action_for
from drumline.observed import Fault, FaultType, Scope

STOCKOUT = Fault(FaultType.STOCKOUT, Scope.ZONE)
ZONE_QUOTA = Fault(FaultType.QUOTA, Scope.ZONE)
REGION_QUOTA = Fault(FaultType.QUOTA, Scope.REGION)
RATE = Fault(FaultType.RATE, Scope.PROJECT)
ZONE_DENIED = Fault(FaultType.DENIED, Scope.ZONE)
PROJECT_DENIED = Fault(FaultType.DENIED, Scope.PROJECT)
LOGIN = Fault(FaultType.LOGIN, Scope.PROJECT)
CONFLICT = Fault(FaultType.CONFLICT, Scope.REQUEST)
UNKNOWN = Fault(FaultType.UNKNOWN, Scope.ZONE)
TRANSIENT = Fault(FaultType.TRANSIENT, Scope.REQUEST)
INVALID = Fault(FaultType.INVALID, Scope.REQUEST)


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (8, 'There is no more capacity in the zone "us-central2-b"', STOCKOUT),
        (
            8,
            'There is no more capacity in the zone "us-central1-c"; you can try in another zone '
            "where Cloud TPU Nodes are offered (see https://cloud.google.com/tpu/docs/regions) "
            "[EID: 0x9f48947a7d57c8d]",
            STOCKOUT,
        ),
        (8, "Insufficient reserved capacity", STOCKOUT),
        (9, "Insufficient reserved capacity. Contact customer support.", STOCKOUT),
        (
            3,
            "update is not supported while in state PREEMPTED",
            Fault(FaultType.PREEMPTED, Scope.ZONE),
        ),
        (
            8,
            "Quota 'TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI' exhausted.\n"
            "      Limit 20800 in region us-central2",
            REGION_QUOTA,
        ),
        (
            8,
            "Quota 'TPUV6EPerProjectPerZoneForTPUAPI' exhausted. Limit 64 in zone europe-west4-a",
            ZONE_QUOTA,
        ),
        (8, "QuotaFailure: no description", REGION_QUOTA),
        (
            8,
            "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. "
            "Limit: 0",
            REGION_QUOTA,
        ),
        (8, "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8.0 in region us-central1.", REGION_QUOTA),
        (8, "Maximum number of CreateNode requests per minute", RATE),
        (
            8,
            "Quota exceeded for quota metric 'CreateNode requests' and limit 'CreateNode requests "
            "per minute' of service 'tpu.googleapis.com' [RATE_LIMIT_EXCEEDED]",
            RATE,
        ),
        (5, "Location us-east5-b is not found or access is unauthorized.", ZONE_DENIED),
        (7, "Permission 'tpu.nodes.list' denied on", ZONE_DENIED),
        (
            7,
            "Permission 'tpu.nodes.list' denied on 'projects/p/locations/us-central2-b/nodes'",
            ZONE_DENIED,
        ),
        (7, "Permission 'tpu.nodes.list' denied on 'projects/p'", PROJECT_DENIED),
        (
            7,
            "User does not have permission to submit requests into this queue for accelerator "
            "type v5p-8 in location us-east1-d.",
            ZONE_DENIED,
        ),
        (7, "The caller does not have permission", PROJECT_DENIED),
        (7, "Cloud TPU API has not been used in project 7 before", PROJECT_DENIED),
        (16, "Request had invalid authentication credentials.", LOGIN),
        (16, "no Google credentials: run gcloud auth application-default login", LOGIN),
        (None, "('invalid_grant: Bad Request', {'error': 'invalid_grant'})", LOGIN),
        (10, "unable to queue the operation", CONFLICT),
        (None, "unable to queue the operation", CONFLICT),
        (6, "Resource already exists", CONFLICT),
        (
            3,
            "the accelerator v4-128 was not found in zone us-central2-b [EID: 0x94]",
            Fault(FaultType.INVALID, Scope.ZONE),
        ),
        (3, "Invalid value at 'queued_resource.tpu'", INVALID),
        (
            5,
            "Resource 'projects/p/locations/z/nodes/n' was not found",
            Fault(FaultType.NOT_FOUND, Scope.REQUEST),
        ),
        (None, "no answer from tpu.googleapis.com: ConnectTimeout", TRANSIENT),
        (None, "", TRANSIENT),
        (13, "an internal error has occurred", TRANSIENT),
        (14, "The service is currently unavailable.", TRANSIENT),
        (4, "deadline", TRANSIENT),
    ],
)
def test_known_texts_are_classified(code: int | None, text: str, expected: Fault) -> None:
    assert classify(code, text) == expected


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        # Only the text names the exhausted resource; this one does not.
        (8, "Resource has been exhausted (e.g. check quota).", UNKNOWN),
        (8, "", UNKNOWN),
        # Preemptible is the tier, not the event.
        (3, "schedulingConfig.preemptible must not be set", INVALID),
        (9, "update is not supported while in state CREATING", UNKNOWN),
        # A user's own resource may have any name.
        (3, "label value 'capacity' is invalid", INVALID),
        (3, "nodeId 'quota-exhausted' is too long", INVALID),
        # The API does not report devices.
        (3, "metadata key 'No accelerator found' is invalid", INVALID),
        (2, "something new", UNKNOWN),
        (99, "a code that does not exist", UNKNOWN),
        (-1, "nor this", UNKNOWN),
    ],
)
def test_similar_texts_are_not_classified(code: int, text: str, expected: Fault) -> None:
    assert classify(code, text) == expected


def test_every_rule_decides_its_example() -> None:
    for rule in errors.RULES:
        for code in rule.codes or (9, None):
            assert errors.find_rule(code, rule.example) is rule, rule.example
            assert classify(code, rule.example) == Fault(rule.kind, rule.scope)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (STOCKOUT, RefusalAction.NEXT_CANDIDATE),
        (ZONE_QUOTA, RefusalAction.NEXT_CANDIDATE),
        (REGION_QUOTA, RefusalAction.NEXT_CANDIDATE),
        (RATE, RefusalAction.RETRY),
        (ZONE_DENIED, RefusalAction.NEXT_CANDIDATE),
        (PROJECT_DENIED, RefusalAction.RETRY),
        (LOGIN, RefusalAction.RETRY),
        (Fault(FaultType.PREEMPTED, Scope.ZONE), RefusalAction.PREEMPTION),
        (CONFLICT, RefusalAction.RETRY),
        (INVALID, RefusalAction.GIVE_UP),
        (Fault(FaultType.INVALID, Scope.ZONE), RefusalAction.NEXT_CANDIDATE),
        (Fault(FaultType.NOT_FOUND, Scope.REQUEST), RefusalAction.RETRY),
        (TRANSIENT, RefusalAction.RETRY),
        (UNKNOWN, RefusalAction.NEXT_CANDIDATE),
    ],
)
def test_the_kind_determines_the_action(fault: Fault, expected: RefusalAction) -> None:
    assert action_for(fault) is expected


@pytest.mark.parametrize(
    ("code", "text", "zone", "sentence"),
    [
        (
            8,
            'There is no more capacity in the zone "us-central2-b"',
            "us-central2-b",
            "no capacity in us-central2-b",
        ),
        (
            8,
            "Quota 'TPUV4sPodPerProjectPerRegionForTPUAPI' exhausted. Limit 32 in region "
            "us-central2",
            "us-central2-b",
            "quota of 32 v4 chips in us-central2 is used up",
        ),
        (
            8,
            "Quota 'TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI' exhausted. Limit 64 in "
            "zone us-west4-a",
            "us-west4-a",
            "quota of 64 spot v5e chips in us-west4-a is used up",
        ),
        (
            8,
            "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. "
            "Limit: 0 in region us-east5.",
            "us-east5-b",
            "no quota of spot v6e chips in us-east5: its limit is 0",
        ),
        (
            8,
            "Quota limit 'TPUV6EPerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0",
            "us-east5-b",
            "no quota of v6e chips in us-east5: its limit is 0",
        ),
        (
            8,
            "Quota 'TPUV5PPerProjectPerZoneForTPUAPI' exhausted.",
            "us-east5-a",
            "quota of v5p chips in us-east5-a is used up",
        ),
        (
            8,
            "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8.0 in region us-central1.",
            "us-central1-a",
            "quota of 8 external addresses in us-central1 is used up",
        ),
        (8, "QuotaFailure: no description", "local-a", "quota in local is used up"),
        (
            7,
            "Permission 'tpu.nodes.list' denied on",
            "us-east1-d",
            "the permission tpu.nodes.list is missing in us-east1-d: ask an administrator of the "
            "project for the role roles/tpu.viewer, or roles/tpu.admin to run jobs",
        ),
        (
            7,
            "Cloud TPU API has not been used in project 7",
            "us-east1-d",
            "the API tpu.googleapis.com is disabled in the project: run `gcloud services enable "
            "tpu.googleapis.com`",
        ),
        (
            16,
            "",
            "z",
            "Google login is missing or expired: run gcloud auth application-default login",
        ),
        (8, "odd {zone}\n text", "us-east1-d", "us-east1-d refused the request"),
        (
            3,
            "",
            "us-east1-d",
            "the request was refused as invalid: correct the job file, then run `drumline resume`",
        ),
    ],
)
def test_the_sentence_explains_the_wait(code: int, text: str, zone: str, sentence: str) -> None:
    assert refusal(code, text, zone).message == sentence


def test_the_clouds_message_follows_the_explanation() -> None:
    refused = refusal(8, "There is no more\n capacity in the zone", "us-east1-d")
    assert refused.words == "There is no more capacity in the zone"
    assert refused.text == (
        "no capacity in us-east1-d (the cloud: There is no more capacity in the zone)"
    )
    assert refusal(13, "", "us-east1-d").text == refusal(13, "", "us-east1-d").message
    assert refusal(8, "odd {zone}", "us-east1-d").words == "odd {zone}"


@pytest.mark.parametrize("kind", FaultType)
def test_every_kind_has_a_sentence_and_an_advice(kind: FaultType) -> None:
    assert errors._SENTENCES[kind]
    assert errors._ADVICE[kind]


@pytest.mark.parametrize("code", range(17))
def test_a_long_text_becomes_one_line(code: int) -> None:
    refused = refusal(code, "long\n" * 500, "us-central2-b")
    assert "\n" not in refused.text
    assert len(refused.message) < 250
    assert len(refused.words) <= 240


codes = st.none() | st.integers(-5, 40)
pieces = st.sampled_from(
    [
        *(rule.example for rule in errors.RULES),
        "Couldn't open iommu group",
        "open(/dev/vfio/0): Device or resource busy",
        "Failed to initialize TPU system",
        "TPU initialization failed",
        "No accelerator found",
        "Quota '",
        "Limit: ",
        "in region ",
        "Permission '",
        "Traceback (most recent call last):\n",
    ]
)
texts = st.lists(st.text() | pieces).map(" ".join)


@given(codes, texts)
def test_any_text_has_a_kind_and_a_sentence(code: int | None, text: str) -> None:
    fault = classify(code, text)
    assert fault.kind in FaultType
    assert fault.scope in Scope
    assert action_for(fault) in RefusalAction
    assert refusal(code, text, "us-central2-b").message
