"""The TPU's own compiler: what it makes of the chapter's product, and the way to it and back.

It is rarely installed. A stand-in that answers as its process does, with a program written by hand,
lets the whole way be tested everywhere.
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
"""Asked before any test names a stand-in."""


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def chapter() -> tuple[Any, ...]:
    """A[B_X, D_Y] · W[D, F_Y]: 1024×2048×8192."""
    struct: Any = jax.ShapeDtypeStruct
    return (
        struct((1024, 2048), jnp.bfloat16, sharding=P("X", "Y")),
        struct((2048, 8192), jnp.bfloat16, sharding=P(None, "Y")),
    )


@pytest.mark.skipif(
    not INSTALLED, reason=f"needs the TPU's compiler: libtpu on x86_64 Linux, or {TPU_PYTHON}"
)
def test_it_makes_a_ring_of_the_chapter_s_matmul() -> None:
    report = communication(product, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
    assert report.compiled_by == "the TPU's own compiler"
    kinds = [one for one in report.collectives for _ in range(one.count)]
    assert {one.kind for one in kinds} == {"collective-permute"}
    assert len(kinds) == 3
    assert all(one.asynchronous and one.axes == ("Y",) for one in kinds)
    cost = estimate(product, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
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
    with open({asked!r}, "a") as asked:
        told = dict(request, arguments=sys.argv[1:], begins=code[:4].hex())
        asked.write(json.dumps(told) + "\\n")
    answer, text = {answer!r}, {text!r}.encode()
    {instead}
    header = dict(answer, number=request["number"], length=len(text))
    answers.write(json.dumps(header).encode() + b"\\n" + text)
    answers.flush()
"""
StandIn = Callable[..., Path]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Makes a Python that has the TPU's compiler, or so it says; tells where it notes requests."""
    monkeypatch.setattr(workers, "_workers", {})

    def make(answer: dict[str, Any] | None = None, text: str = RING, instead: str = "pass") -> Path:
        request_file, python = tmp_path / "asked", tmp_path / "python"
        report = {"memory": MEMORY} if answer is None else answer
        script = PROTOCOL.format(asked=str(request_file), answer=report, text=text, instead=instead)
        python.write_text(f"#!{sys.executable}\n{script}")
        python.chmod(0o755)
        monkeypatch.setenv(TPU_PYTHON, str(python))
        return request_file

    yield make
    workers.stop_workers()


def read_requests(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def refusal(**how: Any) -> str:
    with pytest.raises(UserError) as refused:
        communication(product, *chapter(), mesh="X=2,Y=4", on="v5litepod-8", **how)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_a_python_that_has_it_is_asked(stand_in: StandIn) -> None:
    notes = stand_in()
    assert has_tpu_compiler()
    report = communication(product, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
    assert report.compiled_by == "the TPU's own compiler"
    (request,) = read_requests(notes)
    assert (request["topology"], request["partitions"]) == ("v5e:2x4", 8)
    places = request["places"]
    assert sorted(places) == sorted([x, y, 0, 0] for x in range(2) for y in range(4))
    for ring in (places[:4], places[4:]):
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


def test_it_is_reported_what_the_function_tells_its_compiler(stand_in: StandIn) -> None:
    notes = stand_in()
    own = {"xla_tpu_enable_sdc_checker": True, "xla_gpu_autotune_level": 0}
    report = jax.jit(product, compiler_options=own)
    communication(report, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
    (request,) = read_requests(notes)
    assert request["options"] == {"xla_tpu_enable_sdc_checker": True}


def test_its_schedule_cycles_and_memory_are_what_counts(stand_in: StandIn) -> None:
    stand_in()
    report = estimate(product, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
    part = CYCLES / 1.5e9 + 0.3e-6
    hop = 3e-6 + 512 * 1024 / (4.5e10 * 0.9) + 3e-6
    assert hop < part
    assert report.seconds == pytest.approx(4 * part)
    assert report.exposed == 0
    assert report.hidden == pytest.approx(3 * hop)
    assert report.flops == 4 * 2 * 512 * 512 * 2048
    memory = report.memory
    assert (memory.arguments, memory.outputs, memory.temporaries) == (9 << 20, 2 << 20, 5 << 20)
    assert "compiled by the TPU's own compiler" in str(report)


def test_one_process_answers_for_several_programs(stand_in: StandIn) -> None:
    notes = stand_in()
    for _ in range(3):
        communication(product, *chapter(), mesh="X=2,Y=4", on="v5litepod-8")
    assert len(read_requests(notes)) == 3
    assert list(workers._workers) == ["tpu"]


@pytest.mark.parametrize(
    ("on", "topology"),
    [("v6e-8", "v6e:2x4"), ("v5p-16", "v5p:2x2x2"), ("v4-16", "v4:2x2x2"), ("v2-8", "v2:2x2")],
)
def test_slices_by_the_names_that_the_compiler_has(
    on: str, topology: str, stand_in: StandIn
) -> None:
    notes = stand_in()
    communication(product, *chapter(), mesh="X=2,Y=4", on=on)
    assert read_requests(notes)[0]["topology"] == topology


def test_it_is_asked_only_where_a_slice_is_named(stand_in: StandIn) -> None:
    notes = stand_in()
    report = communication(product, *chapter(), mesh="X=2,Y=4", compiler="cpu", on="v5litepod-8")
    assert report.compiled_by.startswith("the CPU backend")
    assert not notes.exists()
    assert "needs a slice" in _refused_without_slice()


def _refused_without_slice() -> str:
    with pytest.raises(UserError) as refused:
        communication(product, *chapter(), mesh="X=2,Y=4", compiler="tpu")
    return str(refused.value)


def test_what_the_compiler_refuses_is_reported_in_its_first_line(stand_in: StandIn) -> None:
    stand_in({"error": "RESOURCE_EXHAUSTED: 40 GB of 16 GB hbm\n\nLargest buffers:\n  1. …"}, "")
    message = refusal()
    assert message == "the compiler refuses the program: RESOURCE_EXHAUSTED: 40 GB of 16 GB hbm"


def test_a_process_that_dies_is_reported_and_another_takes_the_next_program(
    stand_in: StandIn,
) -> None:
    stand_in(instead="os._exit(3)")
    assert refusal() == "the compiler's process ended with 3 while it compiled the program"
    stand_in()
    assert communication(product, *chapter(), mesh="X=2,Y=4", on="v5litepod-8").collectives


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


def test_an_answer_that_is_none_is_reported(stand_in: StandIn) -> None:
    stand_in(instead='answers.write(b"hello\\n"); answers.flush(); continue')
    assert "the compiler's process gave no answer" in refusal()
    stand_in(text="hello")
    assert "the text is not HLO" in refusal()


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
    message = refusal()
    assert str(python) in message
    assert TPU_PYTHON in message


def test_without_it_the_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TPU_PYTHON, raising=False)
    monkeypatch.setattr("drumline.inspect.compiling.programs.has_tpu_compiler", lambda: False)
    message = refusal(compiler="tpu")
    assert "is not installed here: pip install" in message
    assert TPU_PYTHON in message
