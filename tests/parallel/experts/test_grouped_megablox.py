"""The TPU's grouped kernels, interpreted in a checked `shard_map`, agree with float64."""

# mypy: allow-untyped-calls

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from drumline.parallel.grouped import megablox

SIZES = np.array([[70, 0, 130], [128, 1, 3]])
"""The sizes of two devices: odd sizes, an empty group, and rows without a group."""


def test_matmuls_and_their_gradients_agree_with_float64() -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 210, 128)), rng.normal(size=(2, 210, 160))
    for device, sizes in enumerate(SIZES):
        # The content of these rows is undefined and must not reach a sum.
        x[device, sizes.sum() :] = dy[device, sizes.sum() :] = np.nan
    w = rng.normal(size=(3, 128, 160))

    def on_device(
        x: jax.Array, dy: jax.Array, sizes: jax.Array, w: jax.Array
    ) -> tuple[jax.Array, ...]:
        options: dict[str, Any] = {"out_dtype": jnp.dtype("float32"), "interpret": True}
        matmul: Any = partial(megablox.matmul, **options)
        y = matmul(x[0], w, sizes[0], transpose=False)
        dx = matmul(dy[0], w, sizes[0], transpose=True)
        dw = megablox.outer(x[0], dy[0], sizes[0], **options)
        return y[None], dx[None], dw[None]

    mesh = Mesh(np.array(jax.devices()[:2]), ("X",))
    specs = (P("X"), P("X"), P("X"), P())
    outputs = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P("X")))(
        x.astype(np.float32), dy.astype(np.float32), SIZES.astype(np.int32), w.astype(np.float32)
    )
    y, dx, dw = map(np.asarray, outputs)
    for device, sizes in enumerate(SIZES):
        ends = np.cumsum(sizes)
        for group, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            rows = slice(end - size, end)
            left, right = x[device, rows], dy[device, rows]
            assert_close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
            assert_close(y[device, rows], left @ w[group])
            assert_close(dx[device, rows], right @ w[group].T)
            assert_close(dw[device, group], left.T @ right)
