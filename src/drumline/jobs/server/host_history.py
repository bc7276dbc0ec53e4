"""The host history for the HTTP API: list, show, exclude and forgive hosts."""

from collections.abc import Mapping
from typing import Any

from drumline.jobs.controller.host_history import HostHistory
from drumline.jobs.core.host_history import EvidenceType, HostRecord
from drumline.jobs.server.verbs import RequestError

MAX_NAME = 200
MAX_REASON = 500
MAX_SECONDS = 10 * 365 * 86_400.0
"""The longest time for which a user can exclude a host."""


class HostHistoryApi:
    """The requests of a caller about the host history."""

    def __init__(self, memory: HostHistory) -> None:
        """`memory` is the host history of the supervisor."""
        self._memory = memory

    def all(self) -> list[dict[str, Any]]:
        """List every known host, the least trusted first."""
        return [self._as_json(host) for host in self._memory.all()]

    def show(self, identity: str) -> dict[str, Any]:
        """Show one host."""
        host = self._memory.find(identity)
        if host is None:
            raise _unknown(identity)
        return self._as_json(host)

    def apply(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """`exclude` or `forgive` a host. `why` and `seconds` belong to `exclude`."""
        identity = body.get("identity")
        if not isinstance(identity, str) or not 0 < len(identity) <= MAX_NAME:
            raise RequestError("identity: the name of a host is missing; drumline hosts lists them")
        match verb:
            case "exclude":
                reason, seconds = body.get("why") or "", body.get("seconds")
                is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
                if seconds is not None and not (is_number and 0 < seconds <= MAX_SECONDS):
                    raise RequestError(f"seconds: {seconds!r:.40} is not a duration")
                reason = str(reason)[:MAX_REASON] or "excluded by hand"
                return self._as_json(self._memory.exclude(identity, reason, seconds))
            case "forgive":
                host = self._memory.forgive(identity)
                if host is None:
                    raise _unknown(identity)
                return self._as_json(host)
        raise RequestError(f"{verb!r} is not an action on hosts", 404)

    def _as_json(self, host: HostRecord) -> dict[str, Any]:
        now = self._memory.now()
        return {
            "identity": host.name.identity,
            "strength": host.name.strength.value,
            "zone": host.name.zone,
            "accelerator": host.name.accelerator,
            "state": host.state(now).value,
            "why": host.reason(now),
            "evidence": [
                {
                    "proof": evidence.proof.value,
                    "text": evidence.text,
                    "job": evidence.job,
                    "attempt": evidence.attempt,
                    "at": evidence.at,
                    "held_against": not evidence.mass and evidence.proof is not EvidenceType.PASSED,
                }
                for evidence in host.evidence
            ],
            "job": host.last_job,
            "when": host.last_seen,
            "first_seen": host.first_seen,
            "times_seen": host.times_seen,
            "expires": host.expires(now),
        }


def _unknown(identity: str) -> RequestError:
    return RequestError(f"there is no host {identity[:MAX_NAME]!r}; drumline hosts lists them", 404)
