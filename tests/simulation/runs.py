"""Many schedules, side by side in processes of their own."""

import gc
import logging
import multiprocessing
import os
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

CASES = 25
"""The most that one process takes on."""
Case = TypeVar("Case")
Result = TypeVar("Result")


class WorkerDied(Exception):
    """A process ended before it had done its work, or with an error."""


def settle() -> None:
    """Begin this process again if need be, so that nothing in it differs from the last time."""
    # Sets of names have an order by their hashes, which Python draws anew for each process.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606, ourselves
    # So that the processes begun here end too, and put their folders away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None


def count(given: str) -> int:
    """An option that is a number from one on."""
    number = int(given)
    if number < 1:
        raise ArgumentTypeError(f"{number} is not a number from 1 on")
    return number


def each(
    work: Callable[[Case], Result], cases: Iterable[Case], workers: int
) -> Iterator[tuple[Case, Result]]:
    """What `work` makes of each case, as it is done; what is patched here is patched there too."""
    gc.freeze()
    # A new process every now and then: what killed servers left behind is freed with it.
    context = multiprocessing.get_context("fork")
    left = iter(cases)
    running: dict[Connection, Any] = {}

    def begin() -> None:
        batch = list(islice(left, CASES))
        if batch:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(work, batch, theirs))
            process.start()
            theirs.close()
            running[ours] = process

    try:
        for _ in range(workers):
            begin()
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                try:
                    case, result, wrong = ready.recv()
                except EOFError:
                    process = running.pop(ready)
                    process.join()
                    if process.exitcode:
                        raise WorkerDied(f"a process ended with {process.exitcode}") from None
                    begin()
                    continue
                if wrong:
                    raise WorkerDied(f"{case}: {wrong}")
                yield case, result
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def _work(work: Callable[[Any], Any], batch: list[Any], told: Connection) -> None:
    # So that a folder is put away, whatever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(1))
    # A collection would close what a killed server left behind at a moment that no seed has drawn.
    gc.disable()
    for case in batch:
        try:
            result, wrong = work(case), ""
        except Exception as trouble:
            result, wrong = None, repr(trouble)
        told.send((case, result, wrong))
        if wrong:
            return
