"""Measure the ring matmuls on one H200, and count their overlap in programs for eight.

    PYTHONPATH=src python benchmarks/overlap_h200.py

The first part runs each function on an axis of one device of the local GPU and `jnp.matmul`, in
bfloat16 and interleaved, and prints the ratio of the medians. It should be within 2 %. The second
part compiles ahead of time for eight H200s and reads the transfers of the scheduled program: the
number of asynchronous transfers, and the number of matmuls between the start and the end of each,
for the rings and for plain `jit`, with the temporary memory of the program on each device. Needs
JAX, Equinox and NumPy. `--compile` and `--time` run one part alone.
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
MatmulFunction = Callable[..., jax.Array]

# ---- parsing of a scheduled program -----------------------------------------------------------

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
# The form is "name = type op(operands), attributes". A tuple type has its own parentheses.
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
    """A collective: its kind, and the number of matmuls scheduled during it.

    `beside` is None if the collective is synchronous, because nothing can overlap with it.
    """

    kind: str
    beside: int | None


def computations(text: str) -> dict[str, list[Instruction]]:
    """Return the program's computations, with their instructions in the order of the schedule."""
    program: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = program.setdefault(head[1], [])
        elif instruction := _INSTRUCTION.match(line):
            current.append(Instruction(*instruction.groups()))
    return program


def transfers(text: str) -> list[Transfer]:
    """Return all collectives of a scheduled program. Those in a loop's body count once."""
    program = computations(text)
    multiplies = partial(_multiplies, program, {})
    wrapped = {
        callee
        for instructions in program.values()
        for instruction in instructions
        if instruction.operation == "async-start"
        for callee in _CALLED.findall(instruction.rest)
    }
    all_transfers: list[Transfer] = []
    for name, instructions in program.items():
        if name not in wrapped:
            all_transfers += _transfers_of(program, instructions, multiplies)
    return all_transfers


def _transfers_of(
    program: dict[str, list[Instruction]],
    instructions: list[Instruction],
    multiplies: Callable[[Instruction], bool],
) -> Iterator[Transfer]:
    for index, instruction in enumerate(instructions):
        kind = _kind(program, instruction)
        if kind is None:
            continue
        if not instruction.operation.endswith("-start"):
            yield Transfer(kind, None)
            continue
        beside = 0
        for next_instruction in instructions[index + 1 :]:
            is_done = next_instruction.operation.endswith("-done")
            if is_done and re.search(
                rf"%?{re.escape(instruction.name)}\b(?![.\-])", next_instruction.rest
            ):
                break
            beside += multiplies(next_instruction)
        yield Transfer(kind, beside)


def _kind(program: dict[str, list[Instruction]], instruction: Instruction) -> str | None:
    """Return the collective that an instruction starts or performs, or None."""
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
    program: dict[str, list[Instruction]], cache: dict[str, bool], instruction: Instruction
) -> bool:
    """Return True if an instruction is a matmul, or a fusion or call that contains one."""
    if instruction.operation in ("dot", "convolution") or _GEMM.search(instruction.rest):
        return True
    if "gemm" in instruction.name or '"__triton_gemm"' in instruction.rest:
        return True
    for callee in _CALLED.findall(instruction.rest):
        if callee not in cache:
            cache[callee] = False  # computations are not recursive
            cache[callee] = any(_multiplies(program, cache, i) for i in program.get(callee, ()))
        if cache[callee]:
            return True
    return False


def summary(text: str) -> list[str]:
    """Return the cells of the table: the number of matmuls, and each kind of transfer."""
    program = computations(text)
    fused = {
        callee
        for instructions in program.values()
        for instruction in instructions
        if instruction.operation == "fusion"
        for callee in _CALLED.findall(instruction.rest)
    }
    matmul_count = sum(
        _multiplies(program, {}, instruction)
        for name, instructions in program.items()
        if name not in fused
        for instruction in instructions
        if instruction.operation not in ("while", "call", "conditional")
    )
    cells = []
    all_transfers = transfers(text)
    for kind in sorted({transfer.kind for transfer in all_transfers}):
        beside = [t.beside for t in all_transfers if t.kind == kind and t.beside is not None]
        blocking = sum(t.kind == kind and t.beside is None for t in all_transfers)
        cell = f"{kind}: {len(beside)} asynchronous"
        if beside:
            covered = sum(count > 0 for count in beside)
            cell += f", {covered} with multiplications beside them ({sorted(beside)})"
        cells.append(cell + (f", {blocking} blocking" if blocking else ""))
    return [str(matmul_count), "; ".join(cells) or "none"]


