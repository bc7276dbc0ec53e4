"""Run a traced function in several modes, and in float64 as a reference.

The first mode is the function as `jax.jit` compiles it. The other modes each take one freedom from
the compiler: to keep bfloat16 values in float32, to round the operands of a matmul, to fuse.

The reference runs the operations in float64, one by one, with the function's own inputs and
constants. It converts all floats to float64, leaves out conversions between floats, and traces
loops again with converted bodies. It runs on the CPU, because a TPU has no float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from drumline.numerics.rounding.differences import to_host
from drumline.numerics.rounding.tracing import (
    TracedFunction,
    inline_calls,
    make_closed_jaxpr,
    trace,
)

EXCESS_PRECISION = "xla_allow_excess_precision"


class ExecutionMode(Enum):
    """A mode to run a function in. The value is its name in reports."""

    AS_COMPILED = "as compiled"
    NO_EXCESS = "no excess precision"
    HIGHEST = "highest matmul precision"
    OP_BY_OP = "op by op"


@dataclass(frozen=True)
class ProgramInMode:
    """A traced function and the mode to run it in."""

    mode: ExecutionMode
    program: TracedFunction

    def outputs(self) -> list[np.ndarray]:
        """Return the outputs of the function, leaf by leaf."""
        return self._run(self.program.closed_jaxpr)

    def results(self, index: int) -> list[np.ndarray]:
        """Return the results of an operation, from a program that ends with it."""
        return self._run(self.program.program_until(index))

    def _run(self, closed_jaxpr: Any) -> list[np.ndarray]:
        function = jex.jaxpr_as_fun(closed_jaxpr)
        if self.mode is not ExecutionMode.OP_BY_OP:
            options = dict(self.program.compiler_options)
            if self.mode is ExecutionMode.NO_EXCESS:
                options[EXCESS_PRECISION] = False
            function = jax.jit(function, compiler_options=options or None)
        # Without `jit`, equations are compiled and run separately.
        return [to_host(value) for value in function(*self.program.inputs)]


def all_executions(function: Callable[..., Any], inputs: Sequence[Any]) -> list[ProgramInMode]:
    """Return the executions of a function in all modes, starting with AS_COMPILED.

    The mode HIGHEST is omitted if it changes the operations of the function.
    """
    program = trace(function, inputs)
    # JAX sets the precision of a matmul during tracing.
    with jax.default_matmul_precision("highest"):
        highest = trace(function, inputs)
    return [
        ProgramInMode(mode, highest if mode is ExecutionMode.HIGHEST else program)
        for mode in ExecutionMode
        if mode is not ExecutionMode.HIGHEST or _primitives(program) == _primitives(highest)
    ]


def _primitives(program: TracedFunction) -> list[str]:
    return [equation.primitive.name for equation in program.equations]


# ---- The reference in float64 ------------------------------------------------------------------

_ROUNDINGS = ("convert_element_type", "reduce_precision")
_OPAQUE = ("custom_call", "ffi_call", "io_callback", "pallas_call", "pure_callback")
"""Operations that JAX cannot trace again in float64."""


class Float64Unavailable(Exception):
    """An operation cannot be computed in float64. The text names it."""


def run_in_float64(program: TracedFunction) -> list[np.ndarray]:
    """Return the outputs in float64. Outputs that are not floats are computed from such floats.

    Raises:
        Float64Unavailable: An operation cannot be computed in float64.
    """
    with jax.enable_x64(True), _on_cpu():
        inputs = [_move_to_host(value) for value in program.inputs]
        jaxpr = program.closed_jaxpr.jaxpr
        constants = [_move_to_host(value) for value in program.closed_jaxpr.consts]
        env = _initial_env(jaxpr, constants, inputs)
        for index, equation in enumerate(jaxpr.eqns):
            try:
                _evaluate(equation, env)
            except Exception as error:  # any primitive, also of another package, may raise anything
                operation = program.operation(index)
                source = f" at {operation.source}" if operation.source else ""
                raise Float64Unavailable(
                    f"{operation.primitive}{source} cannot be computed in float64"
                ) from error
        return [to_host(_read(atom, env)) for atom in jaxpr.outvars]


def _on_cpu() -> Any:
    """Return a context that runs on the CPU, if JAX has one."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return nullcontext()


