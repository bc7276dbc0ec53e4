"""Compare training on one GPU with PyTorch: ViT-B/16, two Llama-style decoders and a MoE decoder.

    python benchmarks/train_h200.py [vit 350m 1b3 moe] [--modes default] [--profile]

Both frameworks train the same architecture with the same batch, bfloat16 compute over float32
weights and AdamW, and one batch in memory. Drumline runs `drumline.models` through the step of
`drumline.train`, including its check for non-finite values. PyTorch runs timm's ViT and decoders in
plain PyTorch (torch_models.py) under `torch.compile` in three modes, and the fastest mode counts.
max-autotune takes minutes to compile. Every measurement runs in its own process and has the GPU to
itself. It is the median of five rounds after a warm-up. `--profile` also prints the time of each
kernel. MFU counts the models' own FLOPs (half of the causal attention) against 989 TFLOP/s for
both.
"""

from __future__ import annotations

import argparse
import collections
import glob
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PEAK = 989e12
ROUNDS, STEPS, WARM_UP = 5, 10, 5
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Workload:
    """A model and its batch."""

    name: str
    item: str
    batch: int
    length: int = 0
    """Tokens in a sequence; 0 for images."""


WORKLOADS = {
    "vit": Workload("ViT-B/16, batch 256", "images", 256),
    "350m": Workload("decoder 350M, batch 16 × 2048", "tokens", 16, 2048),
    "1b3": Workload("decoder 1.3B, batch 8 × 2048", "tokens", 8, 2048),
    "moe": Workload("decoder 350M, 8 experts, k = 2, batch 16 × 2048", "tokens", 16, 2048),
}


def measure(run: Callable[[int], float]) -> float:
    """Return the median seconds of a step. `run(n)` takes n steps and waits for the last loss."""
    run(WARM_UP)
    samples = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run(STEPS)
        samples.append((time.perf_counter() - start) / STEPS)
    return statistics.median(samples)


# ---- Drumline --------------------------------------------------------------------------------


def model_and_arrays(name: str) -> tuple[Any, dict[str, Any]]:
    """Return the model of a workload and one batch for it."""
    import numpy as np

    from drumline.models.lm import llama_1b3, llama_350m
    from drumline.models.vit import vit_b16

    workload, random = WORKLOADS[name], np.random.default_rng(0)
    if name == "vit":
        return vit_b16(attention="cudnn"), {
            "image": random.integers(0, 256, (workload.batch, 224, 224, 3), np.uint8),
            "label": random.integers(0, 1000, workload.batch, np.int32),
        }
    experts = {"experts": 8} if name == "moe" else {}
    model = (llama_1b3 if name == "1b3" else llama_350m)(attention="cudnn", **experts)
    return model, {
        "tokens": random.integers(0, model.vocab, (workload.batch, workload.length + 1), np.int32)
    }


def measure_drumline(name: str, profile: bool) -> dict[str, Any]:
    """Time a workload in Drumline. The result includes the FLOPs and items of a step."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax  # type: ignore[import-untyped]

    from drumline.train.data import arrays as in_memory
    from drumline.train.mesh import make_mesh
    from drumline.train.recipe import Recipe
    from drumline.train.state import abstract_state, initial_state, replicate, shardings
    from drumline.train.steps.step import LOSS, NO_LIMITS, compiler_options, make_step

    workload = WORKLOADS[name]
    model, arrays = model_and_arrays(name)
    optimizer = optax.adamw(1e-4, weight_decay=0.05)
    batches = in_memory(arrays, batch=workload.batch, seed=0)
    recipe = Recipe(model, optimizer, batches, {"data": 1}, steps=1)
    mesh = make_mesh(recipe.mesh)
    with jax.set_mesh(mesh):
        abstract = abstract_state(recipe, mesh)
        state = jax.jit(lambda: initial_state(recipe), out_shardings=shardings(abstract))()
        mode = replicate(mesh, np.zeros((), np.int32))
        stop_flag = replicate(mesh, np.zeros(1, np.float32))
        limits = replicate(mesh, NO_LIMITS)
        batch = {key: replicate(mesh, array) for key, array in arrays.items()}
        start = time.perf_counter()
        jitted = make_step(recipe, mesh, abstract, compiler_options(recipe, mesh))
        step = jitted.lower(state, mode, batch, stop_flag, limits).compile()
        compile_seconds = time.perf_counter() - start

        def run(steps: int) -> float:
            nonlocal state, mode
            for _ in range(steps):
                state, mode, scalars = step(state, mode, batch, stop_flag, limits)
            return float(scalars[LOSS])

        seconds = measure(run)
        loss = run(1)
        if profile:
            print_profile(run)
    stats = jax.devices()[0].memory_stats() or {}
    assert jnp.isfinite(loss)
    return {
        "seconds": seconds,
        "items": model.items(batch),
        "flops": model.flops(batch),
        "memory": stats.get("peak_bytes_in_use", 0),
        "loss": loss,
        "compiling": compile_seconds,
        "mode": f"jax {jax.__version__}",
    }


def print_profile(run: Callable[[int], float], steps: int = 3, lines: int = 24) -> None:
    """Print the time of a step by kernel, with generated kernels grouped by family."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(steps)
        (trace,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(trace) as file:
            events = json.load(file)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"
    }
    kernels = sorted(
        (event["ts"], event["dur"], event["name"][:56].rstrip("0123456789_"))
        for event in events
        if event.get("ph") == "X"
        and "GPU" in processes.get(event["pid"], "")
        and "Stream" in threads.get((event["pid"], event["tid"]), "")
    )
    kernel_micros: collections.Counter[str] = collections.Counter()
    idle_micros: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    end = kernels[0][0]
    for start, micros, kernel in kernels:
        kernel_micros[kernel] += micros
        counts[kernel] += 1
        idle_micros[kernel] += max(0, start - end)
        end = max(end, start + micros)

    def milliseconds(micros: float) -> str:
        return f"{micros / steps / 1e3:.2f} ms"

    print(
        f"  kernels {milliseconds(sum(kernel_micros.values()))}, idle "
        f"{milliseconds(sum(idle_micros.values()))}",
        file=sys.stderr,
    )
    for kernel, micros in kernel_micros.most_common(lines):
        print(
            f"  {milliseconds(micros):>9}  {counts[kernel] // steps:4d} × {kernel}", file=sys.stderr
        )
    for kernel, micros in idle_micros.most_common(4):
        print(f"  {milliseconds(micros):>9}  idle before {kernel}", file=sys.stderr)


