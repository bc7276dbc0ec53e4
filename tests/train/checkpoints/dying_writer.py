"""Save a checkpoint repeatedly, in processes that die at a given byte of a file.

    python -m tests.train.checkpoints.dying_writer FOLDER < one number of bytes on each line

No file of the process may grow beyond that many bytes: the system ends it with a signal in the
middle of the write that would (SIGXFSZ), whichever library it comes from and on whichever thread.
The answer to each line is the signal that ended the process, or 0 if it got through.
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
    """Parameters and position that belong to a step, the same in every process."""
    random = np.random.default_rng(step)
    return {"w": random.normal(size=(300, 300)), "b": random.normal(size=3)}, 1000 + step


def saved(step: int) -> Saved:
    """The same on the devices."""
    mesh = make_mesh({"data": 1})
    arrays, position = state_of(step)
    params = {k: replicate(mesh, array.astype(np.float32)) for k, array in arrays.items()}
    number, key = (replicate(mesh, np.array(n, np.uint32)) for n in (step, [0, step]))
    return Saved(State(params, (), number, key), position)


def write(folder: str, step: int, before: Callable[[], None] = lambda: None) -> None:
    """Save a step and wait until it is whole."""
    checkpoints = Checkpoints(folder, set, print, fence_of())
    state = saved(step)
    before()
    checkpoints.save(step, state, make_mesh({"data": 1}))
    checkpoints.close()


def _die_at(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    # Python ignores it from the start.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def main(folder: str) -> None:
    """Answer every line. Nothing of JAX runs here, so that each child can begin it anew."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            write(folder, STEPS[1], partial(_die_at, int(line)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), flush=True)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = quick_flags(1)
    # No thread of JAX has been started when this forks.
    warnings.filterwarnings("ignore", message="os.fork")
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    main(sys.argv[1])
