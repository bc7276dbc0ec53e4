"""Every worked example of the chapter runs on eight devices and prints what it promises."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import sampled

CHAPTER = Path(__file__).parents[2] / "examples" / "chapter"
ERROR = r"; error \de-0[678] of the largest entry"
EXACT = r": error \de-0[678] of the largest entry"
TIME = r"; [\d.]+ ms"

# One pattern for each line of the output.
PROMISED = {
    "first_jit_matmul": [
        r"In float32\[8@X,2048@Y\]  W float32\[2048@Y,512\]",
        r"as printed: ShardingTypeError",
        r"Explicit axes: all-reduce ×1" + ERROR,
        r"Auto axes: all-reduce ×1" + ERROR,
    ],
    "sharding_constraint": [
        r"free: none" + ERROR,
        r"constrained: all-reduce ×1" + ERROR,
        r"with_sharding_constraint on Explicit axes: \w*Error",
        r"explicit: all-reduce ×1" + ERROR,
    ],
    "slice_and_average": [r"result \(4,\): all-reduce ×1" + ERROR],
    "collective_matmul": [
        r"plain jit: all-gather ×1" + ERROR,
        r"the chapter's ring: collective-permute ×3" + ERROR,
        r"allgather_matmul: collective-permute ×6" + ERROR,
        r"einsum: collective-permute ×6" + ERROR,
        r"gather-matmul: contracted 'd' of x .* bytes per device each way, Y: 24,576",
        r"the chapter's last product is 4e\+16, past int32's 2e\+09",
    ],
    "problem_1_1_shard_average": [
        r"shard_map: none" + ERROR + TIME,
        r"jit: none" + ERROR + TIME,
    ],
    "problem_1_2_shard_roll": [
        r"shard_map: none; equal to numpy's: True",
        r"rolling the whole array would differ in 20 rows",
    ],
    "problem_2_1_local": [
        r"expert_matmul: none" + ERROR,
        r"an array of \[S, D, F\]: False",
        r"an array of \[E, S, D\]: False",
    ],
    "problem_2_2_jit": [
        r"plain jit: all-gather ×\d, all-reduce ×\d, collective-permute ×1" + ERROR + TIME,
        r"whole on every device: every expert True, every token True",
    ],
    "problem_2_3_exchange": [
        r"whole A: 1024 KiB",
        r"allgather: all-gather ×3, reduce-scatter ×1; temporaries of a device \d{4} KiB",
        r"  even" + EXACT + TIME,
        r"  all to one" + EXACT + TIME,
        r"alltoall: all-gather ×2, all-reduce ×1, all-to-all ×2; temporaries of a device \d{3} KiB",
        r"  even" + EXACT + TIME,
        r"  all to one" + EXACT + TIME,
    ],
    "problem_2_4_top_k": [
        r"tokens per expert: \d+ to \d+",
        r"alltoall with gradients: all-gather ×3, all-reduce ×3, all-to-all ×7, reduce-scatter ×1",
        r"loss 34\.4969, by every expert 34\.4969",
        r"gradient of A" + EXACT,
        r"gradient of W" + EXACT,
        r"gradient of gates" + EXACT,
    ],
    "problem_3_1_allreduce_matmul": [
        r"naive: all-reduce ×1" + ERROR,
        r"tiled psum: all-reduce ×1" + ERROR,
        r"matmul_allreduce: collective-permute ×12" + ERROR,
    ],
    "problem_3_2_reducescatter_matmul": [
        r"plain jit: all-reduce ×1" + ERROR,
        r"psum_scatter: reduce-scatter ×1" + ERROR,
        r"matmul_reducescatter: collective-permute ×6" + ERROR,
        r"bytes sent by the ring in each direction: 24,576 and 24,576",
        r"the minimum is 3/4 of the 65,536 bytes .*, half of it in each direction",
    ],
    "problem_3_3_transformer_block": [
        r"plain jit: all-gather ×1, all-reduce ×1" + ERROR + TIME,
        r"feedforward: collective-permute ×12" + ERROR + TIME,
    ],
    "problem_4_both_directions": [
        r"matmul_allreduce one: bytes sent 98,304" + ERROR + TIME,
        r"matmul_allreduce both: bytes sent 49,152 and 49,152" + ERROR + TIME,
        r"matmul_reducescatter one: bytes sent 49,152" + ERROR + TIME,
        r"matmul_reducescatter both: bytes sent 24,576 and 24,576" + ERROR + TIME,
    ],
}


@pytest.mark.parametrize("name", sampled(PROMISED, [*PROMISED][::2]))
def test_the_example_prints_what_it_promises(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this process: starting JAX anew for each would take most of the time.
    monkeypatch.syspath_prepend(str(CHAPTER))
    runpy.run_path(str(CHAPTER / f"{name}.py"), run_name="__main__")
    _check(capsys.readouterr().out, PROMISED[name])


def test_an_example_runs_as_the_command_in_its_docstring() -> None:
    path = CHAPTER / "problem_1_2_shard_roll.py"
    assert f"\n    python examples/chapter/{path.name}\n" in path.read_text()
    ran = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=True, timeout=300
    )
    _check(ran.stdout, PROMISED[path.stem])


def test_every_example_names_its_command_and_what_to_see() -> None:
    for name in PROMISED:
        text = (CHAPTER / f"{name}.py").read_text()
        assert f"\n    python examples/chapter/{name}.py\n\nWhat to see: " in text


def _check(out: str, patterns: list[str]) -> None:
    lines = out.splitlines()
    assert len(lines) == len(patterns), out
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"
