"""How tests compile programs that compile for seconds and run for milliseconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax


@cache
def quick() -> dict[str, Any]:
    """Compiler options that optimise little."""
    options: dict[str, Any] = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    # These halve the time again, but are options of the compiler's youth and may go away.
    younger = {
        **options,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
    try:
        jax.jit(lambda: 0, compiler_options=younger).lower().compile()
    except jax.errors.JaxRuntimeError:
        return options
    return younger