# ---- PyTorch ---------------------------------------------------------------------------------


def measure_torch(name: str, mode: str) -> dict[str, Any]:
    """Time a workload in PyTorch."""
    import importlib

    torch: Any = importlib.import_module("torch")
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    if name == "vit":
        timm: Any = importlib.import_module("timm")
        model = timm.create_model("vit_base_patch16_224").cuda().train()
        images = torch.randn(workload.batch, 3, 224, 224, device="cuda")
        labels = torch.randint(0, 1000, (workload.batch,), device="cuda")

        def forward() -> Any:
            return torch.nn.functional.cross_entropy(model(images), labels)

    else:
        models: Any = importlib.import_module("torch_models")
        sizes = models.SIZES[name]
        model = models.decoder(sizes).cuda().train()
        tokens = torch.randint(0, sizes.vocab, (workload.batch, workload.length + 1), device="cuda")

        def forward() -> Any:
            return model(tokens)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)
    compiled = torch.compile(forward, mode=None if mode == "default" else mode)

    def run(steps: int) -> float:
        for _ in range(steps):
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    start = time.perf_counter()
    run(1)
    compile_seconds = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    seconds = measure(run)
    return {
        "seconds": seconds,
        "memory": torch.cuda.max_memory_allocated(),
        "loss": run(1),
        "compiling": compile_seconds,
        "mode": f"torch {torch.__version__}, {mode}",
        "parameters": sum(p.numel() for p in model.parameters()),
    }


# ---- comparison ------------------------------------------------------------------------------


def in_own_process(name: str, side: str, *options: str) -> dict[str, Any] | None:
    """Run a measurement in its own process. If it fails, print the reason and return None."""
    command = [sys.executable, __file__, name, "--side", side, *options]
    process = subprocess.run(command, capture_output=True, text=True)
    if "--profile" in options:
        print(process.stderr[-4000:], file=sys.stderr)
    if process.returncode:
        error_line = (process.stderr.strip() or "no reason given").splitlines()[-1]
        print(f"{name}, {side} {' '.join(options)}: failed: {error_line}", flush=True)
        return None
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def compare(name: str, modes: tuple[str, ...], profile: bool) -> None:
    """Print the rows of one workload."""
    workload = WORKLOADS[name]
    drumline = in_own_process(name, "drumline", *(["--profile"] if profile else []))
    all_torch_results = [in_own_process(name, mode) for mode in modes]
    torch_results = [result for result in all_torch_results if result]
    fastest_torch = min((result["seconds"] for result in torch_results), default=None)
    for result in [drumline, *torch_results]:
        if result is None or drumline is None:
            continue
        seconds = result["seconds"]
        cells = (
            workload.name,
            result["mode"],
            f"{drumline['items'] / seconds:,.0f}",
            f"{seconds * 1e3:.1f} ms",
            f"{drumline['flops'] / seconds / PEAK:.1%}",
            f"{result['memory'] / 2**30:.1f} GiB",
            f"{result['compiling']:.0f} s",
            f"{fastest_torch / seconds:.3f}" if fastest_torch else "–",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print the table, or run one of its measurements."""
    parser = argparse.ArgumentParser(description="Compare training on one GPU with PyTorch.")
    parser.add_argument(
        "cases", nargs="*", help=f"workloads among {', '.join(WORKLOADS)} (default: all)"
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument(
        "--modes", default=",".join(MODES), help="modes of torch.compile; empty skips PyTorch"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print the time of each kernel of Drumline"
    )
    arguments = parser.parse_args()
    unknown_workloads = [name for name in arguments.cases if name not in WORKLOADS]
    if unknown_workloads:
        parser.error(f"{unknown_workloads[0]!r} is none of {', '.join(WORKLOADS)}")
    if arguments.side == "drumline":
        print(json.dumps(measure_drumline(arguments.cases[0], arguments.profile)))
    elif arguments.side:
        print(json.dumps(measure_torch(arguments.cases[0], arguments.side)))
    else:
        columns = ("model", "with", "items/s", "step", "MFU", "memory", "compiling", "× PyTorch")
        print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
        modes = tuple(filter(None, arguments.modes.split(",")))
        for name in arguments.cases or WORKLOADS:
            compare(name, modes, arguments.profile)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    main()
