"""Read traces of `jax.profiler` and show how a step spends its time.

    profile = read_profile(Path("trace"))
    profile.exposed / profile.seconds          the share of a step that waits for communication

`report.summarize` describes a profile in at most ten sentences. `report.compare_profile` compares
it with an estimate.
"""

from drumline.inspect.profiles.attribution import (
    MeasuredCollective,
    MeasuredDevice,
    MeasuredOperation,
    Profile,
    read_profile,
)

__all__ = [
    "MeasuredCollective",
    "MeasuredDevice",
    "MeasuredOperation",
    "Profile",
    "read_profile",
]
