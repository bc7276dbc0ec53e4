"""Find the devices that differ from their replicas. Pure functions.

The burn-in compares the checksums of a program on all chips. Training compares the checksums of
replicas over several replays of a step. Both have *runs* with a value for each device, and *groups*
of devices that should have equal values in every run.

The majority over the runs and replicas of a group decides. A sound device must never be named, so
without a majority no device is named and the whole group is returned as tied.
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
    """True if whole groups changed between runs. That is a hardware fault, but it has spread to all
    devices, so none can be named."""
    tied: tuple[tuple[int, ...], ...] = ()
    """Groups without a majority. They contain a bad device that cannot be named."""
    run_counts: Mapping[int, int] = field(default_factory=dict)
    """For each deviating device, the number of runs in which it deviated."""

    times = renamed_attribute("times", "run_counts")

    def __bool__(self) -> bool:
        """Return True if any values differ, even if no device is named."""
        return bool(self.devices or self.spread or self.tied)


def compare_replicas(
    runs: Sequence[Mapping[int, Hashable]], groups: Sequence[Sequence[int]] | None = None
) -> ReplicaComparison:
    """Find the devices whose values deviate.

    Args:
        runs: The values by device, for each run. Values are compared by `==`, so pass numbers
            that may be NaN as bits. A device that is missing in a run does not count in it.
        groups: The devices that should agree. By default they are a single group.
    """
    if groups is None:
        groups = [sorted({device for run in runs for device in run})]
    run_counts: Counter[int] = Counter()
    tied, spread = [], False
    # Devices without replicas that do not repeat their value. A single such device is at fault.
    # If there are several, the fault reached them from elsewhere.
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
                # If most devices deviate at once, a fault has spread to them.
                spread = True
            else:
                run_counts.update(deviating)
    if len(unstable) == 1:
        run_counts.update(dict(unstable))
    spread |= len(unstable) > 1
    counts = dict(sorted(run_counts.items()))
    return ReplicaComparison(tuple(counts), spread, tuple(tied), counts)
