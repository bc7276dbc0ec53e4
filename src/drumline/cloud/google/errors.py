"""Classifies the errors of Google's REST APIs and explains them. Pure functions.

`classify`, `explain` and `refusal` give an error its kind, its scope and sentences for the user. A
table has the texts that the cloud is known to send. RESOURCE_EXHAUSTED (8) means stockout, quota or
rate, so the text is matched first, and the code decides only if no rule matches. An unknown text is
UNKNOWN, not the most likely kind. `drumline list` and `drumline explain` print the sentences, and
`jobs.core.refusals` decides the reaction. `responses` parses what is classified here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from drumline.cloud.google.permissions import role_of
from drumline.observed import Fault, FaultType, Refusal, Scope


class Rpc(IntEnum):
    """The codes of google.rpc.Code."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


# Classification ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A pattern for the text of an error, and its meaning."""

    regex: re.Pattern[str]
    kind: FaultType
    scope: Scope
    example: str
    sentence: str
    """Replaces the sentence of the kind, if not empty."""
    advice: str
    """Replaces the advice of the kind, if not empty."""
    codes: frozenset[int | None] | None
    """The codes for which the rule holds; None is all."""


def _rule(
    regex: str,
    kind: FaultType,
    scope: Scope,
    example: str,
    *,
    sentence: str = "",
    advice: str = "",
    codes: frozenset[int | None] | None = None,
) -> Rule:
    return Rule(re.compile(regex, re.IGNORECASE), kind, scope, example, sentence, advice, codes)


_QUOTED = r"['\"“”‘’`]"
_ZONE_NAME = re.compile(r"(?<![\w/-])[a-z]+(?:-[a-z]+)+\d+-[a-z]\b", re.IGNORECASE)
_REJECTION = (
    r"(?:\bnot\b|n't\b|\bcannot\b).{0,60}?"
    r"\b(?:found|available|supported|offered|valid|permitted|allowed|enabled|used|exist|served)\b"
    r"|\bunsupported\b|\bunavailable\b|\binvalid\b|\bunknown\b|\bno such\b"
    r"|\bno\b.{0,60}?\bfound\b|\bnot have an?\b"
)
_PLACE = (
    rf"\b(?:zone|location|region)\b|{_ZONE_NAME.pattern}"
    rf"|/(?:zones|locations)/[\w-]+(?:{_QUOTED}"
    r"|/(?:acceleratorTypes|machineTypes|runtimeVersions|reservations)/)"
)
# A chip quota. The limit of a number of calls has a name as well, with spaces or PerMinute in it.
_CHIP_QUOTA = (
    rf"\b(?:quota|limit)(?: limit)? ?:? ?{_QUOTED}"
    r"(?!\w*Per(?:Minute|Second|Hour|Day))[\w./-]*(?:TPU|PerZone|PerRegion)"
)
# An answer about the request, in contrast to one about the caller or from a failing service.
_ABOUT_REQUEST: frozenset[int | None] = frozenset({2, 3, 5, 9, 11, 12, None})
# No code, or one that means nothing: only then do weak words decide.
_NO_CODE: frozenset[int | None] = frozenset({2, None})

_FIX_JOB = "correct the job file, then run `drumline resume`"

