"""The metrics that programs report, for `list`, `plot` and the detection of stuck programs.

Metrics come from heartbeats, or from a pattern that matches lines of the program's log. A job may
send ten heartbeats per second, and each write is synced to disk. So they are buffered here and
written every few seconds, and when an attempt ends. After a crash, the next server reads the last
heartbeat from the host again.
"""

import logging
import re
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.hosts.log_segments import read_chunk, received_size
from drumline.hosts.protocol import RESERVED_METRICS
from drumline.jobs.core.reasons import EventType
from drumline.jobs.core.state import Event
from drumline.jobs.core.steps import Steps, to_number, update_steps
from drumline.jobs.folders import Folders
from drumline.jobs.patterns import TooSlow, limited
from drumline.jobs.store.metrics import Point
from drumline.jobs.store.records import Store
from drumline.observed import HostReport

log = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
"""Seconds between two writes of the metrics of a job."""
RESOLUTION = 200
"""The number of points that divides a job's age into intervals between points. The first seconds of
a job are kept step by step and its hundredth hour in half hours. A month at ten heartbeats per
second takes under 3,000 points."""
END_FACTOR = 2
"""Factor by which the first and last points of attempts may be closer, to show the restarts."""
MAX_METRICS = 64
"""The most names of an attempt's metrics beside those that Drumline uses itself."""
MAX_NAME = 100
MAX_TEXT, MAX_RESULT = 200, 2000
"""The most characters of a reported text and of the `result`, which every `list` contains."""
TOO_MANY_METRICS = (
    f"metrics: the program reports more than {MAX_METRICS} different names, and those after them"
    " are dropped; report steady names, without a step or a time in them"
)
SLOW_PATTERN = (
    "progress: the pattern takes too long on this program's log, so its steps are no longer read;"
    " simplify nested repeats and multiple .*"
)
_NOT_PLOTTED = frozenset({"step", "time", "total", "resumed"})
_MAX_LINE = 500
_MAX_DIGITS = 40
_MAX_BYTES = 1 << 18
"""The most bytes of one read. If a log has grown by more, only its end is read."""
MATCH_SECONDS = 0.25
"""CPU seconds to match all lines of one read, during which the server does nothing else. A simple
pattern needs a fiftieth of that."""


class LogReader:
    """Reads the logs of one attempt as they grow, and matches a pattern."""

    def __init__(self, folder: Path, pattern: str, skip_old: bool = False) -> None:
        """`folder` holds `host-0.log` and so on.

        With `skip_old`, the first read returns only the newest match, because an earlier server
        has read the others.
        """
        self._folder = folder
        self._skip_old = skip_old
        self._pattern = re.compile(pattern)
        self._offsets: dict[Path, int] = {}
        self._source: Path | None = None

    def read_new(self) -> list[dict[str, Any]]:
        """Return the matches since the last call, oldest first, in the first log with a match.

        Raises TooSlow if the pattern takes too long.
        """
        if self._source is not None:
            return self._read(self._source)
        for path in sorted(self._folder.glob("host-*.log"), key=_host_index):
            matches = self._read(path)
            if matches:
                self._source = path
                return matches[-1:] if self._skip_old else matches
        return []

    def _read(self, path: Path) -> list[dict[str, Any]]:
        size = received_size(path)
        # The log of a replaced host restarts and is shorter.
        offset = min(self._offsets.get(path, 0), size)
        chunk = read_chunk(path, max(offset, size - _MAX_BYTES), _MAX_BYTES)
        start, data = chunk.start, chunk.data
        # An incomplete line is read later. Progress bars end their lines with \r.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._offsets[path] = start + end
        lines = data[:end].decode("utf-8", "replace").splitlines()
        with limited(MATCH_SECONDS):
            return [match for line in lines if (match := self._match(line)) is not None]

    def _match(self, line: str) -> dict[str, Any] | None:
        match = self._pattern.search(line[:_MAX_LINE])
        if match is None:
            return None
        groups = match.groupdict()
        return {name: _parse_number(text) for name, text in groups.items() if text is not None}


