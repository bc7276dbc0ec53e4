"""Assigns physical machines to the hosts of nodes. Pure.

A host is a virtual machine and new with every node. Its physical machine is not, so a bad machine
is assigned again. Machines of one zone, generation and number of chips form a pool, from which they
have their names: `local-a-v4-4-0`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from drumline.chips import LOCAL_ZONES, Slice, slices, zone_offers
from drumline.cloud.model.resources import NodeSpec

# A user who keeps a bad slice, so that it is not reassigned, needs a second slice.
_SLICES_PER_POOL = 2


@dataclass
class _Pool:
    """The machines of one zone, generation and number of chips per host."""

    size: int = 0
    free: dict[int, int] = field(default_factory=dict)
    """The free machines, with the number of their last release; 0 if they were never used."""

    def grow_to(self, size: int) -> None:
        for index in range(self.size, size):
            self.free[index] = 0
        self.size = max(self.size, size)


class Machines:
    """The pools of all zones."""

    def __init__(self) -> None:
        """Start without machines. The pools grow with the requests."""
        self._pools: dict[str, _Pool] = {}
        self._releases = 0

    def provide(self, specs: Sequence[NodeSpec]) -> None:
        """Grow the pools to twice the slices that are requested together."""
        for pool_key, hosts in _hosts_by_pool(specs).items():
            self._pools.setdefault(pool_key, _Pool()).grow_to(_SLICES_PER_POOL * hosts)

    def assign(self, spec: NodeSpec) -> tuple[str, ...]:
        """Return a machine for each host of a new node: those that were free the longest."""
        pool_key = _pool_key(spec.zone, spec.slice)
        pool = self._pools.setdefault(pool_key, _Pool())
        pool.grow_to(pool.size + spec.slice.hosts - len(pool.free))
        idle_longest = sorted(pool.free, key=lambda index: (pool.free[index], index))
        indices = sorted(idle_longest[: spec.slice.hosts])
        for index in indices:
            del pool.free[index]
        return tuple(f"{pool_key}-{index}" for index in indices)

    def release(self, names: Sequence[str]) -> None:
        """Free the machines of a node. All other free machines are assigned before them."""
        self._releases += 1
        for name in names:
            pool_key, _, index = name.rpartition("-")
            self._pools[pool_key].free[int(index)] = self._releases

    def chips(self, name: str) -> int | None:
        """Return the number of chips of a machine, or None if no machine can have that name.

        A machine may be named before it has its first slice.
        """
        pool_key, _, index = name.rpartition("-")
        if not (index.isascii() and index.isdecimal() and str(int(index[:9])) == index):
            return None
        zone = "-".join(pool_key.split("-")[:-2])
        candidates = [
            candidate
            for candidate in slices()
            if candidate.runtime_image
            and _pool_key(zone, candidate) == pool_key
            and _is_offered(candidate, zone)
        ]
        if not candidates:
            return None
        pool = self._pools.get(pool_key, _Pool())
        machines = max(
            pool.size, _SLICES_PER_POOL * max(candidate.hosts for candidate in candidates)
        )
        return candidates[0].chips_per_host if int(index) < machines else None


def _pool_key(zone: str, tpu_slice: Slice) -> str:
    return f"{zone}-{tpu_slice.generation}-{tpu_slice.chips_per_host}"


def _hosts_by_pool(specs: Sequence[NodeSpec]) -> Counter[str]:
    hosts: Counter[str] = Counter()
    for spec in specs:
        hosts[_pool_key(spec.zone, spec.slice)] += spec.slice.hosts
    return hosts


def _is_offered(tpu_slice: Slice, zone: str) -> bool:
    return zone in LOCAL_ZONES or any(offer.zone == zone for offer in zone_offers(tpu_slice))
