"""What an instruction has to do: multiplications, elementwise operations, bytes to move."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil, log2, prod

from drumline.inspect.cost.machines import Constants
from drumline.inspect.hlo.text import Computation, Instruction, Module, Shape

# Operations whose units multiply in float32 do so in several passes of bfloat16, or slower units.
_EIGHT_BITS = {"s8", "u8", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e4m3fnuz", "f8e5m2fnuz", "s4", "u4"}
_COSTLY = {
    "exponential": 8, "log": 8, "tanh": 12, "logistic": 12, "power": 16, "rsqrt": 6, "sqrt": 6,
    "divide": 6, "sine": 20, "cosine": 20, "erf": 12, "exponential-minus-one": 10,
    "log-plus-one": 10, "cbrt": 10, "atan2": 20, "remainder": 8, "tan": 20,
}  # fmt: skip
_SIMPLE = {
    "add", "subtract", "multiply", "maximum", "minimum", "negate", "abs", "select", "compare",
    "and", "or", "xor", "not", "convert", "clamp", "sign", "floor", "ceil", "round-nearest-even",
    "round-nearest-afz", "is-finite", "shift-left", "shift-right-logical", "shift-right-arithmetic",
    "reduce-precision", "popcnt", "count-leading-zeros", "real", "imag", "complex", "map",
    "stochastic-convert",
}  # fmt: skip
ELEMENTWISE = _SIMPLE | set(_COSTLY)
MOVES = {
    "broadcast", "reshape", "transpose", "slice", "dynamic-slice", "pad", "concatenate", "reverse",
    "iota", "bitcast", "copy", "bitcast-convert",
}  # fmt: skip


@dataclass(frozen=True)
class MatrixProduct:
    """A matrix product: B times (M×K)·(K×N)."""

    batch: int
    rows: int
    inner: int
    columns: int
    dtype: str
    passes: float = 1.0
    """How often the unit goes over it: several times for more precision than its own."""
    fused_attention: bool = False

    @property
    def flops(self) -> float:
        """A multiplication and an addition for each of B·M·K·N."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns

    def padded_flops(self, constants: Constants) -> float:
        """What the unit does: whole tiles, with the operands either way round."""

        def pad(value: int, side: int) -> int:
            return ceil(value / side) * side

        # A device's unit holds a tile of one operand, and the rows of the other pass through it.
        ways = (
            (self.inner, self.columns, self.rows),
            (self.inner, self.rows, self.columns),
            (self.rows, self.columns, self.inner),
        )
        tile, rows = constants.tile, constants.rows
        least = min(pad(a, tile) * pad(b, tile) * pad(c, rows) for a, b, c in ways)
        return 2.0 * self.batch * least

    def peak_of_type(self) -> float:
        """The peak for its type, relative to bfloat16."""
        return 2.0 if self.dtype in _EIGHT_BITS else 1.0

    def speed(self, constants: Constants) -> float:
        """Relative to a plain product of bfloat16."""
        kind = self.peak_of_type()
        if self.dtype in ("f32", "s32"):
            kind = constants.float32
        if self.fused_attention:
            kind *= constants.attention
        return kind / self.passes


@dataclass(frozen=True)
class Work:
    """What one operation has to do."""

    products: tuple[MatrixProduct, ...] = ()
    vector: float = 0.0
    """Elementwise operations, the costly ones counted as several."""
    read: float = 0.0
    written: float = 0.0

    @property
    def flops(self) -> float:
        """Of the products alone, as MFU counts them."""
        return sum(product.flops for product in self.products)

    @property
    def moved(self) -> float:
        """Bytes to and from memory."""
        return self.read + self.written

    def __add__(self, other: Work) -> Work:
        """Both."""
        return Work(
            self.products + other.products,
            self.vector + other.vector,
            self.read + other.read,
            self.written + other.written,
        )

    def scaled(self, part: float) -> Work:
        """A part of the products and of the elementwise operations, all of the bytes."""
        products = tuple(replace(p, columns=max(1, round(p.columns * part))) for p in self.products)
        return Work(products, self.vector * part, self.read, self.written)


NOTHING = Work()


