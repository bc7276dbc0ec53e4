"""The physical machines under the hosts: which node is on which, and which are given next. Pure.

A host is a virtual machine and new with every node; the machine under it is not, and a bad one is
given again. Machines of one zone, generation and number of chips form a pool, and are called by
them: `local-a-v4-4-0`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from drumline.chips import LOCAL_ZONES, Slice, slices, zone_offers
from drumline.cloud.model.resources import NodeSpec

# Whoever holds a bad slice, and does not give it back lest it be given again, needs another one.
_SLICES_KEPT = 2


@dataclass
class _Pool:
    size: int = 0
    free: dict[int, int] = field(default_factory=dict)
    """The free machines, each with its turn: 0 if it was never used, else when it was freed."""

    def grow_to(self, size: int) -> None:
        for number in range(self.size, size):
            self.free[number] = 0
        self.size = max(self.size, size)


class Machines:
    """The pools of all zones."""

    def __init__(self) -> None:
        """No machines: pools grow with what is asked for."""
        self._pools: dict[str, _Pool] = {}
        self._turns = 0

    def provide(self, specs: Sequence[NodeSpec]) -> None:
        """Have machines for twice the slices that are asked for together."""
        for kind, hosts in _hosts_by_kind(specs).items():
            self._pools.setdefault(kind, _Pool()).grow_to(_SLICES_KEPT * hosts)

    def take(self, spec: NodeSpec) -> tuple[str, ...]:
        """The machines of a new node, one for each host: those that were free the longest."""
        kind = _kind(spec.zone, spec.slice)
        pool = self._pools.setdefault(kind, _Pool())
        pool.grow_to(pool.size + spec.slice.hosts - len(pool.free))
        longest = sorted(pool.free, key=lambda number: (pool.free[number], number))
        taken = sorted(longest[: spec.slice.hosts])
        for number in taken:
            del pool.free[number]
        return tuple(f"{kind}-{number}" for number in taken)

    def give_back(self, names: Sequence[str]) -> None:
        """Free the machines of a node; all others are given before them."""
        self._turns += 1
        for name in names:
            kind, _, number = name.rpartition("-")
            self._pools[kind].free[int(number)] = self._turns

    def chips(self, name: str) -> int | None:
        """The chips of a machine; None if there is none of that name, and never would be.

        A machine may be named before the first slice that is on it.
        """
        kind, _, number = name.rpartition("-")
        if not (number.isascii() and number.isdecimal() and str(int(number[:9])) == number):
            return None
        zone = "-".join(kind.split("-")[:-2])
        for_sale = [
            one
            for one in slices()
            if one.runtime_image and _kind(zone, one) == kind and _is_sold(one, zone)
        ]
        if not for_sale:
            return None
        pool = self._pools.get(kind, _Pool())
        most = max(pool.size, _SLICES_KEPT * max(one.hosts for one in for_sale))
        return for_sale[0].chips_per_host if int(number) < most else None


def _kind(zone: str, wanted: Slice) -> str:
    return f"{zone}-{wanted.generation}-{wanted.chips_per_host}"


def _hosts_by_kind(specs: Sequence[NodeSpec]) -> Counter[str]:
    hosts: Counter[str] = Counter()
    for spec in specs:
        hosts[_kind(spec.zone, spec.slice)] += spec.slice.hosts
    return hosts


def _is_sold(wanted: Slice, zone: str) -> bool:
    return zone in LOCAL_ZONES or any(offer.zone == zone for offer in zone_offers(wanted))
