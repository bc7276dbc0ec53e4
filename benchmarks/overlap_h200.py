"""The ring matmuls on an H200: what they cost alone, and whether eight of them would overlap.

    PYTHONPATH=src python benchmarks/overlap_h200.py

First, on the GPU at hand, each function on an axis of one device beside `jnp.matmul`, in bfloat16
and interleaved, with the ratio of the medians: it should be within 2 %. Second, compiled ahead of
time for eight H200s, the scheduled program's transfers: how many are asynchronous, and how many
multiplications stand between the start and the end of each, for the rings and for plain `jit`,
with the temporary memory that the program takes on each device.
Needs JAX, Equinox and NumPy. `--compile` and `--time` run one part alone.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.parallel import (
    allgather_matmul,
    feedforward,
    matmul_allreduce,
    matmul_reducescatter,
)

B, D, F = 8192, 4096, 8192
Product = Callable[..., jax.Array]

# ---- reading a scheduled program -------------------------------------------------------------

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
# name = type op(operands), attributes; a tuple type has parentheses of its own
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:\([^=]*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_GEMM = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas|cudnn\$conv)[^"]*"', re.I)
_COLLECTIVES = ("collective-permute", "all-gather", "all-reduce", "reduce-scatter", "all-to-all")


@dataclass(frozen=True)
class Instruction:
    """One line of a program's text."""

    name: str
    operation: str
    rest: str


@dataclass(frozen=True)
class Transfer:
    """A collective: its kind, and the multiplications scheduled while it is under way.

    `beside` is None where the collective is synchronous and nothing can run beside it.
    """

    kind: str
    beside: int | None


def computations(text: str) -> dict[str, list[Instruction]]:
    """The program's computations, their instructions in the order of the schedule."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = found.setdefault(head[1], [])
        elif instruction := _INSTRUCTION.match(line):
            current.append(Instruction(*instruction.groups()))
    return found


def transfers(text: str) -> list[Transfer]:
    """All collectives of a scheduled program; those in a loop's body count once."""
    program = computations(text)
    multiplies = partial(_multiplies, program, {})
    wrapped = {
        callee
        for instructions in program.values()
        for instruction in instructions
        if instruction.operation == "async-start"
        for callee in _CALLED.findall(instruction.rest)
    }
    found: list[Transfer] = []
    for name, instructions in program.items():
        if name not in wrapped:
            found += _transfers_of(program, instructions, multiplies)
    return found


def _transfers_of(
    program: dict[str, list[Instruction]],
    instructions: list[Instruction],
    multiplies: Callable[[Instruction], bool],
) -> Iterator[Transfer]:
    for place, instruction in enumerate(instructions):
        kind = _kind(program, instruction)
        if kind is None:
            continue
        if not instruction.operation.endswith("-start"):
            yield Transfer(kind, None)
            continue
        beside = 0
        for later in instructions[place + 1 :]:
            ends = later.operation.endswith("-done")
            if ends and re.search(rf"%?{re.escape(instruction.name)}\b(?![.\-])", later.rest):
                break
            beside += multiplies(later)
        yield Transfer(kind, beside)


def _kind(program: dict[str, list[Instruction]], instruction: Instruction) -> str | None:
    """Which collective an instruction starts or performs, if any."""
    operation = instruction.operation
    if operation == "async-start":
        for callee in _CALLED.findall(instruction.rest):
            for inner in program.get(callee, ()):
                if inner.operation in _COLLECTIVES:
                    return inner.operation
        return None
    kind = operation.removesuffix("-start")
    return kind if kind in _COLLECTIVES else None


def _multiplies(
    program: dict[str, list[Instruction]], known: dict[str, bool], instruction: Instruction
) -> bool:
    """Whether an instruction is a matrix product, or a fusion or call that has one inside."""
    if instruction.operation in ("dot", "convolution") or _GEMM.search(instruction.rest):
        return True
    if "gemm" in instruction.name or '"__triton_gemm"' in instruction.rest:
        return True
    for callee in _CALLED.findall(instruction.rest):
        if callee not in known:
            known[callee] = False  # a computation never calls itself
            known[callee] = any(_multiplies(program, known, i) for i in program.get(callee, ()))
        if known[callee]:
            return True
    return False


