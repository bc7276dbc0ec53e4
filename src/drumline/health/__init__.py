"""Is this chip sound: burn-in, comparison across chips, and what is said of one that lies.

    from drumline.health import burn_in
    report = burn_in(seconds=30)

The accusation (`HardwareFault`) and the comparison (`blame`) are for training too. On a job's
hosts this room runs from one zipped file before the user's program, so it imports nothing but the
standard library, numpy, JAX, `drumline.chips`, `drumline.distributed` and `drumline.heartbeat`, and
JAX only where chips are tested.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drumline.health.accusation import Accusation, HardwareFault
from drumline.health.blame import Blamed, blame

if TYPE_CHECKING:
    from drumline.health.report import BurnIn

__all__ = ["Accusation", "Blamed", "HardwareFault", "blame", "burn_in"]


def burn_in(devices: Sequence[Any] | None = None, seconds: float = 30) -> "BurnIn":
    """Test these JAX devices, or all, and this host, for about so long.

    On several hosts every host must call it, with the devices of all of them; each then has the
    same report.
    """
    from drumline.health.burnin import burn_in as test

    return test(devices, seconds)
