"""What will happen in one schedule: jobs, what users do to them, and what goes wrong, and when.

All of it is drawn before it begins, as a list, so that a schedule that breaks a promise can be
made shorter by leaving things out.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.environment import RandomStreams, Stream
from tests.simulation.programs import Bug, Failing, Plan

HOUR = 3600.0
NIGHT = 8 * HOUR
"""All that goes wrong does so in this time, and close together; the rest of the day is calm."""
ZONES = ("us-central1-a", "us-west4-a", "europe-west4-b")
SECOND_HOME = 0.4
"""How often a second user with a home of his own has jobs in the same project and bucket."""
KINDS = ("v5litepod-4",) * 4 + ("v5litepod-8", "v5litepod-16")


@dataclass(frozen=True)
class JobPlan:
    """A job that a user will hand in."""

    number: int
    at: float
    spec: dict[str, Any]
    program: Plan
    home: int = 0
    """Which user hands it in: each has a home and a server, and all have one project and bucket."""


@dataclass(frozen=True)
class Incident:
    """Something that happens at a time: a user's verb, or a fault."""

    at: float
    kind: str
    target: int = 0
    """Which job, zone or host it strikes: taken modulo how many there are."""
    seconds: float = 0.0
    """How long it lasts."""
    amount: float = 0.0

    def told(self) -> str:
        """For a reader."""
        lasting = f" for {self.seconds:.0f} s" if self.seconds else ""
        return f"{_clock(self.at)}  {self.kind} (target {self.target}){lasting}"


@dataclass(frozen=True)
class Schedule:
    """One bad night."""

    seed: int
    jobs: tuple[JobPlan, ...]
    incidents: tuple[Incident, ...] = field(default=())
    round_pause: float = 0.02
    """The least seconds between two rounds of the server: short ones see every order of events,
    long ones see several at once."""
    quiet_at: float = NIGHT
    """From then on nothing goes wrong."""

    def told(self) -> list[str]:
        """For a reader, in the order in which it happens."""
        lines = [(job.at, _told(job)) for job in self.jobs]
        lines += [(incident.at, incident.told()) for incident in self.incidents]
        return [text for _, text in sorted(lines)]

    def without(self, incidents: set[int], jobs: set[int]) -> "Schedule":
        """The same with less in it."""
        return replace(
            self,
            jobs=tuple(j for n, j in enumerate(self.jobs) if n not in jobs),
            incidents=tuple(i for n, i in enumerate(self.incidents) if n not in incidents),
        )


def _clock(at: float) -> str:
    return f"{int(at // 3600):02}:{int(at % 3600 // 60):02}:{at % 60:06.3f}"


def _told(job: JobPlan) -> str:
    program = job.program
    bugs = ", ".join(f"{bug.kind} at step {bug.step}" for bug in program.bugs) or "no bugs"
    what = f"{job.spec['accelerator']} in {len(job.spec['zones'])} zones"
    return f"{_clock(job.at)}  create job {job.number}: {what}, {program.steps} steps, {bugs}"


_FAULTS: tuple[tuple[str, float, float], ...] = (
    # kind, how many a night on average, usual seconds that it lasts
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
)
"""Drawn from a stream of their own, so that they change nothing in the others."""
_VERBS: tuple[tuple[str, float], ...] = (
    ("cancel", 3.0),
    ("resume", 3.0),
    ("delete", 1.5),
    ("clean", 0.7),
    ("look", 1.0),
)


def generate_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    stream = RandomStreams(seed)["schedule"]
    night = NIGHT
    many = stream.randint(8, 10)
    jobs = tuple(_job(stream, n, stream.uniform(0, night * 0.6)) for n in range(1, many + 1))
    # A calm night finds what a stormy one hides, and the other way round.
    storm = stream.choice((0.3, 0.5, 0.8, 1.2))
    incidents = []
    for kind, often, lasts in _FAULTS:
        for _ in range(_poisson(stream, often * storm)):
            seconds = lasts * stream.expovariate(1.0) if lasts > 60 else lasts
            incidents.append(
                Incident(
                    stream.uniform(0, night),
                    kind,
                    stream.randrange(1 << 16),
                    seconds,
                    stream.random(),
                )
            )
    for verb, often in _VERBS:
        for _ in range(_poisson(stream, often)):
            at, target = stream.uniform(0, night), stream.randrange(1 << 16)
            incidents.append(Incident(at, verb, target))
            if stream.chance(0.4):
                # Two people at one job, within moments of each other.
                other = stream.choice(_VERBS)[0]
                incidents.append(Incident(at + stream.uniform(0, 3.0), other, target))
    more = Stream(f"{seed} more faults")
    for kind, often, lasts in _MORE_FAULTS:
        for _ in range(_poisson(more, often * storm)):
            at, seconds = more.uniform(0, night), lasts * more.expovariate(1.0)
            incidents.append(Incident(at, kind, more.randrange(1 << 16), seconds, more.random()))
    incidents.sort(key=lambda incident: incident.at)
    # From dice of its own, as the chips below.
    homes = Stream(f"{seed} homes")
    if homes.chance(SECOND_HOME):
        numbers = range(many + 1, many + 1 + homes.randint(1, 3))
        others = [_job(homes, n, homes.uniform(0, night * 0.6)) for n in numbers]
        jobs += tuple(replace(job, home=1) for job in others)
    return Schedule(
        seed, jobs, tuple(incidents), stream.choice((0.02, 2.0, 10.0, 10.0, *(20.0,) * 4))
    )


def _job(stream: Stream, number: int, at: float) -> JobPlan:
    zones = sorted(stream.sample(ZONES, stream.randint(1, 3)))
    steps = stream.randint(3, 15)
    tells = stream.chance(0.8)
    # Of a program that tells nothing nobody can say that it hangs.
    failing: tuple[Failing, ...] = ("exit", "killed", "hang") if tells else ("exit", "killed")
    bugs = tuple(
        Bug(stream.randint(1, steps - 1), stream.choice(failing), stream.randrange(4))
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
    # From dice of its own: a draw more in these would change every other night.
    chips = Stream(f"{number} at {at}")
    spec |= {
        "burnin": chips.choice(("off", "off", "short", "long")),
        "parking": chips.choice((0, 0, 1, 2)),
    }
    program = Plan(
        steps=steps,
        seconds=stream.uniform(180.0, 600.0),
        save_every=stream.choice((1, 3, 8)),
        bugs=bugs,
        on_sigterm=stream.choice(("leaves", "dies", "ignores")),
        tells=tells,
    )
    return JobPlan(number, at, spec, program)


def _poisson(stream: Stream, mean: float) -> int:
    """How often something of that mean happens."""
    positive_integer, left = 0, stream.expovariate(1.0)
    while left < mean:
        positive_integer += 1
        left += stream.expovariate(1.0)
    return positive_integer
