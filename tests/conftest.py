"""Settings of all tests: eight emulated JAX devices, the test order, and leftover processes.

The environment variables are set before anything imports JAX.
"""

import gc
import os
import sys
import uuid

import pytest
from hypothesis import HealthCheck, settings

from tests import leftovers
from tests.buckets import bucket, bucket_folder, storage_server
from tests.cases import EVERY_CASE
from tests.compiling import quick_flags
from tests.jobs.installation import worker_installation

__all__ = ["bucket", "bucket_folder", "storage_server", "worker_installation"]

os.environ.setdefault("XLA_FLAGS", quick_flags(8))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Emulated kernels wait for each other in threads of XLA, which needs two threads per device.
os.environ.setdefault("NPROC", "16")
# gcsfs reads this when it is imported. Without it, gcsfs connects to a server that no test has.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# On a busy machine hypothesis draws examples slowly. That is not an error of the tested code.
settings.register_profile("unhurried", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("unhurried")
# Hundreds of short processes import the package. Without bytecode files each compiles it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Workers inherit it from the main process, and their children inherit it from them.
os.environ.setdefault(leftovers.RUN, uuid.uuid4().hex)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out rare cases. Run long tests first, spread evenly over the workers.

    So no long test starts near the end. `worksteal` gives each worker one part of the list, and
    moves tests only when a worker is idle.
    """
    if not EVERY_CASE:
        rare = [item for item in items if item.get_closest_marker("every_case")]
        config.hook.pytest_deselected(items=rare)
        items[:] = [item for item in items if not item.get_closest_marker("every_case")]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    rest = [item for item in items if not item.get_closest_marker("long")]
    part = -(-len(rest) // workers)
    items[:] = [
        item
        for worker in range(workers)
        for item in long[worker::workers] + rest[worker * part : (worker + 1) * part]
    ]


def pytest_collection_finish() -> None:
    """Make the garbage collector run less often, and skip the objects that exist now.

    Imported modules and tests live until the end, and JAX's tracing allocates millions of objects
    with hardly any cycles. With Python's default thresholds the collector takes a tenth of the CPU
    time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Name the test in the environment of the processes that it starts."""
    os.environ[leftovers.TEST] = item.nodeid


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if it leaves processes behind, and name them. The workers have ended by now."""
    # Without workers, the processes that compile programs belong to this one and end only with it.
    compiling = sys.modules.get("drumline.inspect.compiling.workers")
    if compiling is not None:
        compiling.stop_workers()
    config = session.config
    if hasattr(config, "workerinput") or not os.path.isdir("/proc/self"):
        return
    folder = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    marks = [f"{leftovers.RUN}={os.environ[leftovers.RUN]}", f"{folder}/"]
    remaining = leftovers.wait_for_none(marks)
    write_line = config.get_terminal_writer().line
    write_line()
    if not remaining:
        write_line("no process of these tests is left running")
        return
    write_line(f"{len(remaining)} processes of the tests still ran and are killed now:", red=True)
    for leftover in remaining:
        write_line(f"  {leftover}")
    leftovers.kill(remaining)
    if session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
