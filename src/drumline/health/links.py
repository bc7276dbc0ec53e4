"""Test the links: send buffers around the rings of the slice, hop by hop, in both directions.

A chip generates a buffer from its index. The receiver of a hop generates the same buffer and
compares, so a link that corrupts data is known by its ends. An integer all-reduce and an all-gather
follow, which use the links like training.
"""

# mypy: allow-untyped-calls

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drumline.health.findings import HOP, REDUCED, Observation
from drumline.health.host_checks import torus_coordinates
from drumline.health.inputs import Sizes, random_uint32
from drumline.health.runner import (
    CHIP,
    PER_CHIP,
    REPLICATED,
    ChipProgram,
    ChipRunner,
    count_mismatches,
)


@dataclass(frozen=True)
class LinkRing:
    """A ring of chips, as indices into the runner's devices."""

    name: str
    next: tuple[int, ...]
    """The receivers, by sender."""
    hops: int
    """The number of hops after which a buffer is back at its origin."""

    def origins(self, hops: int) -> np.ndarray:
        """Return the origins of the buffers on the chips after some hops."""
        origins = np.arange(len(self.next))
        for _ in range(hops):
            moved = np.empty_like(origins)
            moved[list(self.next)] = origins
            origins = moved
        return origins.astype(np.uint32)


def rings_of(devices: tuple[Any, ...]) -> list[LinkRing]:
    """Return a ring of all devices and, if they report coordinates, of the torus axes.

    Rings with more than two hops are also returned in reverse.
    """
    count = len(devices)
    rings = [LinkRing("all chips", tuple((index + 1) % count for index in range(count)), count)]
    indices = {torus_coordinates(device): index for index, device in enumerate(devices)}
    if None not in indices and len(indices) == count:
        dimensions = len(next(iter(indices)) or ())
        for axis in range(dimensions - 1):
            lines: dict[Any, list[Any]] = {}
            for coordinates in indices:
                assert coordinates is not None
                line_key = (*coordinates[:axis], None, *coordinates[axis + 1 :])
                lines.setdefault(line_key, []).append(coordinates)
            lengths = {len(line) for line in lines.values()}
            if lengths == {1}:
                continue
            next_index = {}
            for line in lines.values():
                line.sort(key=lambda coordinates: coordinates[axis])
                for index, coordinates in enumerate(line):
                    next_index[indices[coordinates]] = indices[line[(index + 1) % len(line)]]
            next_index = dict(sorted(next_index.items()))
            rings.append(LinkRing(f"axis {'xyzw'[axis]}", tuple(next_index.values()), max(lengths)))
    reversed_rings = []
    for ring in rings:
        if ring.hops > 2:
            previous = tuple(int(index) for index in np.argsort(ring.next))
            reversed_rings.append(LinkRing(f"{ring.name}, backwards", previous, ring.hops))
    return rings + reversed_rings


def run_links_test(runner: ChipRunner, sizes: Sizes, round_index: int) -> Iterator[Observation]:
    """Send buffers around the rings, then run collectives of all chips."""
    if len(runner.devices) == 1:
        return
    ids = [device.id for device in runner.devices]
    seed = np.uint32(round_index + 1)
    mesh, size = runner.slice_mesh, sizes.link_buffer
    mismatch_program = _hop_mismatch_program(mesh, size)
    own_buffers = runner.run(_buffer_program(mesh, size), seed).outputs
    for ring in rings_of(runner.devices):
        hop_program = _hop_program(mesh, ring, size)
        senders = {ids[receiver]: ids[sender] for sender, receiver in enumerate(ring.next)}
        buffers = own_buffers
        for hop in range(ring.hops + 1):
            seconds: Mapping[int, float] = {}
            if hop:
                run = runner.run_transfer(hop_program, buffers)
                buffers, seconds = run.outputs, run.seconds
            yield Observation(
                "links",
                f"{ring.name}, round {round_index + 1}",
                hop,
                HOP,
                _as_integers(runner.measure(mismatch_program, buffers, ring.origins(hop), seed)),
                seconds,
                bytes=4.0 * size,
                senders=senders if hop else {},
            )
    for name, gather in (("all-reduce", False), ("all-gather", True)):
        run = runner.run(_collective_program(mesh, gather, size), own_buffers)
        mismatch_program = _collective_mismatch_program(mesh, gather, size)
        yield Observation(
            "links",
            f"{name}, round {round_index + 1}",
            0,
            REDUCED,
            _as_integers(runner.measure(mismatch_program, run.outputs, seed)),
        )


def _as_integers(counts: Mapping[int, np.ndarray]) -> dict[int, tuple[int, ...]]:
    return {device: tuple(map(int, values)) for device, values in counts.items()}


def _buffer(seed: jax.Array, origin: jax.Array, size: int) -> jax.Array:
    buffer: jax.Array = random_uint32(seed ^ (origin << 12), jax.lax.iota(jnp.uint32, size))
    return buffer


@cache
def _buffer_program(mesh: Mesh, size: int) -> ChipProgram:
    def make(seed: jax.Array) -> jax.Array:
        return _buffer(seed, jax.lax.axis_index(CHIP).astype(jnp.uint32), size)[None]

    return ChipProgram("links, made", make, mesh)


@cache
def _hop_program(mesh: Mesh, ring: LinkRing, size: int) -> ChipProgram:
    del size  # for the cache: the first run of a program compiles it for its size
    hop = partial(jax.lax.ppermute, axis_name=CHIP, perm=list(enumerate(ring.next)))
    return ChipProgram(f"links, {ring.name}", hop, mesh, PER_CHIP)


@cache
def _hop_mismatch_program(mesh: Mesh, size: int) -> ChipProgram:
    def compare(buffer: jax.Array, origins: jax.Array, seed: jax.Array) -> jax.Array:
        origin = origins[jax.lax.axis_index(CHIP)]
        return count_mismatches(buffer[0], _buffer(seed, origin, size))[None]

    return ChipProgram("links, read", compare, mesh, (PER_CHIP, REPLICATED, REPLICATED))


@cache
def _collective_program(mesh: Mesh, gather: bool, size: int) -> ChipProgram:
    def collect(buffer: jax.Array) -> jax.Array:
        if gather:
            # The whole buffers of hundreds of chips would fill a chip's memory.
            part = buffer[0, : _gathered_size(size, mesh.size)]
            gathered: jax.Array = jax.lax.all_gather(part, CHIP)[None]
            return gathered
        total: jax.Array = jax.lax.psum(buffer.astype(jnp.int32), CHIP)
        return total

    name = "links, all-gather" if gather else "links, all-reduce"
    return ChipProgram(name, collect, mesh, PER_CHIP)


@cache
def _collective_mismatch_program(mesh: Mesh, gather: bool, size: int) -> ChipProgram:
    def compare(collected: jax.Array, seed: jax.Array) -> jax.Array:
        origins = jax.lax.iota(jnp.uint32, mesh.size)
        if gather:
            part = _gathered_size(size, mesh.size)
            expected = jax.vmap(lambda origin: _buffer(seed, origin, part))(origins)
        else:

            def add(total: jax.Array, origin: jax.Array) -> tuple[jax.Array, None]:
                return total + _buffer(seed, origin, size), None

            expected, _ = jax.lax.scan(add, jnp.zeros(size, jnp.uint32), origins)
        actual = jax.lax.bitcast_convert_type(collected[0], jnp.uint32)
        return count_mismatches(actual, expected)[None]

    return ChipProgram("links, read together", compare, mesh, (PER_CHIP, REPLICATED))


def _gathered_size(size: int, chips: int) -> int:
    return max(size // chips, 1)
