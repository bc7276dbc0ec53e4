"""Long-running operations: when each is done, how it ended, and which call began it.

A call with a `requestId` may be repeated by a caller that got no answer: it gets the same operation
again, and nothing is done twice.
"""

import random
from collections.abc import Callable

from drumline.cloud.model.errors import ABORTED, RpcStatus, invalid, preempted_while_created
from drumline.cloud.model.resources import (
    LOST,
    Node,
    NodeState,
    Operation,
    Request,
    RequestState,
)

# Callers read an operation for a while after it ended, but not after so many others.
_KEPT = 10_000
_UNDER_WAY = {
    "create": NodeState.CREATING,
    "start": NodeState.STARTING,
    "stop": NodeState.STOPPING,
    "reset": NodeState.RESTARTING,
}


class Operations:
    """All operations; the oldest are dropped when there are too many."""

    def __init__(self, clock: Callable[[], float], chance: random.Random) -> None:
        """No operations yet."""
        self.all: dict[str, Operation] = {}
        self._open: list[Operation] = []
        self._asked: dict[str, Operation] = {}
        self._clock = clock
        self._chance = chance

    def begin(
        self, verb: str, subject: Request | Node, error: RpcStatus | None = None
    ) -> Operation:
        """Add an operation that starts now, or has failed already."""
        parent = subject.spec.name.rsplit("/", 2)[0]
        identity = f"{self._chance.getrandbits(128):032x}"
        operation = Operation(
            f"{parent}/operations/operation-{identity}", verb, subject, self._clock()
        )
        self.all[operation.name] = operation
        if error is None:
            self._open.append(operation)
        else:
            operation.ended, operation.error = operation.created, error
        if len(self.all) > _KEPT:
            oldest = self.all.pop(next(iter(self.all)))
            self._asked.pop(oldest.request_id, None)
        return operation

    def once(self, request_id: str, call: str, do: Callable[[], Operation]) -> Operation:
        """The operation of this request id, or a new one; `call` must be the same as before."""
        if not request_id:
            return do()
        before = self._asked.get(request_id)
        if before is None:
            before = self._asked[request_id] = do()
            before.request_id, before.call = request_id, call
        elif before.call != call:
            raise invalid(
                f"The request_id '{request_id}' was used for another request", "request_id"
            )
        return before

    def close_done(self) -> None:
        """Note the end of the operations that are done."""
        for operation in [candidate for candidate in self._open if _is_done(candidate)]:
            operation.ended, operation.error = self._clock(), _trouble(operation)
            self._open.remove(operation)


def _is_done(operation: Operation) -> bool:
    subject = operation.subject
    if operation.verb == "delete" or subject.gone:
        return subject.gone
    if not isinstance(subject, Request):
        return subject.state is not _UNDER_WAY.get(operation.verb)
    if operation.verb == "reset":
        return not any(node.state is NodeState.RESTARTING for node in operation.nodes)
    return subject.state is not RequestState.CREATING


def _trouble(operation: Operation) -> RpcStatus | None:
    subject = operation.subject
    if isinstance(subject, Request) or operation.verb not in {"create", "start"}:
        return None
    if subject.state in LOST:
        return preempted_while_created()
    if subject.state is NodeState.DELETING:
        return RpcStatus(ABORTED, f"The node was deleted during its {operation.verb}.")
    return None
