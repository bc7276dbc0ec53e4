"""Slices with a bad host: given back, or kept so that the cloud has to give others. Pure.

A slice that is given back is often granted again within minutes, bad host and all. Parked slices
cost as much as good ones, so there is a limit, and all are released as soon as the program runs.
"""

from dataclasses import replace

from drumline.jobs.core.state import Decision, Effect, EffectKind, Event, Job, Placement, Seen
from drumline.observed.hosts import HostPhase


def let_go(
    job: Job, held: Placement, why: str, *, idle: bool
) -> tuple[Job, tuple[Effect, ...], tuple[Event, ...]]:
    """The job without the slice it holds: parked if there is room, else released.

    Only an `idle` one is parked. Where the program may still run on a host, nothing but the
    slice's end makes sure that it does not run twice.
    """
    without = replace(job, placement=None)
    if not idle or len(job.parked) >= job.parking:
        return without, (Effect(EffectKind.RELEASE, held, why),), ()
    kept = replace(without, parked=(*job.parked, held))
    event = Event("parked", f"{held.name} ({held.chips} chips in {held.zone}) until another runs")
    return kept, (), (event,)


def refuse(job: Job, held: Placement, why: str, asks_again_at: float) -> Decision:
    """A host of the slice is known to be bad: the same attempt goes on with another slice."""
    following = (job.next_choice + 1) % len(job.choices)
    left, effects, events = let_go(job, held, why, idle=True)
    again = replace(left, next_choice=following, not_before=asks_again_at, reason=f"refused: {why}")
    return Decision(again, effects, (Event("refused", why), *events))


def release_parked(decision: Decision, seen: Seen) -> Decision:
    """The decision, and the release of what is parked if it serves nothing any longer."""
    job = decision.job
    begun = job.attempt is not None and job.attempt.running_at is not None
    runs = begun and all(
        report.phase is HostPhase.RUNNING and report.examined in {"", "pass", "warn"}
        for report in seen.hosts
    )
    if not job.parked or not (job.status.ended or runs):
        return decision
    why = "the job is over" if job.status.ended else "the program runs elsewhere"
    released = tuple(Effect(EffectKind.RELEASE, each, f"parked; {why}") for each in job.parked)
    slices = "1 parked slice" if len(job.parked) == 1 else f"{len(job.parked)} parked slices"
    event = Event("released", f"{slices} released: {why}")
    return replace(
        decision,
        job=replace(job, parked=()),
        effects=(*decision.effects, *released),
        events=(*decision.events, event),
    )
