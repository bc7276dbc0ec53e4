"""Do the links deliver what was sent: round every ring of the slice, hop by hop, both ways.

Each chip makes a buffer from its own number, which every other chip can make too, so what arrives
is compared on the chip where it arrives, after every hop, and a link that corrupts is named by its
two ends. Then an integer all-reduce and an all-gather, which take links as trainings do.
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

from drumline.health.bench import ALL, CHIP, EACH, Bench, OnChips
from drumline.health.checks.patterns import counted
from drumline.health.checks.rulers import wrong_words
from drumline.health.checks.sizes import Sizes
from drumline.health.observations import HOP, REDUCED, Observation


@dataclass(frozen=True)
class LinkRing:
    """Where each chip sends to, as places in the bench's order of devices."""

    name: str
    next: tuple[int, ...]
    hops: int
    """After so many every buffer is back where it was made."""

    def origins(self, hops: int) -> np.ndarray:
        """For each place, whose buffer is there after so many hops."""
        origins = np.arange(len(self.next))
        for _ in range(hops):
            moved = np.empty_like(origins)
            moved[list(self.next)] = origins
            origins = moved
        return origins.astype(np.uint32)


def rings_of(devices: tuple[Any, ...]) -> list[LinkRing]:
    """All devices in a ring, and where they know their place in the torus each of its axes."""
    count = len(devices)
    order = [LinkRing("all chips", tuple((at + 1) % count for at in range(count)), count)]
    places = {_place(device): at for at, device in enumerate(devices)}
    if None not in places and len(places) == count:
        sides = len(next(iter(places)))
        for axis in range(sides - 1):
            lines: dict[Any, list[Any]] = {}
            for place in places:
                lines.setdefault((*place[:axis], None, *place[axis + 1 :]), []).append(place)
            lengths = {len(line) for line in lines.values()}
            if lengths == {1}:
                continue
            following = {}
            for line in lines.values():
                line.sort(key=lambda place: place[axis])
                for number, place in enumerate(line):
                    following[places[place]] = places[line[(number + 1) % len(line)]]
            following = dict(sorted(following.items()))
            order.append(LinkRing(f"axis {'xyzw'[axis]}", tuple(following.values()), max(lengths)))
    back = []
    for ring in order:
        if ring.hops > 2:
            previous = tuple(int(at) for at in np.argsort(ring.next))
            back.append(LinkRing(f"{ring.name}, backwards", previous, ring.hops))
    return order + back


def links(bench: Bench, sizes: Sizes, turn: int) -> Iterator[Observation]:
    """Hop by hop round every ring, then all together. Nothing where there is one chip."""
    count = len(bench.devices)
    if count == 1:
        return
    ids = [device.id for device in bench.devices]
    seed = np.uint32(turn + 1)
    make, check = _make(bench.slice, sizes.words), _check(bench.slice, sizes.words)
    mine = bench.run(make, seed).outputs
    for ring in rings_of(bench.devices):
        hop = _hop(bench.slice, ring, sizes.words)
        senders = {ids[to]: ids[at] for at, to in enumerate(ring.next)}
        buffer = mine
        for number in range(ring.hops + 1):
            seconds: Mapping[int, float] = {}
            if number:
                sent = bench.send(hop, buffer)
                buffer, seconds = sent.outputs, sent.seconds
            yield Observation(
                "links",
                f"{ring.name}, round {turn + 1}",
                number,
                HOP,
                _ints(bench.read(check, buffer, ring.origins(number), seed)),
                seconds,
                bytes=4.0 * sizes.words,
                senders=senders if number else {},
            )
    for name, gather in (("all-reduce", False), ("all-gather", True)):
        program = _together(bench.slice, gather, sizes.words)
        ran = bench.run(program, mine)
        yield Observation(
            "links",
            f"{name}, round {turn + 1}",
            0,
            REDUCED,
            _ints(bench.read(_check_all(bench.slice, gather, sizes.words), ran.outputs, seed)),
        )


def _place(device: Any) -> Any:
    """Where a device is in the torus, its core last; None where it does not say."""
    coords = getattr(device, "coords", None)
    if coords is None:
        return None
    return (*map(int, coords), int(getattr(device, "core_on_chip", 0) or 0))


def _ints(read: Mapping[int, np.ndarray]) -> dict[int, tuple[int, ...]]:
    return {device: tuple(map(int, told)) for device, told in read.items()}


def _buffer(seed: jax.Array, origin: jax.Array, words: int) -> jax.Array:
    made: jax.Array = counted(seed ^ (origin << 12), jax.lax.iota(jnp.uint32, words))
    return made


@cache
def _make(mesh: Mesh, words: int) -> OnChips:
    def make(seed: jax.Array) -> jax.Array:
        return _buffer(seed, jax.lax.axis_index(CHIP).astype(jnp.uint32), words)[None]

    return OnChips("links, made", make, mesh)


@cache
def _hop(mesh: Mesh, ring: LinkRing, words: int) -> OnChips:
    del words  # a program of its own for each size, so that none is timed while it compiles
    hop = partial(jax.lax.ppermute, axis_name=CHIP, perm=list(enumerate(ring.next)))
    return OnChips(f"links, {ring.name}", hop, mesh, EACH)


@cache
def _check(mesh: Mesh, words: int) -> OnChips:
    def check(buffer: jax.Array, origins: jax.Array, seed: jax.Array) -> jax.Array:
        origin = origins[jax.lax.axis_index(CHIP)]
        return wrong_words(buffer[0], _buffer(seed, origin, words))[None]

    return OnChips("links, read", check, mesh, (EACH, ALL, ALL))


@cache
def _together(mesh: Mesh, gather: bool, words: int) -> OnChips:
    def collect(buffer: jax.Array) -> jax.Array:
        if gather:
            # A piece of each: whole buffers of hundreds of chips would fill a chip's memory.
            piece = buffer[0, : _piece(words, mesh.size)]
            gathered: jax.Array = jax.lax.all_gather(piece, CHIP)[None]
            return gathered
        total: jax.Array = jax.lax.psum(buffer.astype(jnp.int32), CHIP)
        return total

    return OnChips("links, all-gather" if gather else "links, all-reduce", collect, mesh, EACH)


def _piece(words: int, chips: int) -> int:
    return max(words // chips, 1)


@cache
def _check_all(mesh: Mesh, gather: bool, words: int) -> OnChips:
    def check(collected: jax.Array, seed: jax.Array) -> jax.Array:
        origins = jax.lax.iota(jnp.uint32, mesh.size)
        if gather:
            piece = _piece(words, mesh.size)
            expected = jax.vmap(lambda origin: _buffer(seed, origin, piece))(origins)
        else:

            def add(total: jax.Array, origin: jax.Array) -> tuple[jax.Array, None]:
                return total + _buffer(seed, origin, words), None

            expected, _ = jax.lax.scan(add, jnp.zeros(words, jnp.uint32), origins)
        found = jax.lax.bitcast_convert_type(collected[0], jnp.uint32)
        return wrong_words(found, expected)[None]

    return OnChips("links, read together", check, mesh, (EACH, ALL))
