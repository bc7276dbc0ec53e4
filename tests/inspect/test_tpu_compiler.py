"""The TPU's own compiler: its program for the chapter's matmul, and the communication with it.

The compiler is rarely installed. A stand-in answers like its process with a program written by
hand, so that the communication can be tested everywhere.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from drumline.errors import UserError
from drumline.inspect import communication, estimate
from drumline.inspect.compiling import workers
from drumline.inspect.compiling.workers import TPU_PYTHON, Worker, has_tpu_compiler

INSTALLED = has_tpu_compiler()
"""The check runs before any test sets a stand-in."""


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def chapter() -> tuple[Any, ...]:
    """Return the operands of A[B_X, D_Y] · W[D, F_Y]: 1024×2048×8192."""
    struct: Any = jax.ShapeDtypeStruct
    return (
        struct((1024, 2048), jnp.bfloat16, sharding=P("X", "Y")),
        struct((2048, 8192), jnp.bfloat16, sharding=P(None, "Y")),
    )


@pytest.mark.skipif(
    not INSTALLED, reason=f"needs the TPU's compiler: libtpu on x86_64 Linux, or {TPU_PYTHON}"
)
def test_the_chapters_matmul_becomes_a_ring() -> None:
    report = communication(matmul, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
    assert report.compiled_by == "the TPU's own compiler"
    kinds = [collective for collective in report.collectives for _ in range(collective.count)]
    assert {collective.kind for collective in kinds} == {"collective-permute"}
    assert len(kinds) == 3
    assert all(collective.asynchronous and collective.axes == ("Y",) for collective in kinds)
    cost = estimate(matmul, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
    # A shard of x, and of w.
    assert cost.memory.arguments == 2 * (512 * 512 + 2048 * 2048)
    assert cost.memory.outputs == 2 * 512 * 2048
    assert cost.fits


# A stand-in --------------------------------------------------------------------------------------

ROW = "bf16[512,512]{1,0:T(8,128)(2,1)}"
PART = "bf16[512,2048]{1,0:T(8,128)(2,1)}"
WEIGHTS = "bf16[2048,2048]{1,0:T(8,128)(2,1)}"
PAIRS = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
CYCLES = 60_000


def _hop(number: int, operand: str) -> str:
    return f"""\
  %start.{number} = ({ROW}, {ROW}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) \
collective-permute-start(%{operand}), channel_id={number}, {PAIRS}
  %y.{number} = {PART} fusion(%{operand}, %w), kind=kOutput, calls=%part, \
backend_config={{"estimated_cycles":"{CYCLES}"}}
  %end.{number} = {ROW} collective-permute-done(%start.{number})
"""


RING = f"""\
HloModule jit_product, is_scheduled=true, num_partitions=8

%part (a: bf16[512,512], b: bf16[2048,2048]) -> bf16[512,2048] {{
  %a = {ROW} parameter(0)
  %b = {WEIGHTS} parameter(1)
  %s = {PART} slice(%b), slice={{[0:512], [0:2048]}}
  ROOT %c = {PART} convolution(%a, %s), dim_labels=bf_io->bf
}}

ENTRY %main (x: bf16[512,512], w: bf16[2048,2048]) -> bf16[512,2048] {{
  %x = {ROW} parameter(0)
  %w = {WEIGHTS} parameter(1)
{_hop(1, "x")}{_hop(2, "end.1")}{_hop(3, "end.2")}\
  ROOT %y = {PART} fusion(%end.3, %w), kind=kOutput, calls=%part, \
backend_config={{"estimated_cycles":"{CYCLES}"}}
}}
"""
MEMORY = {"arguments": 9 << 20, "outputs": 2 << 20, "aliased": 0, "temporaries": 5 << 20, "code": 1}
PROTOCOL = """\
import json, os, sys