def _move_to_host(value: Any) -> Any:
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value if is_key else np.asarray(value)


def _initial_env(jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any]) -> dict[Any, Any]:
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values = [*constants, *inputs]
    return {var: _to_float64(value) for var, value in zip(variables, values, strict=True)}


def _read(atom: Any, env: dict[Any, Any]) -> Any:
    if not isinstance(atom, jex.Literal):
        return env[atom]
    # Round a literal to its dtype, as in the function.
    return _to_float64(np.asarray(atom.val, getattr(atom.aval, "dtype", None)))


def _evaluate(equation: Any, env: dict[Any, Any]) -> None:
    """Compute the results of an equation in float64 and add them to `env`."""
    operands = [_read(atom, env) for atom in equation.invars]
    name = equation.primitive.name
    are_floats = [_is_inexact(operand.dtype) for operand in operands]
    if name in _ROUNDINGS and are_floats[0]:
        rounded = equation.outvars[0]
        if _float64_dtype(rounded.aval.dtype) == operands[0].dtype:
            env[rounded] = operands[0]
            return
    if name in _OPAQUE or (name == "bitcast_convert_type" and are_floats[0]):
        raise NotImplementedError(name)
    params = equation.params
    if name != "bitcast_convert_type":
        params = {key: _convert_param(value) for key, value in params.items()}
    variables = [jex.Var(atom.aval) for atom in equation.invars]
    converted = equation.replace(invars=variables, params=params)
    outputs = [var for var in equation.outvars if not isinstance(var, jex.DropVar)]
    closed_jaxpr = make_closed_jaxpr([], variables, outputs, [converted])
    results = jex.jaxpr_as_fun(closed_jaxpr)(*operands)
    if any(are_floats) and any(_float64_dtype(value.dtype) != value.dtype for value in results):
        raise NotImplementedError(name)
    env.update(zip(outputs, map(_to_float64, results), strict=True))


def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _float64_dtype(dtype: Any) -> Any:
    """Return float64 or complex128 for a floating-point dtype, and any other dtype unchanged."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if _is_inexact(dtype) else dtype


def _to_float64(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return jnp.asarray(value.astype(_float64_dtype(value.dtype)))
    return value.astype(_float64_dtype(value.dtype)) if _is_inexact(value.dtype) else value


def _convert_param(value: Any) -> Any:
    """Convert the dtypes and loop bodies in a parameter of an equation to float64."""
    if isinstance(value, np.dtype):
        return _float64_dtype(value)
    if isinstance(value, jex.ClosedJaxpr):
        return _convert_body(value)
    if isinstance(value, jex.Jaxpr):
        return _convert_body(jex.ClosedJaxpr(value, [])).jaxpr
    if hasattr(value, "_make"):
        return value._make(map(_convert_param, value))
    if type(value) in (tuple, list):
        return type(value)(map(_convert_param, value))
    return value


def _convert_body(closed_jaxpr: Any) -> Any:
    inlined, _ = inline_calls(closed_jaxpr)

    def body(*inputs: Any) -> list[Any]:
        env = _initial_env(inlined.jaxpr, inlined.consts, inputs)
        for equation in inlined.jaxpr.eqns:
            _evaluate(equation, env)
        return [_read(atom, env) for atom in inlined.jaxpr.outvars]

    shapes = [
        jax.ShapeDtypeStruct(aval.shape, _float64_dtype(aval.dtype))  # type: ignore[no-untyped-call]
        for aval in inlined.in_avals
    ]
    return jax.make_jaxpr(body)(*shapes)
