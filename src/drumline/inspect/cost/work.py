"""The work of an instruction: its matmuls, elementwise operations and memory traffic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil, log2, prod

from drumline.chips import Chip
from drumline.inspect.cost.machines import ChipConstants, Machine
from drumline.inspect.hlo.text import BITS, Computation, Instruction, Module, Shape

_EXPENSIVE = {
    "exponential": 8, "log": 8, "tanh": 12, "logistic": 12, "power": 16, "rsqrt": 6, "sqrt": 6,
    "divide": 6, "sine": 20, "cosine": 20, "erf": 12, "exponential-minus-one": 10,
    "log-plus-one": 10, "cbrt": 10, "atan2": 20, "remainder": 8, "tan": 20,
}  # fmt: skip
"""Elementwise opcodes, and their equivalent numbers of simple operations."""
_SIMPLE = {
    "add", "subtract", "multiply", "maximum", "minimum", "negate", "abs", "select", "compare",
    "and", "or", "xor", "not", "convert", "clamp", "sign", "floor", "ceil", "round-nearest-even",
    "round-nearest-afz", "is-finite", "shift-left", "shift-right-logical", "shift-right-arithmetic",
    "reduce-precision", "popcnt", "count-leading-zeros", "real", "imag", "complex", "map",
    "stochastic-convert",
}  # fmt: skip
ELEMENTWISE = _SIMPLE | set(_EXPENSIVE)
DATA_MOVEMENT = {
    "broadcast", "reshape", "transpose", "slice", "dynamic-slice", "pad", "concatenate", "reverse",
    "iota", "bitcast", "copy", "bitcast-convert",
}  # fmt: skip


@dataclass(frozen=True)
class Matmul:
    """A batched matmul: `batch` times (rows × contraction)·(contraction × columns)."""

    batch: int
    rows: int
    contraction: int
    columns: int
    dtype: str
    passes: float = 1.0
    """The number of passes of the matrix unit, more than 1 for high precision."""
    fused_attention: bool = False

    @property
    def flops(self) -> float:
        """The multiplications and additions."""
        return 2.0 * self.batch * self.rows * self.contraction * self.columns

    def padded_flops(self, constants: ChipConstants) -> float:
        """Return the operations of the matrix unit, which works on whole tiles.

        The unit holds a tile of one operand, and the rows of the other operand pass through it. The
        compiler can choose the dimensions of the tile.
        """

        def pad(size: int, multiple: int) -> int:
            return ceil(size / multiple) * multiple

        orders = (
            (self.contraction, self.columns, self.rows),
            (self.contraction, self.rows, self.columns),
            (self.rows, self.columns, self.contraction),
        )
        tile, row_tile = constants.tile, constants.row_tile
        padded = min(pad(a, tile) * pad(b, tile) * pad(c, row_tile) for a, b, c in orders)
        return 2.0 * self.batch * padded

    def relative_peak(self, chip: Chip) -> float:
        """Return the peak for the dtype, relative to bfloat16."""
        return chip.peak_flops(self.dtype) / chip.peak_bf16_flops

    def speed(self, machine: Machine) -> float:
        """Return the speed relative to a plain bfloat16 matmul."""
        speed = self.relative_peak(machine.chip)
        if self.dtype in ("f32", "s32"):
            speed = machine.constants.float32_speed
        if self.fused_attention:
            speed *= machine.constants.attention_speed
        return speed / self.passes


@dataclass(frozen=True)
class Work:
    """The work of an operation."""

    matmuls: tuple[Matmul, ...] = ()
    vector_ops: float = 0.0
    """Elementwise operations, with a larger count for expensive operations."""
    bytes_read: float = 0.0
    bytes_written: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of the matmuls alone, as in MFU."""
        return sum(matmul.flops for matmul in self.matmuls)

    @property
    def bytes(self) -> float:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    def __add__(self, other: Work) -> Work:
        """Return the sum of both."""
        return Work(
            self.matmuls + other.matmuls,
            self.vector_ops + other.vector_ops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )

    def scale_compute(self, fraction: float) -> Work:
        """Return a fraction of the matmuls and elementwise operations, with all bytes."""
        matmuls = tuple(
            replace(matmul, columns=max(1, round(matmul.columns * fraction)))
            for matmul in self.matmuls
        )
        return Work(matmuls, self.vector_ops * fraction, self.bytes_read, self.bytes_written)