# The first rule that matches decides. A zone or region in the text sets the scope of QUOTA.
RULES: tuple[Rule, ...] = (
    # --- The login
    _rule(
        r"\binvalid_(?:grant|rapt|client)\b|reauth(?:entication)?\b.{0,20}(?:needed|required|error|failed)"
        r"|\bproblem refreshing your current auth"
        r"|reauth related error|ACCESS_TOKEN_(?:EXPIRED|TYPE_UNSUPPORTED)|CREDENTIALS_MISSING"
        r"|no Google credentials|Google credentials have expired"
        r"|(?:invalid|missing|required) authentication credential"
        r"|default credentials (?:were|was|have|are)? ?not (?:be )?(?:found|automatically)"
        r"|could not automatically determine credentials"
        r"|token (?:has been|is|was) (?:expired|revoked)"
        r"|not currently have an active account|\bDefaultCredentialsError\b",
        FaultType.LOGIN,
        Scope.PROJECT,
        "no Google credentials: run gcloud auth application-default login",
    ),
    # --- No answer, whatever text came instead of one
    _rule(
        r"^no answer from\b",
        FaultType.TRANSIENT,
        Scope.REQUEST,
        "no answer from tpu.googleapis.com: ConnectTimeout",
        codes=_NO_CODE,
    ),
    # --- Quota of chips, before the limits of calls because both say "quota exceeded"
    _rule(
        rf"{_CHIP_QUOTA}\w*PerZone",
        FaultType.QUOTA,
        Scope.ZONE,
        "Quota 'TPUV6EPerProjectPerZoneForTPUAPI' exhausted. Limit 64 in zone europe-west4-a",
    ),
    _rule(
        _CHIP_QUOTA,
        FaultType.QUOTA,
        Scope.REGION,
        "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0",
    ),
    # --- The rate of calls
    _rule(
        r"(?:request|quer(?:y|ie)|call|operation|read|write|mutation)s?\b.{0,60}"
        r"\bper[ _](?:\d+ )?(?:second|minute|hour|day|user)"
        r"|\b(?:quota|limit)\b.{0,200}per[ _]?(?:\d+ )?(?:second|minute|hour|day)"
        r"|RATE_LIMIT_EXCEEDED|\b(?:user)?rate ?limit ?exceeded|\btoo many requests\b"
        r"|\brate[ -]limit(?:ed|s|ing)?\b|^HTTP 429$",
        FaultType.RATE,
        Scope.PROJECT,
        "Maximum number of CreateNode requests per minute",
    ),
    # --- Preemption
    _rule(
        r"\bstate['\"]?:? ?['\"]?(?:PREEMPTED|SUSPEND(?:ED|ING))\b"
        r"|\b(?:was|were|been|got|is|being) preempted\b"
        r"|\bpreempted (?:by|during|while|before)\b|compute\.instances\.preempted",
        FaultType.PREEMPTED,
        Scope.ZONE,
        "update is not supported while in state PREEMPTED",
    ),
    # --- Stockout
    _rule(
        r"\b(?:no|not enough|not have|insufficient|lack(?:s|ing)?(?: of)?|out of|without)\b"
        r"(?: (?!quota)\w+){0,2} capacity\b|\binsufficientCapacity\b"
        r"|\bcapacity\b.{0,40}\b(?:not available|unavailable|exhausted|is full)\b"
        r"|stock(?:ed)?[ _-]?out|RESOURCE_POOL_EXHAUSTED|RESOURCE_AVAILABILITY\b"
        r"|\b(?:does|do|did) not have (?:enough|sufficient|available)(?: \w+){0,2}"
        r" (?:resources|capacity)|\bhas (?:0|no) available (?:resources|capacity)\b"
        r"|\b(?:not enough|insufficient|no|lack of)(?: (?!quota)\w+){0,2} resources\b"
        r"|\bno available (?:\w+ )?(?:resources|machines|slices|chips)\b"
        r"|\bis currently unavailable in the\b"
        r"|\bresources\b.{0,60}\bare (?:currently |temporarily )?(?:not available|unavailable)",
        FaultType.STOCKOUT,
        Scope.ZONE,
        'There is no more capacity in the zone "us-central2-b"; you can try in another zone',
    ),
    # --- All other quotas. Addresses and disks are counted per region.
    _rule(
        r"IP_SPACE_EXHAUSTED|\bIP space\b.{0,200}\bexhausted\b|\benough free IP addresses\b",
        FaultType.QUOTA,
        Scope.REGION,
        "IP space of 'projects/p/regions/us-east5/subnetworks/default' is exhausted.",
        sentence="the subnetwork for {zone} has no free addresses",
        advice="delete slices that use its addresses, enlarge its range, or set `subnetwork` in "
        "the job file",
    ),
    _rule(
        rf"QuotaFailure|QUOTA_EXCEEDED|\bquotaExceeded\b|\bquota\b(?!-).{{0,150}}"
        rf"\b(?:exhausted|exceeded|used up)\b|\binsufficient(?: \w+){{0,3}} quota\b"
        rf"|\bexceeds?\b.{{0,40}}\bquota\b|\bnot have enough quota\b|\bno quota\b"
        r"|\bexceed(?:s|ed) the (?:allowed )?(?:maximum|limit)\b"
        r"|\btoo many (?:pending |queued |active )?(?:resources|requests|nodes|slices|instances)"
        r"|\b(?:limit|maximum)\b.{0,40}\breached\b|\breached (?:the|its|your) (?:maximum|limit)\b"
        rf"|Quota {_QUOTED}[^'\"]*{_QUOTED} (?:exhausted|exceeded)",
        FaultType.QUOTA,
        Scope.REGION,
        "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8.0 in region us-central1.",
    ),
    # --- Access to a location
    _rule(
        r"LOCATION_POLICY_VIOLATED|gcp\.resourceLocations"
        r"|Permission denied on (?:resource )?['\"]?(?:projects/[^/\s]+/)?(?:locations|zones)/"
        r"|\bLocation\b.{0,200}\bis not found or access is unauthorized",
        FaultType.DENIED,
        Scope.ZONE,
        "Permission denied on 'locations/us-central2-b' (or it may not exist).",
    ),
    _rule(
        r"not have permission to submit requests",
        FaultType.DENIED,
        Scope.ZONE,
        "User does not have permission to submit requests into this queue for accelerator type "
        "v5p-8 in location us-east1-d.",
    ),
    # --- Organization policies
    _rule(
        r"vmExternalIpAccess",
        FaultType.DENIED,
        Scope.REQUEST,
        "Constraint constraints/compute.vmExternalIpAccess violated for project 7.",
        sentence="an organization policy forbids external addresses",
        advice="set `external_ip: false` in the job file, or ask an administrator to exempt the "
        "project from constraints/compute.vmExternalIpAccess, then run `drumline resume`",
    ),
    _rule(
        r"\bconstraint\b.{0,20}constraints/|\bconstraints/[a-z]+\.\w+.{0,40}violated"
        r"|\bviolates?\b.{0,40}\borganization(?:'s|al)? polic|ORG_POLICY|orgpolicy"
        r"|\bdenied by org(?:anization)? policy\b",
        FaultType.DENIED,
        Scope.REQUEST,
        "Constraint constraints/compute.requireShieldedVm violated for project 7.",
        sentence="an organization policy forbids the request",
        advice="ask an administrator to exempt the project from {constraint}, "
        "then run `drumline resume`",
    ),
    _rule(
        r"vpcServiceControls|SECURITY_POLICY_VIOLATED|prohibited by organization's policy"
        r"|ORG_RESTRICTION",
        FaultType.DENIED,
        Scope.PROJECT,
        "Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: x",
        sentence="a service perimeter of the organization forbids calls from here",
        advice="ask an administrator for access, or run the server inside the perimeter",
    ),
    # --- The project
    _rule(
        r"SERVICE_DISABLED|SERVICE_NOT_ACTIVATED|\baccessNotConfigured\b"
        r"|API has not been used in project|\bAPI\b.{0,80}\b(?:is disabled|is not enabled|not been"
        r" enabled)|enable it by visiting",
        FaultType.DENIED,
        Scope.PROJECT,
        "Cloud TPU API has not been used in project 1 before or it is disabled.",
        sentence="the API {service} is disabled in the project",
        advice="run `gcloud services enable {service}`",
    ),
    _rule(
        r"\bbilling\b.{0,60}\b(?:disabled|not|must|delinquent|closed|free[ -]trial|absent)\b"
        r"|BILLING_(?:DISABLED|STATUS)|\bbillingNotEnabled\b|\bfree[ -]trial\b"
        r"|\bbilling to be\b|\bwithout (?:a )?billing\b",
        FaultType.DENIED,
        Scope.PROJECT,
        "This API method requires billing to be enabled.",
        sentence="billing is not enabled for the project",
        advice="link an open billing account to the project in the console "
        "(https://console.cloud.google.com/billing)",
    ),
    _rule(
        r"CONSUMER_(?:SUSPENDED|INVALID)|USER_PROJECT_DENIED|PROJECT_(?:DELETED|INVALID)"
        r"|GCP_SUSPENDED|\b(?:project|consumer)\b.{0,60}"
        r"\b(?:suspended|(?:not found|deleted)\b.{0,20}\b(?:deleted|deactivated)"
        r"|was denied|marked for deletion)",
        FaultType.DENIED,
        Scope.PROJECT,
        "Consumer 'projects/7' has been suspended. [CONSUMER_SUSPENDED]",
        sentence="the project is suspended, deleted or closed to this account",
        advice="check `project` in config.yaml and the project's state in the console",
    ),
    _rule(
        r"insufficient authentication scopes|ACCESS_TOKEN_SCOPE_INSUFFICIENT",
        FaultType.DENIED,
        Scope.PROJECT,
        "Request had insufficient authentication scopes.",
        sentence="the login of this machine lacks the scope cloud-platform",
        advice="run gcloud auth application-default login, or give the machine the scope "
        "https://www.googleapis.com/auth/cloud-platform",
    ),
    # --- Permissions. Whoever may not list a location has no grant there; on the project, on one
    # resource, or with the reason of IAM, a role is missing.
    _rule(
        r"Permission ['\"]?[\w.]+['\"]? denied on (?:resource )?['\"]?(?://[^/\s]*/)?"
        r"projects/[^/'\"\s]+/locations/[^/'\"\s]+(?:/[a-zA-Z]+)?(?=['\"\s(.,]|$)"
        r"(?!.*IAM_PERMISSION_DENIED)",
        FaultType.DENIED,
        Scope.ZONE,
        "Permission 'tpu.nodes.list' denied on 'projects/p/locations/us-central2-b'",
    ),
    _rule(
        r"Permission ['\"]?[\w.]+['\"]? denied on\s*$",
        FaultType.DENIED,
        Scope.ZONE,
        "Permission 'tpu.nodes.list' denied on",
    ),
    _rule(
        r"Permission ['\"]?[\w.]+['\"]? denied\b|IAM_PERMISSION_DENIED|\bactAs\b"
        r"|\bact as (?:the |a )?service[ _]account|serviceAccountUser\b"
        r"|Required ['\"]?[a-z]+\.\w+\.\w+['\"]? permission|\bmissing (?:the )?permission"
        r"|\bnot have permission to\b"
        r"|\b(?:lacks?|requires?|without|needs?)\b.{0,40}\bpermissions?\b"
        r"|\bnot have ['\"]?[a-z]+\.\w+\.\w+['\"]? (?:access|permission)",
        FaultType.DENIED,
        Scope.PROJECT,
        "Permission 'tpu.nodes.get' denied on 'projects/p/locations/us-central1-b/nodes/n'",
    ),
    # --- Another operation, or the same request before
    _rule(
        r"unable to queue the operation|RESOURCE_(?:NOT_READY|IN_USE)\b|\bresourceNotReady\b"
        r"|\bis not ready\b"
        r"|\b(?:another|other|concurrent|pending) (?:operation|change|update)s?\b"
        r"|\bALREADY_EXISTS\b|\balready exists\b",
        FaultType.CONFLICT,
        Scope.REQUEST,
        "unable to queue the operation",
    ),
    # --- Reservations
    _rule(
        r"\btarget reservation must be specified|\breservation(?: name| affinity)?\b.{0,40}"
        r"\b(?:is|are) required\b|must specify (?:a |the )?reservation",
        FaultType.INVALID,
        Scope.REQUEST,
        "A target reservation must be specified when the host project has at least one.",
        sentence="the request must name a reservation",
        advice="set `reservation` in the job file, then run `drumline resume`",
    ),
    _rule(
        r"\breservations?\b.{0,200}(?:not (?:be )?found|not exist|not usable|expired|deleted|not"
        r" (?:active|ready|shared|match|compatible|available)|no match|inactive)",
        FaultType.INVALID,
        Scope.ZONE,
        "Reservation 'projects/p/zones/us-east5-a/reservations/r' does not exist",
        sentence="the reservation cannot be used in {zone}",
        advice="check its name, its zone and its dates",
    ),
    # --- A request that one zone rejects, and one that all zones reject
    _rule(
        r"\b(?:labels?|metadata|node_?ids?|queued_?resource_?ids?|tags)\b.{0,80}\b(?:invalid|too"
        r" long|must|not|cannot)\b",
        FaultType.INVALID,
        Scope.REQUEST,
        "Invalid nodeId: nodeId must be shorter than 64 characters",
        codes=frozenset({3}),
    ),
    _rule(
        r"\bnot allowed to use the (?:machine|accelerator) type",
        FaultType.INVALID,
        Scope.ZONE,
        "This user agent is not allowed to use the machine type [ct5lp-hightpu-1t]",
    ),
    _rule(
        rf"\A(?s:(?=.*?(?:{_REJECTION}))(?=.*?(?:{_PLACE})))",
        FaultType.INVALID,
        Scope.ZONE,
        "Cloud TPU received a bad request. the accelerator v4-128 was not found in zone us-x1-b",
        codes=frozenset(_ABOUT_REQUEST - {5}),
    ),
    _rule(
        rf"\A(?s:(?=.*\b(?:accelerator|machine|runtime|version|image|zone|location|subnetwork)))"
        rf"(?s:(?=.*?(?:{_REJECTION}))(?=.*?(?:{_PLACE})))"
        rf"(?!.*/(?:nodes|queuedResources|instances|operations)/)",
        FaultType.INVALID,
        Scope.ZONE,
        "the accelerator v6e-8 was not found in zone us-central1-a",
        codes=frozenset({5}),
    ),
    _rule(
        r"\b(?:network|subnetwork|service ?account|image|runtime ?version)s?\b.{0,200}"
        r"(?:not (?:be )?found|not exist)",
        FaultType.INVALID,
        Scope.REQUEST,
        "The resource 'projects/p/global/networks/train' was not found",
        codes=frozenset({2, 5, 9, None}),
    ),
    # --- Weak words, which decide only without a code
    _rule(
        r"\binternal (?:server )?error\b|\bbackend ?error\b|bad gateway"
        r"|\btry again (?:later|in)\b|\bservice (?:is )?(?:currently |temporarily )?unavailable"
        r"|\btimed? ?out\b|deadline exceeded|connection (?:reset|refused|closed|aborted)"
        r"|HTTP 50\d\b|server error",
        FaultType.TRANSIENT,
        Scope.REQUEST,
        "an internal error has occurred",
        codes=_NO_CODE,
    ),
    _rule(
        r"\bpermission denied\b|\bnot have permission\b|\bforbidden\b|\baccess denied\b"
        r"|\bnot authorized\b|\bunauthorized\b",
        FaultType.DENIED,
        Scope.PROJECT,
        "The caller does not have permission",
        codes=_NO_CODE,
    ),
    _rule(
        r"\binvalid (?:value|argument|field|resource|name|json|accelerator)|\bbad request\b"
        r"|\bmalformed\b|cannot find field|\bmust (?:be|match|not)\b|\bis required\b",
        FaultType.INVALID,
        Scope.REQUEST,
        "Invalid value at 'queued_resource.tpu'",
        codes=_NO_CODE,
    ),
)