def _host_index(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _parse_number(text: str) -> int | float | str:
    digits = text.replace(",", "")
    if len(digits) > _MAX_DIGITS:
        return text
    for value_type in (int, float):
        try:
            return value_type(digits)
        except ValueError:
            continue
    return text


@dataclass
class _CurrentAttempt:
    """The metrics of the current attempt of a job."""

    number: int
    steps: Steps | None
    log_reader: LogReader | None
    metrics: dict[str, Any] = field(default_factory=dict)
    """The newest value of every metric that its heartbeats have reported."""
    last_heartbeat: Mapping[str, Any] | None = None
    source: int | None = None
    """The host whose heartbeats are read."""
    catch_up_step: float | None = None
    """The step that another host had reported, if this one has not reached it yet."""
    newest_point: Point | None = None


@dataclass
class _History:
    """The first and last points of a job's metrics, and the changes that are not saved yet."""

    first_time: float | None
    """The timestamp of the first point."""
    last_point: Point | None
    unsaved_points: list[Point] = field(default_factory=list)
    unsaved_steps: dict[int, Steps] = field(default_factory=dict)
    """The steps of attempts that finished while the disk was full."""
    unsaved_since: float | None = None
    """The timestamp of the oldest unsaved change."""


class Heartbeats:
    """The newest metrics of every running job."""

    def __init__(self, store: Store, folders: Folders, clock: Callable[[], float]) -> None:
        """Metrics that previous servers saved are read from the store on demand."""
        self._store = store
        self._folders = folders
        self._clock = clock
        self._progress: dict[str, dict[str, Any]] = {}
        self._without_metrics: set[str] = set()
        """Jobs without metrics in the store, so that `list` does not query each waiting job."""
        self._current: dict[str, _CurrentAttempt] = {}
        self._histories: dict[str, _History] = {}
        self.warnings: dict[str, str] = {}
        """The reason why some metrics of a job are not read, by job."""

    def progress(self, job_id: str) -> dict[str, Any] | None:
        """Return the newest metrics of a job, of this attempt or the last one with metrics."""
        progress = self._progress.get(job_id)
        if progress is None and job_id not in self._without_metrics:
            progress = self._store.metrics.progress(job_id)
            if progress is None:
                self._without_metrics.add(job_id)
        return progress

    def steps(self, job_id: str, attempt: int) -> Steps | None:
        """Return the steps of an attempt so far."""
        current = self._current.get(job_id)
        return current.steps if current and current.number == attempt else None

    def update(
        self, job_id: str, attempt: int, reports: Sequence[HostReport], pattern: str | None
    ) -> None:
        """Take in the newest reports of an attempt's hosts."""
        current = self._current.get(job_id)
        if current is None or current.number != attempt:
            current = self._begin_attempt(job_id, attempt, pattern)
        first = first_heartbeat(reports)
        if first is None:
            heartbeats = self._read_log(job_id, current)
        else:
            heartbeats = self._new_heartbeats(current, *first)
        for heartbeat in heartbeats:
            cleaned = clean(heartbeat, current.metrics)
            if len(cleaned) < len(heartbeat):
                self._warn(job_id, TOO_MANY_METRICS)
            self._add(job_id, current, cleaned)

    def _begin_attempt(self, job_id: str, attempt: int, pattern: str | None) -> _CurrentAttempt:
        steps = self._store.metrics.steps(job_id, attempt)
        logs = self._folders.logs(job_id, attempt)
        log_reader = LogReader(logs, pattern, skip_old=steps is not None) if pattern else None
        steps = steps and steps.clamped(self._clock())
        current = self._current[job_id] = _CurrentAttempt(attempt, steps, log_reader)
        return current

    def _read_log(self, job_id: str, current: _CurrentAttempt) -> list[dict[str, Any]]:
        if current.log_reader is None:
            return []
        try:
            return current.log_reader.read_new()
        except TooSlow:
            # Not repeated in this attempt, because each try blocks every other job.
            current.log_reader = None
            self._warn(job_id, SLOW_PATTERN)
            return []

    def _warn(self, job_id: str, text: str) -> None:
        """Show a warning with the job, and add it to its events once."""
        if self.warnings.get(job_id) == text:
            return
        self.warnings[job_id] = text
        # A previous server may have added it.
        if all(event["text"] != text for event in self._store.events(job_id)):
            self._store.add_event(job_id, Event(EventType.WARNING, text), self._clock())

    def _new_heartbeats(
        self, current: _CurrentAttempt, host: int, heartbeat: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Return a heartbeat if it is new, unless its host is behind the previous source."""
        if heartbeat == current.last_heartbeat:
            return []
        if host != current.source:
            switched = current.source is not None and current.steps is not None
            current.catch_up_step = current.steps.step if switched and current.steps else None
            current.source = host
        current.last_heartbeat = heartbeat
        if current.catch_up_step is not None:
            step = to_number(heartbeat.get("step"))
            if step is None or step < current.catch_up_step:
                return []
            current.catch_up_step = None
        return [heartbeat]

    def _add(self, job_id: str, current: _CurrentAttempt, heartbeat: dict[str, Any]) -> None:
        now = self._clock()
        current.metrics = self._progress[job_id] = current.metrics | heartbeat
        before, current.steps = current.steps, update_steps(current.steps, heartbeat, now)
        history = self._history(job_id)
        if history.unsaved_since is None:
            history.unsaved_since = now
        if current.steps is None or (before and before.step == current.steps.step):
            return
        metrics = plottable_metrics(heartbeat)
        current.newest_point = Point(current.number, now, current.steps.step, metrics)
        self._add_point(history, current.newest_point, first_or_last=before is None)

    def _add_point(self, history: _History, point: Point, first_or_last: bool) -> None:
        """Add a point to the history unless it is too close to the last one."""
        if history.first_time is not None and history.last_point is not None:
            # At least 0, because the clock of a previous server may have been ahead.
            min_distance = max(0.0, point.time - history.first_time) / RESOLUTION
            min_distance /= END_FACTOR if first_or_last else 1
            if 0.0 <= point.time - history.last_point.time < min_distance:
                return
        history.first_time = history.first_time or point.time
        history.last_point = point
        history.unsaved_points.append(point)

    def _history(self, job_id: str) -> _History:
        if job_id not in self._histories:
            first_and_last = self._store.metrics.first_and_last_point(job_id)
            self._histories[job_id] = _History(*first_and_last)
        return self._histories[job_id]

    def end(self, job_id: str, attempt: int) -> None:
        """Save the last metrics of an attempt that is over, or later if the disk is full."""
        current = self._current.get(job_id)
        if current is None or current.number != attempt:
            return
        history = self._history(job_id)
        if current.newest_point is not None and current.newest_point != history.last_point:
            self._add_point(history, current.newest_point, first_or_last=True)
        if current.steps is not None:
            history.unsaved_steps[attempt] = current.steps
        del self._current[job_id]
        try:
            self._save(job_id)
        except sqlite3.OperationalError as error:
            log.warning("the last metrics of %s/%d are not saved yet: %s", job_id, attempt, error)
            history.unsaved_since = self._clock()

    def has_unsaved(self, job_id: str) -> bool:
        """Return True if metrics of a job are not saved yet."""
        history = self._histories.get(job_id)
        return history is not None and history.unsaved_since is not None

    def save(self, everything: bool = False) -> None:
        """Save the metrics that have waited long enough."""
        now, last_error = self._clock(), None
        for job_id, history in self._histories.items():
            since = history.unsaved_since
            if since is not None and (everything or now - since >= WRITE_SECONDS):
                try:
                    self._save(job_id)
                except Exception as error:
                    last_error = error  # after the other jobs are saved
        if last_error is not None:
            raise last_error

    def _save(self, job_id: str) -> None:
        history, current = self._history(job_id), self._current.get(job_id)
        steps = dict(history.unsaved_steps)
        if current is not None and current.steps is not None:
            steps[current.number] = current.steps
        progress = self._progress.get(job_id)
        self._store.metrics.save(job_id, progress, steps, history.unsaved_points)
        history.unsaved_points, history.unsaved_since = [], None
        history.unsaved_steps = {}

    def history(self, job_id: str) -> list[Point]:
        """Return the points of a job, including the newest."""
        history = self._histories.get(job_id)
        if history is not None and history.unsaved_since is not None:
            self._save(job_id)
        points = self._store.metrics.points(job_id)
        current = self._current.get(job_id)
        newest = current.newest_point if current else None
        if newest and (not points or points[-1] != newest):
            points.append(newest)
        return points

    def forget(self, job_id: str) -> None:
        """Forget a deleted job, or a finished job whose metrics are saved."""
        self._progress.pop(job_id, None)
        self._without_metrics.discard(job_id)
        self._current.pop(job_id, None)
        self._histories.pop(job_id, None)
        self.warnings.pop(job_id, None)


def first_heartbeat(reports: Sequence[HostReport]) -> tuple[int, dict[str, Any]] | None:
    """Return the index and the heartbeat of the first host that has one; None without any."""
    for report in reports:
        if report.heartbeat:
            return report.index, dict(report.heartbeat)
    return None


def clean(heartbeat: Mapping[str, Any], names: Collection[str] = ()) -> dict[str, Any]:
    """Return a heartbeat that can be saved and sent: no nan, limited sizes.

    New metrics are limited, and `names`, the metrics of previous heartbeats, count. A program that
    puts the step into its names would otherwise fill the database.
    """
    capacity = MAX_METRICS - sum(name not in RESERVED_METRICS for name in names)
    result = {}
    for full_name, value in heartbeat.items():
        name = str(full_name)[:MAX_NAME]
        if name not in names and name not in result and name not in RESERVED_METRICS:
            if capacity <= 0:
                continue
            capacity -= 1
        result[name] = _clean_value(value, MAX_RESULT if name == "result" else MAX_TEXT)
    return result


def _clean_value(value: object, max_text: int) -> object:
    if value is None or isinstance(value, bool) or to_number(value) is not None:
        return value
    if isinstance(value, int):
        return "a number beyond all figures"  # Python may refuse to format so many digits
    try:
        return str(value)[:max_text]
    except RecursionError:
        return "nested too deeply"


def plottable_metrics(heartbeat: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a heartbeat that can be plotted."""
    metrics: dict[str, float] = {}
    for name, value in heartbeat.items():
        metric = None if name in _NOT_PLOTTED else to_number(value)
        if metric is not None:
            metrics[name] = metric
    return metrics
