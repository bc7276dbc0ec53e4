"""Run and time the programs of a burn-in on all chips, and reduce their outputs to checksums.

`ChipRunner` is the only interface between the tests and the hardware. In the emulator, outputs pass
through `drumline.health.emulated`, so that a faulty chip fails a burn-in as it fails a training.
Tests of the burn-in subclass `ChipRunner` to inject faults.

All chips run the same executable (a single compilation with `shard_map`). Separate compilations
could choose different algorithms, and a sound chip would be reported.
"""

# mypy: allow-untyped-calls

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from drumline.health import emulated

CHIP = "chip"
PER_CHIP = PartitionSpec(CHIP)
"""A leading dimension with an entry for each chip."""
REPLICATED = PartitionSpec()
CPU_COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""On emulated chips, programs take longer to compile than to run."""


class ChipProgram:
    """A named function that runs on each chip of a mesh."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        mesh: Mesh,
        in_specs: PartitionSpec | tuple[PartitionSpec, ...] = REPLICATED,
    ) -> None:
        """`function` gets its chip's shards by `in_specs` and returns arrays of shape [1, …]."""
        self.name = name
        self.compiled = False
        self._mesh = mesh
        # Every output is sharded by chip, so JAX has no replication to check.
        self._jitted = jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=PER_CHIP, check_vma=False
            ),
            compiler_options=(
                CPU_COMPILER_OPTIONS if mesh.devices.flat[0].platform == "cpu" else None
            ),
        )

    def __call__(self, *arguments: Any) -> Any:
        """Return the outputs. They may still be computing."""
        # The caller, such as a training, may have set another mesh.
        with jax.set_mesh(self._mesh):
            return self._jitted(*arguments)


@dataclass(frozen=True)
class ProgramRun:
    """The outputs of a program, and its seconds on this host's chips."""

    outputs: Any
    seconds: dict[int, float]


class ChipRunner:
    """The chips under test: those of this host, and the slice that they belong to."""

    def __init__(self, devices: Sequence[Any]) -> None:
        """`devices` are the devices of all hosts, in the same order on every host."""
        self.devices = tuple(devices)
        self.host = jax.process_index()
        self.local_devices = tuple(
            device for device in devices if device.process_index == self.host
        )
        self.host_mesh = Mesh(np.array(self.local_devices), (CHIP,))
        self.slice_mesh = Mesh(np.array(self.devices), (CHIP,))
        self._threads = ThreadPoolExecutor(max(len(self.local_devices), 1))

    def close(self) -> None:
        """End the threads that wait for the chips."""
        self._threads.shutdown()

    def run(self, program: ChipProgram, *arguments: Any) -> ProgramRun:
        """Run a program and time each chip. The first run also compiles, which is not timed."""
        run = self._run_timed(program, arguments)
        return ProgramRun(self.computed_outputs(program.name, run.outputs), run.seconds)

    def run_transfer(self, program: ChipProgram, *arguments: Any) -> ProgramRun:
        """Run and time a program whose outputs arrive over a link."""
        run = self._run_timed(program, arguments)
        return ProgramRun(self.received_outputs(program.name, run.outputs), run.seconds)

    def measure(self, program: ChipProgram, *arguments: Any) -> dict[int, np.ndarray]:
        """Return the output of a checksum program for each of this host's chips.

        No faults are injected into it.
        """
        shards = program(*arguments).addressable_shards
        return {shard.device.id: np.asarray(shard.data)[0] for shard in shards}

    def computed_outputs(self, name: str, outputs: Any) -> Any:
        """Return computed outputs, with the emulator's fault if there is one."""
        del name
        return emulated.inject_compute_fault(outputs)

    def received_outputs(self, name: str, outputs: Any) -> Any:
        """Return outputs that arrived over a link, with the emulator's fault if there is one."""
        del name
        return emulated.inject_link_fault(outputs)

    def measured_seconds(self, name: str, seconds: dict[int, float]) -> dict[int, float]:
        """Return the seconds of each chip. Tests override this."""
        del name
        return seconds

    def _run_timed(self, program: ChipProgram, arguments: tuple[Any, ...]) -> ProgramRun:
        if not program.compiled:
            jax.block_until_ready(program(*arguments))
            program.compiled = True
        started_at = time.perf_counter()
        outputs = program(*arguments)
        shards: dict[int, list[Any]] = {device.id: [] for device in self.local_devices}
        for output in jax.tree.leaves(outputs):
            for shard in output.addressable_shards:
                shards[shard.device.id].append(shard.data)

        def wait(device: int) -> float:
            jax.block_until_ready(shards[device])
            return time.perf_counter() - started_at

        seconds = dict(zip(shards, self._threads.map(wait, shards), strict=True))
        return ProgramRun(outputs, self.measured_seconds(program.name, seconds))


def checksum(values: jax.Array) -> jax.Array:
    """Return two checksums per row, shape [rows, 2].

    They are the sum of the row's bits as uint32, and the same sum weighted by the odd numbers 1, 3,
    5, …. Integer sums modulo 2³² do not depend on the order of the additions.
    """
    rows = _as_uint32(values).reshape(values.shape[0], -1)
    weights = 2 * jax.lax.broadcasted_iota(jnp.uint32, rows.shape, 1) + 1
    sums = [rows.sum(axis=1, dtype=jnp.uint32), (rows * weights).sum(axis=1, dtype=jnp.uint32)]
    return jnp.stack(sums, axis=1)


def count_mismatches(values: jax.Array, expected: jax.Array) -> jax.Array:
    """Return the number of mismatching words and their checksums, shape [3]."""
    count = (values != expected).sum(dtype=jnp.uint32)
    return jnp.concatenate([count[None], checksum(values.reshape(1, -1))[0]])


@cache
def checksum_program(mesh: Mesh) -> ChipProgram:
    """Return a program from arrays [1, rows, …] of a chip to checksums [1, rows, 2].

    The rows of several arrays are concatenated.
    """

    def compute(*arrays: jax.Array) -> jax.Array:
        return jnp.concatenate([checksum(values[0]) for values in arrays])[None]

    return ChipProgram(f"checksum over {CHIP}", compute, mesh, PER_CHIP)


def _as_uint32(values: jax.Array) -> jax.Array:
    """Return the bits of the values, so that NaN equals the same NaN and 0 differs from -0."""
    dtype = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[values.dtype.itemsize]
    return jax.lax.bitcast_convert_type(values, dtype).astype(jnp.uint32)
