"""What programs tell of their steps, kept for `list`, `plot` and the verdict whether one is stuck.

Heartbeats come ten a second and the disk is asked to be sure of each write, so what they bring is
held here and written every few seconds, and when an attempt ends. A server that is killed in
between reads the last heartbeat from the host again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drumline.jobs.controller.progress import LogReader, heartbeat_of
from drumline.jobs.core.state import Event
from drumline.jobs.core.steps import Steps, advance, number
from drumline.jobs.folders import Folders
from drumline.jobs.patterns import TooSlow
from drumline.jobs.store.metrics import Point
from drumline.jobs.store.records import Store
from drumline.observed.hosts import HostReport

WRITE_SECONDS = 5.0
"""Between two writes of what a program told."""
RESOLUTION = 200
"""A new point of the history is due once the job is older than at the last one by this fraction.
So a job's first seconds are known step by step and its hundredth hour by the half hour, and a month
at ten heartbeats a second is under 3,000 points."""
AT_THE_ENDS = 2
"""First and last steps of attempts may stand this many times closer, to show where each began."""
MOST_METRICS = 64
LONGEST_TEXT = 2000
"""What one job may tell: it stands in every `list`, and each of its figures in every point."""
SLOW_PATTERN = (
    "progress: the pattern takes too long for the lines of this program's log, which is no longer"
    " read for steps; a repeat inside a repeat, or several .*, may be why"
)
_NOT_PLOTTED = frozenset({"step", "time", "total", "resumed"})


@dataclass
class _Current:
    """One attempt under way."""

    number: int
    steps: Steps | None
    reader: LogReader | None
    told: dict[str, Any] = field(default_factory=dict)
    """Its newest report, over what earlier ones said."""
    heard: Mapping[str, Any] | None = None
    teller: int | None = None
    """The host that tells."""
    behind: float | None = None
    """The step an earlier teller had told, while this one has not come that far."""
    latest: Point | None = None


@dataclass
class _Written:
    """What the history of a job has."""

    first: float | None
    """When its first point was seen."""
    last: Point | None
    points: list[Point] = field(default_factory=list)
    """Not on disk yet."""
    since: float | None = None
    """When the first thing that is not on disk was seen."""


class Heartbeats:
    """What every job that runs told last, and how that goes on disk."""

    def __init__(self, store: Store, folders: Folders, clock: Callable[[], float]) -> None:
        """What earlier servers wrote down is read from the store when it is asked for."""
        self._store = store
        self._folders = folders
        self._clock = clock
        self._progress: dict[str, dict[str, Any]] = {}
        self._silent: set[str] = set()
        """Jobs of which the store has no report: a list asks for each of a thousand that wait."""
        self._current: dict[str, _Current] = {}
        self._written: dict[str, _Written] = {}
        self.trouble: dict[str, str] = {}
        """Job → why its steps are not read."""

    def progress(self, job_id: str) -> dict[str, Any] | None:
        """The newest that a job told, in this attempt or the last one that told anything."""
        found = self._progress.get(job_id)
        if found is None and job_id not in self._silent:
            found = self._store.told.progress(job_id)
            if found is None:
                self._silent.add(job_id)
        return found

    def steps(self, job_id: str, attempt: int) -> Steps | None:
        """How an attempt has gone so far."""
        current = self._current.get(job_id)
        return current.steps if current and current.number == attempt else None

    def listen(
        self, job_id: str, attempt: int, reports: Sequence[HostReport], pattern: str | None
    ) -> None:
        """Take in what the hosts of an attempt tell now."""
        current = self._current.get(job_id)
        if current is None or current.number != attempt:
            logs = self._folders.logs(job_id, attempt)
            known = self._store.told.steps(job_id, attempt)
            reader = LogReader(logs, pattern, known is not None) if pattern else None
            current = self._current[job_id] = _Current(attempt, known, reader)
        found = heartbeat_of(reports)
        news = self._read(job_id, current) if found is None else self._news(current, *found)
        for told in news:
            self._take(job_id, current, plain(told))

    def _read(self, job_id: str, current: _Current) -> list[dict[str, Any]]:
        if current.reader is None:
            return []
        try:
            return current.reader.news()
        except TooSlow:
            # Not tried again in this attempt: each try would hold up every other job.
            current.reader = None
            if job_id not in self.trouble:
                self._store.note(job_id, Event("warning", SLOW_PATTERN), self._clock())
            self.trouble[job_id] = SLOW_PATTERN
            return []

    def _news(self, current: _Current, teller: int, said: dict[str, Any]) -> list[dict[str, Any]]:
        """What a heartbeat adds. Where host 1 was quicker to tell than host 0, host 0 follows."""
        if said == current.heard:
            return []
        if teller != current.teller:
            switched = current.teller is not None and current.steps is not None
            current.behind = current.steps.step if switched and current.steps else None
            current.teller = teller
        current.heard = said
        if current.behind is not None:
            step = number(said.get("step"))
            if step is None or step < current.behind:
                return []
            current.behind = None
        return [said]

    def _take(self, job_id: str, current: _Current, told: dict[str, Any]) -> None:
        now = self._clock()
        current.told = self._progress[job_id] = current.told | told
        before, current.steps = current.steps, advance(current.steps, told, now)
        written = self._history(job_id)
        if written.since is None:
            written.since = now
        if current.steps is None or (before and before.step == current.steps.step):
            return
        current.latest = Point(current.number, now, current.steps.step, metrics_of(told))
        self._keep(written, current.latest, at_an_end=before is None)

    def _keep(self, written: _Written, point: Point, at_an_end: bool) -> None:
        if written.first is not None and written.last is not None:
            closest = (point.time - written.first) / RESOLUTION
            if point.time - written.last.time < closest / (AT_THE_ENDS if at_an_end else 1):
                return
        written.first = written.first or point.time
        written.last = point
        written.points.append(point)

    def _history(self, job_id: str) -> _Written:
        if job_id not in self._written:
            self._written[job_id] = _Written(*self._store.told.first_and_last_point(job_id))
        return self._written[job_id]

    def end(self, job_id: str, attempt: int) -> None:
        """An attempt is over: write down how far it came."""
        current = self._current.get(job_id)
        if current is None or current.number != attempt:
            return
        written = self._history(job_id)
        if current.latest is not None and current.latest != written.last:
            self._keep(written, current.latest, at_an_end=True)
        self._write(job_id)
        del self._current[job_id]

    def write(self, everything: bool = False) -> None:
        """Write down what has waited long enough."""
        now, failed = self._clock(), None
        for job_id, written in self._written.items():
            if written.since is not None and (everything or now - written.since >= WRITE_SECONDS):
                try:
                    self._write(job_id)
                except Exception as trouble:
                    failed = trouble  # the others are written all the same
        if failed is not None:
            raise failed

    def _write(self, job_id: str) -> None:
        written, current = self._history(job_id), self._current.get(job_id)
        steps = {current.number: current.steps} if current and current.steps else {}
        told = self._progress.get(job_id)
        self._store.told.put(job_id, told, steps, written.points)
        written.points, written.since = [], None

    def history(self, job_id: str) -> list[Point]:
        """The points of a job, the newest among them."""
        written = self._written.get(job_id)
        if written is not None and written.since is not None:
            self._write(job_id)
        points = self._store.told.points(job_id)
        current = self._current.get(job_id)
        if current and current.latest and (not points or points[-1] != current.latest):
            points.append(current.latest)
        return points

    def forget(self, job_id: str) -> None:
        """The job is gone, or has ended and all it told is written down."""
        self._progress.pop(job_id, None)
        self._silent.discard(job_id)
        self._current.pop(job_id, None)
        self._written.pop(job_id, None)
        self.trouble.pop(job_id, None)


def plain(told: Mapping[str, Any]) -> dict[str, Any]:
    """A report as it can be kept and sent on, whatever a program wrote: no nan, nothing endless."""
    return {str(name)[:100]: _plain(value) for name, value in [*told.items()][:MOST_METRICS]}


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool) or number(value) is not None:
        return value
    if isinstance(value, int):
        return "a number beyond all figures"  # its digits alone may be too many to be written
    return str(value)[:LONGEST_TEXT]


def metrics_of(told: Mapping[str, object]) -> dict[str, float]:
    """The figures of a report that can be plotted."""
    found: dict[str, float] = {}
    for name, value in told.items():
        figure = None if name in _NOT_PLOTTED else number(value)
        if figure is not None:
            found[name] = figure
    return found