# ---- the functions and their layouts ---------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A function, its plain equivalent, and the sharding of its operands over the axis Y."""

    name: str
    ring: MatmulFunction
    plain: MatmulFunction
    shapes: tuple[tuple[int, int], ...]
    specs: tuple[P, ...]
    out: P


def plain_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the plain matmul."""
    return jnp.matmul(x, w)


def plain_feedforward(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Return the plain feed-forward."""
    return jnp.matmul(jax.nn.relu(jnp.matmul(x, w)), v)


def cases() -> tuple[Case, ...]:
    """Return all functions in all their layouts."""
    make: Any = P
    rows, columns, replicated = make("Y", None), make(None, "Y"), make(None, None)
    up, down = ((B, D), (D, F)), ((B, F), (F, D))
    feedforward_shapes = ((B, D), (D, F), (F, D))
    gather_rows = partial(allgather_matmul, gathered="rows")
    scatter_rows = partial(matmul_reducescatter, scattered="rows")
    block = partial(feedforward, activation=jax.nn.relu)
    column_row_specs = (columns, rows)
    return (
        Case("gather contraction", allgather_matmul, plain_matmul, up, (columns, columns), columns),
        Case("gather rows", gather_rows, plain_matmul, up, column_row_specs[::-1], columns),
        Case(
            "scatter columns", matmul_reducescatter, plain_matmul, down, column_row_specs, columns
        ),
        Case("scatter rows", scatter_rows, plain_matmul, down, column_row_specs, rows),
        Case("allreduce", matmul_allreduce, plain_matmul, down, column_row_specs, replicated),
        Case(
            "feedforward columns",
            block,
            plain_feedforward,
            feedforward_shapes,
            (columns, *column_row_specs),
            columns,
        ),
        Case(
            "feedforward rows",
            partial(block, layout="rows"),
            plain_feedforward,
            feedforward_shapes,
            (rows, *column_row_specs),
            rows,
        ),
    )


def mapped(case: Case, mesh: Mesh, **options: Any) -> MatmulFunction:
    """Return the ring function of a case over whole arrays."""

    def local(*operands: jax.Array) -> jax.Array:
        return case.ring(*operands, axis_name="Y", **options)

    return jax.shard_map(local, mesh=mesh, in_specs=case.specs, out_specs=case.out)


def gradients(function: MatmulFunction) -> MatmulFunction:
    """Return a function of all gradients for a given cotangent, which is the last argument."""

    def vjp_of_arrays(*arrays: jax.Array) -> Any:
        *operands, cotangent = arrays
        return jax.vjp(function, *operands)[1](cotangent)

    return vjp_of_arrays


def finish(result: Any) -> None:
    """Wait for a result."""
    jax.block_until_ready(result)  # type: ignore[no-untyped-call]


# ---- one device ------------------------------------------------------------------------------


def medians(
    functions: Sequence[MatmulFunction], operands: list[jax.Array], rounds: int, calls: int
) -> list[float]:
    """Return the median seconds of a call of each function, measured alternately."""
    samples: list[list[float]] = [[] for _ in functions]
    for _ in range(3):
        for function in functions:
            finish(function(*operands))
    for round_index in range(rounds):
        # The order alternates, so that each function is equally often the first.
        order = range(len(functions)) if round_index % 2 == 0 else reversed(range(len(functions)))
        for index in order:
            start = time.perf_counter()
            for _ in range(calls):
                result = functions[index](*operands)
            finish(result)
            samples[index].append((time.perf_counter() - start) / calls)
    return [statistics.median(durations) for durations in samples]


