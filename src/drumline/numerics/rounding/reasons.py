"""Why an operation gives other numbers when it is run in another way, from what is seen of it.

The compiler does not say what it did. What is known is the operation, what made its operands, and
which liberty was taken away: that leaves one likely reason, told in one sentence.
"""

from __future__ import annotations

import jax.numpy as jnp

from drumline.numerics.rounding.operations import SourceLine, TracedFunction
from drumline.numerics.rounding.variants import Way

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_SUMS = (*PRODUCTS, "reduce_sum", "cumsum", "cumlogsumexp", "reduce_prod", "cumprod", "scatter-add")
_LOOPS = ("scan", "while", "cond", "shard_map")
_SHAPES = (
    "broadcast_in_dim",
    "copy",
    "expand_dims",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
)
"""Operations that give the same numbers in another shape."""
_KEPT = ("concatenate", "dynamic_slice", "gather", "optimization_barrier", "sort", "top_k")
"""Operations that read their operand from memory, where it lies rounded."""
_APPROXIMATED = (
    "cos",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "logistic",
    "pow",
    "rsqrt",
    "sin",
    "sqrt",
    "tan",
    "tanh",
)


def why(program: TracedFunction, index: int, way: Way, excess: bool) -> str:
    """One sentence on why this operation differs; `excess`: it agrees without excess precision."""
    name = _name(program, index)
    if way is Way.HIGHEST:
        return _why_with_highest(name)
    if way is Way.NO_EXCESS or excess:
        return _why_with_excess(program, index, name)
    return _why_fused(program, index, name)


def _why_with_highest(name: str) -> str:
    if name in PRODUCTS:
        return (
            "a matmul at default precision: its float32 operands are rounded before they are "
            "multiplied"
        )
    if name in _LOOPS:
        return "a matmul inside it runs at default precision"
    return "compiled anew around matmuls of another precision, it was fused otherwise"


def _why_with_excess(program: TracedFunction, index: int, name: str) -> str:
    rounded = _roundings(program, index)
    if rounded:
        dtype = rounded[0][0]
        lines = sorted({str(place) for _, place in rounded if place is not None})
        where = f"the rounding at {' or '.join(lines)}" if lines else "its rounding"
        return (
            f"its {dtype} operand was kept in float32 by the compiler (excess precision): "
            f"{where} never happened"
        )
    if name in _LOOPS:
        return "inside it, values were kept in float32 by the compiler (excess precision)"
    return "the compiler computed it in float32 throughout (excess precision)"


def _roundings(program: TracedFunction, index: int) -> list[tuple[str, SourceLine | None]]:
    """Dtype and place of each operand of 16 bits or less that another operation has rounded.

    Those that lie in memory, from a gather or a sort, are named only where there are no others.
    """
    found = []
    for atom in program.flat.jaxpr.eqns[index].invars:
        dtype = getattr(atom.aval, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 2:
            continue
        maker = _maker_of_numbers(program, program.maker(atom))
        if maker is not None:
            found.append((maker, str(dtype)))
    computed = [pair for pair in found if _name(program, pair[0]) not in _KEPT]
    return [(dtype, program.places[maker]) for maker, dtype in computed or found]


def _maker_of_numbers(program: TracedFunction, maker: int | None) -> int | None:
    """The operation that computed these numbers, behind those that only changed their shape."""
    while maker is not None and _name(program, maker) in _SHAPES:
        maker = program.maker(program.flat.jaxpr.eqns[maker].invars[0])
    return maker


def _why_fused(program: TracedFunction, index: int, name: str) -> str:
    if name in _SUMS:
        return "a sum in another order: compiled with its neighbours, it adds in other groups"
    makers = (_maker_of_numbers(program, maker) for maker in program.operands(index))
    products = [m for m in makers if m is not None and _name(program, m) == "mul"]
    if name in ("add", "sub", "add_any") and products:
        place = program.places[products[0]]
        return (
            f"fused with the product at {place or 'another line'}: a multiply and an add became "
            "one rounding"
        )
    if name in _APPROXIMATED:
        return f"fused with its neighbours: the multiplies and adds of {name} round otherwise"
    if name in _LOOPS:
        return "inside it, operations are fused otherwise than in the whole program"
    return "the compiler rewrote it together with its neighbours"


def _name(program: TracedFunction, index: int) -> str:
    return str(program.flat.jaxpr.eqns[index].primitive.name)
