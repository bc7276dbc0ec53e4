"""The requests of a job for slices: where it asks, and what becomes of each request. Pure.

A job asks in up to `ask` zones at once. The first slices that are ready become active, unless a
cheaper one is ready within a minute. The other requests stay until all hosts of the active slices
have answered, because a granted slice may be preempted or broken before that. Then they are
released. A request that waits for minutes is replaced by a new one, because the cloud may neglect
an old request and grant a new one at once.
"""

from collections.abc import Iterable
from dataclasses import replace
from zlib import crc32

from drumline.jobs.core.outcomes import (
    after_preemption,
    current_attempt,
    finish_job,
    format_duration,
    retry_pause,
    with_backoff,
    with_reason,
)
from drumline.jobs.core.reasons import EndReason, EventType
from drumline.jobs.core.refusals import (
    REFUSALS_PER_CANDIDATE,
    RefusalAction,
    action_for,
    leaves_candidate,
)
from drumline.jobs.core.releases import (
    release_held_back,
    release_if_blocking,
    release_unneeded,
    release_while_waiting,
)
from drumline.jobs.core.state import (
    Attempt,
    Candidate,
    Cause,
    Decision,
    DesiredState,
    Effect,
    EffectType,
    EndedAttempt,
    Event,
    Job,
    Observations,
    Placement,
    PlacementObservation,
    PlacementRole,
    Status,
    Timeouts,
    ZoneStatus,
)
from drumline.observed import Fault, FaultType, PlacementState, Refusal, Scope, with_words

CROWDED_WAITS = 2
"""The smallest factor on the age at which a request is replaced where many requests wait."""


def seek_slices(job: Job, observations: Observations, now: float, timeouts: Timeouts) -> Decision:
    """Follow the requests of a job without active slices, and ask in more zones.

    Of several slices that are ready, the first in the order of the job file becomes active, unless
    another one costs at least a tenth less.
    """
    decision = Decision(job)
    order = {candidate: index for index, candidate in enumerate(job.choices)}
    for placement in sorted(job.requests, key=lambda p: order.get(p.candidate, len(order))):
        decision = decision.then(_follow(decision.job, placement, observations, now, timeouts))
        if decision.job.active or len(decision.job.requests) < len(job.requests):
            return decision  # a zone that was left still counts as open in these observations
    backs_off = now < decision.job.not_before
    if backs_off and not decision.job.requests:
        return decision
    if observations.old_program_may_run:
        reason = "waiting for the previous slice to be deleted"
        decision = replace(decision, job=with_reason(decision.job, reason))
        return release_while_waiting(decision, now, timeouts)
    if not backs_off:
        decision = _ask(decision, observations, now)
    decision = replace(decision, job=_with_waiting_reason(decision.job, observations, now))
    queued = [request for request in decision.job.requests if request.queued]
    waited = min((now - request.waiting_since for request in queued), default=0.0)
    if len(queued) == len(decision.job.requests) and waited > timeouts.waiting:
        return release_held_back(decision)
    return decision


