"""Slices with a bad host: given back, or kept so that the cloud has to give others. Pure.

A slice that is given back is often granted again within minutes, bad host and all. Parked slices
cost as much as good ones, so there is a limit, and all are released as soon as the program runs, or
no other slice is to be had.
"""

from dataclasses import replace

from drumline.jobs.core.state import Decision, Effect, EffectKind, Event, Job, Placement, Seen
from drumline.observed.faults import Fault, FaultKind
from drumline.observed.hosts import HostPhase, HostReport


def let_go(
    job: Job, held: Placement, why: str, *, idle: bool
) -> tuple[Job, tuple[Effect, ...], tuple[Event, ...]]:
    """The job without the slice it holds: parked if there is room, else released.

    One where the program may still run is not `idle` and never parked: the next attempt waits until
    a released slice is gone, but not for a parked one, and two programs would write to the same
    checkpoints.
    """
    without = replace(job, placement=None)
    if not idle or len(job.parked) >= job.parking:
        return without, (Effect(EffectKind.RELEASE, held, why),), ()
    kept = replace(without, parked=(*job.parked, held))
    event = Event("parked", f"{held.name} ({held.chips} chips in {held.zone}) until another runs")
    return kept, (), (event,)


def release_parked(decision: Decision, seen: Seen) -> Decision:
    """The decision, and the release of what is parked if it serves nothing any longer."""
    job = decision.job
    begun = job.attempt is not None and job.attempt.running_at is not None
    # A server that has just started has heard of no host: then nothing is known to run.
    runs = begun and bool(seen.hosts) and all(_at_work(report) for report in seen.hosts)
    if job.status.ended:
        return _released(decision, "the job is over")
    return _released(decision, "the program runs elsewhere") if runs else decision


def release_if_none_is_left(decision: Decision, fault: Fault) -> Decision:
    """The decision after a refused request, and the release of what is parked if it is in the way.

    Parked slices use up quota, perhaps all of it. And where every choice is out of capacity, they
    would be paid for as long as that lasts.
    """
    job = decision.job
    tried_all = job.next_choice == 0 and fault.kind is FaultKind.STOCKOUT
    if fault.kind is FaultKind.QUOTA or tried_all:
        return _released(decision, "no other slice is to be had")
    return decision


def release_after_waiting(decision: Decision) -> Decision:
    """The decision, and the release of what is parked: the queue does not move."""
    return _released(decision, "no other slice is to be had")


def _at_work(report: HostReport) -> bool:
    """Whether a host runs the program, or has done its part, and passed what came before it."""
    done = report.phase is HostPhase.EXITED and report.exit_code == 0
    at_work = done or report.phase is HostPhase.RUNNING
    return at_work and report.examined in {"", "pass", "warn"}


def _released(decision: Decision, why: str) -> Decision:
    job = decision.job
    if not job.parked:
        return decision
    released = tuple(Effect(EffectKind.RELEASE, each, f"parked; {why}") for each in job.parked)
    slices = "1 parked slice" if len(job.parked) == 1 else f"{len(job.parked)} parked slices"
    event = Event("released", f"{slices} released: {why}")
    return replace(
        decision,
        job=replace(job, parked=()),
        effects=(*decision.effects, *released),
        events=(*decision.events, event),
    )