_BY_CODE = {
    1: Fault(FaultType.TRANSIENT, Scope.REQUEST),  # CANCELLED
    3: Fault(FaultType.INVALID, Scope.REQUEST),  # INVALID_ARGUMENT
    4: Fault(FaultType.TRANSIENT, Scope.REQUEST),  # DEADLINE_EXCEEDED
    5: Fault(FaultType.NOT_FOUND, Scope.REQUEST),  # NOT_FOUND
    6: Fault(FaultType.CONFLICT, Scope.REQUEST),  # ALREADY_EXISTS
    7: Fault(FaultType.DENIED, Scope.PROJECT),  # PERMISSION_DENIED
    10: Fault(FaultType.CONFLICT, Scope.REQUEST),  # ABORTED
    11: Fault(FaultType.INVALID, Scope.REQUEST),  # OUT_OF_RANGE
    12: Fault(FaultType.INVALID, Scope.REQUEST),  # UNIMPLEMENTED
    13: Fault(FaultType.TRANSIENT, Scope.REQUEST),  # INTERNAL
    14: Fault(FaultType.TRANSIENT, Scope.REQUEST),  # UNAVAILABLE
    15: Fault(FaultType.TRANSIENT, Scope.REQUEST),  # DATA_LOSS
    16: Fault(FaultType.LOGIN, Scope.PROJECT),  # UNAUTHENTICATED
}
# An unknown text with RESOURCE_EXHAUSTED, FAILED_PRECONDITION and the like.
_UNKNOWN = Fault(FaultType.UNKNOWN, Scope.ZONE)
_NO_ANSWER = Fault(FaultType.TRANSIENT, Scope.REQUEST)

