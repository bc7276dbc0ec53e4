"""The intermediate results that a block saves for its backward pass, by policy.

    none         all intermediate results: fastest, and the most memory
    dots         the results of all matmuls, including those of queries and keys
    projections  the results of matmuls with weights; attention is recomputed
    full         the input of the block; all results are recomputed

`dots` and `projections` recompute norms and activations, which use much memory and little time.
`projections` also recomputes the attention scores, whose memory grows with the square of the
sequence length.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from drumline.parallel.block.layers import PROJECTION

RematName = Literal["none", "dots", "projections", "full"]
Remat = bool | RematName
"""A policy; True is "full" and False is "none"."""


def check_remat(model: str, remat: Remat) -> None:
    """Raise ValueError if the policy is unknown."""
    if not isinstance(remat, bool) and remat not in get_args(RematName):
        raise ValueError(
            f"{model}: remat is {remat!r}; it can be {', '.join(get_args(RematName))}, "
            "or True for full and False for none"
        )


def rematerialize(
    block: Callable[..., Any], remat: Remat, *, scanned: bool, gathers: bool
) -> Callable[..., Any]:
    """Apply a policy to a block, which recomputes all unsaved results in its backward pass.

    Args:
        block: the layer.
        remat: the policy.
        scanned: True for the body of a `lax.scan`, where the loop separates the forward and the
            backward pass. Otherwise a barrier keeps XLA from merging recomputed results with the
            originals.
        gathers: True if the block gathers its weights. It then gathers them again under any policy,
            so that the gathered weights of all layers are never in memory together.
    """
    policies = jax.checkpoint_policies
    policy: Callable[..., Any] | None
    match remat:
        case True | "full":
            policy = None
        case "dots":
            policy = DotsSaveable(policies.dots_saveable)
        case "projections":
            policy = DotsSaveable(policies.dots_with_no_batch_dims_saveable)
        case _:
            if not gathers:
                return block
            policy = _is_saveable
    rematerialized: Callable[..., Any] = jax.checkpoint(
        block, policy=policy, prevent_cse=not scanned
    )
    return rematerialized


@dataclass(frozen=True)
class DotsSaveable:
    """A policy that saves some matmuls, and all sharded projections by their name.

    A policy does not see the matmuls inside of functions with their own gradient, such as rings.
    The name of this class is part of the hash of a loss in checkpoints.
    """

    saves_matmul: Callable[..., Any]

    def __call__(self, primitive: Any, *inputs: Any, **params: Any) -> bool:
        """Return True if the result of a primitive is saved."""
        named = primitive.name == "name" and params["name"] == PROJECTION
        return named or bool(self.saves_matmul(primitive, *inputs, **params))


def _is_saveable(primitive: Any, *_inputs: Any, **_params: Any) -> bool:
    """Return False for gathered weights, and for casts and reshapes, which may contain them."""
    return primitive.name not in {
        "all_gather",
        "concatenate",
        "convert_element_type",
        "reshape",
        "reverse_only",
        "squeeze",
        "transpose",
    }
