"""A host that is slower than its peers. Pure: it is told in the log, and never taken for a lie."""

from collections.abc import Sequence
from statistics import median

SLOW, CHECKS = 1.2, 20
"""Times the median of the hosts, at so many checks running."""
GROSS, FEW = 3.0, 5
"""Who is so far behind is told sooner."""


class SlowHosts:
    """How long each host has been behind."""

    def __init__(self) -> None:
        """Nobody is."""
        self._behind: dict[int, tuple[int, int]] = {}
        self._told: set[int] = set()

    def heard(self, seconds: Sequence[float]) -> list[str]:
        """One check: the time of each host. Returns what there is to say, once for each host."""
        said = []
        for host, taken in enumerate(seconds):
            # Against the others: of two hosts, a median with oneself in it would hide half of it.
            others = [*seconds[:host], *seconds[host + 1 :]]
            times = taken / max(median(others), 1e-9) if others else 1.0
            slow, gross = self._behind.get(host, (0, 0))
            slow = slow + 1 if times > SLOW else 0
            gross = gross + 1 if times > GROSS else 0
            self._behind[host] = slow, gross
            if host not in self._told and (slow >= CHECKS or gross >= FEW):
                self._told.add(host)
                checks = CHECKS if slow >= CHECKS else FEW
                said.append(
                    f"host {host} is slow: the same product took it {times:.2f} times as long as "
                    f"the other hosts, as at each of the last {checks} checks"
                )
        return said
