"""Where a run is: its metrics in the log where they are due, its heartbeat all the time."""

import time
from collections.abc import Callable, Mapping

from drumline.heartbeat import heartbeat
from drumline.train.plan import Plan
from drumline.train.reporting.goodput import Goodput
from drumline.train.reporting.report import Reports, described
from drumline.train.reporting.throughput import mfu
from drumline.train.result import Ending

BEAT = 0.5
"""Seconds between two heartbeats."""


class Progress:
    """What the run has come to, told as it comes. Every host has its own heartbeat."""

    def __init__(
        self, plan: Plan, reports: Reports, goodput: Goodput, committed: Callable[[], int | None]
    ) -> None:
        """`committed` says which checkpoint is the newest that is whole."""
        self.metrics: dict[str, float] = {}
        """The newest of each, of training and of evaluation."""
        self._plan, self._reports, self._goodput = plan, reports, goodput
        self._committed = committed
        self._speed: dict[str, float | None] = {}
        self._logged = self._evaluated = 0
        self._beat = 0.0

    def step_ended(self, step: int, values: dict[str, float]) -> None:
        """Log a step where it is due, and show now and then that the run is alive."""
        self.metrics.update(values)
        now = time.time()
        due = self._plan.logs_at(step)
        if due:
            self._speed = self._measure_speed(now)
            # After a rollback the same steps tell the same once more.
            if step > self._logged:
                self._reports.tell(step, {**values, **self._speed}, now)
            self._logged = max(step, self._logged)
        if due or now - self._beat > BEAT:
            self._beat = now
            self.show(step, {**values, **self._speed})

    def evaluated(self, step: int, values: dict[str, float]) -> None:
        """Log an evaluation."""
        self.metrics.update(values)
        if step > self._evaluated:
            self._reports.tell(step, values, time.time())
        self._evaluated = max(step, self._evaluated)

    def show(self, step: int, values: Mapping[str, object]) -> None:
        """Where the run is, for `drumline list`."""
        recipe = self._plan.recipe
        known = {
            "total": recipe.steps,
            "item": recipe.model.item,
            "checkpoint": self._committed(),
        }
        heartbeat(step, **{name: v for name, v in {**values, **known}.items() if name != "step"})

    def ended(self, step: int, ending: Ending) -> dict[str, float]:
        """Tell the end; returns all that is known then."""
        committed = self._committed()
        if ending is Ending.STOPPED:
            what = "no checkpoint" if committed is None else f"the checkpoint is step {committed:,}"
            self._reports.say(f"told to stop at step {step:,}; {what}")
        told = described({k: v for k, v in self.metrics.items() if k.startswith("eval_")})
        result = {"result": ", ".join(told)} if told and ending is Ending.DONE else {}
        self.show(step, {**self.metrics, **self._speed, **result})
        known = {name: value for name, value in self._speed.items() if value is not None}
        return {**known, **self.metrics}

    def _measure_speed(self, now: float) -> dict[str, float | None]:
        model, shapes = self._plan.recipe.model, self._plan.shapes
        pace = self._goodput.clock.steps_per_second()
        return {
            "rate": pace * model.items(shapes) or None,
            "mfu": mfu(pace * model.flops(shapes), list(self._plan.mesh.devices.flat)),
            "goodput": self._goodput.share(now),
        }
