"""States of Google's API as states of a placement with one or several slices."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from drumline.cloud.google import placements
from drumline.cloud.google.placements import ListedNode, ListedRequest, RpcError
from drumline.cloud.local import emulated_cloud
from drumline.cloud.protocol import Cloud, PlacementRequest
from drumline.observed import Endpoint, FaultType, ListedPlacement, PlacementState
from tests.cloud.conftest import Emulator

ENDS = (Endpoint("10.0.0.2", "34.0.0.2"),)
REQUEST = ListedRequest("s", "local-a", "ACTIVE", "v4-8", {"drumline-owner": "me"})
NODE = ListedNode("s", "local-a", "READY", "v4-8", {"drumline-owner": "me"}, ENDS)
PAIR = replace(REQUEST, nodes=("s-0", "s-1"))


def seen(request: str | None, node: str | None) -> ListedPlacement:
    """Return one slice in these states, or None."""
    return placements.combine(
        replace(REQUEST, state=request) if request else None,
        [replace(NODE, state=node)] if node else [],
    )


@pytest.mark.parametrize(
    ("request_state", "node", "state"),
    [
        ("WAITING_FOR_RESOURCES", None, PlacementState.QUEUED),
        ("ACCEPTED", None, PlacementState.QUEUED),
        ("STATE_UNSPECIFIED", None, PlacementState.QUEUED),
        ("A_WORD_OF_NEXT_YEAR", None, PlacementState.QUEUED),
        ("PROVISIONING", None, PlacementState.BOOTING),
        ("ACTIVE", None, PlacementState.BOOTING),
        ("ACTIVE", "CREATING", PlacementState.BOOTING),
        ("ACTIVE", "REPAIRING", PlacementState.BOOTING),
        ("WAITING_FOR_RESOURCES", "STATE_UNSPECIFIED", PlacementState.BOOTING),
        ("ACTIVE", "READY", PlacementState.READY),
        (None, "READY", PlacementState.READY),
        ("ACTIVE", "PREEMPTED", PlacementState.LOST),
        ("SUSPENDING", "READY", PlacementState.LOST),
        ("SUSPENDED", None, PlacementState.LOST),
        ("DELETING", None, PlacementState.LOST),
        ("FAILED", None, PlacementState.LOST),
        (None, "DELETING", PlacementState.LOST),
    ],
)
def test_one_slice(request_state: str | None, node: str | None, state: PlacementState) -> None:
    placement = seen(request_state, node)
    assert placement.state is state
    assert bool(placement.lost_reason) == (state is PlacementState.LOST)
    assert placement.cloud_state == (node or request_state)


def test_a_placement_without_running_nodes_may_not_run() -> None:
    assert seen("SUSPENDING", "READY").may_run
    assert seen("DELETING", "DELETING").may_run, "its hosts end with it, not before"
    assert not seen("SUSPENDED", "PREEMPTED").may_run
    assert not seen("FAILED", None).may_run
    assert not seen("WAITING_FOR_RESOURCES", None).may_run


@pytest.mark.parametrize("state", ["ACTIVE", "SUSPENDING", "DELETING"])
def test_a_node_that_a_listing_left_out_may_run(state: str) -> None:
    assert seen(state, None).may_run


def test_a_failed_request_has_a_refusal() -> None:
    trouble = RpcError(8, 'There is no more capacity in the zone "local-a"')
    failed = placements.combine(replace(REQUEST, state="FAILED", error=trouble), [])
    assert failed.refusal is not None
    assert (failed.refusal.fault.kind, failed.refusal.message) == (
        FaultType.STOCKOUT,
        "no capacity in local-a",
    )
    silent = seen("FAILED", None).refusal
    assert silent is not None
    assert (silent.fault.kind, silent.message) == (
        FaultType.UNKNOWN,
        "local-a: the request failed and no reason was given",
    )
    assert seen("SUSPENDED", None).refusal is None, "taken back is not refused"


def test_a_duplicate_entry_of_a_listing_counts_once() -> None:
    (placement,) = placements.combine_listings([REQUEST], [NODE, NODE])
    assert (placement.state, placement.endpoints) == (PlacementState.READY, ENDS)


class TestSeveralSlices:
    def nodes(self, *states: str) -> list[ListedNode]:
        """The slices in reverse order, because listings have no defined order."""
        return [
            replace(NODE, name=f"s-{number}", state=state, request="s")
            for number, state in reversed([*enumerate(states)])
        ]

    def test_are_one_placement_in_their_order(self) -> None:
        other = replace(NODE, name="by-hand")
        listing = placements.combine_listings([PAIR], [*self.nodes("READY", "READY"), other])
        assert [(p.name, [part.name for part in p.slices]) for p in listing] == [
            ("s", ["s-0", "s-1"]),
            ("by-hand", ["by-hand"]),
        ]
        assert listing[0].state is PlacementState.READY
        assert listing[0].endpoints == ENDS * 2

    def test_without_the_name_of_their_request_are_matched_by_their_own(self) -> None:
        nodes = [replace(node, request="") for node in self.nodes("READY", "READY")]
        (placement,) = placements.combine_listings([PAIR], nodes)
        assert placement.state is PlacementState.READY

    def test_the_tenth_comes_after_the_ninth(self) -> None:
        names = tuple(f"s-{number}" for number in range(11))
        placement = placements.combine(replace(REQUEST, nodes=names), self.nodes(*["READY"] * 11))
        assert tuple(part.name for part in placement.slices) == names

    def test_are_ready_when_all_are(self) -> None:
        assert placements.combine(PAIR, self.nodes("READY")).state is PlacementState.BOOTING
        half = placements.combine(PAIR, self.nodes("READY", "CREATING"))
        assert (half.state, half.cloud_state) == (PlacementState.BOOTING, "CREATING")

    def test_are_lost_when_one_is(self) -> None:
        placement = placements.combine(PAIR, self.nodes("READY", "PREEMPTED"))
        assert (placement.state, placement.lost_reason) == (PlacementState.LOST, "node PREEMPTED")
        assert placement.may_run, "the other one does not know yet"


def test_two_slices_are_requested_found_and_released_together(emulator: Emulator) -> None:
    """Both slices or none, through the complete API of a cloud."""
    request = PlacementRequest("pair", "local-a", "v4-16", "spot", {"a": "b"}, slices=2)

    async def story() -> None:
        cloud = emulated_cloud("p", emulator.home)
        for _ in range(2):  # the second is mistaken for the first
            await cloud.ask(request)
        ready = await _until(
            cloud, lambda placement: placement and placement.state is PlacementState.READY
        )
        assert ready is not None
        assert [part.name for part in ready.slices] == ["pair-0", "pair-1"]
        assert len(ready.endpoints) == 4
        assert ready.labels["a"] == "b"
        assert await cloud.find("local-a", "pair") == ready
        assert len(set(await cloud.host_keys(ready))) == 4, "every host has a key of its own"
        await cloud.release("local-a", "pair", ["pair-0", "pair-1"])
        await _until(cloud, lambda placement: placement is None)
        assert await cloud.find("local-a", "pair") is None
        await cloud.close()

    asyncio.run(story())


async def _until(
    cloud: Cloud, holds: Callable[[ListedPlacement | None], object]
) -> ListedPlacement | None:
    async with asyncio.timeout(60):
        while True:
            named = {listed.name: listed for listed in await cloud.placements("local-a")}
            if holds(placement := named.get("pair")):
                return placement
            await asyncio.sleep(0.02)
