"""Eight emulated devices for every test that uses JAX, set before anything imports it.

And a check, when the last test is done, that no process of ours is left running.
"""

import gc
import os
import sys
import uuid

import pytest
from hypothesis import HealthCheck, settings

from tests import leftovers
from tests.buckets import bucket, bucket_folder, storage_server
from tests.compiling import quick_flags

__all__ = ["bucket", "bucket_folder", "storage_server"]

os.environ.setdefault("XLA_FLAGS", quick_flags(8))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Emulated kernels wait for each other, each in a thread of XLA's: it needs two for every device.
os.environ.setdefault("NPROC", "16")
# gcsfs reads it when it is imported; without it, it looks for a server that no test has.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# A busy machine draws examples slowly, which says nothing about what is tested.
settings.register_profile("unhurried", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("unhurried")
# Hundreds of short processes import us: where bytecode may not be kept, each compiles it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The workers inherit it from the process that starts them, and their children from them.
os.environ.setdefault(leftovers.RUN, uuid.uuid4().hex)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long ones, as many in each worker: one that is left to the end has it wait.

    `worksteal` gives each worker a stretch of the list, and moves tests only once one has none.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    rest = [item for item in items if not item.get_closest_marker("long")]
    stretch = -(-len(rest) // workers)
    items[:] = [
        item
        for worker in range(workers)
        for item in long[worker::workers] + rest[worker * stretch : (worker + 1) * stretch]
    ]


def pytest_collection_finish() -> None:
    """Spare the collector what lives until the end, and most of its runs: tracing makes millions.

    Everything that is imported and every test is reachable for good, and of what JAX allocates
    while it traces hardly anything is a cycle: with Python's own numbers a tenth of the CPU time
    goes into looking at it all again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whatever is started from now on tells who started it."""
    os.environ[leftovers.TEST] = item.nodeid


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that leaves processes behind, and name them; the workers have ended by now."""
    # A run without workers is its own, and those that compile for it end only when it does.
    compiling = sys.modules.get("drumline.inspect.compiling.workers")
    if compiling is not None:
        compiling.stop_workers()
    config = session.config
    if hasattr(config, "workerinput") or not os.path.isdir("/proc/self"):
        return
    folder = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    left = leftovers.wait_for_none([f"{leftovers.RUN}={os.environ[leftovers.RUN]}", f"{folder}/"])
    say = config.get_terminal_writer().line
    say()
    if not left:
        say("no process of these tests is left running")
        return
    say(f"{len(left)} of the tests' processes were left running, and are ended now:", red=True)
    for one in left:
        say(f"  {one}")
    leftovers.end(left)
    if session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
