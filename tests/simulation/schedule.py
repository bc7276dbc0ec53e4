"""One schedule: the jobs, the commands of their users, and the faults with their times.

A schedule is drawn as a list before it begins, so that a schedule that violates an invariant can be
shrunk by leaving entries out.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.environment import RandomStreams, Stream
from tests.simulation.programs import Bug, FailureKind, Plan

HOUR = 3600.0
FAULT_PERIOD = 8 * HOUR
"""All faults begin in this time, close together; the rest of the day is calm."""
ZONES = ("us-central1-a", "us-west4-a", "europe-west4-b")
SECOND_HOME = 0.4
"""The share of schedules with a second user, whose home uses the same project and bucket."""
KINDS = ("v5litepod-4",) * 4 + ("v5litepod-8", "v5litepod-16")


@dataclass(frozen=True)
class JobPlan:
    """A job that a user will submit."""

    number: int
    at: float
    spec: dict[str, Any]
    program: Plan
    home: int = 0
    """Index of the user who submits it.

    Each has a home and a server; all share one project and bucket.
    """


@dataclass(frozen=True)
class Incident:
    """An event at a given time: a user's command, or a fault."""

    at: float
    kind: str
    target: int = 0
    """Index of the affected job, zone or host, modulo their number."""
    seconds: float = 0.0
    """Duration in seconds."""
    amount: float = 0.0

    def describe(self) -> str:
        """Return a line of text for the report."""
        suffix = f" for {self.seconds:.0f} s" if self.seconds else ""
        return f"{_clock(self.at)}  {self.kind} (target {self.target}){suffix}"


@dataclass(frozen=True)
class Schedule:
    """The jobs and faults of one simulated day."""

    seed: int
    jobs: tuple[JobPlan, ...]
    incidents: tuple[Incident, ...] = field(default=())
    round_pause: float = 0.02
    """The shortest time in seconds between two rounds of the server.

    Short pauses test every order of events, long ones test several events in one round.
    """
    quiet_at: float = FAULT_PERIOD
    """No fault begins or lasts after this time."""

    def describe(self) -> list[str]:
        """Return the schedule as text, in order of time."""
        lines = [(job.at, _describe_job(job)) for job in self.jobs]
        lines += [(incident.at, incident.describe()) for incident in self.incidents]
        return [text for _, text in sorted(lines)]

    def without(self, incidents: set[int], jobs: set[int]) -> "Schedule":
        """Return the schedule without these incidents and jobs."""
        return replace(
            self,
            jobs=tuple(j for n, j in enumerate(self.jobs) if n not in jobs),
            incidents=tuple(i for n, i in enumerate(self.incidents) if n not in incidents),
        )


def _clock(at: float) -> str:
    return f"{int(at // 3600):02}:{int(at % 3600 // 60):02}:{at % 60:06.3f}"


def _describe_job(job: JobPlan) -> str:
    program = job.program
    bugs = ", ".join(f"{bug.kind} at step {bug.step}" for bug in program.bugs) or "no bugs"
    request = f"{job.spec['accelerator']} in {len(job.spec['zones'])} zones"
    return f"{_clock(job.at)}  create job {job.number}: {request}, {program.steps} steps, {bugs}"


_FAULTS: tuple[tuple[str, float, float], ...] = (
    # kind, average number per schedule, usual duration in seconds
    ("preempt", 5.0, 0.0),
    ("preempt with notice", 3.0, 30.0),
    ("preempt zone", 1.0, 0.0),
    ("no capacity", 1.5, 2400.0),
    ("request fails", 1.5, 0.0),
    ("refuse", 0.7, 900.0),
    ("cloud fails", 1.5, 600.0),
    ("deletes fail", 0.7, 1800.0),
    ("login expires", 0.5, 1800.0),
    ("listings lag", 1.0, 600.0),
    ("listings have holes", 1.0, 900.0),
    ("cut host", 4.0, 0.0),
    ("hang host", 2.0, 120.0),
    ("hang host long", 0.6, 8000.0),
    ("mute host", 0.7, 300.0),
    ("host is lost", 0.5, 0.0),
    ("host lies", 0.4, 0.0),
    ("reboot host", 1.0, 120.0),
    ("host disk full", 0.4, 1200.0),
    ("kill server", 3.5, 30.0),
    ("sleep", 0.7, 3600.0),
    ("clock forward", 0.7, 0.0),
    ("clock back", 0.7, 0.0),
    ("disk full", 0.5, 300.0),
)
_MORE_FAULTS: tuple[tuple[str, float, float], ...] = (
    ("creations fail", 0.7, 1200.0),
    ("requests appear late", 0.7, 1200.0),
    ("lookups fail", 1.0, 900.0),
    ("slices never boot", 0.5, 900.0),
    ("deletions hang", 0.7, 5400.0),
    ("maintenance", 0.7, 3000.0),
    ("cancel out of reach", 1.0, 900.0),
    ("deletions never end", 0.5, 1800.0),
)
"""Drawn from a separate stream, so that they do not change the other draws."""
_FAULTS_OF_RACES: tuple[tuple[str, float, float], ...] = (
    ("slices boot in the same time", 1.0, 5400.0),
    ("deletions begin late", 1.0, 3600.0),
    ("no quota in two zones", 0.7, 3600.0),
    ("no capacity anywhere", 0.5, 5400.0),
)
"""Faults for jobs that ask in several zones, from another separate stream."""
_VERBS: tuple[tuple[str, float], ...] = (
    ("cancel", 3.0),
    ("resume", 3.0),
    ("delete", 1.5),
    ("clean", 0.7),
    ("look", 1.0),
)