def arithmetic(instruction: Instruction, within: Computation, module: Module) -> Work:
    """Products and elementwise operations, without bytes; a fusion's are those within it."""
    opcode = instruction.opcode
    if opcode == "fusion":
        inner = module.computations.get((instruction.called().get("calls") or ("",))[0])
        if inner is None:
            return NOTHING
        parts = (arithmetic(one, inner, module) for one in inner.instructions)
        return reduce(Work.__add__, parts, NOTHING)
    if opcode in ("dot", "ragged-dot", "scaled-dot"):
        return Work(products=(_dot(instruction, within),))
    if opcode == "convolution":
        return Work(products=(_convolution(instruction, within),))
    if opcode == "custom-call":
        return Work(products=tuple(_library(instruction, within)))
    if opcode in ELEMENTWISE:
        return Work(vector=instruction.shape.elements * float(_COSTLY.get(opcode, 1)))
    if opcode in ("reduce", "reduce-window", "select-and-scatter", "scatter"):
        return Work(vector=float(sum(shape.elements for shape in _taken(instruction, within))))
    if opcode == "sort":
        count = max((shape.elements for shape in _taken(instruction, within)), default=0)
        along = max((dim for shape in _taken(instruction, within) for dim in shape.dims), default=1)
        return Work(vector=count * max(1.0, log2(max(along, 2)) ** 2 / 2))
    return NOTHING


def _taken(instruction: Instruction, within: Computation) -> list[Shape]:
    return [within.by_name[name].shape for name in instruction.operands if name in within.by_name]


def _dot(instruction: Instruction, within: Computation) -> MatrixProduct:
    left = _taken(instruction, within)[0]
    inner = prod(left.dims[at] for at in instruction.numbers("lhs_contracting_dims"))
    batch = prod(left.dims[at] for at in instruction.numbers("lhs_batch_dims"))
    product = _product(left, instruction.shape.elements, inner, batch)
    if left.dtype != "f32":
        return product
    asked = instruction.attributes.get("operand_precision", "")
    return replace(product, passes=6.0 if "highest" in asked else 3.0 if "high" in asked else 1.0)


