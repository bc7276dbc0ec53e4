"""Matrix products of sharded arrays that hide their communication behind the multiplication.

`einsum` reads the shardings of its operands and picks a ring; underneath, for use inside
`jax.shard_map`, are the rings themselves and the mixture of experts that drops no token. Shapes are
written as in "Programming TPUs in JAX": `A[B_X, D_Y]` is an array whose rows are sharded over mesh
axis X and whose columns over Y.
"""

from drumline.parallel.allreduce import matmul_allreduce
from drumline.parallel.einsum import einsum, explain_einsum
from drumline.parallel.einsum_choice import Explanation
from drumline.parallel.experts import expert_matmul
from drumline.parallel.experts_layer import MoEBlock, moe_feedforward
from drumline.parallel.feedforward import feedforward
from drumline.parallel.gather import allgather_matmul
from drumline.parallel.routing import Gating, Routing, route
from drumline.parallel.scatter import matmul_reducescatter
from drumline.parallel.transformer import BlockAxes, BlockShape, TransformerBlock

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
    "matmul_allreduce",
    "matmul_reducescatter",
    "moe_feedforward",
    "route",
]