# Longer than any message of Google; limits the time for a page of HTML or a log.
MAX_TEXT_LENGTH = 20_000


def classify(code: int | None, text: str) -> Fault:
    """Return the kind and scope of an error. `code` is None if no answer came."""
    rule = find_rule(code, text)
    if rule is not None:
        return Fault(rule.kind, _quota_scope(rule, text[:MAX_TEXT_LENGTH]))
    return _NO_ANSWER if code is None else _BY_CODE.get(code, _UNKNOWN)


def find_rule(code: int | None, text: str) -> Rule | None:
    """Return the rule of the table that decides an error; None if the code decides."""
    # UNAUTHENTICATED is always LOGIN, even if the text mentions something else.
    if code == Rpc.UNAUTHENTICATED:
        return None
    text = " ".join(text[:MAX_TEXT_LENGTH].split())
    for rule in RULES:
        if (rule.codes is None or code in rule.codes) and rule.regex.search(text):
            return rule
    return None


# Sentences for the user --------------------------------------------------------------------------

_SENTENCES = {
    FaultType.STOCKOUT: "no capacity in {zone}",
    FaultType.QUOTA: "quota in {zone} is used up",
    FaultType.RATE: "too many calls to Google, slowing down",
    FaultType.DENIED: "the project may not use {zone}",
    FaultType.LOGIN: "Google login is missing or expired",
    FaultType.PREEMPTED: "preempted in {zone}",
    FaultType.CONFLICT: "{zone} is busy with another change, trying again",
    FaultType.INVALID: "the request was refused as invalid",
    FaultType.NOT_FOUND: "not found in {zone}",
    FaultType.TRANSIENT: "the cloud failed for {zone}, trying again",
    FaultType.UNKNOWN: "{zone} refused the request",
}
"""The meaning of each kind, with {zone}."""

