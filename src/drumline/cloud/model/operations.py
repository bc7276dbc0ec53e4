"""Long-running operations: their state, their result, and the call that started them.

A caller that got no response may repeat a call with the same `requestId`. It gets the same
operation, and the change happens start_once.
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

# Callers read an operation for a while after its end. The limit bounds the memory.
_MAX_OPERATIONS = 10_000
_STATE_DURING = {
    "create": NodeState.CREATING,
    "start": NodeState.STARTING,
    "stop": NodeState.STOPPING,
    "reset": NodeState.RESTARTING,
}


class Operations:
    """All operations. The oldest are dropped when there are too many."""

    def __init__(self, clock: Callable[[], float], random_source: random.Random) -> None:
        """Start without operations."""
        self.all: dict[str, Operation] = {}
        self._open: list[Operation] = []
        self._by_request_id: dict[str, Operation] = {}
        self._clock = clock
        self._random = random_source

    def start(
        self, verb: str, subject: Request | Node, error: RpcStatus | None = None
    ) -> Operation:
        """Add an operation that starts now, or one that has failed."""
        parent = subject.spec.name.rsplit("/", 2)[0]
        operation_id = f"{self._random.getrandbits(128):032x}"
        operation = Operation(
            f"{parent}/operations/operation-{operation_id}", verb, subject, self._clock()
        )
        self.all[operation.name] = operation
        if error is None:
            self._open.append(operation)
        else:
            operation.ended, operation.error = operation.created, error
        if len(self.all) > _MAX_OPERATIONS:
            oldest = self.all.pop(next(iter(self.all)))
            self._by_request_id.pop(oldest.request_id, None)
        return operation

    def start_once(self, request_id: str, call: str, start: Callable[[], Operation]) -> Operation:
        """Return the operation of a request id, or a new one. Its call must be the same."""
        if not request_id:
            return start()
        operation = self._by_request_id.get(request_id)
        if operation is None:
            operation = self._by_request_id[request_id] = start()
            operation.request_id, operation.call = request_id, call
        elif operation.call != call:
            raise invalid(
                f"The request_id '{request_id}' was used for another request", "request_id"
            )
        return operation

    def finish_done(self) -> None:
        """Record the end of the operations that are done."""
        for operation in [candidate for candidate in self._open if _is_done(candidate)]:
            operation.ended, operation.error = self._clock(), _error_of(operation)
            self._open.remove(operation)


def _is_done(operation: Operation) -> bool:
    subject = operation.subject
    if operation.verb == "delete" or subject.gone:
        return subject.gone
    if not isinstance(subject, Request):
        return subject.state is not _STATE_DURING.get(operation.verb)
    if operation.verb == "reset":
        return not any(node.state is NodeState.RESTARTING for node in operation.nodes)
    return subject.state is not RequestState.CREATING


def _error_of(operation: Operation) -> RpcStatus | None:
    subject = operation.subject
    if isinstance(subject, Request) or operation.verb not in {"create", "start"}:
        return None
    if subject.state in LOST:
        return preempted_while_created()
    if subject.state is NodeState.DELETING:
        return RpcStatus(ABORTED, f"The node was deleted during its {operation.verb}.")
    return None
