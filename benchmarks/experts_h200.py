"""Measure the mixture of experts on one Hopper GPU against dense matmuls, PyTorch and
`lax.ragged_dot`.

    PYTHONPATH=src python benchmarks/experts_h200.py

The benchmark first compares kernels and gradients with float64, including slots without an expert.
For two layers in bfloat16 with uneven random groups it then prints the bare grouped matmuls, all of
`expert_matmul` including the sort and the weighted sum, its pieces, and the same for PyTorch.
PyTorch's "whole" is the same sort, gathers, grouped matmul and weighted sum under `torch.compile`,
with gathers in the backward pass too. TFLOP/s count the real rows. Variants alternate and medians
are printed. A variant that fails prints its error and the others continue. The benchmark takes
about 80 s, mostly for compiling.
"""

from __future__ import annotations

import os

# JAX and PyTorch share the GPU, so neither may preallocate all of its memory.
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

START_TIME = time.monotonic()
MAX_SECONDS = 80.0  # seconds, after which the least important parts are skipped
BF16 = jnp.dtype(jnp.bfloat16)
Thunk = Callable[[], Any]
Variants = dict[str, tuple[Any, ...]]  # a function to compile and its operands
_wait_for: Callable[[Any], Any] = jax.block_until_ready


@dataclass(frozen=True)
class Shape:
    """The matmul of one layer."""

    name: str
    experts: int
    d: int
    f: int
    tokens: int
    k: int

    @property
    def rows(self) -> int:
        """The number of (token, slot) pairs."""
        return self.tokens * self.k

    @property
    def operations(self) -> int:
        """The operations of the forward matmul."""
        return 2 * self.rows * self.d * self.f


SHAPES = (
    Shape("8 experts, 4096→14336, 16k tokens, k=2", 8, 4096, 14336, 16384, 2),
    Shape("64 experts, 2048→1408, 32k tokens, k=6", 64, 2048, 1408, 32768, 6),
)
# The two shapes use every kind of tile.
SMALL = (Shape("512→384", 8, 512, 384, 1024, 2), Shape("512→768", 8, 512, 768, 1024, 2))


def uneven_assignment(shape: Shape) -> np.ndarray[Any, Any]:
    """Return an assignment in which busy experts get about twice as many rows as quiet ones."""
    rng = np.random.default_rng(0)
    expert_load = rng.dirichlet(np.full(shape.experts, 8.0))
    scores = np.log(expert_load) + rng.gumbel(size=(shape.tokens, shape.experts))
    return np.argpartition(-scores, shape.k, axis=1)[:, : shape.k].astype(np.int32)


def print_error(name: str, error: Exception) -> None:
    """Print the error of a variant."""
    message = f"{type(error).__name__}: {error}".replace("\n", " ")
    print(f"  {name}: failed: {message[:400]}", flush=True)


def out_of_time() -> bool:
    """Return True if only the most important parts should still run."""
    return time.monotonic() - START_TIME > MAX_SECONDS


def compile_variants(variants: Variants) -> dict[str, Thunk]:
    """Compile all variants in parallel."""

    def build(variant: tuple[Any, ...]) -> Thunk | Exception:
        function, *operands = variant
        try:
            program: Any = jax.jit(function).lower(*operands).compile()
        except Exception as error:
            return error
        return lambda: program(*operands)

    with ThreadPoolExecutor(8) as pool:
        results = dict(zip(variants, pool.map(build, variants.values()), strict=True))
    thunks = {}
    for name, thunk in results.items():
        if isinstance(thunk, Exception):
            print_error(name, thunk)
        else:
            thunks[name] = thunk
    return thunks


def medians(runs: dict[str, Thunk], sync: Callable[[Any], Any]) -> dict[str, float]:
    """Return the median seconds of each variant that works. The variants alternate."""
    durations: dict[str, list[float]] = {}
    for name, run in runs.items():
        try:
            sync(run())
            sync(run())
            durations[name] = []
        except Exception as error:
            print_error(name, error)
    for _ in range(5):
        for name, samples in durations.items():
            start = time.perf_counter()
            result = None
            for _ in range(8):
                result = runs[name]()
            sync(result)
            samples.append((time.perf_counter() - start) / 8)
            del result
    return {name: float(np.median(samples)) for name, samples in durations.items()}


