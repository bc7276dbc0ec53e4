"""The kinds of operation of which estimates were compared with measurements, for each chip.

An estimate of any other kind rests on the cost model alone. `operation_kind` assigns a kernel to
the kind of its largest operation, and `MEASURED` has the kinds that were measured on each chip.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from drumline.inspect.cost.work import DATA_MOVEMENT, ELEMENTWISE, convolves
from drumline.inspect.hlo.text import Computation, Instruction, Module

SMALL_STEPS = "loop of small steps"
ATTENTION = "attention kernel"

_COMPUTATION = frozenset(("matmul", ATTENTION, "elementwise", "reduction", "data movement"))
"""The computations in the published training steps of decoders (benchmarks/published)."""
MEASURED: Mapping[str, frozenset[str]] = {
    # The chapter's matmuls, and single measurements (benchmarks/inspect_published.py).
    "v2": frozenset(("matmul", "all-gather", "reduce-scatter", "collective-permute")),
    "v5e": frozenset(("all-gather",)),
    # Training steps (benchmarks/inspect_published.py), with the collectives of which the device
    # waits for a tenth of a percent of a step or more.
    "v5p": _COMPUTATION | {"all-reduce"},
    "v6e": _COMPUTATION | {"all-reduce", "all-gather", "all-to-all"},
    "7x": _COMPUTATION | {"all-reduce", "all-gather"},
    # benchmarks/inspect_h200.py, on a single GPU.
    "H200": _COMPUTATION,
}
"""The kinds that were measured on each chip. A chip that is missing was never measured."""

MIN_ITERATIONS = 8
MAX_ITERATION_SECONDS = 100e-6
"""The bounds of a loop of small steps. The iterations of measured loops, the layers of a model,
take milliseconds. In shorter ones the time between operations decides, which depends on the way in
which a compiler runs the loop."""

_OPCODES = {
    "dot": "matmul",
    "ragged-dot": "matmul",
    "scaled-dot": "matmul",
    "reduce": "reduction",
    "reduce-window": "window reduction",
    "select-and-scatter": "window reduction",
    "rng-bit-generator": "rng",
    "rng": "rng",
    "rng-get-and-update-state": "rng",
    "triangular-solve": "factorization",
    "cholesky": "factorization",
    **dict.fromkeys(ELEMENTWISE | {"map"}, "elementwise"),
    **dict.fromkeys(DATA_MOVEMENT | {"dynamic-update-slice"}, "data movement"),
}
"""The kinds of opcodes. The others are kinds of their own, such as `sort`, `scatter` and `fft`."""
_LIBRARY = (
    (re.compile(r"fmha"), ATTENTION),
    (re.compile(r"conv"), "convolution"),
    (re.compile(r"gemm|matmul"), "matmul"),
    (re.compile(r"sort"), "sort"),
    (re.compile(r"topk", re.IGNORECASE), "top-k"),
    (re.compile(r"fft"), "fft"),
    (re.compile(r"threefry|rng|philox", re.IGNORECASE), "rng"),
    (re.compile(r"lapack|cusolver|cholesky|eigh|qr", re.IGNORECASE), "factorization"),
)
"""The kinds of the targets of custom calls. All others are of the kind `custom call`."""
_COMMON = ("data movement", "elementwise", "reduction")
"""The kinds that other operations of the same size take precedence over, least important first."""
_RANDOM = re.compile(
    r"random_bits|threefry|rng_bit_generator"
    r"|jit\(_(?:bernoulli|gumbel|normal|normal_real|randint|shuffle|truncated_normal|uniform)\)"
)
"""The names of the operations of JAX's random numbers, which compilers make of simple ones."""


def operation_kind(
    instructions: list[Instruction], computation: Computation, module: Module, scope: str
) -> str:
    """Return the kind of the largest operation of a kernel; of a matmul, if it has one.

    `scope` is the name of a handwritten kernel, or empty.
    """
    if "attention" in scope:
        return ATTENTION
    sizes: dict[str, float] = {}
    for instruction in instructions:
        _add_sizes(instruction, computation, module, sizes)
    for kind in ("convolution", "matmul", ATTENTION):
        if kind in sizes:
            return kind

    def rank(kind: str) -> tuple[float, int]:
        return sizes[kind], _COMMON.index(kind) if kind in _COMMON else len(_COMMON)

    return max(sizes, key=rank, default="elementwise")


def _add_sizes(
    instruction: Instruction, computation: Computation, module: Module, sizes: dict[str, float]
) -> None:
    """Add the elements that an instruction works on to `sizes`, by kind; the largest counts."""
    opcode = instruction.opcode
    if opcode == "fusion":
        fused = module.fused_computation(instruction)
        for inner in fused.instructions if fused else ():
            _add_sizes(inner, fused or computation, module, sizes)
        return
    if opcode in ("parameter", "constant", "tuple", "get-tuple-element"):
        return
    elements = max((array.elements for array in instruction.shape.arrays()), default=0)
    if opcode in ("reduce", "reduce-window", "select-and-scatter", "scatter", "sort"):
        # A scatter works on its updates, the last operand, and the others on what they read.
        operand = computation.by_name.get(instruction.operands[-1 if opcode == "scatter" else 0])
        elements = operand.shape.elements if operand is not None else elements
    kind = _instruction_kind(instruction, computation)
    sizes[kind] = max(sizes.get(kind, 0.0), float(elements))


def _instruction_kind(instruction: Instruction, computation: Computation) -> str:
    opcode = instruction.opcode
    if opcode == "convolution":
        return "convolution" if convolves(instruction, computation) else "matmul"
    if opcode == "custom-call":
        target = instruction.attributes.get("custom_call_target", "")
        matches = (kind for pattern, kind in _LIBRARY if pattern.search(target))
        return next(matches, "custom call")
    kind = _OPCODES.get(opcode, opcode)
    if kind in _COMMON and _RANDOM.search(instruction.location.op_name):
        return "rng"
    return kind
