"""Matmuls of sharded arrays that overlap communication with computation.

`einsum` reads the shardings of its operands and picks a ring. The other functions are for use
inside `jax.shard_map`: the rings themselves, and the dropless mixture of experts. Shapes are
written as in "Programming TPUs in JAX": `A[B_X, D_Y]` is an array whose rows are sharded over mesh
axis X and whose columns over Y.
"""

from drumline.parallel.block.transformer import BlockAxes, TransformerBlock, feedforward
from drumline.parallel.block.weights import BlockShape
from drumline.parallel.einsum.choice import Explanation
from drumline.parallel.einsum.sharded import einsum, explain_einsum
from drumline.parallel.experts.layer import MoEBlock, moe_feedforward
from drumline.parallel.experts.matmul import expert_matmul
from drumline.parallel.experts.routing import Gating, Routing, route
from drumline.parallel.fused.functions import fused_allgather_matmul, fused_matmul_reducescatter
from drumline.parallel.rings.allreduce import matmul_allreduce
from drumline.parallel.rings.gather import allgather_matmul
from drumline.parallel.rings.scatter import matmul_reducescatter
from drumline.parallel.target import overlap_options

__all__ = [
    "BlockAxes",
    "BlockShape",
    "Explanation",
    "Gating",
    "MoEBlock",
    "Routing",
    "TransformerBlock",
    "allgather_matmul",
    "einsum",
    "expert_matmul",
    "explain_einsum",
    "feedforward",
    "fused_allgather_matmul",
    "fused_matmul_reducescatter",
    "matmul_allreduce",
    "matmul_reducescatter",
    "moe_feedforward",
    "overlap_options",
    "route",
]
