"""The TPU's own compiler, if installed, compiles the kernels and distinguishes them."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.inspect.compiling.programs import compile_for
from drumline.inspect.compiling.workers import TPU_PYTHON, has_tpu_compiler
from drumline.inspect.cost.machines import parse_machine
from drumline.parallel import fused_allgather_matmul, fused_matmul_reducescatter

INSTALLED = has_tpu_compiler()


@pytest.mark.skipif(
    not INSTALLED, reason=f"needs the TPU's compiler: libtpu on x86_64 Linux, or {TPU_PYTHON}"
)
def test_both_matmuls_and_their_gradients_compile() -> None:
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = AbstractMesh((2, 4), ("X", "Y"), (AxisType.Explicit,) * 2, abstract_device=device)
    rows = P(("X", "Y"), None)

    def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = fused_allgather_matmul(x, up, axis_name="Y")
        return fused_matmul_reducescatter(hidden, down, axis_name="Y")

    run = jax.shard_map(
        layer, mesh=mesh, in_specs=(rows, P(None, "Y"), P("Y", None)), out_specs=rows
    )

    def loss(*args: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(run(*args).astype(jnp.float32)))

    struct: Any = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    args = (
        struct((1024, 512), sharding=NamedSharding(mesh, rows)),
        struct((512, 1024), sharding=NamedSharding(mesh, P(None, "Y"))),
        struct((1024, 512), sharding=NamedSharding(mesh, P("Y", None))),
    )
    gradients = jax.grad(loss, argnums=(0, 1, 2))
    program = compile_for(parse_machine("v5litepod-8"), gradients, args, mesh=mesh, compiler="tpu")
    calls = [
        re.sub(r"[.\d]+$", "", instruction.name)
        for instruction in program.module.entry.instructions
        if 'custom_call_target="tpu_custom_call"' in instruction.attribute_text
    ]
    assert sorted(calls) == [
        "gather_outer",
        "gather_product",
        "gather_product",
        "scatter_product",
        "scatter_product",
    ]