_NO_ANSWER_SENTENCE = "no answer from the cloud for {zone}, trying again"
_PROJECT_DENIED = "the project may not use Cloud TPU"
_ZONE_INVALID = "{zone} does not offer what was requested"

_ADVICE = {
    FaultType.STOCKOUT: "wait, name more zones or accelerators in the job file, or ask for fewer "
    "chips",
    FaultType.QUOTA: "delete slices that use the quota, name other zones, or ask for more quota in "
    "the console (https://console.cloud.google.com/iam-admin/quotas)",
    FaultType.RATE: "wait, and stop other programs that call the same API in this project",
    FaultType.DENIED: "ask for access, or name other zones in the job file",
    FaultType.LOGIN: "run gcloud auth application-default login",
    FaultType.PREEMPTED: "wait: the job continues from its newest checkpoint",
    FaultType.CONFLICT: "wait until the other change is done",
    FaultType.INVALID: _FIX_JOB,
    FaultType.NOT_FOUND: "wait: a new resource may be listed only after some seconds",
    FaultType.TRANSIENT: "wait; if it lasts, look at https://status.cloud.google.com, or name more "
    "zones in the job file",
    FaultType.UNKNOWN: "read the cloud's words, and name more zones in the job file",
}
"""What the user can do, as an imperative."""

