"""Tests of the simulation's event loop: virtual time, seeded order, no real resources."""

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from contextvars import copy_context
from pathlib import Path

import pytest

from tests.simulation.cloud import SimulatedCloud
from tests.simulation.environment import Environment, RandomStreams
from tests.simulation.loop import PARTY, Deadlock, NotSimulated, SimulatedLoop
from tests.simulation.server import Server, isolate


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    with closing(SimulatedLoop(random.Random(1))) as loop:
        asyncio.set_event_loop(loop)
        yield loop
        asyncio.set_event_loop(None)


def test_time_jumps_to_the_next_timer(loop: SimulatedLoop) -> None:
    began_at = loop.time()
    loop.run_until_complete(asyncio.sleep(86400.0))
    assert loop.time() == pytest.approx(began_at + 86400.0)


def test_the_seed_decides_the_order_of_ready_callbacks() -> None:
    def order(seed: int) -> list[int]:
        calls: list[int] = []
        with closing(SimulatedLoop(random.Random(seed))) as loop:
            for index in range(6):
                loop.call_soon(calls.append, index)
            loop.run_until_complete(asyncio.sleep(1.0))
        return calls

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) > 10
    assert all(sorted(order(seed)) == list(range(6)) for seed in range(20))


def test_a_future_that_never_completes_raises_deadlock(loop: SimulatedLoop) -> None:
    with pytest.raises(Deadlock):
        loop.run_until_complete(loop.create_future())


def test_a_killed_party_never_runs_again_and_a_sleeping_one_runs_after_waking(
    loop: SimulatedLoop,
) -> None:
    calls: list[str] = []
    for party in ("killed", "asleep"):
        context = copy_context()
        context.run(PARTY.set, party)
        loop.call_later(5.0, calls.append, party, context=context)
    loop.kill("killed")
    loop.put_to_sleep("asleep")
    loop.run_until_complete(asyncio.sleep(60.0))
    assert calls == []
    loop.wake_up("asleep")
    loop.run_until_complete(asyncio.sleep(1.0))
    assert calls == ["asleep"]


@pytest.mark.parametrize(
    "unsimulated",
    [
        lambda: threading.Thread(target=print).start(),
        lambda: socket.socket.connect(socket.socket.__new__(socket.socket), ("127.0.0.1", 1)),
        lambda: os.urandom(8),
        lambda: random.random(),
        lambda: time.perf_counter(),
        lambda: time.sleep(0.1),
    ],
    ids=["thread", "socket", "urandom", "random", "clock", "sleep"],
)
def test_a_call_that_is_not_deterministic_raises(
    loop: SimulatedLoop, tmp_path: Path, unsimulated: Callable[[], object]
) -> None:
    environment = Environment(loop, RandomStreams(1))
    cloud = SimulatedCloud(environment, ("us-central1-a",), 4)
    server = Server(environment, cloud, tmp_path, "cloud: google\nproject: lab-tpu-1\n")
    with isolate(environment, server), pytest.raises(NotSimulated):
        unsimulated()
