"""The mixture of experts on one Hopper GPU, beside dense products, PyTorch and `lax.ragged_dot`.

    PYTHONPATH=src python benchmarks/experts_h200.py

First checks kernels and gradients against float64, some slots without an expert among them. Then
prints, for two layers in bfloat16 with uneven random groups: the bare grouped products; all of
`expert_matmul`, sort and weighted sum included; its pieces; and the same of PyTorch, where "whole"
is the same sort, gathers, grouped product and weighted sum under `torch.compile`, with gathers in
the backward too. TFLOP/s count the real rows. Variants take turns and medians are printed; one
that fails prints why, and the rest go on. Takes about 80 s, of which most is compiling.
"""

from __future__ import annotations

import os

# JAX and PyTorch share the card; neither may take all of it first.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drumline.parallel.experts.matmul import expert_matmul
from drumline.parallel.grouped import hopper
from drumline.parallel.grouped.matmul import grouped_matmul
from drumline.parallel.grouped.rows import group_rows

STARTED = time.monotonic()
ALLOWED = 80.0  # seconds, after which what matters least is left out
HALF = jnp.dtype(jnp.bfloat16)
Thunk = Callable[[], Any]
Variants = dict[str, tuple[Any, ...]]  # a function to compile, and its operands
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
# Between them they use every kind of tile.
SMALL = (Shape("512→384", 8, 512, 384, 1024, 2), Shape("512→768", 8, 512, 768, 1024, 2))


def uneven(shape: Shape) -> np.ndarray[Any, Any]:
    """Return an assignment in which busy experts get about twice what quiet ones do."""
    rng = np.random.default_rng(0)
    load = rng.dirichlet(np.full(shape.experts, 8.0))
    scores = np.log(load) + rng.gumbel(size=(shape.tokens, shape.experts))
    return np.argpartition(-scores, shape.k, axis=1)[:, : shape.k].astype(np.int32)


def told(name: str, error: Exception) -> None:
    """Print why a variant is missing."""
    why = f"{type(error).__name__}: {error}".replace("\n", " ")
    print(f"  {name}: failed: {why[:400]}", flush=True)


def late() -> bool:
    """Return whether only what matters most should still run."""
    return time.monotonic() - STARTED > ALLOWED


def compiled(variants: Variants) -> dict[str, Thunk]:
    """Compile all variants side by side."""

    def build(variant: tuple[Any, ...]) -> Thunk | Exception:
        function, *operands = variant
        try:
            program: Any = jax.jit(function).lower(*operands).compile()
        except Exception as error:
            return error
        return lambda: program(*operands)

    with ThreadPoolExecutor(8) as pool:
        built = dict(zip(variants, pool.map(build, variants.values()), strict=True))
    ready = {}
    for name, run in built.items():
        if isinstance(run, Exception):
            told(name, run)
        else:
            ready[name] = run
    return ready


def medians(runs: dict[str, Thunk], sync: Callable[[Any], Any]) -> dict[str, float]:
    """Return the median seconds of each variant that works; they take turns."""
    times: dict[str, list[float]] = {}
    for name, run in runs.items():
        try:
            sync(run())
            sync(run())
            times[name] = []
        except Exception as error:
            told(name, error)
    for _ in range(5):
        for name, taken in times.items():
            start = time.perf_counter()
            result = None
            for _ in range(8):
                result = runs[name]()
            sync(result)
            taken.append((time.perf_counter() - start) / 8)
            del result
    return {name: float(np.median(taken)) for name, taken in times.items()}


def report(title: str, operations: float, seconds: dict[str, float], dense: float | None) -> None:
    """Print a table in the order of the variants."""
    print(f"\n{title}")
    for name, took in seconds.items():
        share = f"{100 * dense / took:6.1f} % of dense" if dense else ""
        print(f"  {name:52s} {1e3 * took:8.3f} ms {operations / took / 1e12:7.1f} TFLOP/s{share}")
    print(end="", flush=True)


def normal(seed: int, *shape: int) -> jax.Array:
    """Return random bfloat16 numbers."""
    return jax.random.normal(jax.random.key(seed), shape, HALF)