_PROJECT_ADVICE = "ask an administrator of the project for roles/tpu.admin"
_ZONE_ADVICE = "name other zones or another accelerator in the job file"
# Only the user can end these, so the advice is part of the message.
_FOR_THE_USER = frozenset({FaultType.DENIED, FaultType.LOGIN, FaultType.INVALID})

_LOCATION = re.compile(r"\bin (?P<type>region|zone) ['\"]?(?P<name>[a-z][a-z0-9-]*[a-z0-9])", re.I)
_LIMIT = re.compile(r"\bLimit:? (?P<limit>\d{1,12})(?:\.0+)?\b", re.I)
_QUOTA_NAME = re.compile(r"Quota (?:limit )?'(?P<name>[^']{1,120})'", re.I)
_TPU_QUOTA = re.compile(
    r"TPUV(?P<number>\d+)(?P<letter>[EP](?![a-z]))?s?(?P<spot>Preemptible)?(?P<lite>Lite)?"
)
_QUOTA_UNITS = {"IN_USE_ADDRESSES": "external addresses"}
_PERMISSION = re.compile(
    r"(?<![\w./@-])(?P<name>[a-z]{3,30}(?:\.[a-zA-Z]{2,60}){2,4})(?![\w/@-])(?!\.\w)"
)
_ACT_AS = re.compile(r"\bactAs\b|\bact as\b|serviceAccountUser", re.IGNORECASE)
_SERVICE = re.compile(r"\b(?!type\b|www\b)[a-z]{2,40}\.googleapis\.com\b")
_CONSTRAINT = re.compile(r"\bconstraints/[\w.]+\w|\b(?:compute|iam|gcp|tpu)\.[a-z]+[A-Z]\w+")