NO_WORK = Work()


def arithmetic_work(instruction: Instruction, computation: Computation, module: Module) -> Work:
    """Return the matmuls and elementwise operations, including those in a fusion, without bytes."""
    opcode = instruction.opcode
    if opcode == "fusion":
        fused = module.fused_computation(instruction)
        if fused is None:
            return NO_WORK
        works = (arithmetic_work(inner, fused, module) for inner in fused.instructions)
        return reduce(Work.__add__, works, NO_WORK)
    if opcode in ("dot", "ragged-dot", "scaled-dot"):
        return Work(matmuls=(_dot(instruction, computation),))
    if opcode == "convolution":
        return Work(matmuls=(_convolution(instruction, computation),))
    if opcode == "custom-call":
        return Work(matmuls=tuple(_library_call(instruction, computation)))
    if opcode in ELEMENTWISE:
        return Work(vector_ops=instruction.shape.elements * float(_EXPENSIVE.get(opcode, 1)))
    shapes = _operand_shapes(instruction, computation)
    if opcode in ("reduce", "reduce-window", "select-and-scatter", "scatter"):
        return Work(vector_ops=float(sum(shape.elements for shape in shapes)))
    if opcode == "sort":
        elements = max((shape.elements for shape in shapes), default=0)
        longest_dim = max((dim for shape in shapes for dim in shape.dims), default=1)
        return Work(vector_ops=elements * max(1.0, log2(max(longest_dim, 2)) ** 2 / 2))
    return NO_WORK


def _operand_shapes(instruction: Instruction, computation: Computation) -> list[Shape]:
    by_name = computation.by_name
    return [by_name[name].shape for name in instruction.operands if name in by_name]


def _dot(instruction: Instruction, computation: Computation) -> Matmul:
    lhs, *others = _operand_shapes(instruction, computation)
    contraction = prod(lhs.dims[dim] for dim in instruction.integers("lhs_contracting_dims"))
    batch = prod(lhs.dims[dim] for dim in instruction.integers("lhs_batch_dims"))
    matmul = _matmul(lhs, instruction.shape.elements, contraction, batch)
    # A matmul of two types is computed in the wider one.
    dtypes = [lhs.dtype, *(rhs.dtype for rhs in others[:1])]
    matmul = replace(matmul, dtype=max(dtypes, key=lambda dtype: BITS.get(dtype, 32)))
    if matmul.dtype != "f32":
        return matmul
    precision = instruction.attributes.get("operand_precision", "")
    passes = 6.0 if "highest" in precision else 3.0 if "high" in precision else 1.0
    return replace(matmul, passes=passes)


