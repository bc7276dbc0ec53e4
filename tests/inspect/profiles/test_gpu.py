"""Traces of GPUs with known answers: parallel streams, NCCL, command buffers."""

# mypy: allow-untyped-calls

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from drumline.inspect.profiles import Profile, read_profile
from drumline.inspect.profiles.metadata import CompiledInstruction, CompiledProgram
from drumline.inspect.profiles.reading import collective_kind, named_operation
from tests.inspect.profiles.traces import Plane, Stats, TraceEvent, write

NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, start: float, end: float, instruction: str = "") -> TraceEvent:
    stats: Stats = {"hlo_op": instruction or name, "hlo_module": "jit_step", "correlation_id": 7}
    return TraceEvent(name, start, end, stats)


def profile(folder: Path, **streams: list[TraceEvent]) -> Profile:
    lines = {
        f"Stream #{stream_number}(Compute)": events
        for stream_number, events in enumerate(streams.values())
    }
    return read_profile(write(folder, Plane("/device:GPU:0", lines)))


def test_another_stream_hides_a_collective_while_it_computes(tmp_path: Path) -> None:
    """NCCL runs from 10 to 60. The other stream computes until 30 and again from 50."""
    step_profile = profile(
        tmp_path,
        compute=[kernel("gemm", 0, 30), kernel("gemm", 50, 100)],
        nccl=[kernel(NCCL, 10, 60, "all-gather-start.1")],
    )
    (gather,) = step_profile.communication
    assert gather.kind == "all-gather"
    assert gather.hidden == pytest.approx(30e-6)
    assert gather.exposed == pytest.approx(20e-6)
    assert step_profile.idle == pytest.approx(0, abs=1e-9)


def test_a_copy_from_the_host_hides_nothing(tmp_path: Path) -> None:
    step_profile = profile(
        tmp_path,
        copy=[TraceEvent("MemcpyH2D", 0, 40)],
        nccl=[kernel(NCCL, 0, 50, "all-gather-start")],
    )
    assert step_profile.exposed == pytest.approx(50e-6)
    assert step_profile.computing == 0
    assert step_profile.operations[0].name == "MemcpyH2D"


def test_two_collectives_at_once_are_exposed_once(tmp_path: Path) -> None:
    reduce = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    step_profile = profile(tmp_path, first=[kernel(NCCL, 0, 50)], second=[kernel(reduce, 20, 70)])
    assert step_profile.exposed == pytest.approx(70e-6)
    assert [row.exposed for row in step_profile.communication] == [
        pytest.approx(50e-6),
        pytest.approx(20e-6),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (NCCL, "all-gather"),
        (
            "ncclDevKernel_ReduceScatter_Sum_bf16_RING_SIMPLE(ncclDevKernelArgsStorage<4096ul>)",
            "reduce-scatter",
        ),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send-recv"),
        (
            "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "collective-broadcast",
        ),
        ("psum_invariant.3", "all-reduce"),
        ("psum_scatter.3", "reduce-scatter"),
        ("reduce_scatter.7", "reduce-scatter"),
        ("all-reduce-scatter fusion", "reduce-scatter"),
        ("ppermute.3", "collective-permute"),
        ("collective-permute-done.2", "collective-permute"),
        ("ragged_all_to_all.1", "all-to-all"),
        ("recv-done", "send-recv"),
        ("reduce.3", None),
        ("all_gather_like_sorting", "all-gather"),
        ("psummary", None),
        ("broadcast_in_dim.1", None),
        ("sender", None),
    ],
)
def test_collectives_are_recognized_by_all_their_names(name: str, kind: str | None) -> None:
    assert collective_kind(name) == kind


def looped(x: Any, w: Any) -> Any:
    x = lax.fori_loop(0, 5, lambda _, carry: jnp.sin(carry @ w), x)
    return jnp.sort(x, axis=0)  # once


def test_runs_are_counted_by_operations_that_run_once_per_program(tmp_path: Path) -> None:
    """The trace contains the program, as the profiler writes it, and no markers of steps."""
    compiled = jax.jit(looped).lower(jnp.ones((8, 8)), jnp.ones((8, 8))).compile()
    executable: Any = compiled.runtime_executable()
    (module,) = executable.hlo_modules()
    text = module.to_string()
    sort = re.search(r"%(\S+) = \S+ sort\(", text)
    dot = re.search(r"%(\S+) = \S+ dot\(", text)
    assert sort
    assert dot
    program = module.as_serialized_hlo_module_proto()
    events = []
    for run in range(3):
        run_start = 100.0 * run
        events += [(dot[1], run_start + 10 * trip, run_start + 10 * trip + 8) for trip in range(5)]
        events.append((sort[1], run_start + 60, run_start + 90))
    program_number = -7  # one place of a trace writes it signed, the other unsigned
    stats: Stats = {"hlo_module": "jit_by_number", "program_id": program_number}
    kernels = [
        TraceEvent(name, begin, end, {"hlo_op": name, **stats}) for name, begin, end in events
    ]
    programs = Plane(
        "/host:metadata",
        {},
        {"jit_looped": {"Hlo Proto": hlo_proto(program), "program_id": program_number}},
    )
    step_profile = read_profile(
        write(tmp_path, programs, Plane("/device:GPU:0", {"Stream #1": kernels}))
    )
    assert (step_profile.steps, step_profile.steps_from) == (3, "runs of jit_by_number")
    kinds = {
        row.kind: (row.count, row.source.rpartition("/")[2]) for row in step_profile.operations
    }
    this_file = Path(__file__)
    once_line = 1 + next(
        n for n, line in enumerate(this_file.read_text().splitlines()) if line.endswith("# once")
    )
    assert kinds == {
        "dot": (5, f"{this_file.name}:{once_line - 1}"),
        "sort": (1, f"{this_file.name}:{once_line}"),
    }


def hlo_proto(module: bytes) -> bytes:
    """Return a message with a module as its first field."""
    length, size = len(module), b""
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return b"\x0a" + size + bytes([length]) + module


def test_the_program_overrides_the_kind_guessed_from_a_name() -> None:
    """A fusion may have a collective's name, and a permute may run as a copy between devices."""
    program = CompiledProgram(
        "jit_step",
        {
            "psum_fusion": CompiledInstruction("fusion", "a.py:1", True),
            "copy-like.1": CompiledInstruction("collective-permute-start", "a.py:2", True),
            "gemm_fusion_dot_7": CompiledInstruction("fusion", "a.py:3", False),
            "all-gather-start.1": CompiledInstruction("all-gather-start", "a.py:4", True),
        },
    )
    operations = [
        named_operation(event, instruction, "jit_step", program)
        for event, instruction in [
            ("psum_fusion", "psum_fusion"),
            ("MemcpyP2P", "copy-like.1"),
            ("gemm_fusion_dot_7", "command_buffer_11"),
            (NCCL, "command_buffer_11"),
        ]
    ]
    assert [row.kind for row in operations] == [
        "fusion",
        "collective-permute",
        "fusion",
        "all-gather",
    ]
    assert [row.source for row in operations] == ["a.py:1", "a.py:2", "a.py:3", "a.py:4"]