@dataclass(frozen=True)
class ErrorMeaning:
    """The meaning of an error in the user's language."""

    fault: Fault
    sentence: str
    """What happened."""
    advice: str
    """What the user can do, as an imperative."""
    words: str
    """The cloud's own words, on one line."""


def refusal(code: int | None, text: str, zone: str) -> Refusal:
    """Classify an error about a zone and explain it."""
    meaning = explain(code, text, zone)
    message = meaning.sentence
    if meaning.fault.kind in _FOR_THE_USER:
        message = f"{message}: {meaning.advice}"
    return Refusal(meaning.fault, message, meaning.words)


def explain(code: int | None, text: str, zone: str) -> ErrorMeaning:
    """Return what an error about a zone means and what the user can do about it."""
    fault, rule = classify(code, text), find_rule(code, text)
    sentence, advice = _SENTENCES[fault.kind], _ADVICE[fault.kind]
    if fault.kind is FaultType.DENIED and fault.scope is Scope.PROJECT:
        sentence, advice = _PROJECT_DENIED, _PROJECT_ADVICE
    if fault.kind is FaultType.INVALID and fault.scope is Scope.ZONE:
        sentence, advice = _ZONE_INVALID, _ZONE_ADVICE
    if rule is not None:
        sentence, advice = rule.sentence or sentence, rule.advice or advice
    if fault.kind is FaultType.TRANSIENT and code is None:
        sentence = _NO_ANSWER_SENTENCE
    if fault.kind is FaultType.QUOTA and not (rule and rule.sentence):
        sentence = _explain_quota(fault, zone, text[:MAX_TEXT_LENGTH])
    permission = _permission(text) if fault.kind is FaultType.DENIED else ""
    if permission and not (rule and rule.sentence):
        sentence = f"the permission {permission} is missing"
        sentence += " in {zone}" if fault.scope is Scope.ZONE else ""
        advice = f"ask an administrator of the project for {role_of(permission)}"
    service, constraint = _SERVICE.search(text), _CONSTRAINT.search(text)
    values = {
        "zone": zone,
        "service": service[0] if service else "tpu.googleapis.com",
        "constraint": constraint[0] if constraint else "the policy",
    }
    return ErrorMeaning(fault, _fill(sentence, values), _fill(advice, values), _one_line(text))


