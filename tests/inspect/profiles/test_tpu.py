"""Traces of TPUs with known answers: hidden, exposed, nested, several steps, two devices."""

from pathlib import Path

import pytest

from drumline.inspect.profiles import Profile, read_profile
from tests.inspect.profiles.traces import Plane, TraceEvent, write

DOT = "%fusion.1 = bf16[8,128]{1,0:T(8,128)} fusion(bf16[8,8]{1,0:T(8,128)} %p), kind=kOutput"
ADD = "%add.2 = f32[8]{0:T(128)} add(f32[8]{0:T(128)} %a, f32[8]{0:T(128)} %b)"
START = (
    "%all-gather-start.3 = (bf16[8]{0:T(128)}, bf16[64]{0:T(128)S(1)}) "
    "all-gather-start(bf16[8]{0:T(128)} %p.1), channel_id=1"
)
DONE = (
    "%all-gather-done.7 = bf16[64]{0:T(128)} "
    "all-gather-done((bf16[8]{0:T(128)}, bf16[64]{0:T(128)S(1)}) %all-gather-start.3)"
)
REDUCE = "%all-reduce = f32[8]{0:T(128)} all-reduce(f32[8]{0:T(128)} %x), channel_id=2"
WHILE = "%while.4 = (s32[]{:T(128)}, f32[8]{0:T(128)}) while((s32[]{:T(128)}) %t), condition=%c"
COPY = "%copy-done.1 = f32[8]{0:T(128)} copy-done((f32[8]{0:T(128)}) %copy-start.1)"
FACTS = {
    DOT: {"hlo_category": "convolution fusion", "source": "/home/u/model.py:31"},
    START: {"hlo_category": "all-gather-start", "source": "/home/u/block.py:88"},
    REDUCE: {"hlo_category": "all-reduce", "source": "/home/u/loss.py:5"},
}


def tpu(*numbers: int, **lines: list[TraceEvent]) -> Plane:
    (device_number,) = numbers or (0,)
    named_lines = {name.replace("_", " "): events for name, events in lines.items()}
    return Plane(f"/device:TPU:{device_number}", named_lines, FACTS)


def profile(folder: Path, *planes: Plane, device: int | None = None) -> Profile:
    return read_profile(write(folder, *planes), device)


def test_a_gather_is_hidden_until_the_device_waits_for_it(tmp_path: Path) -> None:
    """The start is at 0. Compute runs to 60, a wait to 100, compute to 150: hidden 58, exposed 2 +
    40.
    """
    ops = [
        TraceEvent(START, 0, 2),
        TraceEvent(DOT, 2, 60),
        TraceEvent(DONE, 60, 100),
        TraceEvent(ADD, 100, 150),
    ]
    step_profile = profile(tmp_path, tpu(XLA_Ops=ops))
    (gather,) = step_profile.communication
    assert (gather.kind, gather.source, gather.count) == ("all-gather", "/home/u/block.py:88", 1)
    assert gather.exposed == pytest.approx(42e-6)
    assert gather.hidden == pytest.approx(58e-6)
    assert step_profile.seconds == pytest.approx(150e-6)
    assert step_profile.computing == pytest.approx(108e-6)
    assert step_profile.idle == pytest.approx(0, abs=1e-9)
    assert step_profile.saving(gather) == pytest.approx(42e-6)


def test_the_saving_is_limited_by_the_computation(tmp_path: Path) -> None:
    step_profile = profile(
        tmp_path, tpu(XLA_Ops=[TraceEvent(REDUCE, 0, 80), TraceEvent(DOT, 80, 100)])
    )
    (reduce,) = step_profile.communication
    assert reduce.exposed == pytest.approx(80e-6)
    assert reduce.hidden == 0
    assert step_profile.saving(reduce) == pytest.approx(20e-6)


def test_the_line_of_asynchronous_operations_gives_the_span_too(tmp_path: Path) -> None:
    """The start is before the trace of the operations and only on the asynchronous line."""
    ops = [TraceEvent(DOT, 10, 60), TraceEvent(DONE, 60, 70)]
    spans = [TraceEvent(START, 0, 70)]
    (gather,) = profile(tmp_path, tpu(XLA_Ops=ops, Async_XLA_Ops=spans)).communication
    assert gather.hidden == pytest.approx(50e-6)
    assert gather.exposed == pytest.approx(10e-6)


def test_a_loop_and_its_body_count_once(tmp_path: Path) -> None:
    ops = [
        TraceEvent(WHILE, 0, 100),
        TraceEvent(DOT, 0, 30),
        TraceEvent(REDUCE, 30, 50),
        TraceEvent(DOT, 50, 80),
    ]
    step_profile = profile(tmp_path, tpu(XLA_Ops=[*ops, TraceEvent(ADD, 100, 110)]))
    names = {operation.name: operation for operation in step_profile.operations}
    assert names["fusion.1"].seconds == pytest.approx(60e-6)
    assert names["fusion.1"].count == 2
    assert "while.4" not in names
    assert step_profile.exposed == pytest.approx(20e-6)
    assert step_profile.idle == pytest.approx(20e-6)
    total = (
        sum(operation.seconds for operation in step_profile.operations)
        + step_profile.exposed
        + step_profile.idle
    )
    assert total == pytest.approx(step_profile.seconds)