def generate_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    stream = RandomStreams(seed)["schedule"]
    fault_period = FAULT_PERIOD
    job_count = stream.randint(8, 10)
    jobs = tuple(
        _job(stream, n, stream.uniform(0, fault_period * 0.6)) for n in range(1, job_count + 1)
    )
    # Few faults uncover bugs that many faults hide, and the other way round.
    intensity = stream.choice((0.3, 0.5, 0.8, 1.2))
    incidents = []
    for kind, mean_count, duration in _FAULTS:
        for _ in range(_poisson(stream, mean_count * intensity)):
            seconds = duration * stream.expovariate(1.0) if duration > 60 else duration
            incidents.append(
                Incident(
                    stream.uniform(0, fault_period),
                    kind,
                    stream.randrange(1 << 16),
                    seconds,
                    stream.random(),
                )
            )
    for verb, mean_count in _VERBS:
        for _ in range(_poisson(stream, mean_count)):
            at, target = stream.uniform(0, fault_period), stream.randrange(1 << 16)
            incidents.append(Incident(at, verb, target))
            if stream.bernoulli(0.4):
                # Two people give commands on one job at nearly the same time.
                other = stream.choice(_VERBS)[0]
                incidents.append(Incident(at + stream.uniform(0, 3.0), other, target))
    for name, faults in (("more faults", _MORE_FAULTS), ("races", _FAULTS_OF_RACES)):
        extra = Stream(f"{seed} {name}")
        for kind, mean_count, duration in faults:
            for _ in range(_poisson(extra, mean_count * intensity)):
                at, seconds = extra.uniform(0, fault_period), duration * extra.expovariate(1.0)
                target = extra.randrange(1 << 16)
                incidents.append(Incident(at, kind, target, seconds, extra.random()))
    incidents.sort(key=lambda incident: incident.at)
    # Drawn from a separate stream, like the chips below.
    homes = Stream(f"{seed} homes")
    if homes.bernoulli(SECOND_HOME):
        numbers = range(job_count + 1, job_count + 1 + homes.randint(1, 3))
        others = [_job(homes, n, homes.uniform(0, fault_period * 0.6)) for n in numbers]
        jobs += tuple(replace(job, home=1) for job in others)
    return Schedule(
        seed, jobs, tuple(incidents), stream.choice((0.02, 2.0, 10.0, 10.0, *(20.0,) * 4))
    )


def _job(stream: Stream, number: int, at: float) -> JobPlan:
    zones = sorted(stream.sample(ZONES, stream.randint(1, 3)))
    steps = stream.randint(3, 15)
    writes_heartbeats = stream.bernoulli(0.8)
    # A program without heartbeats cannot be recognized as stuck.
    failure_kinds: tuple[FailureKind, ...] = (
        ("exit", "killed", "hang") if writes_heartbeats else ("exit", "killed")
    )
    bugs = tuple(
        Bug(stream.randint(1, steps - 1), stream.choice(failure_kinds), stream.randrange(4))
        for _ in range(stream.choice((0, 0, 0, 0, 0, 1, 1, 2, 5)))
    )
    failures = stream.choice((0, 1, 3, 3, 3))
    spec = {
        "name": f"job-{number}",
        "accelerator": stream.choice(KINDS),
        "zones": zones,
        "run": "python train.py",
        "workdir": None,
        "checkpoint": "gs://lab/run",
        "secrets": ["TOKEN"],
        "setup": stream.choice((None, "make data")),
        "retry": {"failures": failures, "bad_hosts": 50},
        "keep": stream.choice((0, 600, 3600)),
        "stop_grace": stream.choice((5, 30)),
        "stuck_after": 2400,
    }
    # Drawn from a separate stream: one more draw in `stream` would change all schedules.
    chips = Stream(f"{number} at {at}")
    spec |= {
        "burnin": chips.choice(("off", "off", "short", "long")),
        "parking": chips.choice((None, None, 1, 2)),
        "outputs": chips.choice(([], ["results/"])),
        "ask": chips.choice((1, 2, 3, 3)),
        "migrate": chips.choice(("never", "never", "cheaper")),
    }
    program = Plan(
        steps=steps,
        seconds=stream.uniform(180.0, 600.0),
        save_every=stream.choice((1, 3, 8)),
        bugs=bugs,
        on_sigterm=stream.choice(("leaves", "dies", "ignores")),
        writes_heartbeats=writes_heartbeats,
    )
    return JobPlan(number, at, spec, program)


def _poisson(stream: Stream, mean: float) -> int:
    """Draw from a Poisson distribution."""
    count, total = 0, stream.expovariate(1.0)
    while total < mean:
        count += 1
        total += stream.expovariate(1.0)
    return count
