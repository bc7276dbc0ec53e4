"""The end of asyncio tasks."""

import asyncio
from collections.abc import Collection
from typing import Any

CANCEL_SECONDS = 10.0
"""The longest wait for cancelled tasks. A task that ignores its cancellation must not keep a server
from stopping."""


async def cancel_tasks(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait for their ends, for a limited time. Their errors are ignored."""
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
        for task in ended:
            if not task.cancelled():
                task.exception()  # otherwise asyncio reports that nobody has read it