def summary(text: str) -> list[str]:
    """Cells of the table: multiplications in all, and each kind of transfer."""
    program = computations(text)
    fused = {
        callee
        for instructions in program.values()
        for instruction in instructions
        if instruction.operation == "fusion"
        for callee in _CALLED.findall(instruction.rest)
    }
    products = sum(
        _multiplies(program, {}, instruction)
        for name, instructions in program.items()
        if name not in fused
        for instruction in instructions
        if instruction.operation not in ("while", "call", "conditional")
    )
    cells = []
    found = transfers(text)
    for kind in sorted({transfer.kind for transfer in found}):
        beside = [t.beside for t in found if t.kind == kind and t.beside is not None]
        blocking = sum(t.kind == kind and t.beside is None for t in found)
        said = f"{kind}: {len(beside)} asynchronous"
        if beside:
            covered = sum(count > 0 for count in beside)
            said += f", {covered} with multiplications beside them ({sorted(beside)})"
        cells.append(said + (f", {blocking} blocking" if blocking else ""))
    return [str(products), "; ".join(cells) or "none"]


# ---- the functions and their layouts ---------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A function, what it stands for, and how its operands are sharded over the axis Y."""

    name: str
    ring: Product
    plain: Product
    shapes: tuple[tuple[int, int], ...]
    specs: tuple[P, ...]
    out: P


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """The plain product."""
    return jnp.matmul(x, w)


