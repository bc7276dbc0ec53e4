"""The bench: every program of a burn-in runs here, on all chips at once, and is timed here.

It is the one seam between the tests and the hardware. In the emulator results pass through
`drumline.health.emulated`, so that its chips lie to the burn-in as they do to a training; tests of
the burn-in put a bench in its place that plants faults.

A program is the same executable on every chip (`shard_map`, one compilation), never one for each:
a compiler that chose differently would accuse an innocent.
"""

# mypy: allow-untyped-calls

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from drumline.health import emulated

CHIP = "chip"
EACH = PartitionSpec(CHIP)
"""A leading dimension with one entry for each chip."""
ALL = PartitionSpec()
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""For CPUs, which only stand for chips: their programs compile for longer than they run."""


class OnChips:
    """A function that runs on each chip of a mesh, with a name to be found by."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        mesh: Mesh,
        takes: PartitionSpec | tuple[PartitionSpec, ...] = ALL,
    ) -> None:
        """`function` gets its chip's part of what `takes` says, and returns [1, …] arrays."""
        self.name = name
        self.warm = False
        self._mesh = mesh
        # Without collectives nothing is replicated that JAX would have to know about.
        self._jitted = jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=takes, out_specs=EACH, check_vma=False),
            compiler_options=QUICKLY if mesh.devices.flat[0].platform == "cpu" else None,
        )

    def __call__(self, *arguments: Any) -> Any:
        """The outputs, perhaps before they are there."""
        # Whoever asks, as a training does, may have set another mesh.
        with jax.set_mesh(self._mesh):
            return self._jitted(*arguments)


@dataclass(frozen=True)
class Ran:
    """What a program gave, and how long each of this host's chips took."""

    outputs: Any
    seconds: dict[int, float]


class Bench:
    """The chips under test: those of this host, and the slice that they are part of."""

    def __init__(self, devices: Sequence[Any]) -> None:
        """`devices` are those of all hosts, in an order that all hosts have."""
        self.devices = tuple(devices)
        self.host = jax.process_index()
        self.local = tuple(device for device in devices if device.process_index == self.host)
        self.chips = Mesh(np.array(self.local), (CHIP,))
        self.slice = Mesh(np.array(self.devices), (CHIP,))
        self._watchers = ThreadPoolExecutor(max(len(self.local), 1))

    def close(self) -> None:
        """Let go of the threads that watch the chips."""
        self._watchers.shutdown()

    def run(self, program: OnChips, *arguments: Any) -> Ran:
        """Compute, and time each chip; the compilation, at a program's first run, is not timed."""
        ran = self._timed(program, arguments)
        return Ran(self.computed(program.name, ran.outputs), ran.seconds)

    def send(self, program: OnChips, *arguments: Any) -> Ran:
        """The same for a program that sends, whose outputs came over a link."""
        ran = self._timed(program, arguments)
        return Ran(self.sent(program.name, ran.outputs), ran.seconds)

    def read(self, ruler: OnChips, *arguments: Any) -> dict[int, np.ndarray]:
        """What a ruler says of each of this host's chips. Rulers measure; nothing is planted."""
        shards = ruler(*arguments).addressable_shards
        return {shard.device.id: np.asarray(shard.data)[0] for shard in shards}

    def computed(self, name: str, outputs: Any) -> Any:
        """What the chips say they computed."""
        del name
        return emulated.as_computed(outputs)

    def sent(self, name: str, outputs: Any) -> Any:
        """What the chips say they received."""
        del name
        return emulated.as_sent(outputs)

    def clocked(self, name: str, seconds: dict[int, float]) -> dict[int, float]:
        """How long the chips are said to have taken."""
        del name
        return seconds

    def _timed(self, program: OnChips, arguments: tuple[Any, ...]) -> Ran:
        if not program.warm:
            jax.block_until_ready(program(*arguments))
            program.warm = True
        began = time.perf_counter()
        outputs = program(*arguments)
        shards: dict[int, list[Any]] = {device.id: [] for device in self.local}
        for output in jax.tree.leaves(outputs):
            for shard in output.addressable_shards:
                shards[shard.device.id].append(shard.data)

        def wait(device: int) -> float:
            jax.block_until_ready(shards[device])
            return time.perf_counter() - began

        taken = self._watchers.map(wait, shards)
        seconds = dict(zip(shards, taken, strict=True))
        return Ran(outputs, self.clocked(program.name, seconds))
