"""What a block keeps for its backward pass, by name.

    none         every intermediate result: the fastest, and the most memory
    dots         the results of all products, those between queries and keys among them
    projections  the results of products by weights; attention is computed again
    full         nothing but the block's input: everything is computed again

In between, what is computed again is what costs memory and little time: norms, activations, and
under `projections` the scores of attention, which grow with the square of the sequence.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

RematName = Literal["none", "dots", "projections", "full"]
Remat = bool | RematName
"""A name, or True for "full" and False for "none"."""


def check_remat(model: str, remat: Remat) -> None:
    """Refuse a name that means nothing."""
    if not isinstance(remat, bool) and remat not in get_args(RematName):
        raise ValueError(
            f"{model}: remat is {remat!r}; it can be {', '.join(get_args(RematName))}, "
            "or True for full and False for none"
        )


def rematerialised(
    block: Callable[..., Any], remat: Remat, *, scanned: bool, gathers: bool
) -> Callable[..., Any]:
    """A block that keeps for its backward pass what `remat` says, and computes the rest again.

    Args:
        block: the layer.
        remat: what it keeps.
        scanned: whether it is the body of `lax.scan`. There the loop parts the two passes; written
            out, XLA would merge what is computed again with what it was to replace.
        gathers: whether it gathers its weights. Then they are gathered again whatever is kept:
            otherwise every layer's whole weights would wait in memory for the backward pass.
    """
    policies = jax.checkpoint_policies
    policy: Callable[..., Any] | None
    match remat:
        case True | "full":
            policy = None
        case "dots":
            policy = policies.dots_saveable
        case "projections":
            policy = policies.dots_with_no_batch_dims_saveable
        case _:
            if not gathers:
                return block
            policy = _is_no_weight
    again: Callable[..., Any] = jax.checkpoint(block, policy=policy, prevent_cse=not scanned)
    return again


def _is_no_weight(primitive: Any, *_inputs: Any, **_params: Any) -> bool:
    """Whether a result may be kept for the backward pass.

    Not what was gathered, nor what merely has another type, shape or mark: from that, the gathered
    weights would be kept in another form.
    """
    return primitive.name not in {
        "all_gather",
        "concatenate",
        "convert_element_type",
        "reshape",
        "reverse_only",
        "squeeze",
        "transpose",
    }