def two_matmuls(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """The plain feed-forward."""
    return jnp.matmul(jax.nn.relu(jnp.matmul(x, w)), v)


def cases() -> tuple[Case, ...]:
    """All functions in all their layouts."""
    make: Any = P
    rows, columns, whole = make("Y", None), make(None, "Y"), make(None, None)
    up, down = ((B, D), (D, F)), ((B, F), (F, D))
    both = ((B, D), (D, F), (F, D))
    gather_rows = partial(allgather_matmul, gathered="rows")
    scatter_rows = partial(matmul_reducescatter, scattered="rows")
    block = partial(feedforward, activation=jax.nn.relu)
    across = (columns, rows)
    return (
        Case("gather contraction", allgather_matmul, matmul, up, (columns, columns), columns),
        Case("gather rows", gather_rows, matmul, up, across[::-1], columns),
        Case("scatter columns", matmul_reducescatter, matmul, down, across, columns),
        Case("scatter rows", scatter_rows, matmul, down, across, rows),
        Case("allreduce", matmul_allreduce, matmul, down, across, whole),
        Case("feedforward columns", block, two_matmuls, both, (columns, *across), columns),
        Case(
            "feedforward rows",
            partial(block, layout="rows"),
            two_matmuls,
            both,
            (rows, *across),
            rows,
        ),
    )


def mapped(case: Case, mesh: Mesh, **options: Any) -> Product:
    """The ring function of a case over whole arrays."""

    def local(*operands: jax.Array) -> jax.Array:
        return case.ring(*operands, axis_name="Y", **options)

    return jax.shard_map(local, mesh=mesh, in_specs=case.specs, out_specs=case.out)


def gradients(product: Product) -> Product:
    """All gradients of a product for a given cotangent, which comes last."""

    def pull(*arrays: jax.Array) -> Any:
        *operands, cotangent = arrays
        return jax.vjp(product, *operands)[1](cotangent)

    return pull


def finish(result: Any) -> None:
    """Wait for a result."""
    jax.block_until_ready(result)  # type: ignore[no-untyped-call]


# ---- one device ------------------------------------------------------------------------------


def medians(
    functions: Sequence[Product], operands: list[jax.Array], rounds: int, calls: int
) -> list[float]:
    """Median seconds of a call of each function, all of them measured in turn."""
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(3):
        for function in functions:
            finish(function(*operands))
    for number in range(rounds):
        # The order alternates, so that neither is always the one that finds the chip warm.
        order = range(len(functions)) if number % 2 == 0 else reversed(range(len(functions)))
        for index in order:
            start = time.perf_counter()
            for _ in range(calls):
                result = functions[index](*operands)
            finish(result)
            taken[index].append((time.perf_counter() - start) / calls)
    return [statistics.median(times) for times in taken]


def print_alone(rounds: int, calls: int) -> None:
    """The first table."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("Y",))
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}; axis of one device, bfloat16")
    print(f"B, D, F = {B}, {D}, {F}; medians of {rounds} rounds of {calls} calls, interleaved\n")
    heads = ("function", "pass", "jnp.matmul, µs", "ring function, µs", "ratio")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for case in cases():
        keys = jax.random.split(jax.random.key(0), len(case.shapes) + 1)
        shapes = (*case.shapes, (case.shapes[0][0], case.shapes[-1][1]))
        arrays = [
            jax.device_put(jax.random.normal(key, shape, jnp.bfloat16), NamedSharding(mesh, whole))
            for key, shape, whole in zip(keys, shapes, (*case.specs, case.out), strict=True)
        ]
        for name, wrap, operands in (
            ("forward", lambda f: f, arrays[:-1]),
            ("gradients", gradients, arrays),
        ):
            try:
                pair = [jax.jit(wrap(case.plain)), jax.jit(wrap(mapped(case, mesh)))]
                plain, ring = medians(pair, operands, rounds, calls)
            except Exception as failure:  # one row that fails must not cost the others
                print(f"| {case.name} | {name} | failed: {str(failure).splitlines()[0][:90]} |")
                continue
            cells = f"{plain * 1e6:.1f} | {ring * 1e6:.1f} | {ring / plain:.4f}"
            print(f"| {case.name} | {name} | {cells} |", flush=True)


# ---- eight devices, compiled only ------------------------------------------------------------


def eight_devices() -> list[Any]:
    """Eight H200s to compile for, of which one at hand is enough."""
    from jax.experimental import topologies

    described = topologies.get_topology_desc("1x8x1", platform="cuda", topology="1x8x1")
    return list(described.devices)


def compiled(function: Product, case: Case, mesh: Mesh, with_cotangent: bool) -> Any:
    """The compiled program of a function of a case's operands."""
    shapes = (*case.shapes, (case.shapes[0][0], case.shapes[-1][1]))
    layouts = (*case.specs, case.out)
    describe: Any = jax.ShapeDtypeStruct
    arrays = [
        describe(shape, jnp.bfloat16, sharding=NamedSharding(mesh, layout))
        for shape, layout in zip(shapes, layouts, strict=True)
    ]
    return jax.jit(function).lower(*(arrays if with_cotangent else arrays[:-1])).compile()


def print_compiled(devices: list[Any], save: str | None) -> None:
    """The second table."""
    mesh = Mesh(np.array(devices), ("Y",))
    kind = devices[0].device_kind
    print(f"Compiled for {len(devices)} x {kind}, bfloat16, B, D, F = {B}, {D}, {F}\n")
    heads = ("function", "pass", "variant", "temporaries, MiB", "multiplications", "transfers")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for case in cases():
        plain: Product = jax.jit(case.plain, out_shardings=NamedSharding(mesh, case.out))
        variants: dict[str, Product] = {"plain jit": plain}
        for direction in ("one", "both"):
            for loop in ("unrolled", "rolled"):
                ring = mapped(case, mesh, direction=direction, loop=loop)
                variants[f"{direction}, {loop}"] = ring
        for variant, function in variants.items():
            for name in ("forward", "gradients"):
                if name == "gradients" and "unrolled" in variant:
                    continue  # by default gradients are loops
                wrapped = gradients(function) if name == "gradients" else function
                try:
                    program = compiled(wrapped, case, mesh, name == "gradients")
                except Exception as failure:  # one row that fails must not cost the others
                    print(f"| {case.name} | {name} | {variant} | failed | {str(failure)[:200]!r} |")
                    continue
                text = program.as_text()
                held = program.memory_analysis().temp_size_in_bytes / 2**20
                if save:
                    file = re.sub(r"\W+", "_", f"{case.name} {name} {variant}")
                    with open(f"{save}/{file}.hlo", "w") as out:
                        out.write(text)
                cells = " | ".join(summary(text))
                print(f"| {case.name} | {name} | {variant} | {held:.1f} | {cells} |", flush=True)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description="Ring matmuls on an H200, and for eight.")
    parser.add_argument("--time", action="store_true", help="only time one device")
    parser.add_argument("--compile", action="store_true", help="only compile for eight")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--save", metavar="FOLDER", help="keep the compiled programs' text here")
    arguments = parser.parse_args()
    if not arguments.compile:
        print_alone(arguments.rounds, arguments.calls)
        print()
    if not arguments.time:
        print_compiled(eight_devices(), arguments.save)


if __name__ == "__main__":
    main()