answers = sys.stdout.buffer
while line := sys.stdin.buffer.readline():
    request = json.loads(line)
    code = sys.stdin.buffer.read(request["length"])
    with open({log!r}, "a") as log:
        entry = dict(request, arguments=sys.argv[1:], begins=code[:4].hex())
        log.write(json.dumps(entry) + "\\n")
    answer, text = {answer!r}, {text!r}.encode()
    {action}
    header = dict(answer, number=request["number"], length=len(text))
    answers.write(json.dumps(header).encode() + b"\\n" + text)
    answers.flush()
"""
StandIn = Callable[..., Path]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Return a function that installs a stand-in for the TPU's Python and returns its request
    log.
    """
    monkeypatch.setattr(workers, "_workers", {})

    def make(answer: dict[str, Any] | None = None, text: str = RING, action: str = "pass") -> Path:
        request_file, python = tmp_path / "requests", tmp_path / "python"
        report = {"memory": MEMORY} if answer is None else answer
        script = PROTOCOL.format(log=str(request_file), answer=report, text=text, action=action)
        python.write_text(f"#!{sys.executable}\n{script}")
        python.chmod(0o755)
        monkeypatch.setenv(TPU_PYTHON, str(python))
        return request_file

    yield make
    workers.stop_workers()


def read_requests(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def error_message(**options: Any) -> str:
    with pytest.raises(UserError) as error_info:
        communication(matmul, *chapter(), mesh="X=2,Y=4", on="v5litepod-8", **options)
    message = str(error_info.value)
    assert "\n" not in message
    return message


def test_a_python_with_the_compiler_is_used(stand_in: StandIn) -> None:
    request_log = stand_in()
    assert has_tpu_compiler()
    report = communication(matmul, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
    assert report.compiled_by == "the TPU's own compiler"
    (request,) = read_requests(request_log)
    assert (request["topology"], request["partitions"]) == ("v5e:2x4", 8)
    coordinates = request["places"]
    assert sorted(coordinates) == sorted([x, y, 0, 0] for x in range(2) for y in range(4))
    for ring in (coordinates[:4], coordinates[4:]):
        for (x, y, *_), (to_x, to_y, *_) in zip(ring, ring[1:] + ring[:1], strict=True):
            assert abs(x - to_x) + abs(y - to_y) == 1, "one link along Y"
    assert Path(request["arguments"][0]) == workers.SCRIPT
    assert request["arguments"][1:] == ["tpu"]
    assert bytes.fromhex(request["begins"]) == b"ML\xefR", "MLIR's bytecode"
    assert len(report.collectives) == 3
    for results in report.collectives:
        assert (results.kind, results.axes, results.sent) == (
            "collective-permute",
            ("Y",),
            512 * 1024,
        )
        assert results.asynchronous
        assert len(results.between) == 1
    assert "overlaps nothing" not in str(report)


def test_the_functions_compiler_options_are_passed_on(stand_in: StandIn) -> None:
    request_log = stand_in()
    compiler_options = {"xla_tpu_enable_sdc_checker": True, "xla_gpu_autotune_level": 0}
    report = jax.jit(matmul, compiler_options=compiler_options)
    communication(report, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
    (request,) = read_requests(request_log)
    assert request["options"] == {"xla_tpu_enable_sdc_checker": True}


def test_the_compilers_schedule_cycles_and_memory_are_used(stand_in: StandIn) -> None:
    stand_in()
    report = estimate(matmul, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
    matmul_seconds = CYCLES / 1.5e9 + 0.3e-6
    permute_seconds = 3e-6 + 512 * 1024 / (4.5e10 * 0.9) + 3e-6
    assert permute_seconds < matmul_seconds
    assert report.seconds == pytest.approx(4 * matmul_seconds)
    assert report.exposed == 0
    assert report.hidden == pytest.approx(3 * permute_seconds)
    assert report.flops == 4 * 2 * 512 * 512 * 2048
    memory = report.memory
    assert (memory.arguments, memory.outputs, memory.temporaries) == (9 << 20, 2 << 20, 5 << 20)
    assert "compiled by the TPU's own compiler" in str(report)


def test_one_process_answers_for_several_programs(stand_in: StandIn) -> None:
    request_log = stand_in()
    for _ in range(3):
        communication(matmul, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
    assert len(read_requests(request_log)) == 3
    assert list(workers._workers) == ["tpu"]


@pytest.mark.parametrize(
    ("on", "topology"),
    [("v6e-8", "v6e:2x4"), ("v5p-16", "v5p:2x2x2"), ("v4-16", "v4:2x2x2"), ("v2-8", "v2:2x2")],
)
def test_slices_have_the_compilers_topology_names(
    on: str, topology: str, stand_in: StandIn
) -> None:
    request_log = stand_in()
    communication(matmul, *chapter(), mesh="X=2,Y=4", on=on)
    assert read_requests(request_log)[0]["topology"] == topology


def test_the_compiler_is_used_only_for_a_slice(stand_in: StandIn) -> None:
    request_log = stand_in()
    report = communication(matmul, *chapter(), mesh="X=2,Y=4", compiler="cpu", on="v5litepod-8")
    assert report.compiled_by.startswith("the CPU backend")
    assert not request_log.exists()
    assert "needs a slice" in _refused_without_slice()


def _refused_without_slice() -> str:
    with pytest.raises(UserError) as error_info:
        communication(matmul, *chapter(), mesh="X=2,Y=4", compiler="tpu")
    return str(error_info.value)


def test_an_error_of_the_compiler_is_reported_by_its_first_line(stand_in: StandIn) -> None:
    stand_in({"error": "RESOURCE_EXHAUSTED: 40 GB of 16 GB hbm\n\nLargest buffers:\n  1. …"}, "")
    message = error_message()
    assert message == "the compiler refuses the program: RESOURCE_EXHAUSTED: 40 GB of 16 GB hbm"


def test_a_process_that_dies_is_reported_and_replaced(
    stand_in: StandIn,
) -> None:
    stand_in(action="os._exit(3)")
    assert error_message() == "the compiler's process ended with 3 while it compiled the program"
    stand_in()
    assert communication(matmul, *chapter(), mesh="X=2,Y=4", on="v5litepod-8").collectives


@pytest.mark.parametrize("size", [4, 400_000])
def test_a_process_that_has_died_before_is_reported(size: int, stand_in: StandIn) -> None:
    stand_in()
    python = Path(os.environ[TPU_PYTHON])
    python.write_text(f"#!{sys.executable}\nraise SystemExit(7)\n")
    worker = Worker([str(python)], ["tpu"], dict(os.environ))
    worker._process.wait()
    assert not worker.alive
    with pytest.raises(UserError, match="ended with 7 while it compiled"):
        worker.compile({"partitions": 1}, b"c" * size)


def test_an_invalid_answer_is_reported(stand_in: StandIn) -> None:
    stand_in(action='answers.write(b"hello\\n"); answers.flush(); continue')
    assert "the compiler's process gave no answer" in error_message()
    stand_in(text="hello")
    assert "the text is not HLO" in error_message()


@pytest.mark.parametrize("mode", [None, 0o644])
def test_a_python_that_cannot_be_run_is_reported(
    mode: int | None, stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in()
    python = tmp_path / "no-python"
    if mode is not None:
        python.write_text("")
        python.chmod(mode)
    monkeypatch.setenv(TPU_PYTHON, str(python))
    message = error_message()
    assert str(python) in message
    assert TPU_PYTHON in message


def test_the_error_without_the_compiler_explains_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TPU_PYTHON, raising=False)
    monkeypatch.setattr("drumline.inspect.compiling.programs.has_tpu_compiler", lambda: False)
    message = error_message(compiler="tpu")
    assert "is not installed here: pip install" in message
    assert TPU_PYTHON in message
