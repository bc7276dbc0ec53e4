"""Compare a mixture of experts with dense matmuls on emulated CPU devices, as ratios.

    python benchmarks/experts.py

The benchmark prints three tables: temporary memory of each exchange and of plain jit (from the
compiled program, which is the same for every assignment), bytes sent by a device relative to the
minimum, and floating-point operations relative to one dense matmul of the same tokens.
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
    """Return assignments from balanced to maximally skewed."""
    rng = np.random.default_rng(0)
    zipf = 1 / (1 + np.arange(experts)) ** 1.2
    return {
        "balanced": np.arange(tokens * k).reshape(tokens, k) % experts,
        "uniform": rng.integers(0, experts, (tokens, k)),
        "Zipf 1.2": rng.choice(experts, (tokens, k), p=zipf / zipf.sum()),
        "one expert": np.zeros((tokens, k), np.int64),
    }


def temporaries(function: Callable[..., Any], mesh: Mesh) -> tuple[int, int, str]:
    """Return the temporary bytes per device, forward and with gradients, and the collectives."""
    shapes = ((TOKENS, D), (EXPERTS, D, F), (TOKENS, K), (TOKENS, K))
    types = (jnp.float32, jnp.float32, jnp.int32, jnp.float32)
    inputs = [
        jax.ShapeDtypeStruct(s, t, sharding=NamedSharding(mesh, p))  # type: ignore[no-untyped-call]
        for s, t, p in zip(shapes, types, SPECS, strict=True)
    ]
    dout = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (TOKENS, F), jnp.float32, sharding=NamedSharding(mesh, P("X", "Y"))
    )

    def with_gradients(a: Any, w: Any, b: Any, g: Any, dout: Any) -> Any:
        out, vjp_function = jax.vjp(lambda a, w, g: function(a, w, b, g), a, w, g)
        return out, vjp_function(dout)

    sharding_of = partial(NamedSharding, mesh)
    gradients = (sharding_of(SPECS[0]), sharding_of(SPECS[1]), sharding_of(SPECS[3]))
    forward = jax.jit(function, out_shardings=sharding_of(P("X", "Y"))).lower(*inputs).compile()
    differentiated = jax.jit(with_gradients, out_shardings=(sharding_of(P("X", "Y")), gradients))
    backward = differentiated.lower(*inputs, dout).compile()
    collective_kinds = re.findall(
        r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\(",
        str(forward.as_text()),
    )
    collective_names = ", ".join(
        f"{collective_kinds.count(kind)} {kind}" for kind in sorted(set(collective_kinds))
    )
    analyses: list[Any] = [c.memory_analysis() for c in (forward, backward)]
    sizes = [analysis.temp_size_in_bytes for analysis in analyses]
    return sizes[0], sizes[1], collective_names


def memory_table() -> None:
    """Print the temporary memory relative to the balanced share."""
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
        forward_bytes, gradient_bytes, collective_names = temporaries(function, mesh)
        print(
            f"| {name} | {forward_bytes / 2**20:.1f} | {forward_bytes / share:.2f} "
            f"| {gradient_bytes / 2**20:.1f} | {gradient_bytes / share:.2f} | {collective_names} |"
        )


def bytes_table() -> None:
    """Print the bytes that the busiest device sends over X in the forward pass."""
    local = TOKENS // X
    width = (D + F) // Y * 4
    print("\nMiB the busiest device sends over X, forward (rows of D/Y out, F/Y back)")
    print("| assignment | rounds dense / packed | minimum | packed | dense | allgather |")
    print("|---|---|---|---|---|---|")
    capacity = default_buffer_rows(local * K, X)
    gathered = (X - 1) * local * width
    for name, assignment in assignments().items():
        counts = np.stack(
            [np.bincount(part.ravel(), minlength=EXPERTS) for part in np.split(assignment, X)]
        )
        routed_rows = counts.reshape(X, X, -1).sum(-1)
        sent_rows = routed_rows - np.diag(np.diag(routed_rows))
        # A device sends its tokens to the experts and its experts' outputs back.
        minimum_bytes = (sent_rows.sum(1) * D + sent_rows.sum(0) * F).max() // Y * 4
        dense, packed = (
            int(round_count(jnp.asarray(counts), X, capacity, packed=p)) for p in (False, True)
        )
        padded = dense * capacity * (X - 1) * width
        print(
            f"| {name} | {dense} / {packed} | {minimum_bytes / 2**20:.1f} | "
            f"{minimum_bytes / 2**20:.1f} "
            f"| {padded / 2**20:.1f} | {gathered / 2**20:.1f} |"
        )


def work_table() -> None:
    """Print operations and times relative to one dense matmul of the same tokens."""
    tokens, d, f, experts = 16384, 256, 256, 64
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(tokens, d)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(experts, d, f)), jnp.float32)
    m = rows_per_block(tokens, experts)
    block = partial(blocked_matmul, transpose=False, out_dtype=jnp.dtype(jnp.float32))
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)  # type: ignore[no-untyped-call]
    body = _operations(jax.jit(block).lower(x, w, sizes).compile())
    dense = jax.jit(lambda x, w: x @ w[0])
    forward_bytes = 2 * tokens * d * f
    ragged = _operations(jax.jit(jax.lax.ragged_dot).lower(x, w, sizes).compile())
    print(f"\nWork of {tokens} tokens, {d}→{f}, {experts} experts, CPU (blocks of {m} rows)")
    print("| what | operations ÷ dense | time ÷ dense |")
    print("|---|---|---|")
    dense_seconds = _median_seconds(dense, x, w)
    local = jax.jit(expert_matmul)
    for name, assignment in assignments(tokens, experts, 1).items():
        trips = (-(-np.bincount(assignment.ravel(), minlength=experts) // m)).sum()
        duration = _median_seconds(local, x, w, jnp.asarray(assignment[:, 0], jnp.int32))
        print(
            f"| expert_matmul, {name} | {body * trips / forward_bytes:.3f} | "
            f"{duration / dense_seconds:.1f} |"
        )
    even_sizes = jnp.full((experts,), tokens // experts, jnp.int32)
    duration = _median_seconds(jax.jit(jax.lax.ragged_dot), x, w, even_sizes)
    print(f"| lax.ragged_dot | {ragged / forward_bytes:.1f} | {duration / dense_seconds:.1f} |")


def _operations(compiled: Any) -> float:
    """Return the operations by XLA's count, which counts the body of a loop once."""
    return float(compiled.cost_analysis()["flops"])


_wait_for: Callable[[Any], Any] = jax.block_until_ready


def _median_seconds(function: Callable[..., Any], *operands: Any) -> float:
    _wait_for(function(*operands))
    durations = []
    for _ in range(5):
        start = time.perf_counter()
        _wait_for(function(*operands))
        durations.append(time.perf_counter() - start)
    return float(np.median(durations))


if __name__ == "__main__":
    memory_table()
    bytes_table()
    work_table()
