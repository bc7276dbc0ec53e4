"""In what order the rounds of an exchange send, multiply and bring back.

In turn, a round ends before the next begins, and the experts wait while rows travel. Ahead, three
rounds are under way at a time: while the experts work on one, the rows of the next are on their way
to them and the answers of the one before are on their way back. Nothing that a round adds depends
on when it is added, and sums are in the same order: the results have the same bits. It takes one
more buffer each way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from drumline.parallel.grouped.typed import fori_loop


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
