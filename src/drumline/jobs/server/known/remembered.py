"""The hosts that are remembered, for the HTTP API: listed, shown, excluded and forgiven."""

from collections.abc import Mapping
from typing import Any

from drumline.jobs.controller.host_history import HostHistory
from drumline.jobs.core.host_history import EvidenceKind, HostRecord
from drumline.jobs.server.verbs import Mistake

LONGEST_NAME = 200
LONGEST_WHY = 500
LONGEST = 10 * 365 * 86_400.0
"""Seconds that a person can exclude a host for; longer is for ever."""


class RememberedHosts:
    """What a caller can ask of the memory of hosts."""

    def __init__(self, memory: HostHistory) -> None:
        """`memory` is that of the supervisor."""
        self._memory = memory

    def all(self) -> list[dict[str, Any]]:
        """Every host that was met, the least trusted first."""
        return [self._told(host) for host in self._memory.all()]

    def show(self, identity: str) -> dict[str, Any]:
        """One host."""
        found = self._memory.find(identity)
        if found is None:
            raise _unknown(identity)
        return self._told(found)

    def settle(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """`exclude` or `forgive` a host; `why` and `seconds` are for the first."""
        identity = body.get("identity")
        if not isinstance(identity, str) or not 0 < len(identity) <= LONGEST_NAME:
            raise Mistake("identity: the name of a host is missing; drumline hosts shows them")
        match verb:
            case "exclude":
                why, seconds = body.get("why") or "", body.get("seconds")
                number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
                if seconds is not None and not (number and 0 < seconds <= LONGEST):
                    raise Mistake(f"seconds: {seconds!r:.40} is no length of time")
                text = str(why)[:LONGEST_WHY] or "excluded by hand"
                return self._told(self._memory.exclude(identity, text, seconds))
            case "forgive":
                found = self._memory.forgive(identity)
                if found is None:
                    raise _unknown(identity)
                return self._told(found)
        raise Mistake(f"{verb!r} is nothing one can do to a host", 404)

    def _told(self, host: HostRecord) -> dict[str, Any]:
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
                    "proof": each.proof.value,
                    "text": each.text,
                    "job": each.job,
                    "attempt": each.attempt,
                    "at": each.at,
                    "held_against": not each.mass and each.proof is not EvidenceKind.PASSED,
                }
                for each in host.evidence
            ],
            "job": host.last_job,
            "when": host.last_seen,
            "first_seen": host.first_seen,
            "times_seen": host.times_seen,
            "expires": host.expires(now),
        }


def _unknown(identity: str) -> Mistake:
    return Mistake(f"no host {identity[:LONGEST_NAME]!r} was ever met; drumline hosts", 404)
