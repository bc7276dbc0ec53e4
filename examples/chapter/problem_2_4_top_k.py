"""Problem 2, step 4: k experts a token, weighted by a router, with gradients.

    python examples/chapter/problem_2_4_top_k.py

The same exchange with B[S, k]: a token travels once for each of its experts, and the answers are
summed where it lives. Prints how even the routing was, the error, and the gradients' error.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from drumline.parallel.experts import expert_matmul
from drumline.parallel.routing import route

S, D, F, E, K = 512, 64, 128, 16, 2


def main() -> None:
    """Route, multiply through the exchange, and differentiate."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("X", "Y"))
    rng = np.random.default_rng(0)
    a = rng.normal(size=(S, D)).astype(np.float32)
    w = rng.normal(size=(E, D, F)).astype(np.float32)
    routing = route(jax.numpy.asarray(rng.normal(size=(S, E))), K)
    print("tokens per expert:", np.asarray(routing.tokens_per_expert))
    print(f"load-balance loss {routing.balance_loss:.3f} (1 is even)")
    travelled = jax.shard_map(
        partial(expert_matmul, axis_name="X", gather_axis_name="Y"),
        mesh=mesh,
        in_specs=(P("X", "Y"), P("X", None, "Y"), P("X"), P("X")),
        out_specs=P("X", "Y"),
    )

    def every_expert(a, w, b, gates):
        """Return the same by computing all E products of every token."""
        every = jax.numpy.einsum("sd,edf->sef", a, w)
        chosen = jax.numpy.take_along_axis(every, b[:, :, None], axis=1)
        return jax.numpy.einsum("skf,sk->sf", chosen, gates)

    def gradients(function):
        def loss(a, w, gates):
            return (function(a, w, routing.experts, gates) ** 2).mean()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(a, w, routing.gates)

    (loss, got), (truth, expected) = gradients(travelled), gradients(every_expert)
    print(f"loss {loss:.6f}, every expert on every token {truth:.6f}")
    for name, one, other in zip(("a", "w", "gates"), got, expected, strict=True):
        print(f"gradient of {name}: largest error {abs(one - other).max():.1e}")


if __name__ == "__main__":
    main()