@pytest.mark.parametrize(
    ("lines", "steps", "counted_by"),
    [
        ({"Steps": [TraceEvent("1", 0, 50), TraceEvent("2", 50, 100)]}, 2, "the device's steps"),
        (
            {
                "XLA_Modules": [
                    *(TraceEvent("jit_f(77)", time, time + 20) for time in (0, 25, 50, 75)),
                    *(TraceEvent("jit_small(5)", time, time + 1) for time in range(20, 25)),
                ]
            },
            4,
            "runs of jit_f",
        ),
        ({}, 1, "the whole trace"),
    ],
)
def test_figures_are_those_of_one_step(
    tmp_path: Path, lines: dict[str, list[TraceEvent]], steps: int, counted_by: str
) -> None:
    ops = [
        TraceEvent(DOT, 0, 20),
        TraceEvent(REDUCE, 20, 50),
        TraceEvent(DOT, 50, 70),
        TraceEvent(REDUCE, 70, 100),
    ]
    step_profile = profile(tmp_path, tpu(XLA_Ops=ops, **lines))
    assert (step_profile.steps, step_profile.steps_from) == (steps, counted_by)
    assert step_profile.seconds == pytest.approx(100e-6 / steps)
    assert step_profile.communication[0].exposed == pytest.approx(60e-6 / steps)
    assert step_profile.communication[0].count == 2 / steps


def test_the_programs_own_steps_count_if_the_device_marks_none(tmp_path: Path) -> None:
    host = [
        TraceEvent("train", time, time + 5, {"_r": 1, "step_num": time})
        for time in (0, 10, 20, 30, 40)
    ]
    host += [TraceEvent("eval", 50, 51, {"step_num": 0}), TraceEvent("$loop.py:1 step", 0, 60)]
    plane = tpu(XLA_Ops=[TraceEvent(DOT, 0, 100)], XLA_Modules=[TraceEvent("jit_f(1)", 0, 100)])
    step_profile = profile(tmp_path, plane, Plane("/host:CPU", {"python": host}))
    assert (step_profile.steps, step_profile.steps_from) == (5, "StepTraceAnnotation")


def test_two_devices_are_reported_apart_and_averaged(tmp_path: Path) -> None:
    slow = tpu(0, XLA_Ops=[TraceEvent(DOT, 0, 90), TraceEvent(REDUCE, 90, 100)])
    fast = tpu(1, XLA_Ops=[TraceEvent(DOT, 0, 50), TraceEvent(REDUCE, 50, 100)])
    step_profile = profile(tmp_path, slow, fast)
    assert [device.name for device in step_profile.devices] == ["TPU 0", "TPU 1"]
    assert [device.exposed for device in step_profile.devices] == [
        pytest.approx(10e-6),
        pytest.approx(50e-6),
    ]
    assert step_profile.exposed == step_profile.communication[0].exposed == pytest.approx(30e-6)
    assert step_profile.communication[0].count == 1
    (one_device,) = profile(tmp_path, slow, fast, device=1).devices
    assert one_device.name == "TPU 1"


def test_the_hosts_of_a_run_are_read_together(tmp_path: Path) -> None:
    for host in ("w-0", "w-1"):
        write(tmp_path, tpu(XLA_Ops=[TraceEvent(DOT, 0, 90)]), host=host)
    step_profile = read_profile(tmp_path)
    assert [device.name for device in step_profile.devices] == ["w-0 TPU 0", "w-1 TPU 0"]
    assert step_profile.operations[0].count == 1


def test_waiting_for_a_copy_is_not_communication(tmp_path: Path) -> None:
    step_profile = profile(
        tmp_path, tpu(XLA_Ops=[TraceEvent(COPY, 0, 30), TraceEvent(DOT, 30, 90)])
    )
    assert not step_profile.communication
    assert {operation.kind for operation in step_profile.operations} == {
        "convolution fusion",
        "copy-done",
    }


def test_other_lines_and_planes_are_not_counted(tmp_path: Path) -> None:
    plane = tpu(
        XLA_Ops=[TraceEvent(DOT, 0, 90)],
        XLA_TraceMe=[TraceEvent("barrier-cores", 0, 500)],
        TC_Overlay=[TraceEvent(ADD, 0, 700)],
    )
    sparse = Plane("/device:TPU:0 SparseCore 0", {"XLA Ops": [TraceEvent(ADD, 0, 900)]})
    step_profile = profile(tmp_path, plane, sparse)
    assert len(step_profile.devices) == 1
    assert step_profile.seconds == pytest.approx(90e-6)
