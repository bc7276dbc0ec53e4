"""Grouped matmuls for Hopper GPUs, written in Pallas for Mosaic GPU.

Rows are padded so that every group starts and ends on a multiple of `ROWS`. A tile of rows then
belongs to a single group and needs no mask, and the outer product of a group is a sum over full
tiles. The padding rows are zero. Rows past the last group are neither read nor written.

The kernels are persistent: a block per multiprocessor processes tile after tile. In a block, a
warpgroup copies tiles into a ring in shared memory, and two other warpgroups multiply, each half of
the rows of the output tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.grouped.blocks import match_varying
from drumline.parallel.typed import array_type

# Every group of rows is padded to a multiple of this, the larger height of output tiles.
ROWS = 256
_SIDE = 128
_LONG = 256
# From this number of columns the matrix of a group does not fit in L2.
_WIDE = 4096


@dataclass(frozen=True)
class Tiles:
    """The tiling of a kernel.

    An output tile has `rows` × `columns`. A step multiplies `depth` of the contracted dimension,
    from a ring of `steps` in shared memory. Tiles are processed in stripes with a width of `snake`
    tiles and the direction `minor`, to reuse operands from L2. With `chain` the copies for the next
    tile start while a tile is stored.
    """

    rows: int
    columns: int
    minor: Literal["m", "n"] = "n"
    snake: int = 8
    chain: bool = False
    depth: int = 64
    steps: int = 4


def supports(dtype: jnp.dtype, d: int, f: int) -> bool:
    """Return True if the kernels support matrices `[d, f]`, forward and backward.

    One side of a tile is 256, so one side of the matrix must be a multiple of it.
    """
    fits = d % _SIDE == 0 and f % _SIDE == 0 and (d % _LONG == 0 or f % _LONG == 0)
    return fits and dtype in (jnp.bfloat16, jnp.float16)


def matmul_tiles(columns: int) -> Tiles:
    """Return the tiles for a matmul with this many columns, the fastest found on an H200."""
    if columns % _LONG:
        return Tiles(256, 128, snake=16, chain=True)
    if columns < _WIDE:
        return Tiles(128, 256, snake=8, chain=True)
    return Tiles(128, 256, minor="m", snake=16, chain=True)


def outer_tiles(columns_: int) -> Tiles:
    """Return the tiles for sums of outer products with this many columns."""
    return Tiles(256, 128, snake=4) if columns_ % _LONG else Tiles(128, 256, snake=4)


def matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transpose: bool,
    out_dtype: jnp.dtype,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Multiply groups of rows by their matrices.

    Rows past the last group are not written and stay uninitialized.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, depth = x.shape
    columns = w.shape[1 if transpose else 2]
    tiles = tiles or matmul_tiles(columns)
    _check_divisible(
        rows=(rows, tiles.rows), columns=(columns, tiles.columns), depth=(depth, tiles.depth)
    )
    across, k_steps = columns // tiles.columns, depth // tiles.depth
    chain = tiles.chain and k_steps % tiles.steps == 0
    group, down = _groups_of_tiles(sizes, rows, tiles.rows)
    w_tile = (tiles.columns, tiles.depth) if transpose else (tiles.depth, tiles.columns)
    pipeline = _pipeline(
        tiles,
        k_steps,
        _block_spec((tiles.rows, tiles.depth), lambda k: (0, k), x.dtype),
        _block_spec(w_tile, lambda k: (0, k) if transpose else (k, 0), x.dtype),
    )

    def body(group_ref: Any, down_ref: Any, x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        @functools.partial(
            pl.run_scoped,
            allocated=_allocations(pipeline, x_ref, w_ref.at[0]),
            staged=_staging(out_dtype),
            collective_axes="wg",
        )
        def scope(allocated: Any, staged: Any) -> None:
            wg, down = lax.axis_index("wg"), down_ref[0]

            @plgpu.nd_loop((down * across,), collective_axes="sm")
            def walk(info: Any) -> None:
                i, j = _tile_position(tiles, info.index[0], down, across)

                def step(_: Any, left: Any, right: Any, acc: Any) -> Any:
                    if transpose:
                        right = right.transpose((1, 0))
                    return _add_product(acc, left.at[_half_rows(tiles, wg)], right)

                g, across_slice = group_ref[i], pl.ds(j * tiles.columns, tiles.columns)
                matrix = w_ref.at[g, across_slice] if transpose else w_ref.at[g, :, across_slice]
                x_tiles = x_ref.at[pl.ds(i * tiles.rows, tiles.rows)]
                out = out_ref.at[pl.ds(i * tiles.rows, tiles.rows), across_slice]
                run = pipeline(
                    step,
                    compute_context=_store(tiles, out, staged, wg),
                    pipeline_state=_phase(info) if chain else None,
                )
                run(x_tiles, matrix, allocations=allocated)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    launch = _launch(body, (rows, columns), out_dtype, x)
    return match_varying(launch(group, down, x, w), x)[0]  # a kernel may lose the varying axes


def outer(
    x: jax.Array,
    y: jax.Array,
    sizes: jax.Array,
    *,
    out_dtype: jnp.dtype,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Sum the outer products of rows by group."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    groups = sizes.shape[0]
    rows, d, f = x.shape[0], x.shape[1], y.shape[1]
    tiles = tiles or outer_tiles(f)
    _check_divisible(rows=(rows, tiles.depth), x=(d, tiles.rows), y=(f, tiles.columns))
    down, across = d // tiles.rows, f // tiles.columns
    k_steps = (sizes // tiles.depth).astype(jnp.int32)
    first = jnp.cumsum(k_steps) - k_steps

    def pipeline_from(start: Any, steps: Any) -> Callable[..., Any]:
        shapes = (tiles.depth, tiles.rows), (tiles.depth, tiles.columns)
        specs = [_block_spec(shape, lambda k: (start + k, 0), x.dtype) for shape in shapes]
        return _pipeline(tiles, steps, *specs)

    def body(first_ref: Any, steps_ref: Any, x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        @functools.partial(
            pl.run_scoped,
            # Use all slots of the ring, so that all are allocated.
            allocated=_allocations(pipeline_from(0, tiles.steps), x_ref, y_ref),
            staged=_staging(out_dtype),
            collective_axes="wg",
        )
        def scope(allocated: Any, staged: Any) -> None:
            wg = lax.axis_index("wg")

            @plgpu.nd_loop((groups, down * across), collective_axes="sm")
            def walk(info: Any) -> None:
                g = info.index[0]
                i, j = _tile_position(tiles, info.index[1], down, across)

                def step(_: Any, left: Any, right: Any, acc: Any) -> Any:
                    left = left.at[:, _half_rows(tiles, wg)].transpose((1, 0))
                    return _add_product(acc, left, right)

                down_slice = pl.ds(i * tiles.rows, tiles.rows)
                across_slice = pl.ds(j * tiles.columns, tiles.columns)
                store = _store(tiles, out_ref.at[g, down_slice, across_slice], staged, wg)
                run = pipeline_from(first_ref[g], steps_ref[g])(step, compute_context=store)
                run(
                    x_ref.at[:, down_slice],
                    y_ref.at[:, across_slice],
                    allocations=allocated,
                )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    launch = _launch(body, (groups, d, f), out_dtype, x)
    return match_varying(launch(first, k_steps, x, y), x)[0]  # a kernel may lose the varying axes


def _groups_of_tiles(sizes: jax.Array, rows: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """Return the groups of the tiles of rows, and `[1]`: the number of tiles with a group."""
    ends = jnp.cumsum(sizes) // tile
    tiles = jnp.arange(rows // tile, dtype=ends.dtype)
    # There are few tiles, so compare all with all ends. A search would be a loop.
    group = jnp.sum(ends[None, :] <= tiles[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(group, sizes.shape[0] - 1), ends[-1:].astype(jnp.int32)


def _pipeline(tiles: Tiles, steps: Any, *specs: Any) -> Callable[..., Any]:
    """Return a function that creates pipelines of copies for two multiplying warpgroups."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return functools.partial(
        plgpu.emit_pipeline_warp_specialized,
        grid=(steps,),
        memory_registers=40,
        in_specs=list(specs),
        wg_axis="wg",
        num_compute_wgs=2,
        max_concurrent_steps=tiles.steps,
    )


