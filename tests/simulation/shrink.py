"""The shortest schedule that still breaks a promise, by leaving things out."""

from collections.abc import Callable

from tests.simulation.schedule import Schedule

Breaks = Callable[[Schedule], bool]


def shrink(schedule: Schedule, breaks: Breaks, tries: int = 150) -> Schedule:
    """Leave out incidents, then jobs, in ever smaller pieces, while it still breaks."""
    left = tries
    for what in ("incidents", "jobs", "incidents"):
        size = max(1, len(getattr(schedule, what)) // 2)
        while size:
            start = 0
            while start < len(getattr(schedule, what)) and left:
                dropped = set(range(start, start + size))
                incidents, jobs = (dropped, set()) if what == "incidents" else (set(), dropped)
                shorter = schedule.without(incidents, jobs)
                left -= 1
                if shorter.jobs and breaks(shorter):
                    schedule = shorter
                else:
                    start += size
            size //= 2
    return schedule