def zone_in(text: str) -> str:
    """Return the first zone that a text names; empty if it names none."""
    match = _ZONE_NAME.search(text) or re.search(r"\b(?:zones|locations)/([\w-]+)", text)
    return (match[1] if match.lastindex else match[0]) if match else ""


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Replace {name} by its value. Other braces stay, because quota names come from outside."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def _permission(text: str) -> str:
    """Return the permission that an error names; empty if it names none."""
    if _ACT_AS.search(text):
        return "iam.serviceAccounts.actAs"
    for match in _PERMISSION.finditer(text[:MAX_TEXT_LENGTH]):
        if match["name"].rpartition(".")[2] not in {"com", "org", "net", "io", "dev"}:
            return match["name"]
    return ""


def _explain_quota(fault: Fault, zone: str, text: str) -> str:
    location_match = _LOCATION.search(text)
    location = location_match["name"] if location_match else _location(fault.scope, zone)
    limit = _LIMIT.search(text)
    name = _QUOTA_NAME.search(text)
    unit = _quota_unit(name["name"]) if name else ""
    if limit and int(limit["limit"]) == 0:
        return f"no quota of {unit or 'chips'} in {location}: its limit is 0"
    if limit and unit:
        return f"quota of {limit['limit']} {unit} in {location} is used up"
    if limit or unit:
        return f"quota of {limit['limit'] if limit else unit} in {location} is used up"
    return f"quota in {location} is used up"


def _quota_unit(name: str) -> str:
    """Return the unit of a quota: `spot v5e chips` for TPUV5sPreemptibleLitepodPerProject…"""
    tpu = _TPU_QUOTA.match(name)
    if tpu is None:
        return _QUOTA_UNITS.get(name, name)
    letter = "e" if tpu["lite"] else (tpu["letter"] or "").lower()
    return f"{'spot ' if tpu['spot'] else ''}v{tpu['number']}{letter} chips"


def _location(scope: Scope, zone: str) -> str:
    """Return the zone or its region, by the scope. Leave a name that is not a zone unchanged."""
    region, dash, suffix = zone.rpartition("-")
    return region if scope is Scope.REGION and dash and len(suffix) == 1 else zone


def _quota_scope(rule: Rule, text: str) -> Scope:
    if rule.kind is not FaultType.QUOTA:
        return rule.scope
    location = _LOCATION.search(text)
    if location is None:
        return rule.scope
    return Scope.REGION if location["type"].lower() == "region" else Scope.ZONE


def _one_line(text: str) -> str:
    line = " ".join(text[:MAX_TEXT_LENGTH].split())
    return line if len(line) <= _MAX_WORDS else f"{line[: _MAX_WORDS - 1]}…"


_MAX_WORDS = 240
