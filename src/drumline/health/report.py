"""The report of a burn-in: verdicts and measurements by chip and host. Pure."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drumline.deprecated import renamed_attribute
from drumline.health.fault_report import FaultReport

PASS, WARN, FAIL = "pass", "warn", "fail"


def worst(verdicts: Iterable[str]) -> str:
    """Return the worst verdict, or `pass` if there are none."""
    return max(verdicts, key=(PASS, WARN, FAIL).index, default=PASS)


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a test on a chip or host."""

    verdict: str = PASS
    message: str = ""
    seconds: float | None = None
    tflops: float | None = None
    gb_per_s: float | None = None
    peak: float | None = None
    """The catalogue's peak, in the unit of the rate above."""
    share: float | None = None

    said = renamed_attribute("said", "message")

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values, without the rates that are not known."""
        outcome = {"verdict": self.verdict, "seconds": self.seconds, "said": self.message}
        rates = {name: getattr(self, name) for name in ("tflops", "gb_per_s", "peak", "share")}
        known_rates = {name: rate for name, rate in rates.items() if rate is not None}
        return {name: _round(value) for name, value in {**outcome, **known_rates}.items()}


@dataclass(frozen=True)
class _TestedHardware:
    """The outcomes of all tests of a chip or a host."""

    host: int
    tests: Mapping[str, CheckOutcome]

    @property
    def verdict(self) -> str:
        """The worst verdict of the tests."""
        return worst(test.verdict for test in self.tests.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the outcomes as JSON values."""
        tests = {name: test.as_dict() for name, test in self.tests.items()}
        return {"host": self.host, "verdict": self.verdict, "tests": tests}


class HostHealth(_TestedHardware):
    """The health of a host."""


@dataclass(frozen=True)
class ChipHealth(_TestedHardware):
    """The health of a JAX device."""

    id: int
    kind: str

    def as_dict(self) -> dict[str, Any]:
        """Return the device and its outcomes as JSON values."""
        return {"id": self.id, "kind": self.kind, **super().as_dict()}


@dataclass(frozen=True)
class HealthReport:
    """The report of a burn-in. It is the same on every host of a slice."""

    verdict: str
    message: str
    """A sentence with the result."""
    seconds: float = 0.0
    devices: tuple[ChipHealth, ...] = ()
    hosts: tuple[HostHealth, ...] = ()
    faults: tuple[FaultReport, ...] = field(default=())
    """The reports of the bad chips, or of a host or the slice if the chip is unknown. Empty unless
    the verdict is `fail`."""

    said = renamed_attribute("said", "message")
    accusations = renamed_attribute("accusations", "faults")

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "devices": [device.as_dict() for device in self.devices],
            "hosts": [host.as_dict() for host in self.hosts],
            "accusations": [fault.sentence for fault in self.faults],
            "said": self.message,
        }

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.as_dict(), indent=2)


def _round(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
