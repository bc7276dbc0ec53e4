"""Who is wrong when devices that should agree do not. Pure: values in, blame out.

The burn-in asks it about checksums of the same program on every chip, training about checksums of
replicas over several replays of a step. Both have *runs*, in each of which every device says a
value, and *groups* of devices whose values should be equal, in every run.

The rule is the majority over all runs and replicas of a group. What it must never do is to blame
an innocent, so where no majority exists it names nobody and says which group is torn.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Blamed:
    """What the runs show. Falsy where all values agree."""

    devices: tuple[int, ...] = ()
    """Those that deviate from the majority of their group, lowest first."""
    spread: bool = False
    """In some run whole groups said something else than in the other runs, of one voice: hardware,
    but what went wrong has reached all of them, and no single device can be named."""
    tied: tuple[tuple[int, ...], ...] = ()
    """Groups without a majority: one of these devices is wrong, and nobody knows which."""
    times: Mapping[int, int] = field(default_factory=dict)
    """For each blamed device, the number of runs in which it deviated."""

    def __bool__(self) -> bool:
        """Whether anything is wrong, with or without a name."""
        return bool(self.devices or self.spread or self.tied)


def blame(
    runs: Sequence[Mapping[int, Hashable]], groups: Sequence[Sequence[int]] | None = None
) -> Blamed:
    """Find the devices whose values deviate.

    Args:
        runs: for each run the value of each device. Values are compared by `==`, so numbers that
            may be NaN must come as bits. A device that a run lacks does not count in it.
        groups: the devices that should agree; without it, all of them.
    """
    if groups is None:
        groups = [sorted({device for run in runs for device in run})]
    times: Counter[int] = Counter()
    tied, spread = [], False
    # A group in which nobody has a replica, and that does not repeat: its one device is to blame,
    # unless others do the same. Then what is wrong has come to them from somewhere.
    alone: list[tuple[int, int]] = []
    for group in groups:
        said = [{device: run[device] for device in group if device in run} for run in runs]
        said = [run for run in said if run]
        values = Counter(value for run in said for value in run.values())
        if len(values) < 2:
            continue
        most, count = values.most_common(1)[0]
        if all(len(run) == 1 for run in said) and len(set().union(*said)) == 1:
            (device,) = said[0]
            alone.append((device, sum(values.values()) - count))
            continue
        of_one_voice = {next(iter(run.values())) for run in said if len(set(run.values())) == 1}
        spread |= len(of_one_voice) > 1
        torn = [run for run in said if len(set(run.values())) > 1]
        if not torn:
            continue
        if 2 * count <= values.total():
            tied.append(tuple(sorted(group)))
            continue
        for run in torn:
            deviating = [device for device, value in run.items() if value != most]
            if 2 * len(deviating) > len(run):
                # Most of them wrong at once is one cause that spread, not so many bad chips.
                spread = True
            else:
                times.update(deviating)
    if len(alone) == 1:
        times.update(dict(alone))
    spread |= len(alone) > 1
    return Blamed(tuple(sorted(times)), spread, tuple(tied), dict(sorted(times.items())))
