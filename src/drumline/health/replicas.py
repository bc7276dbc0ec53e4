"""Find devices that differ from their replicas. Pure functions.

The burn-in compares the checksums of a program on all chips, and training those of replicas over
replays of a step. Both have *runs* with a value per device, and *groups* of devices whose values
should be equal in all runs.

The majority over the runs and replicas of a group decides. Without a majority, no device is named,
because it may be healthy, and the group is returned as tied.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from drumline.deprecated import renamed_attribute


@dataclass(frozen=True)
class ReplicaComparison:
    """The outcome of a comparison. False if all values agree."""

    devices: tuple[int, ...] = ()
    """The devices that deviate from the majority of their group, in ascending order."""
    spread: bool = False
    """True if groups changed between runs: a hardware fault that has spread to all devices, so its
    origin is unknown."""
    tied: tuple[tuple[int, ...], ...] = ()
    """Groups without a majority. They contain an unknown bad device."""
    run_counts: Mapping[int, int] = field(default_factory=dict)
    """The number of runs in which a device deviated, by device."""

    times = renamed_attribute("times", "run_counts")

    def __bool__(self) -> bool:
        """Return True if any values differ."""
        return bool(self.devices or self.spread or self.tied)


def compare_replicas(
    runs: Sequence[Mapping[int, Hashable]], groups: Sequence[Sequence[int]] | None = None
) -> ReplicaComparison:
    """Find the devices whose values deviate.

    Args:
        runs: The values by device, per run. Values are compared by `==`, so pass numbers that may
            be NaN as bits. A run may lack devices.
        groups: The groups of devices, by default a single group.
    """
    if groups is None:
        groups = [sorted({device for run in runs for device in run})]
    run_counts: Counter[int] = Counter()
    tied, spread = [], False
    # Devices without replicas that do not repeat their value. A single one is the faulty device;
    # if there are more, a fault has spread to them.
    unstable: list[tuple[int, int]] = []
    for group in groups:
        replica_values = [
            {device: run[device] for device in group if device in run} for run in runs
        ]
        replica_values = [run for run in replica_values if run]
        values = Counter(value for run in replica_values for value in run.values())
        if len(values) < 2:
            continue
        majority, count = values.most_common(1)[0]
        if all(len(run) == 1 for run in replica_values) and len(set().union(*replica_values)) == 1:
            (device,) = replica_values[0]
            unstable.append((device, sum(values.values()) - count))
            continue
        unanimous = {next(iter(r.values())) for r in replica_values if len(set(r.values())) == 1}
        spread |= len(unanimous) > 1
        split_runs = [run for run in replica_values if len(set(run.values())) > 1]
        if not split_runs:
            continue
        if 2 * count <= values.total():
            tied.append(tuple(sorted(group)))
            continue
        for run in split_runs:
            deviating = [device for device, value in run.items() if value != majority]
            if 2 * len(deviating) > len(run):
                spread = True
            else:
                run_counts.update(deviating)
    if len(unstable) == 1:
        run_counts.update(dict(unstable))
    spread |= len(unstable) > 1
    counts = dict(sorted(run_counts.items()))
    return ReplicaComparison(tuple(counts), spread, tuple(tied), counts)
