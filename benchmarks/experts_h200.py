"""Grouped products on one Hopper GPU: ours beside dense, `lax.ragged_dot`, Pallas' own and PyTorch.

    PYTHONPATH=src python benchmarks/experts_h200.py

First checks the kernels against float32 products, group by group; then prints TFLOP/s, forward and
forward with backward, for two shapes in bfloat16 with uneven random groups. Every variant stands
alone: one that fails prints why, and the rest go on. Variants take turns, and medians are printed.
"""

from __future__ import annotations

import os

# JAX and PyTorch share the card; neither may take all of it first.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drumline.parallel import grouped_hopper as hopper
from drumline.parallel.experts import expert_matmul
from drumline.parallel.grouped_matmul import grouped_matmul
from drumline.parallel.grouped_rows import group_rows

STARTED = time.monotonic()
ALLOWED = 225.0  # seconds, after which variants that only tune are left out
BF16 = jnp.dtype(jnp.bfloat16)
Thunk = Callable[[], Any]
_finish: Callable[[Any], Any] = jax.block_until_ready


@dataclass(frozen=True)
class Shape:
    """One layer's product."""

    name: str
    experts: int
    d: int
    f: int
    tokens: int
    k: int

    @property
    def rows(self) -> int:
        """(token, slot) pairs."""
        return self.tokens * self.k

    @property
    def operations(self) -> int:
        """Operations of the forward product."""
        return 2 * self.rows * self.d * self.f


SHAPES = (
    Shape("8 experts, 4096→14336, 16k tokens, k=2", 8, 4096, 14336, 16384, 2),
    Shape("64 experts, 2048→1408, 32k tokens, k=6", 64, 2048, 1408, 32768, 6),
)

FORWARD_TILES = (
    hopper.Tiles("n"),
    hopper.Tiles("n", chain=True),
    hopper.Tiles("m"),
    hopper.Tiles("m", chain=True),
    hopper.Tiles("n", minor="m", chain=True),
    hopper.Tiles("m", minor="m", chain=True),
    hopper.Tiles("m", snake=4, chain=True),
    hopper.Tiles("n", snake=4, chain=True),
    hopper.Tiles("m", snake=16, chain=True),
    hopper.Tiles("n", snake=16, minor="m", chain=True),
    hopper.Tiles("m", snake=1, chain=True),
)
OUTER_TILES = (
    hopper.Tiles("n"),
    hopper.Tiles("m"),
    hopper.Tiles("n", snake=4),
    hopper.Tiles("m", snake=4),
    hopper.Tiles("m", minor="m"),
    hopper.Tiles("m", snake=16),
)


def late() -> bool:
    """Return whether only what matters most should still run."""
    return time.monotonic() - STARTED > ALLOWED


def attempt(name: str, make: Callable[[], Thunk]) -> Thunk | None:
    """Return a warmed-up variant, or print why there is none."""
    try:
        run = make()
        _finish(run())
        _finish(run())
    except Exception as error:
        told = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"  {name}: failed: {told[:400]}", flush=True)
        return None
    return run


def medians(
    variants: dict[str, Callable[[], Thunk]], sync: Callable[[Any], Any]
) -> dict[str, float]:
    """Return the median seconds of each variant that works; they take turns."""
    ready = {name: run for name, make in variants.items() if (run := attempt(name, make))}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(5):
        for name, run in ready.items():
            start = time.perf_counter()
            result = None
            for _ in range(5):
                result = run()
            sync(result)
            times[name].append((time.perf_counter() - start) / 5)
            del result
    return {name: float(np.median(taken)) for name, taken in times.items()}


def report(title: str, operations: float, seconds: dict[str, float], dense: float | None) -> None:
    """Print a table, fastest first."""
    print(f"\n{title}")
    for name, took in sorted(seconds.items(), key=lambda item: item[1]):
        share = f"{100 * dense / took:5.1f} % of dense" if dense else ""
        print(f"  {name:58s} {1e3 * took:8.3f} ms {operations / took / 1e12:7.1f} TFLOP/s {share}")
    print(end="", flush=True)


