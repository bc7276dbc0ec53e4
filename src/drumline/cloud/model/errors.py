"""The errors of the API: google.rpc codes, with Google's texts and JSON.

Three errors share the code RESOURCE_EXHAUSTED: no chips, no quota, too many calls. Only the text
distinguishes them, so these are the texts of the real service.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

INVALID_ARGUMENT = 3
NOT_FOUND = 5
ALREADY_EXISTS = 6
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
ABORTED = 10
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14
UNAUTHENTICATED = 16

_NAMES_AND_HTTP = {
    INVALID_ARGUMENT: ("INVALID_ARGUMENT", 400),
    NOT_FOUND: ("NOT_FOUND", 404),
    ALREADY_EXISTS: ("ALREADY_EXISTS", 409),
    PERMISSION_DENIED: ("PERMISSION_DENIED", 403),
    RESOURCE_EXHAUSTED: ("RESOURCE_EXHAUSTED", 429),
    FAILED_PRECONDITION: ("FAILED_PRECONDITION", 400),
    ABORTED: ("ABORTED", 409),
    UNIMPLEMENTED: ("UNIMPLEMENTED", 501),
    INTERNAL: ("INTERNAL", 500),
    UNAVAILABLE: ("UNAVAILABLE", 503),
    UNAUTHENTICATED: ("UNAUTHENTICATED", 401),
}


@dataclass(frozen=True)
class RpcStatus:
    """google.rpc.Status, as in a failed request or operation."""

    code: int
    message: str
    details: Sequence[Mapping[str, Any]] = ()

    def as_json(self) -> Json:
        """Return the JSON for `failedData.error` and for a failed operation."""
        result: Json = {"code": self.code, "message": self.message}
        return result | ({"details": list(self.details)} if self.details else {})


class ApiError(Exception):
    """A call to which the API responds with an error."""

    def __init__(self, status: RpcStatus) -> None:
        """`status` is the whole response."""
        super().__init__(status.message)
        self.status = status

    @property
    def http_status(self) -> int:
        """The HTTP status of the response."""
        return _NAMES_AND_HTTP[self.status.code][1]

    def as_json(self) -> Json:
        """Return the body: `code` is the HTTP status, and `status` is the name of the rpc code."""
        name, http = _NAMES_AND_HTTP[self.status.code]
        body: Json = {"code": http, "message": self.status.message, "status": name}
        if self.status.details:
            body["details"] = list(self.status.details)
        return {"error": body}


def invalid(message: str, field: str = "") -> ApiError:
    """Return the error for an invalid call. A retry fails too."""
    details: list[Json] = []
    if field:
        violation = {"field": field, "description": message}
        details = [{"@type": _type("BadRequest"), "fieldViolations": [violation]}]
    return ApiError(RpcStatus(INVALID_ARGUMENT, message, details))


def not_found(resource: str) -> ApiError:
    """Return the error for a resource that does not exist."""
    return ApiError(RpcStatus(NOT_FOUND, f"Resource '{resource}' was not found", [_info(resource)]))


def already_exists(resource: str) -> ApiError:
    """Return the error for a name that a resource in any state uses."""
    message = f"Resource '{resource}' already exists"
    return ApiError(RpcStatus(ALREADY_EXISTS, message, [_info(resource)]))


def unknown_location(zone: str) -> ApiError:
    """Return the error for a zone that does not exist or is not accessible."""
    message = f"Location {zone} is not found or access is unauthorized."
    return ApiError(RpcStatus(PERMISSION_DENIED, message))


def permission_denied(permission: str, resource: str) -> ApiError:
    """Return the error for a zone where the project has no permission."""
    details = {
        "@type": _type("ErrorInfo"),
        "reason": "IAM_PERMISSION_DENIED",
        "domain": "tpu.googleapis.com",
        "metadata": {"permission": permission, "resource": resource},
    }
    message = f"Permission '{permission}' denied on '{resource}' (or it may not exist)."
    return ApiError(RpcStatus(PERMISSION_DENIED, message, [details]))


def node_exists(request: str, nodes: Sequence[str]) -> ApiError:
    """Return the error for deleting a request that has nodes, without force."""
    message = (
        f"Queued resource '{request}' still has the node '{nodes[0]}'; delete the node first, "
        "or delete the queued resource with force=true"
    )
    violation = {"type": "NODE_EXISTS", "subject": nodes[0], "description": message}
    details = {"@type": _type("PreconditionFailure"), "violations": [violation]}
    return ApiError(RpcStatus(FAILED_PRECONDITION, message, [details]))


def wrong_state(resource: str, verb: str, state: str, required: str) -> ApiError:
    """Return the error for a call that needs the resource in another state."""
    message = (
        f"Cloud TPU received a bad request. {verb} is not supported while in state {state}; "
        f"'{resource}' must be {required}"
    )
    violation = {"type": "STATE", "subject": resource, "description": message}
    details = {"@type": _type("PreconditionFailure"), "violations": [violation]}
    return ApiError(RpcStatus(FAILED_PRECONDITION, message, [details]))


def not_supported(resource: str, verb: str, reason: str) -> ApiError:
    """Return the error for a call that this kind of node never supports."""
    return invalid(
        f"Cloud TPU received a bad request. Cannot {verb} '{resource}': {reason}", "name"
    )


def login_expired() -> ApiError:
    """Return the error for expired credentials."""
    return _unauthenticated(
        "Request had invalid authentication credentials.", "ACCESS_TOKEN_EXPIRED"
    )


def login_missing() -> ApiError:
    """Return the error for missing credentials."""
    return _unauthenticated(
        "Request is missing required authentication credential.", "CREDENTIALS_MISSING"
    )


def unknown_path() -> ApiError:
    """Return the error for an unknown method of the API."""
    return ApiError(RpcStatus(NOT_FOUND, "Method not found."))


def _unauthenticated(summary: str, reason: str) -> ApiError:
    message = (
        f"{summary} Expected OAuth 2 access token, login cookie or other valid authentication "
        "credential. See https://developers.google.com/identity/sign-in/web/devconsole-project."
    )
    details = {
        "@type": _type("ErrorInfo"),
        "reason": reason,
        "domain": "googleapis.com",
        "metadata": {"service": "tpu.googleapis.com"},
    }
    return ApiError(RpcStatus(UNAUTHENTICATED, message, [details]))


def transient_errors() -> tuple[ApiError, ...]:
    """Return the transient errors that any call may get. A retry succeeds."""
    rate = (
        "Quota exceeded for quota metric 'CreateNode requests' and limit 'Maximum number of "
        "CreateNode requests per minute' of service 'tpu.googleapis.com'"
    )
    return (
        ApiError(RpcStatus(UNAVAILABLE, "The service is currently unavailable.")),
        ApiError(RpcStatus(INTERNAL, "Internal error encountered.")),
        ApiError(RpcStatus(RESOURCE_EXHAUSTED, rate)),
    )


def stockout(zone: str, *, reserved: bool) -> RpcStatus:
    """Return the status if the zone or the reservation has no chips left."""
    if reserved:
        return RpcStatus(FAILED_PRECONDITION, f"Insufficient reserved capacity in zone {zone}.")
    message = (
        f'There is no more capacity in the zone "{zone}"; you can try in another zone where '
        "Cloud TPU Nodes are offered (see https://cloud.google.com/tpu/docs/regions)"
    )
    return RpcStatus(RESOURCE_EXHAUSTED, message)


def preempted_while_created() -> RpcStatus:
    """Return the status of a node that was preempted before it was ready."""
    message = (
        "Cloud TPU received a bad request. update is not supported while in state PREEMPTED "
        "[EID: 0x73013519f5b7feb2]"
    )
    return RpcStatus(INVALID_ARGUMENT, message)


def zone_quota(generation: str, tier: str, zone: str, limit: int) -> RpcStatus:
    """Return the status if the quota of the zone is used up."""
    quota = f"{_quota_name(generation, tier)}PerProjectPerZoneForTPUAPI"
    message = f"Quota '{quota}' exhausted. Limit {limit} in zone {zone}"
    return RpcStatus(RESOURCE_EXHAUSTED, message, [_quota_failure(message)])


def region_quota(generation: str, tier: str, region: str, limit: int) -> RpcStatus:
    """Return the status if the quota of the region is used up."""
    quota = f"{_quota_name(generation, tier)}PerProjectPerRegionForTPUAPI"
    message = f"Quota limit '{quota}' has been exceeded. Limit: {limit} in region {region}."
    return RpcStatus(RESOURCE_EXHAUSTED, message, [_quota_failure(message)])


# The names of v5e and v6e are those of the service. The others follow their pattern.
_QUOTA_STEMS = {
    "v2": ("TPUV2", ""),
    "v3": ("TPUV3", ""),
    "v4": ("TPUV4s", "Pod"),
    "v5e": ("TPUV5s", "Litepod"),
    "v5p": ("TPUV5P", ""),
    "v6e": ("TPUV6E", ""),
}


def _quota_name(generation: str, tier: str) -> str:
    stem, suffix = _QUOTA_STEMS.get(generation, (f"TPU{generation.upper()}", ""))
    return stem + ("Preemptible" if tier == "spot" else "") + suffix


def _quota_failure(message: str) -> Json:
    violation = {"subject": "tpu.googleapis.com", "description": message}
    return {"@type": _type("QuotaFailure"), "violations": [violation]}


def _info(resource: str) -> Json:
    return {"@type": _type("ResourceInfo"), "resourceName": resource}


def _type(name: str) -> str:
    return f"type.googleapis.com/google.rpc.{name}"
