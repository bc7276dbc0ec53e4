"""The reference: a function's operations in float64, one by one, without a rounding in between.

Inputs and constants are taken as they are, so the reference has the function's own numbers in
exact-looking arithmetic. Every float is widened, conversions between floats are left out, and loops
are traced again with their bodies widened. It runs on the CPU: a TPU has no float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from drumline.numerics.rounding.last_places import as_numpy
from drumline.numerics.rounding.operations import TracedFunction, closed_jaxpr, flatten

_ROUNDINGS = ("convert_element_type", "reduce_precision")
_OPAQUE = ("custom_call", "ffi_call", "io_callback", "pallas_call", "pure_callback")
"""Operations whose inside JAX cannot trace again."""


class NotWidened(Exception):
    """Its text says which operation cannot be computed in float64."""


def reference(program: TracedFunction) -> list[np.ndarray]:
    """The outputs in float64; those that are no floats are what follows from such floats.

    Raises:
        NotWidened: an operation cannot be computed in float64.
    """
    with jax.enable_x64(True), _on_the_cpu():
        inputs = [_host(value) for value in program.inputs]
        jaxpr, constants = program.flat.jaxpr, [_host(value) for value in program.flat.consts]
        known = _start(jaxpr, constants, inputs)
        for index, equation in enumerate(jaxpr.eqns):
            try:
                _step(equation, known)
            except Exception as trouble:  # from any primitive, of JAX's or not
                operation = program.operation(index)
                where = f" at {operation.place}" if operation.place else ""
                raise NotWidened(
                    f"{operation.primitive}{where} cannot be computed in float64"
                ) from trouble
        return [as_numpy(_read(atom, known)) for atom in jaxpr.outvars]


def _on_the_cpu() -> Any:
    """Whatever runs inside runs on the CPU, where there is one."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return nullcontext()


def _host(value: Any) -> Any:
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value if is_key else np.asarray(value)


def _start(jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any]) -> dict[Any, Any]:
    variables = [*jaxpr.constvars, *jaxpr.invars]
    return {var: _widen(value) for var, value in zip(variables, [*constants, *inputs], strict=True)}


def _read(atom: Any, known: dict[Any, Any]) -> Any:
    if not isinstance(atom, jex.Literal):
        return known[atom]
    # As the function has it: rounded to its own dtype first.
    return _widen(np.asarray(atom.val, getattr(atom.aval, "dtype", None)))


def _step(equation: Any, known: dict[Any, Any]) -> None:
    """Compute one equation's results in float64, and keep them."""
    values = [_read(atom, known) for atom in equation.invars]
    name = equation.primitive.name
    floats = [_is_float(value.dtype) for value in values]
    if name in _ROUNDINGS and floats[0]:
        rounded = equation.outvars[0]
        if _wide(rounded.aval.dtype) == values[0].dtype:
            known[rounded] = values[0]
            return
    if name in _OPAQUE or (name == "bitcast_convert_type" and floats[0]):
        raise NotImplementedError(name)
    params = equation.params
    if name != "bitcast_convert_type":
        params = {key: _widened(value) for key, value in params.items()}
    takes = [jex.Var(atom.aval) for atom in equation.invars]
    alone = equation.replace(invars=takes, params=params)
    kept = [var for var in equation.outvars if not isinstance(var, jex.DropVar)]
    closed = closed_jaxpr([], takes, kept, [alone])
    results = jex.jaxpr_as_fun(closed)(*values)
    if any(floats) and any(_wide(value.dtype) != value.dtype for value in results):
        raise NotImplementedError(name)
    known.update(zip(kept, map(_widen, results), strict=True))


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _wide(dtype: Any) -> Any:
    """The widest float for a float of any width; another dtype as it is."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if _is_float(dtype) else dtype


def _widen(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return jnp.asarray(value.astype(_wide(value.dtype)))
    return value.astype(_wide(value.dtype)) if _is_float(value.dtype) else value


def _widened(value: Any) -> Any:
    """A parameter of an equation: a dtype, a loop's body, several of these, or anything else."""
    if isinstance(value, np.dtype):
        return _wide(value)
    if isinstance(value, jex.ClosedJaxpr):
        return _widened_body(value)
    if isinstance(value, jex.Jaxpr):
        return _widened_body(jex.ClosedJaxpr(value, [])).jaxpr
    if hasattr(value, "_make"):
        return value._make(map(_widened, value))
    if type(value) in (tuple, list):
        return type(value)(map(_widened, value))
    return value


def _widened_body(closed: Any) -> Any:
    flat, _ = flatten(closed)

    def body(*inputs: Any) -> list[Any]:
        known = _start(flat.jaxpr, flat.consts, inputs)
        for equation in flat.jaxpr.eqns:
            _step(equation, known)
        return [_read(atom, known) for atom in flat.jaxpr.outvars]

    shapes = [
        jax.ShapeDtypeStruct(aval.shape, _wide(aval.dtype))  # type: ignore[no-untyped-call]
        for aval in flat.in_avals
    ]
    return jax.make_jaxpr(body)(*shapes)