def _allocations(pipeline: Callable[..., Any], *operands: Any) -> Any:
    """Return the shared memory of a pipeline, which all tiles of a block reuse."""
    return pipeline(_ignore, compute_context=_ignore).get_allocations(*operands)


def _tile_position(tiles: Tiles, index: Any, down: Any, across: int) -> tuple[Any, Any]:
    """Return row and column of the tile that is processed at position `index`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    minor = 0 if tiles.minor == "m" else 1
    i, j = plgpu.planar_snake(index, (down, across), minor, tiles.snake)
    return i, j


def _half_rows(tiles: Tiles, wg: Any) -> Any:
    """Return the rows of a tile that belong to a warpgroup."""
    from jax.experimental import pallas as pl

    return pl.ds(wg * (tiles.rows // 2), tiles.rows // 2)


def _add_product(acc: Any, left: Any, right: Any) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    plgpu.wgmma(acc, left, right)
    plgpu.wgmma_wait(0)
    return acc


def _phase(info: Any) -> Any:
    """Return the phase of a tile in a chain of copies: start, steady or stop."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    phase = plgpu.PipelinePipeline
    last = info.local_index == info.num_local_steps - 1
    state = jnp.where(last, int(phase.STOP), int(phase.STEADY))
    return jnp.where(info.local_index == 0, int(phase.START), state)


