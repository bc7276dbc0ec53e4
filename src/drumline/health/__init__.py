"""Is this chip sound: burn-in, comparison across chips, and what is said of one that lies.

    from drumline.health import burn_in
    report = burn_in(seconds=30)

The accusation (`HardwareFault`) and the comparison (`blame`) are for training too. On a job's
hosts this room runs from one zipped file before the user's program, so it imports nothing but the
standard library, numpy, JAX, `drumline.chips`, `drumline.distributed` and `drumline.heartbeat`, and
JAX only where chips are tested.
"""

from drumline.health.accusation import Accusation, HardwareFault
from drumline.health.blame import Blamed, blame

__all__ = ["Accusation", "Blamed", "HardwareFault", "blame"]