def both_ways(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (dout, *operands) giving output and gradients."""

    def run(dout: Any, *operands: Any) -> Any:
        out, pull = jax.vjp(function, *operands)
        return out, *pull(dout)

    return run


def whole_both_ways(b: Any, dout: Any, a: Any, w: Any, gates: Any) -> Any:
    """Return the output and all gradients of `expert_matmul`."""
    return both_ways(lambda a, w, g: expert_matmul(a, w, b, g))(dout, a, w, gates)


def judge(name: str, got: Any, expected: Any) -> None:
    """Print an error relative to the norm."""
    one, other = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    error = np.linalg.norm(one - other) / np.linalg.norm(other)
    verdict = "ok" if error < 0.01 else "WRONG"  # NaN is wrong
    print(f"  {name:44s} {error:.1e} {verdict}", flush=True)


def every_expert(a: Any, w: Any, b: Any, gates: Any, dout: Any) -> tuple[Any, ...]:
    """Return output and gradients by a loop over experts in float64."""
    a, w, gates, dout = (np.asarray(v, np.float64) for v in (a, w, gates, dout))
    out, da = np.zeros((len(a), w.shape[2])), np.zeros_like(a)
    dw, dgates = np.zeros_like(w), np.zeros_like(gates)
    for e, matrix in enumerate(w):
        token, slot = np.nonzero(b == e)
        y, gate = a[token] @ matrix, gates[token, slot, None]
        np.add.at(out, token, gate * y)
        np.add.at(da, token, gate * (dout[token] @ matrix.T))
        dw[e] = (gate * a[token]).T @ dout[token]
        dgates[token, slot] = (y * dout[token]).sum(1)
    return out, da, dw, dgates


def check() -> None:
    """Compare `expert_matmul` and its gradients with float64, with slots that have no expert."""
    print("‖error‖ / ‖value‖ against float64")
    # What comes next from the allocator is then likely to hold NaN, where it is not written.
    junk = [_finish(jnp.full(2**26, jnp.nan, jnp.float32)) for _ in range(16)]
    del junk
    for shape in SMALL:
        b = uneven(shape)
        b[::5, 0], b[3::7, 1] = -1, shape.experts
        a, w = normal(0, shape.tokens, shape.d), normal(1, shape.experts, shape.d, shape.f)
        dout, gates = normal(2, shape.tokens, shape.f), gates_of(shape)
        expected = every_expert(a, w, b, gates, dout)
        got = jax.jit(whole_both_ways)(b, dout, a, w, gates)
        for name, one, other in zip(("out", "da", "dw", "dgates"), got, expected, strict=True):
            judge(f"expert_matmul {shape.name}, {name}", one, other)


def gates_of(shape: Shape) -> jax.Array:
    """Return weights that sum to one."""
    return jax.nn.softmax(jax.random.normal(jax.random.key(9), (shape.tokens, shape.k)))


def ours(shape: Shape) -> None:
    """Print bare products, the whole, and its pieces."""
    b, gates = jnp.asarray(uneven(shape)), gates_of(shape)
    a, w = normal(0, shape.tokens, shape.d), normal(1, shape.experts, shape.d, shape.f)
    dout = normal(2, shape.tokens, shape.f)
    group = partial(group_rows, groups=shape.experts, alignment=hopper.ROWS)
    groups = jax.jit(group)(b.reshape(-1))
    x, dy = groups.to_rows(a, shape.k), groups.to_rows(dout, shape.k)
    flat_x, flat_dy = normal(3, shape.rows, shape.d), normal(4, shape.rows, shape.f)
    padding = int(groups.sizes.sum()) / shape.rows - 1
    print(f"\n== {shape.name}; {100 * padding:.1f} % padding")
    bare = partial(grouped_matmul, sizes=groups.sizes, aligned=True, zero_rest=False)
    multiply = partial(hopper.matmul, out_dtype=HALF, transpose=False)
    back = partial(hopper.matmul, out_dtype=HALF, transpose=True)
    variants: Variants = {
        "dense x @ w": (lambda x, w: x @ w[0], flat_x, w),
        "kernel x @ w": (multiply, x, w, groups.sizes),
        "kernel dy @ wᵀ": (back, dy, w, groups.sizes),
        "kernel xᵀ dy": (partial(hopper.outer, out_dtype=HALF), x, dy, groups.sizes),
        "expert_matmul, whole": (expert_matmul, a, w, b, gates),
    }
    runs = compiled(
        {
            **variants,
            "dense, three products": (both_ways(lambda x, w: x @ w[0]), flat_dy, flat_x, w),
            "kernels, three products": (both_ways(bare), dy, x, w),
            "expert_matmul, whole, three": (whole_both_ways, b, dout, a, w, gates),
        }
    )
    seconds = medians({name: runs[name] for name in variants if name in runs}, _finish)
    report("one product", shape.operations, seconds, seconds.get("dense x @ w"))
    seconds = medians({name: run for name, run in runs.items() if name not in variants}, _finish)
    dense = seconds.get("dense, three products")
    report("forward and backward", 3 * shape.operations, seconds, dense)
    y, dx = runs["kernel x @ w"](), runs["kernel dy @ wᵀ"]()
    pieces: Variants = {
        "sort into groups": (group, b.reshape(-1)),
        "spread of tokens": (lambda g, a: g.to_rows(a, shape.k), groups, a),
        "weighted sum": (lambda g, y, gates: g.weighted_sum(y, gates), groups, y, gates),
        "spread of the output's gradient": (lambda g, d: g.to_rows(d, shape.k), groups, dout),
        "spread of tokens times gates": (
            lambda g, a, gates: g.to_rows(a, shape.k, gates),
            groups,
            a,
            gates,
        ),
        "weighted sum of dx": (lambda g, y, gates: g.weighted_sum(y, gates), groups, dx, gates),
        "dots of dx with tokens": (lambda g, y, a: g.dots(y, a), groups, dx, a),
    }
    print("\npieces around the products (each called alone, so launches count)")
    for name, took in medians(compiled(pieces), _finish).items():
        print(f"  {name:52s} {1e3 * took:8.3f} ms", flush=True)


def torch_whole(torch: Any, grouped: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's expert_matmul: every step between rows and tokens is a gather."""

    class Spread(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, a: Any, order: Any, place: Any, k: int) -> Any:
            context.save_for_backward(place)
            context.k = k
            return a[order // k]

        @staticmethod
        def backward(context: Any, dx: Any) -> Any:
            (place,) = context.saved_tensors
            mine = dx[place].view(-1, context.k, dx.shape[1])
            return mine.sum(1, dtype=torch.float32).to(dx.dtype), None, None, None

    class Collect(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, y: Any, order: Any, place: Any) -> Any:
            context.save_for_backward(order)
            return y[place]

        @staticmethod
        def backward(context: Any, dy: Any) -> Any:
            (order,) = context.saved_tensors
            return dy[order], None, None

    def whole(a: Any, w: Any, b: Any, gates: Any) -> Any:
        key, k = b.reshape(-1), b.shape[1]
        order = torch.argsort(key, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(key), device=key.device)
        counts = (key[:, None] == torch.arange(len(w), device=key.device)).sum(0)
        offs = counts.cumsum(0).to(torch.int32)
        y = grouped(Spread.apply(a, order, place, k), w, offs=offs)
        mine = Collect.apply(y, order, place).view(len(a), k, -1)
        return (mine * gates[:, :, None]).sum(1).to(a.dtype)

    return whole


def torch_both(torch: Any, function: Any, dout: Any, *operands: Any) -> Thunk:
    """Return a run of forward and backward with gradients of all float operands."""
    taken = [o.detach().requires_grad_() if o.is_floating_point() else o for o in operands]
    wanted = [o for o in taken if o.requires_grad]

    def run() -> Any:
        out = function(*taken)
        return out.detach(), *torch.autograd.grad(out, wanted, dout)

    return run


def torch_operands(torch: Any, shape: Shape, device: str = "cuda") -> tuple[Any, ...]:
    """Return dout, a, w, b and gates."""

    def drawn(*sides: int) -> Any:
        return torch.randn(*sides, dtype=torch.bfloat16, device=device)

    b = torch.tensor(uneven(shape), dtype=torch.int64, device=device)
    gates = torch.softmax(torch.randn(shape.tokens, shape.k, device=device), 1)
    a, w = drawn(shape.tokens, shape.d), drawn(shape.experts, shape.d, shape.f)
    return drawn(shape.tokens, shape.f), a, w, b, gates


def torch_check(torch: Any, device: str = "cuda") -> None:
    """Compare PyTorch's whole with float64, so that its speed is that of a right answer."""
    dout, a, w, b, gates = operands = torch_operands(torch, SMALL[0], device)
    got = torch_both(torch, torch_whole(torch, torch._grouped_mm), *operands)()
    plain = [v.float().cpu().numpy() for v in (a, w, gates, dout)]
    expected = every_expert(plain[0], plain[1], b.cpu().numpy(), plain[2], plain[3])
    for name, one, other in zip(("out", "da", "dw", "dgates"), got, expected, strict=True):
        judge(f"PyTorch whole, {name}", one.float().cpu().numpy(), other)


def theirs(shape: Shape) -> None:
    """Print PyTorch's grouped product bare and whole, forward and with backward."""
    torch: Any = importlib.import_module("torch")
    dout, a, w, b, gates = torch_operands(torch, shape)
    offs = torch.bincount(b.reshape(-1), minlength=shape.experts).cumsum(0).to(torch.int32)
    x = torch.randn(shape.rows, shape.d, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn(shape.rows, shape.f, dtype=torch.bfloat16, device="cuda")
    other = w.transpose(1, 2).contiguous().transpose(1, 2)
    bare = partial(torch._grouped_mm, offs=offs)
    whole = torch.compile(torch_whole(torch, torch._grouped_mm), dynamic=False)

    def sync(_: Any) -> None:
        torch.cuda.synchronize()

    def alone() -> Any:
        with torch.no_grad():
            return whole(a, w, b, gates)

    forward = {
        "PyTorch dense": lambda: x @ w[0],
        "torch._grouped_mm": lambda: bare(x, w),
        "torch._grouped_mm, w column-major": lambda: bare(x, other),
        "PyTorch whole (torch.compile)": alone,
    }
    report("PyTorch, one product", shape.operations, medians(forward, sync), None)
    backward = {
        "torch._grouped_mm": torch_both(torch, bare, dy, x, w),
        "torch._grouped_mm, w column-major": torch_both(torch, bare, dy, x, other),
        "PyTorch whole (torch.compile)": torch_both(torch, whole, dout, a, w, b, gates),
    }
    title = "PyTorch, forward and backward"
    report(title, 3 * shape.operations, medians(backward, sync), None)
    torch.cuda.empty_cache()


def ragged(shape: Shape) -> None:
    """Print `lax.ragged_dot`, which takes tens of GiB; last, since it may run out of memory."""
    if late():
        print("\nlax.ragged_dot: left out for time")
        return
    sizes = jnp.asarray(np.bincount(uneven(shape).ravel(), minlength=shape.experts), jnp.int32)
    x, w = normal(0, shape.rows, shape.d), normal(1, shape.experts, shape.d, shape.f)
    runs = compiled({"lax.ragged_dot": (jax.lax.ragged_dot, x, w, sizes)})
    report(f"{shape.name}, forward", shape.operations, medians(runs, _finish), None)


def main() -> None:
    """Check, then measure."""
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    parts: list[Thunk] = [check]
    parts += [lambda: torch_check(importlib.import_module("torch"))]
    for shape in SHAPES:
        parts += [partial(ours, shape), partial(theirs, shape)]
    parts += [partial(ragged, shape) for shape in SHAPES]
    for part in parts:
        try:
            part()
        except Exception as error:
            told(str(part), error)
    print(f"\n{time.monotonic() - STARTED:.0f} s")


if __name__ == "__main__":
    main()
