"""Training on one GPU beside PyTorch: ViT-B/16, two Llama-style decoders, and one of experts.

    python benchmarks/train_h200.py [vit 350m 1b3 moe] [--modes default] [--profile]

Both sides have the same architecture, batch, bfloat16 compute over float32 weights and AdamW, with
one batch in memory. This side is `drumline.models` through the step of `drumline.train`, with its
guard against values that are not finite. The other is timm's ViT, and decoders in plain PyTorch
(torch_models.py), under `torch.compile` in three modes, of which the fastest counts; max-autotune
takes minutes to compile. Every measurement has the card to itself, in a process of its own: the
median of five rounds after a warm-up. `--profile` adds where the time goes. MFU counts the models'
own FLOPs (causal attention by half) against 989 TFLOP/s on both sides.
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
class Case:
    """A model and its batch."""

    name: str
    item: str
    batch: int
    length: int = 0
    """Tokens in a sequence; 0 for images."""


CASES = {
    "vit": Case("ViT-B/16, batch 256", "images", 256),
    "350m": Case("decoder 350M, batch 16 × 2048", "tokens", 16, 2048),
    "1b3": Case("decoder 1.3B, batch 8 × 2048", "tokens", 8, 2048),
    "moe": Case("decoder 350M, 8 experts, k = 2, batch 16 × 2048", "tokens", 16, 2048),
}


def measure(run: Callable[[int], float]) -> float:
    """Median seconds of a step; `run` takes so many steps and waits for the last one's loss."""
    run(WARM_UP)
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run(STEPS)
        taken.append((time.perf_counter() - start) / STEPS)
    return statistics.median(taken)


# ---- this side -------------------------------------------------------------------------------


def model_and_arrays(name: str) -> tuple[Any, dict[str, Any]]:
    """The model of a case, and one batch for it."""
    import numpy as np

    from drumline.models.lm import llama_1b3, llama_350m
    from drumline.models.vit import vit_b16

    case, random = CASES[name], np.random.default_rng(0)
    if name == "vit":
        return vit_b16(attention="cudnn"), {
            "image": random.integers(0, 256, (case.batch, 224, 224, 3), np.uint8),
            "label": random.integers(0, 1000, case.batch, np.int32),
        }
    experts = {"experts": 8} if name == "moe" else {}
    model = (llama_1b3 if name == "1b3" else llama_350m)(attention="cudnn", **experts)
    return model, {
        "tokens": random.integers(0, model.vocab, (case.batch, case.length + 1), np.int32)
    }


def drumline_side(name: str, profile: bool) -> dict[str, Any]:
    """Time a case here; the result also says how many FLOPs and items a step has."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax  # type: ignore[import-untyped]

    from drumline.train.data import arrays as in_memory
    from drumline.train.mesh import make_mesh
    from drumline.train.recipe import Recipe
    from drumline.train.state import abstract_state, initial_state, replicate, shardings
    from drumline.train.steps.step import LOSS, NO_LIMITS, make_step

    case = CASES[name]
    model, arrays = model_and_arrays(name)
    optimizer = optax.adamw(1e-4, weight_decay=0.05)
    data = in_memory(arrays, batch=case.batch, seed=0)
    recipe = Recipe(model, optimizer, data, {"data": 1}, steps=1)
    mesh = make_mesh(recipe.mesh)
    with jax.set_mesh(mesh):
        abstract = abstract_state(recipe, mesh)
        state = jax.jit(lambda: initial_state(recipe), out_shardings=shardings(abstract))()
        mode = replicate(mesh, np.zeros((), np.int32))
        stop_flag = replicate(mesh, np.zeros(1, np.float32))
        limits = replicate(mesh, NO_LIMITS)
        batch = {key: replicate(mesh, array) for key, array in arrays.items()}
        start = time.perf_counter()
        step = (
            make_step(recipe, mesh, abstract).lower(state, mode, batch, stop_flag, limits).compile()
        )
        compiling = time.perf_counter() - start

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
        "compiling": compiling,
        "mode": f"jax {jax.__version__}",
    }


def print_profile(run: Callable[[int], float], steps: int = 3, lines: int = 24) -> None:
    """Where a step's time goes, by kernel, families of generated ones together."""
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
    spent: collections.Counter[str] = collections.Counter()
    idle: collections.Counter[str] = collections.Counter()
    times: collections.Counter[str] = collections.Counter()
    end = kernels[0][0]
    for start, micros, kernel in kernels:
        spent[kernel] += micros
        times[kernel] += 1
        idle[kernel] += max(0, start - end)
        end = max(end, start + micros)

    def told(micros: float) -> str:
        return f"{micros / steps / 1e3:.2f} ms"

    print(
        f"  kernels {told(sum(spent.values()))}, idle {told(sum(idle.values()))}", file=sys.stderr
    )
    for kernel, micros in spent.most_common(lines):
        print(f"  {told(micros):>9}  {times[kernel] // steps:4d} × {kernel}", file=sys.stderr)
    for kernel, micros in idle.most_common(4):
        print(f"  {told(micros):>9}  idle before {kernel}", file=sys.stderr)


