"""Blocks fit their VMEM, divide the arrays, and grow with the VMEM."""

from __future__ import annotations

import pytest

from drumline.parallel.fused.kernels import piece_count
from drumline.parallel.fused.plans import Blocks, Operands, choose_blocks, vmem_bytes_of

MIB = 1 << 20


@pytest.mark.parametrize("vmem", [8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(2048, 3584, 4096), (1024, 8192, 3584)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_blocks_fit_and_divide(
    vmem: int, rows: int, columns: int, depth: int, itemsize: int
) -> None:
    operands = Operands(itemsize, 4, added=2)
    blocks = choose_blocks(rows, columns, depth, operands, vmem=vmem, row_tile=32 // itemsize)
    assert blocks is not None
    assert vmem_bytes_of(blocks, operands) < vmem
    assert rows % blocks.rows == columns % blocks.columns == depth % blocks.depth == 0
    assert blocks.columns % 128 == blocks.depth % 128 == 0


def test_with_enough_vmem_no_matmul_is_limited_by_hbm() -> None:
    operands = Operands(2, 2)
    blocks = choose_blocks(2048, 3584, 4096, operands, vmem=32 * MIB, row_tile=16)
    assert blocks == Blocks(1024, 1792, 512)
    # The multiplications per byte; v6e does 575 in the time of reading one byte.
    assert blocks.rows * blocks.columns / (blocks.rows + blocks.columns) > 575
    small = choose_blocks(2048, 3584, 4096, operands, vmem=12 * MIB, row_tile=16)
    assert small == Blocks(1024, 512, 512)


def test_the_smallest_blocks_and_blocks_that_do_not_fit() -> None:
    operands = Operands(4, 4)
    assert choose_blocks(8, 128, 128, operands, vmem=4 * MIB, row_tile=8) == Blocks(8, 128, 128)
    assert choose_blocks(8, 128, 128, operands, vmem=2 * MIB, row_tile=8) is None


def test_a_chunk_has_an_even_number_of_whole_tile_pieces() -> None:
    assert [piece_count(height, 16) for height in (32, 1024, 2048, 8192)] == [2, 2, 4, 4]
    assert piece_count(2048 + 32, 16) == 2
