"""Metrics that programs report, kept for `list`, `plot` and the verdict whether a job is stuck.

Heartbeats come ten a second and each write is synced to disk, so they are buffered here and written
every few seconds, and when an attempt ends. A server that is killed in between reads the last
heartbeat from the host again.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.hosts.kept_log import read, size_of
from drumline.jobs.core.state import Event
from drumline.jobs.core.steps import Steps, advance, number
from drumline.jobs.folders import Folders
from drumline.jobs.patterns import TooSlow, limited
from drumline.jobs.store.metrics import Point
from drumline.jobs.store.records import Store
from drumline.observed import HostReport

WRITE_SECONDS = 5.0
"""Seconds between two writes of the metrics of a job."""
RESOLUTION = 200
"""A new point of the history is due once the job is older than at the last one by this fraction.
So a job's first seconds are known step by step and its hundredth hour by the half hour, and a month
at ten heartbeats a second is under 3,000 points."""
END_FACTOR = 2
"""Factor by which first and last steps of attempts may be closer, to show where each began."""
MOST_METRICS = 64
LONGEST_TEXT = 2000
"""The most characters of a reported text: it is sent with every `list`."""
SLOW_PATTERN = (
    "progress: the pattern takes too long for the lines of this program's log, which is no longer"
    " read for steps; a repeat inside a repeat, or several .*, may be why"
)
_NOT_PLOTTED = frozenset({"step", "time", "total", "resumed"})


_LONGEST_LINE = 500
_LONGEST_NUMBER = 40
_MOST = 1 << 18
"""The most bytes of one read: of a log that grew by more, only the end is read."""
MATCH_SECONDS = 0.25
"""CPU seconds to match all the lines of one read: a plain pattern needs a fiftieth of that, and
everything else waits meanwhile."""


def heartbeat_of(reports: Sequence[HostReport]) -> tuple[int, dict[str, Any]] | None:
    """The first host that has a heartbeat, and that heartbeat."""
    for report in reports:
        if report.heartbeat:
            return report.index, dict(report.heartbeat)
    return None


class LogReader:
    """Reads the logs of one attempt as they grow, for what a pattern finds in them."""

    def __init__(self, folder: Path, pattern: str, known: bool = False) -> None:
        """`folder` holds `host-0.log` and its siblings.

        Where an earlier reader's news are `known`, the first news are only the newest match.
        """
        self._folder = folder
        self._known = known
        self._pattern = re.compile(pattern)
        self._offsets: dict[Path, int] = {}
        self._source: Path | None = None

    def news(self) -> list[dict[str, Any]]:
        """What was matched since the last call in the first log with a match, oldest first.

        Raises TooSlow where the pattern takes too long.
        """
        if self._source is not None:
            return self._read(self._source)
        for path in sorted(self._folder.glob("host-*.log"), key=_host_number):
            found = self._read(path)
            if found:
                self._source = path
                return found[-1:] if self._known else found
        return []

    def _read(self, path: Path) -> list[dict[str, Any]]:
        size = size_of(path)
        # A replaced host begins a new log.
        known = min(self._offsets.get(path, 0), size)
        stretch = read(path, max(known, size - _MOST), _MOST)
        start, data = stretch.start, stretch.data
        # An unfinished line is read once it is complete; progress bars end theirs with \r.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._offsets[path] = start + end
        lines = data[:end].decode("utf-8", "replace").splitlines()
        with limited(MATCH_SECONDS):
            return [found for line in lines if (found := self._match(line)) is not None]

    def _match(self, line: str) -> dict[str, Any] | None:
        match = self._pattern.search(line[:_LONGEST_LINE])
        if match is None:
            return None
        named = match.groupdict()
        return {name: _number(text) for name, text in named.items() if text is not None}


def _host_number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _number(text: str) -> int | float | str:
    plain = text.replace(",", "")
    if len(plain) > _LONGEST_NUMBER:
        return text
    for kind in (int, float):
        try:
            return kind(plain)
        except ValueError:
            continue
    return text


@dataclass
class _Current:
    """One attempt under way."""

    number: int
    steps: Steps | None
    reader: LogReader | None
    metrics: dict[str, Any] = field(default_factory=dict)
    """The newest value of everything that its heartbeats have reported."""
    heard: Mapping[str, Any] | None = None
    source: int | None = None
    """The host whose heartbeats are read."""
    behind: float | None = None
    """The step that an earlier source had reported, while this one has not come that far."""
    latest: Point | None = None


@dataclass
class _Written:
    """The ends of a job's history, and what of it is to be written."""

    first: float | None
    """When the first point was seen."""
    last: Point | None
    points: list[Point] = field(default_factory=list)
    """Points that are not on disk yet."""
    since: float | None = None
    """When the oldest news that are not on disk were seen."""