# ---- the other side --------------------------------------------------------------------------


def torch_side(name: str, mode: str) -> dict[str, Any]:
    """Time a case in PyTorch."""
    import importlib

    torch: Any = importlib.import_module("torch")
    case = CASES[name]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    if name == "vit":
        timm: Any = importlib.import_module("timm")
        model = timm.create_model("vit_base_patch16_224").cuda().train()
        images = torch.randn(case.batch, 3, 224, 224, device="cuda")
        labels = torch.randint(0, 1000, (case.batch,), device="cuda")

        def forward() -> Any:
            return torch.nn.functional.cross_entropy(model(images), labels)

    else:
        models: Any = importlib.import_module("torch_models")
        sizes = models.SIZES[name]
        model = models.decoder(sizes).cuda().train()
        tokens = torch.randint(0, sizes.vocab, (case.batch, case.length + 1), device="cuda")

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
    compiling = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    seconds = measure(run)
    return {
        "seconds": seconds,
        "memory": torch.cuda.max_memory_allocated(),
        "loss": run(1),
        "compiling": compiling,
        "mode": f"torch {torch.__version__}, {mode}",
        "parameters": sum(p.numel() for p in model.parameters()),
    }


# ---- both ------------------------------------------------------------------------------------


def in_own_process(name: str, side: str, *options: str) -> dict[str, Any] | None:
    """A measurement with the card to itself; None, with the reason printed, where it fails."""
    command = [sys.executable, __file__, name, "--side", side, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if "--profile" in options:
        print(done.stderr[-4000:], file=sys.stderr)
    if done.returncode:
        said = (done.stderr.strip() or "no reason given").splitlines()[-1]
        print(f"{name}, {side} {' '.join(options)}: failed: {said}", flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, modes: tuple[str, ...], profile: bool) -> None:
    """Print the rows of one case."""
    case = CASES[name]
    ours = in_own_process(name, "drumline", *(["--profile"] if profile else []))
    theirs = [in_own_process(name, mode) for mode in modes]
    known = [found for found in theirs if found]
    best = min((found["seconds"] for found in known), default=None)
    for found in [ours, *known]:
        if found is None or ours is None:
            continue
        seconds = found["seconds"]
        cells = (
            case.name,
            found["mode"],
            f"{ours['items'] / seconds:,.0f}",
            f"{seconds * 1e3:.1f} ms",
            f"{ours['flops'] / seconds / PEAK:.1%}",
            f"{found['memory'] / 2**30:.1f} GiB",
            f"{found['compiling']:.0f} s",
            f"{best / seconds:.3f}" if best else "–",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print the table, or be one of its measurements."""
    parser = argparse.ArgumentParser(description="Training on one GPU beside PyTorch.")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all if none")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument(
        "--modes", default=",".join(MODES), help="of torch.compile; empty to leave PyTorch out"
    )
    parser.add_argument("--profile", action="store_true", help="say where our time goes")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(CASES)}")
    if arguments.side == "drumline":
        print(json.dumps(drumline_side(arguments.cases[0], arguments.profile)))
    elif arguments.side:
        print(json.dumps(torch_side(arguments.cases[0], arguments.side)))
    else:
        heads = ("model", "with", "items/s", "step", "MFU", "memory", "compiling", "× PyTorch")
        print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)
        modes = tuple(filter(None, arguments.modes.split(",")))
        for name in arguments.cases or CASES:
            compare(name, modes, arguments.profile)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    main()
