"""Run many schedules in parallel, in processes of their own."""

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
"""The most schedules of one process."""
Case = TypeVar("Case")
Result = TypeVar("Result")


class WorkerDied(Exception):
    """A process ended before its work was done, or with an error."""


def fix_hash_seed() -> None:
    """Restart this process with a fixed hash seed if needed, so that every run is the same."""
    # The order of sets depends on hashes, which Python seeds anew for each process.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606, this program
    # So that the child processes end too, and remove their folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None


def positive_integer(text: str) -> int:
    """Parse an option that is a positive integer."""
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{number} is not a number from 1 on")
    return number


def run_all(
    work: Callable[[Case], Result], cases: Iterable[Case], workers: int
) -> Iterator[tuple[Case, Result]]:
    """Yield the result of `work` for each case. Patches of this process apply there too."""
    gc.freeze()
    # Processes are replaced regularly, which frees the memory of killed servers.
    context = multiprocessing.get_context("fork")
    remaining = iter(cases)
    running: dict[Connection, Any] = {}

    def begin() -> None:
        batch = list(islice(remaining, CASES))
        if batch:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(work, batch, sender))
            process.start()
            sender.close()
            running[receiver] = process

    try:
        for _ in range(workers):
            begin()
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                try:
                    case, result, error = ready.recv()
                except EOFError:
                    process = running.pop(ready)
                    process.join()
                    if process.exitcode:
                        raise WorkerDied(f"a process ended with {process.exitcode}") from None
                    begin()
                    continue
                if error:
                    raise WorkerDied(f"{case}: {error}")
                yield case, result
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def _work(work: Callable[[Any], Any], batch: list[Any], sender: Connection) -> None:
    # So that folders are removed, whatever ends this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(1))
    # A collection would close the files of killed servers at a time that no seed determines.
    gc.disable()
    for case in batch:
        try:
            result, message = work(case), ""
        except Exception as error:
            result, message = None, repr(error)
        sender.send((case, result, message))
        if message:
            return
