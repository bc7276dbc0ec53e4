"""Many schedules, side by side in processes of their own."""

import gc
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

CASES = 10
"""The most that one process takes on."""
Case = TypeVar("Case")
Result = TypeVar("Result")


def settle() -> None:
    """Begin this process again if need be, so that nothing in it differs from the last time."""
    # Sets of names have an order by their hashes, which Python draws anew for each process.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606, ourselves
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None


def each(
    work: Callable[[Case], Result], cases: Iterable[Case], workers: int, ordered: bool = False
) -> Iterator[Result]:
    """What `work` makes of each case; what is patched here is patched there too."""
    gc.freeze()
    # A new process every now and then: what killed servers left behind is freed with it. A
    # collection in between would close it at a moment that no seed has drawn.
    context = multiprocessing.get_context("fork")
    with context.Pool(workers, initializer=gc.disable, maxtasksperchild=CASES) as pool:
        yield from (pool.imap if ordered else pool.imap_unordered)(work, cases)