class Heartbeats:
    """The newest metrics of every running job, and when they are written to disk."""

    def __init__(self, store: Store, folders: Folders, clock: Callable[[], float]) -> None:
        """What earlier servers saved is read from the store on demand."""
        self._store = store
        self._folders = folders
        self._clock = clock
        self._progress: dict[str, dict[str, Any]] = {}
        self._silent: set[str] = set()
        """Jobs without metrics in the store, so that `list` does not query each waiting job."""
        self._current: dict[str, _Current] = {}
        self._written: dict[str, _Written] = {}
        self.trouble: dict[str, str] = {}
        """Why the steps of a job are not read, by job."""

    def progress(self, job_id: str) -> dict[str, Any] | None:
        """The newest metrics of a job, from this attempt or the last one that reported any."""
        found = self._progress.get(job_id)
        if found is None and job_id not in self._silent:
            found = self._store.metrics.progress(job_id)
            if found is None:
                self._silent.add(job_id)
        return found

    def steps(self, job_id: str, attempt: int) -> Steps | None:
        """The steps of an attempt so far."""
        current = self._current.get(job_id)
        return current.steps if current and current.number == attempt else None

    def listen(
        self, job_id: str, attempt: int, reports: Sequence[HostReport], pattern: str | None
    ) -> None:
        """Take in what the hosts of an attempt report now."""
        current = self._current.get(job_id)
        if current is None or current.number != attempt:
            logs = self._folders.logs(job_id, attempt)
            known = self._store.metrics.steps(job_id, attempt)
            reader = LogReader(logs, pattern, known is not None) if pattern else None
            steps = known and known.by(self._clock())
            current = self._current[job_id] = _Current(attempt, steps, reader)
        found = heartbeat_of(reports)
        news = self._read(job_id, current) if found is None else self._news(current, *found)
        for heartbeat in news:
            self._take(job_id, current, plain(heartbeat))

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

    def _news(
        self, current: _Current, host: int, heartbeat: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """What a heartbeat adds: nothing while host 0, heard later, is behind host 1."""
        if heartbeat == current.heard:
            return []
        if host != current.source:
            switched = current.source is not None and current.steps is not None
            current.behind = current.steps.step if switched and current.steps else None
            current.source = host
        current.heard = heartbeat
        if current.behind is not None:
            step = number(heartbeat.get("step"))
            if step is None or step < current.behind:
                return []
            current.behind = None
        return [heartbeat]

    def _take(self, job_id: str, current: _Current, heartbeat: dict[str, Any]) -> None:
        now = self._clock()
        current.metrics = self._progress[job_id] = current.metrics | heartbeat
        before, current.steps = current.steps, advance(current.steps, heartbeat, now)
        written = self._history(job_id)
        if written.since is None:
            written.since = now
        if current.steps is None or (before and before.step == current.steps.step):
            return
        current.latest = Point(current.number, now, current.steps.step, metrics_of(heartbeat))
        self._keep(written, current.latest, at_an_end=before is None)

    def _keep(self, written: _Written, point: Point, at_an_end: bool) -> None:
        if written.first is not None and written.last is not None:
            # No less than nothing: an earlier server's clock may have been ahead of ours.
            closest = max(0.0, point.time - written.first) / RESOLUTION
            if 0.0 <= point.time - written.last.time < closest / (END_FACTOR if at_an_end else 1):
                return
        written.first = written.first or point.time
        written.last = point
        written.points.append(point)

    def _history(self, job_id: str) -> _Written:
        if job_id not in self._written:
            self._written[job_id] = _Written(*self._store.metrics.first_and_last_point(job_id))
        return self._written[job_id]

    def end(self, job_id: str, attempt: int) -> None:
        """An attempt is over: save how far it came."""
        current = self._current.get(job_id)
        if current is None or current.number != attempt:
            return
        written = self._history(job_id)
        if current.latest is not None and current.latest != written.last:
            self._keep(written, current.latest, at_an_end=True)
        self._write(job_id)
        del self._current[job_id]

    def write(self, everything: bool = False) -> None:
        """Save what has waited long enough."""
        now, failed = self._clock(), None
        for job_id, written in self._written.items():
            if written.since is not None and (everything or now - written.since >= WRITE_SECONDS):
                try:
                    self._write(job_id)
                except Exception as trouble:
                    failed = trouble  # the other jobs are written nevertheless
        if failed is not None:
            raise failed

    def _write(self, job_id: str) -> None:
        written, current = self._history(job_id), self._current.get(job_id)
        steps = {current.number: current.steps} if current and current.steps else {}
        progress = self._progress.get(job_id)
        self._store.metrics.put(job_id, progress, steps, written.points)
        written.points, written.since = [], None

    def history(self, job_id: str) -> list[Point]:
        """The points of a job, including the newest."""
        written = self._written.get(job_id)
        if written is not None and written.since is not None:
            self._write(job_id)
        points = self._store.metrics.points(job_id)
        current = self._current.get(job_id)
        if current and current.latest and (not points or points[-1] != current.latest):
            points.append(current.latest)
        return points

    def forget(self, job_id: str) -> None:
        """The job is gone, or has ended and its metrics are saved."""
        self._progress.pop(job_id, None)
        self._silent.discard(job_id)
        self._current.pop(job_id, None)
        self._written.pop(job_id, None)
        self.trouble.pop(job_id, None)


def plain(heartbeat: Mapping[str, Any]) -> dict[str, Any]:
    """A heartbeat that can be saved and sent, whatever a program wrote: no nan, nothing endless."""
    return {str(name)[:100]: _plain(value) for name, value in [*heartbeat.items()][:MOST_METRICS]}


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool) or number(value) is not None:
        return value
    if isinstance(value, int):
        return "a number beyond all figures"  # Python may refuse to print so many digits
    return str(value)[:LONGEST_TEXT]


def metrics_of(heartbeat: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a heartbeat that can be plotted."""
    found: dict[str, float] = {}
    for name, value in heartbeat.items():
        figure = None if name in _NOT_PLOTTED else number(value)
        if figure is not None:
            found[name] = figure
    return found
