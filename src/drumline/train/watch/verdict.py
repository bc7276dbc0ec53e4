"""What rows of checksums from several runs show: nothing, or hardware, and which chip. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.health.blame import Blamed, blame
from drumline.train.watch.checksums import Replicas, Rows


@dataclass(frozen=True)
class Deviation:
    """What was found to differ that should not."""

    devices: tuple[int, ...] = ()
    """Ids of the devices that stand out; none where no single one does."""

    @property
    def device(self) -> int | None:
        """The one that stands out."""
        return self.devices[0] if len(self.devices) == 1 else None


def torn(rows: Rows, layouts: Sequence[Replicas]) -> bool:
    """Whether devices that hold the same hold different bits."""
    return any(_blame([rows], number, layout) for number, layout in enumerate(layouts))


def find(runs: Sequence[Rows], layouts: Sequence[Replicas]) -> Deviation | None:
    """Compare runs that should have given the same bits; None where they did.

    Within a run a device that differs from most of its replicas stands out, whatever else the runs
    differ in: what one chip computes wrong soon reaches the others through the gradients, and then
    no two runs agree. Only where no run says so by itself do they decide together.
    """
    numbered = list(enumerate(layouts))
    alone = [_blame([run], number, layout) for run in runs for number, layout in numbered]
    together = [_blame(runs, number, layout) for number, layout in numbered]
    if not any(alone) and not any(together):
        return None
    for found in (alone, together):
        devices = sorted({device for each in found for device in each.devices})
        if devices:
            return Deviation(tuple(devices))
    return Deviation()


def _blame(runs: Sequence[Rows], number: int, layout: Replicas) -> Blamed:
    values = [{device: row[number] for device, row in run.items()} for run in runs]
    return blame(values, layout.groups)