def print_one_device(rounds: int, calls: int) -> None:
    """Print the table of one device."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("Y",))
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}; axis of one device, bfloat16")
    print(f"B, D, F = {B}, {D}, {F}; medians of {rounds} rounds of {calls} calls, interleaved\n")
    columns = ("function", "pass", "jnp.matmul, µs", "ring function, µs", "ratio")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for case in cases():
        keys = jax.random.split(jax.random.key(0), len(case.shapes) + 1)
        shapes = (*case.shapes, (case.shapes[0][0], case.shapes[-1][1]))
        arrays = [
            jax.device_put(
                jax.random.normal(key, shape, jnp.bfloat16), NamedSharding(mesh, replicated)
            )
            for key, shape, replicated in zip(keys, shapes, (*case.specs, case.out), strict=True)
        ]
        for name, wrap, operands in (
            ("forward", lambda f: f, arrays[:-1]),
            ("gradients", gradients, arrays),
        ):
            try:
                functions = [jax.jit(wrap(case.plain)), jax.jit(wrap(mapped(case, mesh)))]
                plain, ring = medians(functions, operands, rounds, calls)
            except Exception as error:  # a failed row must not stop the others
                print(f"| {case.name} | {name} | failed: {str(error).splitlines()[0][:90]} |")
                continue
            cells = f"{plain * 1e6:.1f} | {ring * 1e6:.1f} | {ring / plain:.4f}"
            print(f"| {case.name} | {name} | {cells} |", flush=True)


# ---- eight devices, compiled only ------------------------------------------------------------


def eight_devices() -> list[Any]:
    """Return eight H200s to compile for. One local H200 is enough."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc("1x8x1", platform="cuda", topology="1x8x1")
    return list(topology.devices)


def compiled(function: MatmulFunction, case: Case, mesh: Mesh, with_cotangent: bool) -> Any:
    """Return the compiled program of a function of a case's operands."""
    shapes = (*case.shapes, (case.shapes[0][0], case.shapes[-1][1]))
    layouts = (*case.specs, case.out)
    shape_struct: Any = jax.ShapeDtypeStruct
    arrays = [
        shape_struct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, layout))
        for shape, layout in zip(shapes, layouts, strict=True)
    ]
    return jax.jit(function).lower(*(arrays if with_cotangent else arrays[:-1])).compile()


def print_compiled(devices: list[Any], save: str | None) -> None:
    """Print the table of the compiled programs."""
    mesh = Mesh(np.array(devices), ("Y",))
    kind = devices[0].device_kind
    print(f"Compiled for {len(devices)} x {kind}, bfloat16, B, D, F = {B}, {D}, {F}\n")
    columns = ("function", "pass", "variant", "temporaries, MiB", "multiplications", "transfers")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for case in cases():
        plain: MatmulFunction = jax.jit(case.plain, out_shardings=NamedSharding(mesh, case.out))
        variants: dict[str, MatmulFunction] = {"plain jit": plain}
        for direction in ("one", "both"):
            for loop in ("unrolled", "rolled"):
                ring = mapped(case, mesh, direction=direction, loop=loop)
                variants[f"{direction}, {loop}"] = ring
        for variant, function in variants.items():
            for name in ("forward", "gradients"):
                if name == "gradients" and "unrolled" in variant:
                    continue  # gradients are loops by default
                differentiated = gradients(function) if name == "gradients" else function
                try:
                    program = compiled(differentiated, case, mesh, name == "gradients")
                except Exception as error:  # a failed row must not stop the others
                    print(f"| {case.name} | {name} | {variant} | failed | {str(error)[:200]!r} |")
                    continue
                text = program.as_text()
                temporary_mebibytes = program.memory_analysis().temp_size_in_bytes / 2**20
                if save:
                    file = re.sub(r"\W+", "_", f"{case.name} {name} {variant}")
                    with open(f"{save}/{file}.hlo", "w") as out:
                        out.write(text)
                cells = " | ".join(summary(text))
                print(
                    f"| {case.name} | {name} | {variant} | {temporary_mebibytes:.1f} | {cells} |",
                    flush=True,
                )


def main() -> None:
    """Print the requested tables."""
    parser = argparse.ArgumentParser(
        description="Measure ring matmuls on one H200, and compile for eight."
    )
    parser.add_argument("--time", action="store_true", help="measure on one device only")
    parser.add_argument("--compile", action="store_true", help="compile for eight devices only")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--save", metavar="FOLDER", help="keep the compiled programs' text here")
    arguments = parser.parse_args()
    if not arguments.compile:
        print_one_device(arguments.rounds, arguments.calls)
        print()
    if not arguments.time:
        print_compiled(eight_devices(), arguments.save)


if __name__ == "__main__":
    main()
