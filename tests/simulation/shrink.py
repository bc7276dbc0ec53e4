"""Shrink a schedule to the shortest one that still violates an invariant."""

from collections.abc import Callable

from tests.simulation.schedule import Schedule

Predicate = Callable[[Schedule], bool]


def shrink(schedule: Schedule, violates: Predicate, tries: int = 150) -> Schedule:
    """Leave out incidents, then jobs, in ever smaller pieces, while the violation remains."""
    tries_left = tries
    for kind in ("incidents", "jobs", "incidents"):
        size = max(1, len(getattr(schedule, kind)) // 2)
        while size:
            start = 0
            while start < len(getattr(schedule, kind)) and tries_left:
                dropped = set(range(start, start + size))
                incidents, jobs = (dropped, set()) if kind == "incidents" else (set(), dropped)
                shorter = schedule.without(incidents, jobs)
                tries_left -= 1
                if shorter.jobs and violates(shorter):
                    schedule = shorter
                else:
                    start += size
            size //= 2
    return schedule
