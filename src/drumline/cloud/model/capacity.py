"""How many chips exist, and how many a project may use: capacity and quota. Pure."""

from collections.abc import Iterable, Sequence

from drumline.chips import region_of
from drumline.cloud.model.errors import ApiError, region_quota, zone_quota
from drumline.cloud.model.resources import Limits, Node, NodeSpec


def fits(specs: Sequence[NodeSpec], nodes: Iterable[Node], limits: Limits) -> bool:
    """Whether a zone has the chips for these nodes in addition to those that run."""
    zone = specs[0].zone
    running = [node.spec for node in nodes if node.has_hosts and node.spec.zone == zone]
    for pool, chips in limits.capacity.get(zone, {}).items():
        asked = sum(spec.slice.chips for spec in specs if _draws_on(spec, pool))
        used = sum(spec.slice.chips for spec in running if _draws_on(spec, pool))
        if asked and used + asked > chips:
            return False
    return True


def check_quota(specs: Sequence[NodeSpec], holding: Iterable[NodeSpec], limits: Limits) -> None:
    """Refuse what, with the nodes already held, exceeds the quota of a zone or a region."""
    first = specs[0]
    asked = sum(spec.slice.chips for spec in specs)
    alike = [spec for spec in holding if spec.tier is first.tier]
    for place, says in ((first.zone, zone_quota), (region_of(first.zone), region_quota)):
        limit = limits.quota.get(place, {}).get(first.tier)
        if limit is None:
            continue
        held = sum(spec.slice.chips for spec in alike if place in {spec.zone, region_of(spec.zone)})
        if held + asked > limit:
            raise ApiError(says(first.slice.generation, first.tier, place, limit))


def _draws_on(spec: NodeSpec, pool: str) -> bool:
    return pool in {spec.slice.name, spec.slice.generation}
