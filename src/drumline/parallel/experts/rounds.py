"""The schedule of the dropless exchange: the rows of each round, and the order of its stages.

A device sorts its (token, slot) pairs by expert, so the rows for a peer are contiguous. All devices
gather the counts (a few integers per expert) and derive the content of every buffer in every round
from them. The rows for a peer are split evenly into a slice per round. The fullest buffer
determines the number of rounds. A skewed assignment needs more rounds, never a larger buffer.

A dense buffer has `buffer_rows` rows per peer and is sent with `all_to_all`. A packed buffer has
the rows for all peers without padding and is sent with `ragged_all_to_all`. The fullest receiver
determines its number of rounds.

Sequential rounds do not overlap, and the experts wait for rows. Overlapped rounds run the experts
while the rows of the next round and the answers of the previous round are sent, which needs an
additional buffer per direction. The results are bit-identical, because the order of all sums is
the same.
"""

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

# The number of rounds of a balanced assignment. With four, a buffer has a quarter of the local
# rows, a nearly balanced dense exchange has little padding, and the groups are long.
BALANCED_ROUNDS = 4


def default_buffer_rows(rows: int, devices: int) -> int:
    """Return the default number of buffer rows for each peer."""
    return max(1, -(-rows // (BALANCED_ROUNDS * devices)))


def round_count(counts: jax.Array, devices: int, buffer_rows: int, *, packed: bool) -> jax.Array:
    """Return the number of rounds of an exchange.

    Args:
        counts: `int[peers, E]`, the rows that each source sends to each expert.
        peers: the number of devices along the expert axis.
        buffer_rows: the buffer rows for each peer.
        packed: True if the rows for different peers share the buffer.
    """
    pair = counts.reshape(devices, devices, -1).sum(-1)
    if packed:
        # The buffer must fit the fullest receiver and the busiest sender. These differ if some
        # sources send little.
        fullest = jnp.maximum(pair.sum(0).max(), pair.sum(1).max())
        return (fullest + (buffer_rows * devices - 1)) // (buffer_rows * devices)
    return (pair.max() + (buffer_rows - 1)) // buffer_rows


@dataclass(frozen=True)
class Rounds:
    """The plan of an exchange on a device. `packed` is the kind of its buffers."""

    axis_name: AxisName
    devices: int
    buffer_rows: int
    packed: bool
    overlapped: bool  # True if rounds before the first and after the last are used too
    order: jax.Array  # pairs sorted by expert
    counts: jax.Array  # [source, destination, local expert]
    count: jax.Array  # rounds, the same on every device

    @property
    def rows(self) -> int:
        """The rows of a buffer."""
        # Slices are rounded to full rows, so a packed buffer may need an extra row per peer.
        spare = self.devices if self.packed else 0
        return self.devices * self.buffer_rows + spare

    def _slices(self, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return start and size, `[source, destination]`, of each slice in round `r`."""
        pair = self.counts.sum(-1)
        rounds = jnp.maximum(self.count, 1)
        base, remainder = pair // rounds, pair % rounds
        size = base + (r < remainder)
        if self.overlapped:
            size = jnp.where((r >= 0) & (r < self.count), size, 0)
        return base * r + jnp.minimum(r, remainder), size

    def _slots(self, sizes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return for each buffer row its peer, its position in the slice, and if it is used."""
        row = jnp.arange(self.rows, dtype=jnp.int32)
        if not self.packed:
            peer, position = row // self.buffer_rows, row % self.buffer_rows
            return peer, position, position < sizes[peer]
        ends = jnp.cumsum(sizes)
        peer = jnp.sum(ends[None, :] <= row[:, None], axis=-1, dtype=jnp.int32)
        is_used = peer < self.devices
        peer = jnp.minimum(peer, self.devices - 1)
        return peer, row - (ends[peer] - sizes[peer]), is_used

    def sent(self, r: jax.Array) -> jax.Array:
        """Return the pair in each buffer row that this device sends, or an index past the end."""
        rank = lax.axis_index(self.axis_name)
        start, size = self._slices(r)
        peer, position, is_used = self._slots(size[rank])
        run = self.counts[rank].sum(-1)
        run_start = jnp.cumsum(run) - run
        index = run_start[peer] + start[rank, peer] + position
        pairs = self.order.shape[0]
        return jnp.where(is_used, self.order[jnp.minimum(index, pairs - 1)], pairs)

    def received(self, r: jax.Array) -> jax.Array:
        """Return the local expert of each received row, or an index past the last expert."""
        rank = lax.axis_index(self.axis_name)
        start, size = self._slices(r)
        peer, position, is_used = self._slots(size[:, rank])
        ends = jnp.cumsum(self.counts[:, rank], axis=-1)
        index = start[peer, rank] + position
        expert = jnp.sum(ends[peer] <= index[:, None], axis=-1, dtype=jnp.int32)
        return jnp.where(is_used, expert, self.counts.shape[-1])

    def exchange_rows(self, buffer: jax.Array, r: jax.Array, *, back: bool = False) -> jax.Array:
        """Send a buffer to the experts, or with `back` their answers to the source rows."""
        if not self.packed:
            return all_to_all(buffer, self.axis_name)
        rank = lax.axis_index(self.axis_name)
        _, size = self._slices(r)
        if back:
            size = size.T
        rows_before = (
            jnp.cumsum(size, axis=0) - size
        )  # the rows of earlier sources, for each destination
        is_local = size[rank]
        return ragged_all_to_all(
            buffer,
            jnp.zeros_like(buffer),
            jnp.cumsum(is_local) - is_local,
            is_local,
            rows_before[rank],
            size[:, rank],
            axis_name=self.axis_name,
        )


def plan_exchange(
    keys: jax.Array,
    experts: int,
    axis_name: AxisName,
    buffer_rows: int | None,
    *,
    packed: bool,
    overlapped: bool = False,
) -> Rounds:
    """Sort the pairs by expert, share the counts with all devices, and count the rounds.

    Args:
        keys: `int[N]`, the expert of each pair; `experts` for a pair without one.
        experts: the number of experts on all devices together.
        axis_name: the mesh axis that shards the experts.
        buffer_rows: the buffer rows for each peer; None is a quarter of the balanced share.
        packed: True to send the buffer with `ragged_all_to_all`.
        overlapped: True if the plan is also asked for rounds before the first and after the last,
            which must be empty.
    """
    devices = lax.axis_size(axis_name)
    capacity = buffer_rows or default_buffer_rows(keys.shape[0], devices)
    grouping = group_rows(keys, experts)
    counts = lax.all_gather(grouping.sizes, axis_name).reshape(devices, devices, -1)
    count = pmax(round_count(counts, devices, capacity, packed=packed), axis_name)
    return Rounds(axis_name, devices, capacity, packed, overlapped, grouping.pair, counts, count)


class Stages(NamedTuple):
    """The three stages of a round. Trees of arrays pass between them."""

    send: Callable[[jax.Array], Any]
    """Maps a round to the rows that arrive at the local experts."""
    work: Callable[[jax.Array, Any, Any], tuple[Any, Any]]
    """Maps a round, the arrived rows and local totals to the answers and the new totals."""
    add: Callable[[jax.Array, Any, Any], Any]
    """Maps a round, the answers of the experts and sums to the new sums."""


@dataclass(frozen=True)
class Schedule:
    """The order of the rounds, and the kind of their buffers."""

    packed: bool
    overlapped: bool

    def __call__(
        self, count: jax.Array, stages: Stages, answers: Any, sums: Any, totals: Any
    ) -> tuple[Any, Any]:
        """Run all rounds.

        Args:
            count: the number of rounds.
            stages: the stages of a round. If overlapped, they are also called for a round before
                the first and one after the last, in which nothing may be sent.
            answers: zeros like the answers of a round.
            sums: the initial sums.
            totals: the initial totals.

        Returns:
            Sums and totals after the last round.
        """
        return (_run_overlapped if self.overlapped else _run_in_order)(
            count, stages, answers, sums, totals
        )


def _run_overlapped(
    count: jax.Array, stages: Stages, answers: Any, sums: Any, totals: Any
) -> tuple[Any, Any]:
    def body(r: jax.Array, carry: Any) -> Any:
        arrived, answers, sums, totals = carry
        incoming = stages.send(r + 1)
        sums = stages.add(r - 1, answers, sums)
        answers, totals = stages.work(r, arrived, totals)
        return incoming, answers, sums, totals

    first = stages.send(jnp.zeros_like(count))
    _, answers, sums, totals = fori_loop(count, body, (first, answers, sums, totals))
    return stages.add(count - 1, answers, sums), totals


def _run_in_order(
    count: jax.Array, stages: Stages, _answers: Any, sums: Any, totals: Any
) -> tuple[Any, Any]:
    def body(r: jax.Array, carry: Any) -> Any:
        sums, totals = carry
        answers, totals = stages.work(r, stages.send(r), totals)
        return stages.add(r, answers, sums), totals

    result: tuple[Any, Any] = fori_loop(count, body, (sums, totals))
    return result


DENSE = Schedule(packed=False, overlapped=False)
PACKED = Schedule(packed=True, overlapped=False)
PACKED_OVERLAPPED = Schedule(packed=True, overlapped=True)
