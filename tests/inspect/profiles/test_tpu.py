"""Traces of TPUs with known answers: hidden, exposed, nested, several steps, two devices."""

from pathlib import Path

import pytest

from drumline.inspect.profiles import Profile, read_profile
from tests.inspect.profiles.traces import Plane, Ran, write

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


def tpu(*numbers: int, **lines: list[Ran]) -> Plane:
    (number,) = numbers or (0,)
    named = {name.replace("_", " "): events for name, events in lines.items()}
    return Plane(f"/device:TPU:{number}", named, FACTS)


def profile(folder: Path, *planes: Plane, device: int | None = None) -> Profile:
    return read_profile(write(folder, *planes), device)


def test_a_gather_is_hidden_until_it_is_waited_for(tmp_path: Path) -> None:
    """Start at 0, compute to 60, wait to 100, compute to 150: hidden 58, exposed 2 + 40."""
    ops = [Ran(START, 0, 2), Ran(DOT, 2, 60), Ran(DONE, 60, 100), Ran(ADD, 100, 150)]
    step_profile = profile(tmp_path, tpu(XLA_Ops=ops))
    (gather,) = step_profile.communication
    assert (gather.kind, gather.source, gather.count) == ("all-gather", "/home/u/block.py:88", 1)
    assert gather.exposed == pytest.approx(42e-6)
    assert gather.hidden == pytest.approx(58e-6)
    assert step_profile.seconds == pytest.approx(150e-6)
    assert step_profile.computing == pytest.approx(108e-6)
    assert step_profile.idle == pytest.approx(0, abs=1e-9)
    assert step_profile.saving(gather) == pytest.approx(42e-6)


def test_no_more_can_be_saved_than_there_is_to_compute(tmp_path: Path) -> None:
    step_profile = profile(tmp_path, tpu(XLA_Ops=[Ran(REDUCE, 0, 80), Ran(DOT, 80, 100)]))
    (reduce,) = step_profile.communication
    assert reduce.exposed == pytest.approx(80e-6)
    assert reduce.hidden == 0
    assert step_profile.saving(reduce) == pytest.approx(20e-6)


def test_the_line_of_asynchronous_operations_tells_the_span_too(tmp_path: Path) -> None:
    """The start lies before the trace of the operations: only that line knows of it."""
    ops = [Ran(DOT, 10, 60), Ran(DONE, 60, 70)]
    spans = [Ran(START, 0, 70)]
    (gather,) = profile(tmp_path, tpu(XLA_Ops=ops, Async_XLA_Ops=spans)).communication
    assert gather.hidden == pytest.approx(50e-6)
    assert gather.exposed == pytest.approx(10e-6)


def test_a_loop_and_its_body_count_once(tmp_path: Path) -> None:
    ops = [Ran(WHILE, 0, 100), Ran(DOT, 0, 30), Ran(REDUCE, 30, 50), Ran(DOT, 50, 80)]
    step_profile = profile(tmp_path, tpu(XLA_Ops=[*ops, Ran(ADD, 100, 110)]))
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
        ({"Steps": [Ran("1", 0, 50), Ran("2", 50, 100)]}, 2, "the device's steps"),
        (
            {
                "XLA_Modules": [
                    *(Ran("jit_f(77)", at, at + 20) for at in (0, 25, 50, 75)),
                    *(Ran("jit_small(5)", at, at + 1) for at in range(20, 25)),
                ]
            },
            4,
            "runs of jit_f",
        ),
        ({}, 1, "the whole trace"),
    ],
)
def test_figures_are_those_of_one_step(
    tmp_path: Path, lines: dict[str, list[Ran]], steps: int, counted_by: str
) -> None:
    ops = [Ran(DOT, 0, 20), Ran(REDUCE, 20, 50), Ran(DOT, 50, 70), Ran(REDUCE, 70, 100)]
    step_profile = profile(tmp_path, tpu(XLA_Ops=ops, **lines))
    assert (step_profile.steps, step_profile.steps_from) == (steps, counted_by)
    assert step_profile.seconds == pytest.approx(100e-6 / steps)
    assert step_profile.communication[0].exposed == pytest.approx(60e-6 / steps)
    assert step_profile.communication[0].count == 2 / steps


def test_the_program_s_own_steps_count_where_the_device_marks_none(tmp_path: Path) -> None:
    host = [Ran("train", at, at + 5, {"_r": 1, "step_num": at}) for at in (0, 10, 20, 30, 40)]
    host += [Ran("eval", 50, 51, {"step_num": 0}), Ran("$loop.py:1 step", 0, 60)]
    plane = tpu(XLA_Ops=[Ran(DOT, 0, 100)], XLA_Modules=[Ran("jit_f(1)", 0, 100)])
    step_profile = profile(tmp_path, plane, Plane("/host:CPU", {"python": host}))
    assert (step_profile.steps, step_profile.steps_from) == (5, "StepTraceAnnotation")


def test_two_devices_are_reported_apart_and_averaged(tmp_path: Path) -> None:
    slow = tpu(0, XLA_Ops=[Ran(DOT, 0, 90), Ran(REDUCE, 90, 100)])
    fast = tpu(1, XLA_Ops=[Ran(DOT, 0, 50), Ran(REDUCE, 50, 100)])
    step_profile = profile(tmp_path, slow, fast)
    assert [device.name for device in step_profile.devices] == ["TPU 0", "TPU 1"]
    assert [device.exposed for device in step_profile.devices] == [
        pytest.approx(10e-6),
        pytest.approx(50e-6),
    ]
    assert step_profile.exposed == step_profile.communication[0].exposed == pytest.approx(30e-6)
    assert step_profile.communication[0].count == 1
    (alone,) = profile(tmp_path, slow, fast, device=1).devices
    assert alone.name == "TPU 1"


def test_the_hosts_of_a_run_are_read_together(tmp_path: Path) -> None:
    for host in ("w-0", "w-1"):
        write(tmp_path, tpu(XLA_Ops=[Ran(DOT, 0, 90)]), host=host)
    step_profile = read_profile(tmp_path)
    assert [device.name for device in step_profile.devices] == ["w-0 TPU 0", "w-1 TPU 0"]
    assert step_profile.operations[0].count == 1


def test_waiting_for_a_copy_is_no_communication(tmp_path: Path) -> None:
    step_profile = profile(tmp_path, tpu(XLA_Ops=[Ran(COPY, 0, 30), Ran(DOT, 30, 90)]))
    assert not step_profile.communication
    assert {operation.kind for operation in step_profile.operations} == {
        "convolution fusion",
        "copy-done",
    }


def test_other_lines_and_planes_are_not_counted(tmp_path: Path) -> None:
    plane = tpu(
        XLA_Ops=[Ran(DOT, 0, 90)],
        XLA_TraceMe=[Ran("barrier-cores", 0, 500)],
        TC_Overlay=[Ran(ADD, 0, 700)],
    )
    sparse = Plane("/device:TPU:0 SparseCore 0", {"XLA Ops": [Ran(ADD, 0, 900)]})
    step_profile = profile(tmp_path, plane, sparse)
    assert len(step_profile.devices) == 1
    assert step_profile.seconds == pytest.approx(90e-6)
