"""The output of a run: metrics in the log, in JSON lines and for TensorBoard, and the heartbeat.

Host 0 writes the log, a progress bar or plain lines, and the files in the checkpoint folder. Every
host sends its own heartbeat.
"""

import json
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax
from rich.progress import BarColumn, Progress, TextColumn

from drumline.chips.catalogue import device_kind
from drumline.heartbeat import heartbeat
from drumline.train.checkpoints.fence import FencedOff
from drumline.train.checkpoints.files import open_append, raise_checkpoint_errors
from drumline.train.goodput import Goodput
from drumline.train.plan import Plan

CHECK_SECONDS = 1.0
"""The interval at which the writer of metrics checks that its claim on the folder is in force."""
HEARTBEAT_SECONDS = 0.5
"""The interval of heartbeats between the steps that are logged."""
PRINT_SECONDS = 1.0
"""The interval of lines without a progress bar."""


class RunProgress:
    """Reports the progress of a run as its steps end."""

    def __init__(
        self,
        plan: Plan,
        log: "RunLog",
        goodput: Goodput,
        committed: Callable[[], int | None],
        save_interval: Callable[[], int | None],
        input_seconds: Callable[[], float],
        *,
        fenced: bool = False,
    ) -> None:
        """`committed` returns the step of the newest complete checkpoint.

        `save_interval` returns the steps between two checkpoints if the run chooses them, and
        `input_seconds` the seconds per step that this host waited for data since the last call.
        `fenced` is True if the run has claimed its checkpoint folder for the job manager.
        """
        self._fenced = fenced
        self.metrics: dict[str, float] = {}
        """The newest value of each metric, of training and of evaluation."""
        self._plan, self._log, self._goodput = plan, log, goodput
        self._committed, self._save_interval = committed, save_interval
        self._input_seconds = input_seconds
        self._throughput: dict[str, float | None] = {}
        self._logged_step = self._evaluated_step = 0
        self._heartbeat_at = 0.0

    def end_step(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step if it is due, and send a heartbeat now and then."""
        self.metrics.update(metrics)
        now = time.time()
        logs = self._plan.logs(step)
        if logs:
            self._throughput = self._measure_throughput(now)
            # Steps that are repeated after a rollback must not be logged twice.
            if step > self._logged_step:
                self._log.add_metrics(step, {**metrics, **self._throughput}, now)
            self._logged_step = max(step, self._logged_step)
        if logs or now - self._heartbeat_at > HEARTBEAT_SECONDS:
            self._heartbeat_at = now
            self.send_heartbeat(step, {**metrics, **self._throughput})

    def end_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of an evaluation."""
        self.metrics.update(metrics)
        if step > self._evaluated_step:
            self._log.add_metrics(step, metrics, time.time())
        self._evaluated_step = max(step, self._evaluated_step)

    def send_heartbeat(self, step: int, values: Mapping[str, object]) -> None:
        """Send the progress of the run to the agent, for `drumline list`."""
        recipe = self._plan.recipe
        fields = {
            **values,
            "total": recipe.steps,
            "item": recipe.model.item,
            "checkpoint": self._committed(),
            **({"fenced": True} if self._fenced else {}),
        }
        heartbeat(step, **{name: value for name, value in fields.items() if name != "step"})

    def end_run(self, step: int, *, done: bool) -> dict[str, float]:
        """Send the last heartbeat and return all metrics. `done`: the run was not cut short."""
        evaluation = {k: v for k, v in self.metrics.items() if k.startswith("eval_")}
        text = ", ".join(format_metrics(evaluation))
        result = {"result": text} if text and done else {}
        self.send_heartbeat(step, {**self.metrics, **self._throughput, **result})
        throughput = {name: value for name, value in self._throughput.items() if value is not None}
        return {**throughput, **self.metrics}

    def _measure_throughput(self, now: float) -> dict[str, float | None]:
        model, batch = self._plan.recipe.model, self._plan.abstract_batch
        steps_per_second = self._goodput.clock.steps_per_second()
        devices = list(self._plan.mesh.devices.flat)
        interval = self._save_interval()
        return {
            "rate": steps_per_second * model.items(batch) or None,
            "mfu": mfu(steps_per_second * model.flops(batch), devices),
            "goodput": self._goodput.value(now),
            "input_seconds": self._input_seconds(),
            **({"save_every": interval} if interval else {}),
        }


def peak_flops(kind: str) -> float | None:
    """Return the peak bf16 FLOP/s of a JAX device, or None for an unknown kind such as a CPU."""
    known = device_kind(kind)
    return known.chip.peak_bf16_flops / known.devices_per_chip if known else None


def mfu(flops_per_second: float, devices: list[jax.Device]) -> float | None:
    """Return the share of the peak of these devices, or None if either is unknown."""
    peaks = [peak_flops(device.device_kind) for device in devices]
    if flops_per_second <= 0 or not all(peaks):
        return None
    return flops_per_second / sum(peak for peak in peaks if peak)


# The log of an attempt ----------------------------------------------------------------------------


class RunLog:
    """The log of an attempt. Only host 0 writes, and only after `open`."""

    def __init__(self, steps: int, *, item: str) -> None:
        """Do not open any files yet, because a full disk may have to be cleared first."""
        self._steps, self._item = steps, item
        self._terminal: _Terminal | None = None
        self._files: _MetricFiles | None = None

    def open(
        self, folder: str | None, attempt: int, check: Callable[[], None] = lambda: None
    ) -> None:
        """Start to write on host 0. Without a folder, write to the terminal only.

        `check` raises FencedOff if another program has taken over the folder.
        """
        if jax.process_index() == 0:
            self._files = _MetricFiles(folder, attempt, check) if folder else None
            self._terminal = _Terminal(self._steps)

    def message(self, text: str) -> None:
        """Print a message to the terminal."""
        if self._terminal:
            self._terminal.print(text)

    def add_metrics(self, step: int, values: Mapping[str, float | None], now: float) -> None:
        """Write the metrics of a step. None is left out."""
        if self._terminal is None:
            return
        metrics = {name: value for name, value in values.items() if value is not None}
        if self._files:
            self._files.add(step, metrics, now)
        text = "  ".join(format_metrics(metrics) + _format_throughput(metrics, self._item))
        self._terminal.show_step(step, text)

    def close(self) -> None:
        """Write the rest and close the files."""
        if self._terminal:
            self._terminal.close()
        if self._files:
            self._files.close()


class _MetricFiles:
    """The metrics in the checkpoint folder: JSON lines, and TensorBoard events."""

    def __init__(self, folder: str, attempt: int, check: Callable[[], None]) -> None:
        self._folder, self._attempt = folder, attempt
        self._check, self._checked_at = check, time.monotonic()
        self._lines = open_append(f"{folder}/metrics.jsonl", lines=True, check=check)
        self._events: _EventFile | None = None

    def add(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        line = {"attempt": self._attempt, "step": step, "time": round(now, 3)}
        values = {name: _json_number(value) for name, value in metrics.items()}
        with raise_checkpoint_errors(self._folder):
            if time.monotonic() - self._checked_at >= CHECK_SECONDS:
                self._check()
                self._checked_at = time.monotonic()
            self._lines.add(json.dumps({**line, **values}).encode() + b"\n")
            if self._events is None:
                folder = f"{self._folder}/tensorboard"
                self._events = _EventFile(folder, self._attempt, step, self._check)
            self._events.add(step, metrics)

    def close(self) -> None:
        with suppress(FencedOff):
            self._lines.close()
        with suppress(FencedOff):
            if self._events:
                self._events.close()


class _Terminal:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._printed_at = -math.inf
        self._bar = _ProgressBar(steps) if sys.stdout.isatty() else None

    def print(self, text: str) -> None:
        if self._bar:
            self._bar.progress.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def show_step(self, step: int, text: str) -> None:
        if self._bar:
            self._bar.update(step, text)
        elif time.monotonic() - self._printed_at >= PRINT_SECONDS or step == self._steps:
            self._printed_at = time.monotonic()
            print(f"step {step:,}/{self._steps:,}  {text}", flush=True)

    def close(self) -> None:
        if self._bar:
            self._bar.progress.stop()


class _ProgressBar:
    def __init__(self, steps: int) -> None:
        self.progress = Progress(
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            refresh_per_second=4,
        )
        self._task = self.progress.add_task("", total=steps)
        self.progress.start()

    def update(self, step: int, text: str) -> None:
        self.progress.update(self._task, completed=step, description=text)


_NOT_SHOWN = {
    "rate", "mfu", "goodput", "save_every", "input_seconds",
    "grad_norm", "param_norm", "update_norm", "learning_rate",
}  # fmt: skip


def format_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Format metrics, without the throughput: `loss 0.412`."""
    shown = (item for item in metrics.items() if item[0] not in _NOT_SHOWN)
    return [f"{name.replace('_', ' ')} {value:.4g}" for name, value in shown]


def _format_throughput(metrics: Mapping[str, float], item: str) -> list[str]:
    """Format the throughput: `9.8k images/s`, `MFU 41.2 %`."""
    texts = [f"{_format_rate(metrics['rate'])} {item}/s"] if "rate" in metrics else []
    return [*texts, f"MFU {100 * metrics['mfu']:.1f} %"] if "mfu" in metrics else texts


def _format_rate(rate: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= size:
            return f"{rate / size:.3g}{letter}"
    return f"{rate:.3g}"


def _json_number(value: float) -> Any:
    """Return a value for JSON, which has no non-finite numbers. They become text."""
    return value if math.isfinite(value) else str(value)


# TensorBoard --------------------------------------------------------------------------------------

# An event file is a sequence of records: length, its checksum, bytes, their checksum. Each record
# is an `Event` in protobuf's wire format, of which a scalar needs five fields. These are the field
# numbers of `event.proto` and `summary.proto`.
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION = 1, 2, 3, 5, 7
_VALUE, _TAG, _SIMPLE_VALUE, _STATUS = 1, 1, 2, 1
_SESSION_START = 1


class _EventFile:
    """A TensorBoard event file, written without TensorBoard."""

    def __init__(self, folder: str, attempt: int, step: int, check: Callable[[], None]) -> None:
        """Open a file that starts with an event to discard all later steps of earlier files."""
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = open_append(f"{folder}/{name}.{attempt}", check=check)
        self._add_event(_bytes_field(_FILE_VERSION, b"brain.Event:2"))
        session = _bytes_field(_SESSION, _int_field(_STATUS, _SESSION_START))
        self._add_event(_int_field(_STEP, step) + session)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add an event with all metrics of a step."""
        summary = b"".join(
            _bytes_field(
                _VALUE,
                _bytes_field(_TAG, name.encode()) + _float_field(_SIMPLE_VALUE, value),
            )
            for name, value in metrics.items()
        )
        self._add_event(_int_field(_STEP, step) + _bytes_field(_SUMMARY, summary))

    def close(self) -> None:
        """Write the rest and close the file."""
        self._file.close()

    def _add_event(self, event: bytes) -> None:
        record = _double_field(_WALL_TIME, time.time()) + event
        length = struct.pack("<Q", len(record))
        self._file.add(length + _masked_crc(length) + record + _masked_crc(record))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _int_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double_field(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes_field(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float_field(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _crc_table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        return value

    return tuple(map(entry, range(256)))


_CRC32C = _crc_table()


def _masked_crc(content: bytes) -> bytes:
    """Return the CRC-32C, rotated and offset as the format requires."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
