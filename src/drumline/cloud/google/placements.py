"""What the cloud's states mean for a slice of ours. Pure."""

from drumline.cloud.protocol import Node
from drumline.jobs.core.state import Look

# A node in these states runs nothing of ours any more. STOPPED and the hiding states come from
# maintenance and cannot be undone by us, so they count as taken.
_NODE_OFF = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "HIDDEN"})
_NODE_GOING = frozenset({"DELETING", "STOPPING", "HIDING"})
_REQUEST_TAKEN = frozenset({"SUSPENDING", "SUSPENDED", "DELETING"})


def why_lost(look: Look) -> str | None:
    """Why the cloud has taken this slice or request, None while it has not."""
    node, request = look.node, look.request
    if node is None and request is None:
        return "gone from the cloud"
    if node is not None and node.state in _NODE_OFF | _NODE_GOING:
        return f"node {node.state}"
    if request is not None and request.state in _REQUEST_TAKEN:
        return f"request {request.state}"
    if request is not None and request.state == "FAILED":
        return request.trouble.message if request.trouble else "request FAILED"
    return None


def may_be_running(node: Node | None) -> bool:
    """Whether hosts of a slice that is being released may still run our program."""
    return node is not None and node.state not in _NODE_OFF
