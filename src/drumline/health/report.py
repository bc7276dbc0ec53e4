"""What a burn-in found: a verdict for each chip and each host, with the figures. Pure."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drumline.health.accusation import Accusation

PASS, WARN, FAIL = "pass", "warn", "fail"


def worst(verdicts: Iterable[str]) -> str:
    """The worst of them; `pass` where there are none."""
    return max(verdicts, key=(PASS, WARN, FAIL).index, default=PASS)


@dataclass(frozen=True)
class CheckOutcome:
    """Of one test, on one chip or host."""

    verdict: str = PASS
    said: str = ""
    seconds: float | None = None
    tflops: float | None = None
    gb_per_s: float | None = None
    peak: float | None = None
    """What the catalogue says, in the unit of the figure above."""
    share: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """As in JSON: figures that there are not are left out."""
        told = {"verdict": self.verdict, "seconds": self.seconds, "said": self.said}
        figures = {name: getattr(self, name) for name in ("tflops", "gb_per_s", "peak", "share")}
        known = {name: figure for name, figure in figures.items() if figure is not None}
        return {name: _rounded(value) for name, value in {**told, **known}.items()}


@dataclass(frozen=True)
class Tested:
    """What tests said of something on a host."""

    host: int
    tests: Mapping[str, CheckOutcome]

    @property
    def verdict(self) -> str:
        """The worst of its tests."""
        return worst(test.verdict for test in self.tests.values())

    def as_dict(self) -> dict[str, Any]:
        """As in JSON."""
        tests = {name: test.as_dict() for name, test in self.tests.items()}
        return {"host": self.host, "verdict": self.verdict, "tests": tests}


class HostHealth(Tested):
    """A host itself."""


@dataclass(frozen=True)
class ChipHealth(Tested):
    """A JAX device of a host."""

    id: int
    kind: str

    def as_dict(self) -> dict[str, Any]:
        """As in JSON."""
        return {"id": self.id, "kind": self.kind, **super().as_dict()}


@dataclass(frozen=True)
class BurnIn:
    """The whole of it. The same on every host of a slice."""

    verdict: str
    said: str
    """One sentence."""
    seconds: float = 0.0
    devices: tuple[ChipHealth, ...] = ()
    hosts: tuple[HostHealth, ...] = ()
    accusations: tuple[Accusation, ...] = field(default=())
    """One for each bad chip, or as near to it as can be told; none unless the verdict is `fail`."""

    def as_dict(self) -> dict[str, Any]:
        """As in JSON."""
        return {
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "devices": [device.as_dict() for device in self.devices],
            "hosts": [host.as_dict() for host in self.hosts],
            "accusations": [accusation.sentence for accusation in self.accusations],
            "said": self.said,
        }

    def to_json(self) -> str:
        """The report as text."""
        return json.dumps(self.as_dict(), indent=2)


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