def _matmul(lhs: Shape, outputs: int, contraction: int, batch: int) -> Matmul:
    rows = max(1, lhs.elements // max(1, contraction * batch))
    columns = max(1, outputs // max(1, rows * batch))
    return Matmul(batch, rows, contraction, columns, lhs.dtype)


def _convolution(instruction: Instruction, computation: Computation) -> Matmul:
    """Describe a convolution as a matmul that contracts the window and the input features."""
    lhs, kernel = _operand_shapes(instruction, computation)[:2]
    labels = instruction.attributes.get("dim_labels", "")
    kernel_labels = re.search(r"_([\w?]+)->", labels)
    output_dim = kernel_labels[1].find("o") if kernel_labels else len(kernel.dims) - 1
    features = kernel.dims[output_dim] if 0 <= output_dim < len(kernel.dims) else 1
    overlap = _window_overlap(instruction, lhs)
    contraction = max(1, round(kernel.elements // max(1, features) * overlap))
    outputs = _first_array(instruction.shape).elements
    return Matmul(1, max(1, outputs // max(1, features)), contraction, features, lhs.dtype)


def convolves(instruction: Instruction, computation: Computation) -> bool:
    """Return True for a convolution with a window, False for a matmul in the form of one."""
    window = re.search(r"size=([\dx]+)", instruction.attributes.get("window", ""))
    positions = prod(int(size) for size in window[1].split("x")) if window else 1
    lhs = _operand_shapes(instruction, computation)[:1]
    return positions > 1 and bool(lhs) and _window_overlap(instruction, lhs[0]) == 1.0


def _window_overlap(instruction: Instruction, lhs: Shape) -> float:
    """Return the share of a convolution's window that covers input, or 1 if it is above a half.

    The TPU's compiler writes a matmul over several dimensions, such as heads, as a convolution with
    so much padding that, say, a sixteenth of the window covers input. The padding of ordinary
    convolutions counts as input, as is the convention.
    """
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", instruction.attributes.get("window", "")))
    labels = instruction.attributes.get("dim_labels", "").partition("_")[0]
    overlap = 1.0
    for index, size in enumerate(window.get("size", "").split("x")):
        dim = labels.find(str(index))
        if not size or not 0 <= dim < len(lhs.dims):
            continue

        def option(name: str, default: str, index: int = index) -> str:
            return window[name].split("x")[index] if name in window else default

        low, high = (int(side) for side in option("pad", "0_0").split("_"))
        steps = (int(option(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        overlap *= _dimension_overlap(lhs.dims[dim], int(size), low, high, *steps)
    return overlap if overlap < 0.5 else 1.0


def _dimension_overlap(
    length: int,
    window_size: int,
    pad_low: int,
    pad_high: int,
    stride: int,
    input_dilation: int,
    window_dilation: int,
) -> float:
    """Return the share of window positions on an input element, along one dimension."""
    extent = (length - 1) * input_dilation + 1
    outputs = (extent + pad_low + pad_high - (window_size - 1) * window_dilation - 1) // stride + 1
    covered = 0
    for tap in range(window_size):
        first = tap * window_dilation - pad_low
        skipped = max(0, -(first // stride))
        positions = range(first + skipped * stride, min(extent, first + outputs * stride), stride)
        # All runs of `input_dilation` positions cover the same number of elements.
        runs, remainder = divmod(len(positions), input_dilation)
        hits = [position % input_dilation == 0 for position in positions[:input_dilation]]
        covered += runs * sum(hits) + sum(hits[:remainder])
    return covered / max(1, outputs * window_size)


def _first_array(shape: Shape) -> Shape:
    """Return the first array of a result. A library call also returns its scratch memory."""
    return next(shape.arrays(), shape)


_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_BATCH = re.compile(r'"lhs_batch_dimensions":\[([^\]]*)\]')


def _library_call(instruction: Instruction, computation: Computation) -> Iterator[Matmul]:
    """Yield the matmuls of a call to a GPU library."""
    target = instruction.attributes.get("custom_call_target", "")
    operands = _operand_shapes(instruction, computation)
    if "gemm" in target or "matmul" in target:
        lhs = operands[0]
        text = instruction.attribute_text
        contraction, batch = (
            prod(lhs.dims[int(dim)] for dim in re.findall(r"\d+", match[1] if match else ""))
            for match in (_CONTRACTING.search(text), _BATCH.search(text))
        )
        yield _matmul(lhs, _first_array(instruction.shape).elements, contraction, batch)
    elif "fmha" in target and len(operands) >= 3:
        yield from _attention(target, instruction, operands)
    elif "conv" in target and len(operands) >= 2:
        yield _convolution(instruction, computation)


def _attention(target: str, instruction: Instruction, operands: list[Shape]) -> Iterator[Matmul]:
    """Yield the matmuls of fused attention with four-dimensional query and key."""
    query, key = operands[0], operands[1]
    if len(query.dims) != 4:
        return
    # The order of length and heads differs between layouts. batch·heads·length² does not.
    lengths = sorted(query.dims[1:3], reverse=True)
    keys = max(key.dims[1:3])
    batch, features = query.dims[0] * lengths[1], query.dims[3]
    causal = "CAUSAL" in instruction.attribute_text.upper()
    rows = max(1, lengths[0] // 2) if causal else lengths[0]
    # Forward: scores and values. Backward: both again, and three gradients.
    for _ in range(5 if "backward" in target.lower() else 2):
        yield Matmul(batch, rows, features, keys, query.dtype, fused_attention=True)


def memory_traffic(instruction: Instruction, computation: Computation, module: Module) -> Work:
    """Return the bytes that an instruction outside any fusion reads and writes."""
    opcode = instruction.opcode
    operands = _operand_shapes(instruction, computation)
    if opcode in ("dynamic-update-slice", "scatter"):
        update = operands[1 if opcode == "dynamic-update-slice" else -1]
        return Work(bytes_read=update.bytes, bytes_written=update.bytes)
    if opcode in ("dynamic-slice", "slice", "gather"):
        return Work(bytes_read=instruction.shape.bytes, bytes_written=instruction.shape.bytes)
    if opcode.endswith("-start"):
        # The result of a start includes source and target, at least one of them in HBM.
        return Work(bytes_read=_hbm_bytes(instruction.shape))
    if opcode == "fusion":
        fused = module.fused_computation(instruction)
        if fused is not None:
            return _fusion_traffic(instruction, operands, fused, module)
    bytes_read = sum(_hbm_bytes(shape) for shape in operands)
    return Work(bytes_read=bytes_read, bytes_written=_hbm_bytes(instruction.shape))


def _hbm_bytes(shape: Shape) -> float:
    """Return the bytes in HBM, without arrays in other memories."""
    return float(sum(array.bytes for array in shape.arrays() if array.memory_space == 0))


def _fusion_traffic(
    instruction: Instruction, operands: list[Shape], fused: Computation, module: Module
) -> Work:
    bytes_read = 0.0
    for index, shape in enumerate(operands):
        parameter = fused.parameters.get(index)
        users = fused.users.get(parameter.name, ()) if parameter is not None else ()
        bytes_read += _parameter_bytes(parameter, users, shape, fused, module)
    return Work(bytes_read=bytes_read, bytes_written=_result_bytes(fused, instruction.shape))


def _parameter_bytes(
    parameter: Instruction | None,
    users: tuple[Instruction, ...],
    shape: Shape,
    fused: Computation,
    module: Module,
) -> float:
    """Return the bytes that a fusion reads of an operand.

    It reads only the slices that it uses, and nothing of an operand that it updates in place.
    """
    operand_bytes = _hbm_bytes(shape)
    if parameter is None or not users or not operand_bytes:
        return operand_bytes
    total = 0.0
    for user in users:
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            total += user.shape.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[:1] == (parameter.name,):
            continue
        elif user.opcode == "bitcast":
            view_users = fused.users.get(user.name, ())
            total += _parameter_bytes(user, view_users, user.shape, fused, module)
        elif user.opcode == "fusion":
            nested = module.fused_computation(user)
            index = user.operands.index(parameter.name)
            inner = nested.parameters.get(index) if nested is not None else None
            if nested is None or inner is None:
                return operand_bytes
            inner_users = nested.users.get(inner.name, ())
            total += _parameter_bytes(inner, inner_users, shape, nested, module)
        else:
            return operand_bytes
    return min(operand_bytes, total)


def _result_bytes(fused: Computation, shape: Shape) -> float:
    """Return the bytes that a fusion writes, which is only the update for an update in place."""
    root = fused.root
    values = [fused.by_name[n] for n in root.operands] if root.opcode == "tuple" else [root]
    total = 0.0
    for value, array in zip(values, shape.components if shape.is_tuple else (shape,), strict=False):
        while value.opcode in ("bitcast", "copy") and value.operands[0] in fused.by_name:
            value = fused.by_name[value.operands[0]]
        if value.opcode == "dynamic-update-slice":
            total += fused.by_name[value.operands[1]].shape.bytes
        else:
            total += _hbm_bytes(array)
    return total
