"""X"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.axes import AxisName
from drumline.parallel.grouped.rows import group_rows
from drumline.parallel.typed import all_to_all, fori_loop, pmax, ragged_all_to_all

# Rounds a balanced assignment takes: four keeps the buffers at a quarter of the local rows and
# the padding of a nearly balanced dense exchange low, and still gives the experts long groups.
BALANCED_ROUNDS = 4


def default_buffer_rows(rows: int, peers: int) -> int:
    """Return the buffer rows for each peer when the caller names none."""
    return max(1, -(-rows // (BALANCED_ROUNDS * peers)))


def rounds_needed(counts: jax.Array, peers: int, buffer_rows: int, *, packed: bool) -> jax.Array:
    """Return how many rounds the exchange takes.

    Args:
        counts: `int[peers, E]`, rows that each source sends to each expert.
        peers: devices along the expert axis.
        buffer_rows: rows of the buffer for each peer.
        packed: whether rows for different peers share the buffer.
    """
    pair = counts.reshape(peers, peers, -1).sum(-1)
    if packed:
        # The same buffer serves the fullest receiver and the busiest sender: they differ when
        # some sources have little to send.
        fullest = jnp.maximum(pair.sum(0).max(), pair.sum(1).max())
        return (fullest + (buffer_rows * peers - 1)) // (buffer_rows * peers)
    return (pair.max() + (buffer_rows - 1)) // buffer_rows


@dataclass(frozen=True)
class Rounds:
    """One exchange as one device sees it; `packed` says which of the two buffers it uses."""

    axis_name: AxisName
    peers: int
    buffer_rows: int
    packed: bool
    ahead: bool  # whether it is asked about rounds before the first and past the last, too
    order: jax.Array  # pairs sorted by expert
    counts: jax.Array  # [source, destination, local expert]
    count: jax.Array  # rounds, the same on every device

    @property
    def rows(self) -> int:
        """Rows of one buffer."""
        # Slices are whole rows, so each of a packed buffer's peers may take one row more.
        spare = self.peers if self.packed else 0
        return self.peers * self.buffer_rows + spare

    def _slices(self, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return start and size, `[source, destination]`, of each run's slice in round `r`."""
        pair = self.counts.sum(-1)
        rounds = jnp.maximum(self.count, 1)
        each, over = pair // rounds, pair % rounds
        size = each + (r < over)
        if self.ahead:
            size = jnp.where((r >= 0) & (r < self.count), size, 0)
        return each * r + jnp.minimum(r, over), size

    def _slots(self, sizes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return for each buffer row its peer, its place in the slice, and whether it is used."""
        row = jnp.arange(self.rows, dtype=jnp.int32)
        if not self.packed:
            peer, place = row // self.buffer_rows, row % self.buffer_rows
            return peer, place, place < sizes[peer]
        ends = jnp.cumsum(sizes)
        peer = jnp.sum(ends[None, :] <= row[:, None], axis=-1, dtype=jnp.int32)
        used = peer < self.peers
        peer = jnp.minimum(peer, self.peers - 1)
        return peer, row - (ends[peer] - sizes[peer]), used

    def sent(self, r: jax.Array) -> jax.Array:
        """Return the pair in each row of the buffer this device sends; past the last, if none."""
        me = lax.axis_index(self.axis_name)
        start, size = self._slices(r)
        peer, place, used = self._slots(size[me])
        run = self.counts[me].sum(-1)
        run_start = jnp.cumsum(run) - run
        at = run_start[peer] + start[me, peer] + place
        pairs = self.order.shape[0]
        return jnp.where(used, self.order[jnp.minimum(at, pairs - 1)], pairs)

    def received(self, r: jax.Array) -> jax.Array:
        """Return the local expert of each row this device receives; past the last, if none."""
        me = lax.axis_index(self.axis_name)
        start, size = self._slices(r)
        peer, place, used = self._slots(size[:, me])
        ends = jnp.cumsum(self.counts[:, me], axis=-1)
        at = start[peer, me] + place
        expert = jnp.sum(ends[peer] <= at[:, None], axis=-1, dtype=jnp.int32)
        return jnp.where(used, expert, self.counts.shape[-1])

    def travel(self, buffer: jax.Array, r: jax.Array, *, back: bool = False) -> jax.Array:
        """Move a buffer to the experts, or their answers back into the rows they came from."""
        if not self.packed:
            return all_to_all(buffer, self.axis_name)
        me = lax.axis_index(self.axis_name)
        _, size = self._slices(r)
        if back:
            size = size.T
        before = jnp.cumsum(size, axis=0) - size  # rows of earlier sources, at each destination
        mine = size[me]
        return ragged_all_to_all(
            buffer,
            jnp.zeros_like(buffer),
            jnp.cumsum(mine) - mine,
            mine,
            before[me],
            size[:, me],
            axis_name=self.axis_name,
        )


def plan_rounds(
    keys: jax.Array,
    experts: int,
    axis_name: AxisName,
    buffer_rows: int | None,
    *,
    packed: bool,
    ahead: bool = False,
) -> Rounds:
    """Sort pairs by expert, tell everyone the counts, and count the rounds.

    Args:
        keys: `int[N]`, the expert of each pair; `experts` for a pair that goes nowhere.
        experts: number of experts on all devices together.
        axis_name: the mesh axis the experts are split over.
        buffer_rows: buffer rows for each peer; a quarter of the balanced share if None.
        packed: whether the buffer travels by `ragged_all_to_all`.
        ahead: whether rounds that do not exist are asked about, and have to be empty.
    """
    peers = lax.axis_size(axis_name)
    capacity = buffer_rows or default_buffer_rows(keys.shape[0], peers)
    grouping = group_rows(keys, experts)
    counts = lax.all_gather(grouping.sizes, axis_name).reshape(peers, peers, -1)
    count = pmax(rounds_needed(counts, peers, capacity, packed=packed), axis_name)
    return Rounds(axis_name, peers, capacity, packed, ahead, grouping.pair, counts, count)


class Stages(NamedTuple):
    """What one round does, in three parts; trees of arrays pass between them."""

    send: Callable[[jax.Array], Any]
    """Of a round: what arrives at the experts here."""
    work: Callable[[jax.Array, Any, Any], tuple[Any, Any]]
    """Of a round, what arrived and totals that stay here: the answers, and the totals after it."""
    add: Callable[[jax.Array, Any, Any], Any]
    """Of a round, the experts' answers and sums of what came back: the sums after it."""


@dataclass(frozen=True)
class Schedule:
    """How rounds follow each other, and in which of the two buffers rows travel."""

    packed: bool
    ahead: bool

    def __call__(
        self, count: jax.Array, stages: Stages, answers: Any, sums: Any, totals: Any
    ) -> tuple[Any, Any]:
        """Run all rounds.

        Args:
            count: how many there are.
            stages: of a round. Ahead, they are asked for a round before the first and one past
                the last, in which nothing may travel.
            answers: zeros like the answers of a round.
            sums: to begin with.
            totals: to begin with.

        Returns:
            Sums and totals after the last round.
        """
        return (_ahead if self.ahead else _in_turn)(count, stages, answers, sums, totals)


def _ahead(
    count: jax.Array, stages: Stages, answers: Any, sums: Any, totals: Any
) -> tuple[Any, Any]:
    def body(r: jax.Array, carry: Any) -> Any:
        arrived, answers, sums, totals = carry
        coming = stages.send(r + 1)
        sums = stages.add(r - 1, answers, sums)
        answers, totals = stages.work(r, arrived, totals)
        return coming, answers, sums, totals

    first = stages.send(jnp.zeros_like(count))
    _, answers, sums, totals = fori_loop(count, body, (first, answers, sums, totals))
    return stages.add(count - 1, answers, sums), totals


def _in_turn(
    count: jax.Array, stages: Stages, _answers: Any, sums: Any, totals: Any
) -> tuple[Any, Any]:
    def body(r: jax.Array, carry: Any) -> Any:
        sums, totals = carry
        answers, totals = stages.work(r, stages.send(r), totals)
        return stages.add(r, answers, sums), totals

    done: tuple[Any, Any] = fori_loop(count, body, (sums, totals))
    return done


DENSE = Schedule(packed=False, ahead=False)
PACKED = Schedule(packed=True, ahead=False)
AHEAD = Schedule(packed=True, ahead=True)
