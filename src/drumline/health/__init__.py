"""Hardware health: burn-in tests and fault reports.

    from drumline.health import burn_in
    report = burn_in(seconds=30)

On a job's hosts this package runs from a zip file before the user's program. It may import only the
standard library, numpy, JAX, `drumline.chips`, `drumline.deprecated`, `drumline.distributed` and
`drumline.heartbeat`, and it imports JAX only to test chips.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drumline.deprecated import lookup
from drumline.health.fault_report import FaultReport, HardwareFault
from drumline.health.replicas import ReplicaComparison, compare_replicas

if TYPE_CHECKING:
    from drumline.health.report import HealthReport

__all__ = ["FaultReport", "HardwareFault", "ReplicaComparison", "burn_in", "compare_replicas"]

_NEW_NAMES = {
    "Accusation": "drumline.health:FaultReport",
    "Blamed": "drumline.health:ReplicaComparison",
    "blame": "drumline.health:compare_replicas",
}


def burn_in(devices: Sequence[Any] | None = None, seconds: float = 30) -> "HealthReport":
    """Test this host and these JAX devices, by default all, for about `seconds`.

    On a slice, every host must call this with the devices of all hosts, and gets the same report.
    """
    from drumline.health.burnin import burn_in

    return burn_in(devices, seconds)


def __getattr__(name: str) -> object:
    return lookup(__name__, name, _NEW_NAMES)


def __dir__() -> list[str]:
    """Return the public names, also those that are not loaded yet, for tab completion."""
    return sorted({*globals(), *__all__})