def uneven(shape: Shape, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return an assignment in which busy experts get about twice what quiet ones do."""
    rng = np.random.default_rng(seed)
    load = rng.dirichlet(np.full(shape.experts, 8.0))
    scores = np.log(load) + rng.gumbel(size=(shape.tokens, shape.experts))
    return np.argpartition(-scores, shape.k, axis=1)[:, : shape.k].astype(np.int32)


def check() -> None:
    """Compare every kernel with float32 products of its groups on a small case."""
    groups, d, f = 5, 512, 768
    sizes = np.array([512, 0, 1024, 256, 768], np.int32)
    rows = 3072  # 512 past the last group
    key = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(key[0], (rows, d), jnp.bfloat16)
    w = jax.random.normal(key[1], (groups, d, f), jnp.bfloat16)
    dy = jax.random.normal(key[2], (rows, f), jnp.bfloat16)
    starts = np.cumsum(sizes) - sizes
    wide = [np.asarray(v, np.float64) for v in (x, w, dy)]
    y, dx, dw = np.zeros((rows, f)), np.zeros((rows, d)), np.zeros((groups, d, f))
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        cut = slice(start, start + size)
        y[cut] = wide[0][cut] @ wide[1][g]
        dx[cut] = wide[2][cut] @ wide[1][g].T
        dw[g] = wide[0][cut].T @ wide[2][cut]
    count = jnp.asarray(sizes)
    print("largest error against float64, relative to the largest value")
    for tiles in (
        hopper.Tiles("n"),
        hopper.Tiles("m"),
        hopper.Tiles("n", chain=True),
        hopper.Tiles("m", chain=True),
    ):
        forward = partial(hopper.matmul, out_dtype=BF16, tiles=tiles)
        kernels: dict[str, tuple[Callable[[], Any], Any]] = {
            "x @ w": (partial(forward, x, w, count, transpose=False), y),
            "dy @ wᵀ": (partial(forward, dy, w, count, transpose=True), dx),
        }
        if not tiles.chain:
            summed = partial(hopper.outer, x, dy, count, tiles=tiles)
            wide_type = jnp.dtype(jnp.float32)
            kernels["xᵀ dy"] = (partial(summed, out_dtype=BF16), dw)
            kernels["xᵀ dy in float32"] = (partial(summed, out_dtype=wide_type), dw)
        for name, (run, expected) in kernels.items():
            try:
                got = np.asarray(jax.jit(run)(), np.float64)
                worst = np.abs(got - expected).max() / np.abs(expected).max()
                verdict = "ok" if worst < 0.01 else "WRONG"
                print(f"  {name:18s} {tiles}: {worst:.1e} {verdict}", flush=True)
            except Exception as error:
                print(f"  {name:18s} {tiles}: failed: {str(error)[:600]}", flush=True)
    check_layer()


def check_layer() -> None:
    """Compare expert_matmul and its gradients with every expert on every token, in float32."""
    tokens, d, f, experts, k = 1024, 256, 384, 8, 2
    key = jax.random.split(jax.random.key(1), 4)
    a = jax.random.normal(key[0], (tokens, d), jnp.bfloat16)
    w = jax.random.normal(key[1], (experts, d, f), jnp.bfloat16)
    gates = jax.nn.softmax(jax.random.normal(key[2], (tokens, k)))
    dout = jax.random.normal(key[3], (tokens, f), jnp.bfloat16)
    b = jnp.asarray(uneven(Shape("", experts, d, f, tokens, k)))

    def plain(a: Any, w: Any, gates: Any) -> Any:
        a, w = a.astype(jnp.float32), w.astype(jnp.float32)
        every = jnp.einsum("sd,edf->sef", a, w, precision="highest")
        return jnp.einsum("skf,sk->sf", jnp.take_along_axis(every, b[:, :, None], 1), gates)

    def both(function: Any, dtype: Any) -> Any:
        def run() -> Any:
            out, pull = jax.vjp(function, a, w, gates)
            return out, *pull(dout.astype(dtype))

        return jax.jit(run)()

    try:
        got = both(lambda a, w, g: expert_matmul(a, w, b, g), jnp.bfloat16)
        expected = both(plain, jnp.float32)
        for name, one, other in zip(("out", "da", "dw", "dgates"), got, expected, strict=True):
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            worst = np.abs(one - other).max() / np.abs(other).max()
            print(f"  expert_matmul {name}: {worst:.1e} {'ok' if worst < 0.02 else 'WRONG'}")
    except Exception as error:
        print(f"  expert_matmul failed: {str(error)[:1500]}", flush=True)


def jax_forward(shape: Shape) -> None:
    """Print forward products and the best tiles."""
    b = uneven(shape)
    key = jax.random.split(jax.random.key(2), 3)
    a = jax.random.normal(key[0], (shape.tokens, shape.d), jnp.bfloat16)
    w = jax.random.normal(key[1], (shape.experts, shape.d, shape.f), jnp.bfloat16)
    gates = jax.nn.softmax(jax.random.normal(key[2], (shape.tokens, shape.k)))
    groups = group_rows(jnp.asarray(b).reshape(-1), shape.experts, hopper.ROWS)
    x = groups.spread(a, shape.k)
    dy = jax.random.normal(key[0], (x.shape[0], shape.f), jnp.bfloat16)
    dy = jnp.where((groups.pair < shape.rows)[:, None], dy, 0).astype(jnp.bfloat16)
    flat = group_rows(jnp.asarray(b).reshape(-1), shape.experts)
    x_flat = flat.spread(a, shape.k)
    padding = int(groups.sizes.sum()) / shape.rows - 1
    print(
        f"\n== {shape.name}; groups of {int(flat.sizes.min())} to {int(flat.sizes.max())} rows, ",
        end="",
    )
    print(f"{100 * padding:.1f} % padding; TFLOP/s count the real rows")

    def pallas(grid_block: int) -> Callable[[], Thunk]:
        def make() -> Thunk:
            from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

            run = jax.jit(
                lambda x, w, s: ragged_dot(
                    x,
                    w,
                    group_sizes=s,
                    block_m=128,
                    block_n=128,
                    block_k=64,
                    max_concurrent_steps=4,
                    grid_block_n=grid_block,
                )
            )
            return lambda: run(x_flat, w, flat.sizes)

        return make

    def call(function: Callable[..., Any], *operands: Any) -> Callable[[], Thunk]:
        def make() -> Thunk:
            run = jax.jit(function)
            return lambda: run(*operands)

        return make

    bj = jnp.asarray(b)
    variants: dict[str, Callable[[], Thunk]] = {
        "dense x @ w": call(lambda x, w: x @ w, x_flat, w[0]),
        "expert_matmul (sort, product, weighted sum)": call(expert_matmul, a, w, bj, gates),
        "grouped_matmul (sorted and padded)": call(
            partial(grouped_matmul, aligned=True), x, w, groups.sizes
        ),
        "pallas ragged_dot 128×128×64": pallas(8),
    }
    seconds = medians(variants, _finish)
    dense = seconds.get("dense x @ w")
    report("forward", shape.operations, seconds, dense)
    both_ways(shape, a, w, bj, gates, x, x_flat, groups)
    matmul = partial(hopper.matmul, out_dtype=BF16)
    summed = partial(hopper.outer, out_dtype=BF16)
    tuning: tuple[tuple[str, tuple[hopper.Tiles, ...], Any, tuple[Any, ...]], ...] = (
        ("x @ w by tiles", FORWARD_TILES, partial(matmul, transpose=False), (x, w)),
        ("dy @ wᵀ by tiles", FORWARD_TILES[:6], partial(matmul, transpose=True), (dy, w)),
        ("xᵀ dy by tiles", OUTER_TILES, summed, (x, dy)),
    )
    for title, tiles_list, kernel, operands in tuning:
        tuned: dict[str, Callable[[], Thunk]] = {}
        for tiles in tiles_list:
            if not late():
                tuned[str(tiles)[5:]] = call(partial(kernel, tiles=tiles), *operands, groups.sizes)
        if tuned:
            report(title, shape.operations, medians(tuned, _finish), dense)
        else:
            print(f"\n{title}: left out, {ALLOWED:.0f} s are over")


def both_ways(
    shape: Shape,
    a: Any,
    w: Any,
    b: Any,
    gates: Any,
    x: Any,
    x_flat: Any,
    groups: Any,
) -> None:
    """Print forward with backward: three products."""

    def pulled(function: Callable[..., Any], dout: Any, *operands: Any) -> Callable[[], Thunk]:
        def run(dout: Any, *operands: Any) -> Any:
            out, pull = jax.vjp(function, *operands)
            return out, pull(dout)

        def make() -> Thunk:
            compiled = jax.jit(run)
            return lambda: compiled(dout, *operands)

        return make

    dout = jax.random.normal(jax.random.key(5), (shape.tokens, shape.f), jnp.bfloat16)
    dy_flat = jax.random.normal(jax.random.key(6), (shape.rows, shape.f), jnp.bfloat16)
    dy = groups.spread(dy_flat)
    variants = {
        "dense, three products": pulled(lambda x, w: x @ w, dy_flat, x_flat, w[0]),
        "expert_matmul with gradients of a, w, gates": pulled(
            lambda a, w, g: expert_matmul(a, w, b, g), dout, a, w, gates
        ),
        "grouped_matmul with gradients of x, w": pulled(
            lambda x, w: grouped_matmul(x, w, groups.sizes, aligned=True), dy, x, w
        ),
    }
    seconds = medians(variants, _finish)
    report(
        "forward and backward", 3 * shape.operations, seconds, seconds.get("dense, three products")
    )


def torch_products(shape: Shape) -> None:
    """Print PyTorch's grouped product, forward and with backward."""
    torch: Any = importlib.import_module("torch")

    counts = np.bincount(uneven(shape).ravel(), minlength=shape.experts)
    ends = np.minimum(-(-np.cumsum(counts) // 16) * 16, shape.rows)  # it wants aligned groups
    ends[-1] = shape.rows
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    x = torch.randn(shape.rows, shape.d, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn(shape.rows, shape.f, dtype=torch.bfloat16, device="cuda")
    rows_first = torch.randn(shape.experts, shape.d, shape.f, dtype=torch.bfloat16, device="cuda")
    grouped = torch._grouped_mm

    def forward(w: Any) -> Callable[[], Thunk]:
        return lambda: lambda: grouped(x, w, offs=offs)

    def backward(w: Any) -> Callable[[], Thunk]:
        xg, wg = x.clone().requires_grad_(), w.detach().requires_grad_()

        def run() -> Any:
            out = grouped(xg, wg, offs=offs)
            return torch.autograd.grad(out, (xg, wg), dy)

        return lambda: run

    columns_first = rows_first.transpose(1, 2).contiguous().transpose(1, 2)

    def sync(_: Any) -> None:
        torch.cuda.synchronize()

    variants = {
        "torch dense": lambda: lambda: x @ rows_first[0],
        "torch._grouped_mm, w row-major": forward(rows_first),
        "torch._grouped_mm, w column-major": forward(columns_first),
    }
    report("PyTorch forward", shape.operations, medians(variants, sync), None)
    variants = {
        "torch._grouped_mm with backward, w row-major": backward(rows_first),
        "torch._grouped_mm with backward, w column-major": backward(columns_first),
    }
    report("PyTorch forward and backward", 3 * shape.operations, medians(variants, sync), None)
    torch.cuda.empty_cache()


def ragged(shape: Shape) -> None:
    """Print `lax.ragged_dot`, which takes tens of GiB; last, since it may run out of memory."""
    sizes = jnp.asarray(np.bincount(uneven(shape).ravel(), minlength=shape.experts), jnp.int32)
    x = jax.random.normal(jax.random.key(0), (shape.rows, shape.d), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (shape.experts, shape.d, shape.f), jnp.bfloat16)
    run = jax.jit(jax.lax.ragged_dot)
    seconds = medians({"lax.ragged_dot": lambda: lambda: run(x, w, sizes)}, _finish)
    report(f"lax.ragged_dot, forward, {shape.name}", shape.operations, seconds, None)


def main() -> None:
    """Check, then measure."""
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    check()
    for shape in SHAPES:
        for part in (jax_forward, torch_products):
            try:
                part(shape)
            except Exception as error:
                print(f"{part.__name__}: failed: {str(error)[:800]}", flush=True)
    for shape in SHAPES:
        if late():
            print("lax.ragged_dot: left out for time")
            break
        try:
            ragged(shape)
        except Exception as error:
            print(f"lax.ragged_dot: failed: {str(error)[:400]}", flush=True)
    print(f"\n{time.monotonic() - STARTED:.0f} s")


if __name__ == "__main__":
    main()