def _product(left: Shape, outputs: int, inner: int, batch: int) -> MatrixProduct:
    rows = max(1, left.elements // max(1, inner * batch))
    return MatrixProduct(batch, rows, inner, max(1, outputs // max(1, rows * batch)), left.dtype)


def _convolution(instruction: Instruction, within: Computation) -> MatrixProduct:
    """As a product: every output is a sum over the kernel's window and its input features."""
    left, kernel = _taken(instruction, within)[:2]
    labels = instruction.attributes.get("dim_labels", "")
    inside = re.search(r"_([\w?]+)->", labels)
    at = inside[1].find("o") if inside else len(kernel.dims) - 1
    features = kernel.dims[at] if 0 <= at < len(kernel.dims) else 1
    inner = max(1, round(kernel.elements // max(1, features) * _met(instruction, left)))
    outputs = _result(instruction.shape).elements
    return MatrixProduct(1, max(1, outputs // max(1, features)), inner, features, left.dtype)


def _met(instruction: Instruction, left: Shape) -> float:
    """The share of a convolution's window that meets its input, where that is less than half.

    A TPU's compiler writes products over several dimensions, such as heads, as convolutions that
    are padded so far that a sixteenth of the window, say, meets anything. The padding of ordinary
    convolutions counts as input, as everybody counts it.
    """
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", instruction.attributes.get("window", "")))
    labels = instruction.attributes.get("dim_labels", "").partition("_")[0]
    share = 1.0
    for number, size in enumerate(window.get("size", "").split("x")):
        at = labels.find(str(number))
        if not size or not 0 <= at < len(left.dims):
            continue

        def told(name: str, usual: str, number: int = number) -> str:
            return window[name].split("x")[number] if name in window else usual

        low, high = (int(side) for side in told("pad", "0_0").split("_"))
        steps = (int(told(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        share *= _met_along(left.dims[at], int(size), low, high, *steps)
    return share if share < 0.5 else 1.0


def _met_along(
    length: int, size: int, low: int, high: int, stride: int, spread: int, apart: int
) -> float:
    """The same along one dimension, of an input whose elements lie `spread` apart."""
    reach = (length - 1) * spread + 1
    outputs = (reach + low + high - (size - 1) * apart - 1) // stride + 1
    met = 0
    for tap in range(size):
        first = tap * apart - low
        skipped = max(0, -(first // stride))
        inside = range(first + skipped * stride, min(reach, first + outputs * stride), stride)
        # Of places that follow one another, the same part of every `spread` is an element's.
        whole, rest = divmod(len(inside), spread)
        hits = [place % spread == 0 for place in inside[:spread]]
        met += whole * sum(hits) + sum(hits[:rest])
    return met / max(1, outputs * size)


def _result(shape: Shape) -> Shape:
    """The first array: a library's call gives its scratch memory too."""
    return next(shape.arrays(), shape)


_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_BATCH = re.compile(r'"lhs_batch_dimensions":\[([^\]]*)\]')


def _library(instruction: Instruction, within: Computation) -> Iterator[MatrixProduct]:
    """The products of a call into a GPU's libraries."""
    target = instruction.attributes.get("custom_call_target", "")
    taken = _taken(instruction, within)
    if "gemm" in target or "matmul" in target:
        left = taken[0]
        contracting = _CONTRACTING.search(instruction.rest)
        batched = _BATCH.search(instruction.rest)
        inner = prod(
            left.dims[int(n)] for n in re.findall(r"\d+", contracting[1] if contracting else "")
        )
        batch = prod(left.dims[int(n)] for n in re.findall(r"\d+", batched[1] if batched else ""))
        yield _product(left, _result(instruction.shape).elements, inner, batch)
    elif "fmha" in target and len(taken) >= 3:
        yield from _attention(target, instruction, taken)
    elif "conv" in target and len(taken) >= 2:
        yield _convolution(instruction, within)


def _attention(
    target: str, instruction: Instruction, taken: list[Shape]
) -> Iterator[MatrixProduct]:
    """Fused attention of query, key and value in the order batch, length, heads, features."""
    query, key = taken[0], taken[1]
    if len(query.dims) != 4:
        return
    # cuDNN's layout is written into the call; batch·heads·length² are the same in either order.
    lengths = sorted(query.dims[1:3], reverse=True)
    keys = max(key.dims[1:3])
    batch, features = query.dims[0] * lengths[1], query.dims[3]
    causal = "CAUSAL" in instruction.rest.upper()
    rows = max(1, lengths[0] // 2) if causal else lengths[0]
    # Forward: scores and values. Backward: those again, and one for each of three gradients.
    for _ in range(5 if "backward" in target.lower() else 2):
        yield MatrixProduct(batch, rows, features, keys, query.dtype, fused_attention=True)


def traffic(instruction: Instruction, within: Computation, module: Module) -> Work:
    """Bytes read and written by an instruction that stands alone, such as a compiled fusion."""
    opcode = instruction.opcode
    if opcode in ("dynamic-update-slice", "scatter"):
        update = _taken(instruction, within)[1 if opcode == "dynamic-update-slice" else -1]
        return Work(read=update.bytes, written=update.bytes)
    if opcode in ("dynamic-slice", "slice", "gather"):
        return Work(read=instruction.shape.bytes, written=instruction.shape.bytes)
    if opcode.endswith("-start"):
        # Its result names the source and the target: one of them is in HBM, or both.
        return Work(read=_in_memory(instruction.shape))
    if opcode == "fusion":
        inner = module.computations.get((instruction.called().get("calls") or ("",))[0])
        if inner is not None:
            return _fusion_traffic(instruction, within, inner, module)
    read = sum(_in_memory(shape) for shape in _taken(instruction, within))
    return Work(read=read, written=_in_memory(instruction.shape))


def _in_memory(shape: Shape) -> float:
    """Bytes in HBM: what the compiler placed elsewhere costs none of its bandwidth."""
    return float(sum(array.bytes for array in shape.arrays() if array.memory == 0))


def _fusion_traffic(
    instruction: Instruction, within: Computation, inner: Computation, module: Module
) -> Work:
    read = 0.0
    for number, shape in enumerate(_taken(instruction, within)):
        parameter = inner.parameters.get(number)
        users = inner.users.get(parameter.name, ()) if parameter is not None else ()
        read += _read_by(parameter, users, shape, inner, module)
    return Work(read=read, written=_written_by(inner, instruction.shape))


def _read_by(
    parameter: Instruction | None,
    users: tuple[Instruction, ...],
    shape: Shape,
    inner: Computation,
    module: Module,
) -> float:
    """A fusion reads what its slices take of an operand, and none of what it updates in place."""
    whole = _in_memory(shape)
    if parameter is None or not users or not whole:
        return whole
    total = 0.0
    for user in users:
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            total += user.shape.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[:1] == (parameter.name,):
            continue
        elif user.opcode == "bitcast":
            total += _read_by(user, inner.users.get(user.name, ()), user.shape, inner, module)
        elif user.opcode == "fusion":
            nested = module.computations.get((user.called().get("calls") or ("",))[0])
            at = user.operands.index(parameter.name)
            within = nested.parameters.get(at) if nested is not None else None
            if nested is None or within is None:
                return whole
            total += _read_by(within, nested.users.get(within.name, ()), shape, nested, module)
        else:
            return whole
    return min(whole, total)


def _written_by(inner: Computation, shape: Shape) -> float:
    """What a fusion writes: of a value that it updates in place, the update."""
    root = inner.root
    roots = [inner.by_name[n] for n in root.operands] if root.opcode == "tuple" else [root]
    total = 0.0
    for value, array in zip(roots, shape.parts if shape.is_tuple else (shape,), strict=False):
        while value.opcode in ("bitcast", "copy") and value.operands[0] in inner.by_name:
            value = inner.by_name[value.operands[0]]
        if value.opcode == "dynamic-update-slice":
            total += inner.by_name[value.operands[1]].shape.bytes
        else:
            total += _in_memory(array)
    return total
