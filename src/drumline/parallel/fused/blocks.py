"""How a product is cut into blocks that fit a TPU core's VMEM.

A block of the result, `rows` by `columns`, stays in VMEM in float32 while blocks of `depth` of both
operands pass through. Each operand is read from HBM once for every block of the other, so that the
larger the block of the result, the less is read: a block of m by n does `m·n/(m+n)` multiply-adds
for each number that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 128
"""Columns of one tile, of any type."""

DEEPEST = 512
"""More depth saves no reading, and takes VMEM that a larger block of the result uses better."""

LONGEST = 2048
"""A longer side no longer pays."""

ENOUGH = 640
"""Multiplications for each byte read that leave any chip's HBM waiting: v6e, of which most are
wanted, does 575 in the time of one byte. Larger blocks would save nothing."""

RESERVED = 2 << 20
"""VMEM that is left to the compiler, for what it spills and for semaphores."""


@dataclass(frozen=True)
class Blocks:
    """The sides of the blocks of one product."""

    rows: int
    columns: int
    depth: int


@dataclass(frozen=True)
class Operands:
    """What passes through VMEM beside the sum: bytes of a number, and how many of each there are.

    Attributes:
        itemsize: of the operands.
        out_itemsize: of the result.
        pairs: how many pairs of operands are multiplied at once.
        added: how many float32 arrays of the result's shape are added to the product.
    """

    itemsize: int
    out_itemsize: int
    pairs: int = 1
    added: int = 0


def sublanes(itemsize: int) -> int:
    """Rows of one tile: 8 of 32 bits, 16 of 16 bits."""
    return 32 // itemsize


def vmem_of(blocks: Blocks, operands: Operands) -> int:
    """Bytes that a pipelined product takes: the sum once, all that passes through twice."""
    m, n, k = blocks.rows, blocks.columns, blocks.depth
    passing = operands.pairs * (m + n) * k * operands.itemsize
    results = m * n * (operands.out_itemsize + 4 * operands.added)
    # The product of one step is a value of its own before it is added to the sum.
    return 2 * (passing + results) + 2 * 4 * m * n


def choose_blocks(
    rows: int,
    columns: int,
    depth: int,
    operands: Operands,
    *,
    vmem: int,
    row_tile: int,
    cores: int = 1,
) -> Blocks | None:
    """The blocks that read least from HBM, or None if not even the smallest fit.

    Args:
        rows: of the result; a multiple of `row_tile`.
        columns: of the result; a multiple of 128.
        depth: of the contraction; a multiple of 128, or of `row_tile` where it is rows.
        operands: what passes through VMEM.
        vmem: bytes that each core may use.
        row_tile: what the rows of a block have to be a multiple of.
        cores: which share the blocks, and have to have as many each.
    """
    room = vmem - RESERVED
    best: tuple[tuple[float, int], Blocks] | None = None
    for m in _divisors(rows, row_tile, LONGEST):
        for n in _divisors(columns, LANES, LONGEST):
            if (rows // m) % cores and (columns // n) % cores:
                continue
            for k in _divisors(depth, LANES if depth % LANES == 0 else row_tile, DEEPEST):
                blocks = Blocks(m, n, k)
                if vmem_of(blocks, operands) > room:
                    continue
                # Least reading, and few steps: each reads and writes the whole sum in VMEM, which
                # takes about as long as multiplying a depth of 64.
                reuse = min(ENOUGH, m * n / (m + n) * 2 / operands.itemsize)
                worth = reuse * k / (k + 64), -m * n
                if best is None or worth > best[0]:
                    best = worth, blocks
    return best and best[1]


def _divisors(length: int, tile: int, most: int) -> list[int]:
    """Multiples of the tile that divide a length, up to the largest that is useful."""
    return [d for d in range(tile, min(length, most) + 1, tile) if length % d == 0]
