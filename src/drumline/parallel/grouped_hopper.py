"""Grouped products for Hopper GPUs, written in Pallas for Mosaic GPU.

Rows come padded so that every group starts and ends on a multiple of `ROWS`: a tile of rows then
belongs to one group, is stored whole, and needs no mask, and the outer product of a group is a sum
over whole tiles. The padding rows hold zeros.

Both kernels are persistent: one block a multiprocessor takes tile after tile. In each block one
warpgroup only copies (bulk tensor copies into a ring of shared memory) and two multiply, 128 × 128
each, side by side along the rows or the columns of the output tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from drumline.parallel.grouped_blocks import alike
from drumline.parallel.grouped_typed import array_type

# Every group of rows is padded to a multiple of this: the taller of the two output tiles.
ROWS = 256
_SIDE = 128


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work; the defaults are for large products.

    `along` is the side of the output tile on which the two multiplying warpgroups lie: "n" makes
    tiles of 128 × 256, "m" of 256 × 128. `snake` is how many tiles wide a stripe is walked before
    the next one, so that neighbours find each other's operands in L2; `minor` is the direction of
    the stripe. `chain` starts copying for the next tile while the last is still being stored.
    """

    along: Literal["m", "n"] = "n"
    depth: int = 64
    steps: int = 4
    minor: Literal["m", "n"] = "n"
    snake: int = 8
    chain: bool = False

    @property
    def rows(self) -> int:
        """Rows of an output tile."""
        return 2 * _SIDE if self.along == "m" else _SIDE

    @property
    def columns(self) -> int:
        """Columns of an output tile."""
        return 2 * _SIDE if self.along == "n" else _SIDE


def takes(dtype: jnp.dtype, d: int, f: int) -> bool:
    """Return whether the kernels can multiply by matrices `[d, f]`, forward and backward.

    A tile is 256 long on one side, so one side of the matrix must hold whole ones.
    """
    fits = d % _SIDE == 0 and f % _SIDE == 0 and (d % (2 * _SIDE) == 0 or f % (2 * _SIDE) == 0)
    return fits and dtype in (jnp.bfloat16, jnp.float16)


def default_tiles(columns: int) -> Tiles:
    """Return the tiles for an output of this many columns."""
    return Tiles(along="n" if columns % (2 * _SIDE) == 0 else "m")


def matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transpose: bool,
    out_dtype: jnp.dtype,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Multiply groups of rows, each a multiple of `ROWS`, by their matrices."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, depth = x.shape
    columns = w.shape[1 if transpose else 2]
    tiles = tiles or default_tiles(columns)
    _divides(rows=(rows, tiles.rows), columns=(columns, tiles.columns), depth=(depth, tiles.depth))
    across, k_steps = columns // tiles.columns, depth // tiles.depth
    chain = tiles.chain and k_steps % tiles.steps == 0
    ends = jnp.cumsum(sizes) // tiles.rows
    tile = jnp.arange(rows // tiles.rows, dtype=jnp.int32)
    group = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
    group = jnp.minimum(group, w.shape[0] - 1)

    def body(group_ref: Any, down_ref: Any, x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        def pipeline(step: Any, context: Any, state: Any = None) -> Any:
            w_block = (tiles.columns, tiles.depth) if transpose else (tiles.depth, tiles.columns)
            return plgpu.emit_pipeline_warp_specialized(
                step,
                grid=(k_steps,),
                memory_registers=40,
                in_specs=[
                    _block_spec((tiles.rows, tiles.depth), lambda k: (0, k), x.dtype),
                    _block_spec(w_block, lambda k: (0, k) if transpose else (k, 0), x.dtype),
                ],
                wg_axis="wg",
                num_compute_wgs=2,
                max_concurrent_steps=tiles.steps,
                compute_context=context,
                pipeline_state=state,
            )

        @functools.partial(
            pl.run_scoped,
            allocated=pipeline(_nothing, _nothing).get_allocations(x_ref, w_ref.at[0]),
            staged=_staging(out_dtype),
            collective_axes="wg",
        )
        def scope(allocated: Any, staged: Any) -> None:
            wg = lax.axis_index("wg")
            down = down_ref[0]

            @plgpu.nd_loop((down * across,), collective_axes="sm")
            def walk(info: Any) -> None:
                i, j = plgpu.planar_snake(
                    info.index[0], (down, across), 0 if tiles.minor == "m" else 1, tiles.snake
                )
                across_slice = pl.ds(j * tiles.columns, tiles.columns)
                out = out_ref.at[pl.ds(i * tiles.rows, tiles.rows), across_slice]
                mine = pl.ds(wg * _SIDE, _SIDE)

                def step(_: Any, x_tile: Any, w_tile: Any, acc: Any) -> Any:
                    left = x_tile.at[mine] if tiles.along == "m" else x_tile
                    if transpose:
                        right = w_tile.at[mine] if tiles.along == "n" else w_tile
                        right = plgpu.transpose_ref(right, (1, 0))
                    else:
                        right = w_tile.at[:, mine] if tiles.along == "n" else w_tile
                    plgpu.wgmma(acc, left, right)
                    plgpu.wgmma_wait(0)
                    return acc

                state = None
                if chain:
                    phase = plgpu.PipelinePipeline
                    last = info.local_index == info.num_local_steps - 1
                    state = jnp.where(last, int(phase.STOP), int(phase.STEADY))
                    state = jnp.where(info.local_index == 0, int(phase.START), state)
                g = group_ref[i]
                matrix = w_ref.at[g, across_slice] if transpose else w_ref.at[g, :, across_slice]
                store = _store(out.at[mine] if tiles.along == "m" else out.at[:, mine], staged, wg)
                pipeline(step, store, state)(
                    x_ref.at[pl.ds(i * tiles.rows, tiles.rows)], matrix, allocations=allocated
                )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    launch = _launch(body, (rows, columns), out_dtype, x, interpret)
    y = alike(launch(group, ends[-1:], x, w), x)[0]  # a kernel may forget what varies
    # Tiles past the last group were not written.
    return jnp.where(jnp.arange(rows)[:, None] < jnp.sum(sizes), y, 0)


def outer(
    x: jax.Array,
    y: jax.Array,
    sizes: jax.Array,
    *,
    out_dtype: jnp.dtype,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Sum the outer products of rows in each group; groups are multiples of `ROWS`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    groups = sizes.shape[0]
    rows, tall, wide = x.shape[0], x.shape[1], y.shape[1]
    tiles = tiles or default_tiles(wide)
    if tall % tiles.rows:
        tiles = Tiles(along="n", depth=tiles.depth, steps=tiles.steps)
    _divides(rows=(rows, tiles.depth), x=(tall, tiles.rows), y=(wide, tiles.columns))
    down, across = tall // tiles.rows, wide // tiles.columns
    k_steps = (sizes // tiles.depth).astype(jnp.int32)
    first = jnp.cumsum(k_steps) - k_steps

    def body(first_ref: Any, steps_ref: Any, x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        def pipeline(step: Any, context: Any, start: Any, steps: Any) -> Any:
            return plgpu.emit_pipeline_warp_specialized(
                step,
                grid=(steps,),
                memory_registers=40,
                in_specs=[
                    _block_spec((tiles.depth, tiles.rows), lambda k: (start + k, 0), x.dtype),
                    _block_spec((tiles.depth, tiles.columns), lambda k: (start + k, 0), x.dtype),
                ],
                wg_axis="wg",
                num_compute_wgs=2,
                max_concurrent_steps=tiles.steps,
                compute_context=context,
            )

        @functools.partial(
            pl.run_scoped,
            # As many steps as the ring has slots, so that no slot is left out.
            allocated=pipeline(_nothing, _nothing, 0, tiles.steps).get_allocations(x_ref, y_ref),
            staged=_staging(out_dtype),
            collective_axes="wg",
        )
        def scope(allocated: Any, staged: Any) -> None:
            wg = lax.axis_index("wg")

            @plgpu.nd_loop((groups, down * across), collective_axes="sm")
            def walk(info: Any) -> None:
                g = info.index[0]
                i, j = plgpu.planar_snake(
                    info.index[1], (down, across), 0 if tiles.minor == "m" else 1, tiles.snake
                )
                down_slice = pl.ds(i * tiles.rows, tiles.rows)
                across_slice = pl.ds(j * tiles.columns, tiles.columns)
                out = out_ref.at[g, down_slice, across_slice]
                mine = pl.ds(wg * _SIDE, _SIDE)

                def step(_: Any, x_tile: Any, y_tile: Any, acc: Any) -> Any:
                    left = x_tile.at[:, mine] if tiles.along == "m" else x_tile
                    right = y_tile.at[:, mine] if tiles.along == "n" else y_tile
                    plgpu.wgmma(acc, plgpu.transpose_ref(left, (1, 0)), right)
                    plgpu.wgmma_wait(0)
                    return acc

                store = _store(out.at[mine] if tiles.along == "m" else out.at[:, mine], staged, wg)
                pipeline(step, store, first_ref[g], steps_ref[g])(
                    x_ref.at[:, down_slice], y_ref.at[:, across_slice], allocations=allocated
                )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    launch = _launch(body, (groups, tall, wide), out_dtype, x, interpret)
    return alike(launch(first, k_steps, x, y), x)[0]  # a kernel may forget what varies


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for functions that do not bear on what a pipeline allocates."""


def _swizzled(columns: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    return (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))


def _block_spec(shape: tuple[int, int], index: Callable[..., Any], dtype: jnp.dtype) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.BlockSpec(
        shape, index, transforms=_swizzled(shape[1], dtype), memory_space=plgpu.SMEM
    )


def _staging(dtype: jnp.dtype) -> Any:
    """Return shared memory through which each warpgroup stores, 64 rows of 128 bytes in turn."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    wide = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM((2, 2, 64, wide), dtype, transforms=_swizzled(wide, dtype))


def _store(out: Any, staged: Any, wg: Any) -> Callable[[Any], None]:
    """Return what a multiplying warpgroup does around its pipeline: sum, round, and store."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    accumulator: Any = plgpu.ACC  # type: ignore[attr-defined]

    def context(run: Any) -> None:
        @functools.partial(pl.run_scoped, acc=accumulator((_SIDE, _SIDE), jnp.float32))
        def scope(acc: Any) -> None:
            run(acc)
            tile = acc[...].astype(staged.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            wide = staged.shape[-1]
            places = [(i, j) for i in range(0, _SIDE, 64) for j in range(0, _SIDE, wide)]
            for turn, (i, j) in enumerate(places):
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                staged[wg, turn % 2] = tile[i : i + 64, j : j + wide]
                plgpu.commit_smem()  # type: ignore[no-untyped-call]
                plgpu.copy_smem_to_gmem(
                    staged.at[wg, turn % 2], out.at[pl.ds(i, 64), pl.ds(j, wide)]
                )

    return context


def _launch(
    body: Any, shape: tuple[int, ...], dtype: jnp.dtype, like: jax.Array, interpret: Any
) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    try:
        cores = int(jax.devices()[0].core_count)
    except AttributeError:  # not a GPU: a kernel lowered or interpreted elsewhere
        cores = 132 if interpret is None else 2
    options = {} if interpret is None else {"interpret": interpret}
    return plgpu.kernel(
        body,
        out_type=array_type(shape, dtype, like),
        grid=(cores,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **options,
    )


def _divides(**sides: tuple[int, int]) -> None:
    for name, (length, tile) in sides.items():
        if length % tile:
            raise ValueError(f"{name}: {length} is not a multiple of the tile's {tile}")
