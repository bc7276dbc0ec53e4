"""What a trace of `jax.profiler` says about a step: measured time, and where it went.

profile = read_profile(Path("trace"))
profile.exposed / profile.seconds          the part of a step that waits for communication
summary(profile)                           at most ten sentences about it
compare(profile, read_estimate(file))      where an estimate and the measurement part
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