def report(title: str, operations: float, seconds: dict[str, float], dense: float | None) -> None:
    """Print a table in the order of the variants."""
    print(f"\n{title}")
    for name, duration in seconds.items():
        share = f"{100 * dense / duration:6.1f} % of dense" if dense else ""
        print(
            f"  {name:52s} {1e3 * duration:8.3f} ms {operations / duration / 1e12:7.1f} TFLOP/s"
            f"{share}"
        )
    print(end="", flush=True)


def random_bf16(seed: int, *shape: int) -> jax.Array:
    """Return random bfloat16 numbers."""
    return jax.random.normal(jax.random.key(seed), shape, BF16)


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (dout, *operands) that returns the output and the gradients."""

    def run(dout: Any, *operands: Any) -> Any:
        out, vjp_function = jax.vjp(function, *operands)
        return out, *vjp_function(dout)

    return run


def expert_matmul_with_gradients(b: Any, dout: Any, a: Any, w: Any, gates: Any) -> Any:
    """Return the output and all gradients of `expert_matmul`."""
    return with_gradients(lambda a, w, g: expert_matmul(a, w, b, g))(dout, a, w, gates)


def print_check(name: str, value: Any, expected: Any) -> None:
    """Print an error relative to the norm."""
    actual, reference = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    error = np.linalg.norm(actual - reference) / np.linalg.norm(reference)
    verdict = "ok" if error < 0.01 else "WRONG"  # NaN counts as wrong
    print(f"  {name:44s} {error:.1e} {verdict}", flush=True)


def float64_reference(a: Any, w: Any, b: Any, gates: Any, dout: Any) -> tuple[Any, ...]:
    """Return the output and gradients from a loop over experts in float64."""
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
    """Compare `expert_matmul` and its gradients with float64, including slots without an expert."""
    print("‖error‖ / ‖value‖ against float64")
    # Fill freed memory with NaN, so that unwritten rows are likely to contain NaN.
    junk = [_wait_for(jnp.full(2**26, jnp.nan, jnp.float32)) for _ in range(16)]
    del junk
    for shape in SMALL:
        b = uneven_assignment(shape)
        b[::5, 0], b[3::7, 1] = -1, shape.experts
        a, w = (
            random_bf16(0, shape.tokens, shape.d),
            random_bf16(1, shape.experts, shape.d, shape.f),
        )
        dout, gates = random_bf16(2, shape.tokens, shape.f), gates_of(shape)
        expected = float64_reference(a, w, b, gates, dout)
        value = jax.jit(expert_matmul_with_gradients)(b, dout, a, w, gates)
        for name, actual, reference in zip(
            ("out", "da", "dw", "dgates"), value, expected, strict=True
        ):
            print_check(f"expert_matmul {shape.name}, {name}", actual, reference)


def gates_of(shape: Shape) -> jax.Array:
    """Return weights that sum to one per token."""
    return jax.nn.softmax(jax.random.normal(jax.random.key(9), (shape.tokens, shape.k)))


def measure_drumline(shape: Shape) -> None:
    """Print the bare matmuls, the whole function, and its pieces."""
    b, gates = jnp.asarray(uneven_assignment(shape)), gates_of(shape)
    a, w = random_bf16(0, shape.tokens, shape.d), random_bf16(1, shape.experts, shape.d, shape.f)
    dout = random_bf16(2, shape.tokens, shape.f)
    group = partial(group_rows, groups=shape.experts, alignment=hopper.ROWS)
    groups = jax.jit(group)(b.reshape(-1))
    x, dy = groups.to_rows(a, shape.k), groups.to_rows(dout, shape.k)
    flat_x, flat_dy = random_bf16(3, shape.rows, shape.d), random_bf16(4, shape.rows, shape.f)
    padding = int(groups.sizes.sum()) / shape.rows - 1
    print(f"\n== {shape.name}; {100 * padding:.1f} % padding")
    bare = partial(grouped_matmul, sizes=groups.sizes, aligned=True, zero_rest=False)
    multiply = partial(hopper.matmul, out_dtype=BF16, transpose=False)
    transposed_multiply = partial(hopper.matmul, out_dtype=BF16, transpose=True)
    variants: Variants = {
        "dense x @ w": (lambda x, w: x @ w[0], flat_x, w),
        "kernel x @ w": (multiply, x, w, groups.sizes),
        "kernel dy @ wᵀ": (transposed_multiply, dy, w, groups.sizes),
        "kernel xᵀ dy": (partial(hopper.outer, out_dtype=BF16), x, dy, groups.sizes),
        "expert_matmul, whole": (expert_matmul, a, w, b, gates),
    }
    runs = compile_variants(
        {
            **variants,
            "dense, three products": (with_gradients(lambda x, w: x @ w[0]), flat_dy, flat_x, w),
            "kernels, three products": (with_gradients(bare), dy, x, w),
            "expert_matmul, whole, three": (expert_matmul_with_gradients, b, dout, a, w, gates),
        }
    )
    seconds = medians({name: runs[name] for name in variants if name in runs}, _wait_for)
    report("one product", shape.operations, seconds, seconds.get("dense x @ w"))
    seconds = medians({name: run for name, run in runs.items() if name not in variants}, _wait_for)
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
    for name, duration in medians(compile_variants(pieces), _wait_for).items():
        print(f"  {name:52s} {1e3 * duration:8.3f} ms", flush=True)


def torch_whole(torch: Any, grouped: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's equivalent of expert_matmul. Rows and tokens are exchanged by gathers
    only.
    """

    class SpreadTokens(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, a: Any, order: Any, positions: Any, k: int) -> Any:
            context.save_for_backward(positions)
            context.k = k
            return a[order // k]

        @staticmethod
        def backward(context: Any, dx: Any) -> Any:
            (positions,) = context.saved_tensors
            selected = dx[positions].view(-1, context.k, dx.shape[1])
            return selected.sum(1, dtype=torch.float32).to(dx.dtype), None, None, None

    class CollectRows(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, y: Any, order: Any, positions: Any) -> Any:
            context.save_for_backward(order)
            return y[positions]

        @staticmethod
        def backward(context: Any, dy: Any) -> Any:
            (order,) = context.saved_tensors
            return dy[order], None, None

    def whole(a: Any, w: Any, b: Any, gates: Any) -> Any:
        key, k = b.reshape(-1), b.shape[1]
        order = torch.argsort(key, stable=True)
        positions = torch.empty_like(order)
        positions[order] = torch.arange(len(key), device=key.device)
        counts = (key[:, None] == torch.arange(len(w), device=key.device)).sum(0)
        offs = counts.cumsum(0).to(torch.int32)
        y = grouped(SpreadTokens.apply(a, order, positions, k), w, offs=offs)
        selected = CollectRows.apply(y, order, positions).view(len(a), k, -1)
        return (selected * gates[:, :, None]).sum(1).to(a.dtype)

    return whole


def torch_with_gradients(torch: Any, function: Any, dout: Any, *operands: Any) -> Thunk:
    """Return a function that runs forward and backward with the gradients of all float operands."""
    samples = [o.detach().requires_grad_() if o.is_floating_point() else o for o in operands]
    differentiable = [o for o in samples if o.requires_grad]

    def run() -> Any:
        out = function(*samples)
        return out.detach(), *torch.autograd.grad(out, differentiable, dout)

    return run


def torch_operands(torch: Any, shape: Shape, device: str = "cuda") -> tuple[Any, ...]:
    """Return dout, a, w, b and gates."""

    def random(*sides: int) -> Any:
        return torch.randn(*sides, dtype=torch.bfloat16, device=device)

    b = torch.tensor(uneven_assignment(shape), dtype=torch.int64, device=device)
    gates = torch.softmax(torch.randn(shape.tokens, shape.k, device=device), 1)
    a, w = random(shape.tokens, shape.d), random(shape.experts, shape.d, shape.f)
    return random(shape.tokens, shape.f), a, w, b, gates


def torch_check(torch: Any, device: str = "cuda") -> None:
    """Compare PyTorch's whole function with float64, so that its speed is that of a correct
    result.
    """
    dout, a, w, b, gates = operands = torch_operands(torch, SMALL[0], device)
    value = torch_with_gradients(torch, torch_whole(torch, torch._grouped_mm), *operands)()
    plain = [v.float().cpu().numpy() for v in (a, w, gates, dout)]
    expected = float64_reference(plain[0], plain[1], b.cpu().numpy(), plain[2], plain[3])
    for name, actual, reference in zip(("out", "da", "dw", "dgates"), value, expected, strict=True):
        print_check(f"PyTorch whole, {name}", actual.float().cpu().numpy(), reference)


def measure_torch(shape: Shape) -> None:
    """Print PyTorch's grouped matmul, bare and whole, forward and with backward."""
    torch: Any = importlib.import_module("torch")
    dout, a, w, b, gates = torch_operands(torch, shape)
    offs = torch.bincount(b.reshape(-1), minlength=shape.experts).cumsum(0).to(torch.int32)
    x = torch.randn(shape.rows, shape.d, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn(shape.rows, shape.f, dtype=torch.bfloat16, device="cuda")
    reference = w.transpose(1, 2).contiguous().transpose(1, 2)
    bare = partial(torch._grouped_mm, offs=offs)
    whole = torch.compile(torch_whole(torch, torch._grouped_mm), dynamic=False)

    def sync(_: Any) -> None:
        torch.cuda.synchronize()

    def forward_only() -> Any:
        with torch.no_grad():
            return whole(a, w, b, gates)

    forward = {
        "PyTorch dense": lambda: x @ w[0],
        "torch._grouped_mm": lambda: bare(x, w),
        "torch._grouped_mm, w column-major": lambda: bare(x, reference),
        "PyTorch whole (torch.compile)": forward_only,
    }
    report("PyTorch, one product", shape.operations, medians(forward, sync), None)
    backward = {
        "torch._grouped_mm": torch_with_gradients(torch, bare, dy, x, w),
        "torch._grouped_mm, w column-major": torch_with_gradients(torch, bare, dy, x, reference),
        "PyTorch whole (torch.compile)": torch_with_gradients(torch, whole, dout, a, w, b, gates),
    }
    title = "PyTorch, forward and backward"
    report(title, 3 * shape.operations, medians(backward, sync), None)
    torch.cuda.empty_cache()


def measure_ragged_dot(shape: Shape) -> None:
    """Print `lax.ragged_dot`, which needs tens of GiB. It runs last because it may run out of
    memory.
    """
    if out_of_time():
        print("\nlax.ragged_dot: skipped for lack of time")
        return
    sizes = jnp.asarray(
        np.bincount(uneven_assignment(shape).ravel(), minlength=shape.experts), jnp.int32
    )
    x, w = random_bf16(0, shape.rows, shape.d), random_bf16(1, shape.experts, shape.d, shape.f)
    runs = compile_variants({"lax.ragged_dot": (jax.lax.ragged_dot, x, w, sizes)})
    report(f"{shape.name}, forward", shape.operations, medians(runs, _wait_for), None)


def main() -> None:
    """Check the results, then measure."""
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    stages: list[Thunk] = [check]
    stages += [lambda: torch_check(importlib.import_module("torch"))]
    for shape in SHAPES:
        stages += [partial(measure_drumline, shape), partial(measure_torch, shape)]
    stages += [partial(measure_ragged_dot, shape) for shape in SHAPES]
    for stage in stages:
        try:
            stage()
        except Exception as error:
            print_error(str(stage), error)
    print(f"\n{time.monotonic() - START_TIME:.0f} s")


if __name__ == "__main__":
    main()
