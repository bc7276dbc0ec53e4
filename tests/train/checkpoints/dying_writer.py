"""Save a checkpoint repeatedly, in processes that die at a given byte of a file.

    python -m tests.train.checkpoints.dying_writer FOLDER < one byte count per line

No file of the process may grow beyond that many bytes. The system kills the process with SIGXFSZ in
the middle of the write that would exceed the limit, in any library and on any thread. For each line
the program prints the signal that ended the process, or 0 if the save was complete.
"""

import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from drumline.train.checkpoints.checkpoint import Checkpoints, Saved
from drumline.train.mesh import make_mesh
from drumline.train.state import State, replicate
from tests.compiling import quick_flags
from tests.train.checkpoints.fences import fence_of

STEPS = (1, 2)


def state_of(step: int) -> tuple[dict[str, np.ndarray], int]:
    """Return the parameters and the data position of a step, the same in every process."""
    random = np.random.default_rng(step)
    return {"w": random.normal(size=(300, 300)), "b": random.normal(size=3)}, 1000 + step


def state_on_devices(step: int) -> Saved:
    """Return the state of a step on the devices."""
    mesh = make_mesh({"data": 1})
    arrays, position = state_of(step)
    params = {k: replicate(mesh, array.astype(np.float32)) for k, array in arrays.items()}
    step_number, key = (replicate(mesh, np.array(n, np.uint32)) for n in (step, [0, step]))
    return Saved(State(params, (), step_number, key), position)


def write(folder: str, step: int, before: Callable[[], None] = lambda: None) -> None:
    """Save a step and wait until the checkpoint is complete."""
    checkpoints = Checkpoints(folder, set, print, fence_of())
    state = state_on_devices(step)
    before()
    checkpoints.save(step, state, make_mesh({"data": 1}))
    checkpoints.close()


def _limit_file_size(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    # Python ignores the signal by default.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def main(folder: str) -> None:
    """Process every line. JAX does not run in this process, so each child can initialize it."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            write(folder, STEPS[1], partial(_limit_file_size, int(line)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), flush=True)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = quick_flags(1)
    # JAX has started no thread when this process forks.
    warnings.filterwarnings("ignore", message="os.fork")
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    main(sys.argv[1])