def _ignore(*_: Any, **__: Any) -> None:
    """Do nothing, in place of functions that do not affect the allocations of a pipeline."""


def _swizzled(columns: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    return (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))


def _block_spec(shape: tuple[int, int], index: Callable[..., Any], dtype: jnp.dtype) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.BlockSpec(
        shape,
        index,
        transforms=_swizzled(shape[1], dtype),
        memory_space=plgpu.SMEM,
    )


def _staging(dtype: jnp.dtype) -> Any:
    """Return the shared memory for stores of a warpgroup: two buffers of 64 rows × 128 bytes."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM((2, 2, 64, columns), dtype, transforms=_swizzled(columns, dtype))


def _store(tiles: Tiles, out: Any, staged: Any, wg: Any) -> Callable[[Any], None]:
    """Return the context of a multiplying warpgroup, which accumulates, rounds and stores."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    out, tile_rows = out.at[_half_rows(tiles, wg)], tiles.rows // 2
    accumulator: Any = plgpu.ACC  # type: ignore[attr-defined]

    def context(run: Any) -> None:
        @functools.partial(pl.run_scoped, acc=accumulator((tile_rows, tiles.columns), jnp.float32))
        def scope(acc: Any) -> None:
            run(acc)
            tile = acc[...].astype(staged.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            columns = staged.shape[-1]
            offsets = [
                (i, j) for i in range(0, tile_rows, 64) for j in range(0, tiles.columns, columns)
            ]
            for index, (i, j) in enumerate(offsets):
                buffer = index % 2
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                staged[wg, buffer] = tile[i : i + 64, j : j + columns]
                plgpu.commit_smem()  # type: ignore[no-untyped-call]
                plgpu.copy_smem_to_gmem(
                    staged.at[wg, buffer], out.at[pl.ds(i, 64), pl.ds(j, columns)]
                )

    return context


def _launch(body: Any, shape: tuple[int, ...], dtype: jnp.dtype, like: jax.Array) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    try:
        cores = int(jax.devices()[0].core_count)
    except AttributeError:  # without a GPU, for lowering only
        cores = 132
    return plgpu.kernel(
        body,
        out_type=array_type(shape, dtype, like),
        grid=(cores,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def _check_divisible(**sides: tuple[int, int]) -> None:
    for name, (length, tile) in sides.items():
        if length % tile:
            raise ValueError(f"{name}: {length} is not a multiple of the tile's {tile}")
