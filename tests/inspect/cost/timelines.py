"""Programs simulated with a v5e's constants, and the seconds of their parts."""

from __future__ import annotations

from drumline.inspect.cost.machines import parse_machine
from drumline.inspect.cost.network import map_mesh
from drumline.inspect.cost.timeline import Timeline, TimelineEvent, TimelineSimulator
from tests.inspect.cost.modules import module

MESH = {"X": 2, "Y": 4}
MACHINE = parse_machine("v5litepod-8")
NETWORK = map_mesh(MESH, MACHINE)


def simulate_lines(lines: str, *other_computations: str, scheduled: bool = False) -> Timeline:
    return TimelineSimulator(
        module(lines, *other_computations), NETWORK, MESH, scheduled
    ).simulate()


def event_named(timeline: Timeline, name: str) -> TimelineEvent:
    (event,) = (event for event in timeline.events if event.name == name)
    return event


def matmul_seconds(side: int) -> float:
    """Return the seconds of a matmul of two square bfloat16 matrices, including its overhead."""
    multiplying = 2 * side**3 / (1.97e14 * 0.98)
    loading = 3 * 2 * side**2 / (8.2e11 * 0.92)
    return multiplying + 0.25 * loading + 0.3e-6


def gather(shard: float, axis: str = "Y") -> float:
    """Return the seconds of an all-gather over a line."""
    length = MESH[axis]
    return 3e-6 + (length - 1) * (shard / (4.5e10 * 0.9) + 1e-6)


SIDE = 4096
MATMUL = matmul_seconds(SIDE)
SHARD = 1024 * 1024 * 2
GATHER = gather(SHARD)
P = f"""
    %p = bf16[{SIDE},{SIDE}] parameter(0)
    %q = bf16[{SIDE},{SIDE}] parameter(1)
    %r = bf16[1024,1024] parameter(2)
    %s = bf16[1024,1024] parameter(3)
"""
OUT = f"bf16[{SIDE},{SIDE}]"