def seek_cheaper_slices(
    decision: Decision, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Request slices that are cheaper than the active ones, and stop the program once one is ready.

    Only a job with `migrate: cheaper` leaves a healthy slice. The requests cost nothing until they
    are granted, and the program saves its work as before a preemption.
    """
    job, active, attempt = decision.job, decision.job.active, decision.job.attempt
    if active is None or attempt is None or attempt.running_at is None or attempt.stopping:
        return decision
    if not job.migrates or job.wish is not DesiredState.RUN:
        return decision
    request = next((request for request in job.requests if request.ready_at is not None), None)
    if request is not None:
        if not job.is_cheaper(request.candidate, active.candidate):
            release = Effect(EffectType.RELEASE, request, "it is not cheaper")
            return decision.then(Decision(job.drop(request), (release,)))
        text = f"moving to a cheaper slice in {request.zone}"
        cause = Cause(EndReason.MOVED, 0, active.hosts, text)
        job = replace(job, cause=cause, attempt=replace(attempt, stopping=True))
        stop = Effect(EffectType.STOP, active)
        event = Event(EventType.MOVED, text, _place(request))
        return decision.then(Decision(with_reason(job, text), (stop,), (event,)))
    if now - attempt.running_at < timeouts.settled:
        return decision
    asked = {request.zone for request in job.requests} | {active.zone}
    for candidate in job.choices:
        status = observations.zones.get(candidate, ZoneStatus(open=False))
        wanted = status.open and status.reliable and not status.crowded
        cheaper = job.is_cheaper(candidate, active.candidate)
        if wanted and cheaper and candidate.zone not in asked and len(job.requests) < job.ask:
            return decision.then(_request(job, candidate, now))
    return decision


def follow_other_requests(
    decision: Decision, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Follow the requests that a job keeps until the hosts of its active slices have answered."""
    for placement in decision.job.requests:
        decision = decision.then(_follow(decision.job, placement, observations, now, timeouts))
        if decision.job.status.ended:
            break
    return decision


# --- Asking -----------------------------------------------------------------------------------


def _ask(decision: Decision, observations: Observations, now: float) -> Decision:
    """Add requests in open zones until the job has `ask` of them, at most one in each zone.

    All are for one accelerator, so that the next one in the job file is requested only if no zone
    has the first.

    The order is that of the job file, from the zone that last had slices, but unreliable zones come
    last. A zone in which many requests wait gets only first requests, so that no job waits behind
    the second and third requests of others.
    """
    job = decision.job
    ordered = [*job.choices[job.next_choice :], *job.choices[: job.next_choice]]
    ordered.sort(key=lambda c: not observations.zones.get(c, ZoneStatus()).reliable)
    for candidate in ordered:
        requests = decision.job.requests
        if len(requests) >= job.ask:
            break
        status = observations.zones.get(candidate, ZoneStatus())
        wanted = status.open and not (requests and status.crowded)
        same = not requests or candidate.accelerator == requests[0].accelerator
        if wanted and same and candidate.zone not in {request.zone for request in requests}:
            decision = decision.then(_request(decision.job, candidate, now))
    return decision


def _request(job: Job, candidate: Candidate, now: float) -> Decision:
    """Request slices from the cloud, and begin an attempt if none is in progress."""
    placement = _new_placement(job, candidate, now)
    first = not job.requests and job.active is None
    job = _with_attempt(replace(job, asks=job.asks + 1), now).put(placement)
    if first:
        job = replace(job, next_choice=job.choices.index(candidate))
    return Decision(
        job,
        effects=(Effect(EffectType.REQUEST, placement),),
        events=(
            Event(
                EventType.ASKED,
                f"{candidate.accelerator} in {candidate.zone}",
                {"accelerator": candidate.accelerator, "zone": candidate.zone},
            ),
        ),
    )


def _new_placement(job: Job, candidate: Candidate, now: float) -> Placement:
    """Return the next request of a job, with a name that no earlier one had."""
    return Placement(
        name=f"dl-{job.owner}-{job.id}-{job.asks + 1}",
        zone=candidate.zone,
        accelerator=candidate.accelerator,
        hosts=candidate.hosts * job.slices,
        asked_at=now,
        slices=job.slices,
    )


def _with_attempt(job: Job, now: float) -> Job:
    """Return the job with an attempt in progress."""
    if job.attempt is not None:
        return job
    number = job.attempts + 1
    return replace(job, attempts=number, attempt=Attempt(number, started_at=now))


# --- The answer to a request ------------------------------------------------------------------


def request_accepted(job: Job, name: str, now: float, operation: str = "") -> Job:
    """Return the job after the cloud accepted a request. Its `operation` may still fail."""
    placement = unanswered_request(job, name)
    if placement is None:
        return job
    return job.put(replace(placement, accepted_at=now, operation=operation, refusal=""))


def request_refused(
    job: Job, name: str, refusal: Refusal, now: float, timeouts: Timeouts
) -> Decision:
    """Decide what follows after the cloud refused a request."""
    placement = unanswered_request(job, name)
    if placement is None:
        return Decision(job)
    fault = refusal.fault
    if _action(job, placement, fault) is RefusalAction.RETRY and not _leaves(job, placement, fault):
        # Nothing exists in the cloud, so the same request is repeated under the same name.
        refused = job.put(_repeated(placement, refusal, now, timeouts))
        known = any(request.refusal == refusal.text for request in job.requests)
        # A job may wait for days, and replaces its requests every few minutes.
        silent = placement.refusals or placement.first_asked_at is not None or known
        events = () if silent else (Event(EventType.WAITING, refusal.text),)
        decision = Decision(_waiting(refused, refusal.text), events=events)
        return release_if_blocking(decision, fault)
    decision = _drop(job, placement, refusal, now, timeouts)
    return release_unneeded(decision, ())


def unanswered_request(job: Job, name: str) -> Placement | None:
    """Return a request that the cloud has not accepted yet; None if the job has it no longer."""
    return next((p for p in job.requests if p.name == name and p.accepted_at is None), None)


def _repeated(placement: Placement, refusal: Refusal, now: float, timeouts: Timeouts) -> Placement:
    """Return a request that is to be repeated after a pause."""
    refusals = placement.refusals + 1
    retry_at = now + retry_pause(refusals, timeouts.retry)
    return replace(placement, refusals=refusals, retry_at=retry_at, refusal=refusal.text)


def _action(job: Job, placement: Placement, fault: Fault) -> RefusalAction:
    """Return the action that follows a refused request.

    A new request is repeated if the quota is used up, because the old request that it replaces may
    count until it is deleted. But held-back slices may use up the quota, too.
    """
    first = placement.first_asked_at is not None and placement.refusals < REFUSALS_PER_CANDIDATE
    replaces = first and not job.held_back
    return RefusalAction.RETRY if fault.kind is FaultType.QUOTA and replaces else action_for(fault)


def _leaves(job: Job, placement: Placement, fault: Fault) -> bool:
    """Return True if repeating a refused request did not help, and there is another candidate."""
    requested = {request.candidate for request in job.requests}
    return leaves_candidate(fault, placement.refusals + 1) and bool({*job.choices} - requested)


def _drop(
    job: Job, placement: Placement, refusal: Refusal, now: float, timeouts: Timeouts
) -> Decision:
    """Drop a request that yields no slices: delete it in the cloud and decide what follows."""
    fault, text = refusal.fault, refusal.text
    release = Effect(EffectType.RELEASE, placement, refusal.message)
    action = _action(job, placement, fault)
    if action is RefusalAction.RETRY and _leaves(job, placement, fault):
        action = RefusalAction.NEXT_CANDIDATE
    others = [other for other in job.placements if other.name != placement.name]
    accepted = any(other.accepted_at is not None for other in others)
    if action is RefusalAction.GIVE_UP and (accepted or placement.first_asked_at is not None):
        action = RefusalAction.NEXT_CANDIDATE  # the cloud has accepted the same request before
    match action:
        case RefusalAction.NEXT_CANDIDATE:
            decision = _try_next_candidate(
                job, placement, refusal.message, refusal.words, fault.kind
            )
            return release_if_blocking(decision, fault)
        case RefusalAction.RETRY:
            new = _repeated(placement, refusal, now, timeouts)
            again = replace(
                _new_placement(job, placement.candidate, now),
                refusals=new.refusals,
                retry_at=new.retry_at,
                refusal=text,
                first_asked_at=placement.first_asked_at,
            )
            job = replace(job.drop(placement), asks=job.asks + 1).put(again)
            decision = Decision(
                _waiting(job, text),
                effects=(release,),
                events=(Event(EventType.WAITING, text, _place(placement)),),
            )
            return release_if_blocking(decision, fault)
        case RefusalAction.PREEMPTION:
            return _lose_request(job, placement, refusal, now, timeouts)
        case RefusalAction.GIVE_UP:
            return finish_job(
                job.drop(placement),
                Status.FAILED,
                text,
                now,
                effects=(release,),
                ended=(EndedAttempt(current_attempt(job), EndReason.REFUSED, text),),
            )


def _lose_request(
    job: Job, placement: Placement, refusal: Refusal, now: float, timeouts: Timeouts
) -> Decision:
    """Count slices that the cloud took back before they were ready, and end the attempt.

    A job that has other requests or active slices has lost nothing.
    """
    if job.active is not None or job.drop(placement).requests:
        return _try_next_candidate(
            job, placement, refusal.message, refusal.words, refusal.fault.kind
        )
    # Back off, because the cloud may preempt every slice before it is ready.
    job = with_backoff(job, now, timeouts)
    if leaves_candidate(refusal.fault, job.refusals):
        job = replace(job, next_choice=(job.next_choice + 1) % len(job.choices))
    return after_preemption(job, placement, refusal.text, now)


def _try_next_candidate(
    job: Job,
    placement: Placement,
    reason: str,
    words: str = "",
    fault: FaultType = FaultType.STOCKOUT,
) -> Decision:
    """Drop a request, and leave its zone alone for a while. The attempt continues elsewhere."""
    index = job.next_choice
    if placement.candidate in job.choices:
        index = job.choices.index(placement.candidate)
    job = replace(job.drop(placement), next_choice=(index + 1) % len(job.choices))
    text = with_words(reason, words)
    return Decision(
        _waiting(job, text),
        effects=(
            Effect(EffectType.NO_CAPACITY, placement, reason, words, fault),
            Effect(EffectType.RELEASE, placement, reason),
        ),
        events=(Event(EventType.WAITING, text, _place(placement) | {"fault": fault.value}),),
    )


def _waiting(job: Job, reason: str) -> Job:
    """Return the job with the reason why it waits, unless it has active slices."""
    return job if job.active else with_reason(job, reason, Status.WAITING)


# --- Following a request ----------------------------------------------------------------------


def _follow(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Decide on one request by the newest poll of its zone."""
    if placement.accepted_at is None:
        if now < placement.retry_at:
            return Decision(job)
        return Decision(job, effects=(Effect(EffectType.REQUEST, placement),))
    observation = observations.placements.get(placement.name)
    if observation is None:
        return Decision(job)
    listed, lost_reason = observation.listed, observation.lost_reason
    if listed is None or lost_reason is not None:
        refusal = observation.refusal or (listed.refusal if listed else None)
        if listed is None and refusal is None and _may_appear(placement, observation, timeouts):
            return Decision(job)
        if listed is None and refusal is None and observation.creating:
            # Nothing shows that there ever was a slice that the cloud could preempt.
            accepted_for = format_duration(now - placement.accepted_at)
            reason = f"slice in {placement.zone} is still not created after {accepted_for}"
            return _try_next_candidate(job, placement, reason)
        preemption = Refusal(Fault(FaultType.PREEMPTED, Scope.ZONE), lost_reason or "")
        return _drop(job, placement, refusal or preemption, now, timeouts)
    if listed.state is PlacementState.READY and len(listed.endpoints) == placement.hosts:
        return _take_ready_slices(job, placement, observations, now, timeouts)
    if listed.state is not PlacementState.QUEUED:
        since = observation.at if placement.booting_at is None else placement.booting_at
        if observation.at - since > timeouts.booting:
            # Such a slice may stay so for days, and uses quota.
            ready = listed.state is PlacementState.READY
            state = f"{listed.cloud_state} without all addresses" if ready else listed.cloud_state
            boot_time = format_duration(observation.at - since)
            reason = f"slice in {placement.zone} is still {state} after {boot_time}"
            return _try_next_candidate(job, placement, reason)
        return Decision(job.put(replace(placement, role=PlacementRole.STARTING, booting_at=since)))
    asked = {request.candidate for request in job.requests}
    others = [c for c, status in observations.zones.items() if status.open and c not in asked]
    # Another zone for the same accelerator is asked beside this one, if `ask` allows it.
    beside = len(asked) < job.ask and any(c.accelerator == placement.accelerator for c in others)
    limit, waited = timeouts.waiting * job.patience, now - placement.waiting_since
    reason = f"no capacity in {placement.zone} for {format_duration(waited)}"
    if waited > limit and others and not beside and job.active is None:
        return _try_next_candidate(job, placement, reason)
    if _is_neglected(job, placement, observations, now, timeouts):
        return _ask_again(job, placement, reason, now)
    return Decision(job)


def _is_neglected(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> bool:
    """Return True if a request has waited so long that a new one may be granted sooner.

    A request for reserved capacity, with more patience, would lose its place in a queue. In a zone
    that is closed, or where an earlier request of the job is not deleted yet, a new request could
    be refused, or add up with the others.
    """
    observation = observations.placements[placement.name]
    status = observations.zones.get(placement.candidate, ZoneStatus())
    may_ask = (status.open or status.crowded) and placement.zone not in observations.deleting
    # The cloud may have granted the request since the poll.
    polled = now - observation.at <= timeouts.visible
    if job.active is not None or job.patience > 1.0 or not (may_ask and polled):
        return False
    since = placement.asked_at if placement.accepted_at is None else placement.accepted_at
    # A request that was refused several times before may cost as many refusals again.
    limit = timeouts.waiting * (1 + placement.refusals)
    if status.crowded:
        limit *= _crowded_waits(placement)
    return observation.at - since > limit


def _crowded_waits(placement: Placement) -> float:
    """Return the factor on the age at which a request in a crowded zone is replaced.

    Several requests wait there, so one of them is new more often. The factor differs between
    requests, so that those which were made together are not replaced in the same minute.
    """
    return CROWDED_WAITS * (1.0 + crc32(placement.name.encode()) / 2**32)


def _ask_again(job: Job, placement: Placement, reason: str, now: float) -> Decision:
    """Replace a request by a new one in the same zone.

    This is no event, because a job may wait for days, and no shortage, because a backoff would keep
    the job out of the zone.
    """
    request = replace(
        _new_placement(job, placement.candidate, now), first_asked_at=placement.waiting_since
    )
    return Decision(
        replace(job.drop(placement), asks=job.asks + 1).put(request),
        effects=(
            Effect(EffectType.RELEASE, placement, reason),
            Effect(EffectType.REQUEST, request),
        ),
    )


def _may_appear(
    placement: Placement, observation: PlacementObservation, timeouts: Timeouts
) -> bool:
    """Return True if a request that the cloud does not have may still appear there."""
    limit = timeouts.booting if observation.creating else timeouts.visible
    return observation.at - (placement.accepted_at or placement.asked_at) <= limit


def _take_ready_slices(
    job: Job, placement: Placement, observations: Observations, now: float, timeouts: Timeouts
) -> Decision:
    """Make slices active that are ready, unless the job has others or its old program may run."""
    ready_at = now if placement.ready_at is None else placement.ready_at
    if job.active is not None or observations.old_program_may_run:
        if job.active is None and now - ready_at > timeouts.deleting:
            # Some deletions never end, and these slices would cost money for as long.
            reason = "the previous slice is still not deleted"
            return Decision(
                job.drop(placement), effects=(Effect(EffectType.RELEASE, placement, reason),)
            )
        return Decision(job.put(replace(placement, role=PlacementRole.STARTING, ready_at=ready_at)))
    ready_times = [ready_at, *(p.ready_at for p in job.requests if p.ready_at is not None)]
    may_wait = now - min(ready_times) < timeouts.cheaper
    if _cheaper_slice_follows(job, placement, observations, may_wait=may_wait):
        return Decision(job.put(replace(placement, role=PlacementRole.STARTING, ready_at=ready_at)))
    job = replace(_with_attempt(job, now), refusals=0)
    number = current_attempt(job).number
    active = replace(placement, role=PlacementRole.ACTIVE, ready_at=ready_at, first_attempt=number)
    job = job.put(active)
    if placement.candidate in job.choices:
        job = replace(job, next_choice=job.choices.index(placement.candidate))
    hosts = "1 host" if placement.hosts == 1 else f"{placement.hosts} hosts"
    text = f"{hosts}, {placement.chips} chips in {placement.zone}"
    return Decision(
        with_reason(job, "connecting to the hosts", Status.STARTING),
        effects=(Effect(EffectType.RUN, active),),
        events=(Event(EventType.SLICE, text, _place(active) | {"hosts": active.hosts}),),
    )


def _cheaper_slice_follows(
    job: Job, placement: Placement, observations: Observations, *, may_wait: bool
) -> bool:
    """Return True if cheaper slices are ready too, or boot and the job may wait for them."""
    for request in job.requests:
        observation = observations.placements.get(request.name)
        listed = observation.listed if observation else None
        if listed is None or request.accepted_at is None:
            continue
        if not job.is_cheaper(request.candidate, placement.candidate):
            continue
        ready = listed.state is PlacementState.READY and len(listed.endpoints) == request.hosts
        boots = listed.state in {PlacementState.BOOTING, PlacementState.READY}
        if ready or (boots and may_wait):
            return True
    return False


# --- Why a job waits --------------------------------------------------------------------------


def _with_waiting_reason(job: Job, observations: Observations, now: float) -> Job:
    """Return the job with the reason why it waits: the state of each request, or of each zone."""
    requests = job.requests
    if not requests:
        zones = dict.fromkeys(observations.zones[candidate] for candidate in job.choices)
        reasons = dict.fromkeys(zone.reason for zone in zones)
        reason = "; ".join(filter(None, reasons)) or "no zone is open"
        # The words of several zones would fill the screen. Each refusal is an event with its words.
        words = next(iter(zones)).words if len(zones) == 1 else ""
        return with_reason(job, with_words(reason, words))
    starting = [request for request in requests if request.role is PlacementRole.STARTING]
    queued = [request for request in requests if request.queued]
    unanswered = [request for request in requests if request.accepted_at is None]
    new = [request for request in unanswered if not request.refusals]
    parts = [f"slice is booting in {_zones(starting)}"] if starting else []
    waits: dict[str, list[Placement]] = {}
    for request in queued:
        waits.setdefault(format_duration(now - request.waiting_since), []).append(request)
    parts += [f"no capacity in {_zones(group)} for {waited}" for waited, group in waits.items()]
    if new:
        parts.append(f"requesting {new[0].accelerator} in {_zones(new)}")
    parts += dict.fromkeys(request.refusal for request in unanswered if request.refusals)
    position = ""
    if len(requests) == 1 and queued and job.next_choice:
        position = f"zone {job.next_choice + 1} of {len(job.choices)} · "
    status = Status.STARTING if starting else Status.WAITING
    return with_reason(job, position + "; ".join(parts), status)


def _place(placement: Placement) -> dict[str, str | float | None]:
    """Return the fields of an event that say which slices and where."""
    return {
        "name": placement.name,
        "accelerator": placement.accelerator,
        "zone": placement.zone,
        "chips": placement.chips,
    }


def _zones(requests: Iterable[Placement]) -> str:
    """Format the zones of requests: `a`, `a and b`, `a, b and c`."""
    *rest, last = [request.zone for request in requests]
    return f"{', '.join(rest)} and {last}" if rest else last
