"""Mixture of experts on emulated CPU devices: memory, bytes sent and work, as ratios.

    python benchmarks/experts.py

Prints three tables: temporary memory of each exchange beside plain jit (from the compiled program,
which is one program for every assignment), bytes a device sends beside the fewest that could do,
and floating-point operations beside one dense product of the same tokens.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from drumline.parallel.experts.matmul import expert_matmul
from drumline.parallel.experts.rounds import default_buffer_rows, round_count
from drumline.parallel.grouped.blocks import blocked_matmul, rows_per_block

P: Any = PartitionSpec
TOKENS, D, F, EXPERTS, K = 8192, 512, 1024, 64, 2
X, Y = 4, 2
SPECS = (P("X", "Y"), P("X", None, "Y"), P("X"), P("X"))


def assignments(tokens: int = TOKENS, experts: int = EXPERTS, k: int = K) -> dict[str, Any]:
    """Return assignments from even to as skewed as they come."""
    rng = np.random.default_rng(0)
    zipf = 1 / (1 + np.arange(experts)) ** 1.2
    return {
        "balanced": np.arange(tokens * k).reshape(tokens, k) % experts,
        "uniform": rng.integers(0, experts, (tokens, k)),
        "Zipf 1.2": rng.choice(experts, (tokens, k), p=zipf / zipf.sum()),
        "one expert": np.zeros((tokens, k), np.int64),
    }


def temporaries(function: Callable[..., Any], mesh: Mesh) -> tuple[int, int, str]:
    """Return bytes a device needs beyond inputs and outputs, forward and with gradients."""
    shapes = ((TOKENS, D), (EXPERTS, D, F), (TOKENS, K), (TOKENS, K))
    types = (jnp.float32, jnp.float32, jnp.int32, jnp.float32)
    inputs = [
        jax.ShapeDtypeStruct(s, t, sharding=NamedSharding(mesh, p))  # type: ignore[no-untyped-call]
        for s, t, p in zip(shapes, types, SPECS, strict=True)
    ]
    dout = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (TOKENS, F), jnp.float32, sharding=NamedSharding(mesh, P("X", "Y"))
    )

    def both(a: Any, w: Any, b: Any, g: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda a, w, g: function(a, w, b, g), a, w, g)
        return out, pull(dout)

    put = partial(NamedSharding, mesh)
    gradients = (put(SPECS[0]), put(SPECS[1]), put(SPECS[3]))
    forward = jax.jit(function, out_shardings=put(P("X", "Y"))).lower(*inputs).compile()
    whole = jax.jit(both, out_shardings=(put(P("X", "Y")), gradients))
    backward = whole.lower(*inputs, dout).compile()
    kinds = re.findall(
        r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\(",
        str(forward.as_text()),
    )
    named = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    analyses: list[Any] = [c.memory_analysis() for c in (forward, backward)]
    sizes = [analysis.temp_size_in_bytes for analysis in analyses]
    return sizes[0], sizes[1], named


def memory_table() -> None:
    """Print temporary memory beside the balanced share."""
    mesh = Mesh(np.array(jax.devices()).reshape(X, Y), ("X", "Y"))
    share = TOKENS * K // X * (D + F) // Y * 4
    print(f"\nTemporaries of one device, float32, {TOKENS} tokens, {D}→{F}, {EXPERTS} experts,")
    print(f"k={K}, mesh {X}×{Y}; balanced share (k·S/X rows of D/Y in and F/Y out): ", end="")
    print(f"{share / 2**20:.1f} MiB")
    print("| exchange | forward MiB | × share | with gradients MiB | × share | collectives |")
    print("|---|---|---|---|---|---|")
    rows: dict[str, Callable[..., Any]] = {"plain jit": expert_matmul}
    for exchange in ("allgather", "alltoall"):
        rows[exchange] = jax.shard_map(
            partial(expert_matmul, axis_name="X", gather_axis_name="Y", exchange=exchange),
            mesh=mesh,
            in_specs=SPECS,
            out_specs=P("X", "Y"),
        )
    for name, function in rows.items():
        one, two, named = temporaries(function, mesh)
        print(
            f"| {name} | {one / 2**20:.1f} | {one / share:.2f} "
            f"| {two / 2**20:.1f} | {two / share:.2f} | {named} |"
        )


def bytes_table() -> None:
    """Print what the busiest device sends over X, forward."""
    local = TOKENS // X
    width = (D + F) // Y * 4
    print("\nMiB the busiest device sends over X, forward (rows of D/Y out, F/Y back)")
    print("| assignment | rounds dense / packed | minimum | packed | dense | allgather |")
    print("|---|---|---|---|---|---|")
    capacity = default_buffer_rows(local * K, X)
    gathered = (X - 1) * local * width
    for name, chosen in assignments().items():
        counts = np.stack(
            [np.bincount(part.ravel(), minlength=EXPERTS) for part in np.split(chosen, X)]
        )
        pair = counts.reshape(X, X, -1).sum(-1)
        away = pair - np.diag(np.diag(pair))
        # A device sends its tokens out and the answers of its experts back.
        least = (away.sum(1) * D + away.sum(0) * F).max() // Y * 4
        dense, packed = (
            int(round_count(jnp.asarray(counts), X, capacity, packed=p)) for p in (False, True)
        )
        padded = dense * capacity * (X - 1) * width
        print(
            f"| {name} | {dense} / {packed} | {least / 2**20:.1f} | {least / 2**20:.1f} "
            f"| {padded / 2**20:.1f} | {gathered / 2**20:.1f} |"
        )


def work_table() -> None:
    """Print operations and times beside one dense product of the same tokens."""
    tokens, d, f, experts = 16384, 256, 256, 64
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(tokens, d)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(experts, d, f)), jnp.float32)
    m = rows_per_block(tokens, experts)
    block = partial(blocked_matmul, transpose=False, out_dtype=jnp.dtype(jnp.float32))
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)  # type: ignore[no-untyped-call]
    body = _operations(jax.jit(block).lower(x, w, sizes).compile())
    dense = jax.jit(lambda x, w: x @ w[0])
    one = 2 * tokens * d * f
    ragged = _operations(jax.jit(jax.lax.ragged_dot).lower(x, w, sizes).compile())
    print(f"\nWork of {tokens} tokens, {d}→{f}, {experts} experts, CPU (blocks of {m} rows)")
    print("| what | operations ÷ dense | time ÷ dense |")
    print("|---|---|---|")
    base = _seconds(dense, x, w)
    local = jax.jit(expert_matmul)
    for name, chosen in assignments(tokens, experts, 1).items():
        trips = (-(-np.bincount(chosen.ravel(), minlength=experts) // m)).sum()
        took = _seconds(local, x, w, jnp.asarray(chosen[:, 0], jnp.int32))
        print(f"| expert_matmul, {name} | {body * trips / one:.3f} | {took / base:.1f} |")
    even = jnp.full((experts,), tokens // experts, jnp.int32)
    took = _seconds(jax.jit(jax.lax.ragged_dot), x, w, even)
    print(f"| lax.ragged_dot | {ragged / one:.1f} | {took / base:.1f} |")


def _operations(compiled: Any) -> float:
    """Return operations by XLA's count, which takes the body of a loop once."""
    return float(compiled.cost_analysis()["flops"])


_finish: Callable[[Any], Any] = jax.block_until_ready


def _seconds(function: Callable[..., Any], *operands: Any) -> float:
    _finish(function(*operands))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        _finish(function(*operands))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


if __name__ == "__main__":
    memory_table()
    bytes_table()
    work_table()
